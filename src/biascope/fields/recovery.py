"""Imperfect recovery (section 5.3.1): what a network of one frequency can at best make of an image.

With gamma(r) = [sin 2 pi f0 r, cos 2 pi f0 r] per coordinate, f repeats itself after 1 / f0 along every axis, whatever
its weights and activation. So the best it can do is the mean of all pixels that it cannot tell apart, and the PSNR of
that is a bound for every training. For f0 = 1 on [-1, 1)^2 this is the mean of the four half-shifted images: DFT bins
with an odd index are empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.arguments import check_count
from biascope.errors import InputError
from biascope.fields.fit import decibels
from biascope.inputs import check_inputs
from biascope.signatures import checked
from biascope.tables import facts


@dataclass(frozen=True)
class Recovery:
    """The best reconstruction [*image.shape] of an image by functions of a period, its PSNR in dB, and what it misses.

    missing: share of the image's energy (squared values, the mean included) that no such function holds.
    """

    best: Tensor = field(repr=False)
    psnr: float
    missing: float

    def _repr_html_(self) -> str:
        """The bound, for notebooks."""
        return facts("Best recovery", {"PSNR at most": self.psnr, "energy out of reach": self.missing})


@checked
def recovery_bound(image: Tensor, f0: float, extent: float = 2.0, dims: int = 2, peak: float = 1.0) -> Recovery:
    """The best fit by a network of the single frequency f0: a bound on the PSNR of every training.

    Args:
        image: [*grid, ...] with `dims` axes of the grid first: [H, W], [H, W, c], or [n] with dims=1.
        f0: of `single_frequency` or `frozen_siren`, cycles per unit.
        extent: side of the box the grid covers, end point left out: 2 for [-1, 1).
        dims: axes of the grid.
        peak: largest value, for PSNR.

    Example:
        >>> image = torch.rand(8, 8, 3)
        >>> shifted = [image.roll((4 * i, 4 * j), (0, 1)) for i in (0, 1) for j in (0, 1)]
        >>> torch.allclose(recovery_bound(image, f0=1.0).best, torch.stack(shifted).mean(0).double())
        True
        >>> recovery_bound(image, f0=0.5).psnr
        inf
    """
    if not f0 > 0 or not extent > 0:
        raise InputError(f"f0={f0:g} and extent={extent:g} must be positive")
    check_inputs(image, "image")
    check_count(dims, "dims")
    if image.dim() < dims:
        raise InputError(f"image has shape {list(image.shape)}, fewer than dims={dims} axes")
    best = image.double()
    if not bool(best.any()):
        raise InputError("the image is zero everywhere: it has no energy to miss")
    for axis in range(dims):
        n = image.shape[axis]
        period = n / (f0 * extent)
        if abs(period - round(period)) > 1e-9 * n:
            raise InputError(
                f"one period of f0={f0:g} is {period:g} of the {n} samples along axis {axis}: no two samples are the "
                "same point of it; give an image whose side is a multiple of the number of periods"
            )
        group = torch.arange(n, device=image.device) % max(1, round(period))
        sums = torch.zeros_like(best).index_add_(axis, group, best)
        counts = torch.bincount(group, minlength=n).reshape([-1 if a == axis else 1 for a in range(best.dim())])
        best = (sums / counts.clamp(min=1)).index_select(axis, group)
    error = (image.double() - best).square()
    return Recovery(best, decibels(float(error.mean()), peak), float(error.sum() / image.double().square().sum()))
