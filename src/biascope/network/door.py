"""The door: everything that is asked of a network before it is differentiated, each question in one place.

A network whose examples have no derivative of their own, or none that torch can take, is refused by name: wrappers and
shards, layers that depend on the batch, random outputs, mixed examples, reentrant checkpoints. `functional` asks once
per structure and selection and keeps the answer as a certificate; the pilot asks once per shape of the inputs.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import isclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointFunction

from biascope.support.errors import InputError, UnsupportedError

SHARDED = {"FullyShardedDataParallel", "FSDPModule"}  # by name: torch.distributed is not there in every build
LOOKED_AT = (
    nn.DataParallel,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.MultiheadAttention,
)  # what else `refuse_wrappers` and `refuse_batch_dependence` look at
TABLES = (nn.Embedding, nn.EmbeddingBag)
HALVES = (torch.float16, torch.bfloat16)
REENTRANT = (
    "the network uses torch.utils.checkpoint with use_reentrant=True, which hides its layers from "
    "torch.autograd.grad; use use_reentrant=False"
)


def modules_of(module: nn.Module) -> dict[nn.Module, str]:
    """Names of a module and all in it, each once, in the order of `named_modules`, whose generators take their time."""
    names: dict[nn.Module, str] = {}

    def walk(m: nn.Module, name: str) -> None:
        if m not in names:
            names[m] = name
            for child, inner in m._modules.items():
                if inner is not None:
                    walk(inner, f"{name}.{child}" if name else child)

    walk(module, "")
    return names


@cache
def is_harmless(kind: type) -> bool:
    """Is this a class of modules that `refuse_wrappers` and `refuse_batch_dependence` never refuse?"""
    return not issubclass(kind, LOOKED_AT) and SHARDED.isdisjoint([base.__name__ for base in kind.__mro__])


def refuse_wrappers(module: nn.Module, shards: bool = False) -> None:
    """Raise if the network is hidden in a wrapper that spreads it or its parameters over devices; FSDP2 may be fine."""
    for name, m in module.named_modules():
        where = f"{type(m).__name__} '{name}'" if name else type(m).__name__
        if isinstance(m, nn.DataParallel):
            raise InputError(
                f"{where} copies the network to several devices for every call and cannot be differentiated by name: "
                f"pass {f'a network without it ({name}.module in its place)' if name else 'net.module'}"
            )
        kinds = SHARDED.intersection(kind.__name__ for kind in type(m).__mro__)
        if kinds and not (shards and kinds == {"FSDPModule"}):
            raise UnsupportedError(
                f"{where} spreads every parameter over the processes, so none of them holds the network. With group=, "
                "bs.fisher and bs.ggn (representations diagonal, kfac, ekfac), bs.hessian, bs.label_alignment and "
                "bs.sketched_ntk take what fully_shard has made. For all else load its full state dict "
                "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True) into a plain "
                "copy of the network and pass that"
            )


def refuse_batch_dependence(module: nn.Module) -> None:
    """Raise if a layer makes one example's output depend on the others, or on chance."""
    for name, m in module.named_modules():
        where = f"{type(m).__name__} '{name}'" if name else type(m).__name__
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            if m.training:
                raise UnsupportedError(
                    f"{where} is in train mode: its output depends on the whole batch, so no example has a derivative "
                    "of its own. Call model.eval() first"
                )
            if m.running_mean is None and not isinstance(m, nn.modules.instancenorm._InstanceNorm):
                raise UnsupportedError(
                    f"{where} keeps no running statistics (track_running_stats=False) and normalises by the batch even "
                    "in eval mode: per-example derivatives do not exist"
                )
        if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0:
            raise UnsupportedError(f"{where} is active (train mode, p={m.p}): call model.eval() first")
        if m.training and isinstance(m, nn.RNNBase | nn.MultiheadAttention) and m.dropout > 0:
            raise UnsupportedError(f"{where} has active dropout (p={m.dropout}): call model.eval() first")
    refuse_embeddings(modules_of(module), dict(module.named_parameters()))


def refuse_embeddings(parts: Mapping[nn.Module, str], chosen: Mapping[str, Tensor]) -> None:
    """Raise if a table of `modules_of` changes when it is called, or has gradients in which the examples mix."""
    for m, name in parts.items():
        if not isinstance(m, TABLES):
            continue
        where = f"{type(m).__name__} '{name}'" if name else type(m).__name__
        if m.max_norm is not None:
            raise UnsupportedError(
                f"{where} has max_norm={m.max_norm}, which writes new weights into the model at every call: bring the "
                "rows to that norm once, then set max_norm = None"
            )
        inside = f"{name}." if name else ""
        if m.scale_grad_by_freq and any(p is m.weight or k.startswith(inside) for k, p in chosen.items()):
            raise UnsupportedError(
                f"{where} has scale_grad_by_freq=True: the gradient of an example depends on the others in its batch "
                "and is no derivative. Set scale_grad_by_freq = False, or leave its weight out of params"
            )


def refuse_inference_mode() -> None:
    """Raise if torch.inference_mode is on."""
    if torch.is_inference_mode_enabled():
        raise InputError("torch.inference_mode is on: nothing can be differentiated in it. Use torch.no_grad instead")


