"""Fig. 14: the ordering by eigenvalue survives any learning rate; a tiny one generalises worse.

Verdict rule: at every learning rate the Spearman correlation of index and test accuracy, averaged over the boundaries,
is negative by 2 standard errors over repeats; and the mean test accuracy at the smallest rate lies below that at the
rate nearest to 0.5 (that of Fig. 10; nearest in logarithm) by 2 standard errors. (Changed after the first run: the best
rate had been picked on the accuracies that were compared.) Fewer than four directions say nothing of the order, and
where the smallest rate is the one nearest to 0.5 nothing is compared: both test nothing. Rates at which the mean
training accuracy stays below 90 % are named in the text: there the comparison is not the paper's, which reaches 100 %
at each.
"""

import math
from typing import Annotated

import torch

from biascope.errors import InputError
from biascope.studies.estimates import above, below
from biascope.studies.invariance.boundary_sweep import (
    BOUNDARIES,
    Sweep,
    accuracy_chart,
    check_boundaries,
    enough,
    mean_order,
    order,
    sweep_directions,
    too_few,
)
from biascope.studies.invariance.charts import decide, percent, restricted, together
from biascope.studies.invariance.geometries import spread_indices
from biascope.studies.invariance.networks import as_they_are, named, shape_of
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "ResNet18 on isotropic data generalises in the order of the eigenvalues of G at every learning rate from 0.001 to "
    "1, reaching 100 % training accuracy at each; the smallest rates generalise worse."
)
SWEEP = Sweep(chunk=64)
RATES = (1.0, 0.1, 0.01, 0.001)
USUAL = 0.5  # the learning rate of Fig. 10


@study(
    "gih/fig14",
    paper="invariance",
    figure="14",
    claim=CLAIM,
    sizes={
        "smoke": {"net": "lenet", "side": 16, "networks": 48, "heads": 32, "stride": 255, "n_train": 400,
                  "n_test": 200, "epochs": 4, "repeats": 3, "rates": (1.0, 0.1), "boundaries": ("linear",),
                  "engine": "vmap"},
        "laptop": {"net": "lenet", "side": 16, "networks": 256, "heads": 32, "stride": 85, "n_train": 4000,
                   "epochs": 10, "rates": (1.0, 0.1, 0.01), "boundaries": ("linear",)},
        "paper": {},
    },
)  # fmt: skip
def fig14(
    run: Run,
    *,
    net: Annotated[str, "architecture, with normalisation; or your own as module:factory"] = "resnet18",
    rates: Annotated[tuple[float, ...], "first learning rates (linear decay to 0)"] = RATES,
    side: Annotated[int, "side of the grey input image"] = 32,
    stride: Annotated[int, "every how many eigenvectors one is tried"] = 10,
    n_train: Annotated[int, "training examples"] = 10_000,
    n_test: Annotated[int, "test examples"] = 2000,
    repeats: Annotated[int, "independent data sets and trainings per direction"] = 3,
    more_epochs: Annotated[float, "factor on the epochs for the sinusoidal boundary"] = 2.5,
    sweep: Sweep = SWEEP,
) -> StudyResult:
    """Accuracy by direction at several learning rates."""
    (net,) = named([net])
    shape, kinds = shape_of(1, side, [net]), check_boundaries(sweep.boundaries)
    indices = spread_indices(side**2, stride)
    if not rates or min(rates) <= 0:
        raise InputError(f"rates={rates}: one or more learning rates above 0 are needed")
    G = sweep.later(run, net, shape)
    numbers: dict[str, Estimate] = {}
    tests = {b: dict[str, torch.Tensor]() for b in kinds}
    ordered, means, loose = dict[float, bool | None](), dict[float, torch.Tensor](), list[str]()
    for lr in rates:
        heights, fits = [], []
        for boundary in kinds:
            protocol = sweep.protocol(boundary, more_epochs, lr)
            train, test = sweep_directions(
                run, f"lr={lr:g}", net, G, indices, shape, boundary, protocol, n_train=n_train, n_test=n_test,
                repeats=repeats, chunk=sweep.chunk,
            )  # fmt: skip
            tests[boundary][f"lr = {lr:g}"] = test
            heights.append(percent(test.mean(1)))
            fits.append(float(train.mean()))
            numbers[f"lr = {lr:g}, {boundary}: Spearman(index, accuracy)"] = order(indices, test)
        mean = mean_order(indices, [tests[b][f"lr = {lr:g}"] for b in kinds])
        numbers[f"lr = {lr:g}: Spearman, mean over boundaries"] = mean
        means[lr] = torch.stack(heights).mean(0)
        numbers[f"lr = {lr:g}: mean test accuracy, %"] = Estimate.of(means[lr])
        numbers[f"lr = {lr:g}: lowest mean training accuracy, %"] = Estimate(100 * min(fits), None, repeats)
        ordered[lr] = below(mean) if enough(indices) else None
        if min(fits) < 0.9:
            loose.append(f"{lr:g}")
    usual, tiny = min(rates, key=lambda lr: abs(math.log(lr / USUAL))), min(rates)
    beats, right = f"The rate nearest to {USUAL:g} is the smallest, so that no two are compared.", None
    if usual != tiny:
        worse = Estimate.of(means[usual] - means[tiny])
        numbers[f"rate {usual:g} minus smallest rate, mean test accuracy, points"] = worse
        beats, right = f"A rate of {usual:g} beats the smallest by {worse} points.", above(worse)
    told = ", ".join(f"{numbers[f'lr = {lr:g}: Spearman, mean over boundaries']} at {lr:g}" for lr in rates)
    note = f" Training accuracy below 90 % at lr {', '.join(loose)}: not the paper's regime." if loose else ""
    stand_in = "" if net == "resnet18" else " (the paper: ResNet18)"
    charts: list[Chart] = []
    for boundary in kinds:
        chart = accuracy_chart(f"{net}-{boundary}", indices, tests[boundary], f"{n_train} examples.", "G")
        charts.append(chart)
    claim, untested = restricted(
        CLAIM, networks=([net], ["resnet18"]), boundaries=(kinds, BOUNDARIES), rates=(rates, RATES)
    )
    return StudyResult(
        verdict=decide(together([*ordered.values(), right]), repeats),
        claim=claim,
        measured=f"Spearman(index, accuracy): {told}. {beats}{too_few(indices)}"
        f"{note} {net}{stand_in}, 1 x {side} x {side}, {n_train} examples.{as_they_are([net])}{untested}",
        numbers=numbers,
        figures=tuple(charts),
    )
