"""Figs. C.3 and C.4: the experiments of Fig. 5.2 with a VGG-11 instead of a ResNet-18.

Verdict: confirmed if both experiments come out as in Fig. 5.2 (see there for the rules): label noise, and groups by
C-score. Not tested if one of them is not tested and none is refuted.
"""

from __future__ import annotations

from typing import Annotated

from biascope.studies.estimates import above, decide
from biascope.studies.lazy.comparison import known, linearity_chart, linearity_numbers, stayed_linear, steps_taken
from biascope.studies.lazy.deciles import SCORES, DecileTask, Scores, decile_runs, group_chart, spread_gap
from biascope.studies.lazy.noise import NoiseTask, compare, curves_chart, noise_runs
from biascope.studies.lazy.regimes import REGIMES, Regimes
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult, Verdict
from biascope.studies.runs import Run

CLAIM = "What Fig. 5.2 shows with a ResNet-18 (label noise, groups by C-score) holds with a VGG-11 as well."
FACTOR = 0.93  # ratio of successive losses at which the groups are measured


@study(
    "lazy/figC.3",
    paper="linearization",
    figure="C.3",
    claim=CLAIM,
    sizes={
        "smoke": {"n": 200, "extra": 50, "width": 4, "init": "he", "lr": 0.003, "batch": 20, "steps": (15, 30)}
        | {"seeds": 2, "lin": 0, "watched": 30, "score_repeats": 2, "score_epochs": 4, "groups": 3, "stop": 0.3},
        "laptop": {"dataset": "cifar10", "n": 1000, "extra": 500, "width": 8, "init": "he", "lr": 0.02, "batch": 50}
        | {"steps": (600, 1800), "score_net": "lenet", "score_lr": 0.05, "watched": 100, "seeds": 2, "lin": 10},
        "paper": {"dataset": "cifar10", "n": 40_000, "extra": 10_000, "steps": (64_000, 320_000), "lin": 100}
        | {"score_net": "lenet", "score_repeats": 24, "score_epochs": 12, "score_lr": 0.05, "watched": 1000},
    },
)
def figC_3(
    run: Run,
    *,
    dataset: Annotated[str, "a set of 32 x 32 images: digits32 or cifar10"] = "digits32",
    net: Annotated[str, "the network"] = "vgg11-nobn",
    width: Annotated[int, "channels of the first stage (64 in the paper)"] = 64,
    init: Annotated[str, "torch (the paper) or he, with which narrow ones learn"] = "torch",
    n: Annotated[int, "training examples"] = 1000,
    extra: Annotated[int, "held-out examples of the C-score experiment"] = 250,
    groups: Annotated[int, "groups by C-score"] = 10,
    fraction: Annotated[float, "share of wrong labels"] = 0.15,
    watched: Annotated[int, "examples measured per group"] = 100,
    lin: Annotated[int, "examples for the linearity metrics, 0 for none"] = 20,
    scores: Scores = SCORES,
    regimes: Regimes = REGIMES,
) -> StudyResult:
    """Label noise and C-score groups with a VGG-11."""
    numbers: dict[str, Estimate] = {}
    figures: list[Chart] = []
    verdicts: list[Verdict] = []

    noise = NoiseTask(dataset, n, fraction, net, width, 0, init, watched, lin)
    runs = noise_runs(run, noise, regimes.settings(FACTOR, kind="noise, "), regimes.seeds)
    hasty, lazy = runs.values()
    found = compare(hasty, lazy)
    verdicts.append(found.verdict if stayed_linear(lazy) else "not tested")
    numbers |= {
        "noisy loss at equal clean loss, non-linear minus linear": found.noisy_gap,
        "best test loss, non-linear minus linear": found.best_test_gap,
        **linearity_numbers(runs),
        **steps_taken(runs),
    }
    figures += [curves_chart(runs), *([linearity_chart(runs, "clean")] if lin else [])]

    deciles = DecileTask(dataset, n, extra, groups, net, width, 0, init, watched, lin)
    runs, known_scores = decile_runs(run, deciles, scores, regimes.settings(FACTOR, kind="C-score, "), regimes.seeds)
    hasty, lazy = runs.values()
    gap = spread_gap(hasty, lazy)
    verdicts.append(decide(above(gap), [gap]) if stayed_linear(lazy) else "not tested")
    numbers |= {"spread of the loss, non-linear minus linear": gap, **known_scores, **linearity_numbers(runs)}
    figures.append(group_chart(runs))
    order: tuple[Verdict, ...] = ("not confirmed", "not tested", "confirmed")
    return StudyResult(
        next(v for v in order if v in verdicts),
        CLAIM,
        f"{noise}, {regimes.seeds} seeds. Label noise: {verdicts[0]} "
        f"(noisy loss at equal clean loss {found.noisy_gap}, best test loss {found.best_test_gap}, non-linear minus "
        f"linear). C-scores: {verdicts[1]} (the spread differs by {gap}).",
        known(numbers),
        tuple(figures),
    )
