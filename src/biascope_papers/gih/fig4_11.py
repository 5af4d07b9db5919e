"""Figs 4 and 11: CIFAR-10 images relabelled along the eigenvectors of GSG, with label noise: who generalises?

As `biascope.data.relabel`, for many directions at once. Noise on the pixels (0.2 times the channel's variance) enters a
label only through its projection on u, which is drawn directly. The sinusoidal label is the sign of sin(pi (x.u -
mean)/std) minus its median ("projection", the published code), or of sin(xbar.u) minus its median with every channel of
xbar standardised ("channel", the text).

The label noise has the same variance in every direction, images do not: along directions in which they hardly vary
labels are nearly random. The charts show this ceiling, the expected accuracy of the rule that gives every image its
more likely label; `noise=0` removes it. At a laptop's size some 500 of the 768 eigenvalues of LeNet's G are above
rounding; the directions of the others have no order.

Fig. 11 is the same for a small LeNet with as many examples as parameters: (a) CIFAR images, (b) isotropic data as in
Fig. 10.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope import InputError
from biascope.data import channel_stats
from biascope.data.boundaries import boundary_value, middle
from biascope.geometry import data_second_moment
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import spearman
from biascope.support import generator
from biascope_papers.gih.averages import estimate
from biascope_papers.gih.fig10_14 import (
    BOUNDARIES,
    LEARNED,
    Sweep,
    accuracy_chart,
    fall,
    order,
    sweep_directions,
    too_few,
)
from biascope_papers.gih.geometries import spread_indices
from biascope_papers.gih.networks import at_least, factory, named, scope, shape_of
from biascope_papers.gih.sets import Boundary, Source, describe, ten_classes
from biascope_papers.gih.training import Lazy, Protocol, mean_of, train_tasks

Sinusoid = Literal["projection", "channel"]
Sine = Annotated[Sinusoid, "sin(pi (x.u - mean)/std) (projection, published code), or sin(xbar.u) (channel, text)"]
SINES = {"projection": "sin(pi (x.u - mean)/std), the published code's, not the text's sin(xbar.u)",
         "channel": "sin(xbar.u) with standardised channels, the paper's text"}  # fmt: skip
TEXT = {"sinusoid": "channel", "angle": "text"}
NETS = ("lenet", "resnet18", "vit")
SWEEP = Sweep(n_test=10_000, repeats=5, chunk=32)
SMALL_SWEEP = Sweep(n_train=50_000, n_test=10_000, chunk=26)


@study(
    "gih/fig4",
    sizes={
        "smoke": {"nets": ("lenet",), "source": "synthetic", "side": 16, "networks": 48, "heads": 32, "stride": 383,
                  "n_train": 400, "n_test": 200, "epochs": 6, "repeats": 3, "boundaries": ("linear",),
                  "engine": "vmap", **TEXT},
        "laptop": {"nets": ("lenet",), "side": 16, "networks": 256, "heads": 64, "stride": 128, "n_train": 4000,
                   "n_test": 2000, "epochs": 10, "repeats": 3, "boundaries": ("linear", "quadratic"), **TEXT},
        "paper": TEXT,
    },
)  # fmt: skip
def fig4(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures, without normalisation; or your own as module:factory"] = NETS,
    source: Annotated[Source, "cifar10, or a synthetic stand-in"] = "cifar10",
    stride: Annotated[int, "every how many eigenvectors of GSG one is tried"] = 30,
    noise: Annotated[float, "variance of the label noise over the channel variance"] = 0.2,
    lr: Annotated[float, "first learning rate (linear decay to 0)"] = 0.5,
    sinusoid: Sine = "projection",
    sweep: Sweep = SWEEP,
) -> StudyResult:
    """Test accuracy on CIFAR images relabelled along directions down the spectrum of GSG."""
    nets, kinds, side = named(nets), sweep.kinds, sweep.side
    shape = shape_of(3, side, nets)
    train, test = subset(run, source, sweep)
    S = data_second_moment(train.to(run.device), normalise=True).cpu()
    indices = spread_indices(len(S), stride)
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    fitted = 1.0
    for net in nets:
        directions = sweep.gsg_vectors(run, net, shape, S)[indices]
        curves, clear = dict[str, Tensor](), []
        for boundary in kinds:
            fit, accuracy, ceiling = sweep_labels(
                run, net, train, test, directions, boundary, sweep.along(boundary, lr), sweep, noise, sinusoid
            )
            fitted = min(fitted, float(fit.mean()))
            numbers[f"{net}, {boundary}: lowest training accuracy, %"] = Estimate(100 * float(fit.mean(0).min()))
            curves[boundary] = accuracy
            if noise > 0:
                curves[f"{boundary}, ceiling of the label noise"] = ceiling
            numbers[f"{net}, {boundary}: Spearman(index, accuracy)"] = order(indices, accuracy)
            numbers[f"{net}, {boundary}: first minus last direction, points"] = fall(accuracy)
            found = clear_order(indices, accuracy, ceiling)
            clear += [] if found is None else [found]
        numbers[f"{net}: Spearman, mean over boundaries"] = order(indices, *(curves[b] for b in kinds))
        for easy, hard in pairwise(kinds):
            numbers[f"{net}: reach, {easy} minus {hard}"] = reach_gap(curves[easy], curves[hard])
        if clear:
            numbers[f"{net}: Spearman where the label noise matters little"] = mean_of(torch.stack(clear).mean(0))
        note = " No rule gets above the ceiling on average." if noise > 0 else ""
        caption = f"{len(train)} images, label noise {noise:g}, {sweep.repeats} repeats.{note}"
        charts.append(accuracy_chart(net, indices, curves, caption, "GSG"))
    text = "; ".join(f"{net} {numbers[f'{net}: Spearman, mean over boundaries']}" for net in nets)
    return StudyResult(
        measured=f"Spearman(index, accuracy), mean over boundaries: {text}. {describe(source, side)}. "
        f"Lowest mean training accuracy {100 * fitted:.0f} % (the paper trains to 100)."
        f"{too_few(indices)}{_sines(kinds, sinusoid)}"
        f"{scope(networks=(nets, NETS), boundaries=(kinds, BOUNDARIES), images=([source], ['cifar10']))}",
        numbers=numbers,
        figures=tuple(charts),
    )


@study(
    "gih/fig11",
    sizes={
        "smoke": {"source": "synthetic", "side": 16, "networks": 48, "heads": 32, "points": 3, "n_train": 256,
                  "n_test": 200, "epochs": 5, "boundaries": ("linear",), "noise": 0.0, "engine": "vmap", **TEXT},
        "laptop": {"side": 16, "networks": 256, "heads": 64, "points": 4, "n_train": 12_000, "n_test": 2000,
                   "epochs": 5, "boundaries": ("linear",), **TEXT},
        "paper": TEXT,
    },
)  # fmt: skip
def fig11(
    run: Run,
    *,
    source: Annotated[Source, "cifar10, or a synthetic stand-in, for part (a)"] = "cifar10",
    points: Annotated[int, "directions tried, evenly spaced over the spectrum"] = 52,
    noise: Annotated[float, "variance of the label noise of part (a) over the channel variance"] = 0.2,
    lr: Annotated[float, "first learning rate (linear decay to 0)"] = 0.5,
    sinusoid: Sine = "projection",
    sweep: Sweep = SMALL_SWEEP,
) -> StudyResult:
    """Accuracy by direction of a small LeNet with as many examples as parameters."""
    net, kinds, side, n_train = "lenet-small", sweep.kinds, sweep.side, sweep.n_train
    at_least(2, points=points)
    colour, grey = shape_of(3, side, [net]), shape_of(1, side, [net])
    weights = sum(p.numel() for p in factory(net, colour)().parameters())
    train, test = subset(run, source, sweep)
    if len(train) < n_train:  # part (b) has as many as are asked for, and both parts should have the same
        raise InputError(f"n_train={n_train}: there are {len(train)} training images for part (a)")
    S = data_second_moment(train.to(run.device), normalise=True).cpu()
    sizes = {"CIFAR": len(S), "isotropic": side**2}
    places = {part: spread_indices(D, max(1, (D - 1) // (points - 1))) for part, D in sizes.items()}
    directions, geometry = sweep.gsg_vectors(run, net, colour, S)[places["CIFAR"]], sweep.later(run, net, grey)
    results: dict[str, dict[str, Tensor]] = {"CIFAR": {}, "isotropic": {}}
    for boundary in kinds:
        protocol = sweep.along(boundary, lr)
        _, results["CIFAR"][boundary], ceiling = sweep_labels(
            run, net, train, test, directions, boundary, protocol, sweep, noise, sinusoid
        )
        if noise > 0:
            results["CIFAR"][f"{boundary}, ceiling of the label noise"] = ceiling
        _, results["isotropic"][boundary] = sweep_directions(
            run, "sweep", net, geometry, places["isotropic"], grey, boundary, protocol, sweep
        )
    numbers: dict[str, Estimate] = {}
    for part, tests in results.items():
        numbers[f"{part}: Spearman, mean over boundaries"] = order(places[part], *(tests[b] for b in kinds))
        for b in kinds:
            numbers[f"{part}, {b}: Spearman(index, accuracy)"] = order(places[part], tests[b])
            numbers[f"{part}, {b}: first minus last direction, points"] = fall(tests[b])
            numbers[f"{part}, {b}: highest accuracy of a direction, %"] = Estimate(100 * float(tests[b].mean(0).max()))
    text = "; ".join(f"{part} {numbers[f'{part}: Spearman, mean over boundaries']}" for part in results)
    caption = f"{n_train} examples, {weights} parameters."
    return StudyResult(
        measured=f"Spearman(index, accuracy), mean over boundaries: {text}. Part (a): {describe(source, side)}."
        f"{too_few(*places.values())}{_sines(kinds, sinusoid)}"
        f"{scope(boundaries=(kinds, BOUNDARIES), images=([source], ['cifar10']))}",
        numbers=numbers,
        figures=tuple(
            accuracy_chart(f"{net}-{part}", places[part], tests, caption, "GSG" if part == "CIFAR" else "G")
            for part, tests in results.items()
        ),
    )


def subset(run: Run, source: Source, sweep: Sweep) -> tuple[Tensor, Tensor]:
    """Random training and test images."""
    made = []
    for data, n in zip(ten_classes(run, source, sweep.side, sweep.n_train), (sweep.n_train, sweep.n_test)):
        made.append(data.x[torch.randperm(len(data), generator=generator(run.seed, "subset", n))[:n]])
    return made[0], made[1]


def _sines(boundaries: Sequence[str], sinusoid: Sinusoid) -> str:
    return f" Sinusoidal labels: {SINES[sinusoid]}." if "sinusoidal" in boundaries else ""


# ---- how far down the directions a network gets ----


def reach(accuracy: Tensor) -> Tensor:
    """How far down the directions the mean accuracy [directions] holds.

    The mean over directions of the excess over chance, as a share of the largest: 1 if it never falls, 1 / directions
    if it falls at once.
    """
    excess = accuracy - 0.5
    return excess.mean() / excess.max().clamp_min(1e-9)


def reach_gap(far: Tensor, near: Tensor) -> Estimate:
    """Reach of one curve minus that of another, each [repeats, directions]; no error if one is learned nowhere.

    The error comes from leaving out a repeat in both at a time, and with it in the largest excess.
    """
    far, near = far.double(), near.double()
    found = estimate(lambda w: reach(w @ far / w.sum()) - reach(w @ near / w.sum()), len(far))
    learned = min(float(rows.mean(0).max()) for rows in (far, near)) >= LEARNED
    return found if learned else replace(found, standard_error=None)


def clear_order(indices: list[int], accuracy: Tensor, ceiling: Tensor, margin: float = 0.05) -> Tensor | None:
    """Spearman correlation [repeats] over the directions whose ceiling is near the highest; None if they are < 3."""
    mean = ceiling.mean(0)
    kept = (mean >= mean.max() - margin).nonzero().flatten().tolist()
    if len(kept) < 3:
        return None
    return torch.tensor([spearman([indices[i] for i in kept], row[kept]) for row in accuracy])


# ---- labels ----


@dataclass(frozen=True)
class Labels:
    """Labels [directions, n] of training and test images, and the best expected accuracy on the test images."""

    train: Tensor = field(repr=False)
    test: Tensor = field(repr=False)
    ceiling: Tensor  # [directions]


def labels_along(
    train: Tensor, test: Tensor, U: Tensor, boundary: Boundary, noise: float, seed: int, repeat: int,
    sinusoid: Sinusoid = "projection",
) -> Labels:  # fmt: skip
    """Labels of images [n, c, h, w] for every unit direction of U [k, c, h, w]; bias: minus the training median."""
    at_least(0, noise=noise)
    middles, std = channel_stats(train)
    standardised = boundary == "sinusoidal" and sinusoid == "channel"
    if standardised:  # by what the labels are computed on, so with the noise
        mean_, scale = (s.to(U).view(-1, 1, 1) for s in (middles, std * math.sqrt(1 + noise)))
        train, test = ((x - mean_.to(x)) / scale.to(x) for x in (train, test))
        _, std = channel_stats(train)
    spread = (noise * (std.square().to(U)[None] * U.flatten(2).square().sum(2)).sum(1)).sqrt()  # [k]
    clean = [x.flatten(1) @ U.flatten(1).T for x in (train, test)]  # [n, k]
    seen = []
    for part, values in zip(("train", "test"), clean):
        draw = torch.randn(values.shape, generator=generator(seed, "label noise", part, repeat)).to(values)
        seen.append(values + draw * spread.to(values))
    mean, deviation = seen[0].mean(0), seen[0].std(0, correction=0).clamp_min(1e-30)

    def angle(p: Tensor) -> Tensor:
        return p if standardised else math.pi * (p - mean) / deviation

    inner = [boundary_value(p, angle(p), boundary) for p in seen]
    median = middle(inner[0])
    y_train, y_test = ((value > median).long().T.contiguous() for value in inner)
    if boundary == "sinusoidal":
        wide = spread if standardised else math.pi * spread / deviation
        chance = chance_of_one(angle(clean[1]), wide, median, boundary)
    else:
        chance = chance_of_one(clean[1], spread, median, boundary)
    return Labels(y_train, y_test, chance.maximum(1 - chance).mean(0).float().cpu())


def chance_of_one(value: Tensor, spread: Tensor, bar: Tensor, boundary: Boundary) -> Tensor:
    """P(label 1 | value [n, k]) when Gaussian noise of deviation `spread` [k] is added to the value, [n, k], float64.

    The value is the projection, or the angle of a sinusoidal boundary; the label is 1 where the projection, its square
    or the angle's sine is above `bar` [k].
    """
    value, spread, bar = value.double(), spread.double().clamp_min(1e-30), bar.double()
    end = torch.full_like(bar, math.inf)
    if boundary == "linear":
        ranges = [(bar, end)]
    elif boundary == "quadratic":
        root = bar.clamp_min(0).sqrt()
        ranges = [(-end, -root), (root, end)]
    else:
        value, low = torch.remainder(value + math.pi, 2 * math.pi) - math.pi, bar.clamp(-1, 1).asin()
        spread = spread.clamp_max(10.0)  # wider noise makes the angle as uniform as this
        turns = 1 + math.ceil(8 * float(spread.max()) / (2 * math.pi))  # noise of 8 deviations does not happen
        ranges = [(low + 2 * math.pi * k, math.pi - low + 2 * math.pi * k) for k in range(-turns, turns + 1)]
    parts = [torch.special.ndtr((b - value) / spread) - torch.special.ndtr((a - value) / spread) for a, b in ranges]
    return torch.stack(parts).sum(0)


def sweep_labels(
    run: Run, net: str, train: Tensor, test: Tensor, directions: Tensor, boundary: Boundary, protocol: Protocol,
    sweep: Sweep, noise: float, sinusoid: Sinusoid,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Training accuracy, test accuracy and ceiling, each [repeats, directions]; one network for each entry."""
    U, count, repeats = directions.to(run.device), len(directions), sweep.repeats
    train, test = train.to(run.device), test.to(run.device)
    labels = [labels_along(train, test, U, boundary, noise, run.seed, r, sinusoid) for r in range(repeats)]
    name, made = f"relabel {net} {boundary}", factory(net, tuple(train.shape[1:]), norm=False)
    tasks = Lazy(lambda i: (train, labels[i // count].train[i % count]), repeats * count)
    tests = Lazy(lambda i: (test, labels[i // count].test[i % count]), repeats * count)
    found = train_tasks(run, name, made, tasks, [tests], protocol, chunk=sweep.chunk)
    return found[0].view(repeats, count), found[1].view(repeats, count), torch.stack([each.ceiling for each in labels])
