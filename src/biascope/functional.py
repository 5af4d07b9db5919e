"""An nn.Module seen as a pure function f(params, inputs) -> [n, c].

Everything downstream differentiates `Functional.__call__`. The user's module is never changed: parameters are handed to
`torch.func.functional_call` by name, modes and flags stay as they are, and what cannot be differentiated example by
example (BatchNorm in train mode, active dropout) is refused by name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import isclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from biascope.arguments import said
from biascope.derivatives import call
from biascope.errors import BiascopeError, InputError, UnsupportedError, near
from biascope.hints import input_hint, pairs_hint, several_hint
from biascope.inputs import Inputs, batch_size, map_inputs, tensors_of
from biascope.refusals import (
    TABLES,
    is_harmless,
    modules_of,
    refuse_batch_dependence,
    refuse_embeddings,
    refuse_inference_mode,
    refuse_wrappers,
)

Params = dict[str, Tensor]
ParamSelection = None | str | Sequence[str] | Callable[[str, Tensor], bool]


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

    def __call__(self, params: Params, inputs: Inputs) -> Tensor:
        """Evaluate the module on a batch: [n, c]."""
        args: tuple[Tensor, ...] = () if isinstance(inputs, dict) else (inputs,)
        kwargs = inputs if isinstance(inputs, dict) else {}
        # where torch differentiates, errors may mean that it cannot, and are dealt with by the caller
        plain = not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        with explained(self.module, inputs) if plain else nullcontext():
            out = call(self.module, {**self.frozen, **params}, args, kwargs)
        return as_rows(out, batch_size(inputs), self.output, self.module)

    def to(self, dtype: torch.dtype) -> Functional:
        """Return the same function with parameters and floating-point buffers in another precision."""
        params, frozen = _cast(self.params, dtype), _cast(self.frozen, dtype)
        return Functional(self.module, params, frozen, self.output, dtype, self.device)

    def prepare(self, inputs: Inputs) -> Inputs:
        """Move a batch to the function's device and precision (integers stay integers)."""
        return map_inputs(inputs, lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None))

    @property
    def num_params(self) -> int:
        """Number of differentiated parameters, p."""
        return sum(p.numel() for p in self.params.values())


def functional(
    module: nn.Module,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    precision: str = "float32",
) -> Functional:
    """Take a module apart into a function and its parameters.

    Args:
        module: any nn.Module whose examples do not mix (no BatchNorm in train mode, no active dropout).
        params: which parameters to differentiate: None (those with requires_grad), "all", a name, a layer prefix or a
            glob pattern, a list of those, or a predicate `(name, tensor) -> bool`.
        output: how to get a tensor [n, ...] from what the module returns, for modules that return tuples or objects.
        precision: "float32" (a float64 module stays float64), "float64", "tf32" or "bf16".

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> list(functional(net, params="2").params)
        ['2.weight', '2.bias']
    """
    if not isinstance(module, nn.Module):
        raise _no_module(module)
    module = getattr(module, "_orig_mod", module)  # a compiled module hides the original one here
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{type(module).__name__} is TorchScript, whose parameters torch cannot swap: pass the module it was made "
            "from, or nn.Sequential(it)"
        )
    refuse_inference_mode()
    parts = modules_of(module)
    kinds = set(map(type, parts))  # many modules, of few classes
    if not all(map(is_harmless, kinds)):
        refuse_wrappers(module)
        refuse_batch_dependence(module)
    plain = type(module).named_parameters is nn.Module.named_parameters  # a class may hide some
    named = tensors_in(parts, "_parameters") if plain else dict[str, Tensor](module.named_parameters())
    if not named:
        raise InputError(f"{type(module).__name__} has no parameters: there is nothing to differentiate")
    for name, p in named.items():
        if p.is_inference():
            raise InputError(
                f"parameter '{name}' was made under torch.inference_mode and cannot be differentiated: build the model "
                "outside of it"
            )
        if not p.is_floating_point():
            raise UnsupportedError(
                f"parameter '{name}' is {p.dtype}: only real floating-point parameters are supported"
            )
    buffers = tensors_in(parts, "_buffers")
    device = refuse_devices(named, buffers)
    chosen = select_params(named, params)
    if any(issubclass(kind, TABLES) for kind in kinds):
        refuse_embeddings(parts, {k: named[k] for k in chosen})
    dtype = compute_dtype(precision, named.values())
    taken = {k: named.pop(k).detach() for k in chosen}
    frozen = {k: v.detach() for k, v in (named | buffers).items()}
    return Functional(module, _cast(taken, dtype), _cast(frozen, dtype), output, dtype, device)


def _no_module(given: Any) -> InputError:
    if isclass(given) and issubclass(given, nn.Module):
        return InputError(f"expected an nn.Module, got the class {given.__name__}: pass {given.__name__}(...)")
    return InputError(f"expected an nn.Module, got {type(given).__name__}; wrap a function in a module first")


