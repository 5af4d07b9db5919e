"""Figs. 4.3 and 4.4 a, b: a deep sigmoid auto-encoder on MNIST or digits, trained by several optimisers.

How the weights begin is not in the paper, and decides who learns: as torch draws them, SGD and Adam without batch
normalisation stay on the plateau, and so does KFAC. `init="glorot"` draws them as Glorot and Bengio advise for
sigmoids: then everybody leaves it. SGD and Adam have batch normalisation ("-bn"), as in the paper. EKFAC's first steps
raise the loss at nearly all good settings: they are those of the dense formula, not a defect.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import nets
from biascope.studies import Chart, Estimate, HeatMap, Run, StudyResult, study
from biascope.studies.estimates import curve
from biascope_papers.ekfac import contest, standings
from biascope_papers.ekfac.common import glorot, images, reconstruction, require
from biascope_papers.ekfac.contest import GRID, NAMES, Outcome, Problem, Search, Setting

OPTIMISERS = ("ekfac", "ekfac-ra", "kfac", "sgd-bn", "adam-bn")
FAMILY = ("ekfac", "ekfac-ra", "kfac")
DECADES = (1e-4, 1e-3, 1e-2, 1e-1)
LOSS = "cross-entropy per image"
PAPER: dict[str, Any] = {"dataset": "mnist", "n": 60000, "hidden": (1000, 500, 250, 30)}
LONG = PAPER | {"init": "glorot", "every": 50, "grid": GRID}
SMALL = {"dataset": "mnist", "n": 5000, "hidden": (100, 50, 25, 12), "init": "glorot"}


def problem(run: Run, dataset: str, n: int, hidden: tuple[int, ...], init: str = "torch") -> Problem:
    """Reconstruct n images; batch normalisation for the optimisers with "-bn" in their name."""
    x, _ = images(dataset, n, run)

    def build(seed: int, normed: bool) -> nn.Module:
        net = nets.build("autoencoder", seed=seed, in_features=x.shape[1], hidden=hidden)
        if init == "glorot":
            glorot(net, torch.Generator().manual_seed(seed))
        return normalised(net) if normed else net

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return reconstruction(net, y)

    seen = x[: contest.EVALUATED]
    plateau = float(F.binary_cross_entropy(seen.mean(0).expand_as(seen), seen, reduction="sum")) / len(seen)
    tests, _ = images(dataset, contest.EVALUATED, run, "test")
    return Problem(build, loss, x, x, plateau=plateau, held=(tests, tests), together=True)


def normalised(net: nn.Module) -> nn.Module:
    """The same auto-encoder with batch normalisation in front of every sigmoid."""
    for name, stack in net.named_children():
        new, width = nn.Sequential(), 0
        for key, layer in stack.named_children():
            if isinstance(layer, nn.Linear):
                width = layer.out_features
            elif isinstance(layer, nn.Sigmoid):
                new.add_module(key.replace("act", "norm"), nn.BatchNorm1d(width))
            new.add_module(key, layer)
        setattr(net, name, new)
    return net


@dataclass(frozen=True)
class Encoder:
    """Options of every study that trains the auto-encoder by several optimisers."""

    dataset: Annotated[Literal["digits", "mnist"], "images to encode"] = "digits"
    n: Annotated[int, "training images"] = 1437
    hidden: Annotated[tuple[int, ...], "widths of the encoder"] = (60, 30, 15)
    size: Annotated[int, "examples per batch"] = 200
    init: Annotated[Literal["torch", "glorot"], "how weights begin (not in the paper)"] = "torch"

    def problem(self, run: Run) -> Problem:
        """Reconstruct the images."""
        return problem(run, self.dataset, self.n, self.hidden, self.init)


@dataclass(frozen=True)
class Contest(Encoder):
    """Options of the contests on the auto-encoder."""

    steps: Annotated[int, "iterations of every training"] = 500
    every: Annotated[int, "iterations between evaluations"] = 10
    trials: Annotated[int, "of earlier runs: trainings of the search, per optimiser"] = 14
    trial: Annotated[float, "of earlier runs: share of the iterations in a training of the search"] = 1.0
    extend: Annotated[bool, "of earlier runs: whether the share was doubled while the best was on the plateau"] = False
    grid: Annotated[tuple[float, ...], "learning rates and dampings, all pairs on whole trainings"] = ()
    around: Annotated[int, "random pairs around every pair of the grid; 20 in the paper"] = 0
    batches: Annotated[tuple[int, ...], "batch sizes of the grid (as many epochs); none: the one of `size`"] = ()
    alone: Annotated[bool, "nothing else runs on the machine, so that the seconds count"] = False
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3

    def hold(self, run: Run, task: Problem, names: tuple[str, ...], refresh: int) -> Outcome:
        """A contest with `refresh` iterations between refreshes."""
        frames = {name: Setting(name, 0.0, 0.0, self.size, self.steps, refresh, self.every) for name in names}
        return contest.hold(run, task, frames, Search(self.grid, self.around, self.batches, self.alone), self.seeds)


ENCODER = Encoder()
CONTEST, SHORT = Contest(), Contest(steps=300)


@study(
    "ekfac/fig4.3",
    sizes={
        "smoke": {"n": 500, "hidden": (30, 15), "steps": 40, "grid": (1e-2,), "seeds": 2},
        "laptop": SMALL | {"steps": 500, "every": 25, "grid": GRID},
        "paper": LONG | {"steps": 6000, "batches": (200, 500)},
    },
)
def fig4_3(
    run: Run,
    *,
    options: Contest = CONTEST,
    refresh: Annotated[int, "iterations between refreshes, for KFAC and EKFAC"] = 50,
    optimisers: Annotated[tuple[str, ...], "who takes part"] = OPTIMISERS,
) -> StudyResult:
    """Loss of a deep auto-encoder against iterations and against time, for five optimisers."""
    out = options.hold(run, options.problem(run), optimisers, refresh)
    rivals = ("kfac", "sgd-bn" if "sgd-bn" in optimisers else "sgd", "adam-bn" if "adam-bn" in optimisers else "adam")
    numbers, text = standings.report(out, ("ekfac", "ekfac-ra"), rivals, "Final losses")
    figures = standings.charts(out, LOSS, "Best setting on the training images.")
    return StudyResult(measured=text, numbers=numbers, figures=figures)


@study(
    "ekfac/fig4.3d",
    sizes={
        "smoke": {"n": 200, "hidden": (20, 10), "epochs": 12.0, "seeds": 2, "refresh": 6, "lrs": (1e-3, 1e-2, 1e-1)}
        | {"dampings": (1e-3, 1e-2, 1e-1)},
        "laptop": SMALL,
        "paper": PAPER | {"init": "glorot"},
    },
)
def fig4_3d(
    run: Run,
    *,
    options: Encoder = ENCODER,
    optimiser: Annotated[Literal["ekfac", "ekfac-ra", "kfac"], "whose hyper-parameters they are"] = "ekfac",
    lrs: Annotated[tuple[float, ...], "learning rates, ascending decades"] = DECADES,
    dampings: Annotated[tuple[float, ...], "dampings, ascending decades"] = DECADES,
    epochs: Annotated[float, "passes over the images"] = 20.0,
    refresh: Annotated[int, "iterations between refreshes"] = 50,
    seeds: Annotated[int, "initialisations"] = 3,
) -> StudyResult:
    """Final loss of the auto-encoder on a grid of learning rates and dampings.

    Every pair is trained from every seed on the same batches. The cost of a pair is the share of the best pair's
    descent that it misses, (L - L_best) / (L_start - L_best), at most 1. A decade away from the best pair: a tenth or
    ten times of one value, whichever is worse.
    """
    require(len(lrs) > 1 < len(dampings), f"lrs={lrs}, dampings={dampings}: give at least two of each")
    task = options.problem(run)
    n = len(task.x)
    size = min(options.size, n)
    steps = max(1, round(epochs * n / size))
    pairs, shape = list(product(lrs, dampings)), (len(lrs), len(dampings), seeds)
    settings = [Setting(optimiser, *pair, size, steps, refresh, steps) for pair in pairs]
    rows = contest.trainings(run, task, list(product(settings, range(seeds))))
    losses = torch.tensor([row["final"] for row in rows], dtype=torch.float64).view(-1, seeds)
    starts = torch.tensor([float(row["loss"][0]) for row in rows[:seeds]], dtype=torch.float64)
    cost, best = costs(losses.view(shape), starts)
    reached = losses.view(shape)[best]
    rate, damping = steepest(cost[:, best[1]], best[0]), steepest(cost[best[0]], best[1])
    shown = {
        f"loss, lr {pair[0]:g}, damping {pair[1]:g}": Estimate.of(row)
        for pair, row in zip(pairs, losses)
        if float(row.max()) < float(starts.max()) * 1e3
    }
    mean = losses.view(shape).mean(-1)
    mean = torch.where(mean < float(starts.mean()) * 1e3, mean, torch.nan)  # blown up: no number to show
    x, y = ([round(math.log10(value), 3) for value in values] for values in (lrs, dampings))
    return StudyResult(
        measured=f"{NAMES[optimiser]}, {steps} iterations ({steps * size / n:.3g} epochs): best at learning rate "
        f"{lrs[best[0]]:g}, damping {dampings[best[1]]:g}. A decade away costs {rate} of the descent in learning rate "
        f"and {damping} in damping.",
        numbers={
            "cost of a decade, learning rate": rate,
            "cost of a decade, damping": damping,
            "cost of a pair, median over the grid": Estimate.of(cost.flatten(0, 1).quantile(0.5, 0)),
            "worst loss of the best pair / plateau": Estimate(float(reached.max()) / task.plateau),
            "training loss at the start": Estimate.of(starts),
            **shown,
        },
        figures=(
            HeatMap.of("sensitivity", f"Training loss at the end, {NAMES[optimiser]}", x=x, y=y, z=mean.T.tolist(),
                       x_label="log10 learning rate", y_label="log10 damping", z_label="loss", log_z=True,
                       alt="The loss is low in a small part of the grid.", caption="Mean over seeds. Empty: diverged."),
        ),
    )  # fmt: skip


def costs(losses: Tensor, starts: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Share of the best pair's descent that each pair misses, [lrs, dampings, seeds] in [0, 1], and the best pair."""
    best = divmod(int(losses.mean(-1).flatten().argmin()), losses.shape[1])
    low = losses[best]
    return ((losses - low) / (starts - low).clamp_min(1e-12)).clamp(0, 1), best


