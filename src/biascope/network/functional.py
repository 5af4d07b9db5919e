"""An nn.Module seen as a pure function f(params, inputs) -> [n, c].

Everything downstream differentiates `Functional.__call__`. The user's module is never changed: parameters are handed to
`torch.func.functional_call` by name, modes and flags stay as they are, and what cannot be differentiated example by
example (BatchNorm in train mode, active dropout) is refused by name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from types import TracebackType
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from biascope.network.derivatives import call
from biascope.network.door import (
    TABLES,
    is_harmless,
    modules_of,
    no_module,
    refuse_batch_dependence,
    refuse_embeddings,
    refuse_inference_mode,
    refuse_parameters,
    refuse_script,
    refuse_wrappers,
    say_widened,
    uninitialised,
)
from biascope.network.outputs import main_tensor
from biascope.network.shards import Shards, is_sharded, reshard
from biascope.support.arguments import check_choice, shown
from biascope.support.errors import BiascopeError, InputError, near
from biascope.support.hints import arguments_of, batch_hint, input_hint, pairs_hint, several_hint
from biascope.support.inputs import Inputs, batch_size, map_inputs, mark, tensors_of
from biascope.support.precision import Precision
from biascope.support.processes import Processes

Params = dict[str, Tensor]
ParamSelection = None | str | Sequence[str] | Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class Certificate:
    """What was asked of a network of one structure, selection and precision, and found in order: it is not asked again.

    `anatomies` are filled in by `stream.anatomy`, by the shape of the inputs, and `outputs` by `curvature.tokens`.
    """

    chosen: tuple[str, ...]  # names of the differentiated parameters
    arguments: Mapping[str, bool | None] = field(default_factory=dict)  # of `arguments_of`
    quiet: Mapping[str, bool] = field(default_factory=dict)  # switches off a language model's cache
    anatomies: dict[Any, Any] = field(default_factory=dict)
    outputs: dict[Any, Any] = field(default_factory=dict)


_CERTIFICATES: WeakKeyDictionary[nn.Module, dict[object, Certificate]] = WeakKeyDictionary()
MANY = 16  # certificates kept per module


@dataclass(frozen=True)
class Functional:
    """A module with its parameters taken out.

    `params` are the differentiated ones (detached, in `dtype`), `frozen` the remaining parameters and the buffers.

    Example:
        >>> f = functional(nn.Linear(3, 2), precision="float64")
        >>> f(f.params, torch.ones(5, 3, dtype=torch.float64)).shape
        torch.Size([5, 2])
    """

    module: nn.Module
    params: Params
    frozen: Params
    output: Callable[[Any], Tensor] | None
    dtype: torch.dtype
    device: torch.device
    certificate: Certificate = field(default_factory=lambda: Certificate(()), compare=False, repr=False)
    own: Params | None = field(default=None, compare=False, repr=False)  # its own tensors, where these are all
    shards: Shards | None = field(default=None, compare=False, repr=False)  # where the parameters are spread out

    def __call__(self, params: Params, inputs: Inputs) -> Tensor:
        """Evaluate the module on a batch: [n, c]."""
        out = self.outputs(params, inputs)
        return out if out.dim() == 2 else out.reshape(len(out), -1)

    def outputs(self, params: Params, inputs: Inputs) -> Tensor:
        """The same in the module's own shape [n, ...]."""
        args: tuple[Tensor, ...] = () if isinstance(inputs, dict) else (inputs,)
        kwargs: dict[str, Any] = {**self.certificate.quiet, **(inputs if isinstance(inputs, dict) else {})}
        # where torch differentiates, errors may mean that it cannot, and are dealt with by the caller
        plain = not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        whole = nullcontext() if self.shards is None else self.shards.gathering()
        with whole, explained(self.module, inputs) if plain else nullcontext():
            out = call(self.module, {**self.frozen, **params}, args, kwargs)
        return as_tensor(out, batch_size(inputs), self.output, self.module)

    def to(self, dtype: torch.dtype) -> Functional:
        """Return the same function with parameters and floating-point buffers in another precision."""
        return replace(self, params=_cast(self.params, dtype), frozen=_cast(self.frozen, dtype), dtype=dtype)

    def prepare(self, inputs: Inputs) -> Inputs:
        """Move a batch to the function's device and precision (integers stay integers)."""
        return map_inputs(inputs, lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None))

    def own_parts(self, v: Params) -> Params:
        """Of tensors of the parameters' shapes, what belongs to this process's parts of them."""
        return v if self.shards is None else {k: self.shards.cut(self.params[k]).own(t) for k, t in v.items()}

    def own_views(self, flat: Tensor) -> Params:
        """The entries [own_params] of this process, parameter by parameter."""
        assert self.shards is not None
        cuts = {k: self.shards.cut(p) for k, p in self.params.items()}
        parts = torch.split(flat, [cut.count * prod(cut.shape[1:]) for cut in cuts.values()])
        return {k: t.view(cut.count, *cut.shape[1:]) for (k, cut), t in zip(cuts.items(), parts, strict=True)}

    def put_together(self, flat: Tensor) -> Params:
        """Tensors of the parameters' shapes from the entries [own_params] that every process has for its parts."""
        assert self.shards is not None
        return {k: self.shards.cut(self.params[k]).gather(t) for k, t in self.own_views(flat).items()}

    def mark(self) -> int:
        """A checksum of all parameters and buffers (of entries spread over large ones) that every rank has."""
        return mark([{k: v for k, v in (self.params | self.frozen).items() if not is_sharded(v)}])

    @property
    def own_params(self) -> int:
        """Number of them that this process holds."""
        return (
            self.num_params
            if self.shards is None
            else sum(cut.count * prod(cut.shape[1:]) for cut in map(self.shards.cut, self.params.values()))
        )

    @property
    def num_params(self) -> int:
        """Number of differentiated parameters, p."""
        return sum(p.numel() for p in self.params.values())


