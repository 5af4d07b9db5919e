"""Coordinate networks of the paper, as thin builders on `bs.nets`: f(r) = MLP(gamma(r)) for coordinates r [..., d].

`nets.FFN`, `nets.SIREN` and the ReLU baseline `nets.build("relu-coords")` are the main ones; here are those that the
theory asks for: polynomial activations, one frequency, a first layer that stays, and products of sines. And every one
of them as a function of angles (`encoding`): f(r) = rest(2 pi B r + phases), rest 2 pi periodic in each.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar, cast

import torch
from torch import Tensor, nn

from biascope.nets import FFN, MLP, SIREN
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import check_inputs
from biascope.support.limits import Count, Finite, NonNegative, Positive, shaped
from biascope.support.seeds import derive
from biascope.support.signatures import checked

M = TypeVar("M", bound=nn.Module)
CLOSE = 1e-9  # frequencies nearer than this, relative to the largest, are one; or nearer than their own rounding


class Polynomial(nn.Module):
    """z -> sum_k c_k z^k, elementwise: the activation for which theorem 5.1 is exact.

    Example:
        >>> Polynomial([0.0, 1.0, 2.0])(torch.tensor([3.0]))
        tensor([21.])
    """

    @checked
    def __init__(self, coefficients: Sequence[float]) -> None:
        super().__init__()
        self.coefficients = tuple(float(c) for c in coefficients)
        if not self.coefficients:
            raise InputError("coefficients is empty: give c_0, c_1, ..., c_K")

    @property
    def degree(self) -> int:
        """K, the largest power with a coefficient that is not 0."""
        return max((k for k, c in enumerate(self.coefficients) if c), default=0)

    def forward(self, z: Tensor) -> Tensor:
        """Any shape in, the same shape out."""
        out = torch.full_like(z, self.coefficients[-1])
        for c in self.coefficients[-2::-1]:  # Horner
            out = out * z + c
        return out

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return ", ".join(f"{c:g}" for c in self.coefficients)


class MultiplicativeFilter(nn.Module):
    """z_1 = g_1(r), z_{i+1} = (W_i z_i + b_i) * g_{i+1}(r), then a linear layer; g_i(r) = sin(2 pi B_i r + phi_i).

    A multiplicative filter network with Fourier filters: no activation, yet the same class of functions, since a
    product of sines is a sum of sines. All is trained. B_i ~ N(0, (sigma / filters)^2), so that sums over the filters
    stay near sigma; phases are uniform; [..., in_features] -> [..., outputs].
    """

    @checked
    def __init__(
        self,
        *,
        in_features: Count = 2,
        width: Count = 256,
        filters: Count = 4,
        outputs: Count = 1,
        sigma: NonNegative = 10.0,
    ) -> None:
        super().__init__()
        self.frequencies = nn.ParameterList(
            nn.Parameter(sigma / filters * torch.randn(width, in_features)) for _ in range(filters)
        )
        self.phases = nn.ParameterList(nn.Parameter(2 * math.pi * torch.rand(width)) for _ in range(filters))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(filters - 1))
        self.last = nn.Linear(width, outputs)

    def from_angles(self, angles: Sequence[Tensor]) -> Tensor:
        """The network behind its sines: angles, one [..., width] per filter, phases included -> [..., outputs]."""
        z = torch.sin(angles[0])
        for linear, angle in zip(self.linears, angles[1:]):
            z = linear(z) * torch.sin(angle)
        out: Tensor = self.last(z)
        return out

    def forward(self, r: Tensor) -> Tensor:
        """[..., in_features] -> [..., outputs]."""
        pairs = zip(self.frequencies, self.phases)
        return self.from_angles([2 * math.pi * r @ B.T + phase for B, phase in pairs])


def seeded(factory: type[M], seed: int, **options: object) -> M:
    """Build a module whose weights depend on the seed alone; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed every CUDA device, which fork_rng does not restore
        torch.default_generator.manual_seed(derive(seed, "field"))
        return factory(**options)


