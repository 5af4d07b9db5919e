"""A contest of optimisers: the same networks, data and batches, the same rule of search, judged by training loss.

With a `grid` every pair of a learning rate and a damping of the grid (momentum for SGD, epsilon for Adam: as many), at
every batch size, and `around` random pairs near each, is trained for the whole time from the first seed. The pair that
ends lowest is trained from every seed; one that from another seed does not learn gives way to the next. Where there are
classes, the pair with the lowest error on test images at any look is trained from every seed as well. Of runs from
before there was a grid, what they chose is read from their arrays.

Where a problem allows it, the settings of an optimiser are trained `together`, and the seconds are steps times the pace
of the optimiser by itself, over a few periods of refreshes; what is to be judged by time is trained `alone`.

A setting that diverges is a bad setting, not an error. The seconds hold everything an optimiser does and nothing else.
An optimiser has learnt if from every seed it ends below where it began and below 0.9 of the plateau, the loss of the
best constant output. Being ahead of one that has not tests nothing.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward

from biascope import InputError
from biascope.optim import EKFAC, KFAC
from biascope.studies import Run
from biascope.support import derive, generator, progress
from biascope_papers.ekfac.common import Row
from biascope_papers.ekfac.together import Together, at_once, curves

NAMES = {
    "ekfac": "EKFAC",
    "ekfac-ra": "EKFAC-ra",
    "kfac": "KFAC",
    "kfac-small": "KFAC, batch of SGD",
    "sgd": "SGD + momentum",
    "sgd-bn": "SGD + momentum + BN",
    "adam": "Adam",
    "adam-bn": "Adam + BN",
}
SECOND = {"sgd": "momentum", "sgd-bn": "momentum", "adam": "epsilon", "adam-bn": "epsilon"}
GRID = (1e-1, 1e-2, 1e-3, 1e-4)  # of learning rates and of dampings
OTHERS = {"momentum": (0.9, 0.99, 0.5, 0.0), "epsilon": (1e-8, 1e-6, 1e-4, 1e-2)}  # in place of dampings
EVALUATED = 5000  # training images, and test images, on which the loss is evaluated
PACED = 20
LEARNT = 0.9  # of the plateau
DIVERGED = 1e30  # stands for inf where a number is stored
BADLY = 3  # settings of a grid that may be tried from all seeds until one learns from each


@dataclass(frozen=True)
class Problem:
    """What is trained: networks by seed (with batch normalisation or without), a mean loss, the training set."""

    build: Callable[[int, bool], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    options: Mapping[str, Any] = field(default_factory=dict)  # of KFAC and EKFAC
    ekfac: Mapping[str, Any] = field(default_factory=dict)  # of EKFAC alone
    plateau: float = math.inf  # loss of the best constant output on the images that are evaluated
    held: tuple[Tensor, Tensor] | None = None  # test images and labels
    classes: bool = False  # labels are classes, of which some are wrong
    together: bool = False  # an auto-encoder of sigmoids that reconstructs x: `together` can train many at once


@dataclass(frozen=True)
class Setting:
    """How one training goes. `second`: the damping of the KFAC family, SGD's momentum, Adam's epsilon."""

    name: str
    lr: float
    second: float
    size: int  # examples per batch
    steps: int
    refresh: int  # steps between refreshes
    every: int  # steps between evaluations
    halve: int = 0  # steps between halvings of the learning rate; 0: constant

    @property
    def key(self) -> str:
        """For files."""
        hyper = f"{self.name} lr={self.lr:g} second={self.second:g}"
        tail = f" halve={self.halve}" if self.halve else ""
        return f"{hyper} size={self.size} refresh={self.refresh} steps={self.steps}{tail}"

    @property
    def ticks(self) -> list[int]:
        """Steps at which the loss is known."""
        return [*range(0, self.steps, self.every), self.steps]

    def __str__(self) -> str:
        return f"{NAMES[self.name]} lr {self.lr:g}, {SECOND.get(self.name, 'damping')} {self.second:g}"


@dataclass(frozen=True)
class Outcome:
    """Best setting and its trainings from every seed, by optimiser.

    spent: trainings of the search; loose: whose best learning rate is at the edge of the grid.
    """

    best: dict[str, Setting]
    rows: dict[str, list[Row]]
    spent: dict[str, int]
    loose: list[str]
    n: int
    plateau: float
    validated: dict[str, list[Row]] = field(default_factory=dict)  # the setting with the lowest validation error

    def final(self, name: str) -> list[float]:
        """Training losses at the end, one per seed."""
        return [float(row["final"]) for row in self.rows[name]]

    def learnt(self, name: str) -> bool:
        """Did it get below where it began, and clearly below the plateau, from every seed?"""
        return learnt(self.rows[name], self.plateau)


def learnt(rows: Sequence[Row], plateau: float) -> bool:
    """Did trainings get below where they began, and clearly below the plateau?"""
    return all(float(row["final"]) < min(float(row["loss"][0]), LEARNT * plateau) for row in rows)


@dataclass(frozen=True)
class Search:
    """Settings that are tried: all pairs of a grid, `around` random ones near each, at every batch size."""

    grid: tuple[float, ...]
    around: int = 0
    batches: tuple[int, ...] = ()
    alone: bool = False  # the best setting is timed with nothing else at work, from every seed


def hold(run: Run, problem: Problem, settings: Mapping[str, Setting], how: Search, seeds: int) -> Outcome:
    """Hold a contest. `settings` gives each optimiser's frame; the search fills in learning rate and second."""
    best: dict[str, Setting] = {}
    rows: dict[str, list[Row]] = {}
    validated: dict[str, list[Row]] = {}
    spent: dict[str, int] = {}
    loose: list[str] = []
    for name, frame in progress(settings.items(), "optimisers", total=len(settings)):
        _warm_up(run, problem, replace(frame, lr=GRID[-1], second=GRID[0]))
        order, spent[name] = by_grid(run, problem, frame, how) if how.grid else chosen_before(run, frame, seeds)
        loose += [NAMES[name]] if how.grid and not min(how.grid) < order[0].lr < max(how.grid) else []
        for setting in [*order[:BADLY], order[0]]:
            best[name] = setting
            if how.alone:
                rows[name] = [cached(run, problem, setting, seed, True) for seed in range(seeds)]
            else:
                rows[name] = trainings(run, problem, [(setting, seed) for seed in range(seeds)])
            if learnt(rows[name], problem.plateau):
                break
        if how.grid and problem.classes:
            errors = {each: lowest_error(cached(run, problem, each, 0)) for each in order}
            chosen = min(order, key=lambda each: errors[each])
            validated[name] = [cached(run, problem, chosen, seed) for seed in range(seeds)]
    return Outcome(best, rows, spent, loose, len(problem.x), problem.plateau, validated)


