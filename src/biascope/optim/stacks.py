"""What is known of units between steps, and units of one form as one with more groups: one multiplication for all.

A ResNet-34 has about forty convolutions with a bias each, of about fifteen forms. Between two steps the arrays of a
stack stay together; those of a unit are views of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from biascope.curvature.kronecker import EigenPiece
from biascope.optim.team import whole
from biascope.optim.units import LayerUnit
from biascope.support.errors import InputError
from biascope.support.processes import Processes

T = TypeVar("T")


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
    A = (g, i) if unit.diagonal else (g, i, i)
    shapes: dict[str, tuple[int, ...]] = {"A": A, "B": (g, o, o), "U_A": (g, i, i), "U_B": (g, o, o)}
    shapes |= {"s_A": (g, i), "s_B": (g, o), "s": (g, layout.offsets, o, i)}
    tensors = {}
    for key, value in entry.items():
        if key == "updates" or value is None:
            continue
        if key not in shapes or not isinstance(value, Tensor) or tuple(value.shape) != shapes[key]:
            found = list(value.shape) if isinstance(value, Tensor) else value
            raise InputError(f"{unit.name}: {key} in the state is {found}, this model needs {shapes.get(key)}")
        tensors[key] = value.to(space.device, space.dtype, copy=True)
    t = tensors
    basis = EigenPiece(unit.names, t["U_B"], t.get("U_A"), t["s"], t["s_B"], t["s_A"], layout) if "s" in t else None
    return Curvature(basis, t.get("A"), t.get("B"), int(entry["updates"]))


@dataclass(frozen=True)
class Stack:
    """m units of one form that saw equally many examples and are damped alike.

    `basis` is of all of them, with m g groups in place of g; `parts` are its views, one per unit.
    """

    names: tuple[str, ...]
    units: tuple[LayerUnit, ...]
    basis: EigenPiece
    parts: tuple[EigenPiece, ...]
    examples: int
    damping: float

    def gradients(self, team: Processes, ready: Mapping[Tensor, Tensor]) -> Tensor:
        """The `.grad`s as [m g, o, i e] (a bias: the last column) in the factors' precision.

        Those that are spread out are put together, unless they were before, and are `ready` by their parameters.
        """
        L = self.basis.layout
        V = _together([unit.parameters[0] for unit in self.units], team, ready)
        V = V.reshape(L.groups, L.d_in, L.d_out).mT if L.input_major else V.reshape(L.groups, L.d_out, -1)
        if L.bias:
            b = _together([unit.parameters[1] for unit in self.units], team, ready)
            V = torch.cat([V, b.reshape(L.groups, L.d_out, 1)], -1)
        return V.to(self.basis.U_B.dtype)

    def split(self, V: Tensor) -> dict[Tensor, Tensor]:
        """[m g, o, i e] back to the parameters, in their shapes and precisions."""
        m = len(self.units)
        out: dict[Tensor, Tensor] = {}
        for j, X in enumerate(self.basis.layout.split(V)):
            own = [unit.parameters[j] for unit in self.units]
            out |= zip(own, X.reshape(m, *own[0].shape).to(own[0].dtype).contiguous().unbind())
        return out


class Stacks:
    """What is kept of stacks between steps: their arrays in one piece, and what follows from them."""

    def __init__(self) -> None:
        self.joined: dict[tuple[str, ...], tuple[EigenPiece, tuple[EigenPiece, ...]]] = {}
        self.following: dict[tuple[str, ...], tuple[Tensor, float, Any]] = {}

    def of(self, units: list[LayerUnit], pieces: list[EigenPiece], examples: int, damping: float) -> Stack:
        """Units and their bases, joined unless they are the ones that were kept."""
        names = tuple(unit.name for unit in units)
        E, parts = self.joined.get(names, (None, ()))
        if E is None or any(a is not b for a, b in zip(parts, pieces)):
            E = join(pieces)
            parts = tuple(part(E, pieces))
            self.joined[names] = E, parts
        return Stack(names, tuple(units), E, parts, examples, damping)

    def keep(self, stack: Stack, E: EigenPiece) -> tuple[EigenPiece, ...]:
        """Keep a stack's basis with new scalings; its parts."""
        if E is stack.basis:
            return stack.parts
        g = stack.parts[0].layout.groups
        parts = (E,) if len(stack.parts) == 1 else tuple(map(rescaled, stack.parts, torch.split(E.s, g)))
        self.joined[stack.names] = E, parts
        return parts

    def follow(self, stack: Stack, make: Callable[[EigenPiece, float], T]) -> T:
        """What `make` gives for a stack's factors and damping, anew when one of them changes."""
        known = self.following.get(stack.names)
        if known is None or known[0] is not stack.basis.U_B or known[1] != stack.damping:
            known = stack.basis.U_B, stack.damping, make(stack.basis, stack.damping)
            self.following[stack.names] = known
        return known[2]


