"""The search of hyper-parameters by a grid, and contests that are joined."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from biascope.studies import Run, configure, execute
from biascope.support import InputError
from biascope_papers.ekfac import contest, standings
from biascope_papers.ekfac.common import Row
from biascope_papers.ekfac.contest import NAMES, Search, Setting

TINY = Setting("ekfac", lr=0.03, second=1e-3, size=40, steps=3, refresh=2, every=1)


# ---- by a grid ----


@pytest.fixture
def here(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", configure("ekfac/fig4.3", "smoke"))


TASK = contest.Problem(lambda seed, normed: nn.Linear(1, 1), lambda net, x, y: x, torch.ones(1), torch.ones(1))


def test_a_grid_has_all_pairs_random_ones_around_them_and_as_many_examples_at_every_batch_size() -> None:
    frame = replace(TINY, size=200, steps=300, every=30)
    found = contest.pairs(frame, Search(grid=contest.GRID, around=2, batches=(200, 500)), seed=1)
    assert len(found) == 16 * 3 * 2
    assert {(s.size, s.steps, s.every) for s in found} == {(200, 300, 30), (500, 120, 12)}
    exact = {(s.lr, s.second) for s in found if s.lr in contest.GRID and s.second in contest.GRID}
    assert len(exact) == 16
    centre, *near = found[:3]
    assert all(1 / 3.2 < getattr(s, key) / getattr(centre, key) < 3.2 for s in near for key in ("lr", "second"))
    assert near[0].lr != centre.lr != near[1].lr
    momenta = {s.second for s in contest.pairs(replace(frame, name="sgd-bn"), Search(grid=contest.GRID), 1)}
    assert momenta == set(contest.OTHERS["momentum"])


def test_the_grid_is_judged_at_the_end_of_whole_trainings_and_what_ends_badly_elsewhere_is_dropped(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best pair of the first seed diverges from the second one."""

    def train(run: Run, problem: contest.Problem, setting: Setting, seed: int) -> Row:
        assert setting.steps == TINY.steps
        final = math.log10(setting.lr / 0.01) ** 2 + math.log10(setting.second / 0.01) ** 2
        final = 1e30 if seed == 1 and final == 0 else final
        return {"final": final, "loss": torch.tensor([20.0, final])}

    monkeypatch.setattr(contest, "train", train)
    monkeypatch.setattr(contest, "_warm_up", lambda *_: None)  # the losses of this task have no gradient
    task = replace(TASK, plateau=15.0)
    out = contest.hold(here, task, {"ekfac": TINY}, Search(grid=contest.GRID), 2)
    best = out.best["ekfac"]
    assert (abs(math.log10(best.lr) + 2), abs(math.log10(best.second) + 2)) in {(1, 0), (0, 1)}
    assert (out.spent["ekfac"], out.loose, out.learnt("ekfac")) == (16, [], True)
    one = contest.hold(here, task, {"ekfac": TINY}, Search(grid=contest.GRID), 1)
    assert (one.best["ekfac"].lr, one.best["ekfac"].second) == (0.01, 0.01)


