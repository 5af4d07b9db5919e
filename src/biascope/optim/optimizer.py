"""KFAC and EKFAC as torch optimisers: `opt = EKFAC(model)`, then train as always.

With a damping, `EKFAC(model, lr=0.1, damping=1e-2)`, one step is what the preconditioner followed by torch.optim.SGD
would do, bit for bit: the natural gradient, plus `weight_decay` times the parameter, through the momentum, times -lr.
Without one, damping and step length adapt (`adaptive`). Parameters that no factor covers are stepped by the plain rule
named in `fallback`; `opt.coverage()` lists them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from biascope.curvature.plan import Plan
from biascope.network.shards import is_sharded
from biascope.optim.adaptive import ADAPTS, FIRST, Adaptive, began
from biascope.optim.layers import Kind
from biascope.optim.preconditioner import Preconditioner
from biascope.optim.team import like, whole
from biascope.support.arguments import check_number
from biascope.support.errors import CorruptError, InputError, UnsupportedError

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None
Fallback = Literal["sgd", "adam"]
Self = TypeVar("Self", bound="NaturalGradient")
State = dict[str, Any]


def sgd(parameters: list[Tensor], d: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
    """As torch.optim.SGD: d + weight_decay p, momentum, a step of -lr."""
    if group["weight_decay"]:
        d = list(torch._foreach_add(d, parameters, alpha=group["weight_decay"]))
    if group["momentum"]:
        moving = [(state["momentum_buffer"], x) for state, x in zip(states, d) if "momentum_buffer" in state]
        if moving:
            buffers, new = map(list, zip(*moving))
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, new)
        for state, x in zip(states, d):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = x.clone()
        d = [state["momentum_buffer"] for state in states]
    torch._foreach_add_(parameters, d, alpha=-float(group["lr"]))


def adam(parameters: list[Tensor], d: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
    """As torch.optim.Adam with betas (0.9, 0.999) and eps 1e-8."""
    if group["weight_decay"]:
        d = list(torch._foreach_add(d, parameters, alpha=group["weight_decay"]))
    for p, state in zip(parameters, states):
        if "step" not in state:  # a covered parameter may have a momentum there
            state |= {
                "step": torch.tensor(0.0, device="cpu"),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        state["step"] += 1
    times = [float(state["step"]) for state in states]
    means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    torch._foreach_lerp_(means, d, 0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, d, d, value=0.001)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1 - 0.999**t) ** 0.5 for t in times])
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(parameters, means, roots, [-float(group["lr"]) / (1 - 0.9**t) for t in times])


RULES: dict[Fallback, Callable[..., None]] = {"sgd": sgd, "adam": adam}


class NaturalGradient(Optimizer):
    """What `KFAC` and `EKFAC` share: groups, the step, state, AMP."""

    _step_supports_amp_scaling = True  # GradScaler then tells the scale, which the output gradients carry too

    def __init__(
        self,
        model: nn.Module,
        make: Callable[..., Preconditioner],
        params: Params,
        lr: float | None,
        momentum: float | None,
        weight_decay: float,
        fallback: Fallback | None,
        damping: float | None,
        kind: Kind,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = {"lr": 0.1, "momentum": 0.0, "damping": damping, "weight_decay": weight_decay}
        if damping is None:
            defaults |= {"lr": 1e-3, "momentum": 0.9, "damping": 1.0, "stretch": FIRST, "trust": 0.0, "length": 0.0}
            if unknown := sorted(set(options) - ADAPTS):
                names = ", ".join(["lr", "momentum", "weight_decay", "fallback", *sorted(ADAPTS)])
                raise InputError(f"{unknown[0]} goes with a damping, if it exists; without one there is {names}")
        defaults |= {name: value for name, value in (("lr", lr), ("momentum", momentum)) if value is not None}
        for name in ("lr", "momentum", "weight_decay"):
            check_number(defaults[name], name, least=0)
        fallback = fallback or ("adam" if damping is None else "sgd")
        super().__init__([p for p in model.parameters() if p.requires_grad] if params is None else params, defaults)
        mine = [p for group in self.param_groups for p in group["params"]]
        if damping is None and any(map(is_sharded, mine)):
            raise UnsupportedError("under FSDP2 no process has the length of a layer's step: give a damping, e.g. 0.01")
        known = {id(p) for p in model.parameters()}
        if strange := [p for p in mine if id(p) not in known]:
            raise InputError(f"a parameter of shape {list(strange[0].shape)} in `params` does not belong to the model")
        self.fallback: Fallback = fallback
        self.preconditioner: Preconditioner
        if damping is None:
            self.preconditioner = Adaptive(model, kind, params=mine, fallback=fallback, **options)
        else:
            self.preconditioner = make(model, params=mine, fallback=fallback, damping=damping, **options)

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
        directions: Collection[Tensor]
        if isinstance(pre, Adaptive):
            directions = pre.advance(self.param_groups, scale, scaled, plain) or ()
        else:
            directions = found = pre.directions(lambda unit: dampings[id(unit.parameters[0])], scale, scaled, plain)
        if not directions:
            return loss
        for group in self.param_groups:
            covered = [p for p in group["params"] if p in directions]
            others = [p for p in group["params"] if p.grad is not None and p not in directions]
            if covered and not isinstance(pre, Adaptive):
                sgd(covered, [found[p] for p in covered], [self.state[p] for p in covered], group)
            if others:
                if isinstance(pre, Adaptive):
                    began(group, others[0].device)
                    group = {**group, "lr": float(group["lr"]) * group["unit"]}
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            f"{type(self).__name__} watches one model and cannot be copied: load its `state_dict()` into a new one"
        )

    def state_dict(self) -> dict[str, Any]:
        """As every torch optimiser's, with the curvature under "curvature".

        It does not depend on the number of processes: what FSDP2 has spread out is put together, for which all ranks
        must make the call.
        """
        found, pre = super().state_dict(), self.preconditioner
        with pre.team:
            found["state"] = {
                i: {k: whole(v, pre.team) if isinstance(v, Tensor) else v for k, v in entry.items()}
                for i, entry in found["state"].items()
            }
        return {**found, "curvature": pre.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; one of another kind or model is refused and changes nothing."""
        if "curvature" not in state_dict:
            raise CorruptError(f"not the state of {type(self).__name__}: it has no 'curvature'")
        self.preconditioner.read_state(state_dict["curvature"])  # refuses before anything is changed
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "curvature"})
        for p, entry in self.state.items():
            for k, v in entry.items():
                entry[k] = like(v, p, self.preconditioner.team) if isinstance(v, Tensor) else v
        self.preconditioner.load_state_dict(state_dict["curvature"])

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
            raise InputError("scaler.unscale_() came before the step and hides the loss scale: pass grad_scaler=scaler")
        return float(scale), True
