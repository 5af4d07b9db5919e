"""Figures for print and for pages, all in one style (`biascope.mplstyle`).

Print: `save(figure, folder, name)` writes PNG, SVG and PDF. Pages: `inline_svg(figure)` gives an SVG that takes its
text colour from the page, so the same drawing reads in light and dark.
"""

import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from biascope.errors import BiascopeError, UnsupportedError
from biascope.studies import Chart, HeatMap, files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("biascope.mplstyle")
FORMATS = ("png", "svg", "pdf")
INK = "#101113"  # a colour nobody else uses; on pages it becomes the text colour
PALETTE = ("0072b2", "d55e00", "009e73", "cc79a7", "e69f00", "56b4e9", "7f7f7f")  # as in the style file
_MARKERS = "osD^vP*"
LONG = 10_000  # numbers at ticks are shortened from here


def require_matplotlib() -> Any:
    """The matplotlib package, or one line that says how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("figures need matplotlib: pip install 'biascope[plot]'") from error
    return matplotlib


@contextmanager
def style() -> Iterator[None]:
    """Draw in biascope's style inside this block; the user's own settings come back after it.

    Example:
        >>> with style():
        ...     figure, axes = new_figure()
    """
    matplotlib = require_matplotlib()
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with matplotlib.rc_context(fname=STYLE), matplotlib.rc_context({**ink, "svg.hashsalt": "biascope"}):
        yield


def new_figure(width: float = 3.4, height: float = 2.4, rows: int = 1, columns: int = 1) -> tuple["Figure", Any]:
    """A figure that belongs to nobody (no pyplot state, no window) and its axes.

    Example:
        >>> figure, axes = new_figure()
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns)


