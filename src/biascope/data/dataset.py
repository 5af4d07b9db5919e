"""The one container every generator and every real set returns, and what the generators share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.support.arguments import check_tensor
from biascope.support.errors import InputError
from biascope.support.signatures import checked
from biascope.support.tables import facts

Labels = Literal["01", "pm1"]
Seed = int | torch.Generator


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs `x` [n, ...] with targets `y` [n, ...], and where they came from.

    `group` [n], where present, tells kinds of examples apart (clean/noisy, easy/difficult, with/without the spurious
    feature); it follows `subset` and `to`. `info` holds what belongs to the whole set (directions, radii, exact
    values).

    Example:
        >>> d = Dataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), "toy", 0)
        >>> train, test = d.train_test(2)
        >>> len(train), len(test)
        (2, 2)
    """

    x: Tensor
    y: Tensor
    name: str
    seed: int | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    group: Tensor | None = None

    def __post_init__(self) -> None:
        parts = {"x": self.x, "y": self.y} | ({} if self.group is None else {"group": self.group})
        counts = {label: len(t) if check_tensor(t, label).dim() else 0 for label, t in parts.items()}
        if len(set(counts.values())) > 1:
            raise InputError(f"{self.name}: {', '.join(f'{k} has {n} examples' for k, n in counts.items())}")

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, x={list(self.x.shape)} {self.x.dtype}, y={list(self.y.shape)} {self.y.dtype}, "
            f"seed={self.seed}, info={sorted(self.info)})"
        )

    def _repr_html_(self) -> str:
        """Shapes, seed and what else is known, for notebooks."""
        rows: dict[str, object] = {"examples": len(self), "x": f"{list(self.x.shape)} {self.x.dtype}"}
        rows |= {"y": f"{list(self.y.shape)} {self.y.dtype}", "seed": self.seed}
        rows |= {} if self.group is None else {"groups": len(set(self.group.flatten().tolist()))}
        return facts(self.name, rows | ({"info": ", ".join(sorted(self.info))} if self.info else {}))

    @checked
    def to(self, device: torch.device | str) -> Dataset:
        """The same set on another device."""
        group = None if self.group is None else self.group.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), group=group)

    @checked
    def subset(self, index: Tensor) -> Dataset:
        """The examples at `index` (integer positions or a boolean mask), in that order."""
        group = None if self.group is None else self.group[index]
        return replace(self, x=self.x[index], y=self.y[index], group=group)

    @checked
    def train_test(self, n_train: int, seed: Seed | None = None) -> tuple[Dataset, Dataset]:
        """The first `n_train` examples and the rest; with `seed`, after a seeded shuffle.

        The generators here alternate their classes, so every even-sized prefix is exactly balanced without a shuffle.
        """
        n = len(self)
        if not 0 < n_train < n:
            raise InputError(f"{self.name} has {n} examples: n_train must lie in 1..{n - 1}, got {n_train}")
        order = torch.arange(n) if seed is None else torch.randperm(n, generator=generator(seed))
        order = order.to(self.x.device)
        return self.subset(order[:n_train]), self.subset(order[n_train:])


def generator(seed: Seed) -> torch.Generator:
    """A CPU generator from an int; a given generator passes through. The global RNG is never read or moved."""
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)


def seed_of(seed: Seed) -> int | None:
    """What to record: the int itself, or the seed a generator was started from."""
    return seed if isinstance(seed, int) else seed.initial_seed()


def alternating_signs(n: int) -> Tensor:
    """n exactly balanced class signs -1, +1, -1, ... as int64 (n must be even)."""
    if n < 2 or n % 2:
        raise InputError(f"balanced classes need an even n >= 2, got {n}")
    return 2 * (torch.arange(n) % 2) - 1


def as_labels(signs: Tensor, labels: Labels) -> Tensor:
    """Signs -1/+1 as int64 labels: {0, 1} ("01") or {-1, +1} ("pm1")."""
    return (signs > 0).long() if labels == "01" else torch.where(signs > 0, 1, -1)


def as_signs(y: Tensor) -> Tensor:
    """Binary labels of either kind, {0, 1} or {-1, +1}, as signs -1/+1 (int64)."""
    values = set(y.tolist())
    if not (values <= {0, 1} or values <= {-1, 1}):
        raise InputError(f"binary labels are {{0, 1}} or {{-1, +1}}, got {sorted(values)}")
    return torch.where(y > 0, 1, -1)


def check_classes(y: Tensor, n_classes: int) -> None:
    """Refuse labels [n] that are not whole numbers from 0 to n_classes - 1."""
    low, high = (y.min(), y.max()) if len(y) else (0, 0)
    if y.is_floating_point() or low < 0 or high >= n_classes:
        raise InputError(f"labels must be whole numbers (y.long()) below n_classes={n_classes}, not {low} to {high}")


def along(coefficients: Tensor, u: Tensor) -> Tensor:
    """Coefficients [n] times a direction u [*shape], in u's dtype: [n, *shape]."""
    return coefficients.to(u.dtype).view(-1, *[1] * u.dim()) * u


def orthonormal(*directions: Tensor, tol: float = 1e-4) -> list[Tensor]:
    """The directions, each divided by its norm; refused if they are not mutually orthogonal or differ in shape."""
    units: list[Tensor] = []
    for k, u in enumerate(directions):
        norm = check_tensor(u, f"direction {k}", floating=True).norm()
        if not 0 < norm < float("inf"):
            raise InputError(f"direction {k} has norm {float(norm)}: it must be finite and not zero")
        unit = u / norm
        for j, other in enumerate(units):
            cosine = float((other * unit).sum()) if other.shape == unit.shape else float("nan")
            if not abs(cosine) <= tol:
                raise InputError(f"directions {j} and {k} are not orthogonal (cosine {cosine:.3g}), or differ in shape")
        units.append(unit)
    return units


def project_out(x: Tensor, *directions: Tensor) -> Tensor:
    """x [n, *shape] without its components along orthonormal `directions` [*shape] each; costs O(nD) per direction."""
    for u in orthonormal(*directions):
        if u.shape != x.shape[1:]:
            raise InputError(f"direction has shape {list(u.shape)}, inputs have {list(x.shape[1:])}")
        u = u.to(x)
        x = x - along(x.flatten(1) @ u.flatten(), u)
    return x
