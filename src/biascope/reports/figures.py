"""Figures of pages and runs: drawings with values under the pointer, files for print, small pictures.

The drawing itself is `biascope.studies.drawing`, which notebooks share.
"""

import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from biascope.studies import HeatMap
from biascope.studies.drawing import (
    FORMATS,
    INK,
    PALETTE,
    STYLE,
    draw,
    inline_svg,
    new_figure,
    numbers,
    require_matplotlib,
    save,
    style,
)
from biascope.support.figures import log_scale


def hover(axes: Any, series: Sequence[tuple[str, Any, Any]] = (), cells: HeatMap | None = None, by: str = "") -> str:
    """What the page needs to show values under the pointer, as JSON: the axes' box and scales, the points or the cells.

    `series` are (name, x, y); `by` "x" or "y" finds the nearest point along that axis only (for bars). Long series are
    thinned to 400 points: the table beside the drawing has them all.
    """
    inline_svg(axes.figure, "")  # the layout moves the axes when they are drawn, for every format a little differently
    box = axes.get_position()
    shown: dict[str, Any] = {
        "box": _short([box.x0, 1 - box.y1, box.width, box.height]),
        "x": [*_short(axes.get_xlim()), axes.get_xscale() == "log"],
        "y": [*_short(axes.get_ylim()), axes.get_yscale() == "log"],
        "names": [axes.get_xlabel(), axes.get_ylabel()],
    }
    if by:
        shown["by"] = by
    if cells is not None:
        rows = [[None if math.isnan(value) else value for value in _short(row)] for row in cells.z]
        shown["cells"] = [_short(cells.x), _short(cells.y), rows]
        shown["names"] = [cells.x_label, cells.y_label, cells.z_label]
        return json.dumps(shown, separators=(",", ":"))
    shown["series"] = []
    second = [twin for twin in axes.figure.axes if twin is not axes and twin.get_label() != "<colorbar>"]
    shown["names"] += [twin.get_ylabel() for twin in second]
    on_right = {line.get_label() for twin in second for line in twin.lines}
    for name, x, y in series:
        x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
        good = np.isfinite(x) & np.isfinite(y)
        keep = np.unique(np.linspace(0, max(0, good.sum() - 1), min(400, max(1, good.sum()))).astype(int))
        if good.any():
            made = [name, _short(x[good][keep]), _short(y[good][keep])]
            if name in on_right:  # where it is drawn, on the scale of the left
                (low, high), (bottom, top) = axes.get_ylim(), second[0].get_ylim()
                made.append(_short(low + (y[good][keep] - bottom) / (top - bottom) * (high - low)))
            shown["series"].append(made)
    return json.dumps(shown, separators=(",", ":"))


def _short(values: Any) -> list[float]:
    return [float(f"{float(value):.5g}") for value in values]


def picture(values: Any, symmetric: bool = False, scale: int = 1) -> bytes:
    """A 2-D array [h, w] as PNG bytes, one pixel per entry times `scale`; `symmetric` puts white at zero."""
    matplotlib = require_matplotlib()
    array = np.asarray(values, dtype=float)
    if symmetric:
        top = float(np.abs(array).max()) or 1.0
        low, high, name = -top, top, "RdBu_r"
    else:
        low, high, name = float(array.min()), float(array.max()), "viridis"
    array = np.kron(array, np.ones((scale, scale)))
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, array, vmin=low, vmax=max(high, low + 1e-30), cmap=matplotlib.colormaps[name], format="png")
    return buffer.getvalue()
