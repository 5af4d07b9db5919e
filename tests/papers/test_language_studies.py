"""Influence scores and kernels of fine-tuning: at smoke size, and against what is known exactly."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from biascope.curvature.attribution import lds
from biascope.studies import Run, StudyResult, configure, execute
from biascope_papers.language import attribution, kernels


def result(folder: Path, name: str, **options: Any) -> StudyResult:
    return execute(Run.create(folder / "run", configure(name, "smoke", overrides=options)))


class Bag(nn.Module):
    """An encoder that is linear in its table, unless it has a layer."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.table, self.value = nn.Embedding(30, 6), nn.Linear(6, 6) if layer else nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.value(self.table(input_ids)))


def parts(layer: bool) -> tuple[nn.Module, Any, Any]:
    gen = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = Bag(layer)
    mask = torch.ones(8, 4, dtype=torch.long)
    mask[::2, -1] = 0
    x = {"input_ids": torch.randint(30, (8, 4), generator=gen), "attention_mask": mask}
    y = torch.tensor([1.0, -1.0] * 4)
    model = kernels.PromptClassifier(encoder, torch.randn(6, generator=gen))
    return model, (x, y), ({k: v.roll(1, 1) for k, v in x.items()}, y)


def test_the_prediction_is_exact_where_the_encoder_is_linear() -> None:
    model, train, test = parts(layer=False)
    before = [p.clone() for p in model.parameters()]
    found = kernels.compare(model, train, test, kernels.Setting(steps=20, scale=1.0, rate=0.5))
    assert found["error of the predicted move"] < 1e-3
    assert found["1 - cosine of the kernels before and after"] == pytest.approx(0, abs=1e-6)
    assert found["accuracy, predicted minus real"] == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_and_is_not_where_it_is_not() -> None:
    model, train, test = parts(layer=True)
    found = kernels.compare(model, train, test, kernels.Setting(steps=20, scale=3.0, rate=0.5))
    assert found["error of the predicted move"] > 0.01
    assert found["1 - cosine of the kernels before and after"] > 1e-3


def test_adapters_begin_as_nothing_and_their_kernel_is_a_projection() -> None:
    model, (x, _), _ = parts(layer=True)
    lora, weights = kernels.with_adapters(model, 4000, torch.Generator().manual_seed(0))
    assert weights == ["encoder.value.weight"]
    assert torch.equal(lora(**x), model(**x))
    trained = {name for name, p in lora.named_parameters() if p.requires_grad}
    assert trained == {"encoder.value.A", "encoder.value.B"}
    K, own = kernels.ntk(lora, x, outputs=0), kernels.ntk(model, x, outputs=0, params=weights)
    assert float((K.tensor - own.tensor).norm() / own.tensor.norm()) < 0.1  # 1 / root of the rank, 6 numbers each


def test_scores_of_queries_are_the_librarys() -> None:
    gen = torch.Generator().manual_seed(0)
    S, subsets = torch.randn(3, 10, generator=gen), torch.rand(20, 10, generator=gen) < 0.5
    values = subsets.float() @ S.T + torch.randn(20, 3, generator=gen)
    found = attribution.by_query(S, subsets, values)
    assert float(found.mean()) == pytest.approx(lds(S, subsets, values).value, abs=1e-9)


def test_tokens_follow_their_chains() -> None:
    s = attribution.Setting(examples=300, queries=0, words=3, tokens=40, chains=1)
    _, x, y, class_dim = attribution.tokens(s, seed=0)
    assert x.shape == y.shape == (300, 40)
    assert class_dim == -1
    assert torch.equal(x[:, 1:], y[:, :-1])
    counts = torch.zeros(3, 3).index_put_((x.flatten(), y.flatten()), torch.ones(x.numel()), accumulate=True)
    gen = attribution.generator(0, "chains")
    wanted = torch.softmax(3 * torch.randn(1, 3, 3, generator=gen), -1)[0]
    assert float((counts / counts.sum(1, keepdim=True) - wanted).abs().max()) < 0.03  # 12,000 draws


def test_the_studies_run(tmp_path: Path) -> None:
    found = result(tmp_path / "lds", "language/lds", tasks="tokens")
    assert set(found.numbers) >= {f"LDS, {metric}, tokens" for metric in attribution.METRICS}
    found = result(tmp_path / "kernels", "language/kernels")
    assert found.numbers["error of the predicted move, all parameters, prompt"].n == 2
    cosines = [found.numbers[f"cosine of the kernels of LoRA and of the adapted matrices, rank {r}"] for r in (4, 16)]
    assert 0.5 < cosines[0].value <= 1
