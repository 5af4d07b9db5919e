"""Arithmetic of networks that are run by the thousand on a GPU: precision for a moment, and a faster normalisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from biascope.errors import InputError, UnsupportedError
from biascope.precision import arithmetic as full_or_tf32

Precision = Literal["float32", "tf32", "fp16", "bf16"]
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@contextmanager
def arithmetic(device: torch.device, precision: Precision) -> Iterator[None]:
    """Full float32, tf32, fp16 or bf16 arithmetic on CUDA for a moment; the user's settings are put back after.

    tf32 and fp16 round to 11 bits, bf16 to 8; fp16 is as fast as bf16 but overflows above 65,504 (to infinity, which
    callers see).
    """
    if precision not in get_args(Precision):
        raise InputError(f"precision={precision!r} is not one of {', '.join(get_args(Precision))}")
    if device.type != "cuda":
        if precision != "float32":
            raise UnsupportedError(f"precision={precision!r} is for CUDA devices; on {device.type} use 'float32'")
        with full_or_tf32("float32"):
            yield
        return
    half = torch.autocast("cuda", HALF.get(precision), enabled=precision in HALF, cache_enabled=False)
    with full_or_tf32("float32" if precision == "float32" else "tf32"), half:
        yield


class AffineNorm(TorchFunctionMode):
    """BatchNorm in eval mode as one affine map per channel; cuDNN's own kernel for it is slow on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Only F.batch_norm is treated."""
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
    """What F.batch_norm gives, by scale and shift when the statistics are fixed.

    Example:
        >>> affine_norm(torch.full((1, 1), 3.0), torch.ones(1), torch.full((1,), 4.0), eps=0.0)
        tensor([[1.]])
    """
    if training or mean is None or var is None:
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    shape = (-1, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.to(x.dtype).view(shape), x, scale.to(x.dtype).view(shape))