def functional(
    module: nn.Module,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    precision: str = "float32",
    team: Processes | None = None,
) -> Functional:
    """Take a module apart into a function and its parameters.

    Args:
        module: any nn.Module whose examples do not mix (no BatchNorm in train mode, no active dropout).
        params: which parameters to differentiate: None (those with requires_grad), "all", a name, a layer prefix or a
            glob pattern, a list of those, or a predicate `(name, tensor) -> bool`.
        output: how to get a tensor [n, ...] from what the module returns, for modules that return tuples or objects.
        precision: "float32" (a float64 module stays float64), "float64", "tf32" or "bf16".
        team: the processes that make the call; None where parameters that are spread over some cannot be dealt with.
    """
    if not isinstance(module, nn.Module):
        raise no_module(module)
    for wrapper in ("module" if isinstance(module, DistributedDataParallel) else "", "_orig_mod"):
        module = getattr(module, wrapper, module)  # torch.compile and DDP hide the network in a module of their own
    if torch.is_inference_mode_enabled():
        refuse_inference_mode()
    parts = {m: name for name, m in module.named_modules()}
    spread = team is not None and not all(map(is_harmless, set(map(type, parts)))) and reshard(module)
    plain = type(module).named_parameters is nn.Module.named_parameters  # a class may hide some
    named = tensors_in(parts, "_parameters") if plain else dict[str, Tensor](module.named_parameters())
    buffers = tensors_in(parts, "_buffers")
    if any(is_lazy(t) for t in (*named.values(), *buffers.values())):
        raise uninitialised(named | buffers)
    if params is not None and not isinstance(params, str):  # what a function chooses may depend on anything
        params = tuple(select_params(named, params))
    key = (
        params,
        precision,
        team is not None,
        tuple([_state(m) for m in parts]),
        tuple([(k, p.shape, p.dtype, p.device, p.requires_grad, p.is_inference()) for k, p in named.items()]),
        tuple([(k, b.device) for k, b in buffers.items()]),
    )
    known = _CERTIFICATES.setdefault(module, {})
    certificate = known.get(key)
    if certificate is None:
        if len(known) > MANY:
            known.clear()
        certificate = known[key] = _certify(module, parts, named, buffers, params, precision, team is not None)
    dtype = compute_dtype(precision, named.values())
    own = named.copy() if len(certificate.chosen) == len(named) and not buffers else None
    taken = {k: named.pop(k).detach() for k in certificate.chosen}
    frozen = {k: v.detach() for k, v in (named | buffers).items()}
    device = next(iter(taken.values())).device
    shards = Shards.of(module, taken | frozen, team) if spread and team is not None else None
    taken, frozen = _cast(taken, dtype), _cast(frozen, dtype)
    return Functional(module, taken, frozen, output, dtype, device, certificate, None if spread else own, shards)


