"""Ticks of logarithmic axes, one drawing per notebook cell, eigenvalues above rounding."""

import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

import biascope  # noqa: E402
from biascope.support.errors import InputError  # noqa: E402
from biascope.support.figures import draw_eigenvalues, log_scale, log_ticks, once  # noqa: E402
from biascope.support.figures.ticks import labels, positions  # noqa: E402


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.mark.parametrize("name", ["biascope.support.figures", "biascope.support.figures.ticks"])
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0.9, 1100, 8, [1, 10, 100, 1000]),
        (1, 24, 8, [1, 2, 5, 10, 20]),
        (1, 24, 3, [1, 10]),  # no room for more
        (1, 3, 6, [1, 2, 3]),
        (3, 9, 5, [4, 6, 8]),
        (0.97, 1.03, 6, [0.98, 1, 1.02]),
        (1e-20, 1, 6, [1e-20, 1e-16, 1e-12, 1e-8, 1e-4, 1]),
        (0, 1, 6, []),
    ],
)
def test_positions(low: float, high: float, most: int, expected: list[float]) -> None:
    assert positions(low, high, most) == pytest.approx(expected)


def test_positions_never_crowd_and_say_how_the_axis_runs() -> None:
    for low in (1e-9, 0.03, 1, 7.7):
        for span in (1.01, 1.5, 3, 8, 20, 150, 1e4, 1e12):
            for most in (3, 4, 6, 9):
                found = positions(low, low * span, most)
                assert 2 <= len(found) <= most, (low, span, most)
                assert all(low * 0.999 <= tick <= low * span * 1.001 for tick in found)


def test_one_notation_per_axis() -> None:
    assert labels([1, 10, 100, 1000, 10000]) == ["1", "10", "100", "1000", "10000"]
    assert labels([0.001, 0.1]) == ["0.001", "0.1"]
    assert all("10^" in label for label in labels([1, 100, 1e5]))
    assert all("10^" in label for label in labels([1e-4, 1]))
    assert r"5\times10^{-7}" in labels([5e-7, 1e-6])[0]


def _written(axis: object) -> list[str]:
    ticks = axis.get_ticklabels(which="both")  # type: ignore[attr-defined]
    return [label.get_text() for label in ticks if label.get_text()]


def test_minor_ticks_bear_no_labels() -> None:
    figure, axes = plt.subplots(figsize=(3, 2))
    axes.plot(range(1, 9), range(1, 9))
    log_scale(axes)
    figure.canvas.draw()
    assert _written(axes.xaxis) == ["1", "2", "5"]


def test_an_axis_from_zero() -> None:
    figure, axes = plt.subplots(figsize=(4, 2))
    axes.plot([0, 30], [0, 1])
    log_scale(axes, "x", zero=True)
    figure.canvas.draw()
    assert _written(axes.xaxis) == ["0", "1", "2", "5", "10", "20"]


def test_all_logarithmic_axes_are_made_in_one_place() -> None:
    """Elsewhere matplotlib's own ticks would come back."""
    root = Path(biascope.__file__).parent
    own = re.compile(r"\b(semilog[xy]|loglog)\(|set_[xy]scale\(|[xy]scale=")
    found = [
        f"{path.relative_to(root)}:{i}"
        for path in root.rglob("*.py")
        if path.parent.name != "figures"
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if own.search(line)
    ]
    assert found == []


def test_a_figure_leaves_pyplot_when_a_notebook_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = once(plt.figure())
    assert figure._repr_mimebundle_(include=None, exclude=None) == {}
    assert plt.fignum_exists(figure.number)  # in a window it stays
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "module://matplotlib_inline.backend_inline")
    figure._repr_mimebundle_(include=None, exclude=None)
    assert not plt.fignum_exists(figure.number)


