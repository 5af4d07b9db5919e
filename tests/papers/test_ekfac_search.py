"""The walk that searches hyper-parameters, on surfaces whose minimum is known, and in a contest."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from biascope.studies import Run, configure, execute
from biascope.support import InputError
from biascope_papers.ekfac import autoencoder, cifar, contest, standings
from biascope_papers.ekfac.common import Row
from biascope_papers.ekfac.contest import NAMES, SECOND, Search, Setting
from biascope_papers.ekfac.search import DECADES, HALF_DECADES, MOMENTA, Ladder, Point, walk

TINY = Setting("ekfac", lr=0.03, second=1e-3, size=40, steps=3, refresh=2, every=1)


class Surface:
    """A loss that notes where it was asked, and refuses to be asked twice."""

    def __init__(self, loss: Callable[[int, int], float]) -> None:
        self.loss = loss
        self.asked: list[Point] = []

    def __call__(self, point: Point) -> float:
        assert point not in self.asked, f"{point} is tried twice"
        self.asked.append(point)
        return self.loss(*point)


@given(st.integers(-6, 6), st.integers(-6, 6), st.integers(1, 9), st.integers(1, 9))
def test_a_bowl_away_from_the_start_is_found_and_surrounded(i: int, j: int, a: int, b: int) -> None:
    bowl = Surface(lambda x, y: a * (x - i) ** 2 + b * (y - j) ** 2)
    found = walk(bowl, (0, 0), 1000)
    assert (found.best, found.loss, found.surrounded) == ((i, j), 0, True)
    assert {(i + x, j + y) for x in (-1, 0, 1) for y in (-1, 0, 1)} <= set(bowl.asked)
    assert found.spent == len(bowl.asked)


def test_eleven_trials_surround_a_start_that_is_best_and_ten_do_not() -> None:
    assert walk(Surface(lambda x, y: x * x + y * y), (0, 0), 11).surrounded
    assert not walk(Surface(lambda x, y: x * x + y * y), (0, 0), 10).surrounded


def test_a_diagonal_valley_is_followed() -> None:
    """Its straight neighbours are all worse: a walk without diagonals would stop at the start."""
    valley = Surface(lambda x, y: 100 * (x - y) ** 2 + (x + y - 10) ** 2)
    assert min(valley.loss(*p) for p in ((1, 0), (-1, 0), (0, 1), (0, -1))) > valley.loss(0, 0)
    found = walk(valley, (0, 0), 60)
    assert (found.best, found.surrounded) == ((5, 5), True)


def test_a_valley_of_equal_ratios_is_followed() -> None:
    """Learning rate over damping is what counts, two half-decades to a decade: all eight near neighbours are worse."""
    valley = Surface(lambda x, y: 100 * (x - 2 * y) ** 2 + (y - 4) ** 2)
    near = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1) if (x, y) != (0, 0)]
    assert min(valley.loss(*p) for p in near) > valley.loss(0, 0)
    found = walk(valley, (0, 0), 60)
    assert (found.best, found.surrounded) == ((8, 4), True)


def test_beyond_the_end_of_a_ladder_nothing_is_tried() -> None:
    slope = Surface(lambda x, y: x * x - y)
    found = walk(slope, (0, MOMENTA.index(0.8)), 60, lambda point: MOMENTA.has(point[1]))
    assert (found.best, found.surrounded) == ((0, 5), True)
    assert max(y for _, y in slope.asked) == 5
    assert MOMENTA(5) == 0.99


def test_what_diverged_is_worst_and_a_start_that_diverges_goes_down() -> None:
    cliff = Surface(lambda x, y: math.inf if x > 0 else (x + 1) ** 2 + y * y)
    assert walk(cliff, (0, 0), 30).best == (-1, 0)
    beyond = Surface(cliff.loss)
    found = walk(beyond, (3, 0), 30)
    assert beyond.asked[:4] == [(3, 0), (2, 0), (1, 0), (0, 0)]  # down, not around
    assert (found.best, found.surrounded) == ((-1, 0), True)
    nowhere = walk(Surface(lambda x, y: math.inf), (3, 0), 5)
    assert (nowhere.loss, nowhere.spent, nowhere.surrounded) == (math.inf, 5, False)
    bottom = walk(Surface(lambda x, y: math.inf), (0, 0), 5, lambda point: point[0] >= 0)
    assert (bottom.spent, bottom.surrounded) == (1, False)


@pytest.mark.parametrize("trials", range(1, 20))
def test_the_cap_is_kept_and_the_best_of_the_tried_is_given(trials: int) -> None:
    slope = Surface(lambda x, y: -x - y)
    found = walk(slope, (0, 0), trials)
    assert len(slope.asked) == found.spent == trials
    assert found.loss == min(slope.loss(*p) for p in slope.asked) == slope.loss(*found.best)
    assert not found.surrounded


def test_of_equals_the_earlier_counts_and_a_cap_of_nothing_is_refused() -> None:
    assert walk(Surface(lambda x, y: 1.0), (4, 2), 30).best == (4, 2)
    with pytest.raises(InputError, match="trials=0"):
        walk(Surface(lambda x, y: 1.0), (0, 0), 0)


def test_ladders_have_the_values_one_writes() -> None:
    assert [HALF_DECADES(i) for i in range(-5, 4)] == [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
    assert [DECADES(i) for i in (-10, -1, 0, 5)] == [1e-10, 0.1, 1.0, 1e5]
    for ladder in (HALF_DECADES, DECADES):
        assert [ladder.index(ladder(i)) for i in range(-30, 30)] == list(range(-30, 30))
    assert [MOMENTA.index(MOMENTA(i)) for i in range(6)] == list(range(6))
    off: list[tuple[Ladder, float]] = [(HALF_DECADES, 0.02), (DECADES, 0.3), (DECADES, 0.0), (MOMENTA, 0.85)]
    for ladder, value in off:
        with pytest.raises(InputError, match=f"{value:g} is not on the ladder"):
            ladder.index(value)


# ---- by a grid ----


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

    def cached(run: Run, problem: contest.Problem, setting: Setting, seed: int) -> Row:
        assert setting.steps == TINY.steps
        final = math.log10(setting.lr / 0.01) ** 2 + math.log10(setting.second / 0.01) ** 2
        final = 1e30 if seed == 1 and final == 0 else final
        return {"final": final, "loss": torch.tensor([20.0, final])}

    monkeypatch.setattr(contest, "cached", cached)
    task = replace(TASK, plateau=15.0)
    out = contest.hold(here, task, {"ekfac": TINY}, Search(grid=contest.GRID), 2)
    best = out.best["ekfac"]
    assert (abs(math.log10(best.lr) + 2), abs(math.log10(best.second) + 2)) in {(1, 0), (0, 1)}
    assert (out.spent["ekfac"], out.loose, out.learnt("ekfac")) == (16, [], True)
    one = contest.hold(here, task, {"ekfac": TINY}, Search(grid=contest.GRID), 1)
    assert (one.best["ekfac"].lr, one.best["ekfac"].second) == (0.01, 0.01)


# ---- in a contest ----


def test_every_start_is_on_its_ladders() -> None:
    for starts in (autoencoder.STARTS, cifar.STARTS):
        for name in NAMES:
            lr, second = contest.beginning(starts, name)
            HALF_DECADES.index(lr)
            (MOMENTA if SECOND.get(name) == "momentum" else DECADES).index(second)
    with pytest.raises(InputError, match="unknown optimiser 'adamw'"):
        contest.beginning(cifar.STARTS, "adamw")


def bowl(name: str, lr: float, second: float) -> Callable[..., Row]:
    """Trainings whose final loss is a bowl on the lattice around (lr, second); 1e30 stands for a diverged one."""

    def cached(run: Run, problem: contest.Problem, setting: Setting, seed: int) -> Row:
        assert setting.name == name
        loss = math.log10(setting.lr / lr) ** 2 + math.log10(setting.second / second) ** 2
        loss = 1e30 if setting.lr > 10 * lr else loss + 1 / setting.steps
        return {"final": loss, "loss": torch.tensor([9.0, loss])}

    return cached


@pytest.fixture
def here(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", configure("ekfac/fig4.3", "smoke"))


TASK = contest.Problem(lambda seed, normed: nn.Linear(1, 1), lambda net, x, y: x, torch.ones(1), torch.ones(1))


@pytest.mark.parametrize(
    ("lr", "damping", "trials", "loose"),
    [(0.03, 1e-3, 11, []), (0.3, 0.1, 40, []), (0.3, 0.1, 11, ["EKFAC"]), (1e-4, 1e-3, 40, [])],
)
def test_a_contest_finds_the_best_setting_or_says_that_it_did_not(
    lr: float, damping: float, trials: int, loose: list[str], here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "cached", bowl("ekfac", lr, damping))
    out = contest.hold(here, TASK, {"ekfac": TINY}, Search(trials), 1)
    assert out.loose == loose
    if not loose:
        assert (out.best["ekfac"].lr, out.best["ekfac"].second) == (lr, damping)
    assert out.spent["ekfac"] <= trials
    text = standings.remarks(out)
    assert f"EKFAC {out.spent['ekfac']}." in text
    assert ("not surrounded" in text) == bool(loose)
    assert here.metrics()[-1]["surrounded"] == (not loose)


def test_what_diverges_in_the_whole_training_gives_way_to_the_next_best(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best two settings of the short trainings diverge later."""
    inner = bowl("ekfac", 0.03, 1e-3)

    def cached(run: Run, problem: contest.Problem, setting: Setting, seed: int) -> Row:
        if setting.steps == 20 and setting.lr > 0.005:
            return {"final": 1e30, "loss": torch.tensor([9.0, math.inf])}
        return inner(run, problem, setting, seed)

    monkeypatch.setattr(contest, "cached", cached)
    best, _, surrounded, _ = contest.search(here, TASK, replace(TINY, steps=20), 30, 0.15, False)
    assert (best.lr, best.second, best.steps) == (0.003, 1e-4, 20)  # of those tried, the nearest below 0.005
    assert not surrounded


