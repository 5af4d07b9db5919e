"""Pooling theory against brute force: DFTs of really pooled signals, and sampled or exact discriminant analysis."""

import numpy as np
import pytest
from scipy.stats import norm

from biascope.errors import InputError
from biascope.geometry.pooling import (
    alias_gain,
    box_prefilter,
    cosine_direction,
    curvature_ratio,
    pooling_bayes_accuracy,
    pooling_matrix,
    spectral_pooling,
    transfer,
)


def random_filter(D: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(D)


@pytest.mark.parametrize(("D", "S"), [(128, 4), (128, 2), (96, 3), (60, 60)])
def test_equation_1_is_the_dft_of_the_pooled_signal(D: int, S: int) -> None:
    x = np.random.default_rng(1).standard_normal((5, D))
    for m in (box_prefilter(S, D), random_filter(D)):
        filtered = np.array([[sum(m[j] * row[(i - j) % D] for j in range(D)) for i in range(0, D, S)] for row in x])
        assert np.allclose(filtered, x @ pooling_matrix(m, S).T, atol=1e-10)
        z_hat = spectral_pooling(np.fft.fft(x, norm="ortho"), transfer(m), S)
        assert np.allclose(z_hat, np.fft.fft(filtered, norm="ortho"), atol=1e-10)


@pytest.mark.parametrize("S", [2, 4, 8])
def test_box_filter_power_over_aliases_is_one(S: int) -> None:
    D = 128
    power = np.abs(transfer(box_prefilter(S, D))) ** 2
    assert np.allclose(power.reshape(S, D // S).sum(0), 1.0, atol=1e-12)
    k = np.arange(1, D)
    assert np.allclose(np.sqrt(power[1:]), np.abs(np.sin(np.pi * k * S / D) / (S * np.sin(np.pi * k / D))), atol=1e-12)


@pytest.mark.parametrize(
    ("S", "expected"),
    [
        (4, {0: 1, 1: 1.0, 5: 0.8823, 10: 0.7091, 16: 0.5501, 20: 0.5743, 32: 0.5}),
        (4, {64: 0.5, 40: 0.5289, 48: 0.5501, 50: 0.5358, 63: 0.5033}),
        (2, {5: 0.9966, 10: 0.9084, 20: 0.7336, 32: 0.6306}),
        (8, {1: 0.9984, 5: 0.7039, 10: 0.5714}),
    ],
)  # fmt: skip
def test_published_numbers(S: int, expected: dict[int, float]) -> None:
    got = {freq: pooling_bayes_accuracy(box_prefilter(S, 128), S, freq) for freq in expected}
    assert got == pytest.approx(expected, abs=6e-5)


def test_printed_formula_numbers() -> None:
    box = box_prefilter(4, 128)
    printed = [pooling_bayes_accuracy(box, 4, freq, variant="printed") for freq in (5, 10, 20)]
    assert printed == pytest.approx([0.9533, 0.7820, 0.6045], abs=6e-5)
    gamma = [2 * alias_gain(box, 4, freq) for freq in (5, 10, 20)]
    assert gamma == pytest.approx([7.120, 3.304, 1.124], abs=6e-4)


@pytest.mark.parametrize("S", [2, 4, 8])
@pytest.mark.parametrize("kind", ["box", "random"])
def test_real_closed_form_is_exact_off_the_special_bins(S: int, kind: str) -> None:
    D, M = 64, 64 // S
    m = box_prefilter(S, D) if kind == "box" else random_filter(D)
    for freq in range(1, D // 2):
        if (2 * freq) % M:
            exact = pooling_bayes_accuracy(m, S, freq, eps=0.7, sigma=1.3)
            assert pooling_bayes_accuracy(m, S, freq, eps=0.7, sigma=1.3, variant="real") == pytest.approx(
                exact, abs=1e-10
            )


def test_coincidences_of_the_printed_formula() -> None:
    for S, variant in ((2, "real"), (4, "complex")):
        for freq in (3, 7, 21):
            args = (box_prefilter(S, 64), S, freq)
            right = pooling_bayes_accuracy(*args, variant=variant)  # type: ignore[arg-type]
            assert pooling_bayes_accuracy(*args, variant="printed") == pytest.approx(right, abs=1e-12)


def test_complex_model_by_its_own_definition() -> None:
    """Circular complex noise, Fourier coefficient by coefficient: the pooled bin has mean a m^ / sqrt(S), variance of
    its aliases.
    """
    S, D, freq, a, sigma = 4, 64, 3, 1.0, 2.0
    m_hat = transfer(random_filter(D))
    variance_per_axis = sigma**2 / 2 * sum(abs(m_hat[freq + k * D // S]) ** 2 for k in range(1, S)) / S
    oracle = norm.cdf(a * abs(m_hat[freq]) / np.sqrt(S) / np.sqrt(variance_per_axis))
    got = pooling_bayes_accuracy(random_filter(D), S, freq, eps=a, sigma=sigma, variant="complex")
    assert got == pytest.approx(oracle, abs=1e-12)


def test_exact_accuracy_is_what_the_best_linear_rule_gets() -> None:
    """Monte Carlo with the optimal weights: n = 200 000, four standard errors."""
    D, S, freq, eps, sigma, n = 32, 4, 3, 1.0, 1.5, 200_000
    rng = np.random.default_rng(0)
    v = cosine_direction(freq, D)
    y = rng.choice([-1.0, 1.0], n)
    noise = sigma * rng.standard_normal((n, D))
    x = noise - np.outer(noise @ v, v) + eps * y[:, None] * v
    z = x @ pooling_matrix(box_prefilter(S, D), S).T
    P = pooling_matrix(box_prefilter(S, D), S)
    w = np.linalg.pinv(sigma**2 * P @ (np.eye(D) - np.outer(v, v)) @ P.T) @ (P @ v)
    accuracy = float(np.mean(np.sign(z @ w) == y))
    expected = pooling_bayes_accuracy(box_prefilter(S, D), S, freq, eps=eps, sigma=sigma)
    assert abs(accuracy - expected) < 4 * np.sqrt(expected * (1 - expected) / n)


def test_half_gap_is_half_eps() -> None:
    box = box_prefilter(4, 64)
    half = pooling_bayes_accuracy(box, 4, 5, eps=2.0, gap_convention="half")
    assert half == pytest.approx(pooling_bayes_accuracy(box, 4, 5, eps=1.0), abs=1e-14)


def test_curvature_ratio() -> None:
    m = np.array([3.0, -1.0, 2.0])
    assert np.allclose(curvature_ratio(m, eps=2.0, sigma=0.5), 4 * m**2 / (0.25 * 9))


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="S=3 must divide the signal length D=128"):
        box_prefilter(3, 128)
    with pytest.raises(InputError, match="sigma=0"):
        pooling_bayes_accuracy(box_prefilter(4, 128), 4, 1, sigma=0)
    with pytest.raises(InputError, match="'best' is not one of"):
        pooling_bayes_accuracy(box_prefilter(4, 128), 4, 1, variant="best")  # type: ignore[arg-type]