def test_what_is_timed_alone_is_trained_again(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid may share a device: the seconds of its best setting are those of trainings of their own."""
    trained = list[tuple[float, int]]()

    def train(run: Run, problem: contest.Problem, setting: Setting, seed: int) -> Row:
        trained.append((setting.lr, seed))
        return {"final": setting.lr, "loss": torch.tensor([20.0, setting.lr]), "seconds": torch.tensor([0.0, 1.0])}

    monkeypatch.setattr(contest, "train", train)
    monkeypatch.setattr(contest, "_warm_up", lambda *_: None)
    contest.hold(here, replace(TASK, plateau=15.0), {"ekfac": TINY}, Search(grid=(0.1, 0.01), alone=True), 2)
    assert trained == [(0.1, 0), (0.1, 0), (0.01, 0), (0.01, 0), (0.01, 0), (0.01, 1)]
    assert [name.split()[-1] for name in here.arrays()].count("alone") == 2


def test_where_there_are_classes_another_setting_may_be_best_by_validation_error(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest error on the way counts, of the first seed; errors are then those of every seed, paired."""

    def train(run: Run, problem: contest.Problem, setting: Setting, seed: int) -> Row:
        lowest = 0.1 if (setting.lr, setting.second) == (0.1, 1e-4) else 0.2
        lowest += 0.05 * seed + (0.01 if setting.name == "kfac" else 0.0)
        return {"final": setting.lr, "loss": torch.tensor([20.0, setting.lr]), "seconds": torch.tensor([0.0, 1.0]),
                "wrong": torch.tensor([0.9, lowest, 0.5])}  # fmt: skip

    monkeypatch.setattr(contest, "train", train)
    monkeypatch.setattr(contest, "_warm_up", lambda *_: None)
    task = replace(TASK, plateau=15.0, classes=True)
    frames = {name: replace(TINY, name=name) for name in ("ekfac", "kfac")}
    out = contest.hold(here, task, frames, Search(grid=contest.GRID), 2)
    assert out.best["ekfac"].lr == 1e-4
    numbers, _ = standings.report(out, ("ekfac",), ("kfac",), "Ends")
    assert numbers["lowest validation error, EKFAC"].value == pytest.approx((0.1 + 0.15) / 2)
    assert numbers["validation error of EKFAC minus KFAC"].value == pytest.approx(-0.01)
    without = contest.hold(here, replace(task, classes=False), frames, Search(grid=contest.GRID), 2)
    assert not without.validated


def test_the_share_of_wrong_classes_is_that_of_the_test_images() -> None:
    net = nn.Linear(2, 2, bias=False)
    net.weight.data = torch.eye(2)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    held = x, torch.tensor([0, 1, 0, 0])
    assert contest.wrongly(replace(TASK, held=held, classes=True), net) == 0.25
    assert math.isnan(contest.wrongly(replace(TASK, held=held), net))


# ---- in a contest ----


def test_without_a_grid_what_an_earlier_run_chose_is_read_from_its_arrays(here: Run) -> None:
    """Of three settings of the search one was trained from both seeds; others had fewer steps or another period."""
    tried = [(0.3, 1e-3, 0), (0.03, 1e-3, 0), (0.03, 1e-3, 1), (0.1, 1e-2, 0)]
    for lr, second, seed in tried:
        key = replace(TINY, lr=lr, second=second).key
        here.cached(f"{key} seed={seed}", lambda: {"final": 1.0, "loss": torch.tensor([9.0, 1.0])})
    for other in (replace(TINY, steps=1), replace(TINY, refresh=9)):
        here.cached(f"{other.key} seed=1", lambda: {"final": 0.5, "loss": torch.tensor([9.0, 0.5])})
    frame = replace(TINY, lr=0.0, second=0.0)
    (chosen,), spent = contest.chosen_before(here, frame, 2)
    assert (chosen.lr, chosen.second, spent) == (0.03, 1e-3, 3)
    with pytest.raises(InputError, match="give a grid"):
        contest.chosen_before(here, replace(frame, name="kfac"), 2)


@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("ekfac/fig4.3", {"steps": 8, "hidden": (8, 4), "n": 100, "size": 50, "every": 4, "grid": (0.1, 0.01)}),
        ("ekfac/fig4.5", {"n": 60, "size": 30, "plain": 20, "epochs": 2.0, "looks": 1}),
    ],
)  # fmt: skip
def test_optimisers_run_alone_and_joined_are_those_of_the_joint_contest(
    name: str, small: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same files, same numbers; the files of two runs, copied into one folder, are the joint run without training."""
    names = ("ekfac", "sgd-bn")

    def begin(folder: str, *who: str) -> Run:
        return Run.create(
            tmp_path / folder, configure(name, "smoke", seed=1, overrides={**small, "optimisers": ",".join(who)})
        )

    joint = begin("joint", *names)
    execute(joint)
    apart = [begin(who, who) for who in names]
    for each in apart:
        execute(each)
    assert sorted(joint.arrays()) == sorted(apart[0].arrays() + apart[1].arrays())
    for each in apart:
        for key in each.arrays():
            alone, together = each.load_arrays(key), joint.load_arrays(key)
            assert torch.equal(alone["loss"], together["loss"]), key
    monkeypatch.setattr(contest, "train", lambda *_: pytest.fail("nothing is left to train"))
    copied = begin("copied", *names)
    for each in apart:
        shutil.copytree(each.path / "arrays", copied.path / "arrays", dirs_exist_ok=True)
    result = execute(copied)
    for who in names:
        key = f"final training loss, {NAMES[who]}"
        assert result.numbers[key] == execute(joint).numbers[key]
