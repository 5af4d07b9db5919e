"""Images with a painted-on spurious feature, a stand-in for photographs with spurious attributes (CelebA, Waterbirds).

The label is binary (digit 5 to 9 or not); colour or a white patch in a corner agrees with it for most of the training
examples. The groups are balanced: as many examples of every (label, attribute) cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from biascope.data import Dataset, balanced_cells, spurious
from biascope.seeds import derive
from biascope.studies.lazy.images import load
from biascope.studies.lazy.training import Watched

GROUPS = ("train with", "train without", "test with", "test without")


@dataclass(frozen=True)
class SpuriousTask:
    """n training images of a set, `agreement` of which carry the spurious feature of their class."""

    dataset: str = "mnist"
    kind: Literal["patch", "colour"] = "patch"
    n: int = 4000
    agreement: float = 0.95
    per_cell: int = 180

    def data(self, seed: int, device: str) -> tuple[Dataset, Watched]:
        """The training set and four groups: of training and of test examples, those with the feature and those
        whose feature belongs to the other class.
        """
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        painted = {}
        for split, agreement in (("train", self.agreement), ("test", 0.5)):
            whole = load(self.dataset, split)  # type: ignore[arg-type]
            whole = whole if split == "test" else whole.train_test(self.n, derive(seed, "examples"))[0]
            made = spurious(
                whole.x, (whole.y >= 5).long(), self.kind, agreement=agreement, seed=derive(seed, "paint", split)
            )
            painted[split] = made
            cells = balanced_cells(made.y, made.info["attribute"], self.per_cell, cap=True, seed=derive(seed, split))
            group = made.group
            assert group is not None
            for name, value in (("with", 0), ("without", 1)):
                own = cells[group[cells] == value]
                parts[f"{split} {name}"] = (2 * made.x[own].to(device) - 1, made.y[own].to(device))
        examples = painted["train"].to(device)
        return Dataset(2 * examples.x - 1, examples.y, examples.name, None, {}, examples.group), Watched.of(parts)
