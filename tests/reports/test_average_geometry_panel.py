"""The average geometry on the card."""

import pytest
import torch

from biascope.reports.panels.input_geometry import geometry_picture, identity_correlation


def test_correlation_with_the_identity_equals_the_dense_one() -> None:
    sample = torch.randn(30, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G = sample.T @ sample / 30
    found, chance = identity_correlation(sample)
    assert found == pytest.approx(float(G.trace() / (50**0.5 * G.norm())), rel=1e-12)
    assert found == pytest.approx(chance, abs=0.03)  # Gaussian gradients are isotropic
    assert identity_correlation(sample * torch.linspace(1, 0, 50, dtype=torch.float64) ** 4)[0] < 0.7 * chance


def test_the_picture_says_what_it_shows() -> None:
    drawn = str(geometry_picture(torch.randn(8, 20, dtype=torch.float64)))
    assert "first 20 x 20 entries" in drawn
    assert "alt=" in drawn
