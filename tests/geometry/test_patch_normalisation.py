"""Per-patch normalisation (spec 02, 2.7, Cor. A.4): the moment, its bounds with 1/p, and the geometry."""

import math

import pytest
import torch
from torch import Tensor

from biascope.geometry.linear_cnn import tap_matrices
from biascope.geometry.patch_normalisation import (
    normalised_cnn_geometry,
    normalised_moment,
    normalised_moment_bounds,
    patch_moments,
)
from biascope.support.errors import InputError

F64 = torch.float64


def definite(p: int, seed: int, condition: float = 10.0) -> Tensor:
    Q = torch.linalg.qr(torch.randn(p, p, generator=torch.Generator().manual_seed(seed), dtype=F64)).Q
    return (Q * torch.logspace(0, math.log10(condition), p, dtype=F64)) @ Q.T


@pytest.mark.parametrize("p", [1, 2, 3, 9])
def test_multiples_of_the_identity_give_lemma_a7(p: int) -> None:
    eye = torch.eye(p, dtype=F64)
    assert torch.allclose(normalised_moment(4 * eye, 9 * eye), eye / (6 * p), atol=1e-14)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (1.0, 5.0), (0.01, 3.0), (1.0, 1e4)])
def test_two_taps_in_closed_form(a: float, b: float) -> None:
    """On the circle E[cos^2 / (a cos^2 + b sin^2)] = 1 / (sqrt a (sqrt a + sqrt b))."""
    S = torch.diag(torch.tensor([a, b], dtype=F64))
    both = math.sqrt(a) + math.sqrt(b)
    exact = torch.diag(torch.tensor([1 / (math.sqrt(a) * both), 1 / (math.sqrt(b) * both)], dtype=F64))
    assert torch.allclose(normalised_moment(S, S), exact, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("p", [2, 4, 9])
def test_one_patch_against_itself_has_trace_one_in_its_metric(p: int) -> None:
    """E[theta^T S theta / theta^T S theta] = 1 = tr(S E), exactly."""
    S = definite(p, p, 100.0)
    assert float((S * normalised_moment(S, S)).sum()) == pytest.approx(1.0, abs=1e-10)


def test_two_patches_against_sampling() -> None:
    S1, S2 = definite(3, 0), definite(3, 1, 30.0)
    theta = torch.randn(400_000, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    q1, q2 = (((theta @ S) * theta).sum(1) for S in (S1, S2))
    draws = theta[:, :, None] * theta[:, None, :] / (q1 * q2).sqrt()[:, None, None]
    error = draws.std(0) / len(draws) ** 0.5
    found = normalised_moment(S1, S2)
    assert ((found - draws.mean(0)).abs() < 4 * error).all()
    assert float(error.max()) < 2e-3 * float(found.norm())
    pair = normalised_moment(torch.stack([S1, S2]), torch.stack([S2, S1]))  # symmetric in the two, and batched
    assert torch.allclose(pair, found.expand(2, 3, 3), atol=1e-12)


def test_bounds_hold_with_the_patch_size_and_not_without() -> None:
    for seed in range(20):
        p = 2 + seed % 4
        S1, S2 = definite(p, seed, 5.0), definite(p, seed + 100, 3.0)
        values = torch.linalg.eigvalsh(normalised_moment(S1, S2))
        lower, upper = normalised_moment_bounds(S1, S2)
        assert lower <= values[0] <= values[-1] <= upper
        assert float(lower) == pytest.approx(1 / (p * math.sqrt(15.0)))
        assert float(upper) == pytest.approx(1 / p)
    eye = torch.eye(4, dtype=F64)
    lower, upper = normalised_moment_bounds(eye, eye)
    assert float(lower) == float(upper) == 0.25
    assert torch.linalg.eigvalsh(normalised_moment(eye, eye))[0] < 4 * lower  # the printed bound, 1, is not one


@pytest.mark.parametrize("circular", [False, True])
def test_geometry_is_the_sampled_one(circular: bool) -> None:
    """Gradients of f = mean over patches of theta . patch / sigma, written out, 3e5 draws of theta."""
    taps = tap_matrices((4,), 2, circular=circular)
    S, k = definite(4, 3, 20.0), taps.shape[2]
    theta = 0.7 * torch.randn(300_000, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    g = torch.zeros(len(theta), 4, dtype=F64)
    for j in range(k):
        M = taps[:, :, j].T
        sigma = (((theta @ (M.T @ S @ M)) * theta).sum(1)).sqrt()
        g += (theta / sigma[:, None]) @ M.T / k
    draws = g[:, :, None] * g[:, None, :]
    error = draws.std(0) / len(g) ** 0.5
    G = normalised_cnn_geometry(taps, S)
    assert ((G - draws.mean(0)).abs() < 4.5 * error + 1e-12).all()
    assert torch.allclose(G, G.T, atol=1e-14)
    assert torch.linalg.eigvalsh(G)[0] > -1e-12
    assert torch.allclose(normalised_cnn_geometry(taps, 9 * S), G / 9, rtol=1e-9)


def test_refusals() -> None:
    taps = tap_matrices((3,), 2)
    for call, message in (
        (lambda: normalised_moment(torch.diag(torch.tensor([1.0, 0.0])), torch.eye(2)), "S1 must be positive definite"),
        (lambda: normalised_moment(torch.eye(2), -torch.eye(2)), "S2 must be positive definite"),
        (lambda: normalised_moment(torch.eye(2), torch.eye(3)), r"S1 \[2, 2\] and S2 \[3, 3\] do not fit"),
        (
            lambda: normalised_moment(torch.eye(2) * torch.nan, torch.eye(2)),
            "is not symmetric and finite",
        ),
        (
            lambda: normalised_moment_bounds(torch.eye(2), torch.ones(2, 3)),
            r"S2 \[2, 3\] do not fit",
        ),
        (lambda: normalised_moment(torch.diag(torch.tensor([1.0, 1e-12]).double()), torch.eye(2)), "add a ridge"),
        (
            lambda: normalised_cnn_geometry(taps, torch.eye(4)),
            r"S \[4, 4\] do not fit",
        ),
        (lambda: normalised_cnn_geometry(taps, torch.ones(3, 3)), "must be positive definite"),
        (lambda: patch_moments(taps, torch.eye(2)), r"S \[2, 2\] do not fit"),
        (lambda: patch_moments(taps, torch.ones(3, 3).triu()), r"S is not symmetric \(0\.5 of its norm is"),
        (lambda: normalised_moment(torch.eye(2), torch.eye(2) + torch.ones(2, 2).triu()), "S2 .* is not symmetric"),
        (lambda: normalised_moment_bounds(torch.eye(2), torch.eye(3)), r"S1 \[2, 2\] and S2 \[3, 3\] do not fit"),
        (
            lambda: normalised_cnn_geometry(torch.eye(3), torch.eye(3)),
            r"S \[3, 3\] do not fit",
        ),
    ):
        with pytest.raises(InputError, match=message):
            call()
