"""Trainings compared at equal progress: what one group does when another quantity has come equally far.

Progress is a quantity that falls while a network learns (a loss, or 1 - accuracy). A curve is read at a level of
progress where it first gets there; between probes it is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.probes import Record, equal_progress
from biascope.studies.estimates import curve
from biascope.studies.lazy.linearity import NAMES
from biascope.studies.lazy.training import Trajectory
from biascope.studies.result import Chart, Estimate, Series

Reading = Callable[[Trajectory], Tensor]  # what is read off a trajectory: [P] or [P, k]
Style = Literal["line", "points", "dashed"]


def at_progress(progress: Tensor, values: Tensor, levels: Tensor) -> Tensor:
    """values [P, ...] read where progress [P] first falls to each of levels [M]; NaN where it never does.

    Example:
        >>> loss, other = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([0.0, 2.0, 9.0, 3.0])
        >>> at_progress(loss, other, torch.tensor([2.0, 0.5]))
        tensor([1.0000, 2.5000], dtype=torch.float64)
    """
    if len(progress) != len(values):
        raise InputError(f"{len(progress)} values of progress for {len(values)} measurements")
    progress, values, levels = progress.double(), values.double(), levels.double()
    best = progress.cummin(0).values
    fresh = torch.ones(len(best), dtype=torch.bool)
    fresh[1:] = best[1:] < best[:-1]  # a probe that did not get farther is no new point of the curve
    p, v = progress[fresh], values[fresh]
    right = torch.searchsorted(-p, -levels).clamp(1, max(1, len(p) - 1))
    if len(p) == 1:
        weight = torch.zeros_like(levels)
        right = torch.zeros_like(right)
        left = right
    else:
        left = right - 1
        weight = (p[left] - levels) / (p[left] - p[right])
    weight = weight.reshape(-1, *[1] * (v.dim() - 1))
    found = v[left] + weight * (v[right] - v[left])
    outside = (levels > p[0]) | (levels < p[-1])
    found[outside] = torch.nan
    return found


def shared_levels(progress: Sequence[Tensor], points: int = 40) -> Tensor | None:
    """Levels [points], descending and evenly spaced, that all curves pass; None where they share none.

    Example:
        >>> shared_levels([torch.tensor([2.0, 0.0]), torch.tensor([3.0, 1.0])], 3)
        tensor([2.0000, 1.5000, 1.0000], dtype=torch.float64)
    """
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

    Runs are paired by seed. The levels are those both runs pass, and the runs of `also` of the same seed. A pair that
    shares no progress gives no row.
    """
    rows, shape = [], value(one[0]).shape[1:]
    for seed, (a, b) in enumerate(zip(one, other, strict=True)):
        levels = shared_levels([progress(t) for t in (a, b, *(runs[seed] for runs in also))])
        if levels is not None:
            both = equal_progress(
                records(a, progress, value), records(b, progress, value), levels.tolist(), interpolate=True
            )
            gaps = [[pair.difference(str(k)) for k in range(shape.numel())] for pair in both.pairs]
            rows.append(torch.tensor(gaps, dtype=torch.float64).mean(0).reshape(shape))
    return torch.stack(rows) if rows else torch.zeros(0, *shape, dtype=torch.float64)


def records(trajectory: Trajectory, progress: Reading, value: Reading) -> list[Record]:
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
    curves = torch.stack([at_progress(progress(t), value(t), levels) for t in runs])
    return curve(label, levels, curves, style)


def estimate(samples: Tensor) -> Estimate:
    """Mean and standard error of samples [S]; without any, a NaN."""
    return Estimate.of(samples) if len(samples) else Estimate(math.nan, None, 0)


def known(numbers: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The numbers that could be measured."""
    return {name: value for name, value in numbers.items() if math.isfinite(value.value)}


def linearity_chart(runs: Mapping[str, Sequence[Trajectory]], by: str) -> Chart:
    """The three linearity metrics of the first seed of every regime."""
    series = []
    for label, group in runs.items():
        first = group[0]
        at = first.losses(by)[first.linearity_probes]
        for k, name in enumerate(NAMES):
            styles: tuple[Style, ...] = ("line", "dashed", "points")
            there = first.linearity[:, k].isfinite()  # a network that collapsed has no representation to compare
            series.append(Series.of(f"{name}, {label}", at[there], first.linearity[there, k], style=styles[k]))
    return Chart(
        "linearity",
        "Similarity with the start of training",
        f"loss of the {by} examples (training goes to the left)",
        "similarity",
        tuple(series),
        alt="Three similarities over the loss: near 1 throughout for large alpha, falling for alpha = 1.",
        caption="First seed.",
    )


def linearity_numbers(runs: Mapping[str, Sequence[Trajectory]]) -> dict[str, Estimate]:
    """Every metric at the end of training, over seeds."""
    return {
        f"{name} at the end, {label}": Estimate.of([float(t.linearity[-1, k]) for t in group])
        for label, group in runs.items()
        for k, name in enumerate(NAMES)
        if all(len(t.linearity) and bool(t.linearity[-1, k].isfinite()) for t in group)
    }


def stayed_linear(runs: Sequence[Trajectory], least: float = 0.9) -> bool:
    """Whether the tangent kernel kept an alignment of `least` with its start in every run (else it is no lazy run).

    Where it was not measured (lin=0) nobody knows, and the answer is no.
    """
    return all(len(t.linearity) > 0 and float(t.linearity[:, 1].min()) >= least for t in runs)


def not_linear(label: str, runs: Sequence[Trajectory]) -> str:
    """What the text says of runs that are not known to be lazy: a sentence, or nothing."""
    if stayed_linear(runs):
        return ""
    measured = all(len(t.linearity) for t in runs)
    return f" {label} did not stay linear." if measured else f" Whether {label} stayed linear was not measured (lin=0)."


def steps_taken(runs: Mapping[str, Sequence[Trajectory]]) -> dict[str, Estimate]:
    """How many steps the trainings took."""
    return {f"steps, {label}": Estimate.of([float(t.steps[-1]) for t in group]) for label, group in runs.items()}
