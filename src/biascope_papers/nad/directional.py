"""One network per direction: the trainings behind most figures of the paper, with its protocol for synthetic data.

SGD, 20 epochs, batches of 128, learning rate falling linearly from 0.5 in every step, no regularisation, the gradient
clipped to norm 0.5 (only the public code says so). Directions are trained in chunks; each is on disk when it is done.
`gap="full"` puts the classes at +-eps v, as the text says; `gap="half"` at +-eps/2 v, as the public generator does. The
published accuracies fit the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from biascope import InputError, nets
from biascope.ensembles import record, train_ensemble
from biascope.studies import Run
from biascope.studies.own_networks import own_classifier, own_factory
from biascope.support import derive, generator

Array = np.ndarray[Any, Any]
SMALL = 2_000_000  # parameters; smaller networks are trained side by side on a GPU, larger ones one by one
ISOTROPIC = ("logreg", "mlp")  # networks without a preferred direction: controls

# what makes a training small: a smoke run has a strong signal on tiny images (eps and sigma chosen so that something
# is learnt in 32 steps) and shows only that everything works; its verdict says nothing about the paper
SMOKE = {"image_size": 16, "n": 256, "n_test": 256, "eps": 8.0, "sigma": 1.0, "epochs": 16}
LAPTOP = {"n": 4000, "n_test": 2000}

# options that many figures share
Net = Annotated[str, "architecture: a name of `biascope nets`, or your own as module:factory or script.py:factory"]
Nets = Annotated[tuple[str, ...], "architectures"]
Side = Annotated[int, "side of the grey input image"]
Width = Annotated[int, "channels (growth, hidden units) instead of the published ones; 0: published"]
Samples = Annotated[int, "training samples per direction"]
TestSamples = Annotated[int, "test samples per direction"]
Sigma = Annotated[float, "noise level"]
Eps = Annotated[float, "signal along v"]
Offset = Annotated[Literal["half", "full"], "classes at +-eps/2 v (published code) or at +-eps v (text)"]
Epochs = Annotated[int, "passes over the data"]
Chunk = Annotated[int, "directions per resumable piece; 0: by network and device"]
Arithmetic = Annotated[
    Literal["auto", "float32", "tf32", "bf16"], "on CUDA; auto: tf32 for small networks, bf16 for large ones"
]


@dataclass(frozen=True)
class Protocol:
    """D(v) and the training on it; the defaults are those of the paper and its public code."""

    n: Samples = 10_000
    n_test: TestSamples = 10_000
    sigma: Sigma = 3.0
    eps: Eps = 1.0
    gap: Offset = "full"
    epochs: Epochs = 20
    batch_size: Annotated[int, "examples per step"] = 128
    lr: Annotated[float, "first learning rate"] = 0.5
    clip_norm: Annotated[float, "largest norm of a gradient; 0: no clipping"] = 0.5
    precision: Arithmetic = "auto"
    chunk: Chunk = 0

    def __str__(self) -> str:
        return (
            f"{self.n} training samples, {self.epochs} epochs, sigma = {self.sigma:g}, eps = {self.eps:g}, "
            f"classes at +-{'eps/2' if self.gap == 'half' else 'eps'} v" + ("" if self.clip_norm else ", no clipping")
        )


PAPER = Protocol()
LITTLE_NOISE = Protocol(sigma=0.1)  # every direction is learnt; the level is not in the paper


@dataclass(frozen=True)
class Trained:
    """What became of the networks, one entry per direction: accuracies [k], and the loss of every batch [k, steps]."""

    test: Array
    train: Array
    losses: Array = field(repr=False)


class DirectionalTasks(Sequence[tuple[Tensor, Tensor]]):
    """D(v) for each of k directions, drawn on the device whenever it is asked for: (x [n, 1, side, side], y [n]).

    Labels 0, 1, 0, 1, ...: exactly balanced. Item i depends on the generator's path and i alone.
    """

    def __init__(
        self, directions: Tensor, n: int, protocol: Protocol, seed: tuple[int, *tuple[object, ...]], device: str = "cpu"
    ) -> None:
        if directions.dim() != 3:
            raise InputError(f"directions must be [k, side, side], got {list(directions.shape)}")
        flat = directions.to(device).flatten(1)
        self.directions = (flat / flat.norm(dim=1, keepdim=True)).to(torch.float32)
        self.shape, self.n, self.protocol = directions.shape[1:], n, protocol
        self.seed, self.device = seed, device

    def __len__(self) -> int:
        return len(self.directions)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = torch.arange(self.n, device=self.device) % 2
        x = draw_inputs(y, self.directions[i], self.protocol, generator(*self.seed, i, device=self.device))
        return x.view(self.n, 1, *self.shape), y


def draw_inputs(y: Tensor, v: Tensor, protocol: Protocol, rng: torch.Generator) -> Tensor:
    """Inputs [n, D] of D(v) for labels y [n] in {0, 1} and a unit vector v [D], on the device of v."""
    offset = (protocol.eps if protocol.gap == "full" else protocol.eps / 2) * (2 * y - 1)
    x = torch.randn(len(y), len(v), generator=rng, device=v.device, dtype=v.dtype).mul_(protocol.sigma)
    for _ in range(2):  # rounding leaves a little noise along v; the second time takes it out
        x = torch.addr(x, offset - (x * v).sum(1), v)
    return x


def architecture(
    net: str, side: int, channels: int = 1, outputs: int = 2, width: int = 0, **options: Any
) -> Callable[[], nn.Module]:
    """A factory for images [channels, side, side]; `width` replaces the published width.

    An own network (`module:factory`) is tried out on one image: it needs the shape and the outputs that are asked for.
    """
    if ":" in net:
        if width:
            raise InputError(
                f"width = {width} is for networks of the registry, and {net} would not get it: leave width at 0 "
                "(--width 0) and set it in the factory"
            )
        # what needs one output differentiates it, and says itself what to do with more
        return own_classifier(net, (channels, side, side), outputs) if outputs > 1 else own_factory(net)
    known = nets.info(net)
    options = {**known.options_for((channels, side, side)), "outputs": outputs, **options}
    if width:
        names = [name for name in ("width", "growth", "hidden") if name in known.defaults]
        if not names or net.startswith("lenet"):
            raise InputError(f"{net} has no width to change; leave width at 0")
        options[names[0]] = (width,) * len(known.defaults["hidden"]) if names[0] == "hidden" else width
    return lambda: nets.build(net, **options)


def train_directions(
    run: Run,
    name: str,
    factory: Callable[[], nn.Module],
    directions: Tensor,
    protocol: Protocol,
    *,
    keep_losses: bool = False,
) -> Trained:
    """Train a network on D(v) for each direction [k, side, side]; resumable, the pieces are stored under `name`."""
    initialiser = record(factory)
    small = sum(p.numel() for p in initialiser.template.parameters()) <= SMALL
    cuda = torch.device(run.device).type == "cuda"
    chunk = protocol.chunk or (256 if small and cuda else 8)
    engine: Any = "auto" if cuda else "loop"  # on the CPU the two ways differ by less than a pilot costs

    def piece(start: int) -> dict[str, Any]:
        own, seed = directions[start : start + chunk], derive(run.seed, name, start)
        done = train_ensemble(
            initialiser,
            DirectionalTasks(own, protocol.n, protocol, (seed, "train"), run.device),
            test=DirectionalTasks(own, protocol.n_test, protocol, (seed, "test"), run.device),
            epochs=protocol.epochs,
            batch_size=protocol.batch_size,
            lr=protocol.lr,
            clip_norm=protocol.clip_norm or None,
            seed=seed,
            device=run.device,
            engine=engine,
            precision=resolve_precision(protocol.precision, run.device, small),
            keep=False,
        )
        run.log(piece=f"{name} {start}", seconds=done.seconds, engine=done.engine)
        found = {"test": done.test_accuracy, "train": done.train_accuracy, "engine": done.engine}
        return {**found, "losses": done.losses} if keep_losses else found

    pieces, start = list[dict[str, Any]](), 0
    while start < len(directions):  # a stored piece goes as far as it goes: its chunk may be that of another device
        pieces.append(run.cached(f"{name} {start}", partial(piece, start)))
        engine = pieces[-1]["engine"]  # chosen by a pilot on the first piece, then kept
        start += len(pieces[-1]["test"])

    def joined(key: str) -> Array:
        return torch.cat([each[key] for each in pieces]).double().numpy()

    return Trained(joined("test"), joined("train"), joined("losses") if keep_losses else np.empty(0))


def resolve_precision(asked: str, device: str, small: bool) -> Any:
    """Arithmetic for "auto": float32 on the CPU; on CUDA tf32 for small networks and bf16 for large ones."""
    if torch.device(device).type != "cuda":
        return "float32"
    return ("tf32" if small else "bf16") if asked == "auto" else asked
