"""Rarer torch functions for the recorder, most of them several uses in one call; imported by the pilot."""

from typing import Any

import torch
from torch.nn import functional as F

from biascope.network.layers import attention
from biascope.network.layers.record import Recorder, bind, handles
from biascope.network.layers.rules import Broadcast


@handles(torch.Tensor.repeat)
def _repeat(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p, times = args[0], args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
    lead = len(times) - p.dim()
    spread = all(k == 1 or d < lead or p.shape[d - lead] == 1 for d, k in enumerate(times))
    if not r.name(p) or not spread or kwargs:
        return NotImplemented
    return r.note(func(*args), Broadcast(tuple(p.shape), 1.0), {"weight": p}, None)


@handles(torch.addcmul, torch.Tensor.addcmul)
def _addcmul(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or not set(kwargs) <= {"value"}:
        return NotImplemented
    with r:
        return args[0] + kwargs.get("value", 1) * (args[1] * args[2])


@handles(F.scaled_dot_product_attention)
def _scaled_dot_product(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With positions learnt as a bias of the scores."""
    c = bind("query key value attn_mask dropout_p is_causal scale enable_gqa", args, kwargs)
    if any(r.name(c[x]) for x in ("query", "key", "value")) or c.get("dropout_p"):
        return NotImplemented
    with r:
        return attention.scaled_dot_product(**c)


@handles(F.multi_head_attention_forward)
def _multi_head(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = attention.decomposable(args, kwargs)
    if call is None:
        return NotImplemented
    with r:  # the projections are uses of their own
        return attention.attention(call)


@handles(torch.Tensor.expand)
def _expand(r: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not r.name(args[0]):
        return NotImplemented
    return r.note(func(*args, **kwargs), Broadcast(tuple(args[0].shape), 1.0), {"weight": args[0]}, None)
