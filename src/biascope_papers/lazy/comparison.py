"""Trainings compared at equal progress: what one group does when another quantity has come equally far.

Progress is a quantity that falls while a network learns (a loss, or 1 - accuracy). A curve is read at a level of
progress where it first gets there; between probes it is interpolated.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from biascope.probes import Record, equal_progress
from biascope.studies import Chart, Estimate, Series
from biascope.studies.estimates import curve
from biascope_papers.lazy.training import SIMILARITIES, Trajectory

Reading = Callable[[Trajectory], Tensor]  # what is read off a trajectory: [P] or [P, k]
Style = Literal["line", "points", "dashed"]
Runs = Mapping[str, Sequence[Trajectory]]  # {regime: trajectories, one per seed}
OVER_SEEDS = "Mean over seeds, band: standard error."
LOWEST = "lowest tangent kernel alignment of the linear regime"


def at_progress(progress: Tensor, values: Tensor, levels: Tensor) -> Tensor:
    """values [P, ...] read where progress [P] first falls to each of levels [M]; NaN where it never does."""
    fresh = torch.ones(len(progress), dtype=torch.bool)
    fresh[1:] = progress[1:] < progress.cummin(0).values[:-1]  # a probe that did not get farther is no new point
    p, wanted = -progress[fresh].double().numpy(), -levels.double().numpy()
    columns = values[fresh].double().reshape(len(p), -1).T.numpy()
    found = np.stack([np.interp(wanted, p, column, left=math.nan, right=math.nan) for column in columns], 1)
    return torch.from_numpy(found).reshape(len(levels), *values.shape[1:])


def shared_levels(progress: Sequence[Tensor], points: int = 40) -> Tensor | None:
    """Levels [points], descending and evenly spaced, that all curves pass; None where they share none."""
    high, low = min(float(p[0]) for p in progress), max(float(p.min()) for p in progress)
    return torch.linspace(high, low, points, dtype=torch.float64) if low < high else None


def paired_differences(
    one: Sequence[Trajectory],
    other: Sequence[Trajectory],
    progress: Reading,
    value: Reading,
    also: Sequence[Sequence[Trajectory]] = (),
) -> Tensor:
    """value of one minus value of the other at equal progress, [S, ...]: a row per seed, the mean over its levels.

    The levels are those both runs pass, and the runs of `also` of the same seed. A pair that shares none gives no row.
    """
    rows, shape = [], value(one[0]).shape[1:]
    for seed, (a, b) in enumerate(zip(one, other, strict=True)):
        levels = shared_levels([progress(t) for t in (a, b, *(runs[seed] for runs in also))])
        if levels is not None:
            first, second = (_records(t, progress, value) for t in (a, b))
            pairs = equal_progress(first, second, levels.tolist(), interpolate=True).pairs
            gaps = [[pair.difference(str(k)) for k in range(shape.numel())] for pair in pairs]
            rows.append(torch.tensor(gaps, dtype=torch.float64).mean(0).reshape(shape))
    return torch.stack(rows) if rows else torch.zeros(0, *shape, dtype=torch.float64)


def _records(trajectory: Trajectory, progress: Reading, value: Reading) -> list[Record]:
    """A trajectory as records of a probe: progress as the loss, the value's entries by number."""
    rows = value(trajectory).reshape(len(trajectory.steps), -1).tolist()
    return [
        Record(int(step), float(loss), values={str(k): v for k, v in enumerate(row)})
        for step, loss, row in zip(trajectory.steps, progress(trajectory), rows)
    ]


def curve_series(
    label: str, runs: Sequence[Trajectory], progress: Reading, value: Reading, style: Style = "line"
) -> Series:
    """Mean over seeds of a value against progress, with its standard error, where all of these runs have been."""
    levels = shared_levels([progress(t) for t in runs])
    if levels is None:
        return Series.of(label, [], [], style=style)
    return curve(label, levels, torch.stack([at_progress(progress(t), value(t), levels) for t in runs]), style)


