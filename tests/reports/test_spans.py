"""Overlaps of spans against closed forms, and of planted spans: the correction and its error against repetition."""

import numpy as np
import pytest
import torch
from torch import Tensor

from biascope.reports.spans import corrected, overlap, overlap_matrix, overlaps, span

D, K = 64, 4


def test_overlap_of_rotated_planes() -> None:
    """Two planes in four dimensions that share one axis and are turned by phi in the other: (1 + cos^2 phi) / 2."""
    eye = torch.eye(4, dtype=torch.float64)
    for phi in (0.0, 0.3, 1.2):
        c, s = np.cos(phi), np.sin(phi)
        other = torch.stack([eye[0], c * eye[1] + s * eye[2]])
        assert overlap(eye[:2], other) == pytest.approx((1 + c * c) / 2)
        mixed = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64)).Q @ other  # another basis of the same span
        assert overlap(eye[:2], mixed) == pytest.approx((1 + c * c) / 2)


def test_unrelated_spans_overlap_by_k_over_d() -> None:
    rng = torch.Generator().manual_seed(0)
    spans = [torch.linalg.qr(torch.randn(64, 8, generator=rng, dtype=torch.float64)).Q.T for _ in range(40)]
    matrix = overlap_matrix([(spans[2 * i], spans[2 * i + 1]) for i in range(20)])
    assert matrix.mean() == pytest.approx(8 / 64, abs=0.01)


def test_correction_for_noisy_spans() -> None:
    """Halves of one noisy span, and of two: correlations fall by the reliability, the correction takes that back."""
    matrix = np.array([[0.2, np.sqrt(0.2 * 0.8) * 0.5], [np.sqrt(0.2 * 0.8) * 0.5, 0.8]])
    assert np.allclose(corrected(matrix, 0.0), [[1, 0.5], [0.5, 1]])


@pytest.mark.parametrize("n", [5, 40])
def test_a_span_is_that_of_the_singular_vectors(n: int) -> None:
    rows = torch.randn(n, 12, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    V = torch.linalg.svd(rows, full_matrices=False).Vh[:3]
    found = span(rows, 3)
    assert torch.allclose(found @ found.T, torch.eye(3, dtype=torch.float64), atol=1e-12)
    assert overlap(found, V) == pytest.approx(1, abs=1e-12)
    one = span(torch.ones(n, 12, dtype=torch.float64), 2)  # of rank 1: still two orthonormal rows
    assert torch.allclose(one @ one.T, torch.eye(2, dtype=torch.float64), atol=1e-12)


def planted(seed: int, T: int, strength: float, cosine: float) -> list[Tensor]:
    """Two samples [T, D] of white noise and a planted span of K directions each, at `cosine` to each other."""
    g, eye = torch.Generator().manual_seed(seed), torch.eye(D, dtype=torch.float64)
    spans = [eye[:K], cosine * eye[:K] + (1 - cosine**2) ** 0.5 * eye[K : 2 * K]]
    return [
        strength * torch.randn(T, K, generator=g, dtype=torch.float64) @ each
        + torch.randn(T, D, generator=g, dtype=torch.float64)
        for each in spans
    ]


@pytest.mark.parametrize(("T", "strength"), [(32, 4.0), (128, 4.0), (256, 1.5)])
def test_planted_spans_are_found_with_their_error(T: int, strength: float) -> None:
    """The corrected overlap of spans at 45 degrees, and an error that is the scatter of repetitions (or a bit more)."""
    found = [overlaps(planted(seed, T, strength, 0.5**0.5), K) for seed in range(20)]
    assert np.mean([one.known.all() for one in found]) > 0.9
    truth = (0.5 - K / D) / (1 - K / D)
    shares = np.array([one.shares[0, 1] for one in found])
    assert np.nanmean(shares) == pytest.approx(truth, abs=0.06)
    for scatter, error in (
        (np.nanstd(shares, ddof=1), np.nanmedian([one.share_errors[0, 1] for one in found])),
        (np.std([one.values[0, 0] for one in found], ddof=1), np.median([one.errors[0, 0] for one in found])),
    ):
        assert 0.6 * scatter < error < 2.5 * scatter
    within = [abs(one.shares[0, 1] - truth) < 2 * one.share_errors[0, 1] + 0.05 for one in found if one.known.all()]
    assert np.mean(within) > 0.85


def test_what_is_not_there_or_not_yet_seen_is_not_known() -> None:
    for T, strength in ((8, 0.0), (8, 1.5), (32, 0.0), (256, 0.0)):
        found = [overlaps(planted(seed, T, strength, 1.0), min(K, T // 4)) for seed in range(10)]
        assert not any(one.known.any() for one in found)
        assert all(np.isnan(one.shares).all() and np.isnan(one.share_errors).all() for one in found)
        assert all(np.isfinite(one.errors).all() for one in found)


def test_one_sample_twice_has_no_error_between_the_two() -> None:
    sample = planted(0, 64, 4.0, 1.0)[0]
    found = overlaps([sample, sample], K)
    assert found.shares[0, 1] == pytest.approx(1)
    assert found.share_errors[0, 1] == pytest.approx(0, abs=1e-9)
    assert found.errors[0, 1] == pytest.approx(found.errors[0, 0])


def test_too_few_to_tell() -> None:
    found = overlaps([sample[:3] for sample in planted(0, 8, 9.0, 1.0)], 1)
    assert np.isnan(found.errors).all()
    assert not found.known.any()
