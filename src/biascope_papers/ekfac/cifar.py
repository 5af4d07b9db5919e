"""Figs. 4.5, 4.6 and A.1 to A.5: VGG-11 and ResNet-34 on CIFAR-10, trained by several optimisers.

KFAC and EKFAC treat convolutions as spatially uncorrelated (SUA); EKFAC has the damping for deep networks (App. A.4).
The networks they and plain SGD train have no batch normalisation; ResNets without it begin as App. A.3 says. A run that
is to be judged by time must have the machine alone.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import data, nets
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support.precision import arithmetic
from biascope_papers.ekfac import contest, standings
from biascope_papers.ekfac.common import require
from biascope_papers.ekfac.contest import GRID, NAMES, Outcome, Problem, Search, Setting

Network = Literal["vgg11", "resnet34"]
FAMILY = ("ekfac", "ekfac-ra", "kfac")
OPTIMISERS = (*FAMILY, "kfac-small", "sgd", "sgd-bn")
SIDE = 32


def pictures(dataset: str, n: int, run: Run) -> tuple[Tensor, Tensor]:
    """The first n training images [n, c, 32, 32], channels with mean 0 and variance 1, and labels, on the device."""
    x, y = large(dataset, n, run, "train")
    return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True), y


def large(dataset: str, n: int, run: Run, part: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """The first n images [n, c, 32, 32] of a part, and labels."""
    found = data.load(dataset, part)
    x = found.x[:n].to(run.device)
    if x.shape[-1] != SIDE:
        x = F.interpolate(x, (SIDE, SIDE), mode="nearest")
    return x, found.y[:n].to(run.device)


def build(network: str, seed: int, normed: bool, width: int, channels: int) -> nn.Module:
    """A network with or without batch normalisation; `width` channels in the first stage (64 in the paper)."""
    norm = "batch" if normed else "none"
    shape: dict[str, Any] = {"in_channels": channels, "outputs": 10, "width": width, "norm": norm}
    if network == "vgg11":
        return nets.build("vgg11", seed=seed, hidden=(), dropout=0.0, init="fan_in", **shape)
    return nets.build("resnet34", seed=seed, init="default" if normed else "bn_free", **shape)


def problem(run: Run, network: str, dataset: str, n: int, width: int, momentum: float) -> Problem:
    """Classify n images by cross-entropy."""
    x, y = pictures(dataset, n, run)
    raw, tests = large(dataset, n, run, "train")[0], large(dataset, contest.EVALUATED, run, "test")
    mean, std = raw.mean((0, 2, 3), keepdim=True), raw.std((0, 2, 3), keepdim=True)

    def make(seed: int, normed: bool) -> nn.Module:
        return build(network, seed, normed, width, x.shape[1])

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    seen = y[: contest.EVALUATED]
    plateau = float(torch.special.entr(seen.bincount(minlength=10) / len(seen)).sum())
    held = (tests[0] - mean) / std, tests[1]
    return Problem(make, loss, x, y, {"sua": True, "momentum": momentum}, {"damping_mode": "deep"}, plateau, held, True)


def frames(
    names: tuple[str, ...], n: int, epochs: float, size: int, plain: int, refresh: int, looks: int, halve: float = 0.0
) -> dict[str, Setting]:
    """The same number of epochs for everyone: batches of `size` for the KFAC family, of `plain` for the others."""
    out = {}
    for name in names:
        batch = min(n, size if name in FAMILY else plain)
        steps = max(1, round(epochs * n / batch))
        every, half = max(1, steps // looks), max(1, round(halve * n / batch)) if halve else 0
        out[name] = Setting(name, 0.0, 0.0, batch, steps, refresh, every, half)
    return out


@dataclass(frozen=True)
class OnCifar:
    """Options of the contests on CIFAR-10."""

    dataset: Annotated[Literal["digits", "cifar10"], "images to classify"] = "cifar10"
    n: Annotated[int, "training images"] = 5000
    width: Annotated[int, "channels of the first stage; 64 in the paper"] = 16
    epochs: Annotated[float, "epochs of every training"] = 10.0
    refresh: Annotated[int, "iterations between refreshes"] = 500
    trials: Annotated[int, "of earlier runs: trainings of the search, per optimiser"] = 14
    trial: Annotated[float, "of earlier runs: share of the epochs in a training of the search"] = 0.5
    looks: Annotated[int, "evaluations along a training"] = 10
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3
    momentum: Annotated[float, "of KFAC and EKFAC (the paper does not say)"] = 0.0
    tf32: Annotated[bool, "let the GPU use tf32"] = True
    grid: Annotated[tuple[float, ...], "learning rates and dampings, all pairs on whole trainings"] = ()
    around: Annotated[int, "random pairs around every pair of the grid (the paper does not say how many)"] = 0
    alone: Annotated[bool, "nothing else runs on the machine, so that the seconds count"] = False

    def problem(self, run: Run, network: str) -> Problem:
        """Classify the images with a network."""
        return problem(run, network, self.dataset, self.n, self.width, self.momentum)

    def hold(
        self, run: Run, task: Problem, names: tuple[str, ...], size: int, plain: int, halve: float = 0.0
    ) -> Outcome:
        """A contest with batches of `size` for the KFAC family, of `plain` for the others."""
        own = frames(names, len(task.x), self.epochs, size, plain, self.refresh, self.looks, halve)
        with arithmetic("tf32" if self.tf32 else "float32"):
            return contest.hold(run, task, own, Search(self.grid, self.around, alone=self.alone), self.seeds)


@dataclass(frozen=True)
class Contest(OnCifar):
    """Options of the contests with one batch size for the KFAC family and one for SGD."""

    size: Annotated[int, "examples per batch of KFAC and EKFAC"] = 500
    plain: Annotated[int, "examples per batch of SGD"] = 200
    optimisers: Annotated[tuple[str, ...], "who takes part"] = OPTIMISERS


ON_CIFAR, ON_VGG = OnCifar(), Contest()
ON_RESNET = Contest(width=8, optimisers=("ekfac-ra", "kfac", "sgd-bn"))
HALVED = Contest(optimisers=("ekfac", "ekfac-ra", "kfac", "sgd-bn"))
JUDGED = {
    "vgg11": (("ekfac", "ekfac-ra"), ("kfac", "sgd", "sgd-bn", "kfac-small")),
    "resnet34": (("ekfac-ra",), ("kfac", "sgd-bn")),
}  # whom the claims about a network put ahead, and of whom
SIZE: dict[str, Any] = {"size": 50, "plain": 50}
SMOKE: dict[str, Any] = {"dataset": "digits", "n": 100, "width": 2, "epochs": 2.0, "refresh": 2, "grid": (1e-2,)}
SMOKE |= {"seeds": 1, "looks": 2}
LAPTOP: dict[str, Any] = {"n": 2000, "width": 8, "epochs": 5.0, "refresh": 10, "grid": GRID, "looks": 5}
RESNET_LAPTOP = LAPTOP | {"n": 1000, "width": 4, "epochs": 6.0, "looks": 6} | SIZE
PAPER: dict[str, Any] = {"n": 50000, "width": 64, "refresh": 500, "grid": GRID, "looks": 40}


def contest_of(run: Run, network: str, options: Contest, halve: float = 0.0) -> StudyResult:
    """One network, one contest."""
    out = options.hold(run, options.problem(run, network), options.optimisers, options.size, options.plain, halve)
    numbers, text = standings.report(out, *JUDGED[network], f"Training losses after {options.epochs:g} epochs")
    small = "" if options.width == 64 else f" Width {options.width} instead of 64, {options.n} images."
    small += "" if options.dataset == "cifar10" else f" Stand-in data: {options.dataset}, enlarged to 32x32."
    figures = standings.charts(out, "cross-entropy", f"{network}, {options.dataset}.{small}")
    return StudyResult(measured=text + small, numbers=numbers, figures=figures)


@study(
    "ekfac/fig4.5",
    sizes={"smoke": SMOKE | SIZE, "laptop": LAPTOP | {"size": 100}, "paper": PAPER | {"epochs": 20.0}},
)
def fig4_5(run: Run, *, options: Contest = ON_VGG) -> StudyResult:
    """VGG-11 on CIFAR-10: loss against epochs and time for EKFAC, EKFAC-ra, KFAC, SGD with and without BN."""
    return contest_of(run, "vgg11", options)


@study("ekfac/fig4.6", sizes={"smoke": SMOKE | SIZE, "laptop": RESNET_LAPTOP, "paper": PAPER | {"epochs": 15.0}})
def fig4_6(run: Run, *, options: Contest = ON_RESNET) -> StudyResult:
    """ResNet-34 without normalisation on CIFAR-10: EKFAC-ra, KFAC, and SGD with batch normalisation."""
    return contest_of(run, "resnet34", options)


@study(
    "ekfac/figA.4",
    sizes={
        "smoke": SMOKE | SIZE | {"halve": 1.0},
        "laptop": LAPTOP | {"size": 100, "halve": 2.0},
        "paper": PAPER | {"epochs": 60.0},
    },
)
def fig_a_4(
    run: Run,
    *,
    network: Annotated[Network, "A.4 is vgg11, A.5 resnet34"] = "vgg11",
    halve: Annotated[float, "epochs between halvings of the learning rate"] = 20.0,
    options: Contest = HALVED,
) -> StudyResult:
    """As Fig. 4.5 with the learning rate halved every few epochs; with network=resnet34 as Fig. 4.6: Fig. A.5."""
    return contest_of(run, network, options, halve)


@study(
    "ekfac/figA.1",
    sizes={
        "smoke": SMOKE | {"batches": (25, 50)},
        "laptop": LAPTOP | {"batches": (50, 200), "epochs": 4.0},
        "paper": PAPER | {"epochs": 10.0, "batches": (100, 200, 500)},
    },
)
def fig_a_1(
    run: Run,
    *,
    network: Annotated[Network, "A.1 and A.2 are vgg11, A.3 resnet34"] = "vgg11",
    batches: Annotated[tuple[int, ...], "batch sizes (the paper's are only in plots)"] = (100, 200, 500),
    optimisers: Annotated[tuple[str, ...], "who takes part; ekfac-ra and kfac must"] = (*FAMILY, "sgd-bn"),
    options: OnCifar = ON_CIFAR,
) -> StudyResult:
    """Final training losses against the batch size, each a contest of its own; with network=resnet34, Fig. A.3."""
    enough = len(set(batches)) > 1 and {"ekfac-ra", "kfac"} <= set(optimisers)
    require(enough, "at least two batch sizes, and ekfac-ra and kfac among the optimisers, are needed")
    task = options.problem(run, network)
    out = {batch: options.hold(run, task, optimisers, batch, batch) for batch in sorted(batches)}
    numbers: dict[str, Estimate] = {}
    for batch, one in out.items():
        numbers |= standings.timing(one, f", batch {batch}") | standings.progress_made(one, f", batch {batch}")
        finals = {name: Estimate.of(one.final(name)) for name in optimisers}
        numbers |= {f"final loss, {NAMES[name]}, batch {batch}": value for name, value in finals.items()}
    gaps: dict[int, list[float]] = {}
    for name in (name for name in ("ekfac", "ekfac-ra") if name in optimisers):
        gaps = {b: [k - e for e, k in zip(one.final(name), one.final("kfac"))] for b, one in out.items()}
        numbers |= {f"loss of KFAC minus {NAMES[name]}, batch {b}": Estimate.of(gap) for b, gap in gaps.items()}
        shrink = [big - small for small, big in zip(gaps[min(gaps)], gaps[max(gaps)])]
        numbers[f"gain of {NAMES[name]} at the largest batch minus at the smallest"] = Estimate.of(shrink)
    pairs = {b: zip(one.rows["ekfac-ra"], one.rows["kfac"]) for b, one in out.items()}
    numbers |= {
        f"loss at equal time of KFAC minus EKFAC-ra, batch {b}": Estimate.of([standings.at_equal_time(*p) for p in own])
        for b, own in pairs.items()
    }
    shown = f"width {options.width}, {options.n} images of {options.dataset}"
    finals_of = {NAMES[name]: list(zip(*(one.final(name) for one in out.values()))) for name in optimisers}
    searches = " ".join(standings.searched(one, f", batch {b}") for b, one in out.items())
    tail = "" if (options.dataset, options.width) == ("cifar10", 64) else f" {shown.capitalize()}."
    each = [
        standings.charts(one, "cross-entropy", f"Batch {b}.", f"batch-{b}-", f", batch {b}") for b, one in out.items()
    ]
    return StudyResult(
        measured=f"Loss of KFAC minus that of EKFAC-ra: "
        f"{', '.join(f'{Estimate.of(gap)} with batches of {b}' for b, gap in gaps.items())}. {searches}{tail}",
        numbers=numbers,
        figures=(
            Chart("batches", "Training loss at the end against the batch size", "examples per batch", "cross-entropy",
                  tuple(curve(name, out, rows) for name, rows in finals_of.items()), log_x=True, log_y=True,
                  alt="One curve per optimiser over batch sizes.",
                  caption=f"{network} of {shown}, {options.epochs:g} epochs; band: standard error."),
            *(chart for pair in each for chart in pair),
        ),
    )  # fmt: skip
