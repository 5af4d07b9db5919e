"""f around the expansion point for one call: its value, J v and J^T u, by whichever of torch's modes is right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from biascope.network.derivatives import differentiable_attention, plain_containers, right_gradients
from biascope.network.door import no_reentrant_checkpoints
from biascope.network.functional import Params
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.precision import without_cudnn
from biascope.tangent.anchored import copies, swapped_in, versions
from biascope.tangent.dual import evaluate_dual
from biascope.tangent.norms import Norms

if TYPE_CHECKING:
    from biascope.tangent.linearized import Linearized

_NO_HOOKS = (
    "a network with activation checkpoints (or other hooks on saved tensors) runs again in the backward pass, when its "
    "parameters are no longer those of the expansion point: use linearize(engine='vjp') and detach the inputs"
)


class Expansion:
    """f around the expansion point for one call's inputs: value, J v and J^T u."""

    def __init__(self, lin: Linearized, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: Any) -> None:
        self.skeleton: nn.Module = lin._skeleton
        self.point, self.origin, self.names = lin.point, lin.origin, lin.linearized
        self.centred, self.args, self.kwargs, self.autocast = lin.centred, args, kwargs, autocast
        self.slots, self.lin = lin._slots, lin
        self.copied, self.written = lin._writes, False  # f gets copies of the inputs; f has changed what it got
        self.rebuild: Callable[[Sequence[Tensor]], Any] = tuple

    def f(self, params: Params) -> list[Tensor]:
        """Floating-point tensors of what the network returns."""
        # the mode costs launches; only CPUs misread gradients, but forward mode sees padding rows everywhere
        on_cpu = self.point[self.names[0]].device.type == "cpu"
        args, kwargs = copies((self.args, self.kwargs)) if self.copied else (self.args, self.kwargs)
        before = versions((args, kwargs))
        right = right_gradients() if on_cpu or self.is_padded() else nullcontext()
        with self.at(params), right, plain_containers(self.skeleton):
            out = self.skeleton(*args, **kwargs)
        self.written |= versions((args, kwargs)) != before
        tensors, self.rebuild = unpacked(out, type(self.skeleton).__name__)
        return tensors

    def is_padded(self) -> bool:
        """Does a table of the network have a padding row, which has no gradient?"""
        return any(getattr(part, "padding_idx", None) is not None for part in self.skeleton.modules())

    def at(self, params: Params) -> AbstractContextManager[None]:
        """The network at the expansion point, with these parameters in it; derivatives must be taken inside as well.

        A network with activation checkpoints runs parts of itself again then.
        """
        return swapped_in(self.slots, {**self.point, **params})

    def cut(self, n: int) -> Expansion:
        """The same for the first n examples, if the examples come first in every input."""
        tensors = [t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor) and t.dim()]
        if not tensors:
            return self
        size = tensors[0].shape[0]
        less = copy.copy(self)
        less.args, less.kwargs = pytree.tree_map(
            lambda t: t[:n] if isinstance(t, Tensor) and t.dim() and t.shape[0] == size else t, (self.args, self.kwargs)
        )
        return less

    def displaced(self, theta: Sequence[Tensor]) -> Params:
        """Parameters minus those of the start."""
        start = [self.origin[k] for k in self.names]
        if torch._C._are_functorch_transforms_active():
            return {k: p - p0 for k, p, p0 in zip(self.names, theta, start)}
        return dict(zip(self.names, torch._foreach_sub(list(theta), start)))

    def value(self, v: Params, forward_mode: str) -> list[Tensor]:
        """f + J v, or J v, for every output."""
        f0, Jv = self.jvp(v, forward_mode) if forward_mode else self.jvp_by_double_backward(v)
        return Jv if self.centred else [a + b for a, b in zip(f0, Jv)]

    def jvp(self, v: Params, forward_mode: str) -> tuple[list[Tensor], list[Tensor]]:
        """f and J v by forward mode: "by hand" where that was asked for and no gradient is wanted, else torch's."""
        at = {k: self.point[k] for k in self.names}
        with differentiable_attention():
            if torch._C._are_functorch_transforms_active():  # dual levels do not nest in torch.func's
                both: Any = torch.func.jvp(lambda p: tuple(self.f(p)), (at,), (v,))
                return list(both[0]), list(both[1])
            if torch.is_grad_enabled():  # the graph will outlive `at`
                try:
                    with torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS):
                        return evaluate_dual(self.f, at, v, by_hand=False)
                except RuntimeError as problem:
                    if _NO_HOOKS not in str(problem):
                        raise
                    raise UnsupportedError(_NO_HOOKS) from problem
            if forward_mode != "by hand":
                return evaluate_dual(self.f, at, v, by_hand=False)
            if self.lin._norms is None:
                self.lin._norms = Norms(self.skeleton, self.point)
            return evaluate_dual(self.f, at, v, norms=self.lin._norms.maps(v))

    def jvp_by_double_backward(self, v: Params) -> tuple[list[Tensor], list[Tensor]]:
        """J v = d/du <J^T u, v>, since J^T u is linear in u."""
        leaves = self._leaves(self.names)
        with torch.enable_grad(), differentiable_attention(), without_cudnn(), self.at(leaves):
            f0 = self.f(leaves)
            us = [torch.zeros_like(out, requires_grad=True) for out in f0]
            try:
                back = _grad(f0, list(leaves.values()), us, True)
                inner = torch.stack([(g * v[k]).sum() for k, g in zip(self.names, back)]).sum()
                Jv = _grad([inner], us, None, False)
            except (NotImplementedError, RuntimeError) as problem:
                lacks = f"{type(self.skeleton).__name__} has neither a forward-mode nor a second derivative in torch"
                raise UnsupportedError(f"{lacks}: {str(problem).splitlines()[0]}") from problem
        return [out.detach() for out in f0], [t.detach() for t in Jv]

    def vjp(self, us: Sequence[Tensor], names: Sequence[str]) -> tuple[Tensor, ...]:
        """J^T u at the expansion point, for some parameters; differentiable in u where asked."""
        again = torch.is_grad_enabled()
        leaves = self._leaves(names)
        with torch.enable_grad(), torch.autocast(*self.autocast), self.at(leaves):  # the forward pass's precision
            outs = self.f(leaves)
            some = [i for i, out in enumerate(outs) if out.requires_grad]
            if not some:
                return tuple(torch.zeros_like(t) for t in leaves.values())
            return _grad([outs[i] for i in some], list(leaves.values()), [us[i] for i in some], again)

    def _leaves(self, names: Sequence[str]) -> Params:
        return {k: self.point[k].detach().requires_grad_() for k in names}


