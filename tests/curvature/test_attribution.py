"""Influence in streams against matrices of gradients in float64: exact scores, random features, the folder, LDS."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import biascope as bs
from biascope.curvature import attribution
from biascope.curvature.attribution import lds
from biascope.curvature.features import Draws
from biascope.curvature.uses import loss_gradients
from biascope.support.errors import InputError, UnsupportedError
from curvature.curvature_zoo import relative

N, Q, DAMPING = 11, 4, 0.05


class Net(nn.Module):
    """An embedding, a normalisation, linear layers with and without bias, a parameter used by hand: [n, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 5, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.norm(self.words(x)))) * self.scale
        return self.head(h.mean(1))


def network() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 7, (n, 3), generator=g), torch.randint(0, 5, (n,), generator=g)


TRAIN, QUERIES = data(N, 1), data(Q, 2)
METRICS = ["ekfac", "kfac", "diagonal", "block", "dense", "lowrank", "implicit", None]


def metric(net: nn.Module, representation: str | None) -> bs.curvature.Metric | None:
    return None if representation is None else bs.fisher(net, TRAIN, representation)


def truth(net: nn.Module, F: bs.curvature.Metric | None) -> tuple[Tensor, Tensor]:
    """Scores [q, n] and self-influence [n]."""
    left, right = loss_gradients(net, QUERIES), loss_gradients(net, TRAIN)
    if F is None:
        return left @ right.T, right.square().sum(1)
    D = F.to_dense() + DAMPING * torch.eye(left.shape[1], dtype=torch.float64)
    inverse = torch.linalg.inv(D)
    return left @ inverse @ right.T, (right @ inverse * right).sum(1)


@pytest.mark.parametrize("representation", METRICS)
def test_exact_scores(representation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    F = metric(net, representation)
    scores, own = truth(net, F)
    monkeypatch.setattr(attribution, "PARTS", 60)  # a few rows at a time
    found = bs.influence(net, TRAIN, QUERIES, F, damping=DAMPING, top=3, self_influence=True, batch_size=4)
    assert relative(found.scores, scores) < 1e-8
    assert found.self_influence is not None
    assert relative(found.self_influence, own) < 1e-8
    best = scores.topk(3, 1)
    assert torch.equal(found.top, best.indices)
    assert relative(found.values, best.values) < 1e-8
    assert not found.errors.any()
    assert "example" in str(found)


@pytest.mark.parametrize("representation", METRICS)
def test_random_features_are_unbiased_and_know_their_error(representation: str | None) -> None:
    net = network()
    F = metric(net, representation)
    scores, _ = truth(net, F)
    z, size = [], scores.norm() / scores.numel() ** 0.5
    for seed in range(6):
        found = bs.influence(net, TRAIN, QUERIES, F, damping=DAMPING, top=N, dim=4000, seed=seed)
        z.append((found.values - scores.gather(1, found.top)) / found.errors)
        assert found.errors.mean() < size
    squares = torch.stack(z).square()
    assert squares.max() < 4.5**2  # the largest of 264 standard normal numbers
    assert 0.5 < float(squares.mean()) < 1.8  # those of one seed share its draws


def test_errors_of_many_layers_whose_features_share_vectors() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Tanh())]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 5, bias=False)).double()
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(N, 3, 4, generator=g, dtype=torch.float64), torch.randint(0, 5, (N,), generator=g)
    F = bs.fisher(net, x, "ekfac")
    rows = loss_gradients(net, (x, y))
    truth = rows @ torch.linalg.solve(F.to_dense() + DAMPING * torch.eye(rows.shape[1], dtype=torch.float64), rows.T)
    assert Draws(0, 1024, 8).side == 16
    off, errors = [], []
    for seed in range(40):
        found = bs.influence(net, (x, y), (x[:Q], y[:Q]), F, damping=DAMPING, top=N, dim=1024, seed=seed)
        at = found.top.argsort(1)
        off.append(found.scores - truth[:Q])
        errors.append(found.errors.gather(1, at))
    off, errors = torch.stack(off), torch.stack(errors)
    z = off / errors
    assert 0.7 < float(z.square().mean()) < 1.3
    assert z.abs().max() < 6  # of 1760
    assert (off.mean(0) / off.std(0) * 40**0.5).square().mean() < 2  # unbiased
    assert (off.std(0) / errors.mean(0)).sub(1).abs().max() < 0.5


