"""Gaussian tasks along chosen directions: one (D(v)), a plane with circles, both in a contest, a whole covariance."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.data.dataset import (
    Dataset,
    Labels,
    Seed,
    along,
    alternating_signs,
    as_labels,
    as_signs,
    generator,
    orthonormal,
    project_out,
    seed_of,
)
from biascope.support.errors import InputError
from biascope.support.limits import Finite, FloatTensor, NonNegative, Vector, shaped
from biascope.support.signatures import checked

Gap = Literal["full", "half"]


def class_offset(eps: float, gap: Gap) -> float:
    """How far each class centre lies from 0 along v: `eps` ("full") or `eps / 2` ("half": eps is the gap itself)."""
    return eps if gap == "full" else eps / 2


@checked
def directional_inputs(
    y: Vector, v: FloatTensor, *, eps: Finite = 1.0, sigma: NonNegative = 3.0, gap: Gap = "full", seed: Seed = 0
) -> Tensor:
    """Inputs of D(v) for given binary labels y [n] ({0, 1} or {-1, +1}); returns [n, *v.shape] in v's dtype.

    x = +-a v + w, w ~ N(0, sigma^2 (I - v v^T)). The noise is drawn isotropically and projected, O(nD); the D x D
    covariance is never built.
    """
    (unit,) = orthonormal(v.detach().cpu())
    offset = class_offset(eps, gap) * as_signs(y.cpu()).to(unit.dtype)
    z = sigma * torch.randn(len(y), *unit.shape, generator=generator(seed), dtype=unit.dtype)
    return project_out(z, unit) + along(offset, unit)


@checked
def directional(
    v: FloatTensor,
    n: int = 10_000,
    *,
    eps: Finite = 1.0,
    sigma: NonNegative = 3.0,
    gap: Gap = "full",
    labels: Labels = "01",
    seed: Seed = 0,
) -> Dataset:
    """D(v) = {x = +-a v + w}, whose only useful feature is the direction v: n examples of v's shape, balanced labels.

    `gap="full"` puts the classes at +-eps v (the papers' text), `gap="half"` at +-eps/2 v (the published generator;
    the published accuracies fit "full", see `biascope_papers/nad/directional.py`). v may have any shape, e.g.
    [1, 32, 32] or several channels; it is normalised to length 1.

    Example:
        >>> v = torch.zeros(1, 4, 4); v[0, 0, 0] = 1
        >>> d = directional(v, 6, sigma=3.0, gap="half", seed=1)
        >>> d.x.shape, d.x[:, 0, 0, 0].tolist()
        (torch.Size([6, 1, 4, 4]), [-0.5, 0.5, -0.5, 0.5, -0.5, 0.5])
    """
    signs = alternating_signs(n)
    x = directional_inputs(signs, v, eps=eps, sigma=sigma, gap=gap, seed=seed)
    info = {"v": v / v.norm(), "eps": eps, "sigma": sigma, "gap": gap, "offset": class_offset(eps, gap)}
    return Dataset(x, as_labels(signs, labels), "directional", seed_of(seed), info)


def _radii_of(signs: Tensor, radii: tuple[float, float]) -> Tensor:
    if not all(map(math.isfinite, radii)) or min(radii) < 0 or radii[0] == radii[1]:
        raise InputError(f"radii must be two different numbers >= 0 (class 0, class 1), got {radii}")
    return torch.tensor(radii, dtype=torch.float64)[(signs > 0).long()]


@checked
def circles(
    u1: Tensor,
    u2: Tensor,
    n: int = 10_000,
    *,
    radii: tuple[float, float] = (0.25, 1.5),
    sigma: NonNegative = 1.0,
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
    noise = sigma * torch.randn(n, *a.shape, generator=rng, dtype=a.dtype)
    x = project_out(noise, a, b) + along(radius * angle.cos(), a) + along(radius * angle.sin(), b)
    info = {"u1": a, "u2": b, "radii": radii, "sigma": sigma}
    return Dataset(x, as_labels(signs, labels), "circles", seed_of(seed), info)


@checked
def simplicity_contest(
    u1: Tensor,
    u2: Tensor,
    u3: Tensor,
    n: int = 10_000,
    *,
    eps: Finite = 1.0,
    gap: Gap = "full",
    radii: tuple[float, float] = (0.25, 1.5),
    sigma: NonNegative = 1.0,
    labels: Labels = "01",
    seed: Seed = 0,
) -> Dataset:
    """Two features that each solve the task: a linear one along u1, and circles in span(u2, u3) (the SBH contest).

    x = +-a u1 + r_y (al u2 + be u3)/norm + w, al, be ~ N(0, 1), w ~ N(0, sigma^2) orthogonal to all three. Which one a
    network uses is seen on test inputs with the other feature removed (projected out). a = eps with `gap="full"` (the
    text, as of `directional`), eps/2 with "half": the published code has eps = 1 and "half", a = 0.5. Default radii and
    sigma are the published code's.
    """
    a, b, c = orthonormal(u1.detach().cpu(), u2.detach().cpu(), u3.detach().cpu())
    rng, signs = generator(seed), alternating_signs(n)
    pair = torch.randn(n, 2, generator=rng, dtype=torch.float64)
    pair = _radii_of(signs, radii)[:, None] * pair / pair.norm(dim=1, keepdim=True)
    noise = sigma * torch.randn(n, *a.shape, generator=rng, dtype=a.dtype)
    x = project_out(noise, a, b, c) + along(class_offset(eps, gap) * signs, a)
    x = x + along(pair[:, 0], b) + along(pair[:, 1], c)
    info = {"u1": a, "u2": b, "u3": c, "eps": eps, "gap": gap, "radii": radii, "sigma": sigma}
    return Dataset(x, as_labels(signs, labels), "simplicity_contest", seed_of(seed), info)


@checked
def geometry_gaussian(
    g: Annotated[Tensor, shaped(2, floating=True, finite=True)],
    n: int = 10_000,
    *,
    flip: bool = False,
    input_shape: Sequence[int] | None = None,
    labels: Labels = "01",
    seed: Seed = 0,
) -> Dataset:
    """x ~ N(0, G/||G||_2), or with `flip` the eigenvalues of G reversed; labels are balanced and independent of x.

    `g` [D, D] is symmetric positive semi-definite, e.g. an average geometry; the covariance used has spectral norm 1.
    `input_shape` reshapes the D features.

    Example:
        >>> d = geometry_gaussian(torch.eye(16), 8, input_shape=(1, 4, 4), seed=0)
        >>> d.x.shape, int(d.y.sum())
        (torch.Size([8, 1, 4, 4]), 4)
    """
    wide = g.detach().cpu().double()
    if wide.shape != wide.T.shape or float((wide - wide.T).abs().max()) > 1e-4 * float(wide.abs().max()):
        raise InputError(f"g {list(g.shape)} is not symmetric; pass (g + g.T) / 2 if meant")
    values, vectors = torch.linalg.eigh((wide + wide.T) / 2)
    top = float(values[-1])
    if not top > 0 or float(values[0]) < -1e-5 * top:
        raise InputError(f"g must be positive semi-definite: its eigenvalues are {float(values[0]):.3g} to {top:.3g}")
    scale = (values.clamp_min(0) / top).sqrt()
    root = (vectors * (scale.flip(0) if flip else scale)).to(g.dtype)
    signs = alternating_signs(n)
    x = torch.randn(n, len(g), generator=generator(seed), dtype=g.dtype) @ root.T
    name = "flipped-geometry-gaussian" if flip else "geometry-gaussian"
    info = {"spectral_norm": 1.0, "trace": float(values.sum()) / top, "flip": flip}
    return Dataset(x.view(n, *(input_shape or (len(g),))), as_labels(signs, labels), name, seed_of(seed), info)
