"""Watch a forward pass and note every use of a differentiated parameter.

The recorder works on torch functions, not on module classes: F.linear is seen whether nn.Linear, a subclass, a tied
weight or a bare functional call made it. A use that no rule understands marks its parameter as *raw*; raw parameters
go to the autograd fallback. Nothing is hooked on the user's module.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from biascope.network.door import REENTRANT
from biascope.network.layers import attention
from biascope.network.layers.convolution import conv2d
from biascope.network.layers.rules import (
    Affine,
    Broadcast,
    Conv,
    ConvTranspose,
    Embedding,
    Linear,
    MatMul,
    MatrixRule,
    RowRule,
)
from biascope.support.errors import UnsupportedError


@dataclass
class Use:
    """One call of a torch function with differentiated parameters."""

    rule: MatrixRule | RowRule
    roles: dict[str, str]  # "weight" / "bias" -> parameter name
    input: Tensor | None  # what the rule needs of the input, detached, in the model's own layout
    edge: GradientEdge  # where the gradient of the output arrives (survives in-place activations)
    out_shape: torch.Size
    version: int
    source: Tensor | None  # the tensor whose version must not change


@dataclass
class Tape:
    """A recorded forward pass: rows [n, c], the uses in order, and the raw parameters with the reason."""

    rows: Tensor
    uses: list[Use]
    raw: dict[str, str]
    shape: tuple[int, ...]  # of one example's output, before it was flattened

    def gradients(self, cotangent: Tensor, retain: bool = True) -> list[Tensor | None]:
        """Gradient of sum(rows * cotangent) at every use's output, in the model's layout."""
        if not self.uses:
            return []
        edges = [use.edge for use in self.uses]
        return list(torch.autograd.grad(self.rows, edges, cotangent, retain_graph=retain, allow_unused=True))

    def batched_gradients(self, cotangents: Tensor) -> list[Tensor | None]:
        """The same for k cotangents [k, n, c] in one vmapped backward pass: gradients [k, ...]."""
        if not self.uses:
            return []
        edges = [use.edge for use in self.uses]
        if cotangents.device.type in FOLDED:
            return self._folded_gradients(edges, cotangents)
        return list(
            torch.autograd.grad(
                self.rows, edges, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        )

    def _folded_gradients(self, edges: list[GradientEdge], cotangents: Tensor) -> list[Tensor | None]:
        """`is_grads_batched` loops over the cotangents in convolutions; this vmap makes them examples of one."""
        there: list[int] = []

        def pull(u: Tensor) -> list[Tensor]:
            grads = torch.autograd.grad(self.rows, edges, u, retain_graph=True, allow_unused=True)
            there[:] = [i for i, g in enumerate(grads) if g is not None]
            return [grads[i] for i in there]

        found = torch.func.vmap(pull)(cotangents)  # tensors only: it takes no None
        by_edge: dict[int, Tensor] = dict(zip(there, found, strict=True))
        return [by_edge.get(i) for i in range(len(edges))]


FOLDED = ("cuda",)  # devices on which a convolution of k n examples beats k of n: a CPU's cache does not like it
Handler = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Register what to do when one of these torch functions is called with a differentiated parameter."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


class Recorder(TorchFunctionMode):
    """A TorchFunctionMode that fills a list of uses."""

    def __init__(self, params: dict[str, Tensor], clone_inputs: bool = False) -> None:
        super().__init__()
        self.names = {id(t): name for name, t in params.items()}
        self.keep = list(params.values())  # ids stay unique while the tensors live
        self.clone_inputs = clone_inputs
        self.uses: list[Use] = []
        self.raw: dict[str, str] = {}

    def name(self, t: Any) -> str | None:
        """The parameter's name if `t` is a differentiated parameter."""
        return self.names.get(id(t)) if isinstance(t, Tensor) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        touched = self._touched(args)
        if kwargs:
            touched += self._touched(kwargs.values())
        if not touched:
            return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            out = handler(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if any(t.requires_grad and self.name(t) is None for t in _flat(out)):
            for name in touched:
                self.raw.setdefault(name, f"used by {getattr(func, '__name__', func)}, which has no layer rule")
        return out

    def _touched(self, values: Iterable[Any]) -> list[str]:
        """Names of the parameters among some arguments; this runs for every call of torch, so it is plain."""
        found = []
        for t in values:
            name = self.names.get(id(t))
            if name is not None:
                found.append(name)
            elif isinstance(t, (list, tuple)):
                found += self._touched(t)
            elif isinstance(t, dict):
                found += self._touched(t.values())
        return found

    def note(
        self, out: Tensor, rule: MatrixRule | RowRule, roles: dict[str, Any], saved: Tensor | None, own: bool = False
    ) -> Tensor:
        """Record a use and hand the output on; `own` says that `saved` is ours and cannot be changed from outside."""
        if not out.requires_grad:
            refuse_reentrant_checkpoint()
            return out  # under no_grad or detached: not part of the derivative
        if out._is_view() and not isinstance(rule, Broadcast):
            # torch writes the history of an activation in place on a view into its base, past the edge below
            out = torch.ops.aten._unsafe_view(out, out.shape)
        names = {role: n for role, t in roles.items() if (n := self.names.get(id(t))) is not None}
        kept = None if saved is None else saved.detach()
        if kept is not None and self.clone_inputs and not own:
            kept = kept.clone()
        source = saved if saved is not None and not own and not self.clone_inputs else None
        version = source._version if source is not None else 0
        self.uses.append(Use(rule, names, kept, get_gradient_edge(out), out.shape, version, source))
        return out


def refuse_reentrant_checkpoint() -> None:
    """Raise inside `torch.utils.checkpoint(..., use_reentrant=True)`: its layers look as if they had no derivative."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise UnsupportedError(REENTRANT)


def _flat(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for y in x:
            yield from _flat(y)
    elif isinstance(x, dict):
        yield from _flat(list(x.values()))


def record(
    f: Callable[[dict[str, Tensor], Any], Tensor],
    params: dict[str, Tensor],
    inputs: Any,
    read: Callable[[Any], Tensor] | None = None,
) -> Tape:
    """Run f(params, inputs) -> [n, ...] under the recorder; params must require grad. `read` is unrecorded, after f."""
    for clone in (False, True):
        recorder = Recorder(params, clone_inputs=clone)
        with torch.enable_grad(), recorder:
            out = f(params, inputs)
        # an input changed in place after the layer read it: look again, with copies
        if all(use.source is None or use.source._version == use.version for use in recorder.uses):
            break
    for use in recorder.uses:
        use.source = None
    with torch.enable_grad():  # the caller may have switched it off
        out = out if read is None else read(out)
        rows = out if out.dim() == 2 else out.reshape(len(out), -1)
    return Tape(rows, recorder.uses, recorder.raw, tuple(out.shape[1:]))


# ------------------------------------------------------------------------------------------------------- the handlers


def _bind(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = dict(zip(_words(names), args))
    return given | kwargs if kwargs else given


@cache
def _words(names: str) -> list[str]:
    return names.split()


@handles(F.linear)
def _linear(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    c = _bind("input weight bias", args, kwargs)
    if r.name(c["input"]):
        return NotImplemented
    return r.note(func(*args, **kwargs), Linear(), {"weight": c["weight"], "bias": c.get("bias")}, c["input"])


@handles(torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
def _matmul(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or r.name(args[0]) or args[1].dim() != 2 or args[0].dim() < 2:
        return NotImplemented
    return r.note(func(*args), MatMul(), {"weight": args[1]}, args[0])


@handles(torch.addmm, torch.Tensor.addmm)
def _addmm(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3 or r.name(args[1]) or args[0].dim() != 1:
        return NotImplemented
    return r.note(func(*args), MatMul(), {"bias": args[0], "weight": args[2]}, args[1])


@handles(F.conv1d, F.conv2d, F.conv3d)
def _conv(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    c = _bind("input weight bias stride padding dilation groups", args, kwargs)
    x, w, b = c.pop("input"), c.pop("weight"), c.pop("bias", None)
    if r.name(x) or x.dim() != w.dim():
        return NotImplemented
    leaves = r.name(w) and (b is None or r.name(b))  # gradients of parameters themselves are never read from a tape
    out = conv2d(x, w, b, **c) if leaves and func is F.conv2d else func(*args, **kwargs)
    return r.note(out, Conv.parse(w, **c), {"weight": w, "bias": b}, x)


@handles(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _conv_transpose(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    c = _bind("input weight bias stride padding output_padding groups dilation", args, kwargs)
    x, w, b = c.pop("input"), c.pop("weight"), c.pop("bias", None)
    c.pop("output_padding", None)
    if r.name(x) or x.dim() != w.dim():
        return NotImplemented
    return r.note(func(*args, **kwargs), ConvTranspose.parse(x, w, **c), {"weight": w, "bias": b}, x)


@handles(F.embedding)
def _embedding(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    c = _bind(names, args, kwargs)
    if c.get("max_norm") is not None or c.get("scale_grad_by_freq") or c.get("sparse"):
        return NotImplemented
    w = c["weight"]
    return r.note(func(*args, **kwargs), Embedding(w.shape[0], c.get("padding_idx")), {"weight": w}, c["input"])


def _norm(names: str, channels_first: bool) -> Handler:
    def handler(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        c = _bind(names, args, kwargs)
        w, b = c.get("weight"), c.get("bias")
        stats = [c.get("running_mean"), c.get("running_var")]
        if any(r.name(t) for t in (c["input"], *stats)) or (func is F.batch_norm and c.get("training")):
            return NotImplemented
        affine = w if w is not None else b
        xhat = None
        if r.name(w):
            with torch.no_grad():
                xhat = func(**{**c, "weight": None} | ({"bias": None} if "bias" in c else {}))
        rule = Affine(tuple(affine.shape), channels_first) if affine is not None else None
        if rule is None:
            return NotImplemented
        return r.note(func(*args, **kwargs), rule, {"weight": w, "bias": b}, xhat, own=True)

    return handler


HANDLERS[F.batch_norm] = _norm("input running_mean running_var weight bias training momentum eps", True)
HANDLERS[F.instance_norm] = _norm(
    "input running_mean running_var weight bias use_input_stats momentum eps cudnn_enabled", True
)
HANDLERS[F.group_norm] = _norm("input num_groups weight bias eps", True)
HANDLERS[F.layer_norm] = _norm("input normalized_shape weight bias eps", False)
HANDLERS[F.rms_norm] = _norm("input normalized_shape weight eps", False)


def _broadcast(sign_left: float, sign_right: float, product: bool) -> Handler:
    """x op p or p op x: the parameter is spread over the examples, never the other way round."""

    def handler(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != 2:
            return NotImplemented
        left, right = r.name(args[0]), r.name(args[1])
        if bool(left) == bool(right) or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return NotImplemented  # both are parameters, or one is a number: no example dimension to see
        p, x = (args[0], args[1]) if left else (args[1], args[0])
        if x.dim() < p.dim():
            return NotImplemented
        out = func(*args)
        saved = x.expand(out.shape) if product else None
        return r.note(out, Broadcast(tuple(p.shape), sign_left if left else sign_right), {"weight": p}, saved)

    return handler


_T: Any = torch.Tensor
HANDLERS |= dict.fromkeys(
    (torch.add, _T.add, _T.__add__, _T.__radd__, _T.add_, _T.__iadd__), _broadcast(1.0, 1.0, product=False)
)
HANDLERS |= dict.fromkeys((torch.sub, _T.sub, _T.__sub__, _T.sub_, _T.__isub__), _broadcast(1.0, -1.0, product=False))
HANDLERS |= dict.fromkeys((torch.mul, _T.mul, _T.__mul__, _T.__rmul__), _broadcast(1.0, 1.0, product=True))


@handles(torch.Tensor.expand)
def _expand(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not r.name(args[0]):
        return NotImplemented
    return r.note(func(*args, **kwargs), Broadcast(tuple(args[0].shape), 1.0), {"weight": args[0]}, None)


@handles(F.multi_head_attention_forward)
def _multi_head(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = attention.decomposable(args, kwargs)
    if call is None:
        return NotImplemented
    with r:  # the projections are uses of their own
        return attention.attention(call)
