"""LeNet's average geometry without sampling: the covariance recursion through its two convolutions and poolings.

Exact for the linearised network without biases (GELU at x -> 0). Biases multiply channels by random gains, which hardly
changes the shape of G; the scale is not meant.
"""

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.geometry.linear_cnn import (
    GELU_GAIN,
    dense_head,
    pool_matrix,
    tap_matrices,
    through_average_pool,
    through_convolution,
)


def lenet_geometry(side: int, channels: int = 1) -> Tensor:
    """G [channels side^2, channels side^2] of conv5(6)-avg2-conv5(16)-avg2-dense, trace 1; channels are uncorrelated.

    Example:
        >>> lenet_geometry(16).shape
        torch.Size([256, 256])
    """
    sizes = [side, side - 4, (side - 4) // 2, (side - 4) // 2 - 4]
    if (side - 4) % 2 or sizes[3] < 2 or sizes[3] % 2:
        raise InputError(f"LeNet's poolings must divide evenly: side={side} gives {sizes}; use 16, 20, 24, 28 or 32")
    covariance = dense_head((sizes[3] // 2) ** 2, [1.0])
    for outer, inner, filters in ((sizes[2], sizes[3], 16), (sizes[0], sizes[1], 6)):
        covariance = through_average_pool(covariance, pool_matrix((inner, inner), 2)) * GELU_GAIN
        covariance = _convolution(covariance, outer, inner, filters)
    # channels are independent filters of the first layer
    return torch.kron(torch.eye(channels, dtype=torch.float64), covariance) / (channels * covariance.trace())


def _convolution(covariance: Tensor, outer: int, inner: int, filters: int) -> Tensor:
    if inner * outer <= 100:
        return through_convolution(covariance, tap_matrices((outer, outer), 5), filters, 1.0)
    # sum over taps of shifted copies: the same without matrices of zeros and ones
    C = covariance.view(inner, inner, inner, inner)
    total = torch.zeros(outer, outer, outer, outer, dtype=C.dtype)
    for a in range(5):
        for b in range(5):
            total[a : a + inner, b : b + inner, a : a + inner, b : b + inner] += C
    return filters * total.view(outer**2, outer**2)
