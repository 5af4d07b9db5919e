"""Multi-scale structural similarity of small images (Wang et al.)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d

WINDOW, SIGMA = 11, 1.5
C1, C2 = 0.01**2, 0.03**2  # for values in [0, 1]
WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # of the scales; renormalised where there are fewer


def ms_ssim(x: Tensor, y: Tensor) -> Tensor:
    """MS-SSIM [n] of images x, y [n, 1, s, s] in [0, 1], at as many scales (of five) as the window of 11 fits in.

    28 x 28 pixels have two scales. Contrast and structure below 0 count as 0.

    Example:
        >>> x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        >>> ms_ssim(x, x).tolist()
        [1.0, 1.0]
    """
    line = torch.exp(-((torch.arange(WINDOW, device=x.device) - WINDOW // 2) ** 2) / (2 * SIGMA**2)).to(x.dtype)
    window = (line[:, None] * line / line.sum() ** 2)[None, None]
    scales = [(x, y)]
    while scales[-1][0].shape[-1] // 2 >= WINDOW and len(scales) < len(WEIGHTS):
        scales.append((avg_pool2d(scales[-1][0], 2), avg_pool2d(scales[-1][1], 2)))
    weights = torch.tensor(WEIGHTS[: len(scales)], device=x.device, dtype=x.dtype)
    weights = weights / weights.sum()
    value = torch.ones(len(x), device=x.device, dtype=x.dtype)
    for i, (a, b) in enumerate(scales):
        mean_a, mean_b = conv2d(a, window), conv2d(b, window)
        var_a = conv2d(a * a, window) - mean_a**2
        var_b = conv2d(b * b, window) - mean_b**2
        covariance = conv2d(a * b, window) - mean_a * mean_b
        structure = (2 * covariance + C2) / (var_a + var_b + C2)
        if i + 1 == len(scales):
            structure = structure * (2 * mean_a * mean_b + C1) / (mean_a**2 + mean_b**2 + C1)
        value = value * structure.mean((1, 2, 3)).clamp_min(0) ** weights[i]
    return value
