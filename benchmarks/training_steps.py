"""Milliseconds of one training step at batch 128, per network, when many networks are trained at once.

    python benchmarks/training_steps.py lenet resnet18 vgg11 densenet121

By the slope between trainings of 2 and 12 epochs, so that drawing, choosing an engine and capturing do not count. Large
networks are compiled when minutes of training lie before them; `--compiled` does so at once.
"""

import argparse
import time

import torch

from biascope.ensembles import compiled, train_ensemble, work
from ensembles import training

JOBS = {  # networks, examples each, precision on a GPU
    "lenet": (544, 1280, "tf32"),
    "resnet18": (8, 2560, "bf16"),
    "vgg11": (8, 2560, "bf16"),
    "densenet121": (8, 2560, "bf16"),
}
BATCH = 128


def measure(net: str, networks: int, n: int, precision: str, device: str) -> str:
    """A first training pays for what is made once; then a short and a long one are timed."""
    tasks, _, initialiser = training(net, networks, n, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(epochs: int) -> tuple[float, str]:
        wait()
        start = time.perf_counter()
        done = train_ensemble(
            initialiser,
            tasks,
            epochs=epochs,
            batch_size=BATCH,
            lr=0.05,
            device=device,
            precision=precision,
            keep=False,
            schedule="constant",
        )
        wait()
        return time.perf_counter() - start, done.engine

    seconds(2)
    (short, _), (long, engine) = seconds(2), seconds(12)
    each = 1e3 * (long - short) / (10 * -(-n // BATCH)) / networks
    return (
        f"{net:10s} {networks:4d} networks, {precision}, engine {engine}: {each:.4f} ms a step and network "
        f"(2 epochs {short:.2f} s, 12 epochs {long:.2f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="+", choices=list(JOBS))
    parser.add_argument("--networks", type=int, help="so many networks instead")
    parser.add_argument("--examples", type=int, help="so many examples each instead")
    parser.add_argument("--precision", help="float32, tf32, fp16 or bf16 instead")
    parser.add_argument("--compiled", action="store_true", help="compile networks whose steps are captured one by one")
    args = parser.parse_args()
    if args.compiled:
        compiled.TRAINING_PAYS, work.LONG = 0.0, 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU", torch.__version__)
    for net in args.nets:
        networks, n, precision = JOBS[net]
        used = (args.precision or precision) if device == "cuda" else "float32"
        print(measure(net, args.networks or networks, args.examples or n, used, device), flush=True)


if __name__ == "__main__":
    main()
