"""Charts as drawings, in one style (`biascope.mplstyle`): for print, for pages and for notebooks.

matplotlib is imported only when something is drawn; a notebook without it shows the numbers.
"""

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from biascope.studies.result import Chart, HeatMap, Series
from biascope.support import files
from biascope.support.errors import BiascopeError, UnsupportedError
from biascope.support.figures import log_scale, log_ticks
from biascope.support.tables import grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("biascope.mplstyle")
INK = "#101113"  # a colour used for nothing else; on pages it becomes the text colour
PALETTE = ("0072b2", "d55e00", "009e73", "cc79a7", "e69f00", "56b4e9", "7f7f7f")  # as in the style file
FORMATS = ("png", "svg", "pdf")
_MARKERS = "osD^vP*"
LONG = 10_000  # numbers at ticks are shortened from here
FEW = 4  # values of x that all get a tick
SEEN = 12  # points of a line that are drawn as such: of so few a reader wants to know what was measured
NAME_GAP = 3.0  # pixels between names under the axis
LEGEND_ROW = 0.14  # inches
SQUEEZED = 2.5  # how much larger one of two quantities is before it gets a scale of its own
SHORTEST = 12  # letters of a line in a legend


def require_matplotlib() -> Any:
    """The matplotlib package, or one line that says how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("figures need matplotlib: pip install 'biascope[plot]'") from error
    return matplotlib


@contextmanager
def style() -> Iterator[None]:
    """Draw in biascope's style inside this block; the user's own settings come back after it."""
    matplotlib = require_matplotlib()
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with matplotlib.rc_context(fname=STYLE), matplotlib.rc_context({**ink, "svg.hashsalt": "biascope"}):
        yield


def new_figure(width: float = 3.4, height: float = 2.4, rows: int = 1, columns: int = 1) -> tuple["Figure", Any]:
    """A figure outside pyplot (no global state, no window) and its axes.

    Example:
        >>> figure, axes = new_figure()
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns)


def draw(chart: Chart | HeatMap, width: float = 3.4, height: float = 2.4) -> "Figure":
    """A chart (data) as a figure: lines with error bands, points with error bars; a heat map with its colour bar."""
    if isinstance(chart, HeatMap):
        return _draw_map(chart, width, height)
    with style():
        figure, axes = new_figure(width, height)
        floor, on_right = _band_floor(chart), second_scale(chart)
        right = axes.twinx() if on_right else axes
        for index, series in enumerate(chart.series):
            _plot(right if series.label in on_right else axes, index, series, floor)
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
        log_scale(axes, "x" * chart.log_x + "y" * chart.log_y)
        if chart.falling_x:
            axes.invert_xaxis()
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "linear" and max(map(abs, axis.get_view_interval())) >= LONG:
                axis.set_major_formatter(lambda value, _: as_text(value))
        measured = sorted({x for series in chart.series for x in series.x})
        if chart.x_names:
            axes.set_xticks(range(1, len(chart.x_names) + 1), chart.x_names)
            axes.margins(x=0.2)
            _keep_names_apart(figure, axes)
        elif not chart.log_x and 1 < len(measured) <= FEW:
            axes.set_xticks(measured)
        if on_right:
            axes.set_ylabel(quantities(chart)[0])
            right.set_ylabel(quantities(chart)[1])
            right.spines["right"].set_visible(True)
            right.grid(False)
            _legend_below(figure, axes, right)
        elif len(chart.series) > 1 and (len(chart.series) > 4 or not _legend_inside(figure, axes)):
            _legend_below(figure, axes)
    return figure


def _plot(axes: Any, index: int, series: Series, floor: float) -> None:
    """One series in its colour: points with error bars, or a line with a band."""
    color = f"C{index % 7}"
    if series.style == "points" or len(series.x) == 1:  # of one point a line shows nothing
        marker = _MARKERS[index % len(_MARKERS)]
        axes.errorbar(
            series.x, series.y, yerr=series.error, fmt=marker, color=color, label=series.label, elinewidth=0.8
        )
        return
    plain, dashed = ("-", "--") if index < len(PALETTE) else ("-.", ":")  # a colour that comes again
    dash = dashed if series.style == "dashed" else plain
    points = "o" if len(series.x) <= SEEN and series.style == "line" else ""  # dashed lines are for comparison
    axes.plot(series.x, series.y, dash, marker=points, color=color, label=series.label)
    if series.error is not None:
        low = [max(y - e, floor) for y, e in zip(series.y, series.error)]
        high = [y + e for y, e in zip(series.y, series.error)]
        axes.fill_between(series.x, low, high, color=color, alpha=0.2, linewidth=0)


