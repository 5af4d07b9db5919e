"""Figs. C.3 and C.4: the experiments of Fig. 5.2 (label noise, groups by C-score) with a VGG-11 instead of a ResNet."""

from dataclasses import dataclass

from biascope.studies import Run, StudyResult, study
from biascope_papers.lazy.comparison import known, linearity_charts, loss_left, lowest_alignment, run_numbers
from biascope_papers.lazy.difficulty import SCORES, DecileTask, Scores, group_chart, mean_loss, spread_gap
from biascope_papers.lazy.label_noise import BEST, GAP, NoiseTask, clean_loss, compared, curves_chart
from biascope_papers.lazy.setup import REGIMES, Regimes

FACTOR = 0.93  # ratio of successive losses at which the groups are measured


@dataclass(frozen=True)
class BothTasks(DecileTask, NoiseTask):
    """One network and one set of 32 x 32 images for both experiments."""


BOTH = BothTasks(dataset="digits32", net="vgg11-nobn")


@study(
    "lazy/figC.3",
    sizes={
        "smoke": {"n": 200, "extra": 50, "width": 4, "init": "he", "lr": 0.003, "batch": 20, "steps": (15, 30)}
        | {"seeds": 2, "lin": 0, "watched": 30, "score_repeats": 2, "score_epochs": 4, "groups": 3, "stop": 0.3},
        "laptop": {"dataset": "cifar10", "n": 1000, "extra": 500, "width": 8, "init": "he", "lr": 0.02, "batch": 50}
        | {"steps": (600, 1800), "score_net": "lenet", "score_lr": 0.05, "watched": 100, "seeds": 2, "lin": 10},
        "paper": {"dataset": "cifar10", "n": 40_000, "extra": 10_000, "steps": (64_000, 320_000), "lin": 100}
        | {"score_net": "lenet", "score_repeats": 24, "score_epochs": 12, "score_lr": 0.05, "watched": 1000},
    },
)
def fig_c_3(run: Run, *, task: BothTasks = BOTH, scores: Scores = SCORES, regimes: Regimes = REGIMES) -> StudyResult:
    """Label noise and C-score groups with a VGG-11."""
    noisy = task.runs(run, regimes.settings(FACTOR, kind="noise, "), regimes.seeds)
    numbers = compared(noisy, ", label noise")
    settings = regimes.settings(FACTOR, kind="C-score, ")
    scored, of_scores = task.scored_runs(run, scores, settings, regimes.seeds)
    gap = spread_gap(scored)
    _, lazy = scored.values()
    return StudyResult(
        measured=f"{task}, {regimes.seeds} seeds. Label noise: noisy loss at equal clean loss {numbers[GAP]}, best "
        f"test loss {numbers[BEST]}, non-linear minus linear. C-scores: the spread differs by {gap}.",
        numbers=known(
            {**numbers, **run_numbers(noisy), "spread of the loss, non-linear minus linear": gap}
            | {**of_scores, **lowest_alignment(lazy, ", C-scores"), **run_numbers(scored)}
            | {**loss_left(noisy, clean_loss), **loss_left(scored, mean_loss)}
        ),
        figures=(curves_chart(noisy), *linearity_charts(noisy, "clean"), group_chart(scored)),
    )
