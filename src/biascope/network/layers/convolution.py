"""Convolutions with a backward pass of forward convolutions.

In float32 cuDNN's way back to the input runs at 12 to 30 TFLOP/s on an H200 where its way forward runs at 40, and on
images of a few pixels either of them at 12 to 18. At stride 1 the way back is as well a forward convolution of the
gradient with the weights turned round; on few pixels a product of patches takes both ways at 40. (It is
`benchmarks/convolutions.py` that measures this.)
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope.support.precision import convolves_in_tf32

DEVICES = ("cuda",)  # where it pays
MANY = 256  # examples from which it does; with fewer, cuDNN's own way back is as fast and takes less memory
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

    Where they are not faster (other devices, few examples, tf32, half precision, strides, groups, dilation), and for
    data, it is torch's own.
    """
    if (
        not x.requires_grad
        or x.device.type not in DEVICES
        or x.dim() != 4
        or x.shape[0] < MANY
        or groups != 1
        or isinstance(padding, str)
        or pair(stride) != (1, 1)
        or pair(dilation) != (1, 1)
        or any(p >= k for p, k in zip(pair(padding), weight.shape[2:]))
        or x.dtype not in (torch.float32, torch.float64)
        or torch.is_autocast_enabled(x.device.type)
        or convolves_in_tf32()
    ):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    parameters = (weight.detach(), None if bias is None else bias.detach())
    out: Tensor = _Convolution.apply(x, *parameters, pair(padding))  # type: ignore[no-untyped-call]
    return out


class _Convolution(torch.autograd.Function):
    """At stride 1, with the gradient at x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        return _convolve(x, weight, bias, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, _, ctx.padding = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        rest = (weight.shape[2] - 1 - ctx.padding[0], weight.shape[3] - 1 - ctx.padding[1])
        return _convolve(g, weight.flip(2, 3).transpose(0, 1), None, rest), None, None, None


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    if x.shape[2] * x.shape[3] > FEW_PIXELS or weight.shape[2:] == (1, 1):
        return F.conv2d(x, weight, bias, padding=padding)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    patches = x.unfold(2, weight.shape[2], 1).unfold(3, weight.shape[3], 1)  # [n, c, h', w', kh, kw], a view
    n, _, h, w = patches.shape[:4]
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(n * h * w, weight[0].numel())
    out = rows @ weight.flatten(1).T if bias is None else torch.addmm(bias, rows, weight.flatten(1).T)
    return out.view(n, h, w, -1).permute(0, 3, 1, 2).contiguous()


def pair(value: Any) -> tuple[int, int]:
    """What torch takes for both dimensions of an image."""
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))
