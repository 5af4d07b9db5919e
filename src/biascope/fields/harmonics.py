"""The amplitudes of a network's harmonics: its Fourier series on the torus of the angles of its first layer.

f(r) = rest(theta), theta_t = 2 pi <Omega_t, r> + phase_t, and `rest` is 2 pi periodic in every angle. So it has a
Fourier series in whole numbers s, sampled on 2N + 1 points per angle. For a polynomial of degree N this is its exact
expansion; for other activations what lies beyond N is folded, and `residual` says how much that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from biascope.errors import InputError
from biascope.fields.encoding import CLOSE, Encoding, encoding
from biascope.fields.support import canonical
from biascope.precision import without_autocast
from biascope.seeds import generator
from biascope.signatures import checked
from biascope.tables import facts, several

MOST = 2_000_000  # points on the torus
PROBES = 512  # random angles at which the series is compared with the network


@dataclass(frozen=True)
class Harmonics:
    """f(r) = Re sum_m C_m exp(2 pi i <w_m, r>), one m for every pair +-s.

    s [m, T] whole numbers; frequencies [m, d] = s Omega in cycles per unit; coefficients C [m, c], complex128, phases
    included. residual: the series against the network at random angles, relative root mean square. close: frequencies
    nearer than this, relative to the largest, are one (rounding of the type that the network holds them in).
    """

    s: Tensor = field(repr=False)
    frequencies: Tensor = field(repr=False)
    coefficients: Tensor = field(repr=False)
    residual: float
    close: float = CLOSE

    @property
    def amplitudes(self) -> Tensor:
        """|C| [m, c]: the amplitude of every sine; at s = 0 the size of the mean."""
        return self.coefficients.abs()

    def __call__(self, r: Tensor) -> Tensor:
        """The series at r [n, d]: [n, c] in float64."""
        phase = 2 * math.pi * r.double() @ self.frequencies.T
        return phase.cos() @ self.coefficients.real - phase.sin() @ self.coefficients.imag

    def energies(self) -> Tensor:
        """Mean square over all angles of every term, summed over outputs: [m]. It is that over r if none coincide."""
        power = self.coefficients.abs().square().sum(1)
        return torch.where(self.s.any(1), power / 2, power)

    @checked
    def share(self, order: int) -> float:
        """Share of the energy in harmonics with sum |s_t| <= order: 1 minus the leakage of that order."""
        power = self.energies()
        return float(power[self.s.abs().sum(1) <= order].sum() / power.sum())

    def merged(self) -> Harmonics:
        """Terms with the same frequency added up (of several s, the shortest is kept); sorted by frequency."""
        keys, sign = canonical(self.frequencies, self.close)
        _, start, index = np.unique(keys.numpy(), axis=0, return_index=True, return_inverse=True)
        first, group = torch.from_numpy(start), torch.from_numpy(index.reshape(-1))  # shortest s come first
        turned = torch.where(sign[:, None] < 0, self.coefficients.conj(), self.coefficients)
        summed = torch.zeros(len(first), turned.shape[1], dtype=turned.dtype, device="cpu").index_add_(0, group, turned)
        w = (self.frequencies * sign[:, None])[first] + 0.0
        still = w.abs().amax(1) <= self.close * self.frequencies.abs().max()
        summed = torch.where(still[:, None], summed.real.to(summed), summed)  # a constant has no sine
        s = self.s[first] * sign[first, None].long()
        return replace(self, s=torch.where(still[:, None], 0, s), frequencies=w, coefficients=summed)

    def _repr_html_(self) -> str:
        """The strongest harmonics, for notebooks."""
        order = self.amplitudes.amax(1).argsort(descending=True)
        rows: dict[str, object] = {"terms": len(self.s), "residual": self.residual}
        rows["largest amplitudes"] = several(self.amplitudes.amax(1)[order])
        return facts("Harmonics", {**rows, "at frequencies": several(self.frequencies.norm(dim=1)[order])})


@checked
@without_autocast()
def harmonics(model: nn.Module | Encoding, order: int | None = None, seed: int = 0) -> Harmonics:
    """Amplitudes and phases of all harmonics of a network of sines.

    Args:
        model: an `FFN`, a `SIREN` or a `MultiplicativeFilter` with few frequencies: (2 order + 1)^T points are needed.
        order: N, the largest |s_t|. None takes the degree of the network where it is a polynomial, then the result is
            exact to rounding and holds sum |s_t| <= N only.
        seed: of the angles at which the series is compared with the network.

    Example:
        >>> from biascope.fields import Polynomial
        >>> from biascope.nets import FFN
        >>> square = FFN(in_features=1, hidden=(4,), frequencies=torch.tensor([[3.0]]), activation=lambda: Polynomial(
        ...     [0.0, 0.0, 1.0]))
        >>> found = harmonics(square)
        >>> found.frequencies.flatten().tolist(), found.residual < 1e-12
        ([0.0, 3.0, 6.0], True)
    """
    e = model if isinstance(model, Encoding) else encoding(model)
    exact = order is None
    if order is None:
        if e.order is None:
            raise InputError("the activations are not polynomials, so no degree is known: give order=, such as order=8")
        order = e.order
    if order < 0:
        raise InputError(f"order={order} must not be negative")
    T, side = len(e.frequencies), 2 * order + 1
    if T * math.log(side) > math.log(MOST):
        raise InputError(
            f"{T} frequencies at order {order} need {side}^{T} points, more than {MOST:,}: give a smaller order= "
            "or a network with fewer frequencies"
        )
    angle = 2 * math.pi * torch.arange(side, dtype=torch.float64, device="cpu") / side
    theta = torch.cartesian_prod(*[angle] * T).reshape(-1, T)
    values = torch.cat([e.rest(part) for part in torch.split(theta, 65_536)])
    axes = tuple(range(T))
    series = torch.fft.fftn(values.reshape((side,) * T + (-1,)), dim=axes, norm="forward").reshape(len(theta), -1)
    whole = torch.arange(side, device="cpu")
    whole = torch.where(whole > order, whole - side, whole)
    s = torch.cartesian_prod(*[whole] * T).reshape(-1, T)
    keep = first_positive(s)
    if exact:
        keep &= s.abs().sum(1) <= order
    s, series = s[keep], series[keep]
    series = torch.where(s.any(1)[:, None], 2 * series, series.real.to(series))
    return compared(e, s, series, seed)


def compared(e: Encoding, s: Tensor, series: Tensor, seed: int = 0) -> Harmonics:
    """Harmonics from the series [m, c] in angles: phases put in, shortest s first, compared with the network.

    Example:
        >>> from biascope.nets import SIREN
        >>> e = encoding(SIREN(in_features=1, hidden=(1,)))  # w sin(theta) + b
        >>> compared(e, torch.tensor([[0]]), torch.zeros(1, 1, dtype=torch.complex128)).residual
        1.0
    """
    probes = (
        2 * math.pi * torch.rand(PROBES, len(e.frequencies), generator=generator(seed, "angles"), device="cpu").double()
    )
    truth = e.rest(probes)
    phase = probes @ s.double().T
    close = phase.cos() @ series.real - phase.sin() @ series.imag
    residual = float((close - truth).norm() / truth.norm()) if bool(truth.any()) else float(close.norm())
    order = torch.from_numpy(np.lexsort((*s.T.flip(0).numpy(), s.abs().sum(1).numpy())))
    s, series = s[order], series[order]
    turned = series * torch.exp(1j * (s.double() @ e.phases))[:, None]
    return Harmonics(s, s.double() @ e.frequencies, turned, residual, e.close)


def first_positive(s: Tensor) -> Tensor:
    """Mask [m] of the integer vectors [m, T] whose first entry that is not zero is positive, and of zero.

    Example:
        >>> first_positive(torch.tensor([[0, -1], [0, 1], [0, 0]])).tolist()
        [False, True, True]
    """
    sign = torch.zeros(len(s), dtype=s.dtype, device="cpu")
    for column in s.T:
        sign = torch.where(sign == 0, column.sign(), sign)
    return sign >= 0
