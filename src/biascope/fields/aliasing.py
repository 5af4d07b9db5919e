"""Aliasing (section 5.3.2): a network that fits the samples with a frequency the signal does not have.

On n samples per unit, sin(2 pi f r) and -sin(2 pi (n - f) r) are the same. A network whose first layer reaches beyond
n / 2 may take some of either; the samples cannot tell, points between them can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from biascope.errors import InputError
from biascope.fields.fit import Fit, fit
from biascope.fields.grids import coordinates
from biascope.precision import without_autocast
from biascope.signatures import checked
from biascope.spectral import amplitude_spectrum
from biascope.tables import facts


@dataclass(frozen=True)
class AliasTest:
    """A tone fitted on n samples of [0, 1) and looked at on `oversample` times as many.

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
    frequency: int = 23,
    samples: int = 128,
    *,
    oversample: int = 2,
    phase: float = 0.0,
    steps: int = 2000,
    lr: float = 1e-4,
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
    if not 0 < frequency < samples / 2 or oversample < 2:
        raise InputError(
            f"frequency={frequency} must lie between 0 and {samples / 2:g}, oversample={oversample} be at least 2"
        )

    def tone(n: int) -> tuple[Tensor, Tensor]:
        r = coordinates(n, 0.0, 1.0, torch.float64)
        return r, torch.sin(2 * math.pi * frequency * r + phase)

    found = fit(model, *tone(samples), steps=steps, lr=lr, **options)
    like = next(found.model.parameters())

    def look(n: int) -> tuple[Tensor, float]:
        r, y = tone(n)
        with torch.no_grad():
            out = found.model(r.to(like)).double().cpu()
        return out[:, 0], float((out - y).square().mean())

    fine, test_mse = look(samples * oversample)
    return AliasTest(frequency, samples - frequency, amplitude_spectrum(fine), look(samples)[1], test_mse, found)
