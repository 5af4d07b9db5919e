"""What torch differentiates wrongly, or not at all, in another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NORMS = {F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm}


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """F.prelu of input [n, c, ...] with weight [1] or [c], by elementary operations.

    Example:
        >>> x, w = torch.randn(2, 3, 4), torch.rand(3)
        >>> torch.equal(prelu(x, w), F.prelu(x, w))
        True
    """
    slope = weight if weight.numel() == 1 else weight.view(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, slope * input)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ||v||, the norms over all but one dimension (-1: over all), by elementary operations.

    Example:
        >>> v, g = torch.randn(2, 3), torch.rand(2, 1)
        >>> torch.allclose(weight_norm(v, g), torch._weight_norm(v, g))
        True
    """
    return v * (g / torch.norm_except_dim(v, 2, dim))


WRITTEN_OUT: dict[Any, Any] = {  # torch's function: the same by elementary operations
    **dict.fromkeys((F.prelu, torch.prelu, torch.Tensor.prelu), prelu),
    torch._weight_norm: weight_norm,
}


class RightGradients(TorchFunctionMode):
    """While active, what torch (2.13) differentiates wrongly, or not at all, is written in another way.

    On a CPU the backward pass of batch and instance normalisation misreads gradients in some memory orders: those of
    one example whose channels come last, as a transformer after the normalisation sends them; instance normalisation,
    which sees all examples as one, those of any number. Under vmap PReLU takes examples for cotangents. Weight
    normalisation has no forward-mode derivative.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = WRITTEN_OUT.get(func, func)(*args, **(kwargs or {}))
        return in_plain_order(out) if func in NORMS else out


def right_gradients() -> AbstractContextManager[object]:
    """`RightGradients` where gradients are wanted, nothing where not."""
    return RightGradients() if torch.is_grad_enabled() else nullcontext()


def call(module: nn.Module, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """torch.func.functional_call; what is differentiated through it is so rightly.

    Example:
        >>> call(nn.Linear(2, 1), {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, (torch.ones(1, 2),)).item()
        2.0
    """
    with right_gradients():
        return torch.func.functional_call(module, tensors, args, kwargs)


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