def lowest_error(row: Row) -> float:
    """The lowest share of wrong classes on test images at any look of a training."""
    return float(row["wrong"].min())


def chosen_before(run: Run, frame: Setting, seeds: int) -> tuple[list[Setting], int]:
    """What an earlier run without a grid chose, and how many trainings it took: only that has its last seed."""
    own = [name.rsplit(" seed=", 1) for name in run.arrays() if name.startswith(f"{frame.name} lr=")]
    tried = {replace(frame, lr=float(key.split()[1][3:]), second=float(key.split()[2][7:])) for key, _ in own}
    found = [each for each in tried if [each.key, str(seeds - 1)] in own]
    if not found:
        raise InputError(f"{run.path} has no grid, and no training of {frame}: give a grid")
    last: dict[Setting, Row] = {each: run.cached(f"{each.key} seed={seeds - 1}", dict) for each in found}
    found.sort(key=lambda each: float(last[each]["final"]))
    return found[:1], sum(seed == "0" for _, seed in own)


def pairs(frame: Setting, how: Search, seed: int) -> list[Setting]:
    """All settings of a search by grid; with other batch sizes there are as many examples, not steps."""
    seconds = OTHERS.get(SECOND.get(frame.name, ""), how.grid)[: len(how.grid)]
    found, g = [], generator(seed, "around", frame.name)
    for size in how.batches or (frame.size,):
        steps, every, halve = (round(n * frame.size / size) for n in (frame.steps, frame.every, frame.halve))
        own = replace(frame, size=size, steps=max(1, steps), every=max(1, every), halve=halve)
        for lr, second in product(how.grid, seconds):
            found.append(replace(own, lr=lr, second=second))
            for a, b in (10 ** (torch.rand(how.around, 2, generator=g) - 0.5)).tolist():
                near = second if frame.name in SECOND else float(f"{second * b:.3g}")
                found.append(replace(own, lr=float(f"{lr * a:.3g}"), second=near))
    return found


def by_grid(run: Run, problem: Problem, frame: Setting, how: Search) -> tuple[list[Setting], int]:
    """Settings in the order of their losses at the end of whole trainings from the first seed, and their count."""
    tried = list(dict.fromkeys(pairs(frame, how, run.seed)))
    losses = {
        each: float(row["final"]) for each, row in zip(tried, trainings(run, problem, [(each, 0) for each in tried]))
    }
    order = sorted(losses, key=lambda each: losses[each])
    best = order[0]
    run.log(optimiser=frame.name, lr=best.lr, second=best.second, size=best.size, loss=losses[best], trials=len(tried))
    return order, len(tried)


