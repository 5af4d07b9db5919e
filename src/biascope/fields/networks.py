"""Coordinate networks of the paper, as thin builders on `bs.nets`: f(r) = MLP(gamma(r)) for coordinates r [..., d].

`nets.FFN`, `nets.SIREN` and the ReLU baseline `nets.build("relu-coords")` are the main ones; here are those that the
theory asks for: polynomial activations, one frequency, a first layer that stays, and products of sines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from biascope.arguments import check_number
from biascope.errors import InputError
from biascope.inputs import check_inputs
from biascope.nets import FFN, SIREN
from biascope.nets.parts import check_sizes
from biascope.seeds import derive
from biascope.signatures import checked

M = TypeVar("M", bound=nn.Module)


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

    Example:
        >>> net = seeded(MultiplicativeFilter, 0, in_features=2, width=8, filters=3)
        >>> net(torch.zeros(5, 4, 2)).shape
        torch.Size([5, 4, 1])
    """

    @checked
    def __init__(
        self, *, in_features: int = 2, width: int = 256, filters: int = 4, outputs: int = 1, sigma: float = 10.0
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, width=width, filters=filters, outputs=outputs)
        check_number(sigma, "sigma", least=0)
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
    """Build a module whose weights depend on the seed alone; the global random state is left as it was.

    Example:
        >>> a, b = (seeded(nn.Linear, 3, in_features=2, out_features=1) for _ in range(2))
        >>> torch.equal(a.weight, b.weight)
        True
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed every CUDA device, which fork_rng does not restore
        torch.default_generator.manual_seed(derive(seed, "field"))
        return factory(**options)


@checked
def single_frequency(
    f0: float,
    *,
    in_features: int = 2,
    hidden: Sequence[int] = (256, 256, 256),
    outputs: int = 3,
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
    check_sizes(in_features=in_features)
    B = check_number(f0, "f0", above=0) * torch.eye(in_features)
    return seeded(
        FFN, seed, in_features=in_features, hidden=hidden, outputs=outputs, frequencies=B, activation=activation
    )


@checked
def frozen_siren(
    frequencies: Tensor,
    *,
    hidden: Sequence[int] = (256, 256, 256),
    outputs: int = 3,
    w_h: float = 30.0,
    output_offset: float = 0.0,
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
    if frequencies.dim() != 2:
        raise InputError(f"frequencies has shape {list(frequencies.shape)}, it must be [T, d]")
    check_inputs(frequencies, "frequencies")
    T, d = frequencies.shape
    net = seeded(
        SIREN,
        seed,
        in_features=d,
        hidden=(T, *hidden),
        outputs=outputs,
        w0=2 * math.pi,
        w_h=w_h,
        output_offset=output_offset,
    )
    first = net.layers.fc1
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight.copy_(frequencies)
    first.requires_grad_(False)
    return net
