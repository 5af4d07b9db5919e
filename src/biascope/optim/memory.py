"""What a preconditioner remembers of a unit between steps, and how it is read from a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from biascope.curvature.kronecker import EigenPiece
from biascope.errors import InputError
from biascope.optim.units import LayerUnit


@dataclass(frozen=True)
class Curvature:
    """What is known of one unit: running averages of the factors, their eigenbasis and the scalings in it."""

    basis: EigenPiece | None = None
    A: Tensor | None = None
    B: Tensor | None = None
    updates: int = 0

    def state(self) -> dict[str, Any]:
        """Its tensors and numbers, by name."""
        arrays = {} if self.basis is None else self.basis.arrays()
        return {"updates": self.updates, "A": self.A, "B": self.B, **arrays}


def read(unit: LayerUnit, entry: Mapping[str, Any]) -> Curvature:
    """What `Curvature.state` gave, checked against the unit."""
    layout, space = unit.layout, unit.space
    g, o, i = layout.groups, layout.d_out, layout.columns
    side = (g, i) if unit.rule.kind == "embedding" else (g, i, i)
    shapes: dict[str, tuple[int, ...]] = {
        "A": side,
        "B": (g, o, o),
        "U_A": (g, i, i),
        "U_B": (g, o, o),
        "s_A": (g, i),
        "s_B": (g, o),
    }
    shapes["s"] = (g, layout.offsets, o, i)
    tensors = {}
    for key, value in entry.items():
        if key == "updates" or value is None:
            continue
        if key not in shapes or not isinstance(value, Tensor) or tuple(value.shape) != shapes[key]:
            found = list(value.shape) if isinstance(value, Tensor) else value
            raise InputError(f"{unit.name}: {key} in the state is {found}, this model needs {shapes.get(key)}")
        tensors[key] = value.to(space.device, space.dtype, copy=True)
    basis = None
    if "s" in tensors:
        t = tensors
        basis = EigenPiece(unit.names, t["U_B"], t.get("U_A"), t["s"], t["s_B"], t["s_A"], layout)
    return Curvature(basis, tensors.get("A"), tensors.get("B"), int(entry["updates"]))
