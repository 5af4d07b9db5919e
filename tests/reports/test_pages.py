"""Pages and figures: self-contained, escaped, drawn in one style."""

import base64
import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from biascope.reports import figures, html, keep, ledger, ledger_page, write_study_page
from biascope.studies import Chart, Estimate, HeatMap, Run, Series, StudyResult, configure, execute
from biascope.studies.pictures import picture
from biascope.support.errors import BiascopeError, InputError

Check = Callable[[str], None]

LABELS = {"x_label": "x", "y_label": "y", "z_label": "z", "alt": "a map"}
CHART = Chart(
    name="c",
    title="A title",
    x_label="x & y",
    y_label="loss",
    series=(Series.of("a<b", [1, 2, 3], [3, 2, 1], [0.1, 0.1, 0.1]), Series.of("p", [1], [2], style="points")),
    alt="it falls",
    log_y=True,
)


def test_everything_is_escaped(check_page: Check) -> None:
    nasty = "<script>alert('x')</script> & \"q\""
    page = html.page(nasty, [html.table([nasty], [[nasty]], "t"), html.tag("p", nasty, title=nasty)], nasty, nasty)
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert") == 8
    check_page(page)


def test_a_table_downloads_in_full_and_without_markup() -> None:
    rows = [(i, f"a,{i}", html.tag("b", "x & y")) for i in range(30)]
    page = html.table(["n", "text", "mark"], rows, "t", limit=5)
    assert page.count("<tr>") == 6
    assert "25 more rows" in page
    found = re.search(r'href="data:text/csv;base64,([^"]+)"', page)
    assert found is not None
    read = list(csv.reader(io.StringIO(base64.b64decode(found.group(1)).decode())))
    assert len(read) == 31
    assert read[4] == ["3", "a,3", "x & y"]


def test_svg_takes_the_pages_colours_and_has_unique_ids(check_page: Check) -> None:
    one, two = (figures.inline_svg(figures.draw(CHART), prefix) for prefix in ("f0", "f1"))
    check_page(html.page("t", [html.figure(one, "alt"), html.figure(two, "alt")]))
    assert "currentColor" in one
    assert "var(--c0)" in one
    assert figures.INK not in one
    assert "a&lt;b" in one
    head = one[: one.index(">")]
    assert "viewBox" in head
    assert "width=" not in head


def test_save_writes_three_formats_the_same_every_time(tmp_path: Path) -> None:
    first = {path.suffix: path.read_bytes() for path in figures.save(figures.draw(CHART), tmp_path, "f")}
    again = {path.suffix: path.read_bytes() for path in figures.save(figures.draw(CHART), tmp_path, "f")}
    assert set(first) == {".png", ".svg", ".pdf"}
    assert first == again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.pdf", "f.png", "f.svg"]
    with pytest.raises(BiascopeError, match=r"figure name '\.\./x'"):
        figures.save(figures.draw(CHART), tmp_path, "../x")


def test_style_leaves_the_users_settings_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.draw(CHART)
    assert dict(matplotlib.rcParams) == before


def test_heat_maps_are_drawn_with_their_numbers_and_holes() -> None:
    holes = HeatMap.of("m", "t", x=range(3), y=range(2), z=[[1, None, 3], [4, 5, 6]], **LABELS)
    drawn = figures.draw(holes)
    written = [text.get_text() for text in drawn.axes[0].texts]
    assert written == ["1", "3", "4", "5", "6"]
    said = json.loads(figures.hover(drawn.axes[0], cells=holes))
    assert said["cells"][2] == [[1.0, None, 3.0], [4.0, 5.0, 6.0]]
    wide = HeatMap.of("m", "t", x=range(-16, 16), y=range(-16, 16), z=[[0] * 32] * 32, diverging=True, **LABELS)
    axes = figures.draw(wide).axes[0]
    assert axes.get_aspect() == 1.0
    assert "0" in [label.get_text() for label in axes.get_xticklabels()]
    assert len(axes.get_xticks()) <= 8
    assert axes.images[0].cmap.name == "RdBu_r"


def test_many_series_have_their_legend_outside_and_can_be_told_apart() -> None:
    many = replace(CHART, series=tuple(Series.of(f"s{i}", [1, 2], [i + 1, i + 2]) for i in range(9)))
    drawn = figures.draw(many)
    assert drawn.axes[0].get_legend() is None
    assert len(drawn.legends) == 1
    looks = {(line.get_color(), line.get_linestyle()) for line in drawn.axes[0].lines}
    assert len(looks) == 9