def trainings(run: Run, problem: Problem, own: Sequence[tuple[Setting, int]]) -> list[Row]:
    """Of settings of one optimiser, each from a seed; together, or side by side where several processes are at it."""
    keys, name = {f"{each.key} seed={seed}": (each, seed) for each, seed in own}, own[0][0].name  # as `cached` has them
    if not problem.together or problem.options or problem.ekfac or any(each.halve for each, _ in own):
        items = progress([key.removeprefix(f"{name} ") for key in keys], name)
        return run.cached_each(name, items, lambda item: train(run, problem, *keys[f"{name} {item}"]))
    alike: dict[Setting, list[str]] = {}
    for key, (each, _) in keys.items():
        alike.setdefault(replace(each, lr=0.0, second=0.0), []).append(key)
    rows: dict[str, Row] = {}
    for frame, group in alike.items():
        most = at_once(problem.build(0, False), frame.size, frame.refresh, torch.device(run.device))
        found = run.cached_together(group, lambda some: train_together(run, problem, [keys[key] for key in some]), most)
        rows |= zip(group, found)
    return [rows[key] for key in keys]


def train_together(run: Run, problem: Problem, own: Sequence[tuple[Setting, int]]) -> list[Row]:
    """What `train` gives for every setting and its seed; seconds are steps times the pace of the optimiser alone."""
    frame, seeds = own[0][0], sorted({seed for _, seed in own})
    nets = {seed: _network(run, problem, frame, seed) for seed in seeds}
    lr, second = (
        torch.tensor([getattr(each, key) for each, _ in own], dtype=torch.float64) for key in ("lr", "second")
    )
    group = Together([nets[seed] for _, seed in own], frame.name, lr, second, frame.refresh)

    def batches(start: int, stop: int) -> Tensor:
        found = {seed: _indices(run, frame, seed, start, stop, len(problem.x)) for seed in seeds}
        return torch.stack([found[seed] for _, seed in own])

    sets = [part[:EVALUATED] for part in (problem.x, *(problem.held or ())[:1])]
    losses = curves(group, problem.x, sets, frame.ticks, batches, f"{len(own)} x {NAMES[frame.name]}")
    paces = {seed: pace(run, problem, frame, seed) for seed in seeds}
    rows: list[Row] = []
    for i, (_, seed) in enumerate(own):
        rows.append({name: curve[i].float() for name, curve in zip(("loss", "test"), losses)})
        rows[-1]["seconds"] = paces[seed] * torch.tensor(frame.ticks)
        rows[-1]["final"] = min(float(losses[0][i, -1]), DIVERGED)
    return rows


def pace(run: Run, problem: Problem, setting: Setting, seed: int) -> float:
    """Seconds per step of one training by itself, measured over whole periods of refreshes (at least `PACED` steps)."""
    count = setting.refresh * math.ceil(PACED / setting.refresh)
    net, opt = _begin(run, problem, replace(setting, lr=GRID[-1], second=GRID[0]), seed)
    order = _indices(run, setting, seed, 0, count + 2, len(problem.x))
    _steps(problem, net, opt, order[:2])  # loading kernels is not part of training
    _synchronise(run)
    begin = time.perf_counter()
    _steps(problem, net, opt, order[2:])
    _synchronise(run)
    return (time.perf_counter() - begin) / count


def cached(run: Run, problem: Problem, setting: Setting, seed: int, alone: bool = False) -> Row:
    """One training, or what a file says of it; one that is timed alone has a file of its own."""
    key = f"{setting.key} seed={seed}" + " alone" * alone
    return run.cached(key, lambda: train(run, problem, setting, seed))


def train(run: Run, problem: Problem, setting: Setting, seed: int) -> Row:
    """Losses on training and test images (at most `EVALUATED`) and seconds, every few steps; diverged: inf."""
    net, opt = _begin(run, problem, setting, seed)
    losses, tests, seconds, clock = [evaluate(problem, net)], [evaluate(problem, net, True)], [0.0], 0.0
    wrong = [wrongly(problem, net)]
    for start, stop in zip(setting.ticks, setting.ticks[1:]):
        going = math.isfinite(losses[-1])
        if going:
            order = _indices(run, setting, seed, start, stop, len(problem.x))
            _synchronise(run)
            begin = time.perf_counter()
            try:
                _steps(problem, net, opt, order, setting.halve, start)
            except InputError:
                going = False
            _synchronise(run)
            clock += time.perf_counter() - begin
        seconds.append(clock)
        losses.append(evaluate(problem, net) if going else math.inf)
        tests.append(evaluate(problem, net, True) if going else math.inf)
        wrong.append(wrongly(problem, net) if going else 1.0)
    curves = {"loss": torch.tensor(losses), "seconds": torch.tensor(seconds)}
    more = {} if problem.held is None else {"test": torch.tensor(tests)}
    more |= {"wrong": torch.tensor(wrong)} if problem.classes else {}
    return {**curves, **more, "final": min(losses[-1], DIVERGED)}