def quantities(chart: Chart) -> tuple[str, str]:
    """The two quantities of a vertical axis called "CKA; accuracy" or "CKA, accuracy"; ("", "") for any other."""
    first, _, second = (chart.y_label if ";" in chart.y_label else chart.y_label.replace(",", ";", 1)).partition(";")
    return (first.strip(), second.strip()) if second.strip() else ("", "")


def second_scale(chart: Chart) -> tuple[str, ...]:
    """The series that need a scale of their own, on the right: those of the second quantity where the first would be
    squeezed beside them.

    Example:
        >>> lines = (Series.of("CKA, train", [0, 1], [0.0, 0.1]), Series.of("accuracy, train", [0, 1], [0.1, 1.0]))
        >>> second_scale(Chart("c", "C", "epoch", "CKA; accuracy", lines, alt="Both rise."))
        ('accuracy, train',)
    """
    first = quantities(chart)[0]
    groups = [[each for each in chart.series if each.label.startswith(first) == on_left] for on_left in (True, False)]
    if not first or chart.log_y or not all(groups):
        return ()
    tops = [max((abs(y) for each in group for y in each.y), default=0.0) for group in groups]
    return tuple(each.label for each in groups[1]) if max(tops) > SQUEEZED * min(tops) > 0 else ()


def _band_floor(chart: Chart) -> float:
    """How far down error bands go: on a logarithmic axis, where one that reaches zero has no end, to a third of the
    smallest value, so that the values and not the bands decide what is seen."""
    positive = [y for series in chart.series for y in series.y if y > 0]
    return min(positive) / 3 if chart.log_y and positive else -np.inf


def _keep_names_apart(figure: "Figure", axes: Any) -> None:
    """Names under the axis are written aslant where they would run into each other."""
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    if any(right.x0 < left.x1 + NAME_GAP for left, right in pairwise(boxes)):
        axes.tick_params("x", rotation=20)
        for label in axes.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")


def _legend_below(figure: "Figure", *axes: Any) -> None:
    """A legend under the axes that is no wider than the figure: in one column, then in broken lines, where two are too
    wide. A saved picture grows to what is drawn, and a paper would shrink it, plot and all, to its column."""
    handles, names = ([each for one in axes for each in one.get_legend_handles_labels()[part]] for part in (0, 1))
    longest = max(map(len, names))
    broken = [["\n".join(wrap(name, length)) for name in names] for length in range(longest - 1, SHORTEST, -3)]
    height = figure.get_figheight()
    for columns, words in ((2, names), (1, names), *((1, lines) for lines in broken)):
        legend = figure.legend(handles, words, loc="outside lower center", ncols=columns)
        rows = max(sum(word.count("\n") + 1 for word in words[i::columns]) for i in range(columns))
        figure.set_figheight(height + LEGEND_ROW * rows)
        figure.draw_without_rendering()
        if legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()
    figure.legend(handles, words, loc="outside lower center")  # one long word


def _legend_inside(figure: "Figure", axes: Any) -> bool:
    """A legend between the lines; False, and none is made, if it is wider than the axes or even the best place lies on
    a line or an error bar."""
    legend = axes.legend()
    legend.set_in_layout(False)  # one that is too wide must not squeeze the axes that it is measured against
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    if box.width > axes.get_window_extent().width:
        legend.remove()
        return False
    from matplotlib.collections import LineCollection

    paths = [
        (line.get_transform().transform_path(line.get_path()), line.get_linestyle() != "None") for line in axes.lines
    ]
    bars = [each for each in axes.collections if isinstance(each, LineCollection)]  # of errors
    paths += [(each.get_transform().transform_path(path), True) for each in bars for path in each.get_paths()]
    for path, joined in paths:
        if path.intersects_bbox(box, filled=False) if joined else any(box.contains(*xy) for xy in path.vertices):
            legend.remove()
            return False
    return True


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
        name = "RdBu_r" if chart.diverging else "viridis_r" if chart.light_low else "viridis"
        # not measured: left blank, unless blank could be read as the zero of a diverging map
        colours = matplotlib.colormaps[name].with_extremes(bad="#9a9a9a" if chart.diverging else "none")
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
        if chart.box is not None:
            x, y = (np.interp(chart.box[i::2], each, range(len(each))) for i, each in ((0, chart.x), (1, chart.y)))
            axes.plot(x[[0, 1, 1, 0, 0]], y[[0, 0, 1, 1, 0]], color="red", linewidth=1.2)
        axes.grid(False)
        axes.tick_params(length=2)
        if cells.size <= 81 and columns <= 9:  # few enough to be read as numbers
            for (row, column), value in np.ndenumerate(cells):
                if np.isfinite(value):
                    red, green, blue, _ = image.cmap(image.norm(value))
                    ink = "#000000" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "#ffffff"
                    axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=6, color=ink)
        bar = figure.colorbar(image, ax=axes, label=chart.z_label, shrink=0.9 if square else 1.0)
        if chart.log_z:
            log_ticks(bar.ax.yaxis)
    return figure


