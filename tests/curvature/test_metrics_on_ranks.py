"""Metrics whose pieces have owners on several ranks, against one process."""

import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.curvature.owned import OwnedMetric
from biascope.support.errors import BiascopeError, CorruptError
from ranks import Failed, Ranks

REPRESENTATIONS = ["ekfac", "kfac", "block", "diagonal", "quasidiagonal", "dense", "lowrank", "eye", "mixed"]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.words(x)))).movedim(-1, 1)  # [n, classes, T]


def network(kind: str, dtype: torch.dtype, n: int) -> tuple[nn.Module, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    if kind == "words":
        y = torch.randint(0, 3, (n, 6), generator=gen)
        y[1:3, 2:] = -100  # positions without a label
        return Words().to(dtype), torch.randint(0, 5, (n, 6), generator=gen), y
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, bias=False), nn.Flatten(), nn.LayerNorm(16)]
    net = nn.Sequential(*layers, nn.Linear(16, 3)).to(dtype)
    return net, torch.randn(n, 2, 4, 4, generator=gen, dtype=torch.float64).to(dtype), torch.arange(n) % 3


def vector(F: Any, k: int = 2) -> Tensor:
    return torch.randn(F.shape[0], k, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(F.dtype)


def operations(F: Any) -> list[Tensor]:
    V = vector(F)
    found = [F @ V, F.trace()[None], F.diagonal(), F.frobenius_norm()[None], F.spectral_norm()[None], F.to_dense()]
    found += [F.solve(V, damping=0.1), F.inverse(0.1) @ V, (2.0 * F + F) @ V]
    if F.representation != "quasidiagonal":
        found += [F.eigenvalues(), F.power(2.0) @ V, F.from_eigenbasis(F.to_eigenbasis(V)), F.eigh(1).values]
    return found


def one_metric(group: Any, kind: str, dtype: torch.dtype, n: int, representation: str) -> list[Tensor]:
    net, x, y = network(kind, dtype, n)
    return operations(bs.fisher(net, (x, y), representation, group=group))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))


def assert_close(alone: list[Tensor], found: list[Tensor], exact: list[Tensor] | None = None) -> None:
    """Equal to rounding; in float32, where one process is not nearer to the `exact` result, twice its own distance.

    torch's eigensolver in single precision is right to about 2e-6 only, and so is all that goes through eigenvectors:
    EKFAC, and what KFAC solves. Factors that differ in their last digit give others of the same accuracy.
    """
    for i, (a, b) in enumerate(zip(alone, found, strict=True)):
        allowed = 1e-12 if exact is None else max(1e-6, 2 * distance(exact[i], a))
        assert distance(a, b) < allowed, (i, distance(a, b), allowed)
        assert allowed < 1e-5


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_representations(ranks: Ranks, representation: str) -> None:
    case = ("images", torch.float64, 9, representation)
    alone = one_metric(None, *case)
    for size in (2, 4):
        for found in ranks.run(one_metric, size, *case):
            assert_close(alone, found)


@pytest.mark.parametrize("representation", ["ekfac", "kfac", "block", "diagonal", "quasidiagonal", "dense", "lowrank"])
def test_single_precision(ranks: Ranks, representation: str) -> None:
    alone, exact = (one_metric(None, "images", dtype, 40, representation) for dtype in (torch.float32, torch.float64))
    for found in ranks.run(one_metric, 4, "images", torch.float32, 40, representation):
        assert_close(alone, found, exact)


def test_a_group_of_one_is_one_process(ranks: Ranks) -> None:
    case = ("images", torch.float64, 9, "ekfac")
    (found,) = ranks.run(one_metric, 1, *case)
    assert_close(one_metric(None, *case), found)


@pytest.mark.parametrize("representation", ["ekfac", "kfac", "diagonal"])
@pytest.mark.parametrize(("kind", "dtype", "n"), [("words", torch.float64, 7), ("words", torch.float64, 3)])
def test_other_data(ranks: Ranks, kind: str, dtype: torch.dtype, n: int, representation: str) -> None:
    case = (kind, dtype, n, representation)
    alone = one_metric(None, *case)
    for found in ranks.run(one_metric, 4, *case):  # with three examples, a rank has none
        assert_close(alone, found)


