"""Networks side by side: a page that is sound, sentences that say what is known, refusals in words."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from biascope.reports import compare, figures, make_compare
from biascope.reports.compare import in_words, unique
from biascope.reports.panels.base import Subject
from biascope.reports.spans import Overlaps
from biascope.support.errors import InputError
from biascope.support.tables import number


def test_a_comparison_page(tmp_path: Path, check_page: Callable[[str], None]) -> None:
    before = torch.get_rng_state()
    made = make_compare(["lenet-avg", "lenet-avg", "logreg"], (1, 16, 16), tmp_path / "c.html", networks=32)
    assert torch.equal(torch.get_rng_state(), before)
    page = made.path.read_text()
    check_page(page)
    assert "lenet-avg (2)" in page
    assert made.overlaps[0, 1] == pytest.approx(made.overlaps[0, 0])  # the same seed: the same networks
    assert made.overlaps[0, 0] > 3 * made.overlaps[0, 2]
    assert np.allclose(made.overlaps, made.overlaps.T)
    check_page(made._repr_html_())
    assert f"<td>{number(made.overlaps[0, 0], made.errors[0, 0])}</td>" in made._repr_html_()
    for name in made.names:
        assert made._repr_html_().count(f"<th>{name}</th>") == 2  # its row and its column
    assert "lenet-avg (2) and lenet-avg: overlap" in made.meaning
    assert (
        "100% ± 0% of what two samples of one network share" in made.meaning
    )  # no error between one sample and itself
    own = number(made.overlaps[2, 2], made.errors[2, 2])
    assert f"What the directions of logreg ({own}) are cannot be told from 32 networks" in made.meaning


def test_spectra_side_by_side_are_of_equally_many_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow network has a smaller sample, and the first eigenvalue of a smaller sample is larger by chance alone."""
    sizes = iter((64, 16))

    def gaussian(subject: Subject) -> tuple[Tensor, str]:
        rows = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return rows[: next(sizes)], "given"

    monkeypatch.setattr(compare, "gradients", gaussian)
    page = make_compare(["logreg", "mlp"], (1, 8, 8), tmp_path / "c.html").path.read_text()
    assert "of 16 networks each" in page
    rows = re.findall(r"<tr><td>(logreg|mlp)</td>(?:<td[^>]*>\d+</td>){3}<td>\w+</td><td[^>]*>([\d.]+)</td>", page)
    assert [name for name, _ in rows] == ["logreg", "mlp"]
    assert rows[0][1] == rows[1][1]  # here the same gradients


def test_long_names_leave_room_for_the_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of scripts were written into the legend, which left a third of the axes and was cut off itself."""
    folder = tmp_path / "a_folder_with_a_name_that_is_rather_long"
    folder.mkdir()
    script = folder / "architectures.py"
    names = ("a", "another_function_with_a_name")
    body = "(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))\n"
    script.write_text("from torch import nn\n" + "".join(f"def {name}{body}" for name in names))
    drawn: list[Any] = []

    inline_svg = figures.inline_svg

    def keep(drawing: Any, prefix: str) -> str:
        drawn.append(drawing)
        return inline_svg(drawing, prefix)

    monkeypatch.setattr(figures, "inline_svg", keep)
    made = make_compare([f"{script}:{name}" for name in names], (1, 8, 8), tmp_path / "c.html", networks=8)
    assert made.names == tuple(f"architectures.py:{name}" for name in names)
    assert str(script) in made.path.read_text()  # in the footer
    assert len(drawn) >= 3  # two spectra and the matrix
    for drawing in drawn:
        drawing.draw_without_rendering()
        share = drawing.axes[0].get_window_extent().width / drawing.bbox.width
        assert share > (0.7 if len(drawing.axes) == 1 else 0.35)  # the matrix is square and has a colour bar


def test_few_networks_tell_nothing(tmp_path: Path) -> None:
    made = make_compare(["lenet", "lenet-avg"], (1, 16, 16), tmp_path / "c.html", networks=8)
    assert "cannot be told from 8 networks" in made.meaning
    assert "most alike" not in made.meaning


def test_pairs_that_do_not_differ_are_not_ranked() -> None:
    values, ones = np.full((3, 3), 0.5), np.ones((3, 3))
    shares = np.array([[1, 0.9, 0.3], [0.9, 1, 0.5], [0.3, 0.5, 1]])
    for error, same in ((0.3, True), (0.1, False)):
        said = in_words(["a", "b", "c"], Overlaps(values, 0.01 * ones, shares, error * ones, 4, 0.1), 64)
        assert f"The most alike are b and a: overlap 0.500 ± 0.010, 90% ± {error:.0%}" in said
        assert "the least c and a" in said
        assert ("the same within the errors" in said) == same


def test_text_and_table_agree_on_what_is_known(tmp_path: Path) -> None:
    """Gradients of very different lengths lift eigenvalues above the band, while halves share no direction."""

    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(256) * torch.randn(1).mul(2).exp())

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ self.w[:, None]

    made = make_compare(["lenet-avg", Loud], (1, 16, 16), tmp_path / "c.html", networks=32)
    page = made.path.read_text()
    row = re.search(r"<tr><td>Loud</td>.*?</tr>", page)
    assert row is not None
    above = int(re.findall(r"<td[^>]*>(.*?)</td>", row.group())[3])
    assert above > 0
    assert "<td>no</td>" in row.group()
    assert re.search(r"<tr><td>lenet-avg</td>.*?<td>yes</td>", page)
    assert "the directions of Loud" in made.meaning
    assert f"The eigenvalues above the band ({above} of Loud) do not settle it" in made.meaning
    assert "directions above chance" not in page


def test_sequences_are_compared_without_frequencies(tmp_path: Path, check_page: Callable[[str], None]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(30, 1))

    page = make_compare([build, build], (6, 5), tmp_path / "c.html", networks=8).path.read_text()
    check_page(page)
    assert "Every network in the entries of the input." in page
    assert "no images" in page
    assert "pixel space" not in page


def test_refusals() -> None:
    with pytest.raises(InputError, match="two or more networks"):
        make_compare(["lenet"])
    with pytest.raises(InputError, match="did you mean lenet"):
        make_compare(["lenet", "lenat"])
    assert unique(["a", "a", "b"]) == ["a", "a (2)", "b"]
