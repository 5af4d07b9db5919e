"""Checks of numbers and tensors that a user hands over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from biascope.arguments import as_number
from biascope.curvature import contract
from biascope.errors import InputError


class Finite:
    """Are all tensors finite? Asked here, answered by `bad`: in between a GPU is sent more work."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        devices: dict[torch.device, list[Tensor]] = {}
        for t in tensors.values():
            if t.numel():
                devices.setdefault(t.device, []).append(t)
        self.largest = [_later(_largest(found)) for found in devices.values()]

    def bad(self) -> str | None:
        """The name of the first tensor with NaN or infinity; one wait per device where all are finite."""
        if all(math.isfinite(read()) for read in self.largest):
            return None
        return next(name for name, t in self.tensors.items() if not bool(t.isfinite().all()))


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest absolute value; infinite or NaN if one is."""
    if tensors[0].device.type in contract.CACHED:  # there, infinity norms are slow
        extremes = [value for t in tensors for value in t.aminmax()]
        return torch.stack(extremes).abs().max()
    return torch.stack(torch._foreach_norm(tensors, math.inf)).max()


def _later(t: Tensor) -> Callable[[], float]:
    """A number that is waited for when it is read: not for what was sent to the GPU after it."""
    if not t.is_cuda:
        return lambda: float(t)
    copy, done = t.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(t.device))

    def read() -> float:
        done.synchronize()
        return float(copy)

    return read


def check_positive(name: str, value: float) -> float:
    """A finite number > 0."""
    found = as_number(value, name)
    if not (found > 0 and math.isfinite(found)):
        raise InputError(f"{name} must be a number > 0, not {value}")
    return found


def check_decay(name: str, value: float) -> float:
    """A number in [0, 1)."""
    found = as_number(value, name)
    if not 0 <= found < 1:
        raise InputError(f"{name} must be at least 0 and below 1, not {value}")
    return found


def as_list(params: Any) -> list[Any]:
    """Parameters, or groups of them, as torch's optimisers take them.

    Example:
        >>> as_list("weight")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: params: expected parameters of the model, e.g. model.head.parameters(), got str
    """
    found = list(params) if isinstance(params, Iterable) and not isinstance(params, str | Tensor) else None
    if found is None or not all(isinstance(p, Tensor | Mapping) for p in found):
        raise InputError(
            f"params: expected parameters of the model, e.g. model.head.parameters(), got {type(params).__name__}"
        )
    return found