def variants(group: Any, dtype: torch.dtype) -> list[Tensor]:
    net, x, y = network("images", dtype, 9)
    loader = [(x[:4], y[:4]), (x[4:6], y[4:6]), (x[6:], y[6:])]
    metrics = [
        bs.fisher(net, loader, "ekfac", estimator="empirical", group=group),
        bs.fisher(net, loader, "ekfac", estimator="monte-carlo", samples=2, group=group),
        bs.fisher(net, (x, y), "ekfac", sharing="reduce", sua=True, max_memory="1MB", batch_size=2, group=group),
        bs.fisher(net, (x, y), {"0*": "kfac", "*": "diagonal"}, "gaussian", group=group),
        bs.fisher(net, (x, y), "kfac", "gaussian", group=group).inverse(0.1, mode="factored"),
        bs.ggn(net, loader, "ekfac", "mse", group=group),
        bs.curvature.gradient_covariance(net, (x, y), "ekfac", group=group),
        bs.curvature.gradient_covariance(net, (x, y), "lowrank", group=group),
    ]
    return [metric @ vector(metric) for metric in metrics]


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float64), (4, torch.float32)])
def test_options(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    alone = variants(None, dtype)
    exact = None if dtype == torch.float64 else variants(None, torch.float64)
    for found in ranks.run(variants, size, dtype):
        assert_close(alone, found, exact)


def in_rounds(group: Any, memory: str | None) -> list[Tensor]:
    net, x, y = network("images", torch.float64, 9)
    found = []
    for centred in (False, True):
        F = bs.fisher(net, (x, y), "ekfac", estimator="empirical", centered=centred, max_memory=memory, group=group)
        found += [F @ vector(F), F.solve(vector(F), damping=0.1)]
    return found


def cut_in_rounds(group: Any) -> list[int]:
    """Units of every round."""
    from biascope.curvature import sums

    seen: list[int] = []
    whole = sums.rounds

    def noted(*args: Any) -> Any:
        out = whole(*args)
        seen.extend(len(some) for some in out)
        return out

    sums.rounds = noted
    try:
        in_rounds(group, "60KB")
    finally:
        sums.rounds = whole
    return seen


def test_layers_are_summed_in_rounds_where_memory_is_short(ranks: Ranks) -> None:
    alone = in_rounds(None, None)
    for found in ranks.run(in_rounds, 2, "60KB"):
        assert_close(alone, found)
    for lengths in ranks.run(cut_in_rounds, 2):
        assert len(lengths) > 4  # of two metrics
        assert sum(lengths) == 8


def draws(group: Any) -> list[Tensor]:
    torch.manual_seed(1)  # enough examples that no eigenvalues agree: in an eigenspace of them any basis will do
    net, gen = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double(), torch.Generator().manual_seed(3)
    x = torch.randn(40, 2, generator=gen, dtype=torch.float64)
    return [bs.fisher(net, x, kind, group=group).sample(3, damping=0.1) for kind in ("ekfac", "kfac", "diagonal")]


def test_samples_are_those_of_one_process(ranks: Ranks) -> None:
    alone = draws(None)
    for found in ranks.run(draws, 2):
        for a, b in zip(alone, found, strict=True):
            assert (a - b).norm() < 1e-11 * a.norm()  # eigenvectors, to rounding over the gaps between eigenvalues


def layout(group: Any) -> tuple[list[int], list[tuple[str, ...]], dict[str, int]]:
    from biascope.support.processes import Group, processes

    team = processes(group)
    assert isinstance(team, Group)
    team.bytes.clear()
    net, x, _ = network("images", torch.float64, 9)
    F = bs.fisher(net, x, "ekfac", batch_size=1, group=group)
    assert isinstance(F, OwnedMetric)
    return list(F.numbers), [piece.names for piece in F.pieces], dict(team.bytes)


def test_every_piece_has_one_owner_and_every_factor_travels_once(ranks: Ranks) -> None:
    found = ranks.run(layout, 2)
    assert sorted(found[0][0] + found[1][0]) == list(range(4))
    assert all(numbers for numbers, _, _ in found)
    sizes = [(4, 19), (4, 36), (3, 17)]  # the factors B and A of the layers
    factors = sum(b * b + a * a for b, a in sizes)
    scalings, block = sum(b * a for b, a in sizes), 32 * 32
    assert found[0][2]["reduce"] == 8 * (factors + scalings + block)  # whatever the number of batches
    assert found[0][2]["broadcast"] == 8 * (factors + sum(a + b for b, a in sizes))


def saved(group: Any, path: str) -> Tensor:
    net, x, _ = network("images", torch.float64, 9)
    F = bs.fisher(net, x, "ekfac", group=group)
    assert F.save(path) == Path(path)
    return F @ vector(F)


def loaded(group: Any, path: str) -> Tensor:
    F = bs.load_curvature(path, group=group)
    return F @ vector(F)


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_files_are_read_by_any_number_of_ranks(ranks: Ranks, tmp_path: Path, writers: int) -> None:
    path = str(tmp_path / "fisher.safetensors")
    wanted = ranks.run(saved, writers, path)[0]
    files = {file.name for file in tmp_path.iterdir()}
    shards = {f"fisher-{r + 1:05d}-of-{writers:05d}.safetensors" for r in range(writers)}
    assert files == ({*shards, "fisher.safetensors.index.json"} if writers > 1 else {"fisher.safetensors"})
    assert (loaded(None, path) - wanted).norm() < 1e-13 * wanted.norm()
    for readers in (2, 4):
        for found in ranks.run(loaded, readers, path):
            assert (found - wanted).norm() < 1e-13 * wanted.norm()
    saved(None, path)
    assert [file.name for file in tmp_path.iterdir() if "index" in file.name] == []
    assert (loaded(None, path) - wanted).norm() < 1e-13 * wanted.norm()


def test_a_damaged_shard_is_named(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "fisher.safetensors"
    ranks.run(saved, 2, str(path))
    (tmp_path / "fisher-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptError, match="fisher-00002-of-00002"):
        bs.load_curvature(path)
    for outcome in ranks.outcomes(loaded, 2, str(path)):
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, CorruptError)


def saved_on_a_full_disk(group: Any, path: str) -> None:
    rank, (soft, hard) = torch.distributed.get_rank(group), resource.getrlimit(resource.RLIMIT_FSIZE)
    net, x, _ = network("images", torch.float64, 9)
    F = bs.fisher(net, x, "ekfac", group=group)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # files cannot grow any more
    try:
        F.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_of_one_rank_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    begin = time.monotonic()
    for outcome in ranks.outcomes(saved_on_a_full_disk, 2, str(tmp_path / "fisher.safetensors")):
        assert isinstance(outcome, Failed)
        assert "too large" in str(outcome.error), outcome.error
    assert time.monotonic() - begin < 10
    assert [file.name for file in tmp_path.iterdir()] == ["fisher-00001-of-00002.safetensors"]  # no index: no metric
    with pytest.raises(BiascopeError):
        bs.load_curvature(tmp_path / "fisher.safetensors")


def singular(group: Any) -> None:
    net, x, _ = network("images", torch.float64, 9)
    F = bs.fisher(net, x, {"5*": "block", "*": "diagonal"}, group=group)
    F.solve(vector(F))


def broken(group: Any) -> None:
    net, x, y = network("images", torch.float64, 9)
    rank = torch.distributed.get_rank(group)

    def weights(z: Tensor, y: Tensor | None) -> Tensor:
        if rank == 1 and len(z) > 1:
            raise RuntimeError("broken weights")
        return z[None]

    bs.fisher(net, [(x, y), (x, y)], "ekfac", weights, group=group)


@pytest.mark.parametrize(("case", "text"), [(singular, "singular"), (broken, "broken weights")])
def test_an_error_of_one_owner_ends_all(ranks: Ranks, case: Any, text: str) -> None:
    begin = time.monotonic()
    for outcome in ranks.outcomes(case, 2):
        assert isinstance(outcome, Failed)
        assert text in str(outcome.error)
    assert time.monotonic() - begin < 10
