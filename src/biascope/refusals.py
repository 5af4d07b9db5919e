"""What of a network has no derivative for a single example, or none that torch can take, refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from biascope.errors import InputError, UnsupportedError

SHARDED = {"FullyShardedDataParallel", "FSDPModule"}  # by name: torch.distributed is not there in every build
LOOKED_AT = (
    nn.DataParallel,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.MultiheadAttention,
)  # what else `refuse_wrappers` and `refuse_batch_dependence` look at
TABLES = (nn.Embedding, nn.EmbeddingBag)
REENTRANT = (
    "the network uses torch.utils.checkpoint with use_reentrant=True, which hides its layers from "
    "torch.autograd.grad; use use_reentrant=False"
)


def modules_of(module: nn.Module) -> dict[nn.Module, str]:
    """Names of a module and all in it, each once, in the order of `named_modules`, whose generators take their time.

    Example:
        >>> list(modules_of(nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.ReLU()))).values())
        ['', '0', '1', '1.0']
    """
    names: dict[nn.Module, str] = {}

    def walk(m: nn.Module, name: str) -> None:
        if m not in names:
            names[m] = name
            for child, inner in m._modules.items():
                if inner is not None:
                    walk(inner, f"{name}.{child}" if name else child)

    walk(module, "")
    return names


def is_harmless(kind: type) -> bool:
    """Is this a class of modules that `refuse_wrappers` and `refuse_batch_dependence` never refuse?"""
    return not issubclass(kind, LOOKED_AT) and SHARDED.isdisjoint([base.__name__ for base in kind.__mro__])


def refuse_wrappers(module: nn.Module) -> None:
    """Raise if the network is hidden in a wrapper that spreads it or its parameters over devices."""
    for name, m in module.named_modules():
        where = f"{type(m).__name__} '{name}'" if name else type(m).__name__
        if isinstance(m, nn.DataParallel):
            raise InputError(
                f"{where} copies the network to several devices for every call and cannot be differentiated by name: "
                f"pass {f'a network without it ({name}.module in its place)' if name else 'net.module'}"
            )
        if not SHARDED.isdisjoint(kind.__name__ for kind in type(m).__mro__):
            raise UnsupportedError(
                f"{where} spreads every parameter over the processes, so none of them holds the network: load its full "
                "state dict (torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True) "
                "into a plain copy of the network and pass that"
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
    """Raise if a table of `modules_of` changes when it is called, or has gradients in which the examples mix.

    Example:
        >>> refuse_embeddings(modules_of(nn.Embedding(5, 2, max_norm=1.0)), {})
        Traceback (most recent call last):
        ...
        biascope.errors.UnsupportedError: Embedding has max_norm=1.0, which writes new weights into the model at every \
        call: bring the rows to that norm once, then set max_norm = None
    """
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
    """Raise if torch.inference_mode is on.

    Example:
        >>> refuse_inference_mode()
    """
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
