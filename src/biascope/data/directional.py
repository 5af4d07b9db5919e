"""D(v): a linear task whose only useful feature is one direction v of input space (mu(v) in some papers)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from biascope.arguments import check_number
from biascope.data.dataset import (
    Dataset,
    Labels,
    Seed,
    alternating_signs,
    as_labels,
    as_signs,
    generator,
    orthonormal,
    project_out,
    seed_of,
)
from biascope.errors import InputError
from biascope.signatures import checked

Gap = Literal["full", "half"]


def class_offset(eps: float, gap: Gap) -> float:
    """How far each class centre lies from 0 along v: `eps` ("full") or `eps / 2` ("half": eps is the gap itself)."""
    check_number(eps, "eps")
    return eps if gap == "full" else eps / 2


@checked
def directional_inputs(
    y: Tensor, v: Tensor, *, eps: float = 1.0, sigma: float = 3.0, gap: Gap = "full", seed: Seed = 0
) -> Tensor:
    """Inputs of D(v) for given binary labels y [n] ({0, 1} or {-1, +1}); returns [n, *v.shape] in v's dtype.

    x = +-a v + w, w ~ N(0, sigma^2 (I - v v^T)). The noise is drawn isotropically and projected, O(nD); the D x D
    covariance is never built.

    Example:
        >>> x = directional_inputs(torch.tensor([0, 1]), torch.tensor([1.0, 0.0]), eps=2.0, seed=0)
        >>> x[:, 0].tolist()
        [-2.0, 2.0]
    """
    check_number(sigma, "sigma", least=0)
    if not v.is_floating_point():
        raise InputError(f"v must be a floating tensor, got {v.dtype}")
    (unit,) = orthonormal(v.detach().cpu())
    offset = class_offset(eps, gap) * as_signs(y.cpu()).to(unit.dtype)
    z = sigma * torch.randn(len(y), *unit.shape, generator=generator(seed), dtype=unit.dtype)
    return project_out(z, unit) + offset.view(-1, *[1] * unit.dim()) * unit


@checked
def directional(
    v: Tensor,
    n: int = 10_000,
    *,
    eps: float = 1.0,
    sigma: float = 3.0,
    gap: Gap = "full",
    labels: Labels = "01",
    seed: Seed = 0,
) -> Dataset:
    """D(v) = {x = +-a v + w}: n examples of shape v.shape with exactly balanced, alternating labels.

    `gap="full"` puts the classes at +-eps v (the papers' text), `gap="half"` at +-eps/2 v (the published generator;
    the published accuracies fit "full", see `studies/nad/directional.py`). v may have any shape, e.g. [1, 32, 32] or
    several channels; it is normalised to length 1.

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


@checked
def in_channel(u: Tensor, channel: int, n_channels: int) -> Tensor:
    """u (x) e_channel: a one-channel direction [h, w] (or [1, h, w]) placed in one channel of [n_channels, h, w].

    Example:
        >>> in_channel(torch.ones(2, 2), 1, 3).sum((1, 2)).tolist()
        [0.0, 4.0, 0.0]
    """
    if not 0 <= channel < n_channels:
        raise InputError(f"channel must lie in 0..{n_channels - 1}, got {channel}")
    if u.dim() == 3 and u.shape[0] == 1:
        u = u[0]
    out = u.new_zeros(n_channels, *u.shape)
    out[channel] = u
    return out
