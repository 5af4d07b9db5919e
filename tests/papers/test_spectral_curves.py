"""The measures behind figures 3.2 and A.1, on curves whose answer is known."""

import math

import pytest
import torch

from biascope_papers.spectral.sinusoids import climbs, nearest_parts, roughness, wave_targets


def test_roughness_is_the_power_weighted_mean_of_squared_frequencies() -> None:
    z = torch.arange(200, dtype=torch.float64) / 200
    curve = 3 * (2 * math.pi * 2 * z).sin() + 1 * (2 * math.pi * 10 * z + 0.3).cos() + 7
    assert float(roughness(curve)) == pytest.approx((9 * 4 + 1 * 100) / 10, rel=1e-9)


def test_a_low_pass_is_found_and_a_high_pass_is_far() -> None:
    ks = (3, 7, 20)
    _, y = wave_targets(ks, [1.0] * 3, 100, 4, seed=0)
    coefficients = torch.fft.rfft(y)
    coefficients[:, 8:] = 0
    smooth = torch.fft.irfft(coefficients, n=100)
    near, far = nearest_parts(torch.stack([smooth, y - smooth]), y, ks)
    norm = y.norm(dim=1)
    torch.testing.assert_close(near[0], torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(far[1], torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    # each sinusoid has norm sqrt(50); from k = 3, 7 the nearest high-pass is 7, 20 (two sinusoids apart)
    torch.testing.assert_close(far[0], math.sqrt(100) / norm, atol=1e-9, rtol=0)


def test_climbs_are_measured_from_the_lowest_loss_so_far() -> None:
    losses = torch.tensor([[10.0, 4.0], [2.0, 3.0], [5.0, 2.0], [1.0, 1.0], [3.5, 0.5]])
    assert climbs(losses).tolist() == pytest.approx([0.3, 0.0])
