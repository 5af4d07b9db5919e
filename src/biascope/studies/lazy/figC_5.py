"""Figs. C.5 and C.6: by how much each group by C-score differs between the regimes, and the accuracies.

The same trainings as Fig. 5.2 (top); here the difference of the loss, non-linear minus linear, is taken group by group.

Verdict: confirmed if, over seeds and averaged over the levels of mean training loss both regimes reach, the difference
is below 0 for the easiest group and above 0 for the most difficult one, both by two standard errors.
"""

from __future__ import annotations

import torch

from biascope.studies.estimates import above, below, curve, decide, through
from biascope.studies.lazy.comparison import (
    at_progress,
    estimate,
    known,
    not_linear,
    paired_differences,
    shared_levels,
    stayed_linear,
    steps_taken,
)
from biascope.studies.lazy.deciles import (
    DECILES,
    SCORES,
    DecileTask,
    Scores,
    decile_runs,
    group_chart,
    mean_loss,
    names,
)
from biascope.studies.lazy.fig5_2_cscore import SIZES
from biascope.studies.lazy.regimes import REGIMES, Factor, Regimes
from biascope.studies.lazy.training import Trajectory
from biascope.studies.registry import study
from biascope.studies.result import Chart, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "At equal mean training loss the loss of examples with high C-scores is lower in the non-linear regime, and that "
    "of examples with low C-scores higher."
)


@study("lazy/figC.5", paper="linearization", figure="C.5", claim=CLAIM, sizes=SIZES)
def figC_5(
    run: Run,
    *,
    task: DecileTask = DECILES,
    scores: Scores = SCORES,
    regimes: Regimes = REGIMES,
    factor: Factor = 0.93,
) -> StudyResult:
    """Difference of the loss between the regimes, group by group."""
    runs, known_scores = decile_runs(run, task, scores, regimes.settings(factor), regimes.seeds)
    hasty, lazy = runs.values()
    differences = paired_differences(hasty, lazy, mean_loss, lambda t: t.loss)  # [seeds, groups]
    own = names(hasty[0], "train")
    numbers = {
        f"loss of group {k + 1}, non-linear minus linear": estimate(differences[:, hasty[0].names.index(name)])
        for k, name in enumerate(own)
    }
    hard, *_, easy = numbers.values()
    linear = stayed_linear(lazy)
    shown = Chart(
        "differences",
        "Loss of groups by C-score: non-linear minus linear",
        "mean training loss (training goes to the left)",
        "difference of the loss",
        tuple(_difference(hasty, lazy, name) for name in own),
        alt="One curve per group; difficult groups above zero, easy ones below, where the claim holds.",
        caption="Group 1 has the lowest C-scores. Mean over seeds, band: standard error.",
    )
    by_group = Chart(
        "by-group",
        "Mean difference by group",
        "group, from difficult to easy",
        "loss, non-linear minus linear",
        (through("mean over levels and seeds", range(1, len(own) + 1), numbers.values()),),
        alt="Mean difference of the loss over the groups.",
    )
    return StudyResult(
        decide(above(hard) and below(easy), (hard, easy)) if linear else "not tested",
        CLAIM,
        f"{task}, {regimes.seeds} seeds: non-linear minus linear loss is {hard} on the most "
        f"difficult and {easy} on the easiest of {len(own)} groups." + not_linear(list(runs)[1], lazy),
        {**known(numbers), **known_scores, **steps_taken(runs)},
        (shown, by_group, group_chart(runs, measure="accuracy"), group_chart(runs, "test", "accuracy")),
    )


def _difference(hasty: list[Trajectory], lazy: list[Trajectory], name: str) -> Series:
    """Mean over seeds of the difference of a group's loss, where all runs have been."""
    label = f"group {name.split()[1]}"
    levels = shared_levels([mean_loss(t) for t in (*hasty, *lazy)])
    if levels is None:
        return Series.of(label, [], [])
    rows = torch.stack(
        [
            at_progress(mean_loss(a), a.losses(name), levels) - at_progress(mean_loss(b), b.losses(name), levels)
            for a, b in zip(hasty, lazy)
        ]
    )
    return curve(label, levels, rows)
