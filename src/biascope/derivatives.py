"""What torch differentiates wrongly, or not at all, in another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NORMS = {F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm}
PRELUS = {F.prelu, torch.prelu, torch.Tensor.prelu}


class RightGradients(TorchFunctionMode):
    """While active, what torch (2.13) differentiates wrongly is written in another way.

    On a CPU the backward pass of batch and instance normalisation misreads gradients in some memory orders: those of
    one example whose channels come last, as a transformer after the normalisation sends them; instance normalisation,
    which sees all examples as one, those of any number. Under vmap PReLU takes examples for cotangents.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRELUS:
            return prelu(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        return in_plain_order(out) if func in NORMS else out


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """F.prelu of input [n, c, ...] with weight [1] or [c], by elementary operations.

    Example:
        >>> x, w = torch.randn(2, 3, 4), torch.rand(3)
        >>> torch.equal(prelu(x, w), F.prelu(x, w))
        True
    """
    slope = weight if weight.numel() == 1 else weight.view(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, slope * input)


def in_plain_order(out: Tensor) -> Tensor:
    """The same values; their gradient is contiguous. No view, for the sake of activations in place.

    Example:
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> seen = []
        >>> handle = x.register_hook(lambda g: seen.append(g.stride()))
        >>> in_plain_order(x).backward(torch.ones(3, 2).T)
        >>> seen
        [(3, 1)]
    """
    if out.device.type != "cpu":
        return out
    flat = torch.ops.aten._unsafe_view(out.contiguous(), [out.numel()])
    plain: Tensor = torch.ops.aten._unsafe_view(flat, out.shape)
    return plain


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Use attention kernels that support forward-mode and double differentiation, and restore the old choice after.

    The fused kernels have no forward-mode rule (NotImplementedError), and MultiheadAttention's fast path has none.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
