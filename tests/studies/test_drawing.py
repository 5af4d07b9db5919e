"""Legends stay off the lines, and bands within sight."""

from dataclasses import replace

import pytest

from biascope.studies import Chart, HeatMap, Series
from biascope.studies.drawing import draw

pytest.importorskip("matplotlib")


def chart(*series: Series) -> Chart:
    return Chart("c", "title", "x", "y", series, alt="lines")


def test_a_legend_finds_the_free_corner() -> None:
    figure = draw(chart(Series.of("up", [0, 1], [0, 1]), Series.of("flat", [0, 1], [0, 0])))
    assert not figure.legends
    assert figure.axes[0].get_legend() is not None


def test_a_legend_without_a_free_place_goes_below() -> None:
    zigzag = [0.0, 1.0] * 30
    figure = draw(chart(Series.of("one", range(60), zigzag), Series.of("two", range(60), zigzag[::-1])))
    assert len(figure.legends) == 1
    assert figure.axes[0].get_legend() is None
    assert figure.get_figheight() > draw(chart(Series.of("one", [0, 1], [0, 1]))).get_figheight()


@pytest.mark.parametrize(
    "names",
    [
        (
            "last layer averaged out, 400 networks",
            "sampled, 6000 networks",
            "upper edge for an isotropic network, sampled",
        ),
        ("mean over all the networks that were drawn, with the last layer averaged out in closed form", "one"),
        tuple(f"direction {i} of the network my_package.models:build" for i in range(6)),
    ],
    ids=["two columns too wide", "one column too wide", "many"],
)
@pytest.mark.parametrize("free", [True, False])
def test_no_legend_is_wider_than_its_figure(names: tuple[str, ...], free: bool) -> None:
    """Saved pictures grow to what is drawn; a paper shrinks them to its column, and the plot becomes unreadable."""
    y = [0.0, 0.0] if free else [0.0, 1.0] * 30
    figure = draw(chart(*(Series.of(name, range(len(y)), y) for name in names)))
    axes = figure.axes[0]
    figure.draw_without_rendering()
    for legend in [*figure.legends, *filter(None, [axes.get_legend()])]:
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
        assert [text.get_text().replace("\n", " ") for text in legend.get_texts()] == list(names)
        if legend in figure.legends:
            assert box.y1 <= axes.get_tightbbox().y0  # and it lies under the axes
    assert axes.get_window_extent().height > 0.5 * 2.4 * figure.dpi  # which keep their height


def test_points_are_not_joined() -> None:
    """The line between two points is not drawn, so a legend may lie on it; points under it push it out."""
    corners = [Series.of(str(k), [0, 1], [k, 1 - k], style="points") for k in (0, 1)]
    assert not draw(chart(*corners)).legends
    dense = [(x / 20, y / 20) for x in range(21) for y in range(21)]
    cloud = [Series.of(name, *zip(*dense), style="points") for name in ("a", "b")]
    assert len(draw(chart(*cloud)).legends) == 1


@pytest.mark.parametrize(("log", "lowest"), [(True, 0.2 / 3), (False, -0.8)])
def test_a_band_that_reaches_zero_ends_below_the_values_on_a_logarithmic_axis(log: bool, lowest: float) -> None:
    figure = draw(replace(chart(Series.of("one", [0, 1], [0.2, 2.0], [1.0, 0.1])), log_y=log))
    (band,) = figure.axes[0].collections
    heights = [y for path in band.get_paths() for _, y in path.vertices]
    assert min(heights) == pytest.approx(lowest)
    assert max(heights) == pytest.approx(2.1)


def test_one_series_needs_no_legend() -> None:
    figure = draw(chart(Series.of("one", [0, 1], [0, 1])))
    assert not figure.legends
    assert figure.axes[0].get_legend() is None


def test_names_that_would_run_into_each_other_are_written_aslant() -> None:
    def angles(*names: str) -> set[float]:
        series = (Series.of("s", range(1, len(names) + 1), range(len(names)), style="points"),)
        figure = draw(Chart("c", "t", "x", "y", series, alt="a", x_names=names))
        return {label.get_rotation() for label in figure.axes[0].get_xticklabels()}

    assert angles("ReLU", "SIREN", "RFF") == {0.0}
    assert angles("SIREN 5", "SIREN 30", "SIREN 100", "SIREN 30, MAML", "SIREN 30, Reptile") == {20.0}


def test_few_values_of_x_all_have_a_tick() -> None:
    figure = draw(Chart("c", "t", "width", "y", (Series.of("s", [4, 8], [1, 2]),), alt="a line"))
    assert list(figure.axes[0].get_xticks()) == [4, 8]


def test_few_measured_points_are_seen_as_points() -> None:
    few, many = [0.0, 1.0, 0.5], [0.0] * 60
    figure = draw(
        chart(
            Series.of("few", range(3), few),
            Series.of("many", range(60), many),
            Series.of("published", range(3), few, style="dashed"),
        )
    )
    assert [line.get_marker() for line in figure.axes[0].lines] == ["o", "", ""]


def test_a_legend_stays_off_error_bars() -> None:
    """matplotlib finds a place between the points, and takes bars for nothing."""
    points = [Series.of(name, [1, 2], [y, y], [0.9, 0.9], "points") for name, y in (("one", 1.0), ("two", 2.0))]
    figure = draw(chart(*points))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    inside = axes.get_legend()
    bars = [bar.get_transform().transform_path(path) for bar in axes.collections for path in bar.get_paths()]
    assert len(bars) == 4
    for legend in [*figure.legends, *([inside] if inside else [])]:
        assert not any(bar.intersects_bbox(legend.get_window_extent(), filled=False) for bar in bars)


def test_an_axis_can_fall_and_a_map_can_have_a_frame_and_light_low_values() -> None:
    series = Series.of("E", [1.0, 0.1, 0.01], [0.0, 0.5, 1.0])
    falling = Chart("e", "E", "lambda", "E", (series,), alt="rises", log_x=True, falling_x=True)
    left, right = draw(falling).axes[0].get_xlim()
    assert left > right
    grid = [-1.0, 0.0, 1.0, 2.0]
    shown = HeatMap.of(
        "m", "Map", x=grid, y=grid, z=[[float(i + j) for i in range(4)] for j in range(4)],
        x_label="a", y_label="b", z_label="xi", alt="a map", light_low=True, box=(0, 0, 1, 1),
    )  # fmt: skip
    axes = draw(shown).axes[0]
    (frame,) = axes.lines
    assert frame.get_xydata().tolist() == [[1, 1], [2, 1], [2, 2], [1, 2], [1, 1]]  # cells of 0 and 1
    image = axes.images[0]
    low, high = (sum(image.cmap(image.norm(value))[:3]) for value in (0.0, 6.0))
    assert low > high


def test_a_line_of_one_point_is_a_point() -> None:
    one = Series("published", (90.0,), (45.1,), error=(0.3,), style="dashed")
    axes = draw(Chart("a", "a", "x", "y", (one, Series("ours", (90.0,), (45.9,))), alt="two points")).axes[0]
    assert [line.get_marker() not in ("", "None") for line in axes.lines if len(line.get_xdata()) == 1] == [True, True]