def _state(m: nn.Module) -> tuple[object, ...]:
    """What of a module the questions below depend on."""
    kind = type(m)
    if is_harmless(kind) and not issubclass(kind, TABLES):  # type: ignore[arg-type]
        return kind, m.training
    asked = ("p", "dropout", "max_norm", "scale_grad_by_freq", "track_running_stats")
    return kind, m.training, getattr(m, "running_mean", None) is None, *(getattr(m, name, None) for name in asked)


def _certify(
    module: nn.Module,
    parts: Mapping[nn.Module, str],
    named: Params,
    buffers: Params,
    params: ParamSelection,
    precision: str,
    shards: bool,
) -> Certificate:
    """Ask everything that the structure of a network answers."""
    check_choice(precision, "precision", get_args(Precision))
    refuse_script(module)
    kinds = set(map(type, parts))  # many modules, of few classes
    if not all(map(is_harmless, kinds)):
        refuse_wrappers(module, shards)
        refuse_batch_dependence(module)
    refuse_parameters(module, named, buffers)
    say_widened(module, {p.dtype for p in named.values()})
    chosen = select_params(named, params)
    if any(issubclass(kind, TABLES) for kind in kinds):
        refuse_embeddings(parts, {k: named[k] for k in chosen})
    arguments = arguments_of(module)
    return Certificate(tuple(chosen), arguments, {"use_cache": False} if "use_cache" in arguments else {})


def tensors_in(parts: Mapping[nn.Module, str], kind: str) -> Params:
    """The "_parameters" or "_buffers" of some modules, each once, as `named_parameters` and `named_buffers` do."""
    seen: dict[int, tuple[str, Tensor]] = {}
    for m, where in parts.items():
        for name, t in getattr(m, kind).items():
            if t is not None and id(t) not in seen:
                seen[id(t)] = (f"{where}.{name}" if where else name, t)
    return dict(seen.values())


def _cast(tensors: Params, dtype: torch.dtype) -> Params:
    """The floating-point ones in another precision."""
    return {k: v if v.dtype == dtype or not v.is_floating_point() else v.to(dtype) for k, v in tensors.items()}


def compute_dtype(precision: str, params: Iterable[Tensor]) -> torch.dtype:
    """Precision in which the network itself is evaluated; bf16 and tf32 concern the contractions only."""
    if precision == "float64" or (precision == "float32" and any(p.dtype == torch.float64 for p in params)):
        return torch.float64
    return torch.float32


def select_params(named: Mapping[str, Tensor], params: ParamSelection) -> list[str]:
    """Names of the parameters a selection stands for, in the module's order."""
    if params is None:
        needed = [k for k, p in named.items() if p.requires_grad]
        if not needed:
            raise InputError('no parameter has requires_grad; pass params="all" to differentiate the frozen ones')
        return needed
    if params == "all":
        chosen = set(named)
    elif callable(params):
        chosen = {k for k, p in named.items() if params(k, p)}
    else:
        patterns = [params] if isinstance(params, str) or not isinstance(params, Iterable) else list(params)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise InputError(f"params={shown(params)}: names, 'all' or a function (name, tensor) -> bool are needed")
        chosen = set()
        for pattern in patterns:
            hits = {k for k in named if k == pattern or k.startswith(f"{pattern}.") or fnmatch.fnmatchcase(k, pattern)}
            if not hits:
                places = [*named, *{k.rpartition(".")[0] for k in named} - {""}]
                raise InputError(f"no parameter or layer is called {pattern!r}{near(pattern, places)}")
            chosen |= hits
    if not chosen:
        raise InputError("the selection of parameters is empty")
    return [k for k in named if k in chosen]