def tensors_in(parts: Mapping[nn.Module, str], kind: str) -> Params:
    """The "_parameters" or "_buffers" of `modules_of`, each once, as `named_parameters` and `named_buffers` give them.

    Example:
        >>> list(tensors_in(modules_of(nn.Sequential(nn.Linear(3, 2))), "_parameters"))
        ['0.weight', '0.bias']
    """
    seen: dict[int, tuple[str, Tensor]] = {}
    for m, where in parts.items():
        for name, t in getattr(m, kind).items():
            if t is not None and id(t) not in seen:
                seen[id(t)] = (f"{where}.{name}" if where else name, t)
    return dict(seen.values())


def _cast(tensors: Params, dtype: torch.dtype) -> Params:
    """The floating-point ones in another precision."""
    return {k: v if v.dtype == dtype or not v.is_floating_point() else v.to(dtype) for k, v in tensors.items()}


def refuse_devices(named: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> torch.device:
    """The one device of all parameters and buffers, or an error that names what lies elsewhere."""
    devices = {t.device for tensors in (named, buffers) for t in tensors.values()}
    if len(devices) == 1 and (device := devices.pop()).type != "meta":
        return device
    for kind, tensors in (("parameter", named), ("buffer", buffers)):
        for name, t in tensors.items():
            if t.device.type == "meta":
                raise InputError(
                    f"{kind} '{name}' is on the meta device: it has a shape and no values. Call "
                    "model.to_empty(device='cpu') and load a state dict, or build the model outside of "
                    "torch.device('meta')"
                )
    devices = {p.device for p in named.values()}
    if len(devices) > 1:
        raise UnsupportedError(f"parameters live on several devices ({sorted(map(str, devices))}): move them to one")
    device = devices.pop()
    for name, t in buffers.items():
        if t.device != device and (t.dim() or t.device.type != "cpu"):  # torch takes single numbers from the CPU
            raise InputError(
                f"buffer '{name}' lives on {t.device}, the parameters on {device}: move all with model.to('{device}')"
            )
    return device


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that is meant, the CPU by default; refused before any work where torch does not see it.

    The one place that says where biascope computes: on the processor or a CUDA device. Others are refused: mps has no
    float64, which much of what is measured needs, and meta has no values.

    Example:
        >>> device_of(None)
        device(type='cpu')
        >>> device_of("mps")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: device 'mps' is not supported here; use cpu, cuda or cuda:0
    """
    try:
        where = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device {device!r} is not a torch device; use cpu, cuda or cuda:0") from error
    if where.type not in {"cpu", "cuda"}:
        raise InputError(f"device {str(device)!r} is not supported here; use cpu, cuda or cuda:0")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {str(device)!r} was asked for, but torch sees no CUDA device here; use cpu")
    if where.type == "cuda" and (where.index or 0) >= (count := torch.cuda.device_count()):
        raise InputError(f"device {str(device)!r}: torch sees {count} CUDA device(s), the first is cuda:0")
    return where


def compute_dtype(precision: str, params: Iterable[Tensor]) -> torch.dtype:
    """Precision in which the network itself is evaluated; bf16 and tf32 concern the contractions only."""
    if not isinstance(precision, str) or precision not in {"float32", "float64", "tf32", "bf16"}:
        raise InputError(f"precision={precision!r} is not known; choose float32, float64, tf32 or bf16")
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
            raise InputError(f"params={said(params)}: names, 'all' or a function (name, tensor) -> bool are needed")
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
    who = type(module).__name__
    if output is not None:
        out = output(out)
    elif not isinstance(out, Tensor) and isinstance(getattr(out, "logits", None), Tensor):
        out = out.logits  # Hugging Face heads
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
    return out if out.dim() == 2 else out.reshape(n, -1)


@contextmanager
def explained(module: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Around a plain call of a module: where torch's error leaves the user to search, name the layer and what it got.

    Example:
        >>> net, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 1)), torch.ones(2, 3)
        >>> with explained(net, x):  # doctest: +ELLIPSIS
        ...     net(x)
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: Sequential cannot take an input [2, 3]: its layer '1', Linear(in_features=5, \
        out_features=1, bias=True), got [2, 4] (RuntimeError: ... shapes cannot be multiplied (2x4 and 5x1))
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, BiascopeError | torch.OutOfMemoryError):
            raise
        shapes = " and ".join(str(list(t.shape)) for t in tensors_of(inputs))
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        (where, hint), who = _failing_layer(module, error.__traceback__, tensors_of(inputs)), _described(module)
        if isinstance(inputs, dict) and "unexpected keyword argument" in said:
            hint = f"; a dict holds the keyword arguments of forward: {pairs_hint(inputs)}"
        if isinstance(error, TypeError) and "required positional argument" in said:
            hint = several_hint(module)
        raise InputError(f"{who} cannot take an input {shapes}{where} ({said}){hint}") from error


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
        shape = "no tensor" if first is None else str(list(first.shape))
        found = f": its layer '{names[layer]}', {_described(layer)}, got {shape}"
        came_in = first is not None and any(first.shape == t.shape for t in whole)  # nothing was done to it before
        hint = input_hint(layer, first) if first is not None and came_in else ""
    return found, hint


def _described(layer: nn.Module) -> str:
    return type(layer).__name__ if any(True for _ in layer.children()) else repr(layer)
