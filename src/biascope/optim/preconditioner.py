"""KFAC and EKFAC as preconditioners: they turn the gradients of an ordinary `loss.backward()` into natural gradients.

The metric is the second moment of the gradients of the individual losses, with the true labels ("empirical Fisher").
Per layer, with inputs ã (bias: a last 1) and output gradients g of the individual losses:

    A = E[ã ã^T] = U_A S_A U_A^T,   B = E[g g^T] = U_B S_B U_B^T        every `refresh_every` steps
    KFAC:  dW = B^-1 G A^-1, damped
    EKFAC: dW = U_B ((U_B^T G U_A) / (s + damping)) U_A^T,  s = E[(U_B^T g ã^T U_A)^2] at every step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from biascope.curvature.kronecker import EigenPiece, KroneckerPiece, Sharing, decompose
from biascope.curvature.owned import decomposed
from biascope.curvature.plan import Plan
from biascope.curvature.sums import KroneckerSum
from biascope.network.layers.rules import Linear
from biascope.network.shards import local
from biascope.optim.checks import (
    Batches,
    Finite,
    warn_of_other_uses,
    warn_of_pairs,
    warn_of_silent_examples,
    warn_of_silent_positions,
)
from biascope.optim.dealt import Dealt
from biascope.optim.hooks import Watcher
from biascope.optim.stacks import Curvature, Stack, Stacks, read
from biascope.optim.team import network_of, team_of
from biascope.optim.units import LayerUnit, find_units
from biascope.support.arguments import check_count, check_number, check_share
from biascope.support.errors import CorruptError, InputError
from biascope.support.signatures import checked

Damping = Callable[[LayerUnit], float]


class Handed(TypedDict, total=False):
    """Options that KFAC and EKFAC share, as optimisers and as preconditioners."""

    sharing: Sharing
    sua: bool
    widest: int | None
    loss_reduction: Literal["mean", "sum"]
    grad_scaler: Any
    group: Any
    gradient_workers: float


class Common(Handed, total=False):
    """Options that their preconditioners share."""

    damping: float
    params: Collection[nn.Parameter] | None
    fallback: str


@dataclass(frozen=True)
class Step:
    """One unit in one step: its curvature so far, the calls that the hooks kept, of how many examples, and what makes
    their output gradients those of the individual losses.
    """

    curvature: Curvature
    batches: Batches
    examples: int
    scale: float


class Preconditioner:
    """What KFAC and EKFAC share: hooks, factors, refreshes, coverage, state."""

    kind = ""

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        damping_mode: str,
        refresh_every: int,
        factors_every: int,
        factor_decay: float,
        damping: float = 1e-3,
        sharing: Sharing = "expand",
        sua: bool = False,
        widest: int | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        params: Collection[nn.Parameter] | None = None,
        grad_scaler: Any = None,
        group: Any = None,
        gradient_workers: float = 1.0,
        fallback: str = "left as it is",
    ) -> None:
        self.team, model = team_of(model, group), network_of(model)
        self.damping, self.damping_mode = check_number(damping, "damping", above=0), damping_mode
        self.refresh_every = check_count(refresh_every, "refresh_every")
        self.factors_every = check_count(factors_every, "factors_every")
        self.factor_decay = check_share(factor_decay, "factor_decay")
        self.units, self.left = find_units(
            model, params, sharing, sua, math.inf if widest is None else check_count(widest, "widest")
        )
        if not self.units:
            raise InputError(f"no layer of {type(model).__name__} has Kronecker factors; use a plain torch optimiser")
        self.loss_reduction, self.grad_scaler, self.fallback = loss_reduction, grad_scaler, fallback
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.curvatures = {unit.name: Curvature() for unit in self.units}
        self.stacks = Stacks()
        self.steps = 0
        self.notes: dict[str, str] = {}
        self.doubts = {"uses", "pairs", "examples", "positions"}  # what has not been warned of yet
        if loss_reduction == "sum":
            self.doubts.discard("examples")  # a sum leaves the scale of each loss alone
        if self.kind != "kfac":
            self.doubts.discard("positions")  # EKFAC's scalings see the products of inputs and gradients, zero there
        self.dealt = Dealt(self.team, self.units, gradient_workers)
        if self.team.size > 1:
            self.doubts.discard("uses")  # the gradients are of all ranks, the calls of one
        self.watcher = Watcher(model, {u.module: (u.name, u.parameters[0]) for u in reversed(self.units)})
        self.watcher.capture = self._needs_factors()

    def precondition(self) -> None:
        """Replace the `.grad` of every covered parameter by the natural gradient; call it between backward and step.

        With a `grad_scaler`, call it after `scaler.unscale_(optimizer)`; gradients that overflowed are left alone.
        """
        scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())
        directions = self.directions(lambda unit: self.damping, scale, skip_overflow=self.grad_scaler is not None)
        for p, d in directions.items():
            if p.grad is not None:
                p.grad.copy_(d)

    def coverage(self) -> Plan:
        """A table: every parameter, what steps it, and why."""
        rows = []
        covered = {name: unit for unit in self.units for name in unit.names}
        for name, shape in self.shapes.items():
            unit = covered.get(name)
            if unit is not None and unit.name not in self.notes:
                embedding = unit.rule.kind == "embedding"
                why = f"{unit.rule.kind} rule" + (
                    ", SUA" if unit.sua else ", diagonal A" if unit.diagonal and not embedding else self.detail(unit)
                )
                rows.append((name, shape, self.kind, why))
            else:
                why = self.left.get(name) or (self.notes[unit.name] if unit else "frozen, or not among the parameters")
                rows.append((name, shape, self.fallback if name in self.left or unit else "-", why))
        return Plan(self.kind, tuple(rows))

    def detail(self, unit: LayerUnit) -> str:
        """What else is to be said of a unit in `coverage`."""
        return ""

    def pieces(self) -> dict[str, EigenPiece]:
        """The metric of every unit as it is used now, by the name of its weight (without damping)."""
        return {name: c.basis for name, c in self.curvatures.items() if c.basis is not None}

    def close(self) -> None:
        """Take the hooks off the model."""
        self.watcher.close()

    def __enter__(self) -> Preconditioner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @torch.no_grad()
    def directions(
        self,
        damping: Damping,
        scale: float = 1.0,
        skip_overflow: bool = False,
        plain: Mapping[str, Tensor] | None = None,
    ) -> dict[Tensor, Tensor]:
        """{parameter: natural gradient} from the `.grad`s and what the hooks saw; changes no gradient.

        `scale` is what the loss was multiplied with before `backward()` (the `.grad`s are taken as unscaled already).
        Either everything is computed and the state moves on, or an error is raised and the state is as before. `plain`
        are other gradients that must be finite.
        """
        with self.team:
            return self._directions(damping, scale, skip_overflow, plain)

    def _directions(
        self, damping: Damping, scale: float, skip_overflow: bool, plain: Mapping[str, Tensor] | None
    ) -> dict[Tensor, Tensor]:
        try:
            self.watcher.settle()
            units = [u for u in self.units if all(p.grad is not None for p in u.parameters)]
            if not units:
                raise InputError("no covered parameter has a gradient: call loss.backward() before the step")
            finite = Finite({k: local(g) for k, g in {**(plain or {}), **self._gradients(units)}.items()})
            due = [u for u in units if self._lacks_basis(u.name) or self._every(self.refresh_every)]
            if due and self.dealt.any(finite.refused(skip_overflow)):  # before anything is decomposed
                return {}
            seen = {unit.name: self._look(unit, scale) for unit in units}
            if due:
                self._warn(seen)
            self._average(units, seen)
            self._refresh(due, seen)
            new, directions = dict(self.curvatures), dict[Tensor, Tensor]()
            new |= {u.name: seen[u.name].curvature for u in units if u.name in self.dealt.elsewhere}
            ready = [u for u in units if seen[u.name].curvature.basis is not None and self._ready(seen[u.name])]
            gradients = self.dealt.gradients(units)
            for stack in self._stacks(ready, seen, damping):
                steps = [seen[unit.name] for unit in stack.units]
                V, E = self._natural(stack, steps, stack.gradients(self.team, gradients))
                directions |= stack.split(V)
                for step, piece in zip(steps, self.stacks.keep(stack, E)):
                    c = step.curvature
                    new[piece.names[0]] = Curvature(piece, c.A, c.B, c.updates)
            if not due and self.dealt.any(finite.refused(skip_overflow)):  # by now a GPU has all of the step before it
                return {}
            directions = self.dealt.complete(units, directions)
            if not directions:
                raise InputError(
                    "there are gradients, but no covered layer was seen: did the forward pass run before this object "
                    "was made, or through a copy of the model?"
                )
            unseen = {u.name for u in units} - {u.name for u in ready} - self.dealt.elsewhere
            self.notes = dict.fromkeys(unseen, "its module was not called in the last step")
            for u in self.units:
                missing = [name for name, p in zip(u.names, u.parameters) if p.grad is None]
                if 0 < len(missing) < len(u.names):
                    self.notes[u.name] = f"{missing[0]} had no gradient in the last step, and the factor is of both"
            self.curvatures = new
            self.doubts.discard("uses")
            self.steps += 1
            return directions
        finally:
            self.watcher.clear()
            self.watcher.capture = self._needs_factors()

    def _gradients(self, units: list[LayerUnit]) -> dict[str, Tensor]:
        """Of the parameters, and of the outputs where they are kept."""
        found = {name: p.grad for u in units for name, p in zip(u.names, u.parameters) if p.grad is not None}
        for module, record in self.watcher.records.items():
            for i, call in enumerate(record.calls):
                if call.grad is not None:
                    found[f"the output of {self.watcher.modules[module][0]} (call {i + 1})"] = call.grad
        return found

    def _look(self, unit: LayerUnit, scale: float) -> Step:
        """What the hooks saw of a unit, and its factors after this step."""
        old, device = self.curvatures[unit.name], unit.parameters[0].device
        if old.basis is not None and old.basis.s.device != device:
            raise InputError(f"{unit.name}: the model was moved after the first step; load_state_dict(state_dict())")
        batches = self.watcher.records[unit.module].batches()
        examples = 0
        for batch in batches:
            if batch[0].examples == 0:
                raise InputError(f"{unit.name} was given a batch without examples; nothing was changed")
            examples += batch[0].examples
        if any(call.input is None for batch in batches for call in batch):
            batches = []
        if "pairs" in self.doubts and warn_of_pairs(batches):
            self.doubts.discard("pairs")
        factor = (examples if self.loss_reduction == "mean" else 1) / scale
        if batches and "uses" in self.doubts:
            warn_of_other_uses(unit, batches)
        return Step(old, batches, examples, factor)

    def _warn(self, seen: Mapping[str, Step]) -> None:
        """Of what is behind the gradients, each once."""
        if "examples" in self.doubts and warn_of_silent_examples(step.batches for step in seen.values()):
            self.doubts.discard("examples")
        linear = [u.name for u in self.units if isinstance(u.rule, Linear) and u.name in seen]
        if "positions" in self.doubts and warn_of_silent_positions({name: seen[name].batches for name in linear}):
            self.doubts.discard("positions")

    def _average(self, units: list[LayerUnit], seen: dict[str, Step]) -> None:
        """Running averages of the factors, over the examples of all ranks."""
        sums: dict[str, KroneckerSum] = {}
        for unit in units:
            batches = seen[unit.name].batches
            if batches and (self._lacks_basis(unit.name) or self._every(self.factors_every)):
                described, chunk = unit.chunk(batches[0])
                total = sums[unit.name] = KroneckerSum(described, unit.space)
                total.add(chunk)
                for batch in batches[1:]:
                    total.add(unit.chunk(batch)[1])
        own = [(seen[u.name].examples, sums[u.name].positions if u.name in sums else 0) for u in units]
        counts: Any = own
        if self.team.size > 1:
            counts = self.team.sum(torch.tensor(own, dtype=torch.float64, device="cpu")).long().tolist()
        pieces: dict[str, KroneckerPiece] = {}
        for unit, (examples, positions) in zip(units, counts, strict=True):
            step = seen[unit.name] = replace(seen[unit.name], examples=examples)
            if unit.name in sums:
                sums[unit.name].positions = positions
                piece = pieces[unit.name] = sums.pop(unit.name).finish(examples)
                piece.B.mul_(step.scale**2)
        if pieces:
            self.team.sum(*(t for piece in pieces.values() for t in (piece.A, piece.B)))
        diagonal = {unit.name for unit in units if unit.diagonal}
        for name, piece in pieces.items():
            old, A, B = seen[name].curvature, piece.A, piece.B
            if name in diagonal and piece.full:
                A = A.diagonal(dim1=-2, dim2=-1).clone()
            t = old.updates + 1
            decay = min(self.factor_decay, 1.0 - 1.0 / t)  # the first factors are plain means
            if old.A is not None and old.B is not None and decay != 0.0:
                A, B = torch.lerp(A, old.A, decay), torch.lerp(B, old.B, decay)
            seen[name] = replace(seen[name], curvature=replace(old, A=A, B=B, updates=t))

    def _refresh(self, due: list[LayerUnit], seen: dict[str, Step]) -> None:
        """New eigenbases, all together."""
        pieces: dict[str, KroneckerPiece] = {}
        for unit in due:
            c = seen[unit.name].curvature
            if c.A is not None and c.B is not None:
                pieces[unit.name] = KroneckerPiece(unit.names, c.B, c.A, unit.layout)
        if not pieces:
            return
        if self.team.size == 1:
            bases = decompose(list(pieces.values()))
        else:
            bases = decomposed(self.team, list(pieces.values()), summed=True)
        self.stacks = Stacks()
        for name, basis in zip(pieces, bases, strict=True):
            step = seen[name]
            kept = self._renewed(step.curvature.basis, basis) if name in self.dealt.mine else None
            c = replace(step.curvature, basis=kept)
            if kept is None:
                self.dealt.elsewhere.add(name)
            seen[name] = replace(step, curvature=replace(c, A=None, B=None) if self.factor_decay == 0.0 else c)

    def _renewed(self, old: EigenPiece | None, new: EigenPiece) -> EigenPiece:
        """The basis to go on with after a refresh."""
        return new

    def _stacks(self, units: list[LayerUnit], seen: dict[str, Step], damping: Damping) -> list[Stack]:
        """Units of the same form that saw equally many examples and are damped alike, together."""
        groups: dict[tuple[float, int, tuple[object, ...]], list[LayerUnit]] = {}
        for unit in units:
            eps = check_number(damping(unit), "damping", above=0)
            groups.setdefault((eps, seen[unit.name].examples, unit.form), []).append(unit)
        return [
            self.stacks.of(members, [E for u in members if (E := seen[u.name].curvature.basis)], examples, eps)
            for (eps, examples, _), members in groups.items()
        ]

    def _ready(self, step: Step) -> bool:
        """Is there what a step needs, given a basis?"""
        return True

    def _natural(self, stack: Stack, steps: list[Step], G: Tensor) -> tuple[Tensor, EigenPiece]:
        """The natural gradient of G, both [g, o, i e], and the basis with its scalings after this step."""
        raise NotImplementedError

    def _every(self, n: int) -> bool:
        """Is this the n-th step?"""
        return self.steps % n == 0

    def _needs_factors(self) -> bool:
        due = self._every(self.factors_every) or self._every(self.refresh_every)
        return due or any(map(self._lacks_basis, self.curvatures))

    def _lacks_basis(self, name: str) -> bool:
        """Is a unit's basis neither here nor, by intention, on other ranks alone?"""
        return self.curvatures[name].basis is None and name not in self.dealt.elsewhere

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers that a resumed training needs, besides the constructor's arguments.

        It does not depend on the number of processes. With `gradient_workers` below 1, all ranks must call it.
        """
        units = {name: c.state() for name, c in self.dealt.gathered(self.units, self.curvatures).items()}
        return {"kind": self.kind, "steps": self.steps, "units": units}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; a state of another kind or another model is refused and changes nothing."""
        curvatures, self.steps = self.read_state(state)
        self.curvatures = self.dealt.kept(curvatures)
        if self.steps:
            self.doubts.discard("uses")
        self.notes = {}
        self.watcher.clear()
        self.watcher.capture = self._needs_factors()

    def read_state(self, state: Mapping[str, Any]) -> tuple[dict[str, Curvature], int]:
        """The curvatures and the step count of a state, checked against the model."""
        if not isinstance(state, Mapping) or not {"kind", "steps", "units"} <= set(state):
            raise CorruptError(f"not the state of a {self.kind} preconditioner: it needs kind, steps and units")
        names = {unit.name for unit in self.units}
        if state["kind"] != self.kind or set(state["units"]) != names:
            other = sorted(names ^ set(state["units"]))[:3]
            raise InputError(f"the state is of kind {state['kind']!r}, this is {self.kind!r}, or {other} differ")
        return {unit.name: read(unit, state["units"][unit.name]) for unit in self.units}, int(state["steps"])
