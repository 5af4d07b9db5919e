"""Two-dimensional tasks on the square [-1, 1]^2: yin-yang and disk."""

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from biascope.data.dataset import Dataset, Labels, Seed, as_labels, generator, seed_of
from biascope.support.errors import InputError
from biascope.support.limits import Count, shaped
from biascope.support.signatures import Rule, checked

_CENTRES = {1: ((0.5, -0.5), (-0.5, 0.5)), 2: ((-0.5, -0.5), (-0.5, 0.5))}
DISK_RADIUS = math.sqrt(2 / math.pi)  # the disk covers exactly half of the square
Variant = Literal[1, 2]


def _points(x: Any, name: str) -> Any:
    if shaped(2, floating=True, finite=True).check(x, name).shape[1] != 2:
        raise InputError(f"{name} has shape {list(x.shape)}: points of the plane [n, 2] are needed")
    return x


Points = Annotated[Tensor, Rule(_points, "points")]  # [n, 2]


@checked
def square_grid(side: Count = 50, dtype: torch.dtype = torch.float32) -> Tensor:
    """side^2 evenly spaced points of [-1, 1]^2, [side^2, 2]: the first coordinate runs fastest.

    Example:
        >>> square_grid(2).tolist()
        [[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]]
    """
    line = torch.linspace(-1, 1, side, dtype=dtype)
    return torch.stack([line.repeat(side), line.repeat_interleave(side)], 1)


@checked
def in_yin_yang_disks(x: Points, variant: Variant = 1) -> Tensor:
    """True [n] for points x [n, 2] inside one of the two disks, the difficult region."""
    centres = torch.tensor(_CENTRES[variant], dtype=x.dtype, device=x.device)
    inside: Tensor = (x[:, None] - centres).norm(dim=2) <= 0.3
    return inside.any(1)


@checked
def yin_yang_labels(x: Points, variant: Variant = 1, labels: Labels = "01") -> Tensor:
    """Positive in the lower half-plane (second coordinate <= 0), flipped inside two disks of radius 0.3.

    Example:
        >>> yin_yang_labels(torch.tensor([[0.5, -0.5], [0.0, -0.9]])).tolist()
        [0, 1]
    """
    lower = torch.where(x[:, 1] <= 0, 1, -1)
    return as_labels(torch.where(in_yin_yang_disks(x, variant), -lower, lower), labels)


@checked
def yin_yang(
    n: Count = 100,
    *,
    variant: Variant = 1,
    labels: Labels = "01",
    seed: Seed = 0,
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """n uniform points of [-1, 1]^2 with `yin_yang_labels`; `group` is 1 inside the disks.

    Variant 1 has the disks at (0.5, -0.5) and (-0.5, 0.5), variant 2 at (-0.5, -0.5) and (-0.5, 0.5).

    Example:
        >>> yin_yang(100, seed=0).x.shape
        torch.Size([100, 2])
    """
    x = _uniform_square(n, seed, dtype)
    group = in_yin_yang_disks(x, variant).long()
    return Dataset(x, yin_yang_labels(x, variant, labels), f"yin-yang-{variant}", seed_of(seed), {}, group)


@checked
def disk_labels(x: Points, labels: Labels = "01") -> Tensor:
    """Positive where ||x|| <= sqrt(2/pi).

    Example:
        >>> disk_labels(torch.tensor([[0.0, 0.0], [0.8, 0.0]]), "pm1").tolist()
        [1, -1]
    """
    return as_labels(torch.where(x.norm(dim=1) <= DISK_RADIUS, 1, -1), labels)


@checked
def disk(n: Count = 500, *, labels: Labels = "01", seed: Seed = 0, dtype: torch.dtype = torch.float32) -> Dataset:
    """n uniform points of [-1, 1]^2, positive inside the disk of radius sqrt(2/pi), half of the square's area.

    Example:
        >>> disk(500, seed=0).y.shape
        torch.Size([500])
    """
    x = _uniform_square(n, seed, dtype)
    return Dataset(x, disk_labels(x, labels), "disk", seed_of(seed), {"radius": DISK_RADIUS})


def _uniform_square(n: int, seed: Seed, dtype: torch.dtype) -> Tensor:
    return 2 * torch.rand(n, 2, generator=generator(seed), dtype=dtype) - 1
