"""Two quantities on one chart get a scale each; cells that were not measured stay blank."""

import json

import numpy as np
import pytest

from biascope.reports import figures
from biascope.studies import Chart, HeatMap, Series
from biascope.studies.drawing import draw, quantities, second_scale

CKA = Series.of("CKA, train", [0, 1, 2], [0.0, 0.05, 0.1])
ACCURACY = Series.of("accuracy, train", [0, 1, 2], [0.1, 0.6, 1.0])


def chart(label: str, *series: Series, **more: bool) -> Chart:
    return Chart("c", "C", "epoch", label, series, alt="Both rise.", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("label", ["CKA; training accuracy", "CKA, accuracy"])
def test_two_quantities_have_two_scales(label: str) -> None:
    drawn = draw(chart(label, CKA, ACCURACY))
    left, right = drawn.axes
    assert (left.get_ylabel(), right.get_ylabel()) == quantities(chart(label))
    assert left.get_ylim()[1] < 0.2 < 0.9 < right.get_ylim()[1]
    assert [line.get_label() for line in right.lines] == ["accuracy, train"]
    assert {text.get_text() for text in drawn.legends[0].get_texts()} == {"CKA, train", "accuracy, train"}


def test_the_pointer_finds_a_line_on_the_right_where_it_is_drawn() -> None:
    drawn = draw(chart("CKA; accuracy", CKA, ACCURACY))
    shown = json.loads(figures.hover(drawn.axes[0], [(s.label, s.x, s.y) for s in (CKA, ACCURACY)]))
    assert shown["names"] == ["epoch", "CKA", "accuracy"]
    on_left, on_right = shown["series"]
    assert len(on_left) == 3
    assert on_right[2] == [0.1, 0.6, 1.0]
    low, high = drawn.axes[0].get_ylim()
    bottom, top = drawn.axes[1].get_ylim()
    expected = low + (np.array([0.1, 0.6, 1.0]) - bottom) / (top - bottom) * (high - low)
    assert np.allclose(on_right[3], expected, rtol=1e-3)


def test_one_scale_is_enough_elsewhere() -> None:
    alike = Series.of("CKA, test", [0, 1], [0.2, 0.9])
    assert second_scale(chart("CKA; accuracy", alike, ACCURACY)) == ()  # as large
    assert second_scale(chart("test accuracy, %", ACCURACY)) == ()  # a unit
    assert second_scale(chart("accuracy", CKA, ACCURACY)) == ()
    assert second_scale(chart("CKA; accuracy", CKA, ACCURACY, log_y=True)) == ()
    assert len(draw(chart("accuracy", CKA, ACCURACY)).axes) == 1


def test_cells_that_were_not_measured_are_blank_but_grey_where_zero_is_white() -> None:
    words = {"x_label": "kx", "y_label": "ky", "z_label": "accuracy", "alt": "a map"}
    for diverging, alpha in ((False, 0.0), (True, 1.0)):
        shown = HeatMap.of("m", "M", x=[0, 1], y=[0], z=[[float("nan"), 1.0]], diverging=diverging, **words)  # type: ignore[arg-type]
        image = draw(shown).axes[0].images[0]
        assert image.to_rgba(image.get_array())[0, 0, 3] == alpha
