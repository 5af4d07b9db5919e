"""The Fourier checks of spec 04 to the digits they are stated with."""

import pytest
import torch
from torch import nn

from biascope.spectral import affine_map, amplitude_spectrum, linear_regions_2d, rbf_eigenbasis
from biascope.spectral.decay import decay_exponent
from spectral.test_spectral_transform import pyramid

F64 = torch.float64


@pytest.mark.parametrize("depth", range(1, 7))
def test_affine_map_of_a_float32_network_to_1e_6(depth: int) -> None:
    """Check 1, in the precision networks have: relative to the size of the terms that are summed."""
    rng = torch.Generator().manual_seed(depth)
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(3, 3), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(3, 1))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    x = torch.randn(50, 3, generator=rng)
    w, b = affine_map(net, x)
    terms = torch.cat([w[:, 0].double() * x.double(), b.double()], 1)
    error = (terms.sum(1) - net(x)[:, 0].double()).abs()
    assert bool((error <= 1e-6 * terms.abs().sum(1).clamp_min(1.0)).all())
    inputs = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(net(inputs).sum(), inputs)
    assert torch.allclose(w[:, 0].float(), gradient, rtol=1e-5, atol=1e-6)


def test_exponents_of_the_pyramid_to_two_digits() -> None:
    """Check 5: -2.99, -1.99, -2.00 on k in [30, 3000]."""
    regions = linear_regions_2d(pyramid(), (-1.5, -1.5), (1.5, 1.5))
    for direction, exponent in (((1, 0.37), -2.99), ((1, 0), -1.99), ((1, 1), -2.00)):
        assert decay_exponent(regions, direction, 30, 3000).exponent == pytest.approx(exponent, abs=0.03)


def test_rbf_index_is_frequency() -> None:
    """Check 15: correlation 0.999 of the index with the peak of the spectrum."""
    basis = rbf_eigenbasis(torch.linspace(0, 1, 50, dtype=F64)[:, None], width=0.05)
    peak = amplitude_spectrum(basis.vectors.T).argmax(1).double()
    correlation = torch.corrcoef(torch.stack([torch.arange(50, dtype=F64), peak]))[0, 1]
    assert float(correlation) == pytest.approx(0.999, abs=1e-3)
