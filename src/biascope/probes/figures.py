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
    figure, axes = plt.subplots(rows, columns, figsize=(3.4 * columns, 2.5 * rows), sharex=True, squeeze=False)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    for ax, (name, keys) in zip(axes.flat, names.items()):
        for i, key in enumerate(keys):
            points = [(r[against], r[key]) for r in seen if not math.isnan(r[against]) and not math.isnan(r[key])]
            shade = plt.get_cmap("viridis")(i / max(1, len(keys) - 1)) if len(keys) > 4 else f"C{i}"
            style = {"color": shade, "marker": ".", "markersize": 3, "linewidth": 1}
            ax.plot([x for x, _ in points], [v for _, v in points], label=key.partition("/")[2], **style)
        ax.set_title(name.replace("_", " "))
        ax.set_xlabel(against)
        ax.tick_params(labelbottom=True)  # also where the panel below is empty
        if 1 < len(keys) <= 8:
            ax.legend(fontsize=7, frameon=False)
    shared = axes[0][0]
    last = max(r.step for r in seen)
    if against == "step" and last < FEW_STEPS:
        shared.xaxis.get_major_locator().set_params(integer=True)
        shared.set_xlim(-0.5, last + 0.5)
    elif log:
        log_scale(shared, "x", zero=against == "step")
    if against == "loss":
        shared.invert_xaxis()
    figure.tight_layout()
    return once(figure)


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
