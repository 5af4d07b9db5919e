"""The first screen of a card, the definitions of its quantities, and inputs with one axis."""

import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from biascope.reports import make_card
from biascope.reports.first_screen import first_screen, picture
from biascope.reports.glossary import MEANINGS, glossary, meaning
from biascope.reports.html import Html, tag
from biascope.reports.panels import anatomy, input_geometry
from biascope.reports.panels.base import Panel
from biascope.reports.panels.signals import POINTS, signal, thinned
from biascope.reports.study_page import fact_list


def test_sentences_lead_to_their_panels_beside_one_picture() -> None:
    drawing = tag("figure", Html('<svg><g id="a"/><use href="#a"/></svg>'))
    panels = [Panel("Kernel", "", "", [drawing], headline="K is 1."), Panel("Input", "", "", headline="x is 2.")]
    sentences = [("K is 1.", "Kernel", "kernel"), ("x is 2.", "Input", "input")]
    text = first_screen("net", sentences, panels)
    assert re.findall(r'href="#(kernel|input)"', text) == ["kernel", "input"]
    assert 'id="first-a"' in text
    assert 'href="#first-a"' in text
    assert first_screen("net", [], panels) == ""


def test_the_picture_is_the_one_that_a_panel_offers() -> None:
    panels = [Panel("A", "", "", [tag("figure", "drawn")]), Panel("B", "", "", picture=tag("figure", "offered"))]
    assert "offered" in picture(["a", "b"], panels)
    assert "drawn" in picture(["a"], panels)
    assert picture([], panels) == ""


def test_quantities_are_defined_on_their_names_and_at_the_end() -> None:
    facts = fact_list([("Effective rank, initialisation", "3"), ("Parameters", 7)])
    assert f'title="{meaning("Effective rank")}"' in facts
    assert facts.count("title=") == 1
    assert re.findall(r"<dt>(.*?)</dt>", glossary([facts])) == ["Effective rank"]
    assert glossary(["nothing"]) == ""
    assert all(len(told) < 160 and not told.endswith(".") for told in MEANINGS.values())


def test_long_curves_keep_their_peaks() -> None:
    wave = np.zeros(50_000)
    wave[31_234], wave[7] = 5.0, -3.0
    x, y = thinned(wave)
    assert len(x) == len(y) == 2 * POINTS
    assert (y.max(), y.min()) == (5.0, -3.0)
    short = np.arange(10.0)
    assert thinned(short)[1] is short


def test_a_signal_shows_where_its_spectrum_peaks_and_few_entries_have_none() -> None:
    wave = np.cos(2 * np.pi * 0.125 * np.arange(256))
    text = signal(wave, "direction 1", "p")
    assert "its spectrum with its peak at 0.125" in text
    assert "cycles per sample" in text
    assert "cycles" not in signal(np.ones(6), "direction 1", "p")
    with pytest.raises(ValueError, match="one axis"):
        signal(np.ones((2, 2)), "direction 1", "p")


@pytest.mark.slow
def test_a_card_of_sound_has_curves_with_spectra(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv1d(1, 4, 9, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 30, 2))

    card = make_card(build, (1, 128), tmp_path / "c.html", networks=16, panels=[anatomy.panel, input_geometry.panel])
    text = card.path.read_text(encoding="utf-8")
    assert text.count("cycles per sample") >= 8
    assert len(re.findall(r'data-set="nad"', text)) == 8
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert 'class="first"' in text
    assert 'id="quantities"' in text
