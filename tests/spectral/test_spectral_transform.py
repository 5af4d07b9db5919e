"""Fourier transforms of polytopes and of piecewise linear functions against closed forms and quadrature."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate
from scipy.special import roots_legendre
from torch import Tensor, nn

from biascope.spectral import (
    Segments,
    fourier_transform,
    linear_regions_1d,
    linear_regions_2d,
    polytope_transform,
    spectral_norm,
)
from biascope.spectral.decay import decay_exponent, lipschitz_bounds
from biascope.spectral.regions import Polygons
from biascope.spectral.transform import transform_from_jumps
from biascope.support.errors import InputError

F64 = torch.float64


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def triangle_quadrature(corners: np.ndarray, k: np.ndarray, g=lambda x: np.ones(len(x)), order: int = 80) -> complex:
    """∫ g e^{-ikx} over a triangle by a product rule on the collapsed square: an oracle without any Fourier algebra."""
    nodes, weights = roots_legendre(order)
    u, w = (nodes + 1) / 2, weights / 2
    s, t = np.meshgrid(u, u, indexing="ij")
    a, b, c = corners
    x = a + s[..., None] * (b - a) + (s * t)[..., None] * (c - b)
    area2 = abs((b - a)[0] * (c - a)[1] - (b - a)[1] * (c - a)[0])
    flat = x.reshape(-1, 2)
    return complex(area2 * (np.outer(w, w) * s).ravel() @ (g(flat) * np.exp(-1j * flat @ k)))


def test_unit_square_and_cube() -> None:
    k = torch.tensor(
        [[3.1, 1.7], [40.0, -7.0], [5.0, 0.0], [0.0, -9.0], [1e-7, 2.0], [1e-9, 1e-8], [0.0, 0.0]], dtype=F64
    )

    def side(kj: Tensor) -> Tensor:
        exact = (1 - torch.exp(-1j * kj)) / (1j * kj)
        return torch.where(kj.abs() < 1e-5, 1 - 0.5j * kj, exact)

    square = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=F64)
    assert torch.allclose(polytope_transform(square, k), side(k[:, 0]) * side(k[:, 1]), atol=1e-12)
    cube = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=F64)] * 3)
    k3 = torch.cat([k, torch.tensor([[2.0], [0.0], [-3.0], [0.0], [11.0], [0.0], [0.0]], dtype=F64)], 1)
    assert torch.allclose(polytope_transform(cube, k3), side(k3[:, 0]) * side(k3[:, 1]) * side(k3[:, 2]), atol=1e-12)


def test_triangle_against_quadrature_and_special_branches() -> None:
    corners = np.array([[0.2, -0.1], [1.3, 0.4], [0.5, 1.1]])
    edge = corners[1] - corners[0]
    across = np.array([-edge[1], edge[0]]) / np.linalg.norm(edge)
    k = np.array(
        [[7.3, -2.1], [0.4, 0.3], [30.0, 12.0], 9 * across, 9 * across + 1e-8 * edge, 0.9 * across, [0.0, 0.0]]
    )
    found = polytope_transform(torch.from_numpy(corners), torch.from_numpy(k)).numpy()
    expected = [triangle_quadrature(corners, each) for each in k]
    assert np.abs(found - expected).max() < 1e-13
    area = 0.5 * abs(edge[0] * (corners[2] - corners[0])[1] - edge[1] * (corners[2] - corners[0])[0])
    assert found[-1] == pytest.approx(area)


def test_tetrahedron_volume_and_conjugate() -> None:
    v = torch.randn(4, 3, dtype=F64)
    k = torch.randn(5, 3, dtype=F64) * 6
    volume = abs(float(torch.linalg.det(v[1:] - v[0]))) / 6
    assert float(polytope_transform(v, torch.zeros(1, 3)).real) == pytest.approx(volume, rel=1e-12)
    assert torch.allclose(polytope_transform(v, k), polytope_transform(v, -k).conj(), atol=1e-13)
    shift = torch.tensor([0.3, -1.0, 2.0], dtype=F64)
    assert torch.allclose(
        polytope_transform(v + shift, k), torch.exp(-1j * (k @ shift)) * polytope_transform(v, k), atol=1e-12
    )


def test_degenerate_polytopes_are_refused() -> None:
    with pytest.raises(InputError, match="less than 2 dimensions"):
        polytope_transform(torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), torch.zeros(1, 2))
    with pytest.raises(InputError, match=r"k \[1, 3\] do not fit"):
        polytope_transform(torch.rand(3, 2), torch.zeros(1, 3))


def test_hat_function_has_the_corrected_sign() -> None:
    hat = Segments.through([0.0, 0.5, 1.0], [0.0, 0.5, 0.0])
    for boundary in (True, False):
        value = complex(fourier_transform(hat, torch.tensor([7.3]), boundary=boundary)[0])
        assert value == pytest.approx(-0.061421 + 0.034228j, abs=1e-6)


def test_jump_formula_on_a_random_function() -> None:
    t = torch.rand(12, dtype=F64).sort().values
    y = torch.randn(12, dtype=F64)
    y[0] = y[-1] = 0
    f = Segments.through(t, y)
    k = torch.linspace(0.5, 60, 40, dtype=F64)
    slopes = torch.cat([torch.zeros(1, dtype=F64), f.slopes[:, 0], torch.zeros(1, dtype=F64)])
    # -k^-2 sum_j dw_j e^{-i k t_j}, dw the jumps of the slope at the knots t
    jumps = -(torch.exp(-1j * k[:, None] * t) @ slopes.diff().to(torch.complex128)) / k**2
    assert torch.allclose(transform_from_jumps(t, slopes.diff(), k), jumps, atol=1e-12)
    assert torch.allclose(fourier_transform(f, k), jumps, atol=1e-12)
    assert torch.allclose(fourier_transform(f, k, boundary=False), jumps, atol=1e-12)


def test_network_of_one_input_against_quadrature() -> None:
    net = mlp(1, 12, 12, 2)
    regions = linear_regions_1d(net, -1.0, 2.0)
    k = torch.tensor([0.0, 1e-6, 0.7, -11.0, 35.0], dtype=F64)
    found = fourier_transform(regions, k)
    assert found.shape == (5, 2)
    for j, kj in enumerate(k.tolist()):
        for part in (0, 1):
            total = 0j
            for a, b in zip(regions.knots[:-1].tolist(), regions.knots[1:].tolist()):
                nodes, weights = roots_legendre(30)
                x = (a + b) / 2 + (b - a) / 2 * nodes
                value = net(torch.from_numpy(x)[:, None]).detach().numpy()[:, part]
                total += (b - a) / 2 * np.sum(weights * value * np.exp(-1j * kj * x))
            assert complex(found[j, part]) == pytest.approx(total, abs=1e-12)
    assert integrate.trapezoid(regions.values[:, 0], regions.knots) == pytest.approx(float(found[0, 0].real))


def test_network_of_two_inputs_against_quadrature() -> None:
    net = mlp(2, 6, 6, 2)
    regions = linear_regions_2d(net, (-1.0, -0.5), (1.5, 1.0))
    k = torch.tensor([[0.0, 0.0], [0.2, -0.1], [3.0, 1.0], [-9.0, 4.0], [6.0, 0.0]], dtype=F64)
    found = fourier_transform(regions, k)
    for j in range(len(k)):
        for part in (0, 1):
            total = 0j
            for v in regions.vertices:
                for i in range(1, len(v) - 1):
                    corners = np.stack([v[0], v[i], v[i + 1]])
                    total += triangle_quadrature(
                        corners, k[j].numpy(), lambda x, p=part: net(torch.from_numpy(x)).detach().numpy()[:, p], 24
                    )
            assert complex(found[j, part]) == pytest.approx(total, abs=1e-10)
    one = fourier_transform(Polygons(regions.vertices, regions.weights[:, :1], regions.biases[:, :1]), k)
    assert torch.allclose(one, found[:, 0])


def test_lemma_sums_polytopes() -> None:
    """The plane's fast path equals the lemma written out with the general polytope transform."""
    regions = linear_regions_2d(mlp(2, 5, 4, 1))
    k = torch.tensor([[2.0, 1.0], [-7.0, 30.0], [0.01, 0.02]], dtype=F64)
    total = torch.zeros(3, dtype=torch.complex128)
    for v, w in zip(regions.vertices, regions.weights[:, 0]):
        total += -1j * (k @ w) / k.square().sum(1) * polytope_transform(v, k)
    assert torch.allclose(fourier_transform(regions, k, boundary=False), total, atol=1e-12)


