"""The card on a GPU: in time, and with the contents it has on the CPU."""

from pathlib import Path

import pytest

from biascope.reports import make_card
from biascope.reports.panels.base import make_subject
from biascope.reports.panels.input_geometry import by_differences

pytestmark = pytest.mark.gpu


def test_a_card_on_cuda_is_whole_and_quick(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    card = make_card("lenet", out=tmp_path / "c.html", device="cuda")
    assert card.seconds < 120
    assert [panel.title for panel in card.panels if panel.skipped] == ["Alignment with the labels"]  # no --data
    text = card.path.read_text()
    assert "NVIDIA" in text
    assert "nan" not in " ".join(panel.meaning for panel in card.panels)
    assert "mean brightness" in card.panels[1].meaning  # what LeNet prefers
    assert "is what it learns" in card.panels[2].meaning


def test_the_heavy_parts_stay_on_the_device() -> None:
    made = make_subject("resnet18", device="cuda", networks=16)
    assert all(parameter.is_cuda for parameter in made.network.parameters())
    assert all(piece.is_cuda for piece in by_differences(made, 16))
