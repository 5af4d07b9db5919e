"""KFAC and EKFAC as preconditioners: they turn the gradients of an ordinary `loss.backward()` into natural gradients.

The metric is the second moment of the gradients of the individual losses, with the true labels ("empirical Fisher").
Per layer, with inputs ã (bias: a last 1) and output gradients g of the individual losses:

    A = E[ã ã^T] = U_A S_A U_A^T,   B = E[g g^T] = U_B S_B U_B^T        every `refresh_every` steps
    KFAC:  dW = B^-1 G A^-1, damped
    EKFAC: dW = U_B ((U_B^T G U_A) / (s + damping)) U_A^T,  s = E[(U_B^T g ã^T U_A)^2] at every step
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from biascope.arguments import check_count
from biascope.curvature.contract import summed_rows
from biascope.curvature.kronecker import EigenPiece, KroneckerPiece, decompose
from biascope.curvature.plan import Plan
from biascope.curvature.sums import KroneckerSum
from biascope.errors import CorruptError, InputError
from biascope.optim.checks import Finite, check_decay, check_positive
from biascope.optim.hooks import Call, Watcher
from biascope.optim.memory import Curvature, read
from biascope.optim.stacks import Stack, Stacks
from biascope.optim.units import LayerUnit, find_units

Damping = Callable[[LayerUnit], float]


class Shared(TypedDict, total=False):
    """Options that KFAC and EKFAC share, as optimisers and as preconditioners."""

    damping: float
    sharing: Literal["expand", "reduce"]
    sua: bool
    loss_reduction: Literal["mean", "sum"]
    grad_scaler: Any


class Common(Shared, total=False):
    """Options that their preconditioners share."""

    params: Collection[nn.Parameter] | None
    fallback: str


@dataclass(frozen=True)
class Step:
    """One unit in one step: its curvature so far, the calls that the hooks kept, of how many examples, and what makes
    their output gradients those of the individual losses.
    """

    curvature: Curvature
    batches: list[list[Call]]
    examples: int
    scale: float


class Preconditioner:
    """What KFAC and EKFAC share: hooks, factors, refreshes, coverage, state."""

    kind = ""
    damping_modes: tuple[str, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        *,
        damping_mode: str,
        refresh_every: int,
        factors_every: int,
        factor_decay: float,
        damping: float = 1e-3,
        sharing: str = "expand",
        sua: bool = False,
        loss_reduction: str = "mean",
        params: Collection[nn.Parameter] | None = None,
        grad_scaler: Any = None,
        fallback: str = "left as it is",
    ) -> None:
        if damping_mode not in self.damping_modes:
            raise InputError(f"damping_mode={damping_mode!r}: {' or '.join(self.damping_modes)}")
        if loss_reduction not in ("mean", "sum"):
            raise InputError(f"loss_reduction={loss_reduction!r}: mean or sum, as the loss you call backward() on")
        check_positive("damping", damping)
        for name, value in (("refresh_every", refresh_every), ("factors_every", factors_every)):
            check_count(value, name)
        check_decay("factor_decay", factor_decay)
        units, self.left = find_units(model, params, sharing, sua)
        if not units:
            raise InputError(
                f"no layer of {type(model).__name__} has Kronecker factors that could be trained (Linear, "
                "Conv1d/2d/3d, Embedding with requires_grad); use a plain torch optimiser"
            )
        self.units = units
        self.damping, self.damping_mode = damping, damping_mode
        self.refresh_every, self.factors_every, self.factor_decay = refresh_every, factors_every, factor_decay
        self.loss_reduction, self.grad_scaler, self.fallback = loss_reduction, grad_scaler, fallback
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.curvatures = {unit.name: Curvature() for unit in units}
        self.stacks = Stacks()
        self.steps = 0
        self.notes: dict[str, str] = {}
        self.checked = False
        self.asked = loss_reduction == "sum"  # a sum leaves the scale of each loss alone
        self.paired = False  # told that calls of the whole model were taken as of the same examples
        self.told = self.kind != "kfac"  # EKFAC's scalings see the products of inputs and gradients, zero there
        self.watcher = Watcher(model, {u.module: (u.name, u.parameters[0]) for u in reversed(units)})
        self._watch()

    # ---- what a user calls ----

    def precondition(self) -> None:
        """Replace the `.grad` of every covered parameter by the natural gradient; call it between backward and step.

        With a `grad_scaler`, call it after `scaler.unscale_(optimizer)`; gradients that overflowed are left alone.
        """
        scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())
        directions = self.directions(lambda unit: self.damping, scale, skip_overflow=self.grad_scaler is not None)
        for p, d in directions.items():
            assert isinstance(p.grad, Tensor)
            p.grad.copy_(d)

    def coverage(self) -> Plan:
        """A table: every parameter, what steps it, and why.

        Example:
            >>> net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
            >>> from biascope.optim import KFACPreconditioner
            >>> KFACPreconditioner(net).coverage()["0.weight"]
            'kfac'
        """
        rows = []
        covered = {name: unit for unit in self.units for name in unit.names}
        for name, shape in self.shapes.items():
            unit = covered.get(name)
            if unit is not None and unit.name not in self.notes:
                why = f"{unit.rule.kind} rule" + (", SUA" if unit.sua else "")
                rows.append((name, shape, self.kind, why))
            else:
                why = self.left.get(name) or (self.notes[unit.name] if unit else "frozen, or not among the parameters")
                rows.append((name, shape, self.fallback if name in self.left or unit else "-", why))
        return Plan(self.kind, tuple(rows))

    def pieces(self) -> dict[str, EigenPiece]:
        """The metric of every unit as it is used now, by the name of its weight (without damping)."""
        return {name: c.basis for name, c in self.curvatures.items() if c.basis is not None}

    def close(self) -> None:
        """Take the hooks off the model."""
        self.watcher.close()

    def __enter__(self) -> Preconditioner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- one step ----

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
        try:
            units = [u for u in self.units if all(p.grad is not None for p in u.parameters)]
            if not units:
                raise InputError("no covered parameter has a gradient: call loss.backward() before the step")
            finite = Finite({**(plain or {}), **self._gradients(units)})
            due = [u for u in units if self.curvatures[u.name].basis is None or self.steps % self.refresh_every == 0]
            if due and (bad := finite.bad()):  # before anything is decomposed
                return self._refuse(bad, skip_overflow)
            seen = {unit.name: self._look(unit, scale) for unit in units}
            if due and not self.asked:
                self._count_silent(seen)
            if due and not self.told:
                self._count_unheard(seen)
            self._refresh(due, seen)
            new, directions = dict(self.curvatures), dict[Tensor, Tensor]()
            ready = [u for u in units if seen[u.name].curvature.basis is not None and self._ready(seen[u.name])]
            for stack in self._stacks(ready, seen, damping):
                steps = [seen[unit.name] for unit in stack.units]
                V, E = self._natural(stack, steps, stack.gradients())
                directions |= stack.split(V)
                for step, piece in zip(steps, self.stacks.keep(stack, E)):
                    c = step.curvature
                    new[piece.names[0]] = Curvature(piece, c.A, c.B, c.updates)
            if not due and (bad := finite.bad()):  # by now a GPU has all of the step before it
                return self._refuse(bad, skip_overflow)
            if not directions:
                raise InputError(
                    "there are gradients, but no covered layer was seen: was the model in eval() mode, or did the "
                    "forward pass run before this object was made or after it was closed?"
                )
            unseen = {u.name for u in units} - {u.name for u in ready}
            self.notes = dict.fromkeys(unseen, "its module was not called in training mode in the last step")
            for u in self.units:
                missing = [name for name, p in zip(u.names, u.parameters) if p.grad is None]
                if 0 < len(missing) < len(u.names):
                    self.notes[u.name] = f"{missing[0]} had no gradient in the last step, and the factor is of both"
            self.curvatures, self.checked = new, True
            self.steps += 1
            return directions
        finally:
            self.watcher.clear()
            self._watch()

    def _refuse(self, bad: str, skip: bool) -> dict[Tensor, Tensor]:
        if skip:
            return {}
        raise InputError(f"the gradient of {bad} holds NaN or infinity; nothing was changed")

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
        self._same_device(unit)
        old = self.curvatures[unit.name]
        batches = self.watcher.records[unit.module].batches()
        examples = 0
        for batch in batches:
            if batch[0].examples == 0:
                raise InputError(
                    f"{unit.name} was given a batch without examples: skip empty batches; nothing was changed"
                )
            examples += batch[0].examples
        if any(call.input is None for batch in batches for call in batch):
            batches = []
        if not self.paired:
            self._tell_pairs(batches)
        factor = (examples if self.loss_reduction == "mean" else 1) / scale
        if batches and not self.checked:
            self._compare(unit, batches)
        if batches and (old.basis is None or self.steps % self.factors_every == 0):
            old = self._average(unit, batches, old, examples, factor)
        return Step(old, batches, examples, factor)

    def _average(self, unit: LayerUnit, batches: list[list[Call]], old: Curvature, n: int, scale: float) -> Curvature:
        total: KroneckerSum | None = None
        for batch in batches:
            described, chunk = unit.chunk(batch)
            total = total or KroneckerSum(described, unit.space)
            total.add(chunk)
        assert total is not None
        piece = total.finish(n)
        A, B = piece.A, piece.B.mul_(scale**2)
        t = old.updates + 1
        decay = min(self.factor_decay, 1.0 - 1.0 / t)  # the first factors are plain means
        if old.A is None or old.B is None or decay == 0.0:
            return replace(old, A=A, B=B, updates=t)
        return replace(old, A=torch.lerp(A, old.A, decay), B=torch.lerp(B, old.B, decay), updates=t)

    def _refresh(self, due: list[LayerUnit], seen: dict[str, Step]) -> None:
        """New eigenbases, all together."""
        pieces: dict[str, KroneckerPiece] = {}
        for unit in due:
            c = seen[unit.name].curvature
            if c.A is not None and c.B is not None:
                pieces[unit.name] = KroneckerPiece(unit.names, c.B, c.A, unit.layout)
        if not pieces:
            return
        decompose(list(pieces.values()))
        self.stacks = Stacks()
        for name, piece in pieces.items():
            step = seen[name]
            c = replace(step.curvature, basis=self._renewed(step.curvature.basis, piece.eigen))
            seen[name] = replace(step, curvature=replace(c, A=None, B=None) if self.factor_decay == 0.0 else c)

    def _renewed(self, old: EigenPiece | None, new: EigenPiece) -> EigenPiece:
        """The basis to go on with after a refresh."""
        return new

    def _stacks(self, units: list[LayerUnit], seen: dict[str, Step], damping: Damping) -> list[Stack]:
        """Units of the same form that saw equally many examples and are damped alike, together."""
        groups: dict[tuple[float, int, tuple[object, ...]], list[LayerUnit]] = {}
        for unit in units:
            eps = check_positive("damping", damping(unit))
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
        raise AssertionError("a preconditioner turns gradients into natural ones")

    def _needs_factors(self) -> bool:
        due = self.steps % self.factors_every == 0 or self.steps % self.refresh_every == 0
        return due or any(c.basis is None for c in self.curvatures.values())

    def _watch(self) -> None:
        self.watcher.capture = self._needs_factors()

    def _same_device(self, unit: LayerUnit) -> None:
        basis, device = self.curvatures[unit.name].basis, unit.parameters[0].device
        if basis is not None and basis.s.device != device:
            raise InputError(
                f"{unit.name} is on {device}, its curvature on {basis.s.device}: the model was moved after the first "
                "step; load_state_dict(state_dict()) moves the curvature"
            )

    def _compare(self, unit: LayerUnit, batches: list[list[Call]]) -> None:
        """Warn once where the module's calls do not account for its gradient (up to its length: it may be clipped)."""
        G = unit.gradient()
        assert G is not None
        total = torch.zeros_like(G)
        for batch in batches:
            chunk = unit.chunk(batch)[1]
            rows = summed_rows(chunk.factors[unit.names], unit.names)
            total += torch.cat([rows[name] for name in unit.names], -1).T
        cosine = (total * G).sum() / (total.norm() * G.norm()).clamp_min(torch.finfo(G.dtype).tiny)
        if float(G.norm()) > 0 and float(cosine) < 0.95:
            warnings.warn(
                f"the calls of its module explain the gradient of {unit.name} only in part (cosine {float(cosine):.2f})"
                ": the weight is also used elsewhere, or the loss has a penalty; the metric covers the calls alone",
                stacklevel=4,
            )

    def _tell_pairs(self, batches: list[list[Call]]) -> None:
        """Warn once where one backward pass went through several calls of the model with equally many examples."""
        for batch in batches:
            if len({call.turn for call in batch}) > 1:
                self.paired = True
                warnings.warn(
                    f"the model was called several times with {batch[0].examples} examples before one backward(): row "
                    "i of all is taken as one example (a pair, two views); if they are different examples, call the "
                    "model on all of them at once, or backward() for each",
                    stacklevel=5,
                )
                return

    def _count_silent(self, seen: Mapping[str, Step]) -> None:
        """Warn once where whole examples have no gradient in any layer: a mean loss that ignores them is of the others.

        An example that is fitted beyond rounding looks the same, so the scale is left to the user.
        """
        silent: dict[tuple[object, ...], Tensor] = {}  # by backward pass, number of examples and device
        for step in seen.values():
            for i, batch in enumerate(step.batches):
                for call in batch:
                    if call.grad is None:
                        continue
                    rows = call.grad.transpose(0, 1) if call.second else call.grad
                    here = (rows.reshape(call.examples, -1) == 0).all(1)
                    key = i, call.examples, here.device
                    silent[key] = silent[key] & here if key in silent else here
        count, total = sum(int(m.sum()) for m in silent.values()), sum(len(m) for m in silent.values())
        if 0 < count < total:
            self.asked = True
            warnings.warn(
                f"{count} of {total} examples have no gradient: if the loss ignores them (ignore_index, a mask), its "
                "mean is over the others, but the metric takes it as one over all, which makes it too large by "
                f"{total / (total - count):.3g}; leave such examples out of the batch",
                stacklevel=4,
            )

    def _count_unheard(self, seen: Mapping[str, Step]) -> None:
        """Warn once where positions (tokens) of the last layer called have no gradient, whose inputs A counts."""
        kept = [
            (call.order, unit.name, call)
            for unit in self.units
            if isinstance(unit.module, nn.Linear) and unit.name in seen
            for batch in seen[unit.name].batches
            for call in batch
        ]
        _, name, call = max(kept, key=lambda found: found[0], default=(0, "", Call(0, None)))
        if call.grad is None or call.grad[..., 0].numel() <= call.examples:
            return
        silent = (call.grad == 0).all(-1)
        count, total = int(silent.sum()), silent.numel()
        if 0 < count < total:
            self.told = True
            warnings.warn(
                f"{count} of {total} positions at the output of {name} have no gradient: if the loss ignores them "
                "(ignore_index, a mask), KFAC's factors A, of this layer and of those below, still count their inputs; "
                "hand only the positions with labels to this layer, or use EKFAC, whose scalings see only what has a "
                "gradient",
                stacklevel=4,
            )

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers that a resumed training needs, besides the constructor's arguments."""
        units = {name: c.state() for name, c in self.curvatures.items()}
        return {"kind": self.kind, "steps": self.steps, "units": units}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; a state of another kind or another model is refused and changes nothing."""
        self.curvatures, self.steps = self.read_state(state)
        self.checked = self.steps > 0
        self.notes = {}
        self.watcher.clear()
        self._watch()

    def read_state(self, state: Mapping[str, Any]) -> tuple[dict[str, Curvature], int]:
        """The curvatures and the step count of a state, checked against the model."""
        if not isinstance(state, Mapping) or not {"kind", "steps", "units"} <= set(state):
            raise CorruptError(f"not the state of a {self.kind} preconditioner: it needs kind, steps and units")
        if state["kind"] != self.kind:
            raise InputError(f"the state is of kind {state['kind']!r}, this is {self.kind!r}")
        names = {unit.name for unit in self.units}
        if set(state["units"]) != names:
            raise InputError(f"the state covers other parameters: {sorted(names ^ set(state['units']))[:3]} differ")
        return {unit.name: read(unit, state["units"][unit.name]) for unit in self.units}, int(state["steps"])
