"""Where a logarithmic axis has ticks, and what is written there.

matplotlib labels minor ticks when less than a decade is seen, which overlap, and mixes 100 with 10^3 on one axis. Here
the ticks are powers of ten; where fewer than three are seen, 1, 2, 5; then 1, ..., 9; then even steps. An axis has one
notation: plain numbers where all lie between 0.001 and 10,000, powers of ten otherwise.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullFormatter, SymmetricalLogLocator

SMALLEST, LARGEST = 1e-3, 1e4  # plain numbers between these
FEW = 3  # fewer ticks do not say how the axis runs


def positions(low: float, high: float, most: int) -> list[float]:
    """Ticks between low and high, both positive; `most` at most (and at least three)."""
    if not (0 < low < high and math.isfinite(high)):
        return []
    most = max(FEW, most)
    slack = (high / low) ** 1e-6  # a tick at the very end counts as seen
    low, high = low / slack, high * slack
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)

    def seen(values: Sequence[float]) -> list[float]:
        return [float(value) for value in values if low <= value <= high]

    powers = seen([float(f"1e{e}") for e in exponents])
    stride = math.ceil(len(powers) / most)
    choices = [[value for value in powers if round(math.log10(value)) % stride == 0] if powers else []]
    if len(powers) < FEW:
        choices += [seen([float(f"{m}e{e}") for e in exponents for m in steps]) for steps in ((1, 2, 5), range(1, 10))]
        choices.append(seen(MaxNLocator(most - 1, steps=[1, 2, 5, 10]).tick_values(low, high)))
    fitting = [ticks for ticks in choices if len(ticks) <= most]
    return next((ticks for ticks in fitting if len(ticks) >= FEW), max(fitting, key=len))


def labels(values: Sequence[float]) -> list[str]:
    """What is written at ticks, in one notation."""
    sizes = [abs(value) for value in values if value]
    if not sizes or (min(sizes) >= SMALLEST * 0.999 and max(sizes) <= LARGEST * 1.001):
        return [f"{value:.6g}" for value in values]
    return [_power(value) for value in values]


def _power(value: float) -> str:
    if not value:
        return "0"
    mantissa, exponent = f"{value:.5e}".split("e")
    front = mantissa.rstrip("0").rstrip(".")
    times = "" if front == "1" else "-" if front == "-1" else rf"{front}\times"
    return rf"$\mathdefault{{{times}10^{{{int(exponent)}}}}}$"


class _Ticks(LogLocator):
    """Ticks of a logarithmic axis by `positions`, as many as there is room for."""

    axis: Any

    def tick_values(self, vmin: float, vmax: float) -> Any:
        low, high = sorted((vmin, vmax))
        low = low if low > 0 else self.axis.get_minpos()
        return np.asarray(positions(low, high, self.axis.get_tick_space()), dtype=float)


class _TicksFromZero(SymmetricalLogLocator):
    """Ticks of an axis that is linear from 0 to 1 and logarithmic from there."""

    axis: Any

    def tick_values(self, vmin: float, vmax: float) -> Any:
        low, high = sorted((vmin, vmax))
        zero = [0.0] if low <= 0 <= high else []
        ticks = positions(max(low, 1.0), high, self.axis.get_tick_space() - len(zero))
        return np.asarray(zero + ticks, dtype=float)


class _Numbers(Formatter):
    """`labels` of the ticks; a number under the pointer by itself."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return labels([x])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        return labels(values)


def put_on(axis: Any) -> None:
    """Ticks and labels for a "log" axis, or a "symlog" one with linthresh=1; minor ticks bear no labels."""
    between = list(range(2, 10))
    if axis.get_scale() == "log":
        axis.set_major_locator(_Ticks())
        axis.set_minor_locator(LogLocator(subs=between))
    else:
        axis.set_major_locator(_TicksFromZero(base=10, linthresh=1))
        axis.set_minor_locator(SymmetricalLogLocator(base=10, linthresh=1, subs=between))
    axis.set_major_formatter(_Numbers())
    axis.set_minor_formatter(NullFormatter())
