"""Convolutions of many small networks as matrix products, and normalisation as an affine map.

Under vmap a convolution with one weight per network becomes a grouped convolution, which cuDNN runs group by group:
thousands of tiny kernels for a few hundred networks. Written as patches times weights it is one batched product.

The plain form of that, one patch for one place of the output, copies every input kh kw times and multiplies by a matrix
as narrow as the output has channels, where a GPU computes tiles of 64. So a patch here serves several places side by
side: it is a little wider, the copies are several times fewer, and the weights are written once per place, each time
shifted, into a wide matrix that is zero elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from biascope.network.layers.convolution import pair
from biascope.support.precision import multiplies_in_tf32, without_cudnn

LARGEST_PATCH = 512  # inputs per output value; beyond that the copies of patches cost more than they save
TILE = 64  # columns that a product on a GPU computes at least
MOVING = {"full": 128, "tf32": 256, "half": 1024}  # multiplications in the time of copying a value of a patch (H200)
ALIGNED = 16  # bytes: rows of products that start at multiples of it are fast on a GPU


class ConvolutionsAsProducts(TorchFunctionMode):
    """While active, 2-D convolutions without groups and dilation are computed by `patch_product`.

    Batch normalisation is left to torch's own kernel: the way to cuDNN's asks for a memory layout, which vmap refuses.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d:
            found = patch_product(*args, **(kwargs or {}))
            if found is not None:
                return found
        if func is F.batch_norm:
            with without_cudnn():
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

    The result lies in memory as [n, h', w', o]. It can be differentiated once.
    """
    plain = groups == 1 and pair(dilation) == (1, 1) and not isinstance(padding, str) and x.dim() == 4
    if not plain or weight[0].numel() > LARGEST_PATCH:
        return None
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        half = torch.get_autocast_dtype(x.device.type)  # before copying: patches are half as large
        x, weight, bias = x.to(half), weight.to(half), None if bias is None else bias.to(half)
    ph, pw = pair(padding)
    if ph or pw:
        x = F.pad(x, (pw, pw, ph, ph))
    stacked = (x[None], weight[None], None if bias is None else bias[None])
    out: Tensor = _PatchProduct.apply(*stacked, pair(stride))[0]  # type: ignore[no-untyped-call]
    return out.squeeze(0)  # `out[0]` would copy its gradient into zeros


def side_by_side(width: int, kernel: int, stride: int, outputs: int, moving: int = MOVING["full"]) -> int:
    """How many of the `width` places in a row of the output one patch should serve; a divisor of `width`."""

    def cost(places: int) -> int:
        return width // places * (kernel + (places - 1) * stride) * (moving + max(TILE, places * outputs))

    return min((places for places in range(1, width + 1) if width % places == 0), key=cost)


class _PatchProduct(torch.autograd.Function):
    """Convolution of x [T, n, c, h, w] with weight [T, o, c, kh, kw] and bias [T, o] -> [T, n, o, h', w']."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int]) -> tuple[Tensor, ...]:
        form = _Form.of(x, weight, bias, stride)
        patches, wide = form.patches(x), form.spread(weight, bias)
        return form.image(patches @ wide), patches, wide

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.form = _Form.of(*inputs)
        ctx.save_for_backward(*output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros as large as the patches

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        form, (patches, wide) = ctx.form, ctx.saved_tensors
        rows = form.rows(grad)
        for_x = form.fold(rows @ wide.mT) if ctx.needs_input_grad[0] else None  # data need none
        return for_x, *form.gather(patches.mT @ rows), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any) -> Any:
        def merged(value: Tensor | None, dim: int | None) -> Tensor | None:
            if value is None:
                return None
            value = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            return value.flatten(0, 1)

        stacked = map(merged, (x, weight, bias), in_dims[:3])
        found = _PatchProduct.apply(*stacked, stride)  # type: ignore[no-untyped-call]
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in found), (0, 0, 0)


