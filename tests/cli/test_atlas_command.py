"""`biascope atlas`."""

from pathlib import Path

import pytest

from biascope.cli import app


def test_place_prints_neighbours_and_writes_the_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))\n"
    )
    page = tmp_path / "map.html"
    assert app.run(["atlas", "place", f"{script}:build", "--input", "20", "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "Nearest" in printed
    assert "table-mlp" in printed
    assert '"placed": true' in page.read_text()


def test_build_takes_names_and_names_slips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["atlas", "build", str(tmp_path), "--only", "sirenn"]) == 1
    assert "did you mean siren?" in capsys.readouterr().err
    assert app.run(["atlas", "build", str(tmp_path), "--only", "siren"]) == 0
    assert (tmp_path / "siren-0.safetensors").exists()
    assert (tmp_path / "atlas.safetensors").exists()


def test_show(tmp_path: Path) -> None:
    assert app.run(["atlas", "show", "--out", str(tmp_path / "atlas.html")]) == 0
    assert "resnet18" in (tmp_path / "atlas.html").read_text()
