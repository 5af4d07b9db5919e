"""Settings trained together, against the optimisers of the contest on one network after the other, in float64."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from biascope import nets
from biascope.optim import EKFAC
from biascope.optim.stacks import Stacks
from biascope.studies import Run, configure
from biascope.support import derive, generator
from biascope_papers.ekfac import autoencoder, bases, contest, together
from biascope_papers.ekfac.contest import NAMES, Problem, Setting
from biascope_papers.ekfac.together import Together, curves

N, PIXELS = 90, 12
OWN = [(0.01, 0.1, 0), (0.03, 0.01, 1), (0.02, 0.5, 0)]  # learning rate, second, seed


@pytest.fixture
def here(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", configure("ekfac/fig4.3", "smoke", seed=1))


def task() -> Problem:
    """An auto-encoder of random grey pixels: the factors of a batch of forty have full rank, and far eigenvalues."""
    x = torch.rand(N, PIXELS, generator=generator(0, "pixels"), dtype=torch.float64)

    def build(seed: int, normed: bool) -> nn.Module:
        net = nets.build("autoencoder", seed=seed, in_features=PIXELS, hidden=(9, 5))
        autoencoder.glorot(net, torch.Generator().manual_seed(seed))
        return (autoencoder.normalised(net) if normed else net).double()

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return autoencoder.reconstruction(net, y)

    return Problem(build, loss, x, x, held=(x[:30], x[:30]), together=True)


def alone(run: Run, problem: Problem, setting: Setting, seed: int) -> tuple[nn.Module, list[float], list[float]]:
    """The network at the end, and training and test losses at the looks, by the optimiser itself."""
    net, opt = contest._begin(run, problem, setting, seed)
    losses, tests = [contest.evaluate(problem, net)], [contest.evaluate(problem, net, True)]
    for start, stop in zip(setting.ticks, setting.ticks[1:]):
        contest._steps(problem, net, opt, contest._indices(run, setting, seed, start, stop, N))
        losses.append(contest.evaluate(problem, net))
        tests.append(contest.evaluate(problem, net, True))
    return net, losses, tests


def jointly(run: Run, problem: Problem, frame: Setting, own: list[tuple[float, float, int]]) -> tuple[Together, Tensor]:
    """The group at the end, and losses [2, K, looks]."""
    networks = [problem.build(derive(run.seed, "init", seed), frame.name.endswith("-bn")) for *_, seed in own]
    lr, second = (torch.tensor([each[i] for each in own], dtype=torch.float64) for i in (0, 1))
    group = Together(networks, frame.name, lr, second, frame.refresh)

    def batches(start: int, stop: int) -> Tensor:
        return torch.stack([contest._indices(run, frame, seed, start, stop, N) for *_, seed in own])

    assert problem.held is not None
    return group, torch.stack(curves(group, problem.x, [problem.x, problem.held[0]], frame.ticks, batches, "group"))


@pytest.mark.parametrize(
    ("name", "refresh", "size"),
    [
        *((name, refresh, 40) for name in ("ekfac", "ekfac-ra", "kfac") for refresh in (1, 3)),
        ("kfac", 3, 7),  # fewer rows than most layers have inputs and outputs: the inverse has no null space
        ("ekfac", 1, 7),  # nor has a gradient of the batch behind the basis a part there
        ("ekfac-ra", 1, 7),
        ("sgd-bn", 1, 40),
        ("adam-bn", 1, 40),
        ("sgd", 1, 40),
        ("adam", 1, 40),
    ],
)
def test_a_group_is_trained_as_its_members_by_themselves(here: Run, name: str, refresh: int, size: int) -> None:
    """Three settings from two seeds, over several refreshes and looks; weights and statistics at the end, too."""
    frame = Setting(name, 0.0, 0.0, size, 8, refresh, 3)
    group, losses = jointly(here, task(), frame, OWN)
    for k, (lr, second, seed) in enumerate(OWN):
        net, own, tests = alone(here, task(), replace(frame, lr=lr, second=second), seed)
        assert own[-1] < own[0]
        assert losses[0, k].tolist() == pytest.approx(own, rel=1e-9)
        assert losses[1, k].tolist() == pytest.approx(tests, rel=1e-9)
        for mine, theirs in zip(together.of_network([net]), group.layers):
            for key, value in mine.items():
                torch.testing.assert_close(theirs[key][k], value[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["ekfac", "ekfac-ra"])
def test_between_refreshes_the_basis_of_the_null_space_is_the_only_difference(here: Run, name: str) -> None:
    """The optimiser, once it has been given our basis after the first step, makes our steps."""
    problem, setting = task(), Setting(name, 0.02, 0.1, 7, 5, 100, 1)
    net, opt = contest._begin(here, problem, setting, 0)
    lr, second = torch.tensor([[0.02], [0.1]], dtype=torch.float64)
    group = Together([problem.build(derive(here.seed, "init", 0), False)], name, lr, second, 100)
    assert isinstance(opt, EKFAC)
    pre = opt.preconditioner
    for at, chosen in enumerate(contest._indices(here, setting, 0, 0, 5, N)):
        contest._steps(problem, net, opt, chosen[None])
        group.step(nn.functional.pad(problem.x[chosen], (0, 1), value=1.0)[None])
        if at == 0:
            for unit, layer in zip(pre.units, group.layers):
                E = pre.curvatures[unit.name].basis
                assert E is not None
                mine = replace(E, U_B=layer["B"], U_A=layer["A"], s=layer["s"][:, None])
                pre.curvatures[unit.name] = replace(pre.curvatures[unit.name], basis=mine)
            pre.stacks = Stacks()
    for mine, theirs in zip(together.of_network([net]), group.layers):
        torch.testing.assert_close(theirs["W"], mine["W"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [*list(NAMES)[:3], "sgd-bn", "adam-bn"])
def test_one_that_diverges_is_left_out_and_changes_nobody_else(here: Run, name: str) -> None:
    frame = Setting(name, 0.0, 0.0, 40, 8, 3, 3)
    _, without = jointly(here, task(), frame, OWN)
    group, losses = jointly(here, task(), frame, [OWN[0], (1e308, 0.1, 1), *OWN[1:]])
    assert len(group.lr) == 3
    assert losses[:, 1, 0].isfinite().all()
    assert losses[:, 1, 1:].isinf().all()
    torch.testing.assert_close(losses[:, [0, 2, 3]], without, rtol=1e-10, atol=0)
    assert contest.train(here, task(), replace(frame, lr=1e308, second=0.1), 1)["loss"][1:].isinf().all()


# ---- factors ----


def rows(k: int, n: int, d: int, rank: int) -> Tensor:
    """Rows [k, n, d] of a rank, and a coordinate that is 0 in all of them."""
    g = generator(0, "rows", n, d)
    Z = torch.randn(k, n, rank, generator=g, dtype=torch.float64) @ torch.randn(k, rank, d, generator=g).double()
    Z[:, :, 2] = 0.0
    return Z


@pytest.mark.parametrize(("n", "d", "rank"), [(5, 11, 5), (5, 11, 3), (10, 11, 10), (12, 11, 10), (12, 11, 4)])
def test_a_basis_is_orthogonal_and_diagonalises_the_factor(n: int, d: int, rank: int) -> None:
    Z = rows(3, n, d, rank)
    (U, values), (other, _) = bases.eigenbases([Z, rows(3, n, 7, min(rank, 5))], complete=True)
    one = torch.eye(d).double().expand(3, d, d)
    assert other.shape == (3, 7, 7)
    torch.testing.assert_close(U.mT @ U, one, rtol=0, atol=1e-10)
    torch.testing.assert_close(U.mT @ Z.mT @ Z @ U, torch.diag_embed(values), rtol=0, atol=1e-9)
    if n < d:
        (thin, spanned), *_ = bases.eigenbases([Z], complete=False)
        assert spanned.shape == (3, n)
        torch.testing.assert_close(thin @ (spanned[:, :, None] * thin.mT), Z.mT @ Z, rtol=0, atol=1e-9)


def test_the_basis_is_completed_as_by_a_householder_decomposition() -> None:
    Z = rows(1, 4, 9, 4)
    (U, values), *_ = bases.eigenbases([Z], complete=True)
    turned = bases.random_axes(9, torch.device("cpu")).T @ U[0]
    Q = torch.linalg.qr(turned[:, :4], mode="complete")[0]
    torch.testing.assert_close((Q.T @ turned).abs(), torch.eye(9).double(), rtol=0, atol=1e-10)
    assert (values[0, 4:] == 0).all()


@pytest.mark.parametrize(("n", "d"), [(5, 11), (20, 11)])
def test_the_inverse_is_that_of_the_damped_factor(n: int, d: int) -> None:
    Z, added = rows(3, n, d, 4), torch.tensor([0.1, 1e-2, 3.0]).double()
    S = Z.mT @ Z + added[:, None, None] * torch.eye(d).double()
    torch.testing.assert_close(
        bases.inverses([Z], [added])[0] @ S, torch.eye(d).double().expand_as(S), rtol=0, atol=1e-9
    )


# ---- in a run ----


def test_a_run_keeps_every_training_under_its_own_name(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batch sizes are two groups; the rows are those of trainings one by one, and are read the next time."""
    own = [(Setting("kfac", lr, 0.1, size, 6, 3, 2), seed) for size in (20, 40) for lr, _, seed in OWN]
    found = contest.trainings(here, task(), own)
    assert set(here.arrays()) == {f"{each.key} seed={seed}" for each, seed in own}
    for (setting, seed), row in zip(own, found):
        told = contest.train(here, task(), setting, seed)
        assert sorted(told) == sorted(row)
        assert row["final"] == pytest.approx(told["final"], rel=1e-6)
        torch.testing.assert_close(row["loss"], told["loss"])
        torch.testing.assert_close(row["test"], told["test"])
        ratio = row["seconds"][1:] / torch.tensor(setting.ticks[1:])
        assert float(ratio.min()) > 0
        assert float(ratio.max() / ratio.min()) == pytest.approx(1, rel=1e-5)
    monkeypatch.setattr(contest, "train_together", lambda *_: pytest.fail("all is there"))
    assert [float(row["final"]) for row in contest.trainings(here, task(), own)] == [row["final"] for row in found]


def test_the_pace_is_that_of_whole_periods(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[int]()
    monkeypatch.setattr(contest, "_steps", lambda problem, net, opt, order: counts.append(len(order)))
    for refresh in (1, 7, 50):
        assert contest.pace(here, task(), Setting("kfac", 0.1, 0.1, 40, 6, refresh, 2), 0) > 0
    assert counts == [2, 20, 2, 21, 2, 50]


def test_as_many_are_trained_at_once_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    net, cpu = nets.build("autoencoder", seed=0), torch.device("cpu")
    monkeypatch.setattr(together, "free_memory", lambda device: 140 * 10**9)
    many = together.at_once(net, 200, 50, cpu)
    assert 96 <= many <= 300
    assert together.at_once(net, 200, 1, cpu) == 8
    monkeypatch.setattr(together, "free_memory", lambda device: 7 * 10**9)
    assert together.at_once(net, 200, 50, cpu) == pytest.approx(many / 20, abs=1)
    monkeypatch.setattr(together, "free_memory", lambda device: 0)
    assert together.at_once(net, 200, 50, cpu) == 1
    assert math.isfinite(many)