@dataclass(frozen=True)
class _Form:
    """How a convolution is written as a product: patches [T, n h' w' / places, length] by [T, length, places o].

    A patch has kh rows, `span` columns and c channels, in that order, the first `used` of its values; ones follow up to
    an aligned length, the first of them for the bias (the others meet zeros). Images lie in memory as [T, n, h, w, c],
    so that rows of a patch and rows of the product are contiguous pieces of them.
    """

    input: tuple[int, int, int, int, int]  # T, n, h, w, c
    kernel: tuple[int, int, int]  # o, kh, kw
    stride: tuple[int, int]
    output: tuple[int, int]  # h', w'
    places: int
    span: int
    used: int
    length: int
    bias: bool

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int]) -> _Form:
        (T, n, c, h, w), (o, _, kh, kw) = x.shape, weight.shape[1:]
        output = ((h - kh) // stride[0] + 1, (w - kw) // stride[1] + 1)
        places = side_by_side(output[1], kw, stride[1], o, MOVING[_multiplication(x)])
        span = kw + (places - 1) * stride[1]
        used, step = kh * span * c, max(1, ALIGNED // x.element_size())
        length = -(-(used + (bias is not None)) // step) * step
        return cls((T, n, h, w, c), (o, kh, kw), stride, output, places, span, used, length, bias is not None)

    def patches(self, x: Tensor) -> Tensor:
        """All patches of x [T, n, c, h, w], a row each."""
        view = x.permute(0, 1, 3, 4, 2).unfold(3, self.span, self.places * self.stride[1])
        view = view.unfold(2, self.kernel[1], self.stride[0]).permute(0, 1, 2, 3, 6, 5, 4)
        out = x.new_empty(*view.shape[:4], self.length)  # [T, n, h', w' / places, length]
        out[..., : self.used].view(view.shape).copy_(view)
        out[..., self.used :] = 1.0
        return out.flatten(1, 3)

    def fold(self, patches: Tensor) -> Tensor:
        """The transpose of `patches`: values of patches added up where they come from, [T, n, c, h, w]."""
        (T, n, h, _, c), (_, kh, _) = self.input, self.kernel
        shape = (T, n, self.output[0], self.output[1] // self.places, kh, self.span, c)
        pieces = patches[..., : self.used].reshape(shape).permute(0, 1, 2, 3, 6, 5, 4)
        strips = [T, n, h, shape[3], c, self.span]
        found: Tensor = torch.ops.aten.unfold_backward(pieces, strips, 2, kh, self.stride[0])
        step = self.places * self.stride[1]
        found = torch.ops.aten.unfold_backward(found, list(self.input), 3, self.span, step)
        return found.permute(0, 1, 4, 2, 3)

    def spread(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The weights [T, o, c, kh, kw] at every place, each time shifted; the bias in a row of its own."""
        wide = weight.new_zeros(len(weight), self.length, self.places * self.kernel[0])
        self.shifted(wide).copy_(weight.permute(0, 3, 4, 2, 1)[:, None])
        if bias is not None:
            wide[:, self.used].view(len(wide), self.places, -1).copy_(bias[:, None])
        return wide

    def gather(self, wide: Tensor) -> tuple[Tensor, Tensor | None]:
        """The transpose of `spread`."""
        bias = wide[:, self.used].view(len(wide), self.places, -1).sum(1) if self.bias else None
        return self.shifted(wide).sum(1).permute(0, 4, 3, 1, 2), bias

    def shifted(self, wide: Tensor) -> Tensor:
        """View [T, places, kh, kw, c, o] of where the weights stand in the wide matrix."""
        c, (o, kh, kw), width = self.input[4], self.kernel, wide.shape[2]
        place = self.stride[1] * c * width + o
        strides = (self.length * width, place, self.span * c * width, c * width, width, 1)
        return wide.as_strided((len(wide), self.places, kh, kw, c, o), strides)

    def image(self, rows: Tensor) -> Tensor:
        """The product as a view [T, n, o, h', w']."""
        T, n = self.input[:2]
        return rows.view(T, n, *self.output, self.kernel[0]).permute(0, 1, 4, 2, 3)

    def rows(self, image: Tensor) -> Tensor:
        """The transpose of `image`: [T, n h' w' / places, places o]."""
        return image.permute(0, 1, 3, 4, 2).reshape(len(image), -1, self.places * self.kernel[0])


def _multiplication(x: Tensor) -> str:
    """Which of the kinds of `MOVING` a product of such tensors is."""
    if x.element_size() < 4:
        return "half"
    return "tf32" if x.is_cuda and x.dtype == torch.float32 and multiplies_in_tf32() else "full"


class AffineNorm(TorchFunctionMode):
    """BatchNorm in eval mode as one affine map per channel; cuDNN's own kernel for it is slow on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return affine_norm(*args, **(kwargs or {})) if func is F.batch_norm else func(*args, **(kwargs or {}))


def affine_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """What F.batch_norm gives, by scale and shift when the statistics are fixed."""
    if training or mean is None or var is None:
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    shape = (-1, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.to(x.dtype).view(shape), x, scale.to(x.dtype).view(shape))