def numbers(chart: Chart | HeatMap) -> tuple[list[str], list[tuple[Any, ...]]]:
    """What a chart shows as a table: its header, and a row per point or per cell."""
    if isinstance(chart, HeatMap):
        cells = [(x, y, value) for y, row in zip(chart.y, chart.z) for x, value in zip(chart.x, row)]
        return [chart.x_label, chart.y_label, chart.z_label], list(cells)
    rows = [
        (series.label, x, y, "" if series.error is None else series.error[i])
        for series in chart.series
        for i, (x, y) in enumerate(zip(series.x, series.y))
    ]
    return ["series", chart.x_label, chart.y_label, "standard error"], list(rows)


def notebook(chart: Chart | HeatMap) -> str:
    """A chart as markup for a notebook: the drawing, where matplotlib is there, and its numbers."""
    table = grid(chart.title, *numbers(chart))
    try:
        drawn = draw(chart, 3.9, 2.6)
    except UnsupportedError:
        return table
    svg = inline_svg(drawn, f"c{zlib.crc32(repr(chart).encode()):x}", themed=False)
    words = f"{escape(chart.title)}. {escape(chart.caption)}".strip()
    return (
        f'<figure><div role="img" aria-label="{escape(chart.alt)}" style="max-width: 34em">{svg}</div>'
        f"<figcaption>{words}</figcaption><details><summary>Numbers</summary>{table}</details></figure>"
    )


def save(
    figure: "Figure", folder: Path, name: str, formats: Sequence[str] = FORMATS, dpi: int | None = None
) -> list[Path]:
    """Write `name`.png, .svg and .pdf into `folder`; each appears whole or not at all. `dpi`: None for the style's."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise BiascopeError(f"figure name {name!r}: use letters, digits, dot, dash and underscore")
    paths = [folder / f"{name}.{kind}" for kind in formats]
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with style():
        dpi = dpi or require_matplotlib().rcParams["savefig.dpi"]
        for path, kind in zip(paths, formats):
            write = partial(figure.savefig, format=kind, metadata=undated.get(kind), dpi=dpi)
            files.write_atomically(path, write)
    return paths


def as_text(value: float, digits: int = 6) -> str:
    """A number at a tick: thousands and millions as k and M, which leaves room for the neighbours."""
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
        return [float(i) for i in range(count)], [as_text(value, 3) for value in values]
    steps = np.diff(np.asarray(values, dtype=float))
    if steps[0] != 0 and np.allclose(steps, steps[0], rtol=1e-3):  # even: round numbers, between cells if need be
        from matplotlib.ticker import MaxNLocator

        low, high = sorted((float(values[0]), float(values[-1])))
        slack = abs(float(steps[0])) * 1e-6
        found = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)
        nice = [float(value) for value in found if low - slack <= value <= high + slack]
        return [(value - values[0]) / float(steps.mean()) for value in nice], [as_text(value, 4) for value in nice]
    shown = sorted({round(i * (count - 1) / most) for i in range(most + 1)})
    return [float(i) for i in shown], [as_text(values[i], 2) for i in shown]


def inline_svg(figure: "Figure", prefix: str, themed: bool = True) -> str:
    """The figure as an `<svg>` element for a page: no background, text in the page's colour, ids made unique by
    `prefix`. `themed` takes the colours of lines from the page's style, which a notebook does not have.
    """
    buffer = io.StringIO()
    # not cut to what is drawn: positions on the page are then known exactly, which the hover needs
    with style(), require_matplotlib().rc_context({"savefig.bbox": "standard"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    for index, color in enumerate(PALETTE if themed else ()):  # the page has a lighter set for dark mode
        svg = svg.replace(f"#{color}", f"var(--c{index})")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    head, body = svg.split(">", 1)
    head = re.sub(r'\b(width|height)="[^"]*"\s*', "", head)  # the page gives the width; the drawing keeps proportions
    return head.replace("<svg ", '<svg aria-hidden="true" ', 1) + ">" + body
