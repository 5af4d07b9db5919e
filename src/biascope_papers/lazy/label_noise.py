"""Figs. 5.2 (bottom), C.1 and C.2: label noise. When are wrong labels learnt, at equal loss of the right ones?

The same network is trained from the same start on the same batches with alpha = 1 and with a large alpha; in Fig. C.1
with alpha = 1 and learning rates over orders of magnitude.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from torch import Tensor

from biascope.data import Dataset, corrupt_labels
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.support import derive
from biascope_papers.lazy.comparison import (
    Runs,
    Style,
    at_least,
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
)
from biascope_papers.lazy.setup import REGIMES, Factor, ImageTask, Pace, Regimes, official_test, standardised
from biascope_papers.lazy.training import Setting, Trajectory, Watched, trajectories

GAP = "noisy loss at equal clean loss, non-linear minus linear"
BEST, FINAL = (f"{name}, non-linear minus linear" for name in ("best test loss", "best test loss once it has turned"))


@dataclass(frozen=True)
class NoiseTask(ImageTask):
    """What is trained on: `fraction` of n training examples of a set get a wrong label."""

    fraction: Annotated[float, "share of wrong labels"] = 0.15
    watched: Annotated[int, "examples measured per group"] = 1000

    def data(self, seed: int, device: str) -> tuple[Dataset, Watched]:
        """Training set with noise (`group` 1 where the label is wrong), and what is watched."""
        clean, _ = standardised(self.dataset, self.n, 0, derive(seed, "examples"), device)
        y, wrong = corrupt_labels(clean.y, self.fraction, seed=derive(seed, "noise"))
        test = official_test(self.dataset, self.watched, clean, derive(seed, "test"), device)
        parts = {"clean": ~wrong, "noisy": wrong}
        index = {name: part.nonzero().flatten()[: self.watched] for name, part in parts.items()}
        groups = {name: (clean.x[i], y[i]) for name, i in index.items()}
        train_set = Dataset(clean.x, y, f"{clean.name}-noisy", None, clean.info, wrong.long())
        return train_set, Watched.of({**groups, "test": (test.x, test.y)})

    def runs(self, run: Run, settings: dict[str, Setting], seeds: int) -> dict[str, list[Trajectory]]:
        """Every setting from every seed; settings of one seed share start, noise and batches."""

        def once(seed: int, setting: Setting) -> Trajectory:
            examples, watched = self.data(seed, run.device)
            return self.train(examples, watched, watched.x[watched.group == 2], setting, seed)

        return trajectories(run, "noise experiment", settings, seeds, once)


NOISE = NoiseTask()
SLOW = Pace(stop=0.3)


@study(
    "lazy/fig5.2-noise",
    sizes={
        "smoke": {"n": 300, "width": 48, "steps": (120, 400), "lr": 0.2, "batch": 50, "seeds": 2, "lin": 8},
        "laptop": {"dataset": "cifar10", "net": "lenet", "n": 1000, "steps": (2000, 12_000), "lr": 0.02, "batch": 50}
        | {"factor": 0.96, "seeds": 6},
        "paper": {"dataset": "cifar10", "net": "resnet18-nobn", "width": 64, "n": 40_000, "steps": (64_000, 320_000)}
        | {"watched": 2000, "lin": 100, "factor": 0.96},
    },
)
def fig5_2_noise(
    run: Run, *, task: NoiseTask = NOISE, regimes: Regimes = REGIMES, factor: Factor = 0.93
) -> StudyResult:
    """Noisy and test loss of both regimes at equal loss of the clean examples."""
    runs = task.runs(run, regimes.settings(factor), regimes.seeds)
    numbers = compared(runs)
    each = {label: [memorisation_begins(t) for t in group] for label, group in runs.items()}
    begin = {label: Estimate.of(values) for label, values in each.items()}
    hasty, lazy = begin.values()
    later = Estimate.of([b - a for a, b in zip(*each.values())])
    early = "" if numbers[FINAL].standard_error == numbers[BEST].standard_error else (
        " A run ended before its test loss turned, so the best test losses are not final."
    )  # fmt: skip
    return StudyResult(
        measured=f"{task}, {regimes.seeds} seeds: noisy loss at equal clean loss {numbers[GAP]}, best test loss "
        f"{numbers[BEST]} (both non-linear minus linear); memorisation begins at clean loss {hasty} against {lazy}."
        + early + not_linear(list(runs)[1], list(runs.values())[1]),
        numbers=known(
            numbers
            | {f"clean loss where memorisation begins, {label}": value for label, value in begin.items()}
            | {"clean loss where memorisation begins, linear minus non-linear": later}
            | accuracies(runs)
            | {f"rise of the noisy loss, {label}": first_phase(group) for label, group in runs.items()}
            | run_numbers(runs)
            | loss_left(runs, clean_loss)
        ),
        figures=(curves_chart(runs, "loss"), curves_chart(runs, "accuracy"), *linearity_charts(runs, "clean")),
    )  # fmt: skip


def compared(runs: Runs, of: str = "") -> dict[str, Estimate]:
    """Two regimes, paired by seed, at equal clean loss.

    The best test loss of a run that ended before it had turned is not known, so its error is not either.
    """
    hasty, lazy = runs.values()
    best = Estimate.of([float(h.losses("test").min() - one.losses("test").min()) for h, one in zip(hasty, lazy)])
    turned = all(int(t.losses("test").argmin()) < len(t.steps) - 1 for t in (*hasty, *lazy))
    final = best if turned else Estimate(best.value, None, best.n)
    gap = estimate(paired_differences(hasty, lazy, clean_loss, lambda t: t.losses("noisy")))
    return {GAP: gap, BEST: best, FINAL: final, **lowest_alignment(lazy, of)}


def accuracies(runs: Runs) -> dict[str, Estimate]:
    """The same in accuracies (Fig. C.6), and the gap of the noisy loss in the seed where it is least (Fig. C.2)."""
    hasty, lazy = runs.values()
    rows = {part: paired_differences(hasty, lazy, clean_loss, partial(accuracy, part)) for part in ("noisy", "test")}
    best = [float(h.accuracies("test").max() - one.accuracies("test").max()) for h, one in zip(hasty, lazy)]
    gaps = paired_differences(hasty, lazy, clean_loss, lambda t: t.losses("noisy"))
    return {
        **{
            f"{part} accuracy at equal clean loss, non-linear minus linear": estimate(row) for part, row in rows.items()
        },
        "best test accuracy, non-linear minus linear": Estimate.of(best),
        **at_least(gaps, GAP),
    }


def accuracy(part: str, trajectory: Trajectory) -> Tensor:
    """Accuracy [P] on the noisy or the test examples."""
    return trajectory.accuracies(part)


def first_phase(group: Sequence[Trajectory]) -> Estimate:
    """How far the loss of the noisy examples rises above its start before it falls."""
    return Estimate.of([float(t.losses("noisy").max() - t.losses("noisy")[0]) for t in group])


def clean_loss(trajectory: Trajectory) -> Tensor:
    """Progress [P]: loss of the clean training examples."""
    return trajectory.losses("clean")


def memorisation_begins(trajectory: Trajectory) -> float:
    """Clean loss at which the loss of the noisy examples is highest; from there on they are memorised."""
    return float(trajectory.losses("clean")[trajectory.losses("noisy").argmax()])


def curves_chart(runs: Runs, measure: str = "loss") -> Chart:
    """Noisy and test loss (or accuracy) of every regime against the clean loss."""
    styles: dict[str, Style] = {"noisy": "line", "test": "dashed"}
    series = [
        curve_series(f"{name}, {label}", group, clean_loss, lambda t, name=name: t.measured(measure, name), style)  # type: ignore[misc]
        for label, group in runs.items()
        for name, style in styles.items()
    ]
    return progress_chart(
        f"noise-{measure}",
        f"Noisy training and test {measure} at equal clean loss",
        "loss of the clean training examples",
        measure,
        series,
        f"{measure} of noisy and of test examples over the loss of clean ones, one pair of curves per regime.",
        "Mean over seeds, band: standard error. Compare regimes at one place of the axis.",
    )


@study(
    "lazy/figC.1",
    sizes={
        "smoke": {"n": 300, "width": 48, "batch": 50, "lrs": (0.2, 0.05), "steps": (100, 250), "alpha_steps": 350}
        | {"seeds": 2, "lin": 8},
        "laptop": {"dataset": "cifar10", "net": "lenet", "n": 1000, "lrs": (0.02, 0.006, 0.002), "seeds": 5}
        | {"batch": 50, "steps": (1000, 3000, 8000), "alpha_steps": 6000, "factor": 0.96},
        "paper": {"dataset": "cifar10", "net": "resnet18-nobn", "width": 64, "n": 40_000, "lin": 100, "factor": 0.96}
        | {"lrs": (0.01, 0.003, 1e-4, 1e-6), "steps": (64_000, 64_000, 200_000, 3_200_000), "alpha_steps": 320_000}
        | {"watched": 2000},
    },
)
def fig_c_1(
    run: Run,
    *,
    task: NoiseTask = NOISE,
    lrs: Annotated[tuple[float, ...], "learning rates with alpha = 1, descending"] = (0.1, 0.03, 0.01),
    steps: Annotated[tuple[int, ...], "steps at most, one number per learning rate"] = (1000, 3000, 8000),
    alpha: Annotated[float, "the linear regime for comparison, at the largest rate"] = 100.0,
    alpha_steps: Annotated[int, "steps at most of the linear regime"] = 8000,
    pace: Pace = SLOW,
    factor: Factor = 0.93,
    reach: Annotated[float, "share of the initial clean loss below which a rate counts"] = 0.7,
) -> StudyResult:
    """Noisy loss at equal clean loss for several learning rates, beside a large alpha.

    A rate counts only if its runs brought the clean loss below `reach` times its start. Effects are taken at the levels
    of clean loss that all runs of a seed pass; their sizes are compared seed by seed.
    """
    settings = {f"lr {lr:g}": pace.setting(1.0, lr, count, factor) for lr, count in zip(lrs, steps, strict=True)}
    scaled = f"alpha = {alpha:g}"
    settings[scaled] = pace.setting(alpha, max(lrs), alpha_steps, factor)
    runs = task.runs(run, settings, pace.seeds)

    def got_far(group: list[Trajectory]) -> bool:
        return all(float(t.losses("clean").min()) < reach * float(t.losses("clean")[0]) for t in group)

    counted = {label: group for label, group in runs.items() if got_far(group)}
    rates = [label for label in counted if label != scaled]
    left = ", ".join(label for label in runs if label not in counted)
    if len(rates) < 2 or scaled not in counted:
        text = f"Too little progress in the steps allowed: {left}."
        return StudyResult(measured=text, numbers=run_numbers(runs))
    first, last, everyone = rates[0], rates[-1], list(counted.values())
    rows = [
        paired_differences(counted[other], counted[first], clean_loss, lambda t: t.losses("noisy"), everyone)
        for other in (last, scaled)
    ]
    by_rate, by_alpha = map(estimate, rows)
    more = estimate(rows[1].abs() - rows[0].abs()) if len(rows[0]) == len(rows[1]) else estimate(rows[0][:0])
    coincide = {
        f"{part} accuracy at equal clean loss, {other} minus {first}": estimate(
            paired_differences(counted[other], counted[first], clean_loss, partial(accuracy, part), everyone)
        )
        for part in ("noisy", "test")
        for other in (*rates[1:], scaled)
    }
    note = f" Left out for too little progress: {left}." if left else ""
    return StudyResult(
        measured=f"{task}, {pace.seeds} seeds: from {first} to {last} the noisy loss at equal clean loss moves by "
        f"{by_rate}; from alpha 1 to {alpha:g} by {by_alpha}.{note}",
        numbers=known(
            {
                f"noisy loss at equal clean loss, {last} minus {first}": by_rate,
                f"noisy loss at equal clean loss, {scaled} minus {first}": by_alpha,
                "size of the effect of alpha minus that of the learning rate": more,
                "largest learning rate / smallest that made progress": Estimate(max(lrs) / float(last.split()[1])),
                **coincide,
                **run_numbers(runs),
            }
        ),
        figures=(curves_chart(counted), curves_chart(counted, "accuracy"), *linearity_charts(runs, "clean")),
    )