@pytest.mark.parametrize("spread", [(0.0, 0.0, 1.0), (0.5, 0.0, 1.0), (0.6, 0.4, 0.5)])
def test_errors_are_variances_of_tables(spread: tuple[float, float, float]) -> None:
    """Means of tables m + r_a + s_b + e_ab have variance (Var r / k + Var s / k + Var e / k^2) / groups."""
    g = torch.Generator().manual_seed(0)
    draws = Draws(0, 2048, 32)
    k, groups, many = draws.side, 2, 500
    assert k == 32
    r, s, e = (
        d * torch.randn(shape, generator=g, dtype=torch.float64)
        for d, shape in zip(spread, [(many, groups, k, 1), (many, groups, 1, k), (many, groups, k, k)])
    )
    found = draws.errors((0.3 + r + s + e).flatten(1) / 2048)
    variance = ((spread[0] ** 2 + spread[1] ** 2) / k + spread[2] ** 2 / k**2) / groups
    # a part that is estimated as negative counts as none, which is some percent too much where there is none
    assert -0.03 < float(found.square().mean()) / variance - 1 < 0.25 * (spread[0] * spread[1] == 0) + 0.03


def test_preconditioning_the_training_side_makes_the_error_small() -> None:
    """The same scores with all of the inverse on the queries' side have a larger scatter."""
    net = network()
    F = bs.fisher(net, TRAIN, "ekfac")
    options: dict[str, Any] = {"damping": 1e-3, "top": N, "dim": 4000}
    both = bs.influence(net, TRAIN, QUERIES, F, **options)
    assert isinstance(F, bs.curvature.Metric)
    one = bs.influence(net, TRAIN, QUERIES, bs.fisher(net, TRAIN, "implicit"), **options)
    assert both.errors.mean() / both.scores.std() < 0.7 * one.errors.mean() / one.scores.std()


def test_factors_reduced_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from curvature.test_ladder import SIDES
    from curvature.test_ladder import data as tokens
    from curvature.test_ladder import metric as reduced
    from curvature.test_ladder import network as language

    for side in SIDES:
        net, (x, y) = language(), tokens()
        F = reduced(monkeypatch, side)
        rows = loss_gradients(net, (x, y), class_dim=-1)
        D = F.to_dense() + DAMPING * torch.eye(rows.shape[1], dtype=torch.float64)
        scores = rows @ torch.linalg.solve(D, rows.T)
        exact = bs.influence(net, (x, y), (x, y), F, damping=DAMPING, class_dim=-1)
        assert relative(exact.scores, scores) < 1e-8
        found = bs.influence(net, (x, y), (x, y), F, damping=DAMPING, class_dim=-1, dim=4000, top=len(x))
        z = (found.values - scores.gather(1, found.top)) / found.errors
        assert z.abs().max() < 4.5