def as_rows(out: Any, n: int, output: Callable[[Any], Tensor] | None, module: nn.Module) -> Tensor:
    """Turn what the module returned into [n, c], or say what to do about it."""
    return as_tensor(out, n, output, module).reshape(n, -1)


def as_tensor(out: Any, n: int, output: Callable[[Any], Tensor] | None, module: nn.Module) -> Tensor:
    """Turn what the module returned into a tensor [n, ...], or say what to do about it."""
    who = type(module).__name__
    if output is not None:
        out = output(out)
    elif not isinstance(out, Tensor):
        found = main_tensor(out)[0]
        out = out if found is None else found
    if not isinstance(out, Tensor):
        if isinstance(out, tuple | list):
            what, fix = f"a {type(out).__name__} of {len(out)}", "output=lambda out: out[0]"
        else:
            fields = list(out.keys()) if isinstance(out, Mapping) else []
            what = f"a {type(out).__name__}" + (f" with {', '.join(map(repr, fields))}" if fields else "")
            fix = f"output=lambda out: out[{fields[0]!r}]" if fields else "output=lambda out: <a tensor>"
        raise InputError(f"{who} returned {what}, not a tensor; say which part to differentiate with {fix}")
    if not out.is_floating_point():
        raise InputError(f"{who} returned {out.dtype}: only real floating-point outputs can be differentiated")
    if out.dim() == 0:
        raise InputError(f"{who} returned a scalar; one row per example is needed: [{n}, c] (do not average the batch)")
    if out.shape[0] != n:
        raise InputError(f"{who} returned shape {list(out.shape)} for {n} examples: the first dimension must be {n}")
    return out


@contextmanager
def explained(module: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Around a plain call of a module: where torch's error leaves the user to search, name the layer and its input."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, BiascopeError | torch.OutOfMemoryError):
            raise
        shapes = " and ".join(_shown_shape(t, len(t) if t.dim() else 0) for t in tensors_of(inputs))
        fix = "" if isinstance(inputs, dict) else batch_hint(module, inputs)
        message = f"{type(error).__name__} at n = {batch_size(inputs)}: {(str(error).splitlines() or [''])[0]}"
        (where, hint), who = _failing_layer(module, error.__traceback__, tensors_of(inputs)), _described(module)
        if isinstance(inputs, dict) and "unexpected keyword argument" in message:
            hint = f"; a dict holds the keyword arguments of forward: {pairs_hint(inputs)}"
        if isinstance(error, TypeError | ValueError) and not isinstance(inputs, dict) and not hint:
            hint = several_hint(module)
        raise InputError(f"{fix}{who} cannot take inputs {shapes}{where} ({message}){hint}") from error


def _failing_layer(module: nn.Module, trace: TracebackType | None, whole: list[Tensor]) -> tuple[str, str]:
    """The innermost layer among the frames of a traceback, with the shape of its first tensor; and what to change."""
    names, found, hint = modules_of(module), "", ""
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        layer = frame.f_locals.get("self")
        if frame.f_code.co_name != "forward" or not isinstance(layer, nn.Module) or not names.get(layer):
            continue
        given = [frame.f_locals.get(name) for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
        first = next((t for t in given if isinstance(t, Tensor)), None)
        shape = "no tensor" if first is None else _shown_shape(first, whole[0].shape[0])
        found = f": its layer '{names[layer]}', {_described(layer)}, got {shape}"
        came_in = first is not None and any(first.shape == t.shape for t in whole)  # nothing was done to it before
        hint = input_hint(layer, first) if first is not None and came_in else ""
    return found, hint


def _shown_shape(t: Tensor, n: int) -> str:
    """A shape with n for the number of examples."""
    return str(["n", *t.shape[1:]] if t.dim() and len(t) == n else list(t.shape)).replace("'", "")


def _described(layer: nn.Module) -> str:
    return type(layer).__name__ if any(True for _ in layer.children()) else repr(layer)