def draw(chart: Chart | HeatMap, width: float = 3.4, height: float = 2.4) -> "Figure":
    """A chart (data) as a figure: lines with error bands, points with error bars; a heat map with its colour bar.

    Example:
        >>> from biascope.studies import Series
        >>> figure = draw(Chart("c", "title", "x", "y", (Series.of("s", [0, 1], [0, 1]),), alt="a line"))
    """
    if isinstance(chart, HeatMap):
        return _draw_map(chart, width, height)
    with style():
        figure, axes = new_figure(width, height)
        for index, series in enumerate(chart.series):
            color = f"C{index % 7}"
            if series.style == "points":
                marker = _MARKERS[index % len(_MARKERS)]
                axes.errorbar(
                    series.x, series.y, yerr=series.error, fmt=marker, color=color, label=series.label, elinewidth=0.8
                )
                continue
            plain, dashed = ("-", "--") if index < len(PALETTE) else ("-.", ":")  # a colour that comes again
            dash = dashed if series.style == "dashed" else plain
            axes.plot(series.x, series.y, dash, color=color, label=series.label)
            if series.error is not None:
                low = [y - e for y, e in zip(series.y, series.error)]
                high = [y + e for y, e in zip(series.y, series.error)]
                axes.fill_between(series.x, low, high, color=color, alpha=0.2, linewidth=0)
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
        axes.set_xscale("log" if chart.log_x else "linear")
        axes.set_yscale("log" if chart.log_y else "linear")
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "linear" and max(map(abs, axis.get_view_interval())) >= LONG:
                axis.set_major_formatter(lambda value, _: said(value))
        if chart.x_names:
            axes.set_xticks(range(1, len(chart.x_names) + 1), chart.x_names)
            axes.margins(x=0.2)
        if len(chart.series) > 4:  # too many to find room between the lines
            figure.set_figheight(height + 0.14 * ((len(chart.series) + 1) // 2))
            figure.legend(loc="outside lower center", ncols=2)
        elif len(chart.series) > 1:
            axes.legend()
    return figure


def _draw_map(chart: HeatMap, width: float, height: float) -> "Figure":
    from matplotlib.colors import LogNorm, Normalize

    matplotlib = require_matplotlib()
    cells = np.array(chart.z, dtype=float).reshape(len(chart.y), len(chart.x))
    rows, columns = cells.shape
    square = min(rows, columns) > 1 and max(rows, columns) <= 2 * min(rows, columns)
    with style():
        figure, axes = new_figure(width, min(1.6, rows / columns) * 0.78 * width if square else height)
        low, high = chart.low, chart.high
        if chart.diverging and low is None and high is None and np.isfinite(cells).any():
            high = float(np.nanmax(np.abs(cells))) or 1.0
            low = -high
        norm = LogNorm(low, high) if chart.log_z else Normalize(low, high)
        colours = matplotlib.colormaps["RdBu_r" if chart.diverging else "viridis"].with_extremes(bad="#9a9a9a")
        image = axes.imshow(
            np.ma.masked_invalid(cells),
            origin="lower",
            aspect="equal" if square else "auto",
            cmap=colours,
            norm=norm,
            interpolation="nearest",
        )
        for axis, values in ((axes.xaxis, chart.x), (axes.yaxis, chart.y)):
            axis.set_ticks(*_ticks(values))
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
        axes.grid(False)
        axes.tick_params(length=2)
        if cells.size <= 81 and columns <= 9:  # few enough to be read as numbers
            for (row, column), value in np.ndenumerate(cells):
                if np.isfinite(value):
                    red, green, blue, _ = image.cmap(image.norm(value))
                    ink = "#000000" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "#ffffff"
                    axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=6, color=ink)
        figure.colorbar(image, ax=axes, label=chart.z_label, shrink=0.9 if square else 1.0)
    return figure


def said(value: float, digits: int = 6) -> str:
    """A number at a tick: thousands and millions as k and M, which leaves room for the neighbours.

    Example:
        >>> said(0.25), said(80_000), said(2.5e6, 2)
        ('0.25', '80k', '2.5M')
    """
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, LONG):
            return f"{value / unit:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def _ticks(values: Sequence[float], most: int = 5) -> tuple[list[float], list[str]]:
    """Where to put ticks on an axis of cells, in cells, and what to write there; every cell where there are few.

    Example:
        >>> _ticks([0.0, 0.5, 1.0])
        ([0.0, 1.0, 2.0], ['0', '0.5', '1'])
        >>> _ticks([i / 31 for i in range(32)])[1]
        ['0', '0.2', '0.4', '0.6', '0.8', '1']
    """
    count = len(values)
    if count <= 9:
        return [float(i) for i in range(count)], [said(value, 3) for value in values]
    steps = np.diff(np.asarray(values, dtype=float))
    if steps[0] != 0 and np.allclose(steps, steps[0], rtol=1e-3):  # even: round numbers, between cells if need be
        from matplotlib.ticker import MaxNLocator

        low, high = sorted((float(values[0]), float(values[-1])))
        slack = abs(float(steps[0])) * 1e-6
        found = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)
        nice = [float(value) for value in found if low - slack <= value <= high + slack]
        return [(value - values[0]) / float(steps.mean()) for value in nice], [said(value, 4) for value in nice]
    shown = sorted({round(i * (count - 1) / most) for i in range(most + 1)})
    return [float(i) for i in shown], [said(values[i], 2) for i in shown]


