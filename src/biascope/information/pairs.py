"""Pairs of samples: what is accepted, how they are split and drawn; the curve of a training on them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from biascope.support.errors import InputError
from biascope.support.seeds import generator
from biascope.support.tables import one_line


def is_discrete(values: Tensor) -> bool:
    """Whether a tensor holds labels (integers or booleans) rather than numbers."""
    return not values.dtype.is_floating_point


def checked_pairs(x: Tensor, y: Tensor, least: int, why: str) -> tuple[Tensor, Tensor]:
    """x and y without gradients, after every check that does not depend on the estimator."""
    if not (x.numel() and y.numel() and x.dim() and y.dim()) or (len(x), x.device) != (len(y), y.device):
        shapes = f"x is {list(x.shape)} on {x.device}, y is {list(y.shape)} on {y.device}"
        raise InputError(f"{shapes}: need [n, ...] with one n, at least one feature, and one device for both")
    if len(x) < least:
        raise InputError(f"{len(x)} pairs are too few: {why} at least {least}")
    for name, values in (("x", x), ("y", y)):
        if is_discrete(values) and (values[0].numel() > 1 or len(torch.unique(values)) > max(2, len(x) // 4)):
            fix = f"one per sample, of which many are equal; pass {name}.float() if they are numbers"
            raise InputError(f"{name} is {values.dtype} {list(values.shape)}: integers are read as labels, {fix}")
        bad = ~torch.isfinite(values).reshape(len(values), -1).all(1)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            raise InputError(f"{name} has NaN or infinite values in {int(bad.sum())} rows, first in row {first}")
    return x.detach(), y.detach()


def split_pairs(n: int, held_out: float, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """A seeded shuffle of 0..n-1 cut in three: to train on, to choose the step (half of the last), to report from."""
    if not 0 < held_out < 0.6:
        raise InputError(f"held_out is the share of pairs kept for the reported number, in (0, 0.6); got {held_out}")
    order = torch.randperm(n, generator=generator(seed, "split"), device="cpu").to(device)
    last = max(1, round(n * held_out))
    middle = max(1, last // 2)
    return torch.split(order, [n - last - middle, middle, last])


@dataclass(frozen=True)
class Training:
    """The critic at its best validation value, and the curve [k] at `steps` [k]."""

    critic: nn.Module
    curve: Tensor
    steps: Tensor
    best: int
    __repr__ = one_line

    def still_rising(self) -> bool:
        """Whether the last fifth of the curve lies above the fifth before by more than noise and 2 %."""
        if (m := len(self.curve) // 5) < 2:
            return False
        before, last = self.curve[-2 * m : -m], self.curve[-m:]
        rise = float(last.mean() - before.mean())
        noise = math.sqrt(float(before.var() + last.var()) / m)
        return rise > max(2 * noise, 0.01, 0.02 * abs(float(last.mean())))

    def fell(self) -> float:
        """How far the last fifth of the curve lies below its best fifth: overfitting, where it is large."""
        if (m := len(self.curve) // 5) < 2:
            return 0.0
        means = self.curve.unfold(0, m, 1).mean(1)
        return float(means.max() - means[-1])


def batches(n: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Endless batches of distinct positions: every epoch is a new shuffle, the rest that fills no batch is left out."""
    while True:
        order = torch.randperm(n, generator=rng, device=rng.device)
        yield from torch.split(order[: n - n % size], size)
