"""KFAC and EKFAC as torch optimisers: `opt = EKFAC(model, lr=0.1, damping=1e-2)`, then train as always.

One step is what the preconditioner followed by torch.optim.SGD would do, bit for bit: the natural gradient, plus
`weight_decay` times the parameter, through the momentum, times -lr. Parameters that no factor covers are stepped by the
plain rule named in `fallback`; `opt.coverage()` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from biascope.arguments import as_number
from biascope.curvature.plan import Plan
from biascope.errors import CorruptError, InputError, UnsupportedError
from biascope.optim.checks import as_list, check_positive
from biascope.optim.plain import RULES, sgd
from biascope.optim.preconditioner import Preconditioner

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None
Self = TypeVar("Self", bound="NaturalGradient")


class NaturalGradient(Optimizer):
    """What `KFAC` and `EKFAC` share: groups, the step, state, AMP."""

    _step_supports_amp_scaling = True  # GradScaler then tells the scale, which the output gradients carry too

    def __init__(
        self,
        model: nn.Module,
        make: Callable[..., Preconditioner],
        params: Params,
        lr: float,
        momentum: float,
        weight_decay: float,
        fallback: str,
        **options: Any,
    ) -> None:
        if not isinstance(fallback, str) or fallback not in RULES:
            raise InputError(f"fallback={fallback!r}: {' or '.join(RULES)}")
        check_positive("damping", options["damping"])
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not (as_number(value, name) >= 0 and math.isfinite(value)):
                raise InputError(f"{name} must be at least 0 and finite, not {value}")
        if not isinstance(model, nn.Module):
            raise InputError(
                f"expected an nn.Module, got {type(model).__name__}: optim.{type(self).__name__}(model, ...)"
            )
        chosen: Any = [p for p in model.parameters() if p.requires_grad] if params is None else as_list(params)
        if not chosen:
            raise InputError(f"{type(model).__name__} has no parameters that require gradients")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "damping": options["damping"]}
        super().__init__(chosen, defaults)
        mine = [p for group in self.param_groups for p in group["params"]]
        known = {id(p) for p in model.parameters()}
        if strange := [p for p in mine if id(p) not in known]:
            raise InputError(f"a parameter of shape {list(strange[0].shape)} in `params` does not belong to the model")
        self.fallback = fallback
        self.preconditioner = make(model, params=mine, fallback=fallback, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients of the last `backward()`; nothing changes where an error is raised.

        Returns what `closure` returns (it runs forward and backward), or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if isinstance(loss, Tensor) and not bool(loss.isfinite().all()):
                self.preconditioner.watcher.clear()
                raise InputError(f"the loss is {float(loss)}; nothing was changed")
        pre = self.preconditioner
        scale, scaled = self._loss_scale()
        if scaled and float(self.found_inf) > 0:  # type: ignore[attr-defined]
            pre.watcher.clear()
            return loss
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if scaled and self.grad_scale is not None:  # type: ignore[attr-defined]
            torch._foreach_div_([p.grad for p in parameters], scale)
        dampings = {id(p): float(g["damping"]) for g in self.param_groups for p in g["params"]}
        plain = {name: p.grad for p in parameters if (name := pre.names[id(p)]) in pre.left and p.grad is not None}
        directions = pre.directions(lambda unit: dampings[id(unit.parameters[0])], scale, scaled, plain)
        if not directions:
            return loss
        for group in self.param_groups:
            covered = [p for p in group["params"] if p in directions]
            others = [p for p in group["params"] if p.grad is not None and p not in directions]
            if covered:
                sgd(covered, [directions[p] for p in covered], [self.state[p] for p in covered], group)
            if others:
                RULES[self.fallback](others, [p.grad for p in others], [self.state[p] for p in others], group)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what the hooks saw of the batches behind them."""
        super().zero_grad(set_to_none)
        self.preconditioner.watcher.clear()

    def coverage(self) -> Plan:
        """A table: every parameter, the rule that steps it, and why."""
        return self.preconditioner.coverage()

    def close(self) -> None:
        """Take the hooks off the model; the optimiser steps no more."""
        self.preconditioner.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            f"{type(self).__name__} watches one model and cannot be copied: copy or save `state_dict()`, build a new "
            "one on the other model, and load it there"
        )

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """As every torch optimiser's, with the curvature under "curvature"."""
        return {**super().state_dict(), "curvature": self.preconditioner.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; one of another kind or model is refused and changes nothing."""
        if "curvature" not in state_dict:
            raise CorruptError(f"not the state of {type(self).__name__}: it has no 'curvature'")
        self.preconditioner.read_state(state_dict["curvature"])  # refuses before anything is changed
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "curvature"})
        self.preconditioner.load_state_dict(state_dict["curvature"])

    # ---- inside ----

    def _loss_scale(self) -> tuple[float, bool]:
        """What the loss was multiplied with, and whether a GradScaler is at work."""
        scaled = getattr(self, "found_inf", None) is not None
        scaler = self.preconditioner.grad_scaler
        if scaler is not None:
            return float(scaler.get_scale()), scaled
        if not scaled:
            return 1.0, False
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            raise InputError(
                "scaler.unscale_() was called before the step, so that the loss scale is no longer known: pass "
                f"grad_scaler=scaler to {type(self).__name__}"
            )
        return float(scale), True