def progress_chart(
    name: str, title: str, progress: str, measure: str, series: Iterable[Series], alt: str, caption: str = OVER_SEEDS
) -> Chart:
    """A chart over progress."""
    x = f"{progress} (training goes to the left)"
    return Chart(name, title, x, measure, tuple(series), alt=alt, caption=caption)


def estimate(samples: Tensor) -> Estimate:
    """Mean and standard error of samples [S]; without any, a NaN."""
    return Estimate.of(samples) if len(samples) else Estimate(math.nan, None, 0)


def known(numbers: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The numbers that could be measured."""
    return {name: value for name, value in numbers.items() if math.isfinite(value.value)}


def linearity_charts(runs: Runs, by: str) -> list[Chart]:
    """The three similarities of the first seed of every regime with its start; no chart where none was measured."""
    styles: tuple[Style, ...] = ("line", "dashed", "points")
    series = []
    for label, (first, *_) in runs.items():
        at = first.losses(by)[first.linearity_probes]
        for k, (name, style) in enumerate(zip(SIMILARITIES, styles)):
            there = first.linearity[:, k].isfinite()  # a network that collapsed has no representation to compare
            series.append(Series.of(f"{name}, {label}", at[there], first.linearity[there, k], style=style))
    if not any(len(group[0].linearity) for group in runs.values()):
        return []
    alt = "Three similarities over the loss: near 1 throughout for large alpha, falling for alpha = 1."
    title, progress = "Similarity with the start of training", f"loss of the {by} examples"
    return [progress_chart("linearity", title, progress, "similarity", series, alt, "First seed.")]


def run_numbers(runs: Runs) -> dict[str, Estimate]:
    """Over seeds: every similarity at the end of training (of two regimes also the paired difference), and the steps
    taken.
    """
    numbers: dict[str, Estimate] = {}
    measured = {label: group for label, group in runs.items() if all(len(t.linearity) for t in group)}
    for k, name in enumerate(SIMILARITIES):
        ends = {label: [float(t.linearity[-1, k]) for t in group] for label, group in measured.items()}
        ends = {label: values for label, values in ends.items() if all(map(math.isfinite, values))}
        numbers |= {f"{name} at the end, {label}": Estimate.of(values) for label, values in ends.items()}
        if len(runs) == len(ends) == 2:
            hasty, lazy = ends.values()
            numbers[f"{name} at the end, linear minus non-linear"] = Estimate.of([b - a for a, b in zip(hasty, lazy)])
    return numbers | {
        f"steps, {label}": Estimate.of([float(t.steps[-1]) for t in group]) for label, group in runs.items()
    }


def loss_left(runs: Runs, progress: Reading) -> dict[str, Estimate]:
    """The lowest loss over the first one, in the seed where it is largest: whether a regime learned at all."""
    left = {label: [float(progress(t).min() / progress(t)[0]) for t in group] for label, group in runs.items()}
    return {f"share of the loss left, {label}": Estimate(max(each)) for label, each in left.items()}


def at_least(samples: Tensor, name: str) -> dict[str, Estimate]:
    """The lowest of samples [S], one per seed: above 0 where the effect is there in every one."""
    return {f"{name}, lowest of the seeds": Estimate(float(samples.min()))} if len(samples) else {}


def lowest_alignment(runs: Sequence[Trajectory], of: str = "") -> dict[str, Estimate]:
    """The lowest alignment of the tangent kernel with its start, over probes and runs; nothing where it was not
    measured.
    """
    if not all(len(t.linearity) for t in runs):
        return {}
    return {LOWEST + of: Estimate(min(float(t.linearity[:, 1].min()) for t in runs))}


def not_linear(label: str, runs: Sequence[Trajectory]) -> str:
    """What the text says of runs that are not known to be lazy: a sentence, or nothing."""
    found = lowest_alignment(runs)
    if not found:
        return f" Whether {label} stayed linear was not measured (lin=0)."
    return f" {label} did not stay linear." if found[LOWEST].value < 0.9 else ""
