"""What to change when an input does not fit: ends of error messages, each with the call that mends it."""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

TOKENS = (
    "; it looks up token numbers: pass x.long(), or, for a derivative by the input, wrap the network so that it takes "
    "embedded tokens"
)


def pairs_hint(batch: Mapping[str, Any]) -> str:
    """How a dict that is no set of keyword arguments becomes a pair (x, y), by the names of its entries."""
    tensors = [k for k, v in batch.items() if isinstance(v, Tensor) and v.dim()]
    x = max(tensors, key=lambda k: batch[k].dim(), default="x")
    others = [k for k in tensors if k != x]
    named = [k for k in others if k == "y" or any(word in str(k).lower() for word in ("label", "target", "class"))]
    y = next(iter([*named, *others]), "y")
    return f"pass pairs, e.g. [(batch[{x!r}], batch[{y!r}]) for batch in loader]"


def arguments_of(module: nn.Module) -> dict[str, bool | None]:
    """What a module's forward takes: True where it is needed, None where it may be left out and None stands for it."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    try:
        own = signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return {}
    return {p.name: None if p.default is None else p.kind in kinds and p.default is Parameter.empty for p in own}


def several_hint(module: nn.Module) -> str:
    """How to hand in several inputs, by the names of the module's forward."""
    needed = [name for name, needs in arguments_of(module).items() if needs]
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):  # of transformers: all may be left out
        needed = [str(getattr(module, "main_input_name", "input_ids")), "decoder_input_ids"]
    named = ", ".join(f"{name!r}: ..." for name in needed)
    wrapped = "where a shape is given, as to bs.nads, wrap it in a module that takes one"
    return f"; for several inputs give a dict {{{named}}}; {wrapped}" if needed[1:] else ""


def batch_hint(module: nn.Module, x: Tensor) -> str:
    """The fix where an axis is missing in front, by the first layer that has weights: what one example looks like."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    first = next((m for m in module.modules() if isinstance(m, kinds)), None)
    if first is None or x.dim() != (1 if isinstance(first, nn.Linear) else len(first.kernel_size) + 1):
        return ""
    if not isinstance(first, nn.Linear) and first.in_channels == 1 != x.shape[0]:
        return "the axis of the channel is missing: pass x[:, None]. "
    return "the first axis counts examples: for one example pass x[None], for a list of them torch.stack(x). "


def input_hint(layer: nn.Module, x: Tensor) -> str:
    """Why a layer may refuse the input x [n, ...]: channels in the last axis, or numbers of another kind."""
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return TOKENS if x.is_floating_point() else ""
    if not x.is_floating_point():
        return f"; its numbers are {x.dtype}: pass x.float(), scaled as in training"
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) or x.dim() != len(layer.kernel_size) + 2:
        return ""
    if x.shape[-1] != layer.in_channels or x.shape[1] == layer.in_channels:
        return ""
    axes = ", ".join(map(str, (0, x.dim() - 1, *range(1, x.dim() - 1))))
    return f"; channels come before pixels: pass x.permute({axes})"
