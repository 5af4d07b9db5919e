"""What is trained, on what and how: everything that the engines of training share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope.ensembles.initialisers import Initialiser
from biascope.ensembles.networks import Networks
from biascope.ensembles.precision import Precision
from biascope.support.arguments import as_number, check_count, check_number
from biascope.support.errors import InputError
from biascope.support.inputs import is_finite
from biascope.support.seeds import generator
from biascope.support.signatures import checked

Task = tuple[Tensor, Tensor]  # inputs [n, ...] and labels [n] (classes) or targets [n, ...]
LossFunction = Callable[[Tensor, Tensor], Tensor]  # outputs [b, c], labels [b] -> a scalar, mean over the batch
Loss = Literal["cross-entropy", "bce", "mse"] | LossFunction
Schedule = Literal["linear", "constant"] | Callable[[float], float]
LONG = 10_000  # steps of all networks together
SCHEDULES: dict[str, Callable[[float], float]] = {"linear": lambda t: 1.0 - t, "constant": lambda t: 1.0}
LOSSES: dict[str, LossFunction] = {
    "cross-entropy": F.cross_entropy,
    "bce": lambda out, y: F.binary_cross_entropy_with_logits(out.reshape(len(out), -1)[:, 0], y.to(out.dtype)),
    "mse": lambda out, y: F.mse_loss(out, y.to(out.dtype).reshape(out.shape)),
}


@dataclass(frozen=True)
class SGD:
    """Hyper-parameters; the defaults are the synthetic protocol of the NAD paper (with its public code's clipping).

    Example:
        >>> SGD(epochs=1, batch_size=2, lr=1.0).rates(n=4)
        [1.0, 0.5]
    """

    epochs: int = 20
    batch_size: int = 128
    lr: float = 0.5
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = 0.5
    schedule: Schedule = "linear"

    def __post_init__(self) -> None:
        check_count(self.epochs, "epochs")
        check_count(self.batch_size, "batch_size")
        check_number(self.lr, "lr", above=0)
        check_number(self.momentum, "momentum", least=0)
        check_number(self.weight_decay, "weight_decay", least=0)
        if self.momentum >= 1 or not (self.clip_norm is None or as_number(self.clip_norm, "clip_norm") > 0):
            raise InputError(f"momentum={self.momentum} must be below 1, clip_norm={self.clip_norm} above 0 or None")

    @checked
    def rates(self, n: int) -> list[float]:
        """Learning rate of every step, for n examples; linear: lr (1 - step / steps)."""
        steps = self.epochs * math.ceil(n / self.batch_size)
        shape = self.schedule if callable(self.schedule) else SCHEDULES[self.schedule]
        return [self.lr * shape(step / steps) for step in range(steps)]


@dataclass(frozen=True)
class Work:
    """Everything an engine of training needs to know."""

    initialiser: Initialiser
    tasks: Sequence[Task]
    sgd: SGD
    loss: LossFunction
    seed: int
    device: torch.device
    dtype: torch.dtype | None
    precision: Precision

    @property
    def is_long(self) -> bool:
        """Are there so many steps that a search for the fastest algorithms pays?"""
        return len(self.tasks) * len(self.sgd.rates(len(self.tasks[0][0]))) >= LONG

    def start(self, indices: range) -> Networks:
        """The untrained networks."""
        return self.initialiser.draw(self.seed, indices.start, indices.stop, self.device, self.dtype)

    def load(self, indices: range, tasks: Sequence[Task] | None = None) -> Task:
        """Inputs [T, n, ...] and labels [T, n] of some tasks, on the device."""
        found = [(self.tasks if tasks is None else tasks)[i] for i in indices]
        kinds = {(tuple(x.shape), tuple(y.shape), str(x.dtype), str(y.dtype)) for x, y in found}
        if len(kinds) > 1:
            raise InputError(f"tasks trained together must be of one shape and type, got {sorted(kinds)}; use 'loop'")
        x, y = (torch.stack([pair[part] for pair in found]).to(self.device) for part in (0, 1))
        if len(x[0]) != len(y[0]) or not len(x[0]):
            raise InputError(f"a task has {len(x[0])} inputs and {len(y[0])} labels")
        for what, part in (("inputs", x), ("labels", y)):
            if part.is_floating_point() and not is_finite(part):
                raise InputError(f"the {what} of a task, {indices.start} to {indices.stop - 1}, hold NaN or infinity")
        return (x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x), y

    def order(self, indices: range, epoch: int, n: int) -> Tensor:
        """Order of the examples in one epoch, [T, n]."""
        return torch.stack([data_order(self.seed, i, epoch, n) for i in indices]).to(self.device)


@checked
def data_order(seed: int, network: int, epoch: int, n: int) -> Tensor:
    """The permutation [n] in which a network sees its examples in an epoch.

    Example:
        >>> sorted(data_order(0, 0, 0, 4).tolist())
        [0, 1, 2, 3]
    """
    return torch.randperm(n, generator=generator(seed, "order", network, epoch), device="cpu")
