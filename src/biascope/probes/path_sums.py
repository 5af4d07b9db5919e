"""The path norm of a network: (sum over all paths from an input to an output of prod |w|^p)^(1/p).

One forward pass does it: every weight to |w|^p, every activation to the identity, all inputs 1. The pass is made by a
tensor that answers torch's functions for itself, so it goes through modules, functional calls, tied and reparametrised
weights, sums of branches; what is no sum over weighted paths (attention, layer normalisation, products of
activations) is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from biascope.network.functional import explained
from biascope.probes.activations import ACTIVATIONS
from biascope.probes.view import frozen_copy
from biascope.support.arguments import check_number
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import nested_tensors
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked


@checked
@without_autocast()
def path_norm(model: nn.Module, x: Tensor, p: float = 1.0, bias: bool = True) -> float:
    """(sum over paths of prod |w|^p)^(1/p), paths from an input or a bias to an output, in float64.

    For ReLU networks it does not change when a unit's incoming weights are scaled by a and the outgoing ones by 1 / a,
    as norms of the layers do; with p = 1 it bounds every |f(x)[y] - f(x')[y]| / ||x - x'||_inf, for activations of
    slope at most 1. Activations count as 1, a maximum over a window as its sum (each entry may be passed on), an
    average over k entries as k weights 1 / k, batch normalisation (eval mode) as the affine map that it is.

    As a metric of a probe: `{"path": lambda view: path_norm(view.network, view.x)}`.

    Args:
        model: linear and convolutional layers, activations, pooling, batch normalisation, sums and concatenations.
        x: inputs [n, *input_shape], of which only the shape is used.
        p: 1 or 2 as a rule, any number > 0.
        bias: whether paths that begin at a bias count.
    """
    check_number(p, "p", above=0)
    if any(is_lazy(w) for w in model.parameters()):
        raise InputError(f"{type(model).__name__} has lazy parameters without values: call it once on an input first")
    copied = frozen_copy(model)  # in eval mode: the user's module keeps its own
    device = next((w.device for w in copied.parameters()), x.device)
    ones = torch.ones(1, *x.shape[1:], dtype=torch.float64, device=device)
    with torch.no_grad(), explained(copied, ones):
        out = copied(Paths.of(ones, p, bias))
    if not isinstance(out, Paths):
        raise UnsupportedError(f"{type(model).__name__} gave a {type(out).__name__}: path_norm needs one tensor")
    found = math.pow(float(out.plain().sum()), 1 / p)
    if found == 0 and p > 1 and path_norm(model, x, 1.0, bias) > 0:
        raise InputError(f"p={p}: powers of these weights are too small for float64; take a smaller p")
    return found


class Paths(Tensor):
    """For every unit the sum over the paths that end there; answers the functions in `RULES`, refuses all others."""

    p: float
    bias: bool

    @staticmethod
    def of(values: Tensor, p: float, bias: bool) -> Paths:
        """Sums with the power of their weights, and whether biases count."""
        made = values.as_subclass(Paths)
        made.p, made.bias = p, bias
        return made

    def plain(self) -> Tensor:
        """The sums as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def weight(self, w: Any) -> Tensor:
        """|w|^p of a weight, a tensor or a number."""
        no_weight = isinstance(w, Paths) or (isinstance(w, Tensor) and w.is_complex())
        _refuse(no_weight, "has activations or complex numbers in place of weights or biases")
        with torch._C.DisableTorchFunctionSubclass():
            return torch.as_tensor(w, dtype=torch.float64, device=self.device).abs() ** self.p

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(t for t in nested_tensors((args, kwargs)) if isinstance(t, Paths))
        if func in RULES:
            found = RULES[func](first, func, args, kwargs)
            return found if isinstance(found, Paths) else Paths.of(found, first.p, first.bias)
        if func is Tensor.__setitem__:
            return _write(*args)
        name = getattr(func, "__name__", str(func))
        _refuse(name in READS, f"reads values of its activations ({name})")
        refusal = UnsupportedError(f"the network calls {name}, which is no sum over weighted paths: no path norm")
        try:
            found = func(*_plain(args), **_plain(kwargs))
        except (RuntimeError, TypeError) as error:  # of other precision than the sums, as a rule
            raise refusal from error
        if any(True for _ in nested_tensors(found)):
            raise refusal
        return found  # a shape, a number of dimensions


def _refuse(when: bool, what: str) -> None:
    if when:
        raise UnsupportedError(f"the network {what}: no path norm")


def _plain(values: Any) -> Any:
    if isinstance(values, Paths):
        return values.plain()
    if isinstance(values, dict):
        return {key: _plain(value) for key, value in values.items()}
    if isinstance(values, tuple | list) and any(True for _ in nested_tensors(values)):
        return type(values)(_plain(value) for value in values)
    return values


Rule = Callable[[Paths, Any, tuple[Any, ...], dict[str, Any]], Tensor]


def _as_it_is(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Functions that move entries or add them up, without weights."""
    mixed = any(not isinstance(t, Paths) for t in nested_tensors((args, kwargs)))
    _refuse(mixed, f"joins activations and other tensors by {func.__name__}")
    out: Tensor = func(*_plain(args), **_plain(kwargs))
    return out


def _passed_on(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return h


def _activated(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A copy, unless the function works in place: what is added to it later must not change its input."""
    in_place = func.__name__.endswith("_") or any(a is True for a in args[1:]) or kwargs.get("inplace", False)
    return h if in_place else h.plain().clone()


def _dropout(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    active = kwargs.get("training", args[2] if len(args) > 2 else True)
    active = active and kwargs.get("p", args[1] if len(args) > 1 else 0.5) > 0
    _refuse(active, f"calls {func.__name__} with training=True, even in eval mode")
    return h


def _weighted(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Linear maps: f(input, weight, bias, ...)."""
    given = dict(zip(("input", "weight", "bias"), args)) | kwargs
    product = not isinstance(given["input"], Paths) or isinstance(given["weight"], Paths)
    _refuse(product, f"calls {func.__name__} on a product of activations")
    given["input"], given["weight"] = h.plain().double(), h.weight(given["weight"])
    b = given.get("bias")
    given["bias"] = None if b is None or not h.bias else h.weight(b)
    out: Tensor = func(given.pop("input"), given.pop("weight"), given.pop("bias"), *args[3:], **given)
    return out


def _sloped(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Leaky and parametric ReLU: their slope below 0 counts where it is above 1."""
    slope = kwargs.get("weight", kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01))
    scale = h.weight(slope).clamp_min(1.0)
    return h.plain() * (scale if scale.numel() == 1 else scale.view(-1, *[1] * (h.plain().dim() - 2)))


def _divided(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _refuse(bool(kwargs) or isinstance(args[1], Paths), f"calls {func.__name__} to divide by activations")
    return h.plain() / h.weight(args[1])


def _product(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A matrix product or an elementwise one, of activations with weights."""
    several = bool(kwargs) or sum(isinstance(a, Paths) for a in args) != 1
    _refuse(several, f"calls {func.__name__} on a product of activations")
    out: Tensor = func(*(a.plain().double() if isinstance(a, Paths) else h.weight(a) for a in args))
    return out


def _added(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Sums and differences of branches, or of a branch and a bias; in place where the function is."""
    _refuse(bool(kwargs), f"calls {func.__name__} with {', '.join(kwargs)}")
    terms = [a.plain() if isinstance(a, Paths) else h.weight(a) * float(h.bias) for a in args]
    out = terms[0] + terms[1]
    if func in IN_PLACE and isinstance(args[0], Paths):
        terms[0].copy_(out)
        return args[0]
    return out


def _batch_norm(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = dict(zip(names, args)) | kwargs
    mean, var, eps = given["running_mean"], given["running_var"], given.get("eps", 1e-5)
    by_batch = mean is None or var is None or given.get("training", False)
    _refuse(by_batch, "has batch normalisation by the batch's own statistics")
    scale = 1 / (var.double() + eps).sqrt()
    scale = scale if given.get("weight") is None else scale * given["weight"].double()
    shift = -mean.double() * scale
    shift = shift if given.get("bias") is None else shift + given["bias"].double()
    shape = (1, -1, *[1] * (h.plain().dim() - 2))
    return h.plain() * h.weight(scale).view(shape) + h.weight(shift).view(shape) * float(h.bias)


def _mean(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    averaged: Tensor = func(*_plain(args), **_plain(kwargs))
    k = h.plain().numel() / averaged.numel()
    return averaged * float(k ** (1 - h.p))  # k entries, each with the weight (1 / k)^p


def _average_pool(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    averaged: Tensor = func(*_plain(args), **_plain(kwargs))
    if h.p == 1:
        return averaged
    names = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    given = dict(zip(names, args)) | kwargs
    padded = bool(torch.as_tensor(given.get("padding", 0)).any()) and not given.get("count_include_pad", True)
    several = given.get("ceil_mode", False) or padded or given.get("divisor_override") is not None
    _refuse(several, f"calls {func.__name__} with windows of several sizes and p is not 1")
    size, d = given["kernel_size"], int(func.__name__[-2])
    k = math.prod(size) if isinstance(size, tuple | list) and len(size) == d else int(torch.as_tensor(size).max()) ** d
    return averaged * float(k ** (1 - h.p))


def _adaptive_pool(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    averaged: Tensor = func(*_plain(args), **_plain(kwargs))
    several = h.p != 1 and any(a % b for a, b in zip(h.plain().shape[2:], averaged.shape[2:]))
    _refuse(several, f"calls {func.__name__} with windows of several sizes and p is not 1")
    k = math.prod(h.plain().shape[2:]) / math.prod(averaged.shape[2:])
    return averaged * float(k ** (1 - h.p))


def _largest(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A maximum over windows passes on any of their entries: their sum, by a convolution with ones."""
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    given = dict(zip(names, args)) | kwargs
    odd = given.get("ceil_mode", False) or given.get("return_indices", False)
    _refuse(odd, f"calls {func.__name__} with ceil_mode or return_indices")
    plain, d = h.plain(), int(func.__name__[-2])
    size = given["kernel_size"]
    size = (size,) * d if isinstance(size, int) else tuple(size) * (d if len(size) == 1 else 1)
    ones = torch.ones(1, 1, *size, dtype=plain.dtype, device=plain.device)
    stride = given.get("stride") or size
    convolution = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[d]
    alone = plain.flatten(0, 1).unsqueeze(1)
    out = convolution(alone, ones, None, stride, given.get("padding", 0), given.get("dilation", 1))
    return out.view(*plain.shape[:2], *out.shape[2:])


def _write(h: Any, index: Any, value: Any) -> None:
    """h[index] = value: other branches as they are, numbers and weights as biases."""
    elsewhere = not isinstance(h, Paths) or any(isinstance(t, Paths) for t in nested_tensors(index))
    _refuse(elsewhere, "writes activations into another tensor")
    h.plain()[index] = value.plain() if isinstance(value, Paths) else h.weight(value) * float(h.bias)


def _padded(h: Paths, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    value = kwargs.get("value", args[3] if len(args) > 3 else None)
    _refuse(bool(value), f"pads with {value}, not with 0 or with entries")
    return _as_it_is(h, func, args, kwargs)


READS = {  # what a network does with these numbers is no part of any path
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__complex__"),
    *("__contains__", "__float__", "__index__", "__int__"),
}
IN_PLACE = {Tensor.__iadd__, Tensor.__isub__, Tensor.add_, Tensor.sub_}
SAME = (
    *(torch.flatten, Tensor.flatten, torch.reshape, Tensor.reshape, Tensor.view, Tensor.contiguous, Tensor.clone),
    *(torch.permute, Tensor.permute, torch.transpose, Tensor.transpose, torch.squeeze, Tensor.squeeze, Tensor.expand),
    *(torch.unsqueeze, Tensor.unsqueeze, torch.cat, torch.stack, Tensor.__getitem__, Tensor.unflatten, torch.movedim),
    *(Tensor.sum, torch.sum, Tensor.detach),
)
SLOPED = (F.leaky_relu, F.leaky_relu_, F.prelu, torch.prelu)
RULES: dict[Any, Rule] = {
    **dict.fromkeys(SAME, _as_it_is),
    **dict.fromkeys(ACTIVATIONS, _activated),
    **dict.fromkeys(SLOPED, _sloped),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), _dropout),
    **dict.fromkeys((Tensor.to, Tensor.float, Tensor.double), _passed_on),
    F.linear: _weighted,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _weighted),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _weighted),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__), _product),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _product),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), _divided),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, *IN_PLACE), _added),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__), _added),
    F.batch_norm: _batch_norm,
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), _average_pool),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), _adaptive_pool),
    **dict.fromkeys((F.max_pool1d, F.max_pool2d, F.max_pool3d), _largest),
    F.pad: _padded,
}
