"""Convolutions with a backward pass of forward convolutions.

In float32 cuDNN's way back to the input runs at 11 to 28 TFLOP/s on an H200 where its way forward runs at 39, and on
images of a few pixels either of them at 12. The way back is as well a forward convolution of the gradient, with the
weights turned round (for a stride, one for every phase of it), and on few pixels a product of patches is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

DEVICES = ("cuda",)  # where it pays
FEW_PIXELS = 16  # of an image up to which the product of patches is faster


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """torch's conv2d of x [n, c, h, w] with weight [o, c, kh, kw]; only x is differentiated, by faster kernels.

    Where they are not (other devices, tf32, half precision, groups, dilation), and for data, it is torch's own.

    Example:
        >>> x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
        >>> torch.equal(conv2d(x, w, padding=1), F.conv2d(x, w, padding=1))
        True
    """
    if (
        not x.requires_grad
        or x.device.type not in DEVICES
        or x.dim() != 4
        or groups != 1
        or isinstance(padding, str)
        or _pair(dilation) != (1, 1)
        or x.dtype not in (torch.float32, torch.float64)
        or torch.is_autocast_enabled(x.device.type)
        or torch.backends.cudnn.allow_tf32
    ):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    parameters = (weight.detach(), None if bias is None else bias.detach())
    out: Tensor = _Convolution.apply(x, *parameters, _pair(stride), _pair(padding))  # type: ignore[no-untyped-call]
    return out


class _Convolution(torch.autograd.Function):
    """Forward as torch's (or the product of patches); backward to x by `pull_back`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        if stride == (1, 1) and _few_pixels(x, weight):
            out = _patch_product(F.pad(x, (padding[1], padding[1], padding[0], padding[0])), weight)
            return out if bias is None else out + bias[:, None, None]
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.stride, ctx.padding = inputs
        ctx.image = x.shape[2:]
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return pull_back(g, weight, ctx.image, ctx.stride, ctx.padding), None, None, None, None


def pull_back(
    g: Tensor, weight: Tensor, image: Sequence[int], stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """The gradient [n, c, *image] at the input of a convolution from g [n, o, h', w'] at its output.

    In one dimension, y[j] = sum_k x[s j + k - p] w[k], so an input at i = s q + r - p with phase 0 <= r < s has the
    gradient sum_m g[q - m] w[r + s m]: a convolution of g with every s-th weight.

    Example:
        >>> x, w = torch.randn(2, 3, 7, 8, requires_grad=True), torch.randn(4, 3, 3, 3)
        >>> y = F.conv2d(x, w, stride=2, padding=1)
        >>> (expected,) = torch.autograd.grad(y.sum(), x)
        >>> torch.allclose(pull_back(torch.ones_like(y), w, (7, 8), (2, 2), (1, 1)), expected, atol=1e-5)
        True
    """
    out: Tensor | None = None
    rows, columns = (_phases(image[d], g.shape[2 + d], weight.shape[2 + d], stride[d], padding[d]) for d in range(2))
    for r, top, above, below in rows:
        for c, left, before, after in columns:
            turned = weight[:, :, r :: stride[0], c :: stride[1]].flip(2, 3).transpose(0, 1)
            found = _convolve(g, turned, (before, after, above, below))
            if stride == (1, 1):
                return found
            if out is None:
                out = g.new_zeros(g.shape[0], weight.shape[1], *image)
            out[:, :, top :: stride[0], left :: stride[1]] = found
    return g.new_zeros(g.shape[0], weight.shape[1], *image) if out is None else out


def _phases(image: int, output: int, kernel: int, s: int, p: int) -> list[tuple[int, int, int, int]]:
    """(phase, its first input, padding of g before it and after it) for every phase that has inputs and weights."""
    found = []
    for r in range(min(s, kernel)):
        first, last = -((r - p) // s), (image - 1 + p - r) // s  # q
        if first <= last:
            weights = -((r - kernel) // s)
            found.append((r, s * first + r - p, weights - 1 - first, last + 1 - output))
    return found


def _convolve(g: Tensor, weight: Tensor, pad: tuple[int, int, int, int]) -> Tensor:
    """g [n, c, h, w], padded (left, right, above, below; a negative one cuts), with weight [o, c, kh, kw]."""
    left, right, above, below = pad
    if _few_pixels(g, weight):
        return _patch_product(F.pad(g, pad) if any(pad) else g, weight)
    if left == right >= 0 and above == below >= 0:
        return F.conv2d(g, weight, padding=(above, left))
    return F.conv2d(F.pad(g, pad), weight)


def _few_pixels(x: Tensor, weight: Tensor) -> bool:
    return x.shape[2] * x.shape[3] <= FEW_PIXELS and weight.shape[2] * weight.shape[3] > 1


def _patch_product(x: Tensor, weight: Tensor) -> Tensor:
    """Convolution of x [n, c, h, w] with weight [o, c, kh, kw] at stride 1: all patches, times all weights."""
    patches = x.unfold(2, weight.shape[2], 1).unfold(3, weight.shape[3], 1)  # [n, c, h', w', kh, kw], a view
    n, _, h, w = patches.shape[:4]
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(n * h * w, weight[0].numel())
    return (rows @ weight.flatten(1).T).view(n, h, w, -1).permute(0, 3, 1, 2).contiguous()


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))
