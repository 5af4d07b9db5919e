"""Checks of numbers and tensors that a user hands over."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from biascope.errors import InputError


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with NaN or infinity; one synchronisation per device where all are finite."""
    devices: dict[torch.device, list[Tensor]] = {}
    for t in tensors.values():
        devices.setdefault(t.device, []).append(t.isfinite().all())
    if all(bool(torch.stack(flags).all()) for flags in devices.values()):
        return None
    return next(name for name, t in tensors.items() if not bool(t.isfinite().all()))


def check_positive(name: str, value: float) -> float:
    """A finite number > 0."""
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name} must be a number > 0, not {value}")
    return float(value)


def check_decay(name: str, value: float) -> float:
    """A number in [0, 1)."""
    if not 0 <= value < 1:
        raise InputError(f"{name} must be at least 0 and below 1, not {value}")
    return float(value)
