"""A contest of optimisers: the same networks, data and batches, the same rule of search, judged by training loss.

The rule, fixed beforehand: every optimiser's two hyper-parameters (learning rate and damping; momentum for SGD; epsilon
for Adam) are found by the walk of `search`, from a start fixed beforehand at the laptop size, with at most `trials`
trainings from the first seed; how many were spent is reported, and who ran out of them before its best setting was
surrounded. The best one is trained from every seed. Learning rates are a half-decade apart, dampings and epsilons a
decade. A setting that diverges is a bad setting, not an error. The seconds hold everything an optimiser does and
nothing else: no evaluation, no warm-up of the device. (Changed after the first runs at the paper's size: there had been
fixed grids, and what surrounded the best settings on the laptop did not at the paper's widths.)

An optimiser has learnt if from every seed it ends below where it began and below 0.9 of the plateau, the loss of the
best constant output. Being ahead of one that has not tests nothing: it was badly tuned.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward

from biascope import InputError
from biascope.optim import EKFAC, KFAC
from biascope.studies import Chart, Estimate, Run, Series
from biascope.studies.estimates import mean_error
from biascope.support import derive, generator, progress
from biascope.support.precision import arithmetic
from biascope_papers.ekfac.common import Row
from biascope_papers.ekfac.search import DECADES, HALF_DECADES, MOMENTA, Point, walk

NAMES = {
    "ekfac": "EKFAC",
    "ekfac-ra": "EKFAC-ra",
    "kfac": "KFAC",
    "sgd": "SGD + momentum",
    "sgd-bn": "SGD + momentum + BN",
    "adam": "Adam",
    "adam-bn": "Adam + BN",
}
SECOND = {"sgd": "momentum", "sgd-bn": "momentum", "adam": "epsilon", "adam-bn": "epsilon"}
EVALUATED = 5000  # training images on which the loss is evaluated
LEARNT = 0.9  # of the plateau
DIVERGED = 1e30  # stands for inf where a number is stored


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

    spent: trainings of the search; loose: who ran out of trials before its best setting was surrounded; blind: whose
    best setting was still on the plateau when it was chosen.
    """

    best: dict[str, Setting]
    rows: dict[str, list[Row]]
    spent: dict[str, int]
    loose: list[str]
    blind: list[str]
    n: int
    plateau: float

    def final(self, name: str) -> list[float]:
        """Training losses at the end, one per seed."""
        return [float(row["final"]) for row in self.rows[name]]

    def learnt(self, name: str) -> bool:
        """Did it get below where it began, and clearly below the plateau, from every seed?"""
        starts = [float(row["loss"][0]) for row in self.rows[name]]
        return all(end < min(start, LEARNT * self.plateau) for end, start in zip(self.final(name), starts))


def beginning(starts: Mapping[str, tuple[float, float]], name: str) -> tuple[float, float]:
    """Where the walk of an optimiser begins; the same with batch normalisation, unless listed."""
    found = starts.get(name, starts.get(name.removesuffix("-bn")))
    if name not in NAMES or found is None:
        raise InputError(f"unknown optimiser {name!r}; there is {', '.join(NAMES)}")
    return found


def hold(
    run: Run,
    problem: Problem,
    settings: Mapping[str, Setting],
    trials: int,
    seeds: int,
    trial: float = 1.0,
    extend: bool = False,
) -> Outcome:
    """Hold a contest. `settings` gives each optimiser's frame; its walk begins at the lr and second of the frame.

    With trial < 1 the walk is made with that share of the steps; with `extend` the share is doubled (up to all steps)
    and a new walk begins at the best setting where that is still on the plateau, since nothing can be chosen there.
    """
    best: dict[str, Setting] = {}
    spent: dict[str, int] = {}
    loose: list[str] = []
    blind: list[str] = []
    for name, frame in progress(settings.items(), "optimisers", total=len(settings)):
        _warm_up(run, problem, frame)
        best[name], spent[name], surrounded, stuck = search(run, problem, frame, trials, trial, extend)
        loose += [] if surrounded else [NAMES[name]]
        blind += [NAMES[name]] if stuck else []
    rows = {name: [cached(run, problem, s, seed) for seed in range(seeds)] for name, s in best.items()}
    return Outcome(best, rows, spent, loose, blind, len(problem.x), problem.plateau)


