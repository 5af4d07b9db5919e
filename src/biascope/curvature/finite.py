"""Is everything a number? Asked of many tensors at once, so that a GPU is waited for once."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor


def finite(tensors: Sequence[Tensor]) -> list[bool]:
    """For each tensor: is every entry a number? Smallest and largest tell, in one pass each and one synchronisation.

    Example:
        >>> finite([torch.ones(2), torch.tensor([1.0, float("inf")])])
        [True, False]
    """
    some = [t for t in tensors if t.numel()]
    if not some:
        return [True] * len(tensors)
    extremes = iter(torch.stack([e for t in some for e in torch.aminmax(t)]).tolist())
    return [not t.numel() or (isfinite(next(extremes)) & isfinite(next(extremes))) for t in tensors]


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Is every entry of every tensor a number?

    Example:
        >>> all_finite([torch.ones(2), torch.tensor(float("nan"))])
        False
    """
    return all(finite(tensors))
