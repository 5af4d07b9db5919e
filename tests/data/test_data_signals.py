import math
from itertools import pairwise

import pytest
import torch
from scipy.integrate import quad
from scipy.special import ndtr

from biascope.data import correlated_gaussians, noisy_function, sinusoid_classes, sinusoids
from biascope.data.mutual import gaussian_mutual_information
from biascope.data.signals import gamma_embedding, unit_grid
from biascope.support.errors import InputError


@pytest.mark.parametrize("amplitudes", ["equal", "growing", [3.0] * 10])
def test_amplitudes_and_phases_in_the_spectrum(amplitudes: str | list[float]) -> None:
    d = sinusoids(amplitudes=amplitudes, n=200, seed=4, dtype=torch.float64)  # type: ignore[arg-type]
    spectrum = torch.fft.rfft(d.y) * 2 / 200
    expected = torch.zeros(101, dtype=torch.complex128)
    for k, a, phi in zip(range(5, 55, 5), d.info["amplitudes"], d.info["phases"]):
        expected[k] = a * torch.exp(1j * (phi - math.pi / 2))  # sin = cos shifted
    assert float((spectrum - expected).abs().max()) < 1e-12
    if amplitudes == "growing":
        assert d.info["amplitudes"].tolist() == pytest.approx([0.1 * i for i in range(1, 11)])
    assert d.x.shape == (200, 1)
    assert torch.equal(d.x[:, 0], unit_grid(200))


def test_phases_are_uniform_seeded_and_can_be_given() -> None:
    phases = sinusoids(list(range(1, 5001)), n=4, seed=0).info["phases"] / (2 * math.pi)
    assert float(phases.min()) >= 0
    assert float(phases.max()) < 1
    assert float(phases.mean()) == pytest.approx(0.5, abs=5 * 12**-0.5 / 5000**0.5)
    d = sinusoids([2], [3.0], [math.pi / 2], n=8, dtype=torch.float64)
    assert torch.allclose(d.y, 3 * (4 * math.pi * unit_grid(8)).cos(), atol=1e-12)


def test_signal_errors() -> None:
    with pytest.raises(InputError, match="2 frequencies need 2"):
        sinusoids([1, 2], [1.0])
    with pytest.raises(InputError, match=r"amplitudes='falling' is not known; there is equal, growing"):
        sinusoids([1], "falling")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least one"):
        sinusoids([])
    with pytest.raises(InputError, match="n must be at least 1"):
        sinusoids([1], n=0)


def test_gamma_embedding() -> None:
    z = unit_grid(1000)
    assert torch.allclose(gamma_embedding(z, 0).norm(dim=1), torch.ones(1000, dtype=torch.float64), atol=1e-14)
    for petals in (1, 4, 10):
        curve = gamma_embedding(z, petals)
        radius = curve.norm(dim=1)
        assert torch.allclose(radius, 1 + 0.5 * (2 * math.pi * petals * z).sin(), atol=1e-12)
        assert float(radius.min()) >= 0.5 - 1e-12
        assert float(radius.max()) <= 1.5 + 1e-12
    spectrum = torch.fft.rfft(gamma_embedding(z, 4), dim=0).abs() * 2 / 1000
    for coordinate in (0, 1):
        s = spectrum[:, coordinate]
        assert s[[1, 3, 5]].tolist() == pytest.approx([1, 0.25, 0.25], abs=1e-12)
        assert float(s.sum()) == pytest.approx(1.5, abs=1e-9)


def test_sinusoids_on_the_manifold_keep_their_targets() -> None:
    flat, curved = sinusoids(seed=1), sinusoids(petals=4, seed=1)
    assert torch.equal(flat.y, curved.y)
    assert torch.allclose(curved.x, gamma_embedding(unit_grid(200), 4).float())


def test_sinusoid_classes_and_baseline() -> None:
    d = sinusoid_classes(7, 1000, petals=3, seed=0)
    z, phi = d.info["z"], d.info["phase"]
    assert torch.equal(d.y, ((2 * math.pi * 7 * z + phi).sin() > 0.5).long())
    assert d.info["majority"] == pytest.approx(2 / 3, abs=0.01)
    seen = {round(sinusoid_classes(200, 1000, seed=s).info["majority"], 3) for s in range(30)}
    assert seen == {0.6, 0.8}  # only five distinct phases
    assert sinusoid_classes(7, 1000, threshold=0.0, phase=0.1).info["majority"] == pytest.approx(0.5, abs=0.01)


def test_gaussian_information_closed_form() -> None:
    """Against log det of the joint covariance: I = -1/2 log det [[I, rI], [rI, I]]."""
    for dim, rho in ((1, 0.3), (3, -0.8), (20, 0.5)):
        eye = torch.eye(dim, dtype=torch.float64)
        joint = torch.cat([torch.cat([eye, rho * eye], 1), torch.cat([rho * eye, eye], 1)])
        assert gaussian_mutual_information(dim, rho) == pytest.approx(-0.5 * float(torch.logdet(joint)), abs=1e-10)
    assert gaussian_mutual_information(5, 0.0) == 0
    for bad in (1.0, -1.0, 2.0):
        with pytest.raises(InputError, match="rho"):
            gaussian_mutual_information(1, bad)