class Tangent(torch.autograd.Function):
    """Forward: f + J v, computed before without a graph. Backward: J^T u by a plain pass at the expansion point."""

    @staticmethod
    def forward(ctx: Any, here: Expansion, outs: list[Tensor], *theta: Tensor) -> tuple[Tensor, ...]:
        """What was computed."""
        ctx.here, ctx.versions = here, versions((here.args, here.kwargs))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *us: Tensor) -> tuple[Tensor | None, ...]:
        """J^T u for the parameters that need it."""
        here: Expansion = ctx.here
        if versions((here.args, here.kwargs)) != ctx.versions:
            when = "changed in place between the forward and the backward pass, which reads it again"
            raise InputError(f"an input was {when}: pass a copy, lin(x.clone()), or change it after backward()")
        wanted = [k for k, need in zip(here.names, ctx.needs_input_grad[2:]) if need]
        grads = dict(zip(wanted, here.vjp(us, wanted)))
        return (None, None, *(grads.get(k) for k in here.names))


def adjoint(here: Expansion) -> tuple[str, bool]:
    """Which forward mode has <u, J v> = <J^T u, v> for random u and v: "by hand", "torch" or "" for neither.

    And whether the network changes its inputs in place: here it gets copies, so that what is asked about is left alone.
    On two examples where the inputs can be cut, else on all. Values lose their tangents by hand where a network leaves
    torch's public functions (an autograd.Function of its own); then torch's mode is the one that agrees.
    """
    gen = torch.Generator().manual_seed(0)
    here = copy.copy(here)
    here.copied = True

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=gen, dtype=torch.float64, device="cpu").to(t)

    def products(here: Expansion) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        with no_reentrant_checkpoints():
            us = [noise(t) for t in here.f({})]
            return us, here.vjp(us, here.names)

    with torch.no_grad():
        cut = here.cut(2)
        try:
            us, back = products(cut)
        except Exception:  # not all inputs have the examples first
            cut = here
            us, back = products(cut)  # bad inputs raise here
        v = {k: noise(here.point[k]) for k in here.names}
        terms = torch.stack([(g * v[k]).double().sum() for k, g in zip(here.names, back)])
        for mode in ("by hand", "torch"):
            try:
                Jv = cut.jvp(v, mode)[1]
            except (NotImplementedError, RuntimeError, TypeError):
                continue
            left = torch.stack([(u * t).double().sum() for u, t in zip(us, Jv)]).sum()
            eps = max(torch.finfo(t.dtype).eps for t in Jv)
            if left.device.type == "cuda":
                eps = max(eps, 1e-6)  # tf32 convolutions are on by default
            # a disagreement is of order 1, far above rounding
            if (left - terms.sum()).abs() <= min(1e4 * eps, 0.1) * (terms.norm() + left.abs()):
                return mode, cut.written
        return "", cut.written


def unpacked(out: Any, who: str, done: str = "linearised") -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The floating-point tensors inside what a network returned, and how to put others in their place."""
    leaves, spec = pytree.tree_flatten(out)
    if is_dataclass(out) and not isinstance(out, type) and leaves and leaves[0] is out:  # torch does not look into them
        inside, put = unpacked({f.name: getattr(out, f.name) for f in fields(out) if f.init}, who, done)
        return inside, lambda tensors: replace(out, **put(tensors))
    where = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
    for t in leaves:
        if isinstance(t, Tensor) and t.is_floating_point() and t.dim() == 0:
            fix = "leave the labels out and compute the loss from the outputs"
            raise InputError(f"{who} returned a scalar, which looks like a loss: a loss must not be {done}; {fix}")
        if not isinstance(t, Tensor | int | float | str | None):
            fix = "switch it off (for a cache: use_cache=False) or wrap the model so that it returns tensors"
            raise UnsupportedError(f"{who} returned a {type(t).__name__}, which cannot be {done}; {fix}")
    if not where:
        raise InputError(f"{who} returned no floating-point tensor: there is nothing to be {done}")

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        new = list(leaves)
        for i, t in zip(where, tensors):
            new[i] = t
        return pytree.tree_unflatten(new, spec)

    return [leaves[i] for i in where], rebuild


def autocast_state(device: torch.device) -> tuple[str, torch.dtype, bool]:
    """The precision in force: device type, dtype, whether it is on."""
    kind = device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def _grad(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], us: Sequence[Tensor] | None, again: bool
) -> tuple[Tensor, ...]:
    """`torch.autograd.grad` with zeros for what does not matter; differentiable if asked for `again`."""
    return torch.autograd.grad(outs, inputs, us, again, again, allow_unused=True, materialize_grads=True)