@contextmanager
def no_reentrant_checkpoints() -> Iterator[None]:
    """UnsupportedError where `torch.utils.checkpoint(..., use_reentrant=True)` leaves its layers without derivatives.

    torch only warns. For a trial, not for every pass: filters of warnings belong to the whole process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="None of the inputs have requires_grad=True")
        try:
            yield
        except UserWarning as warning:
            if "requires_grad=True" not in str(warning):
                raise
            raise UnsupportedError(REENTRANT) from None


AGAIN = 8  # evaluations by which randomness is looked for in a network that draws random numbers


def random_state(device: torch.device) -> Tensor:
    """The state of a device's random numbers: it changes when one is drawn."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def refuse_random(module: nn.Module, evaluate: Callable[[], Tensor], rows: Tensor) -> None:
    """Raise for a network that drew random numbers and uses them: `evaluate` gives other outputs than `rows` [n, c].

    In train mode it is refused at once: a block that is left out for one example in fifty is rarely seen in a trial.
    """
    who = type(module).__name__
    if any(m.training for m in modules_of(module)):
        raise UnsupportedError(
            f"{who} may give different outputs for the same inputs: it draws random numbers in train mode; call "
            ".eval() first"
        )
    with torch.no_grad():
        if not all(alike(evaluate(), rows) for _ in range(AGAIN)):
            raise UnsupportedError(
                f"{who} gives different outputs for the same inputs: switch off what is random in it"
            )


def refuse_mixing(module: nn.Module, evaluate: Callable[[], Tensor], rows: Tensor, fewer: Tensor) -> None:
    """Raise where the first examples have other outputs `fewer` [m, c] than beside others, `rows` [n, c]."""
    who = type(module).__name__
    if not bool(torch.isfinite(rows).all()):
        raise UnsupportedError(f"{who} returned NaN or infinity on the first examples; nothing can be differentiated")
    if alike(fewer, rows[: len(fewer)], float(rows.abs().max())):
        return
    with torch.no_grad():
        again = evaluate()
    if not torch.equal(again, rows):
        raise UnsupportedError(f"{who} gives different outputs for the same inputs: switch off what is random in it")
    raise UnsupportedError(
        f"{who} gives an example a different output when the batch changes: examples are mixed somewhere (a statistic "
        "over the batch?), so per-example derivatives do not exist"
    )


def alike(a: Tensor, b: Tensor, size: float | None = None) -> bool:
    """Do two evaluations agree but for rounding, on the scale of the largest entry?"""
    tol = torch.finfo(b.dtype).eps ** 0.5
    scale = float(b.abs().max()) if size is None else size
    return torch.allclose(a, b, rtol=tol if size is not None else 0.0, atol=tol * max(scale, 1e-30))


# ----------------------------------------------------------------------------------------- modules and their parameters


def no_module(given: Any) -> InputError:
    """The error for what is not a module."""
    if isclass(given) and issubclass(given, nn.Module):
        return InputError(f"expected an nn.Module, got the class {given.__name__}: pass {given.__name__}(...)")
    return InputError(f"expected an nn.Module, got {type(given).__name__}; wrap a function in a module first")


def uninitialised(tensors: Mapping[str, Tensor]) -> InputError:
    """The error for a lazy module that has not seen an input yet."""
    name = next(name for name, t in tensors.items() if is_lazy(t))
    return InputError(
        f"'{name}' is an uninitialized parameter of a lazy layer: run a batch through the network first, with "
        "torch.no_grad(): net(x[:2])"
    )


_WIDENED: WeakSet[nn.Module] = WeakSet()


def say_widened(module: nn.Module, kinds: Iterable[torch.dtype]) -> None:
    """Warn, once per network, that half-precision parameters are computed in float32, which takes twice the memory."""
    halves = sorted({str(kind).removeprefix("torch.") for kind in kinds if kind in HALVES})
    if halves and module not in _WIDENED:
        _WIDENED.add(module)
        who = f"the weights of {type(module).__name__} are {' and '.join(halves)}"
        warnings.warn(f"{who}; they are computed in float32, in a copy that takes twice the memory", stacklevel=3)


def refuse_script(module: nn.Module) -> None:
    """Raise for TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{type(module).__name__} is TorchScript, whose parameters torch cannot swap: pass the module it was made "
            "from, or nn.Sequential(it)"
        )


def refuse_parameters(module: nn.Module, named: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Raise if there is no parameter, or one that cannot be differentiated, or several devices."""
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
    refuse_devices(named, buffers)


def refuse_devices(named: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Raise unless all parameters and buffers are on one device, by the name of what lies elsewhere."""
    devices = {t.device for tensors in (named, buffers) for t in tensors.values()}
    if len(devices) == 1 and next(iter(devices)).type != "meta":
        return
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


def refuse_reentrant_checkpoint() -> None:
    """Raise inside `torch.utils.checkpoint(..., use_reentrant=True)`: its layers look as if they had no derivative."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise UnsupportedError(REENTRANT)