def test_correlated_gaussians_moments() -> None:
    n = 100_000
    d = correlated_gaussians(n, 3, 0.7, seed=1, dtype=torch.float64)
    both = torch.cat([d.x, d.y], 1)
    expected = torch.eye(6, dtype=torch.float64)
    expected[:3, 3:] = expected[3:, :3] = 0.7 * torch.eye(3)
    assert float((both.T @ both / n - expected).abs().max()) < 5 * 2**0.5 / n**0.5
    cubic = correlated_gaussians(n, 3, 0.7, transform="cubic", seed=1, dtype=torch.float64)
    assert torch.allclose(cubic.y, d.y**3)
    assert cubic.info["mutual_information"] == d.info["mutual_information"]
    with pytest.raises(InputError, match="transform"):
        correlated_gaussians(4, transform="square")  # type: ignore[arg-type]


TRUE = {
    0.05: (4.630, 3.629, 4.320), 0.1: (3.334, 2.499, 3.071), 0.2: (2.129, 1.464, 1.930), 0.3: (1.498, 0.939, 1.341),
    0.5: (0.837, 0.451, 0.729), 0.7: (0.517, 0.256, 0.441), 0.9: (0.344, 0.162, 0.290), 1.0: (0.287, 0.134, 0.241),
}  # fmt: skip


@pytest.mark.parametrize("sigma", list(TRUE))
def test_noisy_function_information(sigma: float) -> None:
    values = [noisy_function(2, f, sigma).info["mutual_information"] for f in ("linear", "cubic", "sine")]  # type: ignore[arg-type]
    assert values == pytest.approx(TRUE[sigma], abs=6e-4)


def test_noisy_function_data() -> None:
    d = noisy_function(50_000, "cubic", 0.3, seed=0, dtype=torch.float64)
    residual = d.y - d.x**3
    assert float(residual.std()) == pytest.approx(0.3, abs=5 * 0.3 / 2e5**0.5)
    assert float(d.x.abs().max()) <= 1
    with pytest.raises(InputError, match="sigma"):
        noisy_function(4, sigma=0.0)
    with pytest.raises(InputError, match="function"):
        noisy_function(4, "square")  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [10.0, 0.3, 1e-3, 1e-4, 1e-6, 1e-9])
def test_the_information_of_a_line_with_noise_has_a_closed_density(sigma: float) -> None:
    """p(y) = (Phi((y + 1) / sigma) - Phi((y - 1) / sigma)) / 2: the integral of -p log p, split at the ends."""

    def minus_p_log_p(u: float) -> float:  # at y = 1 + sigma u; the other end counts as well
        # not ndtr(u + 2 / sigma) - ndtr(u), which cancels in the tail
        p = (ndtr(-u) - ndtr(-u - 2 / sigma)) / 2
        return float(-p * math.log(p)) if p > 0 else 0.0

    edge = sigma * quad(minus_p_log_p, -min(12.0, 1 / sigma), 12.0, epsabs=0, epsrel=1e-12, limit=400)[0]
    flat = max(0.0, 1 - 12 * sigma) * math.log(2) / 2  # p is 1/2 there
    expected = 2 * (edge + flat) - 0.5 * math.log(2 * math.pi * math.e * sigma**2)
    # y lies near 1, so its distances from there, in units of sigma, are rounded to 2e-16 / sigma
    found = noisy_function(2, "linear", sigma, dim=1).info["mutual_information"]
    assert found == pytest.approx(expected, abs=1e-13 + 2e-16 / sigma * 10)


@pytest.mark.parametrize(("function", "mean_log_slope"), [("cubic", math.log(3) - 2), ("sine", -0.18753816902083825)])
def test_little_noise_leaves_the_entropy_of_the_function(function: str, mean_log_slope: float) -> None:
    """I + log sigma -> log 2 + E log |f'| - log sqrt(2 pi e); the error is like sigma (sine), sigma^(1/3) (cubic)."""
    limit = math.log(2) + mean_log_slope - 0.5 * math.log(2 * math.pi * math.e)
    gaps = []
    for sigma in (1e-4, 1e-5, 1e-6):
        nats = noisy_function(2, function, sigma, dim=1).info["mutual_information"]  # type: ignore[arg-type]
        gaps.append(nats + math.log(sigma) - limit)
    power = {"cubic": 1 / 3, "sine": 1.0}[function]
    for wide, narrow in pairwise(gaps):
        assert narrow / wide == pytest.approx(0.1**power, rel=1e-2)  # the next order is smaller by sigma^(1/3) or more
