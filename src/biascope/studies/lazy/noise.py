"""The label-noise experiment: clean and noisy training examples and a test set, for several regimes and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from biascope.data import Dataset, corrupt_labels
from biascope.seeds import derive
from biascope.studies.estimates import above, below
from biascope.studies.lazy.comparison import Style, curve_series, estimate, paired_differences
from biascope.studies.lazy.images import network, official_test, said, standardised
from biascope.studies.lazy.training import Setting, Trajectory, Watched, train, trajectories
from biascope.studies.result import Chart, Estimate, Verdict
from biascope.studies.runs import Run

GROUPS = ("clean", "noisy", "test")


@dataclass(frozen=True)
class NoiseTask:
    """What is trained on: `fraction` of n training examples of a set get a wrong label."""

    dataset: Annotated[str, "digits, digits32, mnist, fashion-mnist or cifar10"] = "digits"
    n: Annotated[int, "training examples"] = 1000
    fraction: Annotated[float, "share of wrong labels"] = 0.15
    net: Annotated[str, "mlp, lenet, resnet18-nobn or vgg11-nobn"] = "mlp"
    width: Annotated[int, "units of a hidden layer, or channels of the first stage"] = 64
    depth: Annotated[int, "hidden layers of the mlp"] = 4
    init: Annotated[str, "torch or he"] = "torch"
    watched: Annotated[int, "examples measured per group"] = 1000
    lin: Annotated[int, "examples for the linearity metrics, 0 for none"] = 20

    def __str__(self) -> str:
        return f"{said(self.net, self.width, self.init)} on {self.n} examples of {self.dataset}"

    def data(self, seed: int, device: str) -> tuple[Dataset, Watched]:
        """Training set with noise (`group` 1 where the label is wrong), and what is watched."""
        clean, _ = standardised(self.dataset, self.n, 0, derive(seed, "examples"), device)
        y, wrong = corrupt_labels(clean.y, self.fraction, seed=derive(seed, "noise"))
        test = official_test(self.dataset, self.watched, clean, derive(seed, "test"), device)
        parts = {name: (~wrong, wrong)[i].nonzero().flatten()[: self.watched] for i, name in enumerate(GROUPS[:2])}
        groups: dict[str, tuple[Tensor, Tensor]] = {name: (clean.x[i], y[i]) for name, i in parts.items()}
        train_set = Dataset(clean.x, y, f"{clean.name}-noisy", None, clean.info, wrong.long())
        return train_set, Watched.of({**groups, "test": (test.x, test.y)})


NOISE = NoiseTask()


def noise_runs(run: Run, task: NoiseTask, settings: Mapping[str, Setting], seeds: int) -> dict[str, list[Trajectory]]:
    """Every setting from every seed (`{label: trajectories}`); settings of one seed share start, noise and batches."""

    def once(seed: int, setting: Setting) -> Trajectory:
        examples, watched = task.data(seed, run.device)
        net = network(task.net, examples.x, 10, task.width, task.depth, task.init, derive(seed, "init"))
        lin = watched.x[watched.group == 2][: task.lin] if task.lin else None
        return train(net, examples.x, examples.y, watched, setting, derive(seed, "order"), lin)

    return trajectories(run, "noise experiment", settings, seeds, once)


@dataclass(frozen=True)
class NoiseComparison:
    """Two regimes at equal clean loss. Differences are non-linear minus linear, per seed, then averaged."""

    noisy_gap: Estimate  # noisy loss, mean over the levels
    best_test_gap: Estimate  # lowest test loss of a run
    settled: bool  # whether every run's test loss has passed its lowest point
    memorising: tuple[Estimate, Estimate]  # clean loss where the noisy loss is highest: when memorisation begins

    @property
    def verdict(self) -> Verdict:
        """Confirmed: at equal clean loss the noisy loss is higher, and the best test loss lower, both by 2 SE.

        Not tested: fewer than two seeds; or the first holds, but a run ended before its test loss had turned, so that
        its best is not known.
        """
        if self.noisy_gap.standard_error is None:
            return "not tested"
        if not above(self.noisy_gap) or (self.settled and not below(self.best_test_gap)):
            return "not confirmed"
        return "confirmed" if self.settled else "not tested"


def compare(hasty: Sequence[Trajectory], lazy: Sequence[Trajectory]) -> NoiseComparison:
    """The runs of two regimes, paired by seed."""
    best = [float(h.losses("test").min() - one.losses("test").min()) for h, one in zip(hasty, lazy)]
    settled = all(int(t.losses("test").argmin()) < len(t.steps) - 1 for t in (*hasty, *lazy))
    begin = tuple(Estimate.of([memorisation_begins(t) for t in runs]) for runs in (hasty, lazy))
    return NoiseComparison(noisy_gap(hasty, lazy), Estimate.of(best), settled, (begin[0], begin[1]))


def noisy_gap(
    one: Sequence[Trajectory], other: Sequence[Trajectory], also: Sequence[Sequence[Trajectory]] = ()
) -> Estimate:
    """Noisy loss of one minus that of the other at equal clean loss, where the runs of `also` have been as well."""
    return estimate(paired_differences(one, other, clean_loss, lambda t: t.losses("noisy"), also))


def clean_loss(trajectory: Trajectory) -> Tensor:
    """Progress [P]: loss of the clean training examples."""
    return trajectory.losses("clean")


def memorisation_begins(trajectory: Trajectory) -> float:
    """Clean loss at which the loss of the noisy examples is highest; from there on they are memorised."""
    return float(trajectory.losses("clean")[trajectory.losses("noisy").argmax()])


def curves_chart(runs: Mapping[str, Sequence[Trajectory]], measure: str = "loss") -> Chart:
    """Noisy and test loss (or accuracy) of every regime against the clean loss."""
    styles: dict[str, Style] = {"noisy": "line", "test": "dashed"}
    series = [
        curve_series(
            f"{name}, {label}",
            group,
            clean_loss,
            lambda t, name=name: t.losses(name) if measure == "loss" else t.accuracies(name),  # type: ignore[misc]
            style,
        )
        for label, group in runs.items()
        for name, style in styles.items()
    ]
    return Chart(
        f"noise-{measure}",
        f"Noisy training and test {measure} at equal clean loss",
        "loss of the clean training examples (training goes to the left)",
        measure,
        tuple(series),
        alt=f"{measure} of noisy and of test examples over the loss of clean ones, one pair of curves per regime.",
        caption="Mean over seeds, band: standard error. Compare regimes at one place of the axis.",
    )