def test_long_numbers_at_ticks_are_short_and_things_have_their_names() -> None:
    steps = Chart("c", "t", "step", "y", (Series.of("s", [0, 80_000], [0, 1]),), alt="a line")
    [axes] = figures.draw(steps).axes
    assert "80k" in [axes.xaxis.get_major_formatter()(value, 0) for value in axes.get_xticks()]
    named = replace(CHART, x_names=("lenet", "mlp", "vit"))
    [axes] = figures.draw(named).axes
    assert [(tick.get_position()[0], tick.get_text()) for tick in axes.get_xticklabels()] == [
        (1, "lenet"),
        (2, "mlp"),
        (3, "vit"),
    ]


@pytest.mark.parametrize("values", [[2.0], [4.0, 8.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
def test_hover_knows_where_points_are_on_the_page(values: list[float]) -> None:
    """Points of the chart, taken through the box and the limits, land where the SVG draws their markers."""
    chart = Chart("c", "t", "x", "y", (Series.of("s", values, [30.0] * len(values), style="points"),), alt="points")
    drawn = figures.draw(chart)
    svg = figures.inline_svg(drawn, "p")
    said = json.loads(figures.hover(drawn.axes[0], [("s", values, [30.0] * len(values))]))
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    marks = [tuple(map(float, place)) for place in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', svg)]
    up = (30.0 - said["y"][0]) / (said["y"][1] - said["y"][0])
    y = (said["box"][1] + (1 - up) * said["box"][3]) * height
    for value in values:
        across = (value - said["x"][0]) / (said["x"][1] - said["x"][0])
        x = (said["box"][0] + across * said["box"][2]) * width
        assert any(abs(x - a) < 0.05 and abs(y - b) < 0.05 for a, b in marks)


def test_palette_is_the_one_in_the_style_file() -> None:
    text = figures.STYLE.read_text()
    assert re.findall(r"'([0-9A-F]{6})'", text) == [color.upper() for color in figures.PALETTE]


def test_picture_is_a_png_of_the_array() -> None:
    from matplotlib.image import imread

    values = np.array([[-2.0, 0.0], [1.0, 2.0]])
    back = imread(io.BytesIO(figures.picture(values, symmetric=True, scale=3)))
    assert back.shape[:2] == (6, 6)
    assert back[0, 5, :3] == pytest.approx([0.97, 0.97, 0.97], abs=0.02)  # zero is white
    assert back[0, 0, 2] > back[0, 0, 0]  # negative is blue
    assert back[5, 5, 0] > back[5, 5, 2]  # positive is red
    assert figures.picture(np.zeros((2, 2)))[1:4] == b"PNG"


def test_study_page_and_ledger(tmp_path: Path, check_page: Check) -> None:
    run = Run.create(tmp_path / "reproductions" / "a|b", configure("nad/fig4a", overrides={"sigma": 2}))
    execute(run)
    page = write_study_page(run.path).read_text()
    check_page(page)
    assert "biascope run nad/fig4a --size smoke --seed 0 --device cpu --set sigma=2.0" in page
    assert "A smoke run: it shows that the study runs, and proves nothing" in page
    assert '<span class="badge">proves nothing (smoke run): supported</span>' in page
    assert 'class="badge supported"' not in page
    rows = ledger(tmp_path / "reproductions")
    verdicts = {row.claim.id: row.verdict for row in rows}
    assert (verdicts["nad/4a"], verdicts["nad/4b"]) == ("supported", "undecided")
    shown = ledger_page(rows, tmp_path)
    check_page(shown)
    assert '<a href="reproductions/a|b/index.html">a|b</a>' in shown


def test_results_show_themselves_in_notebooks(check_page: Check) -> None:
    result = StudyResult("a < b, it <is>", {"slope & co": Estimate(1.5, 0.1, 9)})
    shown = result._repr_html_()
    check_page(shown)
    assert "a &lt; b" in shown
    assert "slope &amp; co</td><td>1.50 ± 0.10 (n = 9)" in shown


def test_an_unfinished_run_stops_the_ledger_by_name(tmp_path: Path) -> None:
    Run.create(tmp_path / "half", configure("nad/fig4a"))
    with pytest.raises(InputError, match="half is not finished"):
        ledger(tmp_path)


def test_pictures_of_a_study_have_their_caption_on_the_page_and_when_kept(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", configure("nad/fig4a"))
    execute(run)
    picture(run, "cats", 1, 1, lambda axes: axes[0][0].plot([0, 1]), caption="Two cats & a line.")
    for page in (write_study_page(run.path), keep(run.path, tmp_path / "kept").path / "index.html"):
        text = page.read_text()
        assert text.count("Two cats &amp; a line.") >= 2  # read by the eye, and aloud
        assert 'alt="Two cats &amp; a line."' in text