def pyramid() -> nn.Sequential:
    """relu(1 - max(|x|, |y|)) as a network: max(a, b) = (a + b + |a - b|) / 2."""
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1), nn.ReLU()).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))
        net[2].weight.copy_(torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 1, -1, -1], [-1, -1, 1, 1]]))
        net[4].weight.copy_(torch.tensor([[-0.5, -0.5, -0.5, -0.5]]))
        for layer, bias in ((0, 0.0), (2, 0.0), (4, 1.0)):
            net[layer].bias.fill_(bias)
    return net


def test_pyramid_value_and_exponents() -> None:
    regions = linear_regions_2d(pyramid(), (-1.5, -1.5), (1.5, 1.5))
    k = torch.tensor([[3.1, 1.7]], dtype=F64)
    for boundary in (True, False):
        value = complex(fourier_transform(regions, k, boundary=boundary)[0])
        assert value == pytest.approx(0.345893, abs=1e-6)
    for direction, exponent in (((1, 0.37), -3), ((1, 0), -2), ((1, 1), -2)):
        assert decay_exponent(regions, direction).exponent == pytest.approx(exponent, abs=0.1)


def test_exponents_of_a_line_and_of_an_indicator() -> None:
    t = torch.rand(9, dtype=F64).sort().values
    y = torch.randn(9, dtype=F64)
    y[0] = y[-1] = 0
    assert decay_exponent(Segments.through(t, y)).exponent == pytest.approx(-2, abs=0.2)
    square = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=F64)
    for direction, exponent in (((1, 0.37), -2), ((1, 0), -1)):
        found = decay_exponent(lambda k: polytope_transform(square, k), direction)
        assert found.exponent == pytest.approx(exponent, abs=0.2)
        assert found.standard_error < 0.1


