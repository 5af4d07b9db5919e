"""The tangent model f_lin(x; theta) = f(x; theta0) + J(x) (theta - theta0) as a real nn.Module.

Cost, in multiples of plain ResNet-18 (batch 32, CPU seconds of one core; `python benchmarks/linearize.py --threads 1`):
forward 2.9; training step 1.9 in time and 1.2 in memory with engine="vjp", 1.6 and 1.8 with "jvp". Every product W x
becomes three (W0 x0, W0 dx, dW x0), which is the least an exact derivative needs, so a forward pass bound by
multiplications costs about 3. One bound by launches costs about as many times more as it has kernels: 2.1 (`dual.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from biascope.errors import InputError, UnsupportedError
from biascope.functional import Params, ParamSelection, differentiable_attention, refuse_batch_dependence, select_params
from biascope.linearize.anchored import Anchored, Slot, State, hung, slots, state_of
from biascope.linearize.dual import evaluate_dual
from biascope.linearize.norms import Norms

_NO_HOOKS = (
    "a network with activation checkpoints (or other hooks on saved tensors) runs again in the backward pass, when its "
    "parameters are no longer those of the expansion point: use linearize(engine='vjp') and detach the inputs"
)


def linearize(
    model: nn.Module,
    at: State | None = None,
    *,
    centred: bool = False,
    params: ParamSelection = None,
    engine: str = "vjp",
) -> Linearized:
    """Linearise a network in its parameters: f(x; theta0) + J(x) (theta - theta0), trainable in theta.

    The result has the parameter and buffer names and the state_dict of `model` and takes and returns what `model` does
    (several inputs, keywords, tuples, Hugging Face outputs: every floating-point tensor in it is linearised). theta0
    are the parameters of `model` now. Buffers belong to the expansion point: they keep their present values whatever
    state is loaded, so BatchNorm uses its present running statistics. The model must be in eval mode where that
    matters (BatchNorm, dropout), and is not changed.

    Args:
        model: any nn.Module.
        at: expand at another state (a module or a state dict; with its buffers, if it has them), the displacement still
            counted from the parameters of `model`: f(x; at) + J(x; at) (theta - theta0). With `centred=True` this is
            the kernel swap: train from zero with the kernel of a later checkpoint.
        centred: leave f(x; theta0) out: J(x) (theta - theta0), which starts at zero.
        params: which parameters are linearised, None for those with requires_grad (see
            `bs.functional.functional`). The others are constants.
        engine: how gradients are computed. "vjp": J(x)^T u by one more plain pass at theta0. "jvp": autograd through
            the forward-mode derivative (also used where an input needs a gradient). The numbers are the same.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> lin, x = linearize(net), torch.ones(5, 3)
        >>> torch.equal(lin(x), net(x)), list(lin.state_dict()) == list(net.state_dict())
        (True, True)
    """
    return Linearized(getattr(model, "_orig_mod", model), at, centred, params, engine)


def posthoc(model: nn.Module, finetuned: State, **options: Any) -> Linearized:
    """Linearise `model` and move it to the parameters of a separately fine-tuned copy (post-hoc linearisation).

    `finetuned` is a module or a state dict with at least the linearised parameters of `model`; its buffers are ignored.
    `options` go to `linearize`.

    Example:
        >>> net, tuned = nn.Linear(3, 2), nn.Linear(3, 2)
        >>> torch.allclose(posthoc(net, tuned)(torch.eye(3)), tuned(torch.eye(3)), atol=1e-6)  # a linear model
        True
    """
    lin = linearize(model, **options)
    own = dict(lin.named_parameters())
    new = state_of(finetuned, {k: p.detach() for k, p in own.items()}, "finetuned")
    for k in lin.linearized:
        if k not in new:
            raise InputError(f"finetuned: no parameter is called {k!r}")
    lin.load_state_dict({**lin.state_dict(), **new})
    return lin


class Linearized(Anchored):
    """What `linearize` returns. `linearized` names the parameters in which the network is linear."""

    _forward_mode: dict[tuple[Any, ...], str]
    _slots: list[Slot]
    _layers: list[nn.Module]
    _norms: Norms | None

    def __init__(self, model: nn.Module, at: State | None, centred: bool, params: ParamSelection, engine: str) -> None:
        super().__init__(model)
        if engine not in {"vjp", "jvp"}:
            raise InputError(f"engine={engine!r} is not known; choose 'vjp' or 'jvp'")
        self.engine, self.centred = engine, centred
        self.linearized = tuple(select_params(dict(self.named_parameters()), params))
        point = self.origin
        if at is not None:
            moved = state_of(at, point, "at")
            missing = [k for k in self.linearized if k not in moved]
            if missing:
                raise InputError(f"at: no parameter is called {missing[0]!r}")
            point = {**point, **moved}
        self._frozen["point"] = dict(point)
        self.__dict__["_forward_mode"] = {}  # kind of call -> which one agrees with training's gradient
        # searched once: looking for them in every call takes Python longer than a GPU takes for a few layers
        self.__dict__["_slots"], self.__dict__["_layers"] = slots(self._skeleton), list(self._skeleton.modules())
        self._norms = None
        for name, p in self.named_parameters():
            p.requires_grad_(p.requires_grad or (params is not None and name in self.linearized))
            if name not in self.linearized:
                p.requires_grad_(False)
        self.register_load_state_dict_post_hook(_refuse_moved_constants)  # type: ignore[no-untyped-call]

    @property
    def point(self) -> Params:
        """Parameters and buffers at which the network is expanded, {name: tensor}."""
        return self._frozen["point"]

    def synchronize(self, src: int = 0) -> None:
        """Give every process the frozen state of process `src`; see `Anchored.synchronize`."""
        super().synchronize(src)
        self._norms = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_norms": None}  # it knows layers by their addresses

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linearized:
        self._norms = None
        super()._apply(fn, recurse)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns for these inputs, linearised."""
        return self._evaluate(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo cannot trace dual levels: eager here
    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_inference_mode_enabled():  # torch loses tangents in it, silently
            with torch.inference_mode(False), torch.no_grad():
                return self._evaluate(*pytree.tree_map_only(Tensor, torch.clone, (args, kwargs)))
        if any(m.training for m in self._layers):
            refuse_batch_dependence(self._skeleton)
        theta = {name: table[key] for table, key, name in self._slots}
        chosen = [theta.pop(k) for k in self.linearized]
        for name, p in theta.items():
            if p.requires_grad:
                raise InputError(
                    f"'{name}' requires a gradient but is not linearised: name it in linearize(params=...)"
                )
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        device = chosen[0].device
        for t in tensors:
            if t.device != device and t.dim():
                raise InputError(f"an input is on {t.device}, the linearised network on {device}: move one of them")
        here = _Expansion(self, args, kwargs, _autocast_state(device))
        forward_mode = self._forward_is_adjoint(here, leaves)
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in chosen)
        through = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if through and not forward_mode:
            raise UnsupportedError(
                f"an input requires a gradient, but {type(self._skeleton).__name__} has no forward-mode derivative "
                "that agrees with its training gradient; detach the input"
            )
        transformed = torch._C._are_functorch_transforms_active()
        if trains and not through and not transformed and (self.engine == "vjp" or not forward_mode):
            with torch.no_grad():  # here, since inside a Function forward mode is switched off
                outs = here.value(here.displaced(chosen), forward_mode)
            outs = _Tangent.apply(here, outs, *chosen)  # type: ignore[no-untyped-call]
        else:
            with torch.set_grad_enabled(trains or through or (transformed and torch.is_grad_enabled())):
                outs = here.value(here.displaced(chosen), forward_mode)
        return here.rebuild(outs)

    def _forward_is_adjoint(self, here: _Expansion, leaves: Sequence[Any]) -> str:
        """The fastest forward mode with <u, J v> = <J^T u, v>, or none.

        Tried once per precision, device and kind of call: a flag, a name or an input more may lead a network into code
        that it did not pass before. Numbers do not count, for they may differ in every call.
        """
        first = here.point[self.linearized[0]]
        precision = (first.device, first.dtype, here.autocast)
        flags = tuple(a for a in leaves if isinstance(a, bool | str | None))
        ranks = tuple(t.dim() for t in leaves if isinstance(t, Tensor))
        key = (precision, len(here.args), *here.kwargs, flags, ranks)
        if key not in self._forward_mode:
            if torch._C._are_functorch_transforms_active():  # no place for a trial: as in the calls before
                known = [mode for other, mode in self._forward_mode.items() if other[0] == precision]
                if not known:
                    raise UnsupportedError(
                        "the first call of a linearised network must not be inside torch.func: call it once before, "
                        "on the same device and in the same precision, so that its forward mode can be tried"
                    )
                return known[-1]
            self._forward_mode[key] = _adjoint(here)
        return self._forward_mode[key]


