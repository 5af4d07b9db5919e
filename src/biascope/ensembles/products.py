"""Convolutions of many small networks as matrix products.

Under vmap a convolution with one weight per network becomes a grouped convolution, which cuDNN runs group by group:
thousands of tiny kernels for a few hundred networks. Written as patches times weights it is one batched product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LARGEST_PATCH = 512  # inputs per output value; beyond that the copies of patches cost more than they save


class ConvolutionsAsProducts(TorchFunctionMode):
    """While active, 2-D convolutions without groups and dilation are computed by `patch_product`.

    Batch normalisation is left to torch's own kernel: the way to cuDNN's asks for a memory layout, which vmap refuses.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Only torch.conv2d and F.batch_norm are treated."""
        if func is torch.conv2d:
            found = patch_product(*args, **(kwargs or {}))
            if found is not None:
                return found
        if func is F.batch_norm:
            with torch.backends.cudnn.flags(enabled=False):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def patch_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """conv2d of x [n, c, h, w] with weight [o, c, kh, kw] as patches times weights; None where that does not apply.

    Example:
        >>> x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 5, 5)
        >>> torch.allclose(patch_product(x, w, stride=2, padding=1), F.conv2d(x, w, stride=2, padding=1), atol=1e-4)
        True
    """
    o, c, kh, kw = weight.shape
    if (
        groups != 1
        or _pair(dilation) != (1, 1)
        or isinstance(padding, str)
        or x.dim() != 4
        or c * kh * kw > LARGEST_PATCH
    ):
        return None
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        half = torch.get_autocast_dtype(x.device.type)  # before copying: patches are half as large
        x, weight, bias = x.to(half), weight.to(half), None if bias is None else bias.to(half)
    (sh, sw), (ph, pw) = _pair(stride), _pair(padding)
    if ph or pw:
        x = F.pad(x, (pw, pw, ph, ph))
    patches = x.unfold(2, kh, sh).unfold(3, kw, sw)  # [n, c, h', w', kh, kw], a view
    n, _, height, width = patches.shape[:4]
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(n * height * width, c * kh * kw)
    out = rows @ weight.flatten(1).T
    if bias is not None:
        out = out + bias
    return out.view(n, height, width, o).permute(0, 3, 1, 2)


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))
