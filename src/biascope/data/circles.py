"""Concentric circles in a plane of input space, alone or against a linear feature (the simplicity contest)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from biascope.arguments import check_number
from biascope.data.dataset import (
    Dataset,
    Labels,
    Seed,
    alternating_signs,
    as_labels,
    generator,
    orthonormal,
    project_out,
    seed_of,
)
from biascope.data.directional import Gap, class_offset
from biascope.errors import InputError
from biascope.signatures import checked


def _radii_of(signs: Tensor, radii: tuple[float, float]) -> Tensor:
    if not all(map(math.isfinite, radii)) or min(radii) < 0 or radii[0] == radii[1]:
        raise InputError(f"radii must be two different numbers >= 0 (class 0, class 1), got {radii}")
    return torch.tensor(radii, dtype=torch.float64)[(signs > 0).long()]


def _outer(coefficients: Tensor, u: Tensor) -> Tensor:
    return coefficients.to(u.dtype).view(-1, *[1] * u.dim()) * u


@checked
def circles(
    u1: Tensor,
    u2: Tensor,
    n: int = 10_000,
    *,
    radii: tuple[float, float] = (0.25, 1.5),
    sigma: float = 1.0,
    labels: Labels = "01",
    seed: Seed = 0,
) -> Dataset:
    """Class y on a circle of radius radii[y] in span(u1, u2), N(0, sigma^2) in the other D - 2 dimensions.

    u1, u2: orthogonal directions of the input's shape. Default radii: the published code's for LeNet, MLP and ViT
    (ResNet-18: 0.25 and 3).

    Example:
        >>> e = torch.eye(5)
        >>> d = circles(e[0], e[1], 4, radii=(1.0, 2.0), seed=0)
        >>> d.x[:, :2].norm(dim=1).round(decimals=4).tolist()
        [1.0, 2.0, 1.0, 2.0]
    """
    a, b = orthonormal(u1.detach().cpu(), u2.detach().cpu())
    rng, signs = generator(seed), alternating_signs(n)
    radius = _radii_of(signs, radii)
    angle = 2 * math.pi * torch.rand(n, generator=rng, dtype=torch.float64)
    noise = check_number(sigma, "sigma", least=0) * torch.randn(n, *a.shape, generator=rng, dtype=a.dtype)
    x = project_out(noise, a, b) + _outer(radius * angle.cos(), a) + _outer(radius * angle.sin(), b)
    info = {"u1": a, "u2": b, "radii": radii, "sigma": sigma}
    return Dataset(x, as_labels(signs, labels), "circles", seed_of(seed), info)


@checked
def simplicity_contest(
    u1: Tensor,
    u2: Tensor,
    u3: Tensor,
    n: int = 10_000,
    *,
    eps: float = 1.0,
    gap: Gap = "full",
    radii: tuple[float, float] = (0.25, 1.5),
    sigma: float = 1.0,
    labels: Labels = "01",
    seed: Seed = 0,
) -> Dataset:
    """Two features that each solve the task: a linear one along u1, and circles in span(u2, u3) (the SBH contest).

    x = +-a u1 + r_y (al u2 + be u3)/norm + w, al, be ~ N(0, 1), w ~ N(0, sigma^2) orthogonal to all three. Which one a
    network uses is seen on test inputs with the other feature removed: `project_out(x, u2, u3)` leaves the linear one,
    `project_out(x, u1)` the circles. a = eps with `gap="full"` (the text, as of `directional`), eps/2 with "half": the
    published code has eps = 1 and "half", a = 0.5. Default radii and sigma are the published code's.

    Example:
        >>> e = torch.eye(6)
        >>> d = simplicity_contest(*e[:3], 4, eps=1.0, radii=(1.0, 2.0), seed=0)
        >>> d.x[:, 0].tolist()
        [-1.0, 1.0, -1.0, 1.0]
    """
    a, b, c = orthonormal(u1.detach().cpu(), u2.detach().cpu(), u3.detach().cpu())
    rng, signs = generator(seed), alternating_signs(n)
    pair = torch.randn(n, 2, generator=rng, dtype=torch.float64)
    pair = _radii_of(signs, radii)[:, None] * pair / pair.norm(dim=1, keepdim=True)
    noise = check_number(sigma, "sigma", least=0) * torch.randn(n, *a.shape, generator=rng, dtype=a.dtype)
    x = project_out(noise, a, b, c) + _outer(class_offset(eps, gap) * signs, a)
    x = x + _outer(pair[:, 0], b) + _outer(pair[:, 1], c)
    info = {"u1": a, "u2": b, "u3": c, "eps": eps, "gap": gap, "radii": radii, "sigma": sigma}
    return Dataset(x, as_labels(signs, labels), "simplicity_contest", seed_of(seed), info)