def _warm_up(run: Run, problem: Problem, setting: Setting) -> None:
    """Two steps of a network that is thrown away: loading kernels and choosing algorithms is not part of training."""
    _steps(problem, *_begin(run, problem, setting, 0), _indices(run, setting, 0, 0, 2, len(problem.x)))


def _begin(run: Run, problem: Problem, setting: Setting, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = _network(run, problem, setting, seed)
    return net, optimiser(setting, net, problem.options, problem.ekfac)


def _network(run: Run, problem: Problem, setting: Setting, seed: int) -> nn.Module:
    return problem.build(derive(run.seed, "init", seed), setting.name.endswith("-bn")).to(run.device).train()


def _indices(run: Run, setting: Setting, seed: int, start: int, stop: int, n: int) -> Tensor:
    """Batches [steps, size] of some steps, on the device at once: the same for every optimiser with that batch size."""
    g = generator(run.seed, "batch", seed, setting.size, start)
    return torch.randint(n, (stop - start, setting.size), generator=g).to(run.device)


def _steps(
    problem: Problem, net: nn.Module, opt: torch.optim.Optimizer, order: Tensor, halve: int = 0, start: int = 0
) -> None:
    for step, chosen in enumerate(order, start):
        if halve and step and step % halve == 0:
            for group in opt.param_groups:
                group["lr"] *= 0.5
        opt.zero_grad()
        backward(problem.loss(net, problem.x[chosen], problem.y[chosen]))
        opt.step()


def run_steps(
    run: Run, problem: Problem, net: nn.Module, opt: torch.optim.Optimizer, setting: Setting, seed: int
) -> None:
    """All steps of a setting at once, without clock or evaluation."""
    _steps(problem, net, opt, _indices(run, setting, seed, 0, setting.steps, len(problem.x)), setting.halve)


def _synchronise(run: Run) -> None:
    if torch.device(run.device).type == "cuda":
        torch.cuda.synchronize()


def optimiser(
    setting: Setting, net: nn.Module, options: Mapping[str, Any], ekfac: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """By name."""
    name, lr, second = setting.name, setting.lr, setting.second
    if name in ("ekfac", "ekfac-ra"):
        scalings = {"scalings": "running"} if name == "ekfac-ra" else {}
        more: dict[str, Any] = {**options, **ekfac, **scalings}
        return EKFAC(net, lr=lr, damping=second, refresh_every=setting.refresh, **more)
    if name.startswith("kfac"):
        return KFAC(net, lr=lr, damping=second, refresh_every=setting.refresh, factor_decay=0.0, **options)
    if name in ("sgd", "sgd-bn"):
        return torch.optim.SGD(net.parameters(), lr=lr, momentum=second)
    return torch.optim.Adam(net.parameters(), lr=lr, eps=second)


@torch.no_grad()
def evaluate(problem: Problem, net: nn.Module, held: bool = False) -> float:
    """Mean loss on training images (or test images) of the network in use (`eval()`); inf where it is not finite."""
    x, y = (problem.x, problem.y) if not held else problem.held or (problem.x[:0], problem.y[:0])
    if not len(x):
        return math.inf
    net.eval()
    x, y = x[:EVALUATED], y[:EVALUATED]
    parts = [problem.loss(net, a, b) * len(a) for a, b in zip(torch.split(x, 1000), torch.split(y, 1000))]
    net.train()
    loss = float(torch.stack(parts).sum()) / len(x)
    return loss if math.isfinite(loss) else math.inf


@torch.no_grad()
def wrongly(problem: Problem, net: nn.Module) -> float:
    """Share of the test images to which the network in use (`eval()`) gives a wrong class; NaN without classes."""
    if problem.held is None or not problem.classes:
        return math.nan
    x, y = (part[:EVALUATED] for part in problem.held)
    net.eval()
    found = torch.cat([net(part).argmax(1) for part in torch.split(x, 1000)])
    net.train()
    return float((found != y).float().mean())
