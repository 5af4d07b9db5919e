"""Figs. 5.3, C.7 and C.8: spurious correlations, on a stand-in (coloured or patched digits).

CelebA and Waterbirds cannot be fetched; grey digits get a colour or a white patch that agrees with the label (digit 5
to 9) of most training examples. The colour is so strong that hardly anything else is learnt; the patch leaves the digit
to compete. Accuracy without the feature is read where that with it is equal.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.data import Dataset, balanced_cells, spurious
from biascope.studies import Chart, Run, StudyResult, study
from biascope.support import derive
from biascope_papers.lazy.comparison import (
    Reading,
    Runs,
    curve_series,
    estimate,
    known,
    linearity_charts,
    lowest_alignment,
    not_linear,
    paired_differences,
    progress_chart,
    run_numbers,
)
from biascope_papers.lazy.setup import Factor, ImageTask, Regimes, load
from biascope_papers.lazy.training import Setting, Trajectory, Watched, trajectories

SPLITS: tuple[Literal["train", "test"], ...] = ("train", "test")


@dataclass(frozen=True)
class SpuriousTask(ImageTask):
    """n training images of a set, `agreement` of which carry the spurious feature of their class."""

    dataset: Annotated[str, "grey images of digits: digits or mnist"] = "mnist"
    n: Annotated[int, "training examples"] = 4000
    kind: Annotated[Literal["patch", "colour"], "what the spurious feature is"] = "patch"
    agreement: Annotated[float, "share of training examples whose feature agrees with the label"] = 0.95
    per_cell: Annotated[int, "examples of every (label, attribute) cell in the groups, at most"] = 180

    def data(self, seed: int, device: str) -> tuple[Dataset, Watched]:
        """The training set and four balanced groups (as many examples of every cell of label and attribute): of
        training and of test examples, those with the feature and those whose feature belongs to the other class.
        """
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        for split in SPLITS:
            whole, agreement = load(self.dataset, split), 0.5
            if split == "train":
                whole, agreement = whole.train_test(self.n, derive(seed, "examples"))[0], self.agreement
            paint = derive(seed, "paint", split)
            made = spurious(whole.x, (whole.y >= 5).long(), self.kind, agreement=agreement, seed=paint)
            group = torch.zeros_like(made.y) if made.group is None else made.group
            cells = balanced_cells(made.y, made.info["attribute"], self.per_cell, cap=True, seed=derive(seed, split))
            for value, name in enumerate(("with", "without")):
                own = cells[group[cells] == value]
                parts[f"{split} {name}"] = (2 * made.x[own].to(device) - 1, made.y[own].to(device))
            if split == "train":
                examples = Dataset(2 * made.x - 1, made.y, made.name, None, {}, group).to(device)
        return examples, Watched.of(parts)


SPURIOUS = SpuriousTask()
THREE = Regimes(alphas=(0.5, 1.0, 100.0), batch=100, stop=0.02, lr=0.02, steps=(1500, 1500, 4000))


@study(
    "lazy/fig5.3",
    sizes={
        "smoke": {"dataset": "digits", "n": 600, "steps": (60, 80, 250), "lr": 0.1, "batch": 50, "seeds": 2}
        | {"per_cell": 15, "lin": 8, "width": 48, "agreement": 0.9},
        "laptop": {"net": "lenet", "steps": (1500, 1500, 4000)},
        "paper": {"net": "resnet18-nobn", "width": 64, "n": 20_000, "batch": 100, "steps": (4000, 8000, 40_000)}
        | {"lr": 0.01, "lin": 100, "factor": 0.96},
    },
)
def fig5_3(run: Run, *, task: SpuriousTask = SPURIOUS, regimes: Regimes = THREE, factor: Factor = 0.93) -> StudyResult:
    """Accuracy without the spurious feature at equal accuracy with it, in three regimes."""

    def once(seed: int, setting: Setting) -> Trajectory:
        examples, watched = task.data(seed, run.device)
        return task.train(examples, watched, watched.x[watched.group >= 2], setting, seed, outputs=2)

    runs = trajectories(run, "spurious experiment", regimes.settings(factor, every=10), regimes.seeds, once)
    *others, lazy = runs
    numbers = {
        f"{part} accuracy without the feature, {lazy} minus {other}": estimate(
            paired_differences(runs[lazy], runs[other], _wrong(part), _without(part))
        )
        for part in SPLITS
        for other in others
    }

    def balanced(t: Trajectory) -> Tensor:
        return torch.stack([t.accuracies("test with"), t.accuracies("test without")]).mean(0)

    found = "; ".join(f"{key}: {value}" for key, value in numbers.items())
    by_loss = [curve_series(label, group, lambda t: t.losses("train with"), balanced) for label, group in runs.items()]
    return StudyResult(
        measured=f"Stand-in: {task.dataset} with a spurious {task.kind} ({task.agreement:.0%} agreement) instead of "
        f"photographs; {task.network}, {task.n} examples, {regimes.seeds} seeds. At equal accuracy with the feature: "
        f"{found}.{not_linear(lazy, runs[lazy])}",
        numbers={**known(numbers), **lowest_alignment(runs[lazy]), **run_numbers(runs)},
        figures=(
            *(_chart(runs, part) for part in SPLITS),
            progress_chart("test-accuracy", "Balanced test accuracy", "loss of training examples with the feature",
                           "accuracy", by_loss,
                           "Balanced test accuracy over the loss of the majority, one curve per alpha."),
            *linearity_charts(runs, "train with"),
        ),
    )  # fmt: skip


def _wrong(part: str) -> Reading:
    """Progress: errors on the examples with the feature."""
    return lambda t: 1 - t.accuracies(f"{part} with")


def _without(part: str) -> Reading:
    return lambda t: t.accuracies(f"{part} without")


def _chart(runs: Runs, part: str) -> Chart:
    curves = [curve_series(label, group, _wrong(part), _without(part)) for label, group in runs.items()]
    return progress_chart(
        f"{part}-groups", f"Accuracy without the spurious feature, {part} examples",
        "errors on examples with the spurious feature", "accuracy on examples without it", curves,
        "One curve per alpha; the higher, the less the network relies on the spurious feature.",
        "Balanced groups. Mean over seeds, band: standard error.",
    )  # fmt: skip
