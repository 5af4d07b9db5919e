"""Two ways to fail: imperfect recovery (section 5.3.1) and aliasing (5.3.2).

With gamma(r) = [sin 2 pi f0 r, cos 2 pi f0 r] per coordinate, f repeats itself after 1 / f0 along every axis, whatever
its weights and activation. So the best it can do is the mean of all pixels that it cannot tell apart, and the PSNR of
that is a bound for every training. For f0 = 1 on [-1, 1)^2 this is the mean of the four half-shifted images: DFT bins
with an odd index are empty.

On n samples per unit, sin(2 pi f r) and -sin(2 pi (n - f) r) are the same. A network whose first layer reaches beyond
n / 2 may take some of either; the samples cannot tell, points between them can.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from biascope.fields.fitting import Fit, coordinates, decibels, fit
from biascope.spectral import amplitude_spectrum
from biascope.support.errors import InputError
from biascope.support.limits import Count, FiniteTensor, Positive
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import facts


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
def recovery_bound(
    image: FiniteTensor, f0: Positive, extent: Positive = 2.0, dims: Count = 2, peak: Positive = 1.0
) -> Recovery:
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
    best = image.double()
    for axis in range(dims):
        n = image.shape[axis]
        period = n / (f0 * extent)
        if abs(period - round(period)) > 1e-9 * n:
            found = f"one period of f0={f0:g} is {period:g} of the {n} samples along axis {axis}"
            raise InputError(f"{found}: give an image whose side is a multiple of the number of periods")
        group = torch.arange(n, device=image.device) % max(1, round(period))
        sums = torch.zeros_like(best).index_add_(axis, group, best)
        counts = torch.bincount(group, minlength=n).reshape([-1 if a == axis else 1 for a in range(best.dim())])
        best = (sums / counts.clamp(min=1)).index_select(axis, group)
    error = (image.double() - best).square()
    return Recovery(best, decibels(float(error.mean()), peak), float(error.sum() / image.double().square().sum()))


@dataclass(frozen=True)
class AliasTest:
    """A tone fitted on n samples of [0, 1), and evaluated on `oversample` times as many.

    amplitudes [n * oversample // 2 + 1] by frequency; train_mse on the samples, test_mse on the fine grid.
    """

    frequency: int
    alias: int
    amplitudes: Tensor = field(repr=False)
    train_mse: float
    test_mse: float
    fitted: Fit = field(repr=False)

    @property
    def amplitude(self) -> float:
        """Amplitude at the frequency of the tone: 1 if all is well."""
        return float(self.amplitudes[self.frequency])

    @property
    def alias_amplitude(self) -> float:
        """Amplitude at n - f: 0 if all is well. With an exact fit and nothing else there, both add up to 1."""
        return float(self.amplitudes[self.alias])

    @property
    def alias_ratio(self) -> float:
        """|F[n - f]| / |F[f]|."""
        return self.alias_amplitude / self.amplitude

    def _repr_html_(self) -> str:
        """Both amplitudes and errors, for notebooks."""
        rows = {f"amplitude at {self.frequency}": self.amplitude, f"at its alias {self.alias}": self.alias_amplitude}
        return facts("Alias test", {**rows, "error on samples": self.train_mse, "between": self.test_mse})


@checked
@without_autocast()
def alias_test(
    model: nn.Module,
    frequency: Count = 23,
    samples: Count = 128,
    *,
    oversample: Count = 2,
    phase: float = 0.0,
    steps: Count = 2000,
    lr: Positive = 1e-4,
    **options: Any,
) -> AliasTest:
    """Fit sin(2 pi f r + phase) on n samples of [0, 1) and measure what appears at the alias n - f.

    Args:
        model: [..., 1] -> [..., 1]; not changed. In the paper SIREN(in_features=1, hidden=(128, 128), w0=30 or 300).
        frequency: f, whole, below n / 2.
        samples: n.
        oversample: the fine grid has this many times n points; at least 2, to hold n - f.
        phase: of the tone.
        steps: updates of Adam.
        lr: learning rate.
        options: of `fit`.

    Example:
        >>> from biascope.nets import build
        >>> slow = build("siren", seed=0, in_features=1, hidden=(64, 64), w0=30.0)
        >>> alias_test(slow, steps=300, lr=1e-3).alias_ratio < 0.01
        True
    """
    if frequency >= samples / 2 or oversample < 2:
        raise InputError(f"frequency={frequency} must be below {samples / 2:g}, oversample={oversample} at least 2")

    def tone(n: int) -> tuple[Tensor, Tensor]:
        r = coordinates(n, 0.0, 1.0, torch.float64)
        return r, torch.sin(2 * math.pi * frequency * r + phase)

    found = fit(model, *tone(samples), steps=steps, lr=lr, **options)
    like = next(found.model.parameters())

    def evaluate(n: int) -> tuple[Tensor, float]:
        r, y = tone(n)
        with torch.no_grad():
            out = found.model(r.to(like)).double().cpu()
        return out[:, 0], float((out - y).square().mean())

    fine, test_mse = evaluate(samples * oversample)
    train_mse = evaluate(samples)[1]
    return AliasTest(frequency, samples - frequency, amplitude_spectrum(fine), train_mse, test_mse, found)