def test_eigenvalues_below_rounding_are_counted() -> None:
    _, axes = plt.subplots()
    assert draw_eigenvalues(axes, [2.0, 1.0, 1e-15, 0.0]) == 2
    assert list(axes.lines[0].get_ydata()) == [2.0, 1.0]
    assert draw_eigenvalues(axes, [2.0, 1.0, 0.5], floor=0.7) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "there is no eigenvalue"),
        ([float("nan"), 1.0], "some are nan or infinite"),
        ([1.0, 2.0, 4.0], r"from the largest to the smallest, e\.g\. values\.flip\(0\)"),
        (torch.eye(2), r"a row of real eigenvalues, got \[2, 2\]"),
        (torch.tensor([1j, 1.0]), "a row of real eigenvalues"),
        (3.0, "a row of real eigenvalues, got float"),
    ],
)
def test_eigenvalues_that_cannot_be_drawn(values: Any, message: str) -> None:
    _, axes = plt.subplots()
    with pytest.raises(InputError, match=message):
        draw_eigenvalues(axes, values)


def test_an_empty_picture_says_so_and_tensors_are_taken() -> None:
    _, axes = plt.subplots()
    assert draw_eigenvalues(axes, torch.zeros(3)) == 3
    assert [text.get_text() for text in axes.texts] == ["no eigenvalue above 0"]
    _, axes = plt.subplots()
    assert draw_eigenvalues(axes, torch.tensor([4.0, 1.0], requires_grad=True)) == 0
    assert list(axes.lines[0].get_ydata()) == [4.0, 1.0]
    assert not axes.texts


@pytest.mark.parametrize(
    ("axes", "which", "message"), [(plt.subplots, "xy", "expected matplotlib axes"), (0, "z", "which='z'")]
)
def test_axes_that_are_none(axes: Any, which: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        log_scale(axes, which)
    with pytest.raises(InputError, match=r"expected an axis such as axes\.xaxis"):
        log_ticks(plt.subplots()[1])


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(300, 1))


def test_the_spectrum_of_nads_has_its_whole_title_and_names_its_band() -> None:
    found = biascope.nads(linear, (3, 10, 10), n_networks=100)
    figure = found.plot()
    figure.canvas.draw()
    spectrum = figure.axes[-1]
    box = spectrum.title.get_window_extent(figure.canvas.get_renderer())
    assert spectrum.get_title() == "200 of 300 are zero: 100 networks"
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
    assert [text.get_text() for text in spectrum.get_legend().get_texts()] == ["standard error", "isotropic network"]


def test_the_picture_of_a_geometry_says_which_one_and_of_what() -> None:
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

    small = biascope.average_geometry(build, (4,), n_networks=20, scalarise=lambda out: 1e-3 * out[:, 0])
    for found, title in (
        (small, "average geometry"),
        (biascope.geometry_evolution(build, x, y, n_networks=20), "evolution of the geometry"),
    ):
        figure = found.plot()
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        matrix, bar = figure.axes[0], figure.axes[2]
        assert matrix.get_title() == title
        assert (matrix.get_xlabel(), matrix.get_ylabel()) == ("input coordinate", "input coordinate")
        power, above = bar.yaxis.get_offset_text(), matrix.title.get_window_extent(renderer)
        if power.get_text():
            assert not power.get_window_extent(renderer).overlaps(above)


def test_standard_errors_are_a_band_around_eigenvalues() -> None:
    """Where it would reach zero, which has no logarithm, it ends at a tenth of the value; unknown ones have none."""
    _, axes = plt.subplots()
    draw_eigenvalues(axes, [4.0, 1.0, 0.5], errors=[1.0, 2.0, float("nan")])
    corners = axes.collections[0].get_paths()[0].vertices
    for index, low, high in ((1, 3.0, 5.0), (2, 0.1, 3.0), (3, 0.5, 0.5)):
        heights = corners[corners[:, 0] == index, 1]
        assert (heights.min(), heights.max()) == pytest.approx((low, high))
    _, bare = plt.subplots()
    draw_eigenvalues(bare, [4.0, 1.0], errors=[0.0, float("nan")])
    assert not bare.collections
