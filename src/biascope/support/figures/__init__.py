"""What all pictures share: pyplot where it is there, one drawing per notebook cell, logarithmic axes that can be read.

matplotlib is imported only when something is drawn.
"""

from collections.abc import Sequence
from functools import partial
from math import isfinite
from typing import Any

from biascope.support.errors import InputError

BLUE = "#0072B2"
SLACK = 1e-3  # by which equal eigenvalues may be out of order
ROUNDING = 1e-12  # eigenvalues below this share of the largest are zeros that rounding has moved


def pyplot() -> Any:
    """matplotlib's pyplot, or an error that says how to get it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "biascope[plot]"') from error
    return plt


def axes_or_new(ax: Any, size: tuple[float, float] = (3.4, 2.6)) -> Any:
    """The axes that were given, or those of a new figure of this size in inches."""
    return pyplot().subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def once(figure: Any) -> Any:
    """The same figure; as the last line of a notebook cell it is drawn once.

    Jupyter shows a returned figure, and at the end of the cell every figure that pyplot still holds: the same
    one again. This one leaves pyplot when it is shown. In a script `plt.show()` opens its window as ever.
    """
    figure._repr_mimebundle_ = partial(_leave_pyplot, figure)  # IPython asks for this first, then for the picture
    return figure


def _leave_pyplot(figure: Any, **_: Any) -> dict[str, Any]:
    import matplotlib

    if "inline" in matplotlib.get_backend():  # windows and widgets are drawn once anyway, and closing ends them
        pyplot().close(figure)
    return {}


def log_scale(axes: Any, which: str = "xy", zero: bool = False) -> None:
    """Logarithmic axes ("x", "y", "xy") with few ticks in one notation; with `zero` linear from 0 to 1."""
    if not isinstance(which, str) or not set(which) <= {"x", "y"}:  # "" asks for none
        raise InputError(f"which={which!r}: 'x', 'y' or 'xy' is needed")
    if not hasattr(axes, "set_xscale"):
        raise InputError(
            f"axes: expected matplotlib axes, got {type(axes).__name__}; e.g. plt.subplots()[1], plt.gca()"
        )
    for name in which:
        options = {"linthresh": 1} if zero else {}
        getattr(axes, f"set_{name}scale")("symlog" if zero else "log", **options)
        log_ticks(getattr(axes, f"{name}axis"))


def log_ticks(axis: Any) -> None:
    """Few ticks in one notation on an axis that is logarithmic already, such as a colour bar's."""
    from biascope.support.figures import ticks

    if not hasattr(axis, "get_scale"):
        raise InputError(f"axis: expected an axis such as axes.xaxis, got {type(axis).__name__}")
    ticks.put_on(axis)


def draw_eigenvalues(
    axes: Any,
    values: Sequence[float],
    floor: float = 0.0,
    log_index: bool = False,
    errors: Sequence[float] | None = None,
) -> int:
    """Eigenvalues, largest first, against their index; those below rounding (or `floor`) are left out and counted.

    Where none is left, a word in the picture says so. Standard `errors`, where they are known, are a band around them.
    """
    found = _numbers(values)
    least = max(floor, ROUNDING * max(found))
    shown = [value for value in found if value > least]
    log_scale(axes, "xy" if log_index else "y")
    index = range(1, len(shown) + 1)
    axes.plot(index, shown, color=BLUE, marker="." if len(shown) < 3 else "")
    known = [error if isfinite(error) else 0.0 for error in errors or ()][: len(shown)]
    if any(known):
        low = [max(value - error, value / 10) for value, error in zip(shown, known)]  # logarithms of zero have no place
        high = [value + error for value, error in zip(shown, known)]
        axes.fill_between(index, low, high, color=BLUE, alpha=0.25, linewidth=0, label="standard error")
    if not shown:
        text = f"no eigenvalue above {least:.3g}"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
    axes.set_xlabel("index")
    axes.set_ylabel("eigenvalue")
    return len(found) - len(shown)


def _numbers(values: Any) -> list[float]:
    """A row of finite numbers, largest first: a list, an array or a tensor."""
    values = values.detach().cpu() if hasattr(values, "detach") else values
    try:
        found = [float(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        shape = list(getattr(values, "shape", ())) or type(values).__name__
        raise InputError(f"values: expected a row of real eigenvalues, got {shape}") from error
    if not found or not all(map(isfinite, found)):
        raise InputError("values: there is no eigenvalue" if not found else "values: some are nan or infinite")
    if max(found) > max(0.0, found[0]) * (1 + SLACK):
        raise InputError("values: eigenvalues go from the largest to the smallest, e.g. values.flip(0)")
    return found