def _refuse_moved_constants(lin: Any, _: Any) -> None:
    """A loaded state must not move a parameter that is not linearised: it would have no effect."""
    for k, p in lin.named_parameters():
        if k not in lin.linearized and not torch.equal(p.detach(), lin.origin[k]):
            raise InputError(f"the loaded state moves '{k}', which is not linearised: name it in linearize(params=...)")


class _Expansion:
    """f around the expansion point for one call's inputs: value, J v and J^T u."""

    def __init__(self, lin: Linearized, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: Any) -> None:
        self.skeleton: nn.Module = lin._skeleton
        self.point, self.origin, self.names = lin.point, lin.origin, lin.linearized
        self.centred, self.args, self.kwargs, self.autocast = lin.centred, args, kwargs, autocast
        self.slots, self.lin = lin._slots, lin
        self.rebuild: Callable[[Sequence[Tensor]], Any] = tuple

    def f(self, params: Params) -> list[Tensor]:
        """Floating-point tensors of what the network returns."""
        with self.at(params):
            out = self.skeleton(*self.args, **self.kwargs)
        tensors, self.rebuild = _open(out, type(self.skeleton).__name__)
        return tensors

    def at(self, params: Params) -> AbstractContextManager[None]:
        """The network at the expansion point, with these parameters in it.

        Derivatives must be taken inside as well: a network with activation checkpoints runs parts of itself again then.
        """
        return hung(self.slots, {**self.point, **params})

    def cut(self, n: int) -> _Expansion:
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
        with (
            torch.enable_grad(),
            differentiable_attention(),
            torch.backends.cudnn.flags(enabled=False),
            self.at(leaves),
        ):
            f0 = self.f(leaves)
            us = [torch.zeros_like(out, requires_grad=True) for out in f0]
            try:
                back = torch.autograd.grad(
                    f0, list(leaves.values()), us, True, True, allow_unused=True, materialize_grads=True
                )
                inner = torch.stack([(g * v[k]).sum() for k, g in zip(self.names, back)]).sum()
                Jv = torch.autograd.grad(inner, us, allow_unused=True, materialize_grads=True)
            except (NotImplementedError, RuntimeError) as problem:
                raise UnsupportedError(
                    f"{type(self.skeleton).__name__} has neither a forward-mode nor a second derivative in torch, so "
                    f"it cannot be linearised: {str(problem).splitlines()[0]}"
                ) from problem
        return [out.detach() for out in f0], [t.detach() for t in Jv]

    def vjp(self, us: Sequence[Tensor], names: Sequence[str]) -> tuple[Tensor, ...]:
        """J^T u at the expansion point, for some parameters; differentiable in u where asked."""
        again = torch.is_grad_enabled()
        leaves = self._leaves(names)
        with torch.enable_grad(), _autocast(self.autocast), self.at(leaves):
            outs = self.f(leaves)
            some = [i for i, out in enumerate(outs) if out.requires_grad]
            if not some:
                return tuple(torch.zeros_like(t) for t in leaves.values())
            return torch.autograd.grad(
                [outs[i] for i in some],
                list(leaves.values()),
                [us[i] for i in some],
                again,
                again,
                allow_unused=True,
                materialize_grads=True,
            )

    def _leaves(self, names: Sequence[str]) -> Params:
        return {k: self.point[k].detach().requires_grad_() for k in names}


