"""A coordinate network seen as a function of angles: f(r) = rest(2 pi B r + phases), rest 2 pi periodic in each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from biascope.errors import InputError, UnsupportedError
from biascope.fields.networks import MultiplicativeFilter, Polynomial
from biascope.inputs import check_inputs
from biascope.nets import FFN, MLP, SIREN
from biascope.signatures import checked
from biascope.tables import one_line

CLOSE = 1e-9  # frequencies nearer than this, relative to the largest, are one; or nearer than their own rounding


@dataclass(frozen=True)
class Encoding:
    """The sines a network begins with, and what it makes of them, in float64.

    frequencies [T, d] in cycles per unit of r; phases [T] in radians; rest: angles [n, T] -> [n, c]. `order` is the
    largest number of angles that one harmonic can add up, K^(L-1) of theorem 5.1; None if there is no such bound.
    close: see `closeness`, of the type that the network holds its frequencies in.

    Example:
        >>> e = encoding(FFN(in_features=1, hidden=(4,), frequencies=torch.tensor([[3.0]])))
        >>> e.frequencies.tolist(), e.order  # a ReLU is no polynomial
        ([[3.0]], None)
    """

    frequencies: Tensor
    phases: Tensor
    rest: Callable[[Tensor], Tensor] = field(repr=False)
    order: int | None = None
    close: float = CLOSE
    __repr__ = one_line

    def __call__(self, r: Tensor) -> Tensor:
        """f at r [n, d]: [n, c]."""
        return self.rest(2 * math.pi * r.to(self.frequencies) @ self.frequencies.T + self.phases)


@checked
def encoding(model: nn.Module) -> Encoding:
    """Take a network of sines apart: an `FFN`, a `SIREN` or a `MultiplicativeFilter`; the module is copied.

    Example:
        >>> net = SIREN(in_features=1, hidden=(2, 3), w0=2 * math.pi)
        >>> r = torch.rand(5, 1)
        >>> torch.allclose(encoding(net)(r), net(r).double(), atol=1e-5)
        True
    """
    if not isinstance(model, FFN | SIREN | MultiplicativeFilter):
        raise UnsupportedError(
            f"{type(model).__name__} has no known first layer of sines; FFN, SIREN and MultiplicativeFilter have. "
            "Give the frequencies [T, d] themselves where a function takes them"
        )
    net = copy.deepcopy(model).double().requires_grad_(False).cpu()
    if isinstance(net, FFN):
        B = net.features.frequencies
        close = closeness(cast(FFN, model).features.frequencies.dtype)
        return Encoding(
            B, B.new_zeros(len(B)), lambda t: net.mlp(torch.cat([t.sin(), t.cos()], -1)), order_of(net.mlp), close
        )
    close = closeness(next(iter(model.parameters())).dtype)
    if isinstance(net, SIREN):
        if len(net.layers) < 3:
            raise UnsupportedError("this SIREN has no layer of sines; give it at least one hidden layer")
        first, sine, *others = net.layers
        w0 = cast(float, sine.frequency)
        linear = cast(nn.Linear, first)
        rest = nn.Sequential(*others)
        B, phases = w0 * linear.weight / (2 * math.pi), w0 * linear.bias
        return Encoding(B, phases, lambda t: rest(t.sin()) + net.output_offset, order_of(rest), close)
    width = len(net.phases[0])
    return Encoding(
        torch.cat(list(net.frequencies)),
        torch.cat(list(net.phases)),
        lambda t: net.from_angles(torch.split(t, width, -1)),
        len(net.phases),  # one angle of every filter
        close,
    )


def order_of(rest: nn.Module) -> int | None:
    """Degree of the polynomial that a chain of linear layers and activations is; None if it is not known to be one.

    A module that stands in the chain twice counts twice. Containers with a forward of their own are no chains.

    Example:
        >>> order_of(nn.Sequential(nn.Linear(2, 2), Polynomial([0, 0, 1.0]), nn.Linear(2, 2), Polynomial([0, 0, 1.0])))
        4
    """
    degree = 1
    for _, module in rest.named_modules(remove_duplicate=False):
        if isinstance(module, Polynomial):
            degree *= module.degree
        elif not isinstance(module, nn.Linear | nn.Identity | nn.Sequential | MLP):
            return None
    return degree


def closeness(dtype: torch.dtype) -> float:
    """How near two frequencies must be, relative to the largest, to count as one when they were given in this type.

    Rounding moves sum_t s_t Omega_t by at most eps / 2 of sum |s_t| max |Omega|, so a difference by eps. Twice that,
    for numbers that were themselves computed. Not below 1e-9.

    Example:
        >>> closeness(torch.float64), round(closeness(torch.float32) * 1e7, 2)
        (1e-09, 2.38)
    """
    return max(CLOSE, 2 * torch.finfo(dtype).eps) if dtype.is_floating_point else CLOSE


def frequencies_of(source: Tensor | nn.Module) -> Tensor:
    """Frequencies [T, d] in float64: those given ([T] counts as [T, 1]), or those of a network's first layer.

    Example:
        >>> frequencies_of(torch.tensor([3.0, 10.0])).shape
        torch.Size([2, 1])
    """
    return rounded_frequencies(source)[0]


def rounded_frequencies(source: Tensor | nn.Module) -> tuple[Tensor, float]:
    """Frequencies as `frequencies_of` gives them, and how near two of their sums must be to be one (`closeness`).

    Example:
        >>> rounded_frequencies(torch.tensor([3.0, 10.0], dtype=torch.float64))[1]
        1e-09
    """
    if isinstance(source, nn.Module):
        e = encoding(source)
        return e.frequencies, e.close
    given = torch.as_tensor(source).detach()
    B = given.double().cpu()
    B = B[:, None] if B.dim() == 1 else B
    if B.dim() != 2 or 0 in B.shape:
        raise InputError(f"frequencies have shape {list(B.shape)}; give [T] or [T, d]")
    check_inputs(B, "frequencies")
    return B, closeness(given.dtype)