def search(
    run: Run, problem: Problem, frame: Setting, trials: int, trial: float, extend: bool
) -> tuple[Setting, int, bool, bool]:
    """Best setting of one optimiser, the trainings it took, whether it is surrounded, and whether on the plateau.

    Nothing here depends on who else takes part: optimisers can be searched in runs of their own and joined later.
    Where short trainings chose a setting that diverges in the whole one, the next best takes its place (and is not
    called surrounded).
    """
    lrs, seconds = HALF_DECADES, {"momentum": MOMENTA}.get(SECOND.get(frame.name, ""), DECADES)

    def at(point: Point, steps: int) -> Setting:
        return replace(frame, lr=lrs(point[0]), second=seconds(point[1]), steps=steps)

    start, share, spent = (lrs.index(frame.lr), seconds.index(frame.second)), trial, 0
    while True:
        steps = min(frame.steps, max(frame.every, round(frame.steps * share)))

        def loss(point: Point, steps: int = steps) -> float:
            final = _final(run, problem, at(point, steps))
            return final if final < DIVERGED else math.inf

        found = walk(loss, start, trials, lambda point: seconds.has(point[1]))
        spent += found.spent
        stuck = found.loss >= LEARNT * problem.plateau
        if not (extend and stuck and steps < frame.steps):
            break
        start, share = found.best, 2 * share
    chosen = next((p for p in found.order if _final(run, problem, at(p, frame.steps)) < DIVERGED), found.best)
    best, surrounded = at(chosen, frame.steps), found.surrounded and chosen == found.best
    run.log(optimiser=frame.name, lr=best.lr, second=best.second, loss=found.loss, trials=spent, surrounded=surrounded)
    return best, spent, surrounded, stuck


def _final(run: Run, problem: Problem, setting: Setting) -> float:
    return float(cached(run, problem, setting, 0)["final"])


def cached(run: Run, problem: Problem, setting: Setting, seed: int) -> Row:
    """One training, or what a file says of it."""
    return run.cached(f"{setting.key} seed={seed}", lambda: train(run, problem, setting, seed))


def train(run: Run, problem: Problem, setting: Setting, seed: int) -> Row:
    """Losses on the training images (at most `EVALUATED`) and seconds of training, every few steps; diverged: inf."""
    net, opt = _begin(run, problem, setting, seed)
    losses, seconds, clock = [evaluate(problem, net)], [0.0], 0.0
    for start, stop in zip(setting.ticks, setting.ticks[1:]):
        if math.isfinite(losses[-1]):
            order = _indices(run, setting, seed, start, stop, len(problem.x))
            _synchronise(run)
            begin = time.perf_counter()
            try:
                _steps(problem, net, opt, order, setting.halve, start)
            except InputError:  # the gradient overflowed: this setting diverged
                losses.append(math.inf)
            _synchronise(run)
            clock += time.perf_counter() - begin
        seconds.append(clock)
        if len(losses) < len(seconds):
            losses.append(evaluate(problem, net) if math.isfinite(losses[-1]) else math.inf)
    return {"loss": torch.tensor(losses), "seconds": torch.tensor(seconds), "final": min(losses[-1], DIVERGED)}


def _warm_up(run: Run, problem: Problem, setting: Setting) -> None:
    """Two steps of a network that is thrown away: loading kernels and choosing algorithms is not part of training."""
    if torch.device(run.device).type == "cuda":
        _steps(problem, *_begin(run, problem, setting, 0), _indices(run, setting, 0, 0, 2, len(problem.x)))


