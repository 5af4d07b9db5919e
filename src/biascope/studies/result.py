"""What a study hands back: numbers, what they say in a sentence, and charts as plain data. Rules judge the numbers.

Charts are data, not drawings: `reports/` draws them for print and for pages, and anyone can read the numbers back.
"""

import html
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from biascope.support.errors import CorruptError, InputError
from biascope.support.estimate import Estimate as Estimate


@dataclass(frozen=True)
class Series:
    """One curve of a chart: x and y of the same length, and optionally a standard error per point.

    Example:
        >>> Series("loss", (0.0, 1.0), (2.0, 0.5), error=(0.1, 0.1)).style
        'line'
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[float, ...] | None = None
    style: Literal["line", "points", "dashed"] = "line"

    @classmethod
    def of(
        cls,
        label: str,
        x: Iterable[Any],
        y: Iterable[Any],
        error: Iterable[Any] | None = None,
        style: Literal["line", "points", "dashed"] = "line",
    ) -> "Series":
        """From anything that can be iterated: lists, arrays, tensors.

        Example:
            >>> Series.of("loss", range(2), [1, 2]).y
            (1.0, 2.0)
        """
        made = cls(label, _floats(x), _floats(y), None if error is None else _floats(error), style)
        if len(made.x) != len(made.y) or (made.error is not None and len(made.error) != len(made.y)):
            sizes = f"{len(made.x)} x, {len(made.y)} y, {'no' if made.error is None else len(made.error)} errors"
            raise InputError(f"series {label!r}: lengths differ ({sizes})")
        return made


@dataclass(frozen=True)
class Chart:
    """A chart as data. `alt` says in words what one sees, for those who cannot see it.

    `x_names` are what to write at x = 1, 2, ... where x counts things instead of measuring; `falling_x`: x falls to the
    right.

    Example:
        >>> loss = Series.of("training", [0, 1, 2], [1.0, 0.3, 0.1])
        >>> Chart("loss", "Loss", "step", "loss", (loss,), alt="The loss falls.", log_y=True).series[0].label
        'training'
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    alt: str
    caption: str = ""
    log_x: bool = False
    log_y: bool = False
    x_names: tuple[str, ...] = ()
    falling_x: bool = False

    def _repr_html_(self) -> str:
        """The drawing and its numbers, for notebooks."""
        from biascope.studies.drawing import notebook

        return notebook(self)


@dataclass(frozen=True)
class HeatMap:
    """A map as data: `z[row][column]` at (x[column], y[row]); a cell that was not measured is NaN.

    `diverging` is for quantities with a meaningful zero (differences, correlations); low and high fix the colour range;
    `light_low`: small values are light. `box`: a red frame from (x, y) to (x, y), in the units of the axes.

    Example:
        >>> HeatMap("m", "Map", "kx", "ky", "accuracy", (0.0, 1.0), (0.0,), ((0.5, 1.0),), alt="two cells").z[0][1]
        1.0
    """

    name: str
    title: str
    x_label: str
    y_label: str
    z_label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    z: tuple[tuple[float, ...], ...]
    alt: str
    caption: str = ""
    low: float | None = None
    high: float | None = None
    diverging: bool = False
    log_z: bool = False
    light_low: bool = False
    box: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        *,
        x: Iterable[Any],
        y: Iterable[Any],
        z: Iterable[Iterable[Any]],
        x_label: str,
        y_label: str,
        z_label: str,
        alt: str,
        caption: str = "",
        low: float | None = None,
        high: float | None = None,
        diverging: bool = False,
        log_z: bool = False,
        light_low: bool = False,
        box: Iterable[Any] | None = None,
    ) -> "HeatMap":
        """From anything that can be iterated; z has one row per y and one column per x.

        Example:
            >>> shown = HeatMap.of("map", "Accuracy", x=[0, 1], y=[0], z=[[0.5, 1.0]], x_label="kx", y_label="ky",
            ...                    z_label="accuracy", alt="two cells")
            >>> shown.z
            ((0.5, 1.0),)
        """
        rows = tuple(_floats(math.nan if cell is None else cell for cell in row) for row in z)
        made_x, made_y = _floats(x), _floats(y)
        if len(rows) != len(made_y) or any(len(row) != len(made_x) for row in rows):
            raise InputError(f"heat map {name!r}: z must be {len(made_y)} rows of {len(made_x)} cells")
        return cls(
            name, title, x_label, y_label, z_label, made_x, made_y, rows, alt, caption, low, high, diverging, log_z,
            light_low, None if box is None else _floats(box),
        )  # fmt: skip

    def _repr_html_(self) -> str:
        """The drawing and its numbers, for notebooks."""
        from biascope.studies.drawing import notebook

        return notebook(self)


@dataclass(frozen=True)
class StudyResult:
    """The outcome of a study: what was measured, in a sentence or two, the numbers behind it, and charts.

    Example:
        >>> made = StudyResult("a - b is 2.0 ± 0.1.", {"a - b": Estimate(2.0, 0.1, 5)})
        >>> StudyResult.from_json(made.to_json()) == made
        True
    """

    measured: str = ""
    numbers: Mapping[str, Estimate] = field(default_factory=dict)
    figures: tuple[Chart | HeatMap, ...] = ()

    def __post_init__(self) -> None:
        # figures become files: where a name holds that of an own network (script.py:factory), it is made fit for one
        fit = tuple(replace(chart, name=re.sub(r"[^\w.-]+", "-", chart.name)) for chart in self.figures)
        object.__setattr__(self, "figures", fit)

    def _repr_html_(self) -> str:
        """What was measured and the numbers, for notebooks."""
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(estimate))}</td></tr>"
            for name, estimate in self.numbers.items()
        )
        return f"<p>{html.escape(self.measured)}</p><table>{rows}</table>"

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; `from_json` gives the same result back."""
        return _without_nan(asdict(self))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Any) -> "StudyResult":
        """Read what `to_json` wrote."""
        try:
            charts = tuple(
                HeatMap.of(**chart)
                if "z" in chart
                else Chart(
                    **{
                        **chart,
                        "series": tuple(Series.of(**series) for series in chart["series"]),
                        "x_names": tuple(chart.get("x_names", ())),
                    }
                )
                for chart in data["figures"]
            )
            numbers = {name: Estimate(**estimate) for name, estimate in data["numbers"].items()}
            return cls(data["measured"], numbers, charts)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"not a study result: {error!r}") from error


def _floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _without_nan(value: Any) -> Any:
    """Cells of maps that were not measured are null in JSON, which has no NaN."""
    if isinstance(value, dict):
        return {
            key: [[None if math.isnan(cell) else cell for cell in row] for row in item]
            if key == "z"
            else _without_nan(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
