"""Dual numbers through a module: value and directional derivative in one forward pass.

torch's forward mode does every operation it is given, but it issues several small kernels for each, and a pass over a
batch on a GPU then waits for Python. So where no gradient is wanted, the usual layers are done by hand (`_RULES`) on
value and tangent stacked in one tensor [2, n, ...], with as few kernels as possible:

- convolution: W0 times both halves at once, dW x0 added to the second;
- BatchNorm in eval mode: one affine map for both halves (`norms.py`), one fused kernel for its own tangent;
- ReLU, sums and average pooling: one kernel for both halves; ReLU6: one each, into one tensor;
- linear: the three products, unstacked, the sum of two of them in the second; on a GPU large ones of the tangent run
  on tensor cores, as accurate as in float32;
- attention: six products for two, of tensors the size of the scores no more than three;
- softmax and layer norm: their Jacobians are symmetric, so the backward kernel is the forward derivative;
- products with constants: torch works out shapes in Python where a factor has no tangent.

What has no rule gets torch's own dual tensors, made on demand.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from biascope.linalg.tensor_cores import is_worth, product
from biascope.tangent.norms import Key, NormMap, norm_key

Call = Callable[[dict[str, Tensor]], Sequence[Tensor]]


def evaluate_dual(
    call: Call,
    params: Mapping[str, Tensor],
    tangents: Mapping[str, Tensor],
    *,
    by_hand: bool = True,
    norms: Mapping[Key, NormMap] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Values and derivatives of `call` at `params` along `tangents`: two lists of equal shapes.

    `call` maps {name: tensor} to a sequence of tensors. If grad mode is on, gradients flow to `tangents` and nothing
    is done by hand. `norms`: the maps of `norms.Norms`, for BatchNorm by hand.
    """
    by_hand = by_hand and not torch.is_grad_enabled()
    make: Any = _dual if by_hand else forward_ad.make_dual
    rules: dict[Any, Callable[..., Any]] = {F.embedding: _embedding}
    if by_hand:
        rules = {**_RULES, F.batch_norm: partial(_batch_norm, norms or {})}
    with forward_ad.dual_level():
        duals = {k: make(p, tangents[k]) for k, p in params.items()}
        try:
            with _ByHand(rules):
                outs = call(duals)
            pairs = [_parts(out) for out in outs]
        finally:
            for dual in duals.values():  # some layers keep the weights of their last call
                dual.__dict__.clear()
    return [f.as_subclass(Tensor) for f, _ in pairs], [torch.zeros_like(f) if df is None else df for f, df in pairs]


class _Dual(Tensor):
    """A value, which is the tensor itself, and its tangent.

    Every call torch offers passes through `_ByHand` first, so nothing else needs to know this class.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    value: Tensor  # the same as a plain tensor
    tangent: Tensor
    both: Tensor | None  # [2, *shape] with value and tangent in it, where they lie in one tensor
    native: Tensor | None  # torch's dual tensor; once there it is the truth, for it may be changed in place


def _dual(value: Tensor, tangent: Tensor, both: Tensor | None = None) -> _Dual:
    out: _Dual = Tensor._make_subclass(_Dual, value)
    out.value, out.tangent, out.both, out.native = value, tangent, both, None
    return out


def _unstack(both: Tensor) -> _Dual:
    value, tangent = both.unbind()
    return _dual(value, tangent, both)


def _parts(t: Any) -> tuple[Any, Any]:
    """Value and tangent (None for a constant)."""
    if not isinstance(t, Tensor):
        return t, None
    if type(t) is _Dual and t.native is None:
        return t, t.tangent
    pair = forward_ad.unpack_dual(_native(t))  # type: ignore[no-untyped-call]
    return pair.primal, pair.tangent


def _stack(t: Tensor) -> Tensor | None:
    """[2, *shape] with value and tangent, None for a constant."""
    if type(t) is _Dual and t.native is None and t.both is not None:
        return t.both
    value, tangent = _parts(t)
    return None if tangent is None else _halves(torch.cat([value, tangent]))  # keeps channels last, unlike stack


def _native(a: Any) -> Any:
    """Arguments as torch's forward mode wants them."""
    if type(a) is _Dual:
        if a.native is None:
            # of the plain tensor: a view of `a` in what `a` holds would be a circle, which nothing collects
            a.native = forward_ad.make_dual(a.value, a.tangent)  # type: ignore[no-untyped-call]
            a.both = None
        return a.native
    if type(a) in (list, tuple):
        return type(a)(map(_native, a))
    return a