def join(pieces: Sequence[EigenPiece]) -> EigenPiece:
    """Pieces of one layout as one, group after group."""
    E = pieces[0]
    if len(pieces) == 1:
        return E
    U_A = None if E.U_A is None else torch.cat([p.U_A for p in pieces if p.U_A is not None])
    U_B, s, s_B, s_A = (torch.cat([getattr(p, key) for p in pieces]) for key in ("U_B", "s", "s_B", "s_A"))
    layout = replace(E.layout, groups=len(pieces) * E.layout.groups)
    return EigenPiece(tuple(name for p in pieces for name in p.names), U_B, U_A, s, s_B, s_A, layout)


def part(E: EigenPiece, pieces: Sequence[EigenPiece]) -> list[EigenPiece]:
    """The views of joined pieces that take the pieces' places."""
    if len(pieces) == 1:
        return [E]
    g = pieces[0].layout.groups
    U_A = [None] * len(pieces) if E.U_A is None else torch.split(E.U_A, g)
    own = zip(pieces, torch.split(E.U_B, g), U_A, *(torch.split(t, g) for t in (E.s, E.s_B, E.s_A)))
    return [EigenPiece(p.names, U_B, A, s, s_B, s_A, p.layout) for p, U_B, A, s, s_B, s_A in own]


def rescaled(E: EigenPiece, s: Tensor) -> EigenPiece:
    """The same basis with other scalings s [g, e, o, i]."""
    return replace(E, s=s)


def both_sides(B: Tensor, V: Tensor, A: Tensor | None, offsets: int) -> Tensor:
    """B V A for V [g, o, i e], with the kernel offsets apart: [g, e o, i]. A is left out where it is None."""
    V = torch.bmm(B, V)
    if offsets > 1:
        g, o = V.shape[:2]
        V = V.view(g, o, -1, offsets).permute(0, 3, 1, 2).reshape(g, offsets * o, -1)
    return V if A is None else torch.bmm(V, A)


def together_again(V: Tensor, offsets: int) -> Tensor:
    """[g, e o, i] to [g, o, i e]."""
    if offsets == 1:
        return V
    g, eo, i = V.shape
    return V.view(g, offsets, eo // offsets, i).permute(0, 2, 3, 1).reshape(g, eo // offsets, i * offsets)


def right(E: EigenPiece) -> Tensor | None:
    """U_A, but where it is the identity, or a sign, which cancels on the way back."""
    return None if E.layout.columns == 1 else E.U_A


def to_basis(E: EigenPiece, V: Tensor) -> Tensor:
    """U_B^T V U_A [g, e, o, i] for V [g, o, i e], up to signs that `from_basis` takes back."""
    return both_sides(E.U_B.mT, V, right(E), E.layout.offsets).view(E.s.shape)


def from_basis(E: EigenPiece, V: Tensor) -> Tensor:
    """U_B V U_A^T [g, o, i e] for V [g, e, o, i]."""
    V, U_A = V.flatten(1, 2), right(E)
    if U_A is not None:
        V = torch.bmm(V, U_A.mT)
    return torch.bmm(E.U_B, together_again(V, E.layout.offsets))


def _together(parameters: Sequence[Tensor], team: Processes, ready: Mapping[Tensor, Tensor]) -> Tensor:
    found = [ready[p] if p in ready else whole(p.grad, team) for p in parameters if p.grad is not None]
    return found[0] if len(found) == 1 else torch.stack(found)
