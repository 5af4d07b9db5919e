"""Discrete spectra, kernel eigenbasis, manifolds, perturbations and paths against closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy.special import jv
from torch import nn

from biascope.data.signals import gamma_embedding
from biascope.spectral import (
    amplitude_spectrum,
    autoneb,
    fourier_transform,
    linear_regions_1d,
    radial_spectrum,
    rbf_eigenbasis,
)
from biascope.spectral.manifolds import composition_kernel, flower, max_latent_frequency
from biascope.spectral.perturb import high_frequency_volume, perturbation_robustness, sphere_directions
from biascope.support.errors import InputError

F64 = torch.float64
z200 = torch.arange(200, dtype=F64) / 200


def test_amplitudes_and_delta_and_parseval() -> None:
    y = 0.7 * torch.sin(2 * math.pi * 15 * z200 + 1.1) + 0.3
    found = amplitude_spectrum(y)
    assert float(found[15]) == pytest.approx(0.7, abs=1e-12)
    assert float(found[0]) == pytest.approx(0.3, abs=1e-12)
    found[15] = found[0] = 0
    assert float(found.max()) < 1e-12
    assert float(amplitude_spectrum(torch.cos(math.pi * torch.arange(200, dtype=F64)))[100]) == pytest.approx(1.0)
    delta = (z200 == 0.5).double()
    assert torch.allclose(amplitude_spectrum(delta, "raw"), torch.full((200,), 0.005, dtype=F64), atol=1e-15)
    noise = torch.randn(3, 200, dtype=F64)
    raw = amplitude_spectrum(noise, "raw")
    assert torch.allclose(noise.square().sum(1), 200 * raw.square().sum(1))
    with pytest.raises(InputError, match="at least two"):
        amplitude_spectrum(torch.zeros(1))


def test_radial_spectrum_of_waves() -> None:
    x = torch.arange(32, dtype=F64) / 32
    wave = torch.sin(2 * math.pi * (3 * x[:, None] + 4 * x[None, :])) + 0.5
    k, zeta = radial_spectrum(wave, extent=2.0)
    assert float(k[1]) == 0.5
    expected = torch.zeros(16, dtype=F64)
    expected[0], expected[5] = 0.5, 1.0  # |(3, 4)| = 5; two bins of 1/2
    assert torch.allclose(zeta, expected, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_all_rings_that_fit_into_the_square_of_bins_are_given(n: int) -> None:
    """Ring k fits if no frequency of length below k + 1/2 has a coordinate beyond those of the bins of an FFT."""
    bins = set(torch.fft.fftfreq(n, 1 / n).long().tolist())
    reach = range(-n, n + 1)
    fits = [
        all(a in bins and b in bins for a in reach for b in reach if k - 0.5 <= math.hypot(a, b) < k + 0.5)
        for k in range(n)
    ]
    k, zeta = radial_spectrum(torch.zeros(n, n, dtype=F64) + 1)
    assert len(k) == len(zeta) == sum(fits)
    delta = torch.zeros(n, n, dtype=F64)
    delta[0, 0] = n**2  # 1 in every bin: zeta counts them
    counts = [sum(k - 0.5 <= math.hypot(a, b) < k + 0.5 for a in bins for b in bins) for k in range(sum(fits))]
    assert radial_spectrum(delta)[1].tolist() == pytest.approx(counts)


def test_rbf_eigenvectors_are_ordered_by_frequency() -> None:
    basis = rbf_eigenbasis(torch.linspace(0, 1, 50, dtype=F64)[:, None], width=0.05)
    signs = (basis.vectors[1:] * basis.vectors[:-1] < 0).sum(0)
    assert torch.equal(signs, torch.arange(50))
    peak = amplitude_spectrum(basis.vectors.T).argmax(1).double()
    assert float(torch.corrcoef(torch.stack([torch.arange(50, dtype=F64), peak]))[0, 1]) > 0.99
    assert float(basis.values[0] / basis.values[-1]) == pytest.approx(1.1e6, rel=0.1)
    assert torch.allclose(basis.vectors.T @ basis.vectors, torch.eye(50, dtype=F64), atol=1e-12)
    psi = basis.spectrum(basis.noise(2.0))
    assert torch.allclose(psi, (torch.arange(1, 51, dtype=F64) / 50) ** 2, atol=1e-12)
    wide = rbf_eigenbasis(torch.linspace(0, 1, 50, dtype=F64)[:, None], width=0.2)
    signs = (wide.vectors[1:] * wide.vectors[:-1] < 0).sum(0)
    assert torch.equal(signs[:11], torch.arange(11))


def test_flower_has_modes_at_l_plus_and_minus_one() -> None:
    for petals in (0, 4, 16):
        points = flower(petals)(z200)
        assert torch.allclose(points, gamma_embedding(z200, petals))
        radius = points.norm(dim=1)
        assert 0.5 - 1e-9 <= float(radius.min()) <= float(radius.max()) <= 1.5 + 1e-9
        spectrum = amplitude_spectrum(points.T)
        if petals:
            assert torch.allclose(spectrum[:, [petals - 1, petals + 1]], torch.full((2, 2), 0.25, dtype=F64), atol=1e-9)
        else:
            assert torch.allclose(radius, torch.ones(200, dtype=F64))


def test_composition_kernel_of_the_circle_is_bessel() -> None:
    latent = torch.arange(-6, 7)
    k = torch.tensor([[2.5, 0.0], [0.0, 7.0]], dtype=F64)
    found = composition_kernel(flower(0), 2 * math.pi * latent, k).numpy()
    # e^{i k cos t} = sum i^l J_l e^{i l t}; for k along y the angle is turned by a quarter
    assert np.allclose(found[:, 0], [1j**n * jv(n, 2.5) for n in latent.tolist()], atol=1e-12)
    assert np.allclose(found[:, 1], [jv(n, 7.0) for n in latent.tolist()], atol=1e-12)


def test_reachable_latent_frequency() -> None:
    k = torch.tensor([[3.0, 0.0], [1.0, 1.0]], dtype=F64)
    for petals in (0, 5, 16):
        z = torch.linspace(0, 1, 100_001, dtype=F64)
        points = flower(petals)(z)
        slope = ((points[1:] - points[:-1]) / (z[1] - z[0])) @ k.T
        assert torch.allclose(max_latent_frequency(flower(petals), k), slope.abs().amax(0), rtol=1e-3)
    few, many = (float(max_latent_frequency(flower(p), k[:1])) for p in (0, 16))
    assert many > 5 * few
    # beyond it the kernel is negligible
    beyond = torch.tensor([1.0, 1.6]) * few
    kernel = composition_kernel(flower(0), (beyond / (2 * math.pi)).round() * 2 * math.pi + 2 * math.pi * 12, k[:1])
    assert float(kernel.abs().max()) < 1e-6


def sine_network(k: int) -> nn.Sequential:
    """A ReLU network that is a triangle wave of k periods on [0, 1]."""
    knots = torch.arange(2 * k, dtype=F64) / (2 * k)
    net = nn.Sequential(nn.Linear(1, 2 * k), nn.ReLU(), nn.Linear(2 * k, 1)).double()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.copy_(-knots)
        slope = 2.0 * k * torch.tensor([1.0, -1.0], dtype=F64).repeat(k)
        net[2].weight.copy_(torch.cat([slope[:1], slope.diff()])[None])
        net[2].bias.fill_(-0.5)
    return net


def test_robustness_is_one_at_zero_and_exact_for_a_line() -> None:
    sums = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    found = perturbation_robustness(sums, z200[:, None], [1, 3], [0.0, 0.5], draws=50)
    assert torch.allclose(found.mean[0], torch.ones(2, dtype=F64), atol=1e-9)
    with pytest.raises(InputError, match=r"nothing at frequencies \[1\]"):
        perturbation_robustness(nn.Linear(1, 1), torch.zeros(8, 1), [1], [0.0])
    linear = nn.Linear(1, 1).double()  # f~ is proportional to |w|: the mean of |w + delta u| / |w| in closed form
    with torch.no_grad():
        linear.weight.fill_(2.0)
    found = perturbation_robustness(linear, z200[:, None], [1], [4.0], draws=4000, seed=1)
    angle = torch.arange(100_000, dtype=F64) / 100_000 * 2 * math.pi  # u uniform on the circle of (w, b)
    exact = float((2 + 4 * angle.cos()).abs().mean() / 2)
    assert abs(float(found.mean) - exact) < 4 * float(found.standard_error)
    assert float(found.standard_error) < 0.03


def test_directions_are_on_one_sphere() -> None:
    params = {"a": torch.zeros(50, 40), "b": torch.zeros(100)}
    u = sphere_directions(params, 64, torch.Generator().manual_seed(0))
    total = u["a"].flatten(1).square().sum(1) + u["b"].square().sum(1)
    assert torch.allclose(total, torch.ones(64), atol=1e-5)
    assert float(u["b"].square().sum(1).mean()) == pytest.approx(100 / 2100, rel=0.1)


def test_volume_shrinks_and_counts_what_the_exact_transform_counts() -> None:
    found = high_frequency_volume(
        (1, 6, 6, 1), clip=2.0, eps=2e-3, cutoffs=(1, 2, 4, 8, 16, 32), samples=500, grid=1024
    )
    assert (found.volume.diff() <= 0).all()
    assert float(found.volume[0]) > float(found.volume[-1])
    # one network, drawn as the function draws it, by the exact transform of its linear regions
    from biascope.support.seeds import generator

    rng, net = generator(5, "volume"), nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.copy_((torch.rand(1, layer.in_features, layer.out_features, generator=rng)[0].T * 2 - 1) * 2)
            layer.bias.copy_((torch.rand(1, 1, layer.out_features, generator=rng)[0, 0] * 2 - 1) * 2)
    k = 2 * math.pi * torch.arange(3, 400, dtype=F64)
    largest = float(fourier_transform(linear_regions_1d(net, 0.0, 1.0), k, boundary=False).abs().max())
    assert largest > 0
    for factor, expected in ((0.99, 1.0), (1.01, 0.0)):
        one = high_frequency_volume((1, 4, 1), 2.0, largest * factor, (2,), samples=1, grid=16384, seed=5)
        assert float(one.volume) == expected


def test_triangle_wave_lives_at_its_frequency() -> None:
    spectrum = amplitude_spectrum(sine_network(4)(z200[:, None]).detach()[:, 0])
    assert int(spectrum[1:].argmax()) + 1 == 4


def test_paths_stay_inside_a_ring() -> None:
    def ring(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([4 - 20 * (x.norm(dim=1) - 1).square(), torch.zeros(len(x), dtype=x.dtype)], 1)

    angle = torch.tensor([0.6, 1.2, 2.4], dtype=F64)
    start = torch.tensor([[1.0, 0.0]], dtype=F64).expand(3, 2)
    stop = torch.stack([angle.cos(), angle.sin()], 1)
    found = autoneb(ring, start, stop, torch.zeros(3, dtype=torch.long), lr=2e-3, rounds=6, steps=40)
    assert found.connected.all()
    assert found.straight_connected.tolist() == [True, True, False]
    assert (found.min_probability >= found.straight_probability - 1e-9).all()
    # the best path is the arc: its length over the chord
    assert float(found.length_ratio[2]) == pytest.approx(2.4 / (2 * math.sin(1.2)), rel=0.05)
    assert torch.equal(found.pivots[:, 0], start)
    assert torch.equal(found.pivots[:, -1], stop)
    assert found.pivots.shape == (3, 10, 2)


def test_paths_leave_a_linear_classifier_alone() -> None:
    def linear(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.flatten(1)[:, 0], -x.flatten(1)[:, 0]], 1)

    start, stop = torch.randn(4, 1, 3, 3), torch.randn(4, 1, 3, 3)
    start[:, 0, 0, 0] = stop[:, 0, 0, 0] = 1.0
    found = autoneb(linear, start, stop, torch.zeros(4, dtype=torch.long))
    assert found.connected.all()
    assert (found.length_ratio >= 1 - 1e-6).all()
    assert found.pivots.shape == (4, 8, 1, 3, 3)
    with pytest.raises(InputError, match=r"target \[4\] do not fit"):
        autoneb(linear, start, stop[:2], torch.zeros(4))
