"""Fig. 4.4 and B.7 (also 6.4): alignment of the tangent kernel with easy and with difficult examples of one set.

Difficult: digits with random labels, or images of another set (Fashion-MNIST stands in for KMNIST).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from biascope import ntk
from biascope.data import Dataset, easy_difficult
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, mean_of_ranks, spearman
from biascope.support import derive, progress
from biascope_papers.alignment.tracking import build, cka, iterations, mean_curve, stand_in
from biascope_papers.ntk.setting import images
from biascope_papers.ntk.training import Recipe, evaluate, fit, spread_out, steps_of

Kind = Literal["random", "fashion"]
KINDS: dict[Kind, str] = {
    "random": "digits with random labels",
    "fashion": "Fashion-MNIST (a stand-in for KMNIST)",
}


@dataclass(frozen=True)
class Mixture:
    """Options of both studies: how the set is mixed and how networks are trained on it."""

    dataset: Annotated[str, "easy examples: mnist, or digits as a stand-in"] = "mnist"
    n_easy: Annotated[int, "easy training images"] = 10_000
    n_difficult: Annotated[int, "difficult training images"] = 1000
    width: Annotated[int, "units per hidden layer"] = 80
    lr: Annotated[float, "learning rate; momentum is 0.9"] = 0.02
    batch: Annotated[int, "images per step"] = 100
    epochs: Annotated[float, "passes over the training images"] = 60
    probes: Annotated[int, "measurements, evenly spaced in log iterations"] = 25
    probe_size: Annotated[int, "images per kernel"] = 100
    seeds: Annotated[int, "initialisations and draws of the images"] = 3

    def __str__(self) -> str:
        return (
            f"{self.n_easy} + {self.n_difficult} images, {self.epochs:g} epochs, {self.seeds} seeds."
            f"{stand_in(self.dataset)}"
        )


MIXTURE, NARROW = Mixture(), Mixture(width=60, lr=0.01)
SMOKE: dict[str, Any] = {
    "dataset": "digits", "n_easy": 400, "n_difficult": 80, "width": 40, "batch": 40, "probe_size": 30, "seeds": 2,
}  # fmt: skip
LAPTOP: dict[str, Any] = {"epochs": 30, "probes": 16}


@study(
    "alignment/fig4.4",
    sizes={
        "smoke": SMOKE | {"kinds": "random", "epochs": 25, "probes": 6}, "laptop": LAPTOP, "paper": {"seeds": 10},
    },
)  # fmt: skip
def fig4_4(
    run: Run,
    *,
    kinds: Annotated[tuple[Kind, ...], "difficult examples"] = ("random", "fashion"),
    depth: Annotated[int, "hidden layers"] = 6,
    mixed: Mixture = MIXTURE,
) -> StudyResult:
    """Alignment of the tangent kernel with easy and with difficult examples during training."""
    numbers: dict[str, Estimate] = {}
    charts, parts = [], []
    for kind in progress(kinds, "difficult examples"):
        found = follow(run, mixed, kind, depth)
        gap = Estimate.of([float((f["easy"] - f["difficult"])[1:].mean()) for f in found])
        ratio = Estimate.of(map(mean_ratio, found))
        delay = Estimate.of([half_rise(f["steps"], f["difficult"]) - half_rise(f["steps"], f["easy"]) for f in found])
        numbers[f"CKA of easy minus difficult, {kind}"] = gap
        numbers[f"ratio of mean CKAs easy / difficult, {kind}"] = ratio
        numbers[f"delay of half of the rise, decades of iterations, {kind}"] = delay
        for group in ("easy", "difficult"):
            numbers[f"largest CKA, {group}, {kind}"] = Estimate.of([float(f[group].max()) for f in found])
            numbers[f"accuracy at the end, {group}, {kind}"] = ending(found, group)
        parts.append(f"{KINDS[kind]}: CKA easy minus difficult {gap}, ratio of means {ratio}, delay {delay} decades")
        charts.append(_chart(found, kind, f"Alignment with easy examples and with {KINDS[kind]}"))
    return StudyResult(measured=f"{'; '.join(parts)}. {mixed}", numbers=numbers, figures=tuple(charts))


@study(
    "alignment/figB.7",
    sizes={
        "smoke": SMOKE | {"depths": "1,5", "epochs": 15, "probes": 5},
        "laptop": LAPTOP | {"depths": "1,3,6"},
        "paper": {"seeds": 8},
    },
)
def fig_b7(
    run: Run,
    *,
    depths: Annotated[tuple[int, ...], "numbers of hidden layers"] = (1, 2, 4, 6, 9),
    mixed: Mixture = NARROW,
) -> StudyResult:
    """Alignment with easy examples and with examples of random labels, for networks of several depths."""
    found = {depth: follow(run, mixed, "random", depth) for depth in progress(depths, "depths")}
    measures: dict[str, Callable[[dict[str, Any]], float]] = {
        "ratio of mean CKAs": mean_ratio,
        "largest ratio": largest_ratio,
        "iteration of half of the rise": lambda f: half_rise(f["steps"], f["easy"]),
        "largest CKA": lambda f: float(f["easy"].max()),
        "steepest rise of the CKA": lambda f: steepest(f["steps"], f["easy"]),
        "share of training with a high ratio": lambda f: lasting(f["steps"], f["easy"] / f["difficult"]),
    }
    rows = {  # [seeds][depths]
        name: [[of(found[depth][seed]) for depth in depths] for seed in range(mixed.seeds)]
        for name, of in measures.items()
    }
    numbers = {
        f"rank correlation of depth and the {name}": mean_of_ranks(
            [spearman(list(depths), row) for row in table], len(depths)
        )
        for name, table in rows.items()
    }
    ends = [ending(each, "easy") for each in found.values()]
    numbers["lowest accuracy at the end, easy"] = min(ends, key=lambda each: each.value)
    growth = numbers["rank correlation of depth and the ratio of mean CKAs"]
    ratio = Chart(
        "ratio", "Ratio of the alignments, easy over difficult", "hidden layers", "ratio",
        (
            curve("of means over training", depths, rows["ratio of mean CKAs"]),
            curve("largest over training", depths, rows["largest ratio"], "dashed"),
        ),
        alt="The ratio of alignments against depth, of means over training and the largest.",
    )  # fmt: skip
    charts = (_chart(f, f"{d}", f"Alignment of a network with {d} hidden layers") for d, f in found.items())
    return StudyResult(
        measured=f"Rank correlation of depth and the ratio of mean CKAs: {growth}. {mixed}",
        numbers=numbers,
        figures=(ratio, *charts),
    )


def mixture(run: Run, m: Mixture, kind: Kind, seed: int) -> Dataset:
    """n_easy digits, then n_difficult others; `group` is 0 and 1."""
    chosen, other = derive(run.seed, "images", seed), None
    easy = images(m.dataset, "train", m.n_easy + (m.n_difficult if kind == "random" else 0), chosen, run.device)
    if kind == "fashion":
        other = images("fashion-mnist", "train", m.n_difficult, chosen, run.device, like=easy)
    return easy_difficult(easy, other, m.n_easy, m.n_difficult, seed=derive(run.seed, "mix", seed))


def follow(run: Run, m: Mixture, kind: Kind, depth: int) -> list[dict[str, Any]]:
    """Of every seed: steps [p], CKA of as many easy as difficult training images with their labels, accuracies [p]."""

    def train(seed: int) -> dict[str, Tensor]:
        mixed = mixture(run, m, kind, seed)
        net = build("mlp", mixed.x.shape[1:], derive(run.seed, "init", seed), width=m.width, depth=depth).to(run.device)
        parts = {
            "easy": mixed.subset(torch.arange(m.n_easy)),
            "difficult": mixed.subset(torch.arange(m.n_easy, len(mixed))),
        }
        recipe = Recipe(steps_of(m.epochs, len(mixed), m.batch), m.batch, m.lr, 0.9, "constant")
        at = spread_out(recipe.steps, m.probes, first=min(5, recipe.steps))
        rows: dict[str, list[float]] = {f"{name}{what}": [] for name in parts for what in ("", " accuracy")}

        def look(step: int) -> None:
            for name, part in parts.items():
                rows[name].append(cka(ntk(net, part.x[: m.probe_size]), part.y[: m.probe_size]))
                rows[f"{name} accuracy"].append(evaluate(net, part.x, part.y)[1])
            run.log(kind=kind, depth=depth, seed=seed, step=step, **{name: row[-1] for name, row in rows.items()})

        fit(net, mixed.x, mixed.y, recipe, derive(run.seed, "order", seed), at=at, look=look)
        return {"steps": torch.tensor(at), **{n: torch.tensor(row, dtype=torch.float64) for n, row in rows.items()}}

    key = f"{kind} depth={depth} width={m.width} lr={m.lr:g}"
    return [
        run.cached(f"{key} seed={seed}", partial(train, seed)) for seed in progress(range(m.seeds), kind, leave=False)
    ]


def ending(found: list[dict[str, Any]], group: str) -> Estimate:
    """The training accuracy of a group at the last probe."""
    return Estimate.of([float(f[f"{group} accuracy"][-1]) for f in found])


def half_rise(steps: Tensor, curve: Tensor) -> float:
    """log10 of the first iteration at which a curve has made half of its rise from the first to the largest value."""
    level = (curve[0] + curve.max()) / 2
    first = int((curve >= level).nonzero()[0]) if bool((curve >= level).any()) else len(curve) - 1
    return math.log10(max(1, int(steps[first])))


def steepest(steps: Tensor, curve: Tensor) -> float:
    """The largest rise of a curve per decade of iterations, between neighbouring probes."""
    return float((curve.diff() / steps.double().clamp_min(1).log10().diff().clamp_min(1e-9))[1:].max())


def lasting(steps: Tensor, ratio: Tensor) -> float:
    """The share of the iterations during which a ratio is above the middle between 1 and its largest value."""
    high = (ratio[1:] > (1 + ratio[1:].max()) / 2).double()
    return float((high * steps.double().diff()).sum() / steps[-1])


def mean_ratio(found: dict[str, Any]) -> float:
    """Mean CKA(easy) over mean CKA(difficult), over the probes after the first."""
    return float(found["easy"][1:].mean() / found["difficult"][1:].mean().clamp_min(1e-12))


def largest_ratio(found: dict[str, Any]) -> float:
    """Largest CKA(easy) / CKA(difficult) after the first probe; above 1 even for two equal noisy curves."""
    return float((found["easy"][1:] / found["difficult"][1:].clamp_min(1e-12)).max())


def _chart(found: list[dict[str, Any]], name: str, title: str) -> Chart:
    """CKA of both groups over iterations, and their training accuracies."""
    steps, series = iterations(found), []
    for group in ("easy", "difficult"):
        series.append(curve(f"CKA, {group}", steps, torch.stack([f[group] for f in found])))
        series.append(Series.of(f"accuracy, {group}", steps, mean_curve(found, f"{group} accuracy"), style="dashed"))
    return Chart(
        f"alignment-{name}", title, "iteration", "CKA; training accuracy", tuple(series),
        alt="CKA with the labels of easy and of difficult training images over iterations, and training accuracies.",
        caption="Iteration 0 is drawn at 1. Mean and standard error over seeds.", log_x=True,
    )  # fmt: skip
