"""Is everything a number? Asked of many tensors at once, so that a GPU is waited for once."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor


def finite(tensors: Sequence[Tensor]) -> list[bool]:
    """For each tensor: is every entry a number?

    The norms tell, with one operation and one synchronisation for all. Only where a norm is none (an entry is none, or
    large enough for its square to overflow) are the smallest and largest entries looked at.

    Example:
        >>> finite([torch.ones(2), torch.tensor([1.0, float("inf")])])
        [True, False]
    """
    some = [t for t in tensors if t.numel() and t.is_floating_point()]
    if not some or all(map(isfinite, torch.stack(torch._foreach_norm(some)).tolist())):
        return [True] * len(tensors)
    return [not t.numel() or all(map(isfinite, torch.stack(torch.aminmax(t)).tolist())) for t in tensors]


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Is every entry of every tensor a number?

    Example:
        >>> all_finite([torch.ones(2), torch.tensor(float("nan"))])
        False
    """
    return all(finite(tensors))
