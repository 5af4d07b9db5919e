"""One Chromium for all browser tests, and the pages they look at, each made once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chromium_driver import Chromium, executable

from biascope.reports import keep, ledger, ledger_page, make_card, make_compare, write_study_page
from biascope.studies import HeatMap, Run, StudyResult, configure, execute

SCRIPT = """
from torch import nn
def build():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 10))
"""


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if executable() is None:
        pytest.skip("no Chromium here: apt-get install chromium, or set BIASCOPE_CHROMIUM to its path")
    with Chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A card with weights and data, a comparison, a study page with maps, a ledger with a kept run."""
    home = tmp_path_factory.mktemp("pages")
    script = home / "net.py"
    script.write_text(SCRIPT)
    space: dict[str, object] = {}
    exec(SCRIPT, space)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.save(space["build"]().state_dict(), home / "weights.pt")  # type: ignore[operator]
    card = make_card(f"{script}:build", out=home / "card.html", networks=24, weights=home / "weights.pt", data="digits")
    assert not any(panel.skipped for panel in card.panels)
    compared = make_compare(["logreg", "mlp", f"{script}:build"], (1, 8, 8), home / "compare.html", networks=24)
    run = Run.create(home / "run", configure("nad/fig4a"))
    execute(run)
    raw = json.loads((run.path / "result.json").read_text())
    result = StudyResult.from_json(raw)
    cells = [[None if i == j == 3 else math.exp(-(i * i + j * j) / 50) for i in range(-8, 8)] for j in range(-8, 8)]
    words = {"x_label": "kx", "y_label": "ky", "z_label": "accuracy", "alt": "a map of accuracy"}
    shown = HeatMap.of("map", "A map", x=range(-8, 8), y=range(-8, 8), z=cells, **words)  # type: ignore[arg-type]
    raw |= replace(result, figures=(*result.figures, shown)).to_json()
    (run.path / "result.json").write_text(json.dumps(raw))
    kept = keep(run.path, home / "reproductions", uncommitted=True).path
    (home / "ledger.html").write_text(ledger_page(ledger(kept.parent), home))
    return {
        "card": card.path,
        "compare": compared.path,
        "study": write_study_page(run.path),
        "kept": kept / "index.html",
        "ledger": home / "ledger.html",
    }