def _begin(run: Run, problem: Problem, setting: Setting, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = problem.build(derive(run.seed, "init", seed), setting.name.endswith("-bn")).to(run.device)
    return net.train(), optimiser(setting, net, problem.options, problem.ekfac)


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
    if name == "kfac":
        return KFAC(net, lr=lr, damping=second, refresh_every=setting.refresh, factor_decay=0.0, **options)
    if name in ("sgd", "sgd-bn"):
        return torch.optim.SGD(net.parameters(), lr=lr, momentum=second)
    return torch.optim.Adam(net.parameters(), lr=lr, eps=second)


@torch.no_grad()
def evaluate(problem: Problem, net: nn.Module) -> float:
    """Mean training loss of the network in use (`eval()`); inf where it is not finite."""
    net.eval()
    x, y = problem.x[:EVALUATED], problem.y[:EVALUATED]
    parts = [problem.loss(net, a, b) * len(a) for a, b in zip(torch.split(x, 1000), torch.split(y, 1000))]
    net.train()
    loss = float(torch.stack(parts).sum()) / len(x)
    return loss if math.isfinite(loss) else math.inf


def tf32(on: bool) -> AbstractContextManager[None]:
    """Let a GPU multiply and convolve in tf32, or not."""
    return arithmetic("tf32" if on else "float32")


# ---- what comes out ----


def compare(out: Outcome, mine: Sequence[str], rivals: Sequence[str]) -> tuple[dict[str, Estimate], str]:
    """By how much the losses of the rivals are above mine, and what a reader must know of it.

    A rival that never learnt anything was badly tuned: being ahead of it shows nothing, so that the error of such a
    difference is left unknown. Who did not take part is named.
    """
    lost, untested, gaps = list[str](), list[str](), dict[str, Estimate]()
    for a, b in product(mine, rivals):
        if a in out.rows and b in out.rows:
            gap = Estimate.of([theirs - ours for ours, theirs in zip(out.final(a), out.final(b))])
            pair = f"{NAMES[a]} against {NAMES[b]}"
            ahead = gap.standard_error is not None and gap.value > 2 * gap.standard_error
            if gap.standard_error is None or (not out.learnt(b) and (ahead or not out.learnt(a))):
                untested.append(pair)
                gap = Estimate(gap.value, None, gap.n)
            elif not ahead:
                lost.append(pair)
            gaps[f"loss of {NAMES[b]} minus {NAMES[a]}"] = gap
    absent = [NAMES[name] for name in (*mine, *rivals) if name not in out.rows]
    return gaps, sentences(
        {
            "Not lower by two standard errors": lost,
            "Not tested (one seed, or a rival that did not learn)": untested,
            "Did not take part, and is not judged": absent,
        }
    )


def sentences(parts: Mapping[str, Sequence[str]]) -> str:
    """A sentence (heading: one; two) for every heading that has something below it."""
    return " ".join(f"{heading}: {'; '.join(names)}." for heading, names in parts.items() if names)


def remarks(out: Outcome) -> str:
    """What a reader must know of the search, and of those who did not learn."""
    flat = [NAMES[name] for name in out.rows if not out.learnt(name)] if math.isfinite(out.plateau) else []
    plateau = f"Not below {LEARNT:g} of the plateau ({out.plateau:.4g}, the best constant output)"
    return " ".join(filter(None, [searched(out), sentences({plateau: flat})]))


def searched(out: Outcome, where: str = "") -> str:
    """How many trainings each search took, and whose result is provisional."""
    spent = ", ".join(f"{NAMES[name]} {count}" for name, count in out.spent.items())
    return sentences(
        {
            f"Trainings of the search{where} (one rule for all)": [spent] if spent else [],
            "Not surrounded by worse settings when the trials ran out": out.loose,
            "Chosen by trials that had not left the plateau": out.blind,
        }
    )


def timing(out: Outcome, where: str = "") -> tuple[dict[str, Estimate], str]:
    """Milliseconds per iteration, as numbers and as a sentence."""
    each = {
        NAMES[name]: Estimate.of([1e3 * float(row["seconds"][-1]) / out.best[name].steps for row in rows])
        for name, rows in out.rows.items()
    }
    text = ", ".join(f"{name} {value.value:.3g}" for name, value in each.items())
    numbers = {f"milliseconds per iteration, {name}{where}": value for name, value in each.items()}
    return numbers, f"Milliseconds per iteration: {text}."


def reached(out: Outcome, rival: str) -> tuple[dict[str, Estimate], str]:
    """Epochs and seconds until the final loss of the rival's own training is reached."""
    numbers: dict[str, Estimate] = {}
    parts = []
    for name, rows in out.rows.items() if rival in out.rows else ():
        at, seconds = [], []
        setting = out.best[name]
        for row, target in zip(rows, out.final(rival)):
            below = row["loss"] <= target
            first = int(below.float().argmax()) if bool(below.any()) else -1
            at.append(setting.ticks[first] * setting.size / out.n if first >= 0 else math.inf)
            seconds.append(float(row["seconds"][first]) if first >= 0 else math.inf)
        if all(map(math.isfinite, at)):
            numbers[f"epochs to the final loss of {NAMES[rival]}, {NAMES[name]}"] = Estimate.of(at)
            numbers[f"seconds to the final loss of {NAMES[rival]}, {NAMES[name]}"] = Estimate.of(seconds)
            parts.append(f"{NAMES[name]} {Estimate.of(at)}")
        else:
            parts.append(f"{NAMES[name]} never in {sum(map(math.isinf, at))} of {len(at)} seeds")
    return numbers, f"Epochs to the final loss of {NAMES[rival]}: {', '.join(parts)}." if parts else ""


def report(out: Outcome, mine: Sequence[str], rivals: Sequence[str], begin: str) -> tuple[dict[str, Estimate], str]:
    """The report on one contest: numbers, and a text that begins with the final losses."""
    final = {NAMES[name]: Estimate.of(out.final(name)) for name in out.rows}
    losses = ", ".join(f"{name} {value}" for name, value in final.items())
    parts = (timing(out), compare(out, mine, rivals), reached(out, "sgd-bn" if "sgd-bn" in out.rows else "sgd"))
    (times, speed), (gaps, standing), (epochs, soon) = parts
    numbers = {f"final training loss, {name}": value for name, value in final.items()}
    text = " ".join(filter(None, [f"{begin}: {losses}.", soon, speed, standing, remarks(out)]))
    return {**numbers, **times, **gaps, **epochs}, text


def charts(out: Outcome, loss: str, note: str, name: str = "", title: str = "") -> tuple[Chart, Chart]:
    """Training loss against epochs (or iterations, where all batches have one size) and against time."""
    curves = {key: mean_error([row["loss"] for row in rows]) for key, rows in out.rows.items()}
    times = {key: mean_error([row["seconds"] for row in rows])[0] for key, rows in out.rows.items()}
    same = len({s.size for s in out.best.values()}) == 1
    unit = "iteration" if same else "epoch"
    at = {k: s.ticks if same else [t * s.size / out.n for t in s.ticks] for k, s in out.best.items()}
    settings = "; ".join(map(str, out.best.values()))
    return (
        Chart(f"{name}{unit}s", f"Training loss against {unit}s{title}", unit, loss,
              tuple(Series.of(NAMES[key], at[key], *curve) for key, curve in curves.items()), log_y=True,
              alt=f"One falling curve per optimiser over {unit}s.",
              caption=f"{note} Best setting each: {settings}. Mean over seeds, band: standard error."),
        Chart(f"{name}time", f"Training loss against time{title}", "seconds of training on this machine", loss,
              tuple(Series.of(NAMES[key], times[key], curve[0]) for key, curve in curves.items()), log_y=True,
              alt="One falling curve per optimiser over seconds."),
    )  # fmt: skip
