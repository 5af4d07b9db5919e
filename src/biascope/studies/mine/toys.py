"""The two planar data sets of the GANs, and how much of them samples cover."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from biascope.seeds import generator

STD = 0.05  # of the 25 Gaussians (text) and of the spiral's noise (the text says only that there is noise)
TURNS = (0.25, 1.75)  # of the spiral, first and last
RADIUS = 2.0  # of the spiral's end, and of the grid
NEAR = 3.0  # standard deviations within which a sample is near a centre or a point
FINE = 16  # points of the line in a piece of the spiral


def centres() -> Tensor:
    """The 25 centres [25, 2]: a grid of -2, -1, 0, 1, 2 (the text gives no spacing).

    Example:
        >>> centres().shape, centres().abs().max().item()
        (torch.Size([25, 2]), 2.0)
    """
    line = torch.linspace(-RADIUS, RADIUS, 5)
    return torch.cartesian_prod(line, line)


def grid(n: int, seed: int) -> Tensor:
    """n points [n, 2] of the 25 Gaussians."""
    rng = generator(seed, "grid")
    return centres()[torch.randint(25, (n,), generator=rng)] + STD * torch.randn(n, 2, generator=rng)


def on_spiral(length: Tensor) -> Tensor:
    """Points [n, 2] of an Archimedean spiral (the text gives no equation) at shares [n] of its length, about.

    Example:
        >>> on_spiral(torch.tensor([1.0])).norm().item()
        2.0
    """
    first, last = (2 * math.pi * turn for turn in TURNS)
    angle = (first**2 + (last**2 - first**2) * length).sqrt()  # length grows as angle^2
    return angle[:, None] / last * RADIUS * torch.stack([angle.cos(), angle.sin()], 1)


def spiral(n: int, seed: int) -> Tensor:
    """n points [n, 2] of the spiral, plus noise."""
    rng = generator(seed, "spiral")
    return on_spiral(torch.rand(n, generator=rng)) + STD * torch.randn(n, 2, generator=rng)


def modes(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Centres found [S], and the share of samples [S, m, 2] within 3 standard deviations of some centre [S].

    A centre is found when a fifth of its share (m / 25) is so near: samples strewn evenly would put 7 % there.

    Example:
        >>> modes(centres()[None, :7])
        (tensor([7.]), tensor([1.]))
    """
    near = _near(samples)
    return (near.sum(1) >= 0.2 * samples.shape[1] / 25).sum(1).float(), near.any(2).float().mean(1)


def touched(samples: Tensor) -> Tensor:
    """Centres with a sample of [S, m, 2] within 3 standard deviations [S]: the usual, lenient count.

    Example:
        >>> touched(torch.cat([torch.zeros(99, 2), centres()[:2]])[None])
        tensor([3.])
    """
    near = _near(samples)
    return near.any(1).sum(1).float()


def _near(samples: Tensor) -> Tensor:
    """[S, m, 25]: whether a sample lies within 3 standard deviations of a centre."""
    return torch.cdist(samples, centres().to(samples).expand(len(samples), -1, -1)) < NEAR * STD


def coverage(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Share of the spiral covered [S], and of samples [S, m, 2] within 3 standard deviations of its noise [S].

    The spiral is cut in 25 pieces; one is covered when half of its share (m / 25) of the samples is so near to it:
    samples strewn evenly over the square would put a fifth to a third there.

    Example:
        >>> coverage(on_spiral(torch.arange(0.02, 0.4, 0.04))[None])
        (tensor([0.4000]), tensor([1.]))
    """
    line = on_spiral((torch.arange(25 * FINE) + 0.5) / (25 * FINE)).to(samples)
    distance, nearest = torch.cdist(samples, line.expand(len(samples), -1, -1)).min(2)
    near = distance < NEAR * STD
    counts = torch.zeros(len(samples), 25, device=samples.device).scatter_add_(1, nearest // FINE, near.float())
    return (counts >= 0.5 * samples.shape[1] / 25).float().mean(1), near.float().mean(1)