class _Tangent(torch.autograd.Function):
    """Forward: f + J v, computed before without a graph. Backward: J^T u by a plain pass at the expansion point."""

    @staticmethod
    def forward(ctx: Any, here: _Expansion, outs: list[Tensor], *theta: Tensor) -> tuple[Tensor, ...]:
        ctx.here = here
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *us: Tensor) -> tuple[Tensor | None, ...]:
        here: _Expansion = ctx.here
        wanted = [k for k, need in zip(here.names, ctx.needs_input_grad[2:]) if need]
        grads = dict(zip(wanted, here.vjp(us, wanted)))
        return (None, None, *(grads.get(k) for k in here.names))


def _adjoint(here: _Expansion) -> str:
    """Which forward mode has <u, J v> = <J^T u, v> for random u and v: "by hand", "torch" or "" for neither.

    On two examples where the inputs can be cut, else on all. Values lose their tangents by hand where a network leaves
    torch's public functions (an autograd.Function of its own); then torch's mode is the one that agrees.
    """
    gen = torch.Generator().manual_seed(0)

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=gen, dtype=torch.float64).to(t)

    def products(here: _Expansion) -> tuple[list[Tensor], tuple[Tensor, ...]]:
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
            # a disagreement is of order 1: rounding is told from it with room to spare
            if (left - terms.sum()).abs() <= min(1e4 * eps, 0.1) * (terms.norm() + left.abs()):
                return mode
        return ""


def _open(out: Any, who: str) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The floating-point tensors inside what a network returned, and how to put others in their place."""
    leaves, spec = pytree.tree_flatten(out)
    where = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
    for t in leaves:
        if isinstance(t, Tensor) and t.is_floating_point() and t.dim() == 0:
            raise InputError(
                f"{who} returned a scalar, which looks like a loss: a loss must not be linearised. Leave the labels "
                "out and compute the loss from the outputs"
            )
        if not isinstance(t, Tensor | int | float | str | None):
            raise UnsupportedError(
                f"{who} returned a {type(t).__name__}, which cannot be linearised; switch it off (for a cache: "
                "use_cache=False) or wrap the model so that it returns tensors"
            )
    if not where:
        raise InputError(f"{who} returned no floating-point tensor: there is nothing to linearise")

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        new = list(leaves)
        for i, t in zip(where, tensors):
            new[i] = t
        return pytree.tree_unflatten(new, spec)

    return [leaves[i] for i in where], rebuild


def _autocast_state(device: torch.device) -> tuple[str, torch.dtype, bool]:
    kind = device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def _autocast(state: tuple[str, torch.dtype, bool]) -> AbstractContextManager[Any]:
    """The precision of the forward pass again, in the backward pass."""
    kind, dtype, enabled = state
    context: AbstractContextManager[Any] = torch.autocast(kind, dtype, enabled)
    return context
