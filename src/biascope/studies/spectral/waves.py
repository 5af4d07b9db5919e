"""Sums of sinusoids as targets for many runs, and how the runs are summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from biascope.seeds import derive, generator
from biascope.studies.runs import Run
from biascope.studies.spectral.fitting import Fit, Measure, draw_mlps, fit


def wave_targets(
    frequencies: Sequence[int], amplitudes: Sequence[float], n: int, runs: int, seed: int
) -> tuple[Tensor, Tensor]:
    """z = j/n [n] and targets [runs, n]: sum_i A_i sin(2 pi k_i z + phi_i), the phases uniform for each run.

    Example:
        >>> z, y = wave_targets([3], [0.5], 60, 2, seed=0)
        >>> y.shape, round(float(y.abs().max()), 1)
        (torch.Size([2, 60]), 0.5)
    """
    z = torch.arange(n, dtype=torch.float64) / n
    phase = (
        2 * math.pi * torch.rand(runs, len(frequencies), 1, generator=generator(seed, "phases"), dtype=torch.float64)
    )
    k = torch.tensor(list(frequencies), dtype=torch.float64)[:, None]
    a = torch.tensor(list(amplitudes), dtype=torch.float64)[:, None]
    return z, (a * (2 * math.pi * k * z + phase).sin()).sum(1)


@dataclass(frozen=True)
class Waves:
    """Options of the studies in which networks learn a sum of sinusoids on a line."""

    frequencies: Annotated[tuple[int, ...], "k_i, cycles on [0, 1]"] = tuple(range(5, 55, 5))
    depth: Annotated[int, "Linear layers"] = 6
    width: Annotated[int, "units in a hidden layer"] = 256
    samples: Annotated[int, "points of the grid z = j/n"] = 200
    steps: Annotated[int, "full-batch Adam steps"] = 80_000
    runs: Annotated[int, "networks, each with its own phases"] = 10
    lr: Annotated[float, "of Adam (not given in the text)"] = 3e-4
    every: Annotated[int, "steps between two measurements"] = 100
    precision: Annotated[str, "float32 or tf32 products on a GPU"] = "float32"

    def __str__(self) -> str:
        return f"{self.runs} runs of {self.steps} steps, {self.depth} Linear layers of {self.width} units"

    def amplitudes(self, setting: str) -> list[float]:
        """Those of the sinusoids: all 1 if "equal", else growing to 1."""
        m = len(self.frequencies)
        return [1.0] * m if setting == "equal" else [(i + 1) / m for i in range(m)]

    def fit(self, run: Run, setting: str, measure: Measure) -> tuple[Fit, Tensor]:
        """Trained networks and their targets [runs, samples]; phases and first networks come from the run's seed."""
        z, y = wave_targets(self.frequencies, self.amplitudes(setting), self.samples, self.runs, run.seed)
        networks = draw_mlps(self.runs, 1, self.depth, self.width, derive(run.seed, "init"), run.device)
        done = fit(networks, z[:, None], y, steps=self.steps, lr=self.lr, every=self.every, measure=measure,
                   precision=self.precision, what=f"{setting} amplitudes")  # fmt: skip
        return done, y


WAVES = Waves()
SIZES: dict[str, dict[str, object]] = {
    "smoke": {"frequencies": (2, 4, 6, 8, 10), "width": 64, "depth": 4, "samples": 64, "steps": 400, "runs": 3}
    | {"lr": 1e-3, "every": 20},
    "laptop": {"runs": 3, "steps": 4000},
    "paper": {},
}


def rank_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's rank correlation of x [m] with each row of y [..., m]; ties get their mean rank.

    Example:
        >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[9.0, 4.0, 1.0]])).round().tolist()
        [-1.0]
    """
    a, b = _ranks(x.double()), _ranks(y.double())
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    found: Tensor = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp(min=1e-12)
    return found


def _ranks(x: Tensor) -> Tensor:
    below = (x[..., None, :] < x[..., :, None]).sum(-1)
    same = (x[..., None, :] == x[..., :, None]).sum(-1)
    return below + (same - 1) / 2.0


def first_above(curve: Tensor, steps: Tensor, level: float) -> Tensor:
    """The first of `steps` [r] at which curve [r, ...] exceeds `level`; NaN where it never does.

    Example:
        >>> first_above(torch.tensor([[0.0], [0.5], [0.95]]), torch.tensor([0, 100, 200]), 0.9).tolist()
        [200.0]
    """
    over = curve > level
    place = over.float().argmax(0)
    return torch.where(over.any(0), steps.double()[place], torch.nan)