def test_a_walk_that_ends_on_the_plateau_begins_again_from_its_best(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is 1 / steps above the bowl: below 0.9 of a plateau of 0.2 from 6 steps on."""
    asked: list[tuple[int, float]] = []
    inner = bowl("ekfac", 0.3, 1e-3)

    def cached(run: Run, problem: contest.Problem, setting: Setting, seed: int) -> Row:
        asked.append((setting.steps, setting.lr))
        return inner(run, problem, setting, seed)

    monkeypatch.setattr(contest, "cached", cached)
    frame = replace(TINY, steps=20)
    best, spent, surrounded, stuck = contest.search(here, replace(TASK, plateau=0.2), frame, 30, 0.15, True)
    assert (best.lr, best.second, best.steps, surrounded, stuck) == (0.3, 1e-3, 20, True, False)
    assert sorted({steps for steps, _ in asked}) == [3, 6, 20]  # two walks, and the whole training of the best
    assert asked[0] == (3, 0.03)
    assert next(pair for pair in asked if pair[0] == 6) == (6, 0.3)
    assert spent == len(asked) - 1 == 14 + 11
    *_, stuck = contest.search(here, replace(TASK, plateau=0.2), frame, 30, 0.15, False)
    assert stuck


@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("ekfac/fig4.3", {"steps": 8, "hidden": (8, 4), "n": 100, "size": 50, "every": 4, "trials": 4, "trial": 0.5}
         | {"grid": ""}),
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
