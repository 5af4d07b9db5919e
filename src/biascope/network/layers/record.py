"""Watch a forward pass and note every use of a differentiated parameter.

The recorder works on torch functions, not on module classes: F.linear is seen whether nn.Linear, a subclass, a tied
weight or a bare functional call made it. What is made of parameters alone (`1 + weight`, a table of relative positions)
is *derived*: its uses count as uses of the parameters behind it (`derived.py`). A use that no rule understands marks
its parameter as *raw*; raw parameters go to the autograd fallback. Nothing is hooked on the user's module.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from biascope.network.derivatives import differentiable_attention
from biascope.network.door import refuse_reentrant_checkpoint
from biascope.network.layers.convolution import conv2d
from biascope.network.layers.positions import live_linear
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


@dataclass
class Use:
    """One call of a torch function with differentiated parameters."""

    rule: MatrixRule | RowRule
    roles: dict[str, str]  # "weight" / "bias" -> parameter name, or label of a derived tensor
    input: Tensor | None  # what the rule needs of the input, detached, in the model's own layout
    edge: GradientEdge  # where the gradient of the output arrives (survives in-place activations)
    out_shape: torch.Size
    version: int
    source: Tensor | None  # the tensor whose version must not change


@dataclass
class Derived:
    """A tensor made of parameters alone, by torch functions that have no rule of their own."""

    value: Tensor
    roots: tuple[str, ...]  # the parameters
    maker: str
    version: int
    parents: tuple[int, ...]  # positions of the derived tensors it is made of
    label: str = ""  # given when it is used; the same in all precisions, where `weight.float()` is one more or not


@dataclass(frozen=True)
class Scope:
    """What to look for: parameters to leave out, and parameters that meet constants before they meet examples."""

    ignored: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()
    written_out: bool = False  # attention as products and a softmax, which have batching rules
    live: tuple[tuple[int, int] | None, ...] = ()  # per use: positions of [n, T, d] at which gradients are passed on


EVERYTHING = Scope()


@dataclass
class Tape:
    """A recorded forward pass: rows [n, c], the uses in order, and the raw parameters with the reason."""

    rows: Tensor
    uses: list[Use]
    raw: dict[str, str]
    shape: tuple[int, ...]  # of one example's output, before it was flattened
    derived: list[Derived] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    rounding: float = 0.0  # of parameters, where the network takes them in a lower precision

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


_T: Any = torch.Tensor
CASTS = {_T.to, _T.float, _T.double, _T.half, _T.bfloat16, _T.type, _T.type_as, _T.contiguous, _T.clone, torch.clone}
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

    def __init__(self, params: dict[str, Tensor], scope: Scope = EVERYTHING, clone_inputs: bool = False) -> None:
        super().__init__()
        self.params, self.scope = params, scope
        # ids stay unique while the tensors live: the parameters here, derived ones in the list
        self.names: dict[int, str | int] = {id(t): name for name, t in params.items() if name not in scope.ignored}
        self.clone_inputs = clone_inputs
        self.uses: list[Use] = []
        self.raw: dict[str, str] = {}
        self.derived: list[Derived] = []
        self.labels = 0
        self.casts: list[tuple[str, Tensor, int]] = []  # kept, so that their ids stay unique

    def name(self, t: Any) -> bool:
        """Is `t` a differentiated parameter, or made of some?"""
        return isinstance(t, Tensor) and id(t) in self.names

    def role(self, t: Any) -> str | None:
        """The name of a parameter, the label of a derived tensor."""
        found = self.names.get(id(t)) if isinstance(t, Tensor) else None
        if not isinstance(found, int):
            return found
        made = self.derived[found]
        if not made.label:
            made.label = f"@{self.labels}"
            self.labels += 1
        return made.label

    def span(self, x: Tensor) -> tuple[int, int] | None:
        """The positions of the next use at which gradients are passed on, where those are not all."""
        at = len(self.uses)
        return self.scope.live[at] if at < len(self.scope.live) and x.dim() == 3 and x.requires_grad else None

    def turned(self, t: Tensor) -> Tensor | None:
        """The parameter of which `t` is the transposed matrix."""
        found = self.names.get(id(t))
        if not isinstance(found, int) or len(self.derived[found].roots) != 1 or t.dim() != 2:
            return None
        p = self.params[self.derived[found].roots[0]]
        same = p.dim() == 2 and p.data_ptr() == t.data_ptr() and p.shape == t.shape[::-1] and p.dtype == t.dtype
        return p if same and p.stride() == t.stride()[::-1] else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        touched = self._touched(args)
        if kwargs:
            touched += self._touched(kwargs.values())
        if not touched:
            return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is not None and not (self.scope.constant and self._is_constant(touched)):
            out = handler(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        new = [t for t in flat(out) if t.requires_grad and not self._is_known(t)]
        if new:
            self._derive(new, touched, func, (args, kwargs))
        return out

    def _is_constant(self, touched: list[str | int]) -> bool:
        return all(isinstance(name, int) or name in self.scope.constant for name in touched) and any(
            isinstance(name, str) for name in touched
        )

    def _is_known(self, t: Tensor) -> bool:
        """A parameter, or a derived tensor as it was; one changed in place before it is used is a new one."""
        found = self.names.get(id(t))
        if isinstance(found, int):
            made = self.derived[found]
            return made.version == t._version or bool(made.label)
        return found is not None

    def _derive(self, new: list[Tensor], touched: list[str | int], func: Any, given: Any) -> None:
        """The outputs of a function without a rule: derived where nothing else with a gradient went in.

        A parameter in another precision is still that parameter: its uses must look alike in all precisions.
        """
        if func in CASTS and isinstance(touched[0], str) and new[0].shape == self.params[touched[0]].shape:
            self.names[id(new[0])] = touched[0]
            self.casts.append((touched[0], new[0], new[0]._version))
            return
        parents = tuple(dict.fromkeys(i for i in touched if isinstance(i, int)))
        known = [name for i in parents for name in self.derived[i].roots]
        roots = tuple(dict.fromkeys([name for name in touched if isinstance(name, str)] + known))
        maker = getattr(func, "__name__", str(func))
        if any(t.requires_grad and id(t) not in self.names for t in flat(given)):
            self.refuse(roots, maker)
            return
        for t in new:
            self.names[id(t)] = len(self.derived)
            self.derived.append(Derived(t, roots, maker, t._version, parents))
            for i in parents:
                if self.derived[i].value is t:
                    self.derived[i].version = t._version

    def refuse(self, roots: Iterable[str], maker: str) -> None:
        """Leave parameters to autograd."""
        for name in roots:
            self.raw.setdefault(name, f"used by {maker}, which has no layer rule")

    def _touched(self, values: Iterable[Any]) -> list[str | int]:
        """Names of the parameters among some arguments; this runs for every call of torch, so it is plain."""
        found: list[str | int] = []
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
        names = {role: n for role, t in roles.items() if (n := self.role(t)) is not None}
        kept = None if saved is None else saved.detach()
        if kept is not None and self.clone_inputs and not own:
            kept = kept.clone()
        source = saved if saved is not None and not own and not self.clone_inputs else None
        version = source._version if source is not None else 0
        self.uses.append(Use(rule, names, kept, get_gradient_edge(out), out.shape, version, source))
        return out


def flat(x: Any) -> Iterator[Tensor]:
    """The tensors in it."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for y in x:
            yield from flat(y)
    elif isinstance(x, dict):
        yield from flat(list(x.values()))


