"""Pictures of what probes saw (matplotlib, imported only when a picture is asked for)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from biascope.errors import InputError
from biascope.figures import log_scale, once, pyplot
from biascope.probes.record import Record

if TYPE_CHECKING:
    from biascope.probes.equal import EqualProgress

FEW_STEPS = 20  # fewer need no logarithmic axis
FEW_LINES = 4  # with a colour and a name below each; more are told apart by a ramp of colours
NAMED, LONG = 8, 16  # names beside a ramp, and their length


def plot_records(records: Sequence[Record], against: str = "step", log: bool = True) -> Any:
    """One panel per metric, one line per part, against "step", "loss" or "elapsed"; returns the figure."""
    plt = pyplot()
    seen = [r for r in records if not r.skipped]
    names: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for r in seen for key in r.values):
        names.setdefault(key.partition("/")[0], []).append(key)
    if not names:
        raise InputError("there is nothing to plot yet: no measurement has been made")
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = (3.4 * columns, 2.7 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    for ax, (name, keys) in zip(axes.flat, names.items()):
        parts = [key.partition("/")[2] for key in keys]
        ramp = plt.get_cmap("viridis")([0.95 * i / max(1, len(keys) - 1) for i in range(len(keys))])
        for i, (key, part) in enumerate(zip(keys, parts)):
            points = [(r[against], r[key]) for r in seen if not math.isnan(r[against]) and not math.isnan(r[key])]
            shade = ramp[i] if len(keys) > FEW_LINES else f"C{i}"
            style = {"color": shade, "marker": ".", "markersize": 3, "linewidth": 1}
            ax.plot([x for x, _ in points], [v for _, v in points], label=part, **style)
        ax.set_title(name.replace("_", " "))
        ax.set_xlabel(against)
        ax.tick_params(labelbottom=True)  # also where the panel below is empty
        if len(keys) > FEW_LINES:
            _name_colours(ax, ramp, parts)
        elif len(keys) > 1:  # below, where there is no curve
            under = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "ncols": 2}
            ax.legend(fontsize=7, frameon=False, **under)
    shared = axes[0][0]
    last = max(r.step for r in seen)
    if against == "step" and last < FEW_STEPS:
        shared.xaxis.get_major_locator().set_params(integer=True)
        shared.set_xlim(-0.5, last + 0.5)
    elif log:
        log_scale(shared, "x", zero=against == "step")
    if against == "loss":
        shared.invert_xaxis()
    return once(figure)


def _name_colours(ax: Any, colours: Any, names: Sequence[str]) -> None:
    """A bar of the lines' colours beside the axes, the first line below, with as many names as there is room for."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    edges = [i - 0.5 for i in range(len(names) + 1)]
    shades = ScalarMappable(BoundaryNorm(edges, len(names)), ListedColormap(colours))
    shown = range(0, len(names), math.ceil(len(names) / NAMED))
    bar = ax.figure.colorbar(shades, ax=ax, ticks=list(shown), pad=0.02, aspect=30)
    bar.ax.set_yticklabels([n if len(n) <= LONG else f"…{n[1 - LONG :]}" for n in (names[i] for i in shown)])
    bar.ax.tick_params(labelsize=7, length=0)
    bar.ax.minorticks_off()


def plot_equal_progress(both: EqualProgress, name: str, ax: Any = None) -> Any:
    """A value of two runs against the threshold; progress goes to the right."""
    plt = pyplot()
    if ax is None:
        _, ax = plt.subplots(figsize=(3.4, 2.6))
    one, two = both.column(name)
    ax.plot(both.thresholds, one, color="#0072B2", label="a")
    ax.plot(both.thresholds, two, color="#D55E00", label="b")
    if len(both.thresholds) > 1 and both.thresholds[0] > both.thresholds[-1]:
        ax.invert_xaxis()
    ax.set_xlabel(both.by)
    ax.set_ylabel(name)
    ax.legend(frameon=False)
    return once(ax.figure)