def test_a_folder_continues_and_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    F = bs.fisher(net, TRAIN, "ekfac")
    options: dict[str, Any] = {"damping": DAMPING, "dim": 64, "batch_size": 3}
    whole = bs.influence(net, TRAIN, QUERIES, F, **options)
    folder = tmp_path / "features"
    calls = 0
    train = attribution.Features.train

    def failing(self: Any, *args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return train(self, *args)

    monkeypatch.setattr(attribution.Features, "train", failing)
    with pytest.raises(KeyboardInterrupt):
        bs.influence(net, TRAIN, QUERIES, F, store=folder, **options)
    assert len((folder / "parts.jsonl").read_text().splitlines()) == 2
    found = bs.influence(net, TRAIN, QUERIES, F, store=folder, **options)
    assert calls == 5  # 4 parts in all, of which the third was tried twice
    assert torch.equal(found.scores, whole.scores)
    other = bs.influence(net, TRAIN, (QUERIES[0][:1], QUERIES[1][:1]), F, store=folder, **options)
    assert calls == 5
    assert relative(other.scores, whole.scores[:1]) < 1e-12
    # a damaged part is computed again, what does not belong is refused
    array = np.load(folder / "features.npy", mmap_mode="r+")
    array[4] += 1
    array.flush()
    mended = bs.influence(net, TRAIN, QUERIES, F, store=folder, **options)
    assert calls == 6
    assert torch.equal(mended.scores, whole.scores)
    with pytest.raises(InputError, match="other data"):
        bs.influence(net, (TRAIN[0].flip(0), TRAIN[1]), QUERIES, F, store=folder, **options)
    with pytest.raises(InputError, match="another metric"):
        bs.influence(net, TRAIN, QUERIES, bs.fisher(net, QUERIES, "ekfac"), store=folder, **options)
    with torch.no_grad():
        net.scale[0] += 1
    with pytest.raises(InputError, match="another network"):
        bs.influence(net, TRAIN, QUERIES, F, store=folder, **options)
    assert json.loads((folder / "influence.json").read_text())["dim"] == 64


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(InputError, match="the disk has 0 free"):
        bs.influence(network(), TRAIN, QUERIES, None, damping=0.0, dim=64, store=tmp_path / "f")
    assert not list((tmp_path / "f").iterdir())


def test_language_models(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from curvature.test_tokens import batch, gpt2

    model, inputs = gpt2(), batch()
    F = bs.fisher(model, inputs, "ekfac", estimator="monte-carlo")
    rows = loss_gradients(model, inputs)
    D = F.to_dense() + DAMPING * torch.eye(rows.shape[1], dtype=torch.float64)
    scores = rows @ torch.linalg.solve(D, rows.T)
    assert relative(bs.influence(model, inputs, inputs, F, damping=DAMPING).scores, scores) < 1e-8
    found = bs.influence(model, inputs, inputs, F, damping=DAMPING, dim=4000, top=3, store=tmp_path / "f")
    z = (found.values - scores.gather(1, found.top)) / found.errors
    assert z.abs().max() < 4.5


def test_lds_is_a_mean_of_rank_correlations() -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 10, generator=g)
    subsets = torch.rand(20, 10, generator=g) < 0.5
    measured = subsets.float() @ scores.T + torch.randn(20, 3, generator=g)
    measured[:4] = measured[0]  # ties
    found = lds(scores, subsets, measured)
    each = [stats.spearmanr((subsets.double() @ scores.double().T)[:, q], measured[:, q]).statistic for q in range(3)]
    assert found.value == pytest.approx(np.mean(each), abs=1e-12)
    assert found.standard_error == pytest.approx(np.std(each, ddof=1) / 3**0.5)
    with pytest.raises(InputError, match="do not fit scores"):
        lds(scores, subsets.T, measured)
    with pytest.raises(InputError, match="the same number"):
        lds(scores, subsets, torch.zeros(20, 3))


def test_what_cannot_be_is_refused() -> None:
    net = network()
    F = bs.fisher(net, TRAIN, "diagonal")
    with pytest.raises(InputError, match="a store holds random features"):
        bs.influence(net, TRAIN, QUERIES, F, damping=0.1, store="nowhere")
    with pytest.raises(InputError, match="damping"):
        bs.influence(net, TRAIN, QUERIES, F, damping=0.0)
    with pytest.raises(InputError, match="needs labels"):
        bs.influence(net, TRAIN[0], QUERIES, F, damping=0.1)
    with pytest.raises((InputError, UnsupportedError), match="parameter"):
        bs.influence(nn.Linear(3, 2), TRAIN, QUERIES, F, damping=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*TRAIN), batch_size=2, shuffle=True)
    with pytest.warns(UserWarning, match="shuffles"):
        found = bs.influence(net, loader, QUERIES, F, damping=0.1)
    assert relative(found.scores, bs.influence(net, TRAIN, QUERIES, F, damping=0.1).scores) < 1e-12


def test_damping_and_likelihood_are_those_of_the_metric() -> None:
    net = network()
    F = bs.fisher(net, TRAIN, "ekfac")
    tenth = 0.1 * float(F.trace()) / F.shape[0]
    assert torch.equal(bs.influence(net, TRAIN, QUERIES, F).scores, influence_at(net, F, tenth, "categorical"))
    left, right = loss_gradients(net, QUERIES), loss_gradients(net, TRAIN)
    assert relative(bs.influence(net, TRAIN, QUERIES, None).scores, left @ right.T) < 1e-10

    real = nn.Linear(3, 1).double()
    x, y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(N).double()
    G = bs.fisher(real, x, "dense", "gaussian")
    found = bs.influence(real, (x, y), (x[:2], y[:2]), G, damping=DAMPING)
    rows = torch.cat([x, torch.ones_like(x[:, :1])], 1)  # the gradient of -log p is (f - y) times these
    grads = (real(x).detach()[:, 0] - y)[:, None] * rows
    want = grads[:2] @ torch.linalg.solve(rows.T @ rows / N + DAMPING * torch.eye(4), grads.T)
    assert relative(found.scores, want) < 1e-8
    with pytest.raises(InputError, match="at least 2 outputs"):
        bs.influence(real, (x, y), (x[:2], y[:2]), G, likelihood="categorical")


def influence_at(net: nn.Module, F: bs.curvature.Metric, damping: float, likelihood: Any) -> Tensor:
    return bs.influence(net, TRAIN, QUERIES, F, damping=damping, likelihood=likelihood).scores