def record(
    f: Callable[[dict[str, Tensor], Any], Tensor],
    params: dict[str, Tensor],
    inputs: Any,
    read: Callable[[Any], Tensor] | None = None,
    scope: Scope = EVERYTHING,
    kind: type[Recorder] = Recorder,
) -> Tape:
    """Run f(params, inputs) -> [n, ...] under the recorder; params must require grad. `read` is unrecorded, after f."""
    for clone in (False, True):
        recorder = kind(params, scope, clone)
        with torch.enable_grad(), recorder, differentiable_attention() if scope.written_out else nullcontext():
            out = f(params, inputs)
        # an input changed in place after the layer read it: look again, with copies
        if all(use.source is None or use.source._version == use.version for use in recorder.uses):
            break
    for use in recorder.uses:
        use.source = None
    for made in recorder.derived:
        if made.value._version != made.version:
            recorder.refuse(made.roots, f"{made.maker}, whose result is changed in place")
    for name, t, version in recorder.casts:
        if t._version != version:
            recorder.refuse([name], "a cast, whose result is changed in place")
    with torch.enable_grad():  # the caller may have switched it off
        out = out if read is None else read(out)
        rows = out if out.dim() == 2 else out.reshape(len(out), -1)
    coarse = [torch.finfo(t.dtype).eps for _, t, _ in recorder.casts if t.dtype.itemsize < rows.dtype.itemsize]
    shape, rounding = tuple(out.shape[1:]), max(coarse, default=0.0)
    return Tape(rows, recorder.uses, recorder.raw, shape, recorder.derived, params, rounding)