class _ByHand(TorchFunctionMode):
    def __init__(self, rules: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.rules = rules

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        rule = self.rules.get(func)
        out = NotImplemented if rule is None else rule(func, *args, **kwargs)
        if out is NotImplemented:
            return func(*map(_native, args), **{k: _native(a) for k, a in kwargs.items()})
        return out


def _convolution(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *how: Any, **more: Any) -> Any:
    (x, dx), (w, dw), (b, db) = _parts(input), _parts(weight), _parts(bias)
    if (dx is None and dw is None) or input.dim() != weight.dim():
        return NotImplemented
    if dx is None:
        tangent = func(x, dw, db, *how, **more)
        return _dual(func(x, w, b, *how, **more), tangent)
    out = _unstack(_halves(func(_merged(_stack(input)), w, None, *how, **more)))
    if b is not None:
        out.add_(b.view(-1, *(1,) * (input.dim() - 2)))
    if dw is not None:
        out.tangent.add_(func(x, dw, db, *how, **more))
    elif db is not None:
        out.tangent.add_(db.view(-1, *(1,) * (input.dim() - 2)))
    return out


def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    (x, dx), (w, dw), (b, db) = _parts(input), _parts(weight), _parts(bias)
    if dw is None:
        return NotImplemented if dx is None else _dual(func(x, w, b), func(dx, w, db))
    autocast = torch.is_autocast_enabled(x.device.type)
    if dx is not None and x.is_cuda and not autocast:
        rows, along = x.flatten(0, -2), dx.flatten(0, -2)
        if is_worth(rows, dw) and is_worth(along, w):
            moved = product(rows, dw).add_(product(along, w)).view(*x.shape[:-1], -1)
            return _dual(func(x, w, b), moved if db is None else moved.add_(db))
    tangent = func(x, dw, db)
    if dx is None:
        return _dual(func(x, w, b), tangent)
    if autocast or not tangent.is_contiguous():
        return _dual(func(x, w, b), tangent.add_(func(dx, w)))
    tangent.view(-1, tangent.shape[-1]).addmm_(dx.reshape(-1, dx.shape[-1]), w.t())  # no pass of its own for the sum
    return _dual(func(x, w, b), tangent)


def _addmm(func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> Any:
    """A linear layer whose weight is stored the other way round, as in GPT-2."""
    (b, db), (x, dx), (w, dw) = _parts(input), _parts(mat1), _parts(mat2)
    if more or db is None or dx is None or dw is None or torch.is_autocast_enabled(x.device.type):
        return NotImplemented
    return _dual(func(b, x, w), func(db, x, dw).addmm_(dx, w))


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """O = P V with P = softmax(S). dO = W V - (W 1) * O + P dV with W = P * dS, so that dP itself is never formed."""
    (q, dq), (k, dk), (v, dv), (mask, dmask) = _parts(query), _parts(key), _parts(value), _parts(attn_mask)
    if dq is None or dk is None or dv is None or dropout_p or torch.is_autocast_enabled(q.device.type):
        return NotImplemented
    if enable_gqa:
        times = q.shape[-3] // k.shape[-3]
        k, dk, v, dv = (t.repeat_interleave(times, -3) for t in (k, dk, v, dv))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, dq, d = q * scale, dq * scale, v.shape[-1]
    scores = q @ k.mT
    tangent = torch.cat([dq, q], -1) @ torch.cat([k, dk], -1).mT
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill_(future, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        tangent = tangent if dmask is None else tangent + dmask
    p = scores.softmax(-1) if mask is None else torch.ops.aten._safe_softmax(scores, -1)
    moved = tangent.mul_(p)
    both = p @ torch.cat([v, dv], -1)
    out = both[..., :d]
    return _dual(out.contiguous(), (moved @ v).addcmul_(moved.sum(-1, keepdim=True), out, value=-1).add_(both[..., d:]))


def _batch_norm(
    norms: Mapping[Key, NormMap],
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
    norm = norms.get(norm_key(running_mean, running_var, weight, bias, eps))
    both = None if norm is None else _stack(input)
    if norm is None or both is None:
        return NotImplemented
    scale, scale_tangent, shift = norm.scale, norm.scale_tangent, norm.shift
    if input.dim() != 4:
        per_channel = (-1, *(1,) * (input.dim() - 2))
        scale, scale_tangent, shift = (t.view(*t.shape[:-3], *per_channel) for t in (scale, scale_tangent, shift))
    out = torch.addcmul(shift, both, scale)
    if norm.moves:
        out[1].addcmul_(both[0], scale_tangent)
    return _unstack(out if out.dtype == both.dtype else out.to(both.dtype))


def _relu(func: Any, input: Tensor, inplace: bool = False) -> Any:
    if type(input) is not _Dual or input.native is not None:
        return NotImplemented
    if inplace:
        if input.both is None:
            return NotImplemented
        input.both.masked_fill_(input <= 0, 0.0)
        return input
    # what threshold_backward keeps of anything, where the value is positive, is also ReLU of the value
    if input.both is not None:
        return _unstack(_kept(input.both, input, 0))
    return _dual(_kept(input, input, 0), _kept(input.tangent, input, 0))


def _hardtanh(func: Any, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    """ReLU6 among others. Both halves stay in one tensor, as the next convolution wants them."""
    if inplace or type(input) is not _Dual or input.native is not None or input.both is None:
        return NotImplemented
    out = torch.empty_like(input.both)
    torch.clamp(input.both[0], min_val, max_val, out=out[0])
    torch.ops.aten.hardtanh_backward.grad_input(input.both[1], input.both[0], min_val, max_val, grad_input=out[1])
    return _unstack(out)


def _sum(func: Any, input: Any, other: Any, **more: Any) -> Any:
    for t in (input, other):
        if type(t) is not _Dual or t.native is not None or t.both is None:
            return NotImplemented
    if more or input.shape != other.shape or input.dtype != other.dtype:
        return NotImplemented
    if func is Tensor.add_:
        input.both.add_(other.both)
        return input
    return _unstack(input.both + other.both)


def _average(func: Any, input: Tensor, *how: Any, **more: Any) -> Any:
    if type(input) is not _Dual or input.native is not None or input.both is None:
        return NotImplemented
    return _unstack(_halves(func(_merged(input.both), *how, **more)))


def _product(func: Any, input: Any, other: Any, **more: Any) -> Any:
    """A product with a constant, or a quotient by one."""
    (a, da), (b, db) = _parts(input), _parts(other)
    if more or (da is None) == (db is None) or (db is not None and func in (Tensor.div, torch.div)):
        return NotImplemented
    return _dual(func(a, b), func(a, db) if da is None else func(da, b))


def _softmax(func: Any, input: Tensor, dim: int | None = None, *how: Any, **more: Any) -> Any:
    x, dx = _parts(input)
    if dx is None or dim is None:
        return NotImplemented
    out = func(x, dim, *how, **more)
    return _dual(out, torch.ops.aten._softmax_backward_data(dx.to(out.dtype), out, dim, out.dtype))


def _layer_norm(
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    (x, dx), (w, dw), (b, db) = _parts(input), _parts(weight), _parts(bias)
    if dx is None or torch.is_autocast_enabled(x.device.type):
        return NotImplemented
    value, mean, unit = torch.native_layer_norm(x, normalized_shape, w, b, eps)
    backward = torch.ops.aten.native_layer_norm_backward
    tangent = backward(dx, x, normalized_shape, mean, unit, None, None, [True, False, False])[0]
    if w is not None:
        tangent = tangent.mul_(w) if db is None else torch.addcmul(db, tangent, w)
    elif db is not None:
        tangent.add_(db)
    if dw is not None:
        tangent.addcmul_(torch.native_layer_norm(x, normalized_shape, None, None, eps)[0], dw)
    return _dual(value, tangent)


def _embedding(func: Any, input: Tensor, weight: Tensor, padding_idx: int | None = None, *how: Any, **more: Any) -> Any:
    """The padding row has no gradient in training, so it gets no tangent here."""
    out = func(input, _native(weight), padding_idx, *how, **more)
    if padding_idx is None:
        return out
    is_padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    return torch.where(is_padding, _parts(out)[0], out)


def _merged(both: Any) -> Tensor:
    """[2, n, ...] -> [2 n, ...]: one batch."""
    out: Tensor = both.flatten(0, 1)
    return out


def _halves(merged: Tensor) -> Tensor:
    return merged.view(2, merged.shape[0] // 2, *merged.shape[1:])


_kept = torch.ops.aten.threshold_backward.default
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_RULES: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): _convolution for name in _CONVOLUTIONS},
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys((Tensor.add, Tensor.add_, torch.add), _sum),
    **dict.fromkeys((Tensor.mul, torch.mul, Tensor.div, torch.div), _product),
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _softmax),
    **dict.fromkeys((F.avg_pool2d, F.adaptive_avg_pool2d), _average),
    F.hardtanh: _hardtanh,
    F.linear: _linear,
    torch.addmm: _addmm,
    F.scaled_dot_product_attention: _attention,
    F.layer_norm: _layer_norm,
    F.embedding: _embedding,
}
_METADATA = {
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_contiguous),
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad")),
}