@checked
def single_frequency(
    f0: Positive,
    *,
    in_features: Count = 2,
    hidden: Sequence[Count] = (256, 256, 256),
    outputs: Count = 3,
    activation: str = "relu",
    seed: int = 0,
) -> FFN:
    """The network of the imperfect recoveries: gamma(r) = [sin 2 pi f0 r, cos 2 pi f0 r], per coordinate.

    Whatever its weights, it repeats itself after 1 / f0 along every axis, and can only hold harmonics of f0.

    Example:
        >>> net, r = single_frequency(1.0, hidden=(8,)), torch.rand(5, 2)
        >>> torch.allclose(net(r), net(r + 1), atol=1e-4)
        True
    """
    B = f0 * torch.eye(in_features)
    shape = {"in_features": in_features, "hidden": hidden, "outputs": outputs}
    return seeded(FFN, seed, **shape, frequencies=B, activation=activation)


@checked
def frozen_siren(
    frequencies: Annotated[Tensor, shaped(2, finite=True)],
    *,
    hidden: Sequence[Count] = (256, 256, 256),
    outputs: Count = 3,
    w_h: Positive = 30.0,
    output_offset: Finite = 0.0,
    seed: int = 0,
) -> SIREN:
    """A SIREN whose first layer sin(2 pi B r + phase) is not trained: B [T, d] in cycles, phases as SIREN draws them.

    Erratum: the paper (C.2) sets w0 = 1 and W0 = I or I / 2 and calls these frequency 1 and 0.5, but sin(r) has period
    2 pi; here w0 = 2 pi and W0 = B, so that B = f0 I repeats itself after 1 / f0 as `single_frequency` does. One sine
    per coordinate cannot tell r from its mirror image; repeat the rows of B for several phases.

    Example:
        >>> net = frozen_siren(torch.eye(2), hidden=(8,))
        >>> [name for name, p in net.named_parameters() if not p.requires_grad]
        ['layers.fc1.weight', 'layers.fc1.bias']
    """
    T, d = frequencies.shape
    shape = {"in_features": d, "hidden": (T, *hidden), "outputs": outputs}
    net = seeded(SIREN, seed, **shape, w0=2 * math.pi, w_h=w_h, output_offset=output_offset)
    first = cast(nn.Linear, net.layers.fc1)
    with torch.no_grad():
        first.weight.copy_(frequencies)
    first.requires_grad_(False)
    return net


@dataclass(frozen=True)
class Encoding:
    """The sines a network begins with, and what it makes of them, in float64.

    frequencies [T, d] in cycles per unit of r; phases [T] in radians; rest: angles [n, T] -> [n, c]. `order` is the
    largest number of angles that one harmonic can add up, K^(L-1) of theorem 5.1; None if there is no such bound.
    close: see `closeness`, of the type that the network holds its frequencies in.
    """

    frequencies: Tensor = field(repr=False)
    phases: Tensor = field(repr=False)
    rest: Callable[[Tensor], Tensor] = field(repr=False)
    order: int | None = None
    close: float = CLOSE


def encoding(model: nn.Module) -> Encoding:
    """Take a network of sines apart: an `FFN`, a `SIREN` or a `MultiplicativeFilter`; the module is copied."""
    if not isinstance(model, FFN | SIREN | MultiplicativeFilter):
        kind = type(model).__name__
        raise UnsupportedError(f"{kind} has no known first layer of sines (an FFN or SIREN has): give frequencies")
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
    """
    return max(CLOSE, 2 * torch.finfo(dtype).eps) if dtype.is_floating_point else CLOSE


def frequencies_of(source: Tensor | nn.Module) -> tuple[Tensor, float]:
    """Frequencies [T, d] in float64, those given ([T] counts as [T, 1]) or a network's, and their `closeness`."""
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
