"""The tangent model f_lin(x; theta) = f(x; theta0) + J(x) (theta - theta0) as a real nn.Module.

Cost, in multiples of plain ResNet-18 (batch 32, CPU seconds of one core; `python benchmarks/linearize.py --threads 1`):
forward 2.9; training step 1.9 in time and 1.2 in memory with engine="vjp", 1.6 and 1.8 with "jvp". Every product W x
becomes three (W0 x0, W0 dx, dW x0), which is the least an exact derivative needs, so a forward pass bound by
multiplications costs about 3. One bound by launches costs about as many times more as it has kernels: 2.1 (`dual.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from biascope.network.door import refuse_batch_dependence
from biascope.network.functional import Params, ParamSelection, select_params
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.signatures import checked
from biascope.tangent.anchored import Anchored, Slot, State, deterministic, slots, state_of
from biascope.tangent.expansion import Expansion, Tangent, adjoint, autocast_state
from biascope.tangent.norms import Norms


@checked
def linearize(
    model: nn.Module,
    at: State | None = None,
    *,
    centered: bool = False,
    params: ParamSelection = None,
    engine: Literal["vjp", "jvp"] = "vjp",
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
            counted from the parameters of `model`: f(x; at) + J(x; at) (theta - theta0). With `centered=True` this is
            the kernel swap: train from zero with the kernel of a later checkpoint.
        centered: leave f(x; theta0) out: J(x) (theta - theta0), which starts at zero.
        params: which parameters are linearised, None for those with requires_grad (as for `bs.ntk`).
            The others are constants.
        engine: how gradients are computed. "vjp": J(x)^T u by one more plain pass at theta0. "jvp": autograd through
            the forward-mode derivative (also used where an input needs a gradient). The numbers are the same.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> lin, x = linearize(net), torch.ones(5, 3)
        >>> torch.equal(lin(x), net(x)), list(lin.state_dict()) == list(net.state_dict())
        (True, True)
    """
    return Linearized(getattr(model, "_orig_mod", model), at, centered, params, engine)


@checked
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
    own = {k: p.detach() for k, p in lin.named_parameters()}
    lin.load_state_dict({**lin.state_dict(), **state_of(finetuned, own, "finetuned", lin.linearized)})
    return lin


class Linearized(Anchored):
    """What `linearize` returns. `linearized` names the parameters in which the network is linear."""

    _forward_mode: dict[tuple[Any, ...], str]
    _slots: list[Slot]
    _layers: list[nn.Module]
    _norms: Norms | None
    _writes: bool
    _quiet: dict[str, bool]

    def __init__(self, model: nn.Module, at: State | None, centred: bool, params: ParamSelection, engine: str) -> None:
        super().__init__(model)
        self.engine, self.centred = engine, centred
        self.linearized = tuple(select_params(dict(self.named_parameters()), params))
        point = self.origin
        if at is not None:
            point = {**point, **state_of(at, point, "at", self.linearized)}
        self._frozen["point"] = dict(point)
        self.__dict__["_forward_mode"] = {}  # kind of call -> which one agrees with training's gradient
        # searched once: looking for them in every call takes Python longer than a GPU takes for a few layers
        self.__dict__["_slots"], self.__dict__["_layers"] = slots(self._skeleton), list(self._skeleton.modules())
        self._norms = None
        self._writes = False  # the network changes its inputs in place
        # the cache of a language model holds no tensors that could be linearised
        self._quiet = {"use_cache": False} if "use_cache" in signature(self._skeleton.forward).parameters else {}
        for name, p in self.named_parameters():
            p.requires_grad_(name in self.linearized and (p.requires_grad or params is not None))
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
        evaluate = _untraced() if torch.compiler.is_dynamo_compiling() else Linearized._evaluate
        return evaluate(self, args, {**self._quiet, **kwargs})

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_inference_mode_enabled():  # torch loses tangents in it, silently
            with torch.inference_mode(False), torch.no_grad():
                return self._evaluate(*pytree.tree_map_only(Tensor, torch.clone, (args, kwargs)))
        if any(m.training for m in self._layers):
            refuse_batch_dependence(self._skeleton)
        theta = {name: table[key] for table, key, name in self._slots}
        chosen = [theta.pop(k) for k in self.linearized]
        constant = next((name for name, p in theta.items() if p.requires_grad), None)
        if constant is not None:
            raise InputError(f"'{constant}' requires a gradient but is not linearised: name it in linearize(params=)")
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        here = Expansion(self, args, kwargs, autocast_state(chosen[0].device))
        forward_mode = self._forward_is_adjoint(here, leaves)
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in chosen)
        through = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if through and not forward_mode:
            who = f"{type(self._skeleton).__name__} has no forward-mode derivative that agrees with its gradient"
            raise UnsupportedError(f"an input requires a gradient, but {who}; detach the input")
        transformed = torch._C._are_functorch_transforms_active()
        if trains and not through and not transformed and (self.engine == "vjp" or not forward_mode):
            with torch.no_grad():  # here, since inside a Function forward mode is switched off
                outs = here.value(here.displaced(chosen), forward_mode)
            outs = Tangent.apply(here, outs, *chosen)  # type: ignore[no-untyped-call]
        else:
            with torch.set_grad_enabled(trains or through or (transformed and torch.is_grad_enabled())):
                outs = here.value(here.displaced(chosen), forward_mode)
        if here.written and not here.copied:
            who = f"{type(self._skeleton).__name__} changes its inputs in place, in this call and not in the first one"
            raise UnsupportedError(f"{who} of its kind: write the operation without the in-place form")
        return here.rebuild(outs)

    def _forward_is_adjoint(self, here: Expansion, leaves: Sequence[Any]) -> str:
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
                    fix = "call it once before, on the same device and in the same precision"
                    raise UnsupportedError(f"the first call of a linearised network is inside torch.func: {fix}")
                return known[-1]
            with deterministic(self._skeleton, first.device):
                mode, writes = adjoint(here)
            self._forward_mode[key] = mode  # behind the check: a network that is refused is so in every call
            here.copied = self._writes = self._writes or writes
        return self._forward_mode[key]


def _refuse_moved_constants(lin: Any, _: Any) -> None:
    """A loaded state must not move a parameter that is not linearised: it would have no effect."""
    for k, p in lin.named_parameters():
        if k not in lin.linearized and not torch.equal(p.detach(), lin.origin[k]):
            raise InputError(f"the loaded state moves '{k}', which is not linearised: name it in linearize(params=...)")


_UNTRACED: Callable[..., Any] | None = None


def _untraced() -> Callable[..., Any]:
    """`_evaluate` for Dynamo, which cannot trace dual levels.

    One for all calls, or each would be compiled anew; made when needed, since that imports the compiler, slowly.
    """
    global _UNTRACED
    if _UNTRACED is None:
        _UNTRACED = torch.compiler.disable(Linearized._evaluate)  # type: ignore[no-untyped-call]
    return _UNTRACED
