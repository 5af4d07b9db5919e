"""What a study page takes from the documents: citation, symbols, published numbers beside ours."""

import re
from pathlib import Path

import pytest

from biascope.reports import write_study_page
from biascope.reports.published import citation, published_section, symbol_list
from biascope.studies import Run, configure, execute
from biascope.studies.claims import Document, Published, documents, symbols
from biascope.studies.judging import Compared
from biascope.support.estimate import Estimate


def test_a_citation_has_authors_title_year_and_link() -> None:
    text = citation(documents()["nad"])
    assert "Pascal Frossard" in text
    assert "2020" in text
    assert 'href="https://arxiv.org/abs/2006.09717"' in text
    assert citation(Document("a", "T", "A. B", 2021, "PhD")) == "A. B. T. PhD, 2021."


def test_symbols_that_occur_are_defined_and_others_are_not() -> None:
    found = symbol_list("nad/fig4b", ["Spearman correlation of zeta(l) with the loss, l = 3"])
    assert re.findall(r"<code>(.*?)</code>", found) == ["zeta(l)", "l"]
    assert symbol_list("nad/fig4b", ["sleep, small"]) == ""
    assert symbol_list("somebody/else", ["l"]) == ""


def test_every_folder_with_symbols_has_studies() -> None:
    from biascope.studies import studies

    assert set(symbols()) <= {name.partition("/")[0] for name in studies()}


@pytest.mark.parametrize("values", [(0.5, 0.6), (1e-3, 200.0), (-3.0, 4e4)])
def test_published_numbers_stand_beside_ours_once(values: tuple[float, float]) -> None:
    compared = [
        Compared(Published(f"number {i}", value, 0.1), Estimate(value + shift, 0.01, 4))
        for i, (value, shift) in enumerate(zip(values, (0.0, 0.5)))
    ]
    text = published_section([*compared, compared[0]])
    assert text.count("<td>number 0</td>") == 1
    assert re.findall(r"<td>(agree|differ)</td>", text) == ["agree", "differ"]
    assert f"number 0: published {values[0]:g}, ours" in text
    assert "<svg" in text
    assert published_section([]) == ""


def test_a_page_says_claim_paper_and_symbols_and_marks_a_smoke_run(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", configure("nad/fig4b"))
    execute(run)
    text = write_study_page(run.path, formats=("png",)).read_text(encoding="utf-8")
    assert text.index("proves nothing") < text.index("The claim") < text.index("What was measured")
    assert "arXiv:2006.09717" in text
    assert "<code>zeta(l)</code>" in text
