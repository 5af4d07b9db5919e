"""The C-score experiment: ten groups from difficult to easy, of training and held-out examples, in several regimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from biascope.seeds import derive
from biascope.studies.lazy.comparison import curve_series, estimate, paired_differences
from biascope.studies.lazy.cscore import c_scores, rank_groups
from biascope.studies.lazy.images import network, said, standardised
from biascope.studies.lazy.training import Setting, Trajectory, Watched, train, trajectories
from biascope.studies.result import Chart, Estimate
from biascope.studies.runs import Run

SCORE_WIDTH, SCORE_BATCH = 32, 128  # of the networks behind the scores


@dataclass(frozen=True)
class DecileTask:
    """n training and `extra` held-out examples (both from the official training set), ranked together by C-score."""

    dataset: Annotated[str, "digits, digits32, mnist, fashion-mnist or cifar10"] = "digits"
    n: Annotated[int, "training examples"] = 1000
    extra: Annotated[int, "held-out examples, ranked with the others"] = 250
    groups: Annotated[int, "groups by C-score"] = 10
    net: Annotated[str, "mlp, lenet, resnet18-nobn or vgg11-nobn"] = "mlp"
    width: Annotated[int, "units of a hidden layer, or channels of the first stage"] = 64
    depth: Annotated[int, "hidden layers of the mlp"] = 4
    init: Annotated[str, "torch or he"] = "torch"
    watched: Annotated[int, "examples measured per group"] = 100
    lin: Annotated[int, "examples for the linearity metrics, 0 for none"] = 20

    def __str__(self) -> str:
        return f"{said(self.net, self.width, self.init)} on {self.n} examples of {self.dataset}"


@dataclass(frozen=True)
class Scores:
    """How C-scores are estimated: by small networks trained on random subsets of four sizes (20, 40, 60, 80 %).

    The thesis takes published scores of CIFAR-10, made with larger networks.
    """

    score_net: Annotated[str, "network that estimates the C-scores"] = "mlp"
    score_repeats: Annotated[int, "networks per subset size (there are four sizes)"] = 6
    score_epochs: Annotated[int, "passes over the subset"] = 10
    score_lr: Annotated[float, "its learning rate"] = 0.1


DECILES = DecileTask()
SCORES = Scores()


def decile_runs(
    run: Run, task: DecileTask, how: Scores, settings: Mapping[str, Setting], seeds: int
) -> tuple[dict[str, list[Trajectory]], dict[str, Estimate]]:
    """Every setting from every seed, and what is to be known of the scores. Seeds share the data and the scores."""
    train_set, held = standardised(task.dataset, task.n, task.extra, derive(run.seed, "split"), run.device)
    x, y = torch.cat([train_set.x, held.x]), torch.cat([train_set.y, held.y])

    def score() -> Mapping[str, Tensor | float]:
        found = c_scores(
            lambda: network(how.score_net, x[:1].cpu(), 10, SCORE_WIDTH, 1, "torch", None),
            x,
            y,
            repeats=how.score_repeats,
            seed=derive(run.seed, "c-scores"),
            device=run.device,
            epochs=how.score_epochs,
            lr=how.score_lr,
            momentum=0.9,
            batch_size=SCORE_BATCH,
            clip_norm=1.0,
        )
        return {"scores": found.scores, "errors": found.standard_errors, "coverage": found.coverage}

    scored = run.cached("c-scores", score)
    scores = torch.as_tensor(scored["scores"]).nan_to_num(nan=0.5)  # nobody left it out: taken for neither
    group = rank_groups(scores, task.groups).to(x.device)
    watched = watch(x, y, group, task)

    def once(seed: int, setting: Setting) -> Trajectory:
        net = network(task.net, x, 10, task.width, task.depth, task.init, derive(seed, "init"))
        lin = held.x[: task.lin] if task.lin else None
        return train(net, train_set.x, train_set.y, watched, setting, derive(seed, "order"), lin)

    found = trajectories(run, "decile experiment", settings, seeds, once)
    by_group = [Estimate.of(scores[group.cpu() == g]) for g in (0, task.groups - 1)]
    numbers = {
        "C-score, most difficult group": by_group[0],
        "C-score, easiest group": by_group[1],
        "mean standard error of a C-score": Estimate(float(torch.as_tensor(scored["errors"]).nanmean())),
        "share of examples and sizes with a vote": Estimate(float(scored["coverage"])),  # type: ignore[arg-type]
    }
    return found, numbers


def watch(x: Tensor, y: Tensor, group: Tensor, task: DecileTask) -> Watched:
    """At most `watched` examples of every group; "train 1" is the most difficult of the training part, "test 1" of the
    held-out one.
    """
    parts = {}
    for part, rows in (("train", slice(0, task.n)), ("test", slice(task.n, None))):
        for g in range(task.groups):
            index = (group[rows] == g).nonzero().flatten()[: task.watched]
            if len(index):
                parts[f"{part} {g + 1}"] = (x[rows][index], y[rows][index])
    return Watched.of(parts)


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


def spread_gap(hasty: Sequence[Trajectory], lazy: Sequence[Trajectory], part: str = "train") -> Estimate:
    """Spread of the non-linear regime minus that of the linear one at equal mean training loss, over seeds."""
    return estimate(paired_differences(hasty, lazy, mean_loss, lambda t: spread(t, part)))


def group_chart(runs: Mapping[str, Sequence[Trajectory]], part: str = "train", measure: str = "loss") -> Chart:
    """Loss or accuracy of the first, middle and last groups at equal mean training loss."""
    own = names(next(iter(runs.values()))[0], part)
    series = [
        curve_series(
            f"group {name.split()[1]} of {len(own)}, {label}",
            group,
            mean_loss,
            lambda t, name=name: t.losses(name) if measure == "loss" else t.accuracies(name),  # type: ignore[misc]
            "line" if place == 0 else "dashed",
        )
        for place, (label, group) in enumerate(runs.items())
        for name in (own[0], own[len(own) // 2], own[-1])
    ]
    return Chart(
        f"{part}-{measure}",
        f"{measure.capitalize()} of groups by C-score, {part} examples",
        "mean training loss (training goes to the left)",
        measure,
        tuple(series),
        alt=f"{measure} of the most difficult, a middle and the easiest group over the mean training loss, per regime.",
        caption="Group 1 has the lowest C-scores. Mean over seeds, band: standard error.",
    )
