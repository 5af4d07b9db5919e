"""Dual numbers through a module: value and directional derivative in one forward pass.

torch's forward mode is used as it is, with four operations done by hand while it runs (`_ByHand`):

- convolution: W0 dx + dW x0 is one convolution of [dx, x0] with [W0, dW], instead of two and a sum;
- linear: one fused product and sum per term;
- BatchNorm in eval mode: one affine map per channel, two fused kernels for the tangent instead of seven, and no small
  operation on dual numbers: where one factor has no tangent, torch works out shapes in Python;
- Embedding(padding_idx=...): the padding row has no gradient in training, so it gets no tangent here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def evaluate_dual(
    call: Callable[[dict[str, Tensor]], Sequence[Tensor]], params: Mapping[str, Tensor], tangents: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Values and derivatives of `call` at `params` along `tangents`: two lists of equal shapes.

    `call` maps {name: tensor} to a sequence of tensors. Gradients flow to `tangents`, if grad mode is on.

    Example:
        >>> evaluate_dual(lambda p: [p["w"] ** 2], {"w": torch.tensor(3.0)}, {"w": torch.tensor(1.0)})
        ([tensor(9.)], [tensor(6.)])
    """
    with forward_ad.dual_level(), _ByHand():
        pairs = [_parts(out) for out in call({k: _dual(p, tangents[k]) for k, p in params.items()})]
    return [f for f, _ in pairs], [torch.zeros_like(f) if df is None else df for f, df in pairs]


class _ByHand(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        out = NotImplemented if rule is None else rule(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if out is NotImplemented else out


def _parts(t: Tensor | None) -> tuple[Any, Any]:
    if t is None:
        return None, None
    pair = forward_ad.unpack_dual(t)  # type: ignore[no-untyped-call]
    return pair.primal, pair.tangent


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    out: Tensor = forward_ad.make_dual(value, tangent.to(value.dtype).expand_as(value))  # type: ignore[no-untyped-call]
    return out


def _convolution(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    (x, dx), (w, dw), (b, db) = _parts(input), _parts(weight), _parts(bias)
    if (dx is None and dw is None) or groups != 1 or (dx is not None and dx.dtype != x.dtype):
        return NotImplemented
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dx, dw, db)):
        return NotImplemented  # the backward pass of the joined one would compute gradients that nobody needs
    where = (stride, padding, dilation, groups)
    channels = input.dim() - weight.dim() + 1  # 1, or 0 without a batch
    if dx is None:
        tangent = func(x, dw, db, *where)
    elif dw is None:
        tangent = func(dx, w, db, *where)
    else:
        tangent = func(torch.cat([dx, x], channels), torch.cat([w, dw], 1), db, *where)
    return _dual(func(x, w, b, *where), tangent)


def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    (x, dx), (w, dw), (b, db) = _parts(input), _parts(weight), _parts(bias)
    if dw is None or x.dtype != w.dtype or (dx is not None and dx.dtype != x.dtype):
        return NotImplemented
    tangent = func(x, dw, db)
    if dx is not None:
        tangent = tangent + func(dx, w)
    return _dual(func(x, w, b), tangent)


def _batch_norm(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training or running_mean is None or running_var is None:
        return NotImplemented
    (x, dx), (w, dw), (b, db) = _parts(input), _parts(weight), _parts(bias)
    (mean, dmean), (var, dvar) = _parts(running_mean), _parts(running_var)
    if dmean is not None or dvar is not None:
        return NotImplemented  # statistics are buffers, never expanded in
    shape = (-1, *(1,) * (input.dim() - 2))
    unit = torch.rsqrt(var + eps)
    a = (unit if w is None else w * unit).view(shape)
    c = (-mean.view(shape) * a) if b is None else torch.addcmul(b.view(shape), mean.view(shape), a, value=-1)
    da = None if dw is None else (dw * unit).view(shape)
    dc = None if db is None else db.view(shape)
    if da is not None:
        dc = -mean.view(shape) * da if dc is None else torch.addcmul(dc, mean.view(shape), da, value=-1)
    value = torch.addcmul(c, x, a).to(x.dtype)
    tangent = dc
    if dx is not None:
        tangent = dx * a if tangent is None else torch.addcmul(tangent, dx, a)
    if da is not None:
        tangent = x * da if tangent is None else torch.addcmul(tangent, x, da)
    return value if tangent is None else _dual(value, tangent)


def _embedding(
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    w, dw = _parts(weight)
    if padding_idx is None or dw is None or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    pad = padding_idx % weight.shape[0]
    return _dual(func(input, w), func(input, dw).masked_fill((input == pad).unsqueeze(-1), 0.0))


_RULES: dict[Any, Callable[..., Any]] = {
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    F.linear: _linear,
    F.batch_norm: _batch_norm,
    F.embedding: _embedding,
}
