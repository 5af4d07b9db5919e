"""nn.MultiheadAttention taken apart into projections that have rules.

`F.multi_head_attention_forward` is one opaque call to a recorder. The same mathematics written with F.linear lets the
recorder see the projections. Rare options (bias_k, add_zero_attn, static keys) are left to the caller's fallback.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

NAMES = tuple(
    name
    for line in (
        "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn",
        "dropout_p out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask",
        "use_separate_proj_weight q_proj_weight k_proj_weight v_proj_weight static_k static_v",
        "average_attn_weights is_causal",
    )
    for name in line.split()
)
DEFAULTS = {"training": True, "need_weights": True, "average_attn_weights": True, "is_causal": False}


def decomposable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments by name if the call uses only what `attention` supports, else None."""
    call: dict[str, Any] = dict.fromkeys(NAMES) | DEFAULTS | dict(zip(NAMES, args)) | kwargs
    rare = ("bias_k", "bias_v", "static_k", "static_v")
    if any(call[r] is not None for r in rare) or call["add_zero_attn"] or (call["training"] and call["dropout_p"] > 0):
        return None
    return call if call["query"].dim() == 3 else None


def attention(call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """softmax(Q K^T / sqrt(d) + masks) V with every projection a plain F.linear; layout [L, N, E] in and out."""
    q, k, v, heads = call["query"], call["key"], call["value"], call["num_heads"]
    E = call["embed_dim_to_check"]
    weight, bias = call["in_proj_weight"], call["in_proj_bias"]
    if call["use_separate_proj_weight"]:
        b = bias.chunk(3) if bias is not None else (None, None, None)
        weights = (call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"])
        q, k, v = (F.linear(x, w, c) for x, w, c in zip((q, k, v), weights, b))
    elif q is k and k is v:
        q, k, v = F.linear(q, weight, bias).chunk(3, -1)
    else:  # the packed weight is applied whole to each input, so that it stays one parameter with several uses
        q, k, v = (F.linear(x, weight, bias)[..., i * E : (i + 1) * E] for i, x in enumerate((q, k, v)))
    L, N, S = q.shape[0], q.shape[1], k.shape[0]
    d = E // heads
    q, k, v = (t.reshape(t.shape[0], N, heads, d).permute(1, 2, 0, 3) for t in (q, k, v))
    scores = q @ k.mT / math.sqrt(d)  # [N, heads, L, S]
    mask = call["attn_mask"]
    if mask is None and call["is_causal"]:
        mask = torch.ones(L, S, dtype=torch.bool, device=q.device).triu(1)
    if mask is not None:
        mask = mask.reshape(N, heads, L, S) if mask.dim() == 3 else mask
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    padding = call["key_padding_mask"]
    if padding is not None:
        padding = padding[:, None, None]
        scores = scores.masked_fill(padding, -math.inf) if padding.dtype == torch.bool else scores + padding
    p = scores.softmax(-1)
    out = (p @ v).permute(2, 0, 1, 3).reshape(L, N, E)
    out = F.linear(out, call["out_proj_weight"], call["out_proj_bias"])
    if not call["need_weights"]:
        return out, None
    return out, p.mean(1) if call["average_attn_weights"] else p


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention without dropout, every step a call of its own; [..., heads, L, d] in and out."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if boolean else scores + attn_mask
    return scores.softmax(-1) @ value
