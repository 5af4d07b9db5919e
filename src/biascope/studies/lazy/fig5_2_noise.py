"""Fig. 5.2 (bottom), with C.2: label noise. When are wrong labels learnt, at equal loss of the right ones?

15 % of the training labels are wrong. The same network is trained from the same start on the same batches with alpha =
1 and with a large alpha. Regimes are compared at equal loss of the clean training examples.

Verdict: confirmed if, over seeds, the loss of the noisy examples at equal clean loss (mean over the levels both regimes
reach) is higher for the non-linear regime and its best test loss is lower, both by two standard errors. Not tested if a
run ended before its test loss turned, or if the large alpha did not keep the tangent kernel (alignment below 0.9, or
not measured).
"""

from __future__ import annotations

from biascope.studies.lazy.comparison import (
    known,
    linearity_chart,
    linearity_numbers,
    not_linear,
    stayed_linear,
    steps_taken,
)
from biascope.studies.lazy.noise import NOISE, NoiseTask, compare, curves_chart, noise_runs
from biascope.studies.lazy.regimes import REGIMES, Factor, Regimes
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult, Verdict
from biascope.studies.runs import Run

CLAIM = (
    "With 15 % wrong labels, at equal loss of the clean examples the non-linear regime fits the noisy ones later than "
    "the linear regime, and its best test loss is lower. (That memorisation begins at a clean loss of 1.25 against 1.5 "
    "is not judged.)"
)


@study(
    "lazy/fig5.2-noise",
    paper="linearization",
    figure="5.2",
    claim=CLAIM,
    sizes={
        "smoke": {"n": 300, "width": 48, "steps": (120, 400), "lr": 0.2, "batch": 50, "seeds": 2, "lin": 8},
        "laptop": {"dataset": "cifar10", "net": "lenet", "n": 1000, "steps": (2000, 12_000), "lr": 0.02, "batch": 50}
        | {"factor": 0.96, "seeds": 3},
        "paper": {
            "dataset": "cifar10",
            "net": "resnet18-nobn",
            "width": 64,
            "n": 40_000,
            "steps": (64_000, 320_000),
            "watched": 2000,
            "lin": 100,
            "factor": 0.96,
        },
    },
)
def fig5_2_noise(
    run: Run,
    *,
    task: NoiseTask = NOISE,
    regimes: Regimes = REGIMES,
    factor: Factor = 0.93,
) -> StudyResult:
    """Noisy and test loss of both regimes at equal loss of the clean examples."""
    runs = noise_runs(run, task, regimes.settings(factor), regimes.seeds)
    hasty, lazy = runs.values()
    found = compare(hasty, lazy)
    linear = stayed_linear(lazy)
    verdict: Verdict = found.verdict if linear else "not tested"
    labels = list(runs)
    numbers: dict[str, Estimate] = {
        "noisy loss at equal clean loss, non-linear minus linear": found.noisy_gap,
        "best test loss, non-linear minus linear": found.best_test_gap,
        f"clean loss where memorisation begins, {labels[0]}": found.memorising[0],
        f"clean loss where memorisation begins, {labels[1]}": found.memorising[1],
        **linearity_numbers(runs),
        **steps_taken(runs),
    }
    notes = "" if found.settled else " A run ended before its test loss turned, so the best test losses are not final."
    notes += not_linear(labels[1], lazy)
    return StudyResult(
        verdict,
        CLAIM,
        f"{task}, {regimes.seeds} seeds: noisy loss at equal clean loss {found.noisy_gap}, best "
        f"test loss {found.best_test_gap} (both non-linear minus linear); memorisation begins at clean loss "
        f"{found.memorising[0]} against {found.memorising[1]}.{notes}",
        known(numbers),
        (
            curves_chart(runs, "loss"),
            curves_chart(runs, "accuracy"),
            *([linearity_chart(runs, "clean")] if task.lin else []),
        ),
    )