# ------------------------------------------------------------------------------------------------------- the handlers


def bind(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    given = dict(zip(_words(names), args))
    return given | kwargs if kwargs else given


@cache
def _words(names: str) -> list[str]:
    return names.split()


@handles(F.linear)
def _linear(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    c = bind("input weight bias", args, kwargs)
    if r.name(c["input"]):
        return NotImplemented
    weight = r.turned(c["weight"]) if r.derived else None
    rule, weight = (Linear(), c["weight"]) if weight is None else (MatMul(), weight)
    span = r.span(c["input"]) if r.scope.live else None
    out = func(*args, **kwargs) if span is None else live_linear(c["input"], c["weight"], c.get("bias"), *span)
    return r.note(out, rule, {"weight": weight, "bias": c.get("bias")}, c["input"])


@handles(torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
def _matmul(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    if r.name(args[0]):  # W @ X [n, d, T]: a convolution of width one
        if r.name(args[1]) or args[0].dim() != 2 or args[1].dim() != 3:
            return NotImplemented
        return r.note(func(*args), Conv((1,), (1,), ((0, 0),), (1,), 1), {"weight": args[0]}, args[1])
    if args[1].dim() != 2 or args[0].dim() < 2:
        return NotImplemented
    weight = r.turned(args[1]) if r.derived else None
    rule, weight = (MatMul(), args[1]) if weight is None else (Linear(), weight)
    return r.note(func(*args), rule, {"weight": weight}, args[0])


@handles(torch.addmm, torch.Tensor.addmm)
def _addmm(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3 or r.name(args[1]) or args[0].dim() != 1:
        return NotImplemented
    weight = r.turned(args[2]) if r.derived else None
    rule, weight = (MatMul(), args[2]) if weight is None else (Linear(), weight)
    return r.note(func(*args), rule, {"bias": args[0], "weight": weight}, args[1])


@handles(F.conv1d, F.conv2d, F.conv3d)
def _conv(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    c = bind("input weight bias stride padding dilation groups", args, kwargs)
    x, w, b = c.pop("input"), c.pop("weight"), c.pop("bias", None)
    if r.name(x) or x.dim() != w.dim():
        return NotImplemented
    leaves = r.name(w) and (b is None or r.name(b))  # gradients of parameters themselves are never read from a tape
    out = conv2d(x, w, b, **c) if leaves and func is F.conv2d else func(*args, **kwargs)
    return r.note(out, Conv.parse(w, **c), {"weight": w, "bias": b}, x)


@handles(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _conv_transpose(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    c = bind("input weight bias stride padding output_padding groups dilation", args, kwargs)
    x, w, b = c.pop("input"), c.pop("weight"), c.pop("bias", None)
    c.pop("output_padding", None)
    if r.name(x) or x.dim() != w.dim():
        return NotImplemented
    return r.note(func(*args, **kwargs), ConvTranspose.parse(x, w, **c), {"weight": w, "bias": b}, x)


@handles(F.embedding)
def _embedding(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    c = bind(names, args, kwargs)
    if c.get("max_norm") is not None or c.get("scale_grad_by_freq") or c.get("sparse"):
        return NotImplemented
    w = c["weight"]
    return r.note(func(*args, **kwargs), Embedding(w.shape[0], c.get("padding_idx")), {"weight": w}, c["input"])


def _norm(names: str, channels_first: bool) -> Handler:
    def handler(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        c = bind(names, args, kwargs)
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


def _broadcast(right_sign: float, product: bool) -> Handler:
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
        return r.note(out, Broadcast(tuple(p.shape), 1.0 if left else right_sign), {"weight": p}, saved)

    return handler


HANDLERS |= dict.fromkeys((torch.add, _T.add, _T.__add__, _T.__radd__, _T.add_, _T.__iadd__), _broadcast(1.0, False))
HANDLERS |= dict.fromkeys((torch.sub, _T.sub, _T.__sub__, _T.sub_, _T.__isub__), _broadcast(-1.0, False))
HANDLERS |= dict.fromkeys((torch.mul, _T.mul, _T.__mul__, _T.__rmul__), _broadcast(1.0, True))
