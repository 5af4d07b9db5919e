"""Fig. C.1: the learning rate does not do what alpha does. Label noise with alpha = 1 and several learning rates.

The network of Fig. 5.2 (bottom) is trained with alpha = 1 and learning rates over orders of magnitude, and once with a
large alpha for comparison. All are compared at equal loss of the clean examples.

Verdict: confirmed if changing the learning rate (from the largest to the smallest that made progress) moves the noisy
loss at equal clean loss by less than changing alpha does: |effect of the rate| + 2 SE < |effect of alpha| - 2 SE, both
at the levels of clean loss that all runs of a seed pass. Small rates get little progress in a bounded number of steps;
a rate counts only if its runs brought the clean loss below `reach` times its start.
"""

from __future__ import annotations

from typing import Annotated

from biascope.studies.estimates import decide
from biascope.studies.lazy.comparison import known, linearity_chart, linearity_numbers, steps_taken
from biascope.studies.lazy.noise import NOISE, NoiseTask, curves_chart, noise_runs, noisy_gap
from biascope.studies.lazy.regimes import Factor, Pace
from biascope.studies.lazy.training import Trajectory
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "The noisy loss at equal clean loss moves less from the largest to the smallest learning rate than from alpha = 1 "
    "to a large alpha. (That trajectories coincide, those of the rates between, and that the linearity metrics fall at "
    "small rates too, is not judged.)"
)
PACE = Pace(stop=0.3)


@study(
    "lazy/figC.1",
    paper="linearization",
    figure="C.1",
    claim=CLAIM,
    sizes={
        "smoke": {"n": 300, "width": 48, "batch": 50, "lrs": (0.2, 0.05), "steps": (100, 250), "alpha_steps": 350}
        | {"seeds": 2, "lin": 8},
        "laptop": {"dataset": "cifar10", "net": "lenet", "n": 1000, "lrs": (0.02, 0.006, 0.002), "seeds": 2}
        | {"batch": 50, "steps": (1000, 3000, 8000), "alpha_steps": 6000, "factor": 0.96},
        "paper": {"dataset": "cifar10", "net": "resnet18-nobn", "width": 64, "n": 40_000, "lin": 100, "factor": 0.96}
        | {"lrs": (0.01, 0.003, 1e-4, 1e-6), "steps": (64_000, 200_000, 500_000, 500_000), "alpha_steps": 320_000},
    },
)
def figC_1(
    run: Run,
    *,
    task: NoiseTask = NOISE,
    lrs: Annotated[tuple[float, ...], "learning rates with alpha = 1, descending"] = (0.1, 0.03, 0.01),
    steps: Annotated[tuple[int, ...], "steps at most, one number per learning rate"] = (1000, 3000, 8000),
    alpha: Annotated[float, "the linear regime for comparison, at the largest rate"] = 100.0,
    alpha_steps: Annotated[int, "steps at most of the linear regime"] = 8000,
    pace: Pace = PACE,
    factor: Factor = 0.93,
    reach: Annotated[float, "share of the initial clean loss below which a rate counts"] = 0.7,
) -> StudyResult:
    """Noisy loss at equal clean loss for several learning rates, beside a large alpha."""
    settings = {f"lr {lr:g}": pace.setting(1.0, lr, count, factor) for lr, count in zip(lrs, steps, strict=True)}
    scaled = f"alpha = {alpha:g}"
    settings[scaled] = pace.setting(alpha, max(lrs), alpha_steps, factor)
    runs = noise_runs(run, task, settings, pace.seeds)

    def got_far(group: list[Trajectory]) -> bool:
        return all(float(t.losses("clean").min()) < reach * float(t.losses("clean")[0]) for t in group)

    counted = {label: group for label, group in runs.items() if got_far(group)}
    rates = [label for label in counted if label != scaled]
    numbers: dict[str, Estimate] = {**linearity_numbers(runs), **steps_taken(runs)}
    if len(rates) < 2 or scaled not in counted:
        left = ", ".join(sorted(set(runs) - set(counted)))
        return StudyResult("not tested", CLAIM, f"Too little progress in the steps allowed: {left}.", numbers)
    everyone = list(counted.values())  # both effects are taken at the same levels of progress
    rate_effect = noisy_gap(counted[rates[-1]], counted[rates[0]], everyone)
    alpha_effect = noisy_gap(counted[scaled], counted[rates[0]], everyone)
    numbers = {
        f"noisy loss at equal clean loss, {rates[-1]} minus {rates[0]}": rate_effect,
        f"noisy loss at equal clean loss, {scaled} minus {rates[0]}": alpha_effect,
        **numbers,
    }
    effects = (rate_effect, alpha_effect)
    doubt = 2 * sum(e.standard_error or 0.0 for e in effects)
    out = [label for label in runs if label not in counted]
    left = f" Left out for too little progress: {', '.join(out)}." if out else ""
    return StudyResult(
        decide(abs(rate_effect.value) + doubt < abs(alpha_effect.value), effects),
        CLAIM,
        f"{task}, {pace.seeds} seeds: from {rates[0]} to {rates[-1]} the noisy loss at equal "
        f"clean loss moves by {rate_effect}; from alpha 1 to {alpha:g} by {alpha_effect}.{left}",
        known(numbers),
        (
            curves_chart(counted),
            curves_chart(counted, "accuracy"),
            *([linearity_chart(runs, "clean")] if task.lin else []),
        ),
    )
