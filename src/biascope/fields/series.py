"""The amplitudes of a network's harmonics: its Fourier series on the torus of the angles of its first layer.

f(r) = rest(theta), theta_t = 2 pi <Omega_t, r> + phase_t, and `rest` is 2 pi periodic in every angle. So it has a
Fourier series in whole numbers s, sampled on 2N + 1 points per angle. For a polynomial of degree N this is its exact
expansion; for other activations what lies beyond N is folded, and `residual` says how much that is.

A SIREN with two layers of sines has it in Bessel functions (Eqs 5.6 to 5.10): exp(i b sin x) = sum_n J_n(b) exp(i n x),
so with a bias a

    sin(a + sum_t b_t sin theta_t) = sum_s P_s [ sin a cos<s, theta>   for sum s_t even,
                                                 cos a sin<s, theta>   for sum s_t odd ],    P_s = prod_t J_{s_t}(b_t).

Biases only change phases. As in frequency modulation, the bandwidth grows with |b|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from scipy.special import jv
from torch import Tensor, nn

from biascope.fields.networks import CLOSE, Encoding, encoding
from biascope.fields.support import canonical
from biascope.nets import SIREN
from biascope.nets.parts import Sine
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.limits import CountOrZero, Share
from biascope.support.precision import without_autocast
from biascope.support.seeds import generator
from biascope.support.signatures import checked
from biascope.support.tables import facts, several

MOST = 2_000_000  # points on the torus
PROBES = 512  # random angles at which the series is compared with the network
LARGEST = 1e7  # argument of a Bessel function; 0.5 s for every 1e5 of it where the share is small


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
def harmonics(model: nn.Module, order: CountOrZero | None = None, seed: int = 0) -> Harmonics:
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
    e = encoding(model)
    exact = order is None
    if order is None:
        if e.order is None:
            raise InputError("the activations are not polynomials, so no degree is known: give order=, such as order=8")
        order = e.order
    T, side = _check_size(len(e.frequencies), order)
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


def _check_size(T: int, order: int) -> tuple[int, int]:
    """The number of angles and of points per angle; refused where they make too many terms."""
    side = 2 * order + 1
    if T * math.log(side) > math.log(MOST):
        raise InputError(f"{T} frequencies at order {order} are {side}^{T} terms, more than {MOST:,}: lower the order")
    return T, side


def compared(e: Encoding, s: Tensor, series: Tensor, seed: int = 0) -> Harmonics:
    """Harmonics from the series [m, c] in angles: phases put in, shortest s first, compared with the network."""
    uniform = torch.rand(PROBES, len(e.frequencies), generator=generator(seed, "angles"), device="cpu")
    probes = 2 * math.pi * uniform.double()
    truth = e.rest(probes)
    phase = probes @ s.double().T
    close = phase.cos() @ series.real - phase.sin() @ series.imag
    residual = float((close - truth).norm() / truth.norm()) if bool(truth.any()) else float(close.norm())
    order = torch.from_numpy(np.lexsort((*s.T.flip(0).numpy(), s.abs().sum(1).numpy())))
    s, series = s[order], series[order]
    turned = series * torch.exp(1j * (s.double() @ e.phases))[:, None]
    return Harmonics(s, s.double() @ e.frequencies, turned, residual, e.close)


def first_positive(s: Tensor) -> Tensor:
    """Mask [m] of the integer vectors [m, T] whose first entry that is not zero is positive, and of zero."""
    sign = torch.zeros(len(s), dtype=s.dtype, device="cpu")
    for column in s.T:
        sign = torch.where(sign == 0, column.sign(), sign)
    return sign >= 0


@checked
@without_autocast()
def bessel_harmonics(model: SIREN, order: CountOrZero, seed: int = 0) -> Harmonics:
    """Harmonics of a SIREN with two hidden layers, truncated at |s_t| <= order; costs F (2 order + 1)^T.

    Args:
        model: SIREN(hidden=(T, F)): w2 sin(w_h (W1 sin(w0 (W0 r + b0)) + b1)) + b2.
        order: N. Nothing is folded, what lies beyond is cut off; `residual` says how much that is.
        seed: of the angles at which the series is compared with the network.

    Example:
        >>> net = SIREN(in_features=1, hidden=(2, 4), w_h=1.0)
        >>> bessel_harmonics(net, order=12).residual < 1e-6
        True
    """
    layers = [m for m in model.layers if isinstance(m, nn.Linear)]
    if len(layers) != 3:
        raise UnsupportedError(f"Bessel functions are for two layers of sines, not {len(layers) - 1}: use harmonics")
    weights = [(layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu()) for layer in layers[1:]]
    (W1, b1), (W2, b2) = weights
    w_h = cast(Sine, model.layers[3]).frequency
    a, b = w_h * b1, (w_h * W1).numpy()  # [F], [F, T]
    T, _ = _check_size(b.shape[1], order)
    whole = np.arange(-order, order + 1)
    table = jv(whole[None, None], b[:, :, None])  # J_n(b_t): [F, T, 2N + 1]
    product = np.ones((len(b), 1))
    for t in range(T):
        product = (product[:, :, None] * table[:, t, None, :]).reshape(len(b), -1)
    s = torch.cartesian_prod(*[torch.from_numpy(whole)] * T).reshape(-1, T)
    keep = first_positive(s)
    s, P = s[keep], torch.from_numpy(product).T[keep]  # [m, F]
    even = (s.sum(1) % 2 == 0)[:, None]
    # Re(C e^{i x}) with C = 1 is the cosine, with C = -i the sine
    neuron = P * torch.where(even, a.sin().to(torch.complex128), -1j * a.cos())
    neuron = torch.where(s.any(1)[:, None], 2 * neuron, neuron)  # +s and -s
    series = neuron @ W2.T.to(neuron)
    series[~s.any(1)] += b2 + model.output_offset
    return compared(encoding(model), s, series, seed)


@checked
def bandwidth(b: float, share: Share = 0.98) -> int:
    """How many harmonics n of exp(i b sin x) hold a share of its energy: the smallest with sum_{|k|<=n} J_k(b)^2 there.

    About |b| + 1 at 98 %, Carson's rule of frequency modulation; 0 is the carrier alone. All energy is 1 (Parseval), so
    what lies beyond n is added up from above, where it is small: shares near 1 are as exact as 1 - share is.
    """
    b = abs(b)
    if not b <= LARGEST:
        raise InputError(f"b={b:g}: Bessel functions are computed up to {LARGEST:g}; beyond, n / |b| no longer changes")
    # J_n(b) ~ (2 / b)^(1/3) Ai((2 / b)^(1/3) (n - b)): below 1e-35 from here on, also for small b
    top = int(b + 60 + 20 * b ** (1 / 3))
    beyond, size = 0.0, 1024
    while top > 0:
        n = np.arange(top, max(0, top - size), -1)
        energy = beyond + np.cumsum(2 * jv(n, b) ** 2)  # of all |k| >= n
        outside = energy > 1 - share
        if outside.any():
            return int(n[np.argmax(outside)])
        beyond, top, size = float(energy[-1]), top - len(n), 2 * size
    return 0
