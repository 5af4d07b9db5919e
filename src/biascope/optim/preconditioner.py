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

from biascope.curvature.accumulate import Chunk
from biascope.curvature.contract import summed_rows
from biascope.curvature.kronecker import EigenPiece, KroneckerPiece, decompose
from biascope.curvature.plan import Plan, Unit
from biascope.curvature.sums import KroneckerSum
from biascope.errors import CorruptError, InputError
from biascope.optim.checks import check_decay, check_positive, first_not_finite
from biascope.optim.hooks import Watcher
from biascope.optim.units import LayerUnit, find_units, layout_of

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
class Curvature:
    """What is known of one unit: running averages of the factors, their eigenbasis and the scalings in it."""

    basis: EigenPiece | None = None
    A: Tensor | None = None
    B: Tensor | None = None
    updates: int = 0


@dataclass(frozen=True)
class Step:
    """One unit in one step: its curvature so far, what the hooks saw, of how many examples."""

    curvature: Curvature
    chunks: list[tuple[Unit, Chunk]]
    examples: int


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
        if loss_reduction not in {"mean", "sum"}:
            raise InputError(f"loss_reduction={loss_reduction!r}: mean or sum, as the loss you call backward() on")
        check_positive("damping", damping)
        for name, value in (("refresh_every", refresh_every), ("factors_every", factors_every)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
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
        self.steps = 0
        self.notes: dict[str, str] = {}
        self.checked = False
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

    def directions(self, damping: Damping, scale: float = 1.0, skip_overflow: bool = False) -> dict[Tensor, Tensor]:
        """{parameter: natural gradient} from the `.grad`s and what the hooks saw; changes no gradient.

        `scale` is what the loss was multiplied with before `backward()` (the `.grad`s are taken as unscaled already).
        Either everything is computed and the state moves on, or an error is raised and the state is as before.
        """
        try:
            gradients = {u.name: g for u in self.units if (g := u.gradient()) is not None}
            if not gradients:
                raise InputError("no covered parameter has a gradient: call loss.backward() before the step")
            if bad := self._not_finite(gradients):
                if skip_overflow:
                    return {}
                raise InputError(f"the gradient of {bad} holds NaN or infinity; nothing was changed")
            new, notes = dict(self.curvatures), dict[str, str]()
            directions: dict[Tensor, Tensor] = {}
            seen = {u.name: self._look(u, gradients[u.name], scale) for u in self.units if u.name in gradients}
            self._refresh([u for u in self.units if u.name in seen], seen)
            for unit in self.units:
                if unit.name not in seen:
                    continue
                G, step = gradients[unit.name], seen[unit.name]
                curvature = None if step.curvature.basis is None else self._rescale(unit, step, G)
                if curvature is None or curvature.basis is None:
                    notes[unit.name] = "its module was not called in training mode in the last step"
                    continue
                eps = check_positive("damping", damping(unit))
                new[unit.name] = curvature
                directions |= dict(zip(unit.parameters, unit.split(self._solve(unit, curvature, G, eps))))
            if not directions:
                raise InputError(
                    "there are gradients, but no covered layer was seen: was the model in eval() mode, or did the "
                    "forward pass run before this object was made or after it was closed?"
                )
            self.curvatures, self.notes, self.checked = new, notes, True
            self.steps += 1
            return directions
        finally:
            self.watcher.clear()
            self._watch()

    def _look(self, unit: LayerUnit, G: Tensor, scale: float) -> Step:
        """What the hooks saw of a unit, and its factors after this step."""
        self._same_device(unit)
        old = self.curvatures[unit.name]
        record = self.watcher.records[unit.module]
        calls, batches = record.calls, record.batches()
        if any(call.examples == 0 for call in calls):
            raise InputError(f"{unit.name} was given a batch without examples: skip empty batches; nothing was changed")
        examples = sum(batch[0].examples for batch in batches)
        chunks: list[tuple[Unit, Chunk]] = []
        if calls and all(call.input is not None for call in calls):
            factor = (examples if self.loss_reduction == "mean" else 1) / scale
            chunks = [unit.chunk(batch, factor) for batch in batches]
            if not self.checked:
                self._compare(unit, chunks, G, examples)
            if old.basis is None or self.steps % self.factors_every == 0:
                old = self._average(unit, chunks, old, examples)
        return Step(old, chunks, examples)

    def _average(self, unit: LayerUnit, chunks: list[tuple[Unit, Chunk]], old: Curvature, n: int) -> Curvature:
        total = KroneckerSum(chunks[0][0], unit.space)
        for _, chunk in chunks:
            total.add(chunk)
        piece = total.finish(n)
        t = old.updates + 1
        decay = min(self.factor_decay, 1.0 - 1.0 / t)  # the first factors are plain means
        if old.A is None or old.B is None or decay == 0.0:
            return replace(old, A=piece.A, B=piece.B, updates=t)
        return replace(old, A=decay * old.A + (1 - decay) * piece.A, B=decay * old.B + (1 - decay) * piece.B, updates=t)

    def _refresh(self, units: list[LayerUnit], seen: dict[str, Step]) -> None:
        """New eigenbases where they are due, all together."""
        pieces: dict[str, KroneckerPiece] = {}
        for unit in units:
            c = seen[unit.name].curvature
            if (c.basis is None or self.steps % self.refresh_every == 0) and c.A is not None and c.B is not None:
                pieces[unit.name] = KroneckerPiece(unit.names, c.B, c.A, layout_of(unit))
        decompose(list(pieces.values()))
        for name, piece in pieces.items():
            step = seen[name]
            c = replace(step.curvature, basis=self._renewed(step.curvature.basis, piece.eigen))
            seen[name] = replace(step, curvature=replace(c, A=None, B=None) if self.factor_decay == 0.0 else c)

    def _renewed(self, old: EigenPiece | None, new: EigenPiece) -> EigenPiece:
        """The basis to go on with after a refresh."""
        return new

    def _rescale(self, unit: LayerUnit, step: Step, G: Tensor) -> Curvature | None:
        return step.curvature

    def _solve(self, unit: LayerUnit, c: Curvature, G: Tensor, damping: float) -> Tensor:
        raise AssertionError("a preconditioner solves")

    def _needs_factors(self) -> bool:
        due = self.steps % self.factors_every == 0 or self.steps % self.refresh_every == 0
        return due or any(c.basis is None for c in self.curvatures.values())

    def _watch(self) -> None:
        self.watcher.capture = self._needs_factors()

    def _not_finite(self, gradients: Mapping[str, Tensor]) -> str | None:
        tensors = dict(gradients)
        for unit in self.units:
            for i, call in enumerate(self.watcher.records[unit.module].calls):
                if call.grad is not None:
                    tensors[f"the output of {unit.name} (call {i + 1})"] = call.grad
        return first_not_finite(tensors)

    def _same_device(self, unit: LayerUnit) -> None:
        basis, device = self.curvatures[unit.name].basis, unit.space.device
        if basis is not None and basis.s.device != device:
            raise InputError(
                f"{unit.name} is on {device}, its curvature on {basis.s.device}: the model was moved after the first "
                "step; load_state_dict(state_dict()) moves the curvature"
            )

    def _compare(self, unit: LayerUnit, chunks: list[tuple[Unit, Chunk]], G: Tensor, n: int) -> None:
        """Warn once where the module's calls do not account for its gradient (up to its length: it may be clipped)."""
        total = torch.zeros_like(G)
        for _, chunk in chunks:
            rows = summed_rows(chunk.factors[unit.names], unit.names)
            total += torch.cat([rows[name] for name in unit.names], -1).T
        cosine = (total * G).sum() / (total.norm() * G.norm()).clamp_min(torch.finfo(G.dtype).tiny)
        if float(G.norm()) > 0 and float(cosine) < 0.95:
            warnings.warn(
                f"the calls of its module explain the gradient of {unit.name} only in part (cosine {float(cosine):.2f})"
                ": the weight is also used elsewhere, or the loss has a penalty; the metric covers the calls alone",
                stacklevel=4,
            )

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers that a resumed training needs, besides the constructor's arguments."""
        units: dict[str, dict[str, Any]] = {}
        for name, c in self.curvatures.items():
            entry: dict[str, Any] = {"updates": c.updates, "A": c.A, "B": c.B}
            units[name] = entry | ({} if c.basis is None else c.basis.arrays())
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
        return {unit.name: self._read(unit, state["units"][unit.name]) for unit in self.units}, int(state["steps"])

    def _read(self, unit: LayerUnit, entry: Mapping[str, Any]) -> Curvature:
        layout, space = layout_of(unit), unit.space
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
