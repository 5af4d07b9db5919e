"""KFAC and EKFAC as preconditioners: they turn the gradients of an ordinary `loss.backward()` into natural gradients.

The metric is the second moment of the gradients of the individual losses, with the true labels ("empirical Fisher").
Per layer, with inputs ã (bias: a last 1) and output gradients g of the individual losses:

    A = E[ã ã^T] = U_A S_A U_A^T,   B = E[g g^T] = U_B S_B U_B^T        every `refresh_every` steps
    KFAC:  dW = B^-1 G A^-1, damped
    EKFAC: dW = U_B ((U_B^T G U_A) / (s + damping)) U_A^T,  s = E[(U_B^T g ã^T U_A)^2] at every step
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from biascope.curvature.accumulate import Chunk
from biascope.curvature.contract import summed_rows
from biascope.curvature.kronecker import EigenPiece, Homogeneous, KroneckerPiece
from biascope.curvature.plan import Plan, Unit
from biascope.curvature.sums import KroneckerSum
from biascope.errors import CorruptError, InputError
from biascope.optim.hooks import Watcher
from biascope.optim.units import LayerUnit, find_units

Damping = Callable[[LayerUnit], float]


@dataclass(frozen=True)
class Curvature:
    """What is known of one unit: running averages of the factors, their eigenbasis and the scalings in it."""

    basis: EigenPiece | None = None
    A: Tensor | None = None
    B: Tensor | None = None
    updates: int = 0


class Preconditioner:
    """What KFAC and EKFAC share: hooks, factors, refreshes, coverage, state."""

    kind = ""
    damping_modes: tuple[str, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: float,
        damping_mode: str,
        refresh_every: int,
        factors_every: int,
        factor_decay: float,
        sharing: str,
        sua: bool,
        loss_reduction: str,
        params: Collection[nn.Parameter] | None,
        grad_scaler: Any,
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
            for unit in self.units:
                G = gradients.get(unit.name)
                if G is None:
                    continue
                self._same_device(unit)
                curvature = self._update(unit, G, self.curvatures[unit.name], scale)
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

    def _update(self, unit: LayerUnit, G: Tensor, old: Curvature, scale: float) -> Curvature | None:
        """The unit's curvature after this step; None where nothing is known of it yet."""
        record = self.watcher.records[unit.module]
        calls = record.calls
        seen = bool(calls) and all(call.input is not None for call in calls)
        examples = sum(batch[0].examples for batch in record.batches())
        chunks: list[tuple[Unit, Chunk]] = []
        if seen:
            factor = (examples if self.loss_reduction == "mean" else 1) / scale
            chunks = [unit.chunk(batch, factor) for batch in record.batches()]
            if not self.checked:
                self._compare(unit, chunks, G, examples)
        fresh = old.basis is None
        if (fresh or self.steps % self.factors_every == 0) and seen:
            old = self._average(unit, chunks, old, examples)
        if (fresh or self.steps % self.refresh_every == 0) and old.A is not None and old.B is not None:
            old = self._refresh(unit, chunks, old)
            if self.factor_decay == 0.0:
                old = replace(old, A=None, B=None)
        return self._rescale(unit, chunks, old, G, examples) if old.basis is not None else None

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

    def _refresh(self, unit: LayerUnit, chunks: list[tuple[Unit, Chunk]], c: Curvature) -> Curvature:
        assert c.A is not None
        assert c.B is not None
        return replace(c, basis=KroneckerPiece(unit.names, c.B, c.A, layout_of(unit)).eigen)

    def _rescale(
        self, unit: LayerUnit, chunks: list[tuple[Unit, Chunk]], c: Curvature, G: Tensor, n: int
    ) -> Curvature | None:
        return c

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


def layout_of(unit: LayerUnit) -> Homogeneous:
    """How the unit's parameters and the factors correspond."""
    shape, rule = unit.parameters[0].shape, unit.rule
    if rule.kind == "embedding":
        return Homogeneous(1, shape[1], shape[0], 1, False, True)
    groups = getattr(rule, "groups", 1)
    bias = len(unit.names) == 2
    if rule.kind == "bias":
        return Homogeneous(groups, shape[0] // groups, 1)
    offsets = math.prod(shape[2:])
    if unit.sua and offsets > 1:
        return Homogeneous(groups, shape[0] // groups, shape[1], offsets, bias)
    return Homogeneous(groups, shape[0] // groups, shape[1] * offsets, 1, bias)


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with NaN or infinity; one synchronisation per device where all are finite."""
    devices: dict[torch.device, list[Tensor]] = {}
    for t in tensors.values():
        devices.setdefault(t.device, []).append(t.isfinite().all())
    if all(bool(torch.stack(flags).all()) for flags in devices.values()):
        return None
    return next(name for name, t in tensors.items() if not bool(t.isfinite().all()))


def check_positive(name: str, value: float) -> float:
    """A finite number > 0."""
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name} must be a number > 0, not {value}")
    return float(value)


def check_decay(name: str, value: float) -> float:
    """A number in [0, 1)."""
    if not 0 <= value < 1:
        raise InputError(f"{name} must be at least 0 and below 1, not {value}")
    return float(value)
