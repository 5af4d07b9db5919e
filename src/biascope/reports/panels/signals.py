"""Directions of an input with one axis: curves, each with its spectrum where the input is long enough to have one."""

from typing import Any

import numpy as np

from biascope.reports import figures
from biascope.reports.html import Html, figure, join, tag
from biascope.support.errors import InputError

SHORT = 32  # entries below which neighbours need not belong together: bars, and no spectrum
POINTS = 600  # of a drawn curve


def signal(vector: np.ndarray[Any, Any], name: str, prefix: str) -> Html:
    """A direction [D] as a drawing: entries as bars, or a curve beside the magnitudes of its Fourier transform."""
    if vector.ndim != 1:
        raise InputError(f"a signal has one axis, got {list(vector.shape)}")
    if len(vector) < SHORT:
        with figures.style():
            drawing, axes = figures.new_figure(3.9, 2.4)
            axes.bar(np.arange(1, len(vector) + 1), vector, color="C0")
            axes.set(xlabel="entry of the input", ylabel="weight")
        return figure(figures.inline_svg(drawing, prefix), f"{name}, entry by entry")
    where, shown = thinned(vector)
    magnitude = np.abs(np.fft.rfft(vector))
    frequency = np.fft.rfftfreq(len(vector))
    with figures.style():
        drawing, (left, right) = figures.new_figure(5.6, 2.2, 1, 2)
        left.plot(where, shown, color="C0", linewidth=0.8)
        left.set(xlabel="sample", ylabel="weight")
        right.plot(*thinned(magnitude / (magnitude.max() or 1.0), frequency), color="C1", linewidth=0.8)
        right.set(xlabel="cycles per sample", ylabel="Fourier magnitude", xlim=(0, 0.5))
    peak = frequency[int(magnitude.argmax())]
    return figure(
        figures.inline_svg(drawing, prefix), f"{name} over the samples, and its spectrum with its peak at {peak:.3g}"
    )


def thinned(values: np.ndarray[Any, Any], x: Any = None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """x and y of a long curve, drawn by the lowest and highest value of each piece: no peak is lost.

    Example:
        >>> x, y = thinned(np.eye(1, 5000, 1234)[0])
        >>> len(y) <= 2 * POINTS, float(y.max())
        (True, 1.0)
    """
    x = np.arange(len(values)) if x is None else np.asarray(x)
    if len(values) <= 2 * POINTS:
        return x, values
    edges = np.linspace(0, len(values), POINTS + 1).astype(int)[:-1]
    low, high = np.minimum.reduceat(values, edges), np.maximum.reduceat(values, edges)
    return np.repeat(x[edges], 2), np.stack([low, high], 1).ravel()


def frames(vectors: np.ndarray[Any, Any], notes: list[str], frame: Any) -> Html:
    """A drawing of each direction [k, D] with its note; `frame(i)` are the attributes by which the slider finds it."""
    drawn = [
        tag("div", signal(vector, f"direction {i + 1}", f"curve{i}"), tag("p", note, class_="note"), **frame(i))
        for i, (vector, note) in enumerate(zip(vectors, notes))
    ]
    return join(drawn)