def hover(axes: Any, series: Sequence[tuple[str, Any, Any]] = (), cells: HeatMap | None = None, by: str = "") -> str:
    """What the page needs to show values under the pointer, as JSON: the axes' box and scales, the points or the cells.

    `series` are (name, x, y); `by` "x" or "y" finds the nearest point along that axis only (for bars). Long series are
    thinned to 400 points: the table beside the drawing has them all.

    Example:
        >>> _, axes = new_figure()
        >>> json.loads(hover(axes, [("a", [0, 1], [2, 3])]))["series"][0]
        ['a', [0.0, 1.0], [2.0, 3.0]]
    """
    with style(), require_matplotlib().rc_context({"savefig.bbox": "standard"}):
        axes.figure.draw_without_rendering()  # the layout moves the axes until the first drawing
    box = axes.get_position()
    said: dict[str, Any] = {
        "box": _short([box.x0, 1 - box.y1, box.width, box.height]),
        "x": [*_short(axes.get_xlim()), axes.get_xscale() == "log"],
        "y": [*_short(axes.get_ylim()), axes.get_yscale() == "log"],
        "names": [axes.get_xlabel(), axes.get_ylabel()],
    }
    if by:
        said["by"] = by
    if cells is not None:
        rows = [[None if math.isnan(value) else value for value in _short(row)] for row in cells.z]
        said["cells"] = [_short(cells.x), _short(cells.y), rows]
        said["names"] = [cells.x_label, cells.y_label, cells.z_label]
        return json.dumps(said, separators=(",", ":"))
    said["series"] = []
    for name, x, y in series:
        x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
        good = np.isfinite(x) & np.isfinite(y)
        keep = np.unique(np.linspace(0, max(0, good.sum() - 1), min(400, max(1, good.sum()))).astype(int))
        if good.any():
            said["series"].append([name, _short(x[good][keep]), _short(y[good][keep])])
    return json.dumps(said, separators=(",", ":"))


def _short(values: Any) -> list[float]:
    return [float(f"{float(value):.5g}") for value in values]


def save(
    figure: "Figure", folder: Path, name: str, formats: Sequence[str] = FORMATS, dpi: int | None = None
) -> list[Path]:
    """Write `name`.png, .svg and .pdf into `folder`; each appears whole or not at all. `dpi`: None for the style's.

    Example:
        >>> import tempfile
        >>> [path.suffix for path in save(new_figure()[0], Path(tempfile.mkdtemp()), "f")]
        ['.png', '.svg', '.pdf']
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise BiascopeError(f"figure name {name!r}: use letters, digits, dot, dash and underscore")
    paths = []
    with style():
        resolution = float(require_matplotlib().rcParams["savefig.dpi"])
    for kind in formats:
        path = folder / f"{name}.{kind}"
        paths.append(path)
        with style():
            metadata = {"Date": None} if kind == "svg" else {"CreationDate": None} if kind == "pdf" else None

            def write(target: Path, kind: str = kind, metadata: dict[str, None] | None = metadata) -> None:
                figure.savefig(target, format=kind, metadata=metadata, dpi=dpi or resolution)

            files.write_atomically(path, write)
    return paths


def inline_svg(figure: "Figure", prefix: str) -> str:
    """The figure as an `<svg>` element for a page: no background, text in the page's colour, ids made unique by
    `prefix`.

    Example:
        >>> inline_svg(new_figure()[0], "a").startswith("<svg")
        True
    """
    buffer = io.StringIO()
    # not cut to what is drawn: positions on the page are then known exactly, which the hover needs
    with style(), require_matplotlib().rc_context({"savefig.bbox": "standard"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    for index, color in enumerate(PALETTE):  # the page has a lighter set for dark mode
        svg = svg.replace(f"#{color}", f"var(--c{index})")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    # the page gives the width; the drawing keeps its proportions
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg ([^>]*?)height="[^"]*"( [^>]*?)width="[^"]*"',
        _bare,
        svg,
        count=1,
    )


def _bare(match: re.Match[str]) -> str:
    kept = re.sub(r'\b(width|height)="[^"]*"\s*', "", match.group(0))
    return kept.replace("<svg ", '<svg aria-hidden="true" ', 1)


def picture(values: Any, symmetric: bool = False, scale: int = 1) -> bytes:
    """A 2-D array [h, w] as PNG bytes, one pixel per entry times `scale`; `symmetric` puts white at zero.

    Example:
        >>> import numpy as np
        >>> picture(np.eye(4))[1:4]
        b'PNG'
    """
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
