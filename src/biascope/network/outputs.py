"""Which tensor a network's output stands for, where the network returns more than one tensor."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def main_tensor(out: Any) -> tuple[Tensor | None, str]:
    """The tensor that is meant by what a network returned, and how to get at it ("" for a tensor by itself).

    `.logits` or `["logits"]` where there is one; of a tuple the first floating-point tensor; of a dict the only one.
    None where that leaves a choice.

    Example:
        >>> import torch
        >>> main_tensor({"loss": None, "logits": torch.zeros(2, 3)})[1]
        "['logits']"
        >>> main_tensor((torch.zeros(2, 3), (torch.ones(1), torch.ones(1))))[1]
        '[0]'
    """
    if isinstance(out, Tensor):
        return out, ""
    if isinstance(out, Mapping):
        held = {key: value for key, value in out.items() if _real(value)}
        key = "logits" if "logits" in held else next(iter(held), None)
        if key is None or (key != "logits" and len(held) > 1):
            return None, ""
        return held[key], f".{key}" if getattr(out, str(key), None) is held[key] else f"[{key!r}]"
    if _real(getattr(out, "logits", None)):
        return out.logits, ".logits"
    if isinstance(out, tuple | list):
        for i, value in enumerate(out):
            if _real(value):
                return value, f"[{i}]"
    return None, ""


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
