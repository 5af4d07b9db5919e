"""Figs. 5.2 (top), C.2, C.5 and C.6: groups of examples by C-score, in both regimes at equal training progress.

C-scores are estimated here with small networks (the thesis: published ones). The same network is trained from the same
start on the same batches with alpha = 1 and with a large alpha. The spread is the loss of the most difficult group
minus that of the easiest. A run of Fig. 5.2 has the numbers and charts of C.5 too, and the other way round.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from biascope.data import Dataset
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, spearman, through
from biascope.support import derive
from biascope_papers.lazy.comparison import (
    Runs,
    at_least,
    at_progress,
    curve_series,
    estimate,
    known,
    linearity_charts,
    loss_left,
    lowest_alignment,
    not_linear,
    paired_differences,
    progress_chart,
    run_numbers,
    shared_levels,
)
from biascope_papers.lazy.cscore import c_scores, rank_groups
from biascope_papers.lazy.setup import REGIMES, Factor, ImageTask, Regimes, network, standardised
from biascope_papers.lazy.training import Setting, Trajectory, Watched, trajectories

SCORE_WIDTH, SCORE_BATCH = 32, 128  # of the networks behind the scores
MEAN = "mean training loss"


@dataclass(frozen=True)
class Scores:
    """How C-scores are estimated: by small networks trained on random subsets of four sizes (20, 40, 60, 80 %)."""

    score_net: Annotated[str, "network that estimates the C-scores"] = "mlp"
    score_repeats: Annotated[int, "networks per subset size (there are four sizes)"] = 6
    score_epochs: Annotated[int, "passes over the subset"] = 10
    score_lr: Annotated[float, "its learning rate"] = 0.1


@dataclass(frozen=True)
class DecileTask(ImageTask):
    """n training and `extra` held-out examples (both from the official training set), ranked together by C-score."""

    extra: Annotated[int, "held-out examples, ranked with the others"] = 250
    groups: Annotated[int, "groups by C-score"] = 10
    watched: Annotated[int, "examples measured per group"] = 100

    def scored_runs(
        self, run: Run, how: Scores, settings: dict[str, Setting], seeds: int
    ) -> tuple[dict[str, list[Trajectory]], dict[str, Estimate]]:
        """Every setting from every seed, and what is known of the scores. Seeds share the data and the scores."""

        @functools.cache
        def data() -> tuple[Dataset, Dataset, Tensor, Tensor]:
            fitted, held = standardised(self.dataset, self.n, self.extra, derive(run.seed, "split"), run.device)
            return fitted, held, torch.cat([fitted.x, held.x]), torch.cat([fitted.y, held.y])

        def score() -> dict[str, Any]:
            _, _, x, y = data()
            found = c_scores(lambda: network(how.score_net, x[:1].cpu(), 10, SCORE_WIDTH, 1, "torch", None), x, y,
                             repeats=how.score_repeats, seed=derive(run.seed, "c-scores"), device=run.device,
                             epochs=how.score_epochs, lr=how.score_lr, momentum=0.9, batch_size=SCORE_BATCH,
                             clip_norm=1.0)  # fmt: skip
            return {"scores": found.scores, "errors": found.standard_errors, "coverage": found.coverage}

        scored: dict[str, Any] = run.cached("c-scores", score)
        scores = scored["scores"].nan_to_num(nan=0.5)  # never left out: counted as neither
        group = rank_groups(scores, self.groups)

        def once(seed: int, setting: Setting) -> Trajectory:
            fitted, held, x, y = data()
            return self.train(fitted, self.watch(x, y, group.to(x.device)), held.x, setting, seed)

        hard, easy = (Estimate.of(scores[group == g]) for g in (0, self.groups - 1))
        return trajectories(run, "decile experiment", settings, seeds, once), {
            "C-score, most difficult group": hard,
            "C-score, easiest group": easy,
            "mean standard error of a C-score": Estimate(float(scored["errors"].nanmean())),
            "share of examples and sizes with a vote": Estimate(float(scored["coverage"])),
        }

    def watch(self, x: Tensor, y: Tensor, group: Tensor) -> Watched:
        """At most `watched` examples of every group; "train 1" is the most difficult of the training part, "test 1"
        of the held-out one.
        """
        parts = {}
        for part, rows in (("train", slice(0, self.n)), ("test", slice(self.n, None))):
            for g in range(self.groups):
                index = (group[rows] == g).nonzero().flatten()[: self.watched]
                if len(index):
                    parts[f"{part} {g + 1}"] = (x[rows][index], y[rows][index])
        return Watched.of(parts)


DECILES, SCORES = DecileTask(), Scores()
SIZES = {
    "smoke": {"n": 400, "extra": 100, "width": 48, "steps": (100, 300), "lr": 0.2, "batch": 50, "seeds": 2, "lin": 8}
    | {"groups": 5, "score_repeats": 4, "score_epochs": 6},
    "laptop": {"dataset": "cifar10", "net": "lenet", "n": 1500, "extra": 500, "steps": (2000, 8000), "lr": 0.02}
    | {"score_net": "lenet", "score_repeats": 8, "score_epochs": 8, "score_lr": 0.05, "watched": 150, "batch": 64}
    | {"seeds": 6},
    "paper": {"dataset": "cifar10", "net": "resnet18-nobn", "n": 40_000, "extra": 10_000, "steps": (64_000, 320_000)}
    | {"score_net": "lenet", "score_repeats": 24, "score_epochs": 12, "score_lr": 0.05, "watched": 1000, "lin": 100}
    | {"factor": 0.96, "width": 64},
}


@study("lazy/figC.5", sizes=SIZES)
@study("lazy/fig5.2-cscore", sizes=SIZES)
def by_c_score(
    run: Run,
    *,
    task: DecileTask = DECILES,
    scores: Scores = SCORES,
    regimes: Regimes = REGIMES,
    factor: Factor = 0.93,
) -> StudyResult:
    """Loss of groups by C-score in both regimes, and its difference, at equal mean training loss."""
    runs, of_scores = task.scored_runs(run, scores, regimes.settings(factor), regimes.seeds)
    hasty, lazy = runs.values()
    gap, held_out = spread_gap(runs), spread_gap(runs, "test")
    differences = paired_differences(hasty, lazy, mean_loss, lambda t: t.loss)  # [seeds, groups]
    by_accuracy = paired_differences(hasty, lazy, mean_loss, lambda t: t.accuracy)
    own = names(hasty[0], "train")
    by_group = [estimate(differences[:, hasty[0].names.index(name)]) for name in own]
    numbers = {
        "spread of the loss, non-linear minus linear, training": gap,
        "spread of the loss, non-linear minus linear, held out": held_out,
        "loss of the most difficult group, non-linear minus linear": by_group[0],
        "loss of the easiest group, non-linear minus linear": by_group[-1],
        **{f"loss of group {k + 1}, non-linear minus linear": value for k, value in enumerate(by_group)},
        **ranking(runs),
        **{
            f"accuracy of the {which} group, non-linear minus linear": estimate(
                by_accuracy[:, hasty[0].names.index(name)]
            )
            for which, name in (("most difficult", own[0]), ("easiest", own[-1]))
        },
    }
    shown = [value for value in by_group if value.n]
    return StudyResult(
        measured=f"{task}, {regimes.seeds} seeds: the spread is larger by {gap} in the non-linear regime (held-out "
        f"examples: {held_out}). C-scores are estimated, not the published ones.{not_linear(list(runs)[1], lazy)}",
        numbers={**known(numbers), **of_scores, **lowest_alignment(lazy), **run_numbers(runs)}
        | loss_left(runs, mean_loss),
        figures=(
            group_chart(runs),
            progress_chart("spread", "Loss of the most difficult minus loss of the easiest group", MEAN, "spread",
                           [curve_series(label, group, mean_loss, spread) for label, group in runs.items()],
                           "The spread over the mean training loss, one curve per regime."),
            group_chart(runs, "test"),
            progress_chart("differences", "Loss of groups by C-score: non-linear minus linear", MEAN,
                           "difference of the loss", [_difference(hasty, lazy, name) for name in own],
                           "One curve per group; difficult groups above zero, easy ones below, where the claim holds.",
                           "Group 1 has the lowest C-scores. Mean over seeds, band: standard error."),
            Chart("by-group", "Mean difference by group", "group, from difficult to easy",
                  "loss, non-linear minus linear",
                  (through("mean over levels and seeds", range(1, len(shown) + 1), shown),),
                  alt="Mean difference of the loss over the groups."),
            group_chart(runs, measure="accuracy"),
            group_chart(runs, "test", "accuracy"),
            *linearity_charts(runs, "train 1"),
        ),
    )  # fmt: skip


def mean_loss(trajectory: Trajectory) -> Tensor:
    """Progress [P]: mean loss over the training groups, which are equally large parts of the training set."""
    return torch.stack([trajectory.losses(name) for name in names(trajectory, "train")]).mean(0)


def names(trajectory: Trajectory, part: str) -> list[str]:
    """The groups of a part, from difficult to easy."""
    return [name for name in trajectory.names if name.startswith(f"{part} ")]


def spread(trajectory: Trajectory, part: str = "train") -> Tensor:
    """Loss of the most difficult group minus loss of the easiest, [P]."""
    own = names(trajectory, part)
    return trajectory.losses(own[0]) - trajectory.losses(own[-1])


def spread_gap(runs: Runs, part: str = "train") -> Estimate:
    """Spread of the non-linear regime minus that of the linear one at equal mean training loss, over seeds."""
    hasty, lazy = runs.values()
    return estimate(paired_differences(hasty, lazy, mean_loss, lambda t: spread(t, part)))


def ranking(runs: Runs) -> dict[str, Estimate]:
    """Mean spread on the way in each regime (above 0: easy examples are learnt faster), the rank correlation of the
    groups' losses with difficulty, and the difference of the spreads in the seed where it is least.
    """
    hasty, lazy = runs.values()
    numbers: dict[str, Estimate] = {}
    for label, group in runs.items():
        own = names(group[0], "train")
        losses = [torch.stack([t.losses(name)[1:].mean() for name in own]) for t in group]
        numbers[f"spread of the loss, {label}, training"] = Estimate.of([float(v[0] - v[-1]) for v in losses])
        ranks = [spearman(range(len(own), 0, -1), v.tolist()) for v in losses]
        numbers[f"rank correlation of difficulty and loss, {label}"] = Estimate(min(ranks))
    gaps = paired_differences(hasty, lazy, mean_loss, spread)
    return numbers | at_least(gaps, "spread of the loss, non-linear minus linear, training")


def group_chart(runs: Runs, part: str = "train", measure: str = "loss") -> Chart:
    """Loss or accuracy of the first, middle and last groups at equal mean training loss."""
    own = names(next(iter(runs.values()))[0], part)
    series = [
        curve_series(f"group {name.split()[1]} of {len(own)}, {label}", group, mean_loss,
                     lambda t, name=name: t.measured(measure, name), "line" if place == 0 else "dashed")  # type: ignore[misc]
        for place, (label, group) in enumerate(runs.items())
        for name in (own[0], own[len(own) // 2], own[-1])
    ]  # fmt: skip
    return progress_chart(
        f"{part}-{measure}", f"{measure.capitalize()} of groups by C-score, {part} examples", MEAN, measure, series,
        f"{measure} of the most difficult, a middle and the easiest group over the mean training loss, per regime.",
        "Group 1 has the lowest C-scores. Mean over seeds, band: standard error.",
    )  # fmt: skip


def _difference(hasty: Sequence[Trajectory], lazy: Sequence[Trajectory], name: str) -> Series:
    """Mean over seeds of the difference of a group's loss, where all runs have been."""
    label, levels = f"group {name.split()[1]}", shared_levels([mean_loss(t) for t in (*hasty, *lazy)])
    if levels is None:
        return Series.of(label, [], [])
    one, other = (torch.stack([at_progress(mean_loss(t), t.losses(name), levels) for t in r]) for r in (hasty, lazy))
    return curve(label, levels, one - other)
