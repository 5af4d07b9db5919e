"""Coordinates of a regular grid, end point left out, so that whole frequencies fall on exact DFT bins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.signatures import checked


@checked
def coordinates(
    shape: int | Sequence[int], low: float = -1.0, high: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The points of a grid on [low, high)^d: [*shape, d], the last axis in the order of the axes of the grid.

    With the end point included, as `linspace` has it, the energies that theory says are zero are not.

    Args:
        shape: samples per axis: 128 or (128,) for a signal, (H, W) for an image, (T, H, W) for a video.
        low: first coordinate of every axis.
        high: where the next sample would be.
        dtype: of the coordinates.

    Example:
        >>> coordinates(4, 0.0, 1.0).flatten().tolist()
        [0.0, 0.25, 0.5, 0.75]
        >>> coordinates((2, 3)).shape
        torch.Size([2, 3, 2])
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or min(sizes) < 1:
        raise InputError(f"shape={shape!r}: a grid needs at least one sample along every axis")
    if not low < high:
        raise InputError(f"low={low:g} must be below high={high:g}")
    axes = [(low + (high - low) * torch.arange(n, dtype=torch.float64, device="cpu") / n).to(dtype) for n in sizes]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
