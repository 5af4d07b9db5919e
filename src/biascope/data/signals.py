"""Sums of sinusoids on a grid, and the flower-shaped curve gamma_L that carries them into the plane."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from biascope.data.dataset import Dataset, Seed, generator, seed_of
from biascope.support.errors import InputError
from biascope.support.limits import Count, Finite
from biascope.support.signatures import checked

Amplitudes = Literal["equal", "growing"] | Sequence[Finite]


def unit_grid(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """z_j = j/n in [0, 1), the end point left out, so that integer frequencies fall on exact DFT bins."""
    return torch.arange(n, dtype=dtype) / n


def gamma_embedding(z: Tensor, petals: int = 0) -> Tensor:
    """gamma_L(z) = (1 + 1/2 sin(2 pi L z)) (cos 2 pi z, sin 2 pi z) for z [n]: [n, 2], a flower of L petals."""
    radius = 1 + 0.5 * (2 * math.pi * petals * z).sin()
    return torch.stack([radius * (2 * math.pi * z).cos(), radius * (2 * math.pi * z).sin()], -1)


@checked
def sinusoids(
    frequencies: Sequence[int] = tuple(range(5, 55, 5)),
    amplitudes: Amplitudes = "equal",
    phases: Sequence[Finite] | None = None,
    n: Count = 200,
    *,
    petals: int | None = None,
    seed: Seed = 0,
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """y(z) = sum_i A_i sin(2 pi k_i z + phi_i) on z = j/n: x = z [n, 1], or gamma_L(z) [n, 2] if `petals` = L.

    amplitudes: "equal" (all 1), "growing" (1/m, 2/m, ..., 1; 0.1 to 1 for ten) or a list; phases: given, or uniform on
    [0, 2 pi) from `seed`. y [n]; `info` holds z, frequencies, amplitudes and phases.

    Example:
        >>> d = sinusoids([1], phases=[0.0], n=4)
        >>> d.x.flatten().tolist(), d.y.round(decimals=4).tolist()
        ([0.0, 0.25, 0.5, 0.75], [0.0, 1.0, 0.0, -1.0])
    """
    m = len(frequencies)
    if amplitudes == "equal":
        a = torch.ones(m, dtype=torch.float64)
    elif amplitudes == "growing":
        a = torch.arange(1, m + 1, dtype=torch.float64) / m
    else:
        a = torch.tensor(amplitudes, dtype=torch.float64)
    drawn = 2 * math.pi * torch.rand(m, generator=generator(seed), dtype=torch.float64)
    phi = drawn if phases is None else torch.tensor(phases, dtype=torch.float64)
    if not m == len(a) == len(phi) > 0:
        raise InputError(f"{m} frequencies need {m} amplitudes and phases, at least one, got {len(a)} and {len(phi)}")
    z, k = unit_grid(n), torch.tensor(frequencies, dtype=torch.float64)
    y = (a * (2 * math.pi * k * z[:, None] + phi).sin()).sum(1)
    x = z[:, None] if petals is None else gamma_embedding(z, petals)
    info = {"z": z, "frequencies": tuple(frequencies), "amplitudes": a, "phases": phi, "petals": petals}
    return Dataset(x.to(dtype), y.to(dtype), "sinusoids", seed_of(seed), info)


@checked
def sinusoid_classes(
    frequency: int,
    n: Count = 1000,
    *,
    threshold: Finite = 0.5,
    phase: Finite | None = None,
    petals: int = 0,
    seed: Seed = 0,
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """y = 1[sin(2 pi k z + phi) > threshold] on gamma_L(z): labels {0, 1}; `info["majority"]` is the baseline accuracy.

    Always read an accuracy beside that baseline: about 2/3 at threshold 0.5, but when k divides n the grid hits only
    n / gcd(k, n) phases and the baseline depends on phi.

    Example:
        >>> sinusoid_classes(1, 1000, phase=0.0).info["majority"]
        0.667
    """
    drawn = 2 * math.pi * float(torch.rand((), generator=generator(seed), dtype=torch.float64))
    phi = drawn if phase is None else phase
    z = unit_grid(n)
    y = ((2 * math.pi * frequency * z + phi).sin() > threshold).long()
    positive = float(y.double().mean())
    info = {"z": z, "frequency": frequency, "phase": phi, "threshold": threshold}
    info["majority"] = max(positive, 1 - positive)
    return Dataset(gamma_embedding(z, petals).to(dtype), y, "sinusoid-classes", seed_of(seed), info)