def test_random_network_decays_as_the_theorem_says() -> None:
    torch.manual_seed(3)
    regions = linear_regions_2d(mlp(2, 8, 8, 1), (-2, -2), (2, 2))
    assert decay_exponent(regions, (1.0, 0.731), 300, 30_000).exponent == pytest.approx(-3, abs=0.3)
    edge = max((v.roll(-1, 0) - v for v in regions.vertices), key=lambda e: float(e.norm(dim=1).max()))
    normal = edge[edge.norm(dim=1).argmax()].flip(0) * torch.tensor([1.0, -1.0])
    assert decay_exponent(regions, normal.tolist(), 300, 30_000).exponent == pytest.approx(-2, abs=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_lipschitz_chain(seed: int) -> None:
    torch.manual_seed(seed)
    net, x = mlp(3, *[8] * (seed + 1), 2).requires_grad_(False), torch.randn(200, 3)
    found = lipschitz_bounds(net, x)
    assert 0 < found.local_max <= found.spectral_product * (1 + 1e-9)
    assert found.spectral_product <= found.maxnorm_bound * (1 + 1e-9)
    product = math.prod(float(torch.linalg.svdvals(layer.weight)[0]) for layer in net if isinstance(layer, nn.Linear))
    assert found.spectral_product == pytest.approx(product)


def test_power_iteration() -> None:
    w = torch.randn(3, 20, 14, dtype=F64)
    exact = torch.linalg.svdvals(w)[:, 0]
    assert torch.allclose(spectral_norm(w), exact)
    ten, many = spectral_norm(w, 10), spectral_norm(w, 2000)
    assert torch.allclose(many, exact, rtol=1e-8)
    assert (ten <= exact + 1e-12).all()
    assert ((exact - ten) / exact).max() < 0.1
    turn = torch.tensor([[0.0, 2.0], [-2.0, 0.0]], dtype=F64)  # the Rayleigh quotient of W itself is 0 here
    assert float(spectral_norm(turn, 5)) == pytest.approx(2.0)


def test_bad_wave_vectors() -> None:
    regions = linear_regions_2d(mlp(2, 3, 1))
    with pytest.raises(InputError, match=r"k \[3\] does not fit"):
        fourier_transform(regions, torch.zeros(3))
    with pytest.raises(InputError, match="k = 0"):
        fourier_transform(regions, torch.zeros(1, 2), boundary=False)
    with pytest.raises(InputError, match="direction"):
        decay_exponent(regions, (0.0, 0.0))
