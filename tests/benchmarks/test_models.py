"""The table of models: its page is made from its result, and a wrong value is found."""

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import benchmark_scripts
import biascope as bs


@pytest.fixture(scope="module")
def models() -> Iterator[ModuleType]:
    with benchmark_scripts.script("models") as module:
        yield module


class Words(nn.Module):
    """A language model [n, t] -> [n, t, words] without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.last = nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(self.embedding(input_ids).cumsum(1)).tanh())
        return out


def entry(models: ModuleType) -> Any:
    return models.Entry("here", "test", lambda: (Words(), {"input_ids": torch.randint(5, (3, 3))}))


def test_the_page_is_made_from_the_result(models: ModuleType) -> None:
    assert models.PAGE.read_text() == models.page(json.loads(models.RESULT.read_text()))


def test_the_result_holds_nothing_wrong(models: ModuleType) -> None:
    rows = json.loads(models.RESULT.read_text())["models"]
    cells = {(r["model"], c): r["cells"][c]["status"] for r in rows for c in models.CALLS}
    assert {k: v for k, v in cells.items() if v not in ("ok", "refused")} == {}


def test_a_model_is_judged(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    row = models.row("words", entry(models))
    assert {k: v["status"] for k, v in row["cells"].items()} == dict.fromkeys(models.CALLS, "ok")
    assert row["by_rule"] == 1
    assert set(row["times"]) == set(models.CALLS)

    class Doubled:
        def __init__(self, K: Any) -> None:
            self.tensor = 1.001 * K.tensor

    ntk, fisher = bs.ntk, bs.fisher
    monkeypatch.setattr(bs, "ntk", lambda *args, **how: Doubled(ntk(*args, **how)))
    monkeypatch.setattr(bs, "fisher", lambda *args, **how: fisher(*args, **{**how, "likelihood": "gaussian"}))
    wrong = models.row("words", entry(models))["cells"]
    torch.set_rng_state(state)
    assert [wrong[k]["status"] for k in ("kernel", "diagonal", "ekfac")] == ["WRONG"] * 3


def test_the_eigenbasis_is_compared(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Identities of traces hold in any basis; factors collected with hooks tell which one it is."""
    state = torch.get_rng_state()
    model, x = models.build(entry(models))
    torch.set_rng_state(state)
    truth = models.Truth(model, x)
    assert models.ekfac_error(model, truth) < 1e-8
    A, G = next((A, G) for name, A, G, _ in models.hooked_factors(model, truth) if name == "first")
    E = models.metric(model, x, "ekfac", True)
    assert models.commutator(E, "first", A + torch.diag(torch.arange(len(A))), G, True) > 1e-3
