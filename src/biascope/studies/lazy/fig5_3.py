"""Fig. 5.3, with C.7 and C.8: spurious correlations, on a stand-in (coloured or patched digits).

The thesis uses photographs (CelebA: blond hair and gender; Waterbirds: birds and backgrounds, a network pre-trained on
ImageNet). Those sets cannot be fetched here; instead grey digits get a colour or a patch that agrees with the label
(digit 5 to 9) of most training examples. The colour is in every pixel and so strong that hardly anything else is
learnt; the patch leaves the digit to compete. The network is trained from the same start with alpha = 0.5, 1 and 100,
and the accuracy on examples without the spurious feature is read where that on examples with it is equal.

Verdict: confirmed if the accuracy without the feature at equal accuracy with it (mean over the levels that all runs
reach) is higher for the largest alpha than for each other alpha by two standard errors over seeds, on training and on
test examples. Not tested if the largest alpha did not keep the tangent kernel (alignment below 0.9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.seeds import derive
from biascope.studies.estimates import above, decide
from biascope.studies.lazy.comparison import (
    Reading,
    curve_series,
    estimate,
    known,
    linearity_chart,
    linearity_numbers,
    not_linear,
    paired_differences,
    stayed_linear,
    steps_taken,
)
from biascope.studies.lazy.images import network, said
from biascope.studies.lazy.regimes import Factor, Regimes
from biascope.studies.lazy.spurious_groups import SpuriousTask
from biascope.studies.lazy.training import Setting, Trajectory, train, trajectories
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "With a spurious correlation, at equal accuracy on examples that carry the spurious feature the linear regime is "
    "more accurate on those that do not: it is less prone to the spurious feature in the first phase of training."
)


@dataclass(frozen=True)
class Three(Regimes):
    """The regimes of this study."""

    alphas: Annotated[tuple[float, ...], "regimes, ascending"] = (0.5, 1.0, 100.0)


THREE = Three(batch=100, stop=0.02, lr=0.02, steps=(1500, 1500, 4000))


@study(
    "lazy/fig5.3",
    paper="linearization",
    figure="5.3",
    claim=CLAIM,
    sizes={
        "smoke": {"dataset": "digits", "n": 600, "steps": (60, 80, 250), "lr": 0.1, "batch": 50, "seeds": 2}
        | {"per_cell": 15, "lin": 8, "width": 48, "agreement": 0.9},
        "laptop": {"net": "lenet", "steps": (1500, 1500, 4000)},
        "paper": {"net": "resnet18-nobn", "width": 64, "n": 20_000, "batch": 100, "steps": (4000, 8000, 40_000)}
        | {"lr": 0.01, "lin": 100, "factor": 0.96},
    },
)
def fig5_3(
    run: Run,
    *,
    dataset: Annotated[str, "grey images of digits: digits or mnist"] = "mnist",
    kind: Annotated[Literal["patch", "colour"], "what the spurious feature is"] = "patch",
    agreement: Annotated[float, "share of training examples whose feature agrees with the label"] = 0.95,
    net: Annotated[str, "mlp, lenet or resnet18-nobn"] = "mlp",
    width: Annotated[int, "units of a hidden layer, or channels of the first stage"] = 64,
    depth: Annotated[int, "hidden layers of the mlp"] = 4,
    init: Annotated[str, "torch or he"] = "torch",
    n: Annotated[int, "training examples"] = 4000,
    regimes: Three = THREE,
    factor: Factor = 0.93,
    per_cell: Annotated[int, "examples of every (label, attribute) cell in the groups, at most"] = 180,
    lin: Annotated[int, "examples for the linearity metrics, 0 for none"] = 20,
) -> StudyResult:
    """Accuracy without the spurious feature at equal accuracy with it, in three regimes."""
    task = SpuriousTask(dataset, kind, n, agreement, per_cell)

    def once(seed: int, setting: Setting) -> Trajectory:
        examples, watched = task.data(seed, run.device)
        net_ = network(net, examples.x, 2, width, depth, init, derive(seed, "init"))
        seen = watched.x[watched.group >= 2][:lin] if lin else None
        return train(net_, examples.x, examples.y, watched, setting, derive(seed, "order"), seen)

    runs = trajectories(run, "spurious experiment", regimes.settings(factor, every=10), regimes.seeds, once)
    labels = list(runs)
    lazy = labels[-1]
    numbers: dict[str, Estimate] = {}
    for part in ("train", "test"):
        for other in labels[:-1]:
            gap = paired_differences(runs[lazy], runs[other], _wrong(part), _without(part))
            numbers[f"{part} accuracy without the feature, {lazy} minus {other}"] = estimate(gap)
    linear = stayed_linear(runs[lazy])
    found = "; ".join(f"{key}: {value}" for key, value in numbers.items())
    return StudyResult(
        decide(all(map(above, numbers.values())), numbers.values()) if linear else "not tested",
        CLAIM,
        f"Stand-in: {dataset} with a spurious {kind} ({agreement:.0%} agreement) instead of photographs; "
        f"{said(net, width, init)}, {n} examples, {regimes.seeds} seeds. At equal accuracy with the feature: {found}."
        + not_linear(lazy, runs[lazy]),
        {**known(numbers), **linearity_numbers(runs), **steps_taken(runs)},
        (
            _chart(runs, "train"),
            _chart(runs, "test"),
            _test_chart(runs),
            *([linearity_chart(runs, "train with")] if lin else []),
        ),
    )


def _wrong(part: str) -> Reading:
    """Progress: errors on the examples with the feature."""
    return lambda t: 1 - t.accuracies(f"{part} with")


def _without(part: str) -> Reading:
    return lambda t: t.accuracies(f"{part} without")


def _chart(runs: Mapping[str, Sequence[Trajectory]], part: str) -> Chart:
    return Chart(
        f"{part}-groups",
        f"Accuracy without the spurious feature, {part} examples",
        "errors on examples with the spurious feature (training goes to the left)",
        "accuracy on examples without it",
        tuple(curve_series(label, group, _wrong(part), _without(part)) for label, group in runs.items()),
        alt="One curve per alpha; the higher, the less the network relies on the spurious feature.",
        caption="Balanced groups. Mean over seeds, band: standard error.",
    )


def _test_chart(runs: Mapping[str, Sequence[Trajectory]]) -> Chart:
    """Balanced test accuracy at equal loss of the training examples with the feature."""

    def balanced(t: Trajectory) -> Tensor:
        return torch.stack([t.accuracies("test with"), t.accuracies("test without")]).mean(0)

    return Chart(
        "test-accuracy",
        "Balanced test accuracy",
        "loss of training examples with the feature (training goes to the left)",
        "accuracy",
        tuple(curve_series(label, group, lambda t: t.losses("train with"), balanced) for label, group in runs.items()),
        alt="Balanced test accuracy over the loss of the majority, one curve per alpha.",
        caption="Mean over seeds, band: standard error.",
    )
