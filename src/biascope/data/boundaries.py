"""Linear, quadratic and sinusoidal decision boundaries along one direction, on Gaussian data or on given images."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.data.dataset import Dataset, Labels, Seed, along, as_labels, generator, orthonormal, project_out, seed_of
from biascope.support.errors import InputError
from biascope.support.limits import Count, Finite, FiniteTensor, NonNegative
from biascope.support.signatures import checked

Boundary = Literal["linear", "quadratic", "sinusoidal"]
Sinusoid = Literal["projection", "channel"]
NoiseRule = Literal["variance", "range"]
Bias = Finite | Literal["median"]


@checked
def isotropic(
    u: Tensor,
    n: Count = 10_000,
    boundary: Boundary = "linear",
    *,
    eps: Finite = 1.0,
    sigma: NonNegative = 1.0,
    bias: Bias = "median",
    labels: Labels = "01",
    reference: Dataset | None = None,
    seed: Seed = 0,
) -> Dataset:
    """x = eps al u + w, al ~ N(0, 1), w ~ N(0, sigma^2 (I - u u^T)), labelled by a boundary on x.u (see `relabel`).

    The sinusoidal label is the sign of sin(pi al) + b (the published code; the text omits the sine by mistake): here al
    itself is known, so the projection is divided by eps and not by its sample deviation. b is minus the median unless
    given, so the classes balance; for a test set pass the training set as `reference`, whose bias is used.

    Example:
        >>> d = isotropic(torch.eye(4)[0], 100, "quadratic", seed=0)
        >>> int(d.y.sum())
        50
    """
    if eps == 0:
        raise InputError("eps must not be 0, or the label would not depend on x")
    (unit,) = orthonormal(u.detach().cpu())
    rng = generator(seed)
    alpha = torch.randn(n, generator=rng, dtype=torch.float64)
    noise = sigma * torch.randn(n, *unit.shape, generator=rng, dtype=unit.dtype)
    x = project_out(noise, unit) + along(eps * alpha, unit)
    inner = boundary_value(eps * alpha, math.pi * alpha, boundary)
    if reference is not None:
        same = {"boundary": boundary} | ({} if boundary == "sinusoidal" else {"eps": eps})
        bias = float(_from_reference(reference, "isotropic", bias, same)["bias"])
    shift = -float(middle(inner)) if bias == "median" else bias
    info = {"u": unit, "boundary": boundary, "eps": eps, "sigma": sigma, "bias": shift}
    return Dataset(x, as_labels(inner + shift, labels), f"isotropic-{boundary}", seed_of(seed), info)


@checked
def relabel(
    x: FiniteTensor,
    u: Tensor,
    boundary: Boundary = "linear",
    *,
    bias: Bias = "median",
    sinusoid: Sinusoid = "projection",
    noise: NonNegative = 0.0,
    noise_rule: NoiseRule = "variance",
    labels: Labels = "01",
    reference: Dataset | None = None,
    seed: Seed = 0,
) -> Dataset:
    """Given inputs x [n, c, h, w] (or any [n, ...]) relabelled by a boundary along u; x is returned untouched.

    linear: sgn(x.u + b); quadratic: sgn((x.u)^2 + b); sinusoidal: sgn(sin(s) + b) where s is pi (x.u - mean)/std
    (`sinusoid="projection"`, the published code) or xbar.u with every channel of xbar standardised ("channel", the
    text). b is minus the median unless given, so the classes balance. For a test set pass the training set as
    `reference`: its bias and statistics are used. `noise` > 0 computes the labels on x + noise, of variance `noise`
    times the channel variance ("variance"), or of standard deviation `noise` times each image's channel range
    ("range", the code).

    Example:
        >>> x = torch.randn(10, 1, 2, 2, generator=torch.Generator().manual_seed(0))
        >>> d = relabel(x, torch.ones(1, 2, 2), "sinusoidal")
        >>> d.x is x, int(d.y.sum())
        (True, 5)
    """
    (unit,) = orthonormal(u.detach().to(x.device))
    if unit.shape != x.shape[1:]:
        raise InputError(f"u has shape {list(unit.shape)}, the inputs have {list(x.shape[1:])}")
    seen = x.double()
    if noise > 0:
        draw = torch.randn(x.shape, generator=generator(seed), dtype=torch.float64).to(x.device)
        seen = seen + draw * _noise_scale(seen, noise, noise_rule)
    axes = _per_channel(seen)
    projection = seen.flatten(1) @ unit.double().flatten()
    stats: dict[str, Any] = {
        "mean": float(projection.mean()),
        "std": float(projection.std(correction=0)),
        "channel_mean": seen.mean(axes, keepdim=True),
        "channel_std": seen.std(axes, correction=0, keepdim=True),
    }
    if reference is not None:
        same = {"boundary": boundary, "u": unit} | ({"sinusoid": sinusoid} if boundary == "sinusoidal" else {})
        known = _from_reference(reference, "relabel", bias, same)
        stats, bias = {k: known[k] for k in stats}, float(known["bias"])
    if sinusoid == "projection":
        angle = math.pi * (projection - stats["mean"]) / max(stats["std"], 1e-300)
    else:
        standard = (seen - stats["channel_mean"]) / stats["channel_std"].clamp_min(1e-300)
        angle = standard.flatten(1) @ unit.double().flatten()
    inner = boundary_value(projection, angle, boundary)
    shift = -float(middle(inner)) if bias == "median" else bias
    info = {"u": unit, "boundary": boundary, "sinusoid": sinusoid, "noise": noise, "noise_rule": noise_rule}
    info |= {"bias": shift, **stats}
    return Dataset(x, as_labels(inner + shift, labels), f"relabelled-{boundary}", seed_of(seed), info)


def boundary_value(projection: Tensor, angle: Tensor, boundary: Boundary) -> Tensor:
    """What the label is the sign of, before the bias: the projection, its square, or the sine of the angle.

    Example:
        >>> boundary_value(torch.tensor([3.0]), torch.zeros(1), "quadratic")
        tensor([9.])
    """
    if boundary == "linear":
        return projection
    return projection**2 if boundary == "quadratic" else angle.sin()


def middle(values: Tensor) -> Tensor:
    """Midpoint of the two middle values along the first axis: an even number of distinct values splits in half."""
    ordered = values.sort(0).values
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _from_reference(reference: Dataset, maker: str, bias: Bias, same: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is known of a reference set; refused where its bias would be that of other values."""
    known = reference.info
    if bias != "median":
        raise InputError(f"bias={bias} and a reference, whose bias would be taken: give one of the two")
    if not {"bias", *same} <= known.keys() or (maker == "relabel") != ("channel_mean" in known):
        raise InputError(f"reference {reference.name!r} was not made by {maker}")
    for name, value in same.items():
        if not _alike(known[name], value):
            own = "another direction" if name == "u" else f"{name}={known[name]!r}"
            raise InputError(f"reference {reference.name!r} has {own}: its bias fits sets with the same {name} only")
    return known


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a.to(b), b, atol=1e-5)
    return bool(a == b)


def _per_channel(x: Tensor) -> list[int]:
    """Axes to average over: all but the channel for images [n, c, h, w], all but the features for vectors [n, d]."""
    return [0, *range(2, x.dim())]


def _noise_scale(x: Tensor, noise: float, rule: NoiseRule) -> Tensor:
    if rule == "variance":
        return (noise * x.var(_per_channel(x), correction=0, keepdim=True)).sqrt()
    flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(1)
    spread = noise * (flat.amax(2) - flat.amin(2))
    return spread.view(*spread.shape, *[1] * (x.dim() - 2))
