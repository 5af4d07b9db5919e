"""Pictures of what probes saw (matplotlib, imported only when a picture is asked for)."""

import math
from collections.abc import Sequence
from typing import Any

from biascope.probes.metrics import REGISTER
from biascope.probes.records import MOMENTS, Record
from biascope.support.arguments import check_choice
from biascope.support.errors import InputError
from biascope.support.figures import log_scale, once, pyplot

FEW_STEPS = 20  # fewer need no logarithmic axis
FEW_LINES = 4  # with a colour and a name below each; more are told apart by a ramp of colours
NAMED, LONG = 8, 16  # names beside a ramp, and their length
PAIRED, LONGEST = 16, 40  # letters of names that go two to a row of a legend as wide as the axes, and at all
UNITS = ("loss", "accuracy", "absolute", "relative", "distance", "per_step")  # parts that no axis can share


def plot_records(
    records: Sequence[Record], against: str = "step", log: bool = True, metrics: str | Sequence[str] | None = None
) -> Any:
    """One panel per metric (and unit), one line per part, against "step", "loss", "elapsed" or any value measured;
    returns the figure. `metrics`: only these.
    """
    plt = pyplot()
    seen = [r for r in records if not r.skipped]
    keys = list(dict.fromkeys(key for r in seen for key in r.values))
    if not keys:
        raise InputError("there is nothing to plot yet: no measurement has been made")
    check_choice(against, "against", (*MOMENTS, *keys))
    names: dict[str, list[str]] = {}
    for key in keys:
        names.setdefault(_panel(key), []).append(key)
    if metrics is not None:
        asked = [metrics] if isinstance(metrics, str) else list(metrics)
        for name in asked:
            check_choice(name, "metrics", {key.partition("/")[0] for key in keys})
        names = {panel: found for panel, found in names.items() if found[0].partition("/")[0] in asked}
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = (3.4 * columns, 2.7 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    for ax, (name, keys) in zip(axes.flat, names.items()):
        parts = [_part(key) for key in keys]
        ramp = plt.get_cmap("viridis")([0.95 * i / max(1, len(keys) - 1) for i in range(len(keys))])
        for i, (key, part) in enumerate(zip(keys, parts)):
            points = [(r[against], r[key]) for r in seen if not math.isnan(r[against]) and not math.isnan(r[key])]
            shade = ramp[i] if len(keys) > FEW_LINES else f"C{i}"
            style = {"color": shade, "marker": ".", "markersize": 3, "linewidth": 1}
            ax.plot([x for x, _ in points], [v for _, v in points], label=part, **style)
        ax.set_title(name, fontsize="medium")
        ax.set_xlabel("elapsed (s)" if against == "elapsed" else against)
        metric = REGISTER.get(keys[0].partition("/")[0])
        if metric is not None and metric.decades and all(r[key] > 0 for r in seen for key in keys if key in r.values):
            log_scale(ax, "y")
        ax.tick_params(labelbottom=True)  # also where the panel below is empty
        if len(keys) > FEW_LINES:
            _name_colours(ax, ramp, parts)
        elif len(keys) > 1:  # below, where there is no curve; no wider than the axes, which it would squeeze
            columns = 2 if max(map(len, parts)) <= PAIRED else 1
            under = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "ncols": columns}
            ax.legend(labels=[_short(part, LONGEST) for part in parts], fontsize=7, frameon=False, **under)
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


def _panel(key: str) -> str:
    """The title of the panel that a value belongs to: its metric, and its unit where the metric has several."""
    metric, _, part = key.partition("/")
    unit = part.rpartition("/")[2]
    return " ".join([metric.replace("_", " "), *([f"({unit.replace('_', ' ')})"] if unit in UNITS else [])])


def _part(key: str) -> str:
    """What a line of a panel is called."""
    part = key.partition("/")[2]
    rest, _, unit = part.rpartition("/")
    return rest if unit in UNITS else part


def _short(name: str, length: int) -> str:
    """The end of a name, which tells layers apart."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _name_colours(ax: Any, colours: Any, names: Sequence[str]) -> None:
    """A bar of the lines' colours beside the axes, the first line below, with as many names as there is room for."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    edges = [i - 0.5 for i in range(len(names) + 1)]
    shades = ScalarMappable(BoundaryNorm(edges, len(names)), ListedColormap(colours))
    shown = range(0, len(names), math.ceil(len(names) / NAMED))
    bar = ax.figure.colorbar(shades, ax=ax, ticks=list(shown), pad=0.02, aspect=30)
    bar.ax.set_yticklabels([_short(names[i], LONG) for i in shown])
    bar.ax.tick_params(labelsize=7, length=0)
    bar.ax.minorticks_off()
