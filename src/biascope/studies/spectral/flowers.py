"""Binary labels on flower-shaped curves, for many (frequency, petals) at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from biascope import data
from biascope.seeds import derive
from biascope.studies.result import HeatMap
from biascope.studies.runs import Run
from biascope.studies.spectral.fitting import Fit, Measure, draw_mlps, fit

BOX = 1.6  # half side of the square that holds every flower


def flower_classes(
    cells: Sequence[tuple[int, int]], samples: int, threshold: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, n, 2], labels [T, n] in {0, 1} and majority baselines [T] of cells (k, L); one phase per k and seed.

    Example:
        >>> x, y, majority = flower_classes([(1, 0), (1, 4)], 1000, 0.5, seed=0)
        >>> x.shape, bool((y[0] == y[1]).all()), round(float(majority[0]), 2)
        (torch.Size([2, 1000, 2]), True, 0.67)
    """
    made = [
        data.sinusoid_classes(k, samples, threshold=threshold, petals=petals, seed=derive(seed, "phase", k))
        for k, petals in cells
    ]
    majority = torch.tensor([each.info["majority"] for each in made])
    return torch.stack([each.x for each in made]), torch.stack([each.y for each in made]).float(), majority


@dataclass(frozen=True)
class Training:
    """Options of the studies in which networks learn such labels."""

    depth: Annotated[int, "Linear layers"] = 6
    width: Annotated[int, "units in a hidden layer"] = 256
    samples: Annotated[int, "points of the grid z = j/n"] = 1000
    steps: Annotated[int, "full-batch Adam steps (not given in the text)"] = 30_000
    lr: Annotated[float, "of Adam (not given in the text)"] = 3e-4
    precision: Annotated[str, "float32 or tf32 products on a GPU"] = "float32"

    def fit(self, run: Run, seed: int, x: Tensor, y: Tensor, every: int, measure: Measure | None = None) -> Fit:
        """A network for each row of the labels y [T, n], trained on x [n, 2] or [T, n, 2]."""
        networks = draw_mlps(len(y), 2, self.depth, self.width, seed, run.device)
        return fit(networks, x, y, steps=self.steps, lr=self.lr, every=every, loss="bce", measure=measure,
                   precision=self.precision)  # fmt: skip


TRAINING = Training()


def plane(side: int) -> Tensor:
    """Grid [side^2, 2] over the square that holds every flower, end points left out; x varies fastest.

    Example:
        >>> plane(2).tolist()
        [[-1.600000023841858, -1.600000023841858], [0.0, -1.600000023841858], [-1.600000023841858, 0.0], [0.0, 0.0]]
    """
    line = BOX * (2 * torch.arange(side) / side - 1)
    return torch.stack([line.repeat(side), line.repeat_interleave(side)], 1)


def probability_map(name: str, title: str, values: Tensor, alt: str) -> HeatMap:
    """Probabilities [side, side] on the grid of `plane`."""
    line = plane(len(values))[: len(values), 0].tolist()
    return HeatMap.of(name, title, x=line, y=line, z=values.tolist(), x_label="x", y_label="y",
                      z_label="probability", low=0.0, high=1.0, alt=alt)  # fmt: skip


def cell_map(
    name: str, title: str, k: Sequence[int], petals: Sequence[int], values: Tensor, label: str, low: float = 0.5
) -> HeatMap:
    """A share [k, petals] of every cell (k, L), from `low` to 1."""
    return HeatMap.of(name, title, x=k, y=petals, z=values.T.tolist(), x_label="frequency k",
                      y_label="petals L", z_label=label, low=low, high=1.0,
                      alt=f"{title} over frequency and petals.")  # fmt: skip


def nearest_probability(x: Tensor, y: Tensor, queries: Tensor, neighbours: int) -> Tensor:
    """Share [m] of label 1 among the nearest neighbours in x [n, d] of each query [m, d].

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0.0, 1.0, 1.0])
        >>> nearest_probability(x, y, torch.tensor([[0.4]]), 2)
        tensor([0.5000])
    """
    found = []
    for part in torch.split(queries, 8192):
        nearest = torch.cdist(part, x).topk(neighbours, largest=False).indices
        found.append(y[nearest].mean(1))
    return torch.cat(found)
