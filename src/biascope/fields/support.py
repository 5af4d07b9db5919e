"""Which frequencies a coordinate network can hold at all (theorem 5.1), which it cannot, and which it folds.

A network with L layers and polynomial activations of degree K, behind sines of frequencies Omega_t, is a sum of sines
with frequencies in

    H = { sum_t s_t Omega_t : s_t whole, sum_t |s_t| <= K^(L-1) },

zero included. L counts linear layers, so that K^(L-1) is the degree of the network as a polynomial of its features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biascope.fields.fitting import coordinates
from biascope.fields.networks import CLOSE, frequencies_of
from biascope.support.errors import InputError
from biascope.support.limits import Count, Positive
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import facts

MOST = 5_000_000  # integer vectors that are listed


@dataclass(frozen=True)
class HarmonicSupport:
    """H: frequencies [m, d], one of every pair +-w (a sine has both), in order; zero included.

    orders [m]: the smallest sum |s_t| that reaches a frequency. multiplicities [m]: in how many ways, that is by how
    many integer vectors s of the ball.
    """

    frequencies: Tensor = field(repr=False)
    orders: Tensor = field(repr=False)
    multiplicities: Tensor = field(repr=False)
    order: int

    def __len__(self) -> int:
        return len(self.frequencies)

    def _repr_html_(self) -> str:
        """How many frequencies, and the highest, for notebooks."""
        rows = {"frequencies": len(self), "largest order": self.order}
        return facts("Harmonic support", {**rows, "highest": float(self.frequencies.norm(dim=1).max())})


@checked
def harmonic_support(frequencies: Tensor | nn.Module, degree: Count, layers: Count) -> HarmonicSupport:
    """The harmonics that K^(L-1) allows, by listing integer vectors: for few frequencies and small orders.

    Args:
        frequencies: Omega [T] or [T, d] in cycles per unit, or a network (`FFN`, `SIREN`) whose first layer has them.
        degree: K of the activation. For ReLU or sine, the degree of a polynomial that is close to it; what is left out
            then is not zero, see `spectrum_leakage`.
        layers: L, linear layers behind the sines.

    Sums that differ by no more than the rounding of the numbers given are one frequency: 0.1 + 0.2 and 0.3, in float32
    to 2e-7 of the largest sum, in float64 to 1e-9. Give float64 where smaller differences are meant.

    Example:
        >>> harmonic_support(torch.tensor([3.0, 10.0]), degree=2, layers=2).frequencies.flatten().tolist()
        [0.0, 3.0, 6.0, 7.0, 10.0, 13.0, 20.0]
    """
    B, close = frequencies_of(frequencies)
    order = degree ** (layers - 1)
    s = integer_ball(len(B), order)
    w = s.double() @ B
    keys, sign = canonical(w, close)
    _, start, index = np.unique(keys.numpy(), axis=0, return_index=True, return_inverse=True)
    first, group = torch.from_numpy(start), torch.from_numpy(index.reshape(-1))
    m = len(first)
    smallest = torch.full((m,), order, device="cpu").scatter_reduce_(0, group, s.abs().sum(1), "amin")
    ways = torch.bincount(group, minlength=m)
    found = (w * sign[:, None])[first]
    ways = torch.where(found.abs().amax(1) > close * w.abs().max(), ways // 2, ways)  # +w and -w fell together
    return HarmonicSupport(found + 0.0, smallest, ways, order)


@checked
def missing_bins(
    frequencies: Tensor | nn.Module, degree: Count, layers: Count, n: Count, extent: Positive = 1.0
) -> Tensor:
    """DFT bins [n, ..., n] of an n^d grid over a box of side `extent` that no harmonic falls on.

    What a signal has there no training can fit. Harmonics above n / 2 are folded, as sampling does.

    Example:
        >>> missing_bins(torch.tensor([1.0]), degree=4, layers=2, n=8, extent=2.0)  # odd bins
        tensor([False,  True, False,  True, False,  True, False,  True])
    """
    support = harmonic_support(frequencies, degree, layers).frequencies * extent
    bins = support.round()
    _, close = frequencies_of(frequencies)
    if not bool((support - bins).abs().max() < max(1e-6, close * float(support.abs().max()))):
        bad = support[(support - bins).abs().amax(1).argmax()] / extent
        box = f"a bin of a box of side {extent:g}"
        raise InputError(f"the harmonic {bad.tolist()} does not fall on {box}: give an extent that holds whole periods")
    missing = torch.ones((n,) * bins.shape[1], dtype=torch.bool, device="cpu")
    for sign in (1, -1):
        missing[tuple((sign * bins.long() % n).T)] = False
    return missing


@without_autocast()
def spectrum_leakage(
    f: Callable[[Tensor], Tensor], frequencies: Tensor | nn.Module, degree: int, layers: int, n: int, extent: float = 1
) -> float:
    """Share of the energy of f: [..., d] -> [..., c] outside H, from its DFT on n^d points of a box of side `extent`.

    Rounding for a polynomial of that degree (in float64); for other activations, what the degree leaves out. The mean
    counts. The box must hold whole periods; harmonics above n / 2 are folded.
    """
    missing = missing_bins(frequencies, degree, layers, n, extent)
    d = missing.dim()
    with torch.no_grad():
        values = f(coordinates((n,) * d, 0.0, extent, dtype=_dtype(f)))
    transform = torch.fft.fftn(values.double().cpu().reshape(*missing.shape, -1), dim=tuple(range(d)))
    power = transform.abs().square().sum(-1)
    return float(power[missing].sum() / power.sum())


@dataclass(frozen=True)
class NyquistCheck:
    """Which frequencies a sampling can tell apart.

    frequencies [T, d]; rate, samples per unit; above [T], those beyond rate / 2 in any coordinate; aliases [T, d], the
    frequency below that which takes the same values on the samples; reach, the highest harmonic of the given order.
    """

    frequencies: Tensor = field(repr=False)
    rate: float
    above: Tensor = field(repr=False)
    aliases: Tensor = field(repr=False)
    reach: float

    @property
    def share(self) -> float:
        """Share of the frequencies that are folded."""
        return float(self.above.double().mean())

    @property
    def safe(self) -> bool:
        """Whether no harmonic of the given order can be folded."""
        return self.reach <= self.rate / 2

    def _repr_html_(self) -> str:
        """Share of folded frequencies and the highest harmonic, for notebooks."""
        rows: dict[str, object] = {"Nyquist frequency": self.rate / 2, "initial frequencies above it": self.share}
        return facts("Nyquist check", {**rows, "highest harmonic": self.reach})


@checked
def nyquist_check(frequencies: Tensor | nn.Module, rate: Positive, order: Count = 1) -> NyquistCheck:
    """Whether initial frequencies, and their harmonics up to an order, are below half the sampling rate.

    What is above it fits the samples as well as its alias does, and shows between them (section 5.3.2).

    Args:
        frequencies: [T] or [T, d] in cycles per unit, or a network. SIREN's are w0 W_0 / (2 pi), so at most
            w0 / (2 pi d) at initialisation.
        rate: samples per unit of the coordinates: n / 2 for n samples on [-1, 1).
        order: of the harmonics that count for `reach`; K^(L-1), or a few for sines.

    Example:
        >>> found = nyquist_check(torch.tensor([23.0, 105.0]), rate=128.0)
        >>> found.above.tolist(), found.aliases.flatten().tolist()
        ([False, True], [23.0, -23.0])
    """
    B, _ = frequencies_of(frequencies)
    above = (B.abs() > rate / 2).any(1)
    return NyquistCheck(B, rate, above, B - rate * torch.round(B / rate), order * float(B.abs().max()))


def integer_ball(T: int, radius: int) -> Tensor:
    """All integer vectors of T entries with sum |s_t| <= radius: [m, T]."""
    count = sum(2**i * math.comb(T, i) * math.comb(radius, i) for i in range(min(T, radius) + 1))
    if count > MOST:
        what = f"{T} frequencies and harmonics up to order {radius} are {count:,} combinations"
        raise InputError(f"{what}, more than {MOST:,}: use fewer frequencies, layers or a smaller degree")
    s, used = torch.zeros(1, 0, dtype=torch.long, device="cpu"), torch.zeros(1, dtype=torch.long, device="cpu")
    for _ in range(T):
        parts = []
        for v in range(-radius, radius + 1):
            keep = used + abs(v) <= radius
            parts.append(torch.cat([s[keep], torch.full((int(keep.sum()), 1), v, device="cpu")], 1))
        s = torch.cat(parts)
        used = s.abs().sum(1)
    order = np.lexsort(s.flip(1).T.numpy())
    return s[torch.from_numpy(order)]


def canonical(w: Tensor, close: float = CLOSE) -> tuple[Tensor, Tensor]:
    """Whole numbers [m, d] that are equal where frequencies [m, d] are equal up to sign and rounding; the signs [m].

    Equal: nearer than `close` times the largest. The sign makes the first entry that is not zero positive. The numbers
    have the order of the frequencies.
    """
    step = close * float(w.abs().max())
    sign = torch.zeros(len(w), dtype=w.dtype, device="cpu")
    for column in w.T:
        sign = torch.where(sign == 0, torch.where(column.abs() > step, column.sign(), 0.0), sign)
    sign = torch.where(sign == 0, 1.0, sign)
    return torch.stack([_groups(column, step) for column in (w * sign[:, None]).T], 1), sign


def _groups(values: Tensor, step: float) -> Tensor:
    """Numbers [m] in the order of the values [m]: equal for values with no gap above `step` between them.

    Groups, not rounding to a grid, which has equal values on both sides of its half-way points. Where values lie so
    dense that a chain of them is long, it is cut into pieces of four steps.
    """
    ordered, order = values.sort(stable=True)
    new = torch.ones(len(values), dtype=torch.bool, device="cpu")
    new[1:] = ordered.diff() > step
    start = ordered[new][new.cumsum(0) - 1]
    piece = ((ordered - start) / (4 * step or 1.0)).floor()
    new[1:] |= piece.diff() > 0
    return torch.empty(len(values), dtype=torch.long, device="cpu").index_copy_(0, order, new.cumsum(0))


def _dtype(f: Any) -> torch.dtype:
    first = next(f.parameters(), None) if isinstance(f, nn.Module) else None
    return torch.float64 if first is None else first.dtype
