"""What rounding does to training: the same networks, data and order in several precisions.

    python benchmarks/training_precision.py densenet121 --precision bf16 tf32

Networks learn D(v) (see `biascope run nad/fig1`) for four Fourier directions of low frequency, some of which are learnt
in part: accuracies near 1 or at chance would not tell. Before training, the gradient of a first batch is compared with
the one in float32, and with that of a second batch, which is the noise that SGD has anyway. The errors of the two
batches' gradients are compared as well: what they have in common is bias, the rest is noise.
"""

import argparse
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope.data.fourier import dft_basis
from biascope.ensembles import Precision, arithmetic, record, train_ensemble
from biascope_papers.nad.directional import DirectionalTasks, Protocol, architecture

BINS = [(0, 2), (2, 0), (0, 4), (4, 0)]


def gradient(net: torch.nn.Module, task: tuple[Tensor, Tensor], batch: slice, precision: Precision) -> Tensor:
    """Of the loss on a batch, in training mode, [k] in float64."""
    x, y = task[0][batch], task[1][batch]
    with arithmetic(x.device, precision):
        loss = F.cross_entropy(net(x).float(), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]).double()


def rounding(net: torch.nn.Module, task: tuple[Tensor, Tensor], precision: Precision) -> str:
    batches = slice(0, 128), slice(128, 256)
    exact, found = ([gradient(net, task, batch, p) for batch in batches] for p in ("float32", precision))  # type: ignore[arg-type]
    errors = [a - b for a, b in zip(found, exact)]
    return (
        f"gradient of a batch off by {float(errors[0].norm() / exact[0].norm()):.4f} of its norm, cosine of two "
        f"batches' errors {float(F.cosine_similarity(*errors, dim=0)):.3f}, of their gradients "
        f"{float(F.cosine_similarity(*exact, dim=0)):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("net")
    parser.add_argument("--precision", nargs="+", default=["bf16", "tf32"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--examples", type=int, default=10_000)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    basis = dft_basis((32, 32)).part("re")
    place = {tuple(pair): i for i, pair in enumerate(basis.bins.tolist())}
    vectors, protocol = basis.vectors[[place[pair] for pair in BINS]], Protocol()
    tasks, test = (DirectionalTasks(vectors, args.examples, protocol, (0, part), device) for part in ("train", "test"))
    initialiser = record(architecture(args.net, 32))
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU", torch.__version__, args.net, flush=True)
    for precision in args.precision if device == "cuda" else ["float32"]:
        net = initialiser.draw(0, 0, 1, device).module(0).train()
        print(f"{precision}: {rounding(net, tasks[0], precision)}", flush=True)
        begin = time.perf_counter()
        done = train_ensemble(
            initialiser, tasks, test=test, epochs=args.epochs, device=device, precision=precision, keep=False
        )
        accuracies = ", ".join(f"{pair} {value:.4f}" for pair, value in zip(BINS, done.test_accuracy.tolist()))
        print(
            f"{precision}: test accuracy {accuracies}; training {done.train_accuracy.mean():.4f}; "
            f"loss of the last epoch {done.losses[:, -done.losses.shape[1] // args.epochs :].mean():.4f}; "
            f"{time.perf_counter() - begin:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
