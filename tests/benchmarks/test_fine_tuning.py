"""Fine-tuning against its prediction: exact where the encoder is linear in its parameters."""

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import benchmark_scripts


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with benchmark_scripts.script("fine_tuning") as module:
        yield module


class Bag(nn.Module):
    """An encoder that is linear in its table, unless it has a layer."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(30, 6), nn.Linear(6, 6) if layer else nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.layer(self.table(input_ids)))


def parts(script: ModuleType, layer: bool) -> Any:
    gen = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = Bag(layer)
    mask = torch.ones(8, 4, dtype=torch.long)
    mask[::2, -1] = 0
    x = {"input_ids": torch.randint(30, (8, 4), generator=gen), "attention_mask": mask}
    labels = {"input_ids": torch.tensor([[1], [2]]), "attention_mask": torch.ones(2, 1, dtype=torch.long)}
    y = torch.tensor([1.0, -1.0] * 4)
    return script.prompt_classifier(encoder, labels), (x, y), ({k: v.roll(1, 1) for k, v in x.items()}, y)


def test_the_prediction_is_exact_where_the_encoder_is_linear(script: ModuleType) -> None:
    model, train, test = parts(script, layer=False)
    before = [p.clone() for p in model.parameters()]
    found = script.compare(model, train, test, steps=20, scale=1.0, rate=0.5)
    assert found["error_of_move"] < 1e-3
    assert found["kernel_moved"] == pytest.approx(0, abs=1e-6)
    assert found["accuracy_predicted"] == found["accuracy_real"]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_and_is_not_where_it_is_not(script: ModuleType) -> None:
    model, train, test = parts(script, layer=True)
    found = script.compare(model, train, test, steps=20, scale=3.0, rate=0.5)
    assert found["error_of_move"] > 0.01
    assert found["kernel_moved"] > 1e-3
