"""Fig. 5.2 (top), with C.2: groups of examples by C-score. Is the difference between easy and difficult ones larger in
the non-linear regime, at equal training progress?

C-scores are estimated here (`lazy/cscore.py`) with small networks; the thesis takes published scores. The same network
is trained from the same start on the same batches with alpha = 1 and with a large alpha.

Verdict: confirmed if, over seeds, the spread (loss of the most difficult group minus that of the easiest), at equal
mean training loss and averaged over the levels both regimes reach, is larger for the non-linear regime by two standard
errors. Not tested if the large alpha did not keep the tangent kernel (alignment below 0.9, or not measured).
"""

from __future__ import annotations

from biascope.studies.estimates import above, decide
from biascope.studies.lazy.comparison import (
    curve_series,
    known,
    linearity_chart,
    linearity_numbers,
    not_linear,
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
    spread,
    spread_gap,
)
from biascope.studies.lazy.regimes import REGIMES, Factor, Regimes
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "At equal mean training loss the spread between examples with low and high C-scores is larger in the non-linear "
    "regime. (That those with high scores are learnt first in both regimes is not judged.)"
)
SIZES = {
    "smoke": {"n": 400, "extra": 100, "width": 48, "steps": (100, 300), "lr": 0.2, "batch": 50, "seeds": 2, "lin": 8}
    | {"groups": 5, "score_repeats": 4, "score_epochs": 6},
    "laptop": {"dataset": "cifar10", "net": "lenet", "n": 1500, "extra": 500, "steps": (2000, 8000), "lr": 0.02}
    | {"score_net": "lenet", "score_repeats": 8, "score_epochs": 8, "score_lr": 0.05, "watched": 150, "batch": 64},
    "paper": {"dataset": "cifar10", "net": "resnet18-nobn", "n": 40_000, "extra": 10_000, "steps": (64_000, 320_000)}
    | {"score_net": "lenet", "score_repeats": 24, "score_epochs": 12, "score_lr": 0.05, "watched": 1000, "lin": 100}
    | {"factor": 0.96, "width": 64},
}


@study("lazy/fig5.2-cscore", paper="linearization", figure="5.2", claim=CLAIM, sizes=SIZES)
def fig5_2_cscore(
    run: Run,
    *,
    task: DecileTask = DECILES,
    scores: Scores = SCORES,
    regimes: Regimes = REGIMES,
    factor: Factor = 0.93,
) -> StudyResult:
    """Loss of groups by C-score in both regimes at equal mean training loss."""
    runs, numbers = decile_runs(run, task, scores, regimes.settings(factor), regimes.seeds)
    hasty, lazy = runs.values()
    gap, held_out = spread_gap(hasty, lazy), spread_gap(hasty, lazy, "test")
    linear = stayed_linear(lazy)
    own: dict[str, Estimate] = {
        "spread of the loss, non-linear minus linear, training": gap,
        "spread of the loss, non-linear minus linear, held out": held_out,
    }
    spreads = Chart(
        "spread",
        "Loss of the most difficult minus loss of the easiest group",
        "mean training loss (training goes to the left)",
        "spread",
        tuple(curve_series(label, group, mean_loss, spread) for label, group in runs.items()),
        alt="The spread over the mean training loss, one curve per regime.",
        caption="Mean over seeds, band: standard error.",
    )
    notes = not_linear(list(runs)[1], lazy)
    return StudyResult(
        decide(above(gap), [gap]) if linear else "not tested",
        CLAIM,
        f"{task}, {regimes.seeds} seeds: the spread is larger by {gap} in the non-linear regime (held-out examples: "
        f"{held_out}). C-scores estimated with {4 * scores.score_repeats} small networks ({scores.score_net}), not the "
        f"published ones.{notes}",
        {**known(own), **numbers, **linearity_numbers(runs), **steps_taken(runs)},
        (
            group_chart(runs),
            spreads,
            group_chart(runs, "test"),
            *([linearity_chart(runs, "train 1")] if task.lin else []),
        ),
    )