def steepest(line: Tensor, at: int) -> Estimate:
    """The worse neighbour of the best value on a line of costs [values, seeds]."""
    near = [i for i in (at - 1, at + 1) if 0 <= i < len(line)]
    return max((Estimate.of(line[i]) for i in near), key=lambda estimate: estimate.value)


@study(
    "ekfac/fig4.4ab",
    sizes={
        "smoke": {"n": 500, "hidden": (30, 15), "steps": 30, "grid": (1e-2,), "seeds": 2, "periods": (3, 30)},
        "laptop": {"init": "glorot", "every": 25, "grid": GRID, "periods": (1, 10, 100), "seeds": 5},
        "paper": LONG | {"steps": 6000, "periods": (1, 50, 100), "batches": (200, 500)},
    },
)
def fig4_4ab(
    run: Run,
    *,
    options: Contest = SHORT,
    periods: Annotated[tuple[int, ...], "iterations between refreshes"] = (1, 10, 50, 100),
) -> StudyResult:
    """Final loss of the auto-encoder against the period of refreshes. For every period the setting is chosen anew."""
    require(len(set(periods)) > 1, f"periods={periods}: at least two are needed to see a loss")
    task, seeds = options.problem(run), options.seeds
    out = {period: options.hold(run, task, FAMILY, period) for period in sorted(periods)}
    numbers: dict[str, Estimate] = {}
    for period, one in out.items():
        numbers |= standings.timing(one, f", period {period}") | standings.progress_made(one, f", period {period}")
        finals = {name: Estimate.of(one.final(name)) for name in FAMILY}
        numbers |= {f"final loss, {NAMES[name]}, period {period}": value for name, value in finals.items()}
    first, last = min(out), max(out)
    worse = {name: [b - a for a, b in zip(out[first].final(name), out[last].final(name))] for name in FAMILY}
    for name, values in worse.items():
        numbers[f"what {NAMES[name]} loses from period {first} to {last}"] = Estimate.of(values)
    for name in ("ekfac", "ekfac-ra"):
        gap = [k - e for e, k in zip(worse[name], worse["kfac"])]
        numbers[f"what KFAC loses more than {NAMES[name]}"] = Estimate.of(gap)
    rises = ", ".join(f"{NAMES[name]} {Estimate.of(values)}" for name, values in worse.items())
    later = [standings.searched(one, f", period {period}") for period, one in out.items() if period != first]
    texts = filter(None, [standings.remarks(out[first]), *later, "" if seeds > 1 else "One seed: no error bars."])
    finals_of = {NAMES[name]: list(zip(*(one.final(name) for one in out.values()))) for name in FAMILY}
    ends = [standings.charts(out[p], LOSS, f"Period {p}.", f"period-{p}-", f", period {p}") for p in (first, last)]
    return StudyResult(
        measured=f"From a period of {first} to {last} the loss after {options.steps} iterations rises by {rises}. "
        f"{' '.join(texts)}",
        numbers=numbers,
        figures=(
            Chart("periods", "Training loss at the end against the period of refreshes", "iterations between refreshes",
                  LOSS, tuple(curve(name, out, rows) for name, rows in finals_of.items()),
                  alt="One curve per method over periods.", log_x=True, log_y=True,
                  caption=f"{options.steps} iterations; mean over {seeds} seeds, band: standard error."),
            *(chart for pair in ends for chart in pair),
        ),
    )  # fmt: skip
