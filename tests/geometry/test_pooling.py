"""Pooling theory against brute force: DFTs of really pooled signals, and sampled or exact discriminant analysis."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import norm

from biascope.geometry.pooling import (
    alias_gain,
    box_prefilter,
    cosine_direction,
    curvature_ratio,
    linear_map_bayes_accuracy,
    pooling_bayes_accuracy,
    pooling_matrix,
    spectral_pooling,
    transfer,
)
from biascope.support.errors import InputError

SCALES = [1e-12, 1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9, 1e12]


def discriminant_analysis(P: np.ndarray, v: np.ndarray, a: float, sigma: float) -> float:
    """Phi(sqrt(mu^T Sigma^+ mu)) written out, 1 if mu leaves the range of Sigma; P of order one."""
    mu, Sigma = a * P @ v, sigma**2 * P @ (np.eye(v.size) - np.outer(v, v)) @ P.T
    w = np.linalg.pinv(Sigma, rcond=1e-10, hermitian=True) @ mu
    return 1.0 if np.linalg.norm(Sigma @ w - mu) > 1e-7 else float(norm.cdf(np.sqrt(mu @ w)))


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


@pytest.mark.parametrize("printed", ["printed", "appendix"])
def test_coincidences_of_the_printed_formulas(printed: str) -> None:
    """Where a printed formula is right, and that it is wrong everywhere else (spec 01, 2.7)."""
    right = {
        "printed": {(2, "real"), (4, "complex")},
        "appendix": {(4, "real"), (8, "complex")},  # the second: sqrt(8) / 2 = sqrt(2)
    }[printed]
    for S in (2, 4, 8):
        for variant in ("real", "complex"):
            for freq in (3, 9, 21):
                args = (box_prefilter(S, 64), S, freq)
                expected = pooling_bayes_accuracy(*args, variant=variant)  # type: ignore[arg-type]
                found = pooling_bayes_accuracy(*args, variant=printed)  # type: ignore[arg-type]
                if (S, variant) in right:
                    assert found == pytest.approx(expected, abs=1e-12)
                else:
                    assert abs(found - expected) > 1e-3


def test_appendix_formula_by_its_own_letters() -> None:
    """1 - Q(eps gamma / (2 sigma)), gamma^2 = S |m^[l]|^2 / sum of the aliases' powers."""
    S, D, freq, eps, sigma = 3, 60, 7, 0.9, 1.7
    power = np.abs(np.fft.fft(random_filter(D))) ** 2
    gamma = np.sqrt(S * power[freq] / (power[freq + 20] + power[freq + 40]))
    found = pooling_bayes_accuracy(random_filter(D), S, freq, eps, sigma, variant="appendix")
    assert found == pytest.approx(1 - norm.sf(eps / (2 * sigma) * gamma), abs=1e-12)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ["box", "random"])
def test_no_accuracy_depends_on_the_scale_of_the_filter(scale: float, kind: str) -> None:
    S, D = 4, 64
    m = box_prefilter(S, D) if kind == "box" else random_filter(D)
    for freq in range(D // 2 + 1):
        gain = alias_gain(m, S, freq)
        assert alias_gain(scale * m, S, freq) == pytest.approx(gain, rel=1e-9)
        for variant in ("exact", "real", "complex", "printed", "appendix"):
            expected = pooling_bayes_accuracy(m, S, freq, variant=variant)  # type: ignore[arg-type]
            found = pooling_bayes_accuracy(scale * m, S, freq, variant=variant)  # type: ignore[arg-type]
            assert found == pytest.approx(expected, abs=1e-10)
    if kind == "box":  # DC survives, the zeros of the filter do not
        assert pooling_bayes_accuracy(scale * m, S, 0) == 1.0
        assert pooling_bayes_accuracy(scale * m, S, 16) == pytest.approx(0.5, abs=1e-12)
        assert alias_gain(scale * m, S, 0) == np.inf
        assert alias_gain(scale * m, S, 16) == 0.0


def test_a_filter_that_lets_nothing_through() -> None:
    assert alias_gain(np.zeros(8), 2, 1) == 0.0
    for variant in ("exact", "real"):
        assert pooling_bayes_accuracy(np.zeros(8), 2, 1, variant=variant) == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize(("D", "S"), [(5, 2), (7, 7), (10, 4), (30, 7), (32, 5), (33, 32), (24, 6)])
@pytest.mark.parametrize("kind", ["box", "random"])
def test_any_pooling_factor_by_discriminant_analysis(D: int, S: int, kind: str) -> None:
    """The signal filtered and decimated sample by sample, M = ceil(D/S), then analysed in the pooled space."""
    m = box_prefilter(S, D) if kind == "box" else random_filter(D)
    pooled = np.array([[m[(i - j) % D] for j in range(D)] for i in range(0, D, S)])
    assert pooled.shape == (int(np.ceil(D / S)), D)
    assert np.array_equal(pooling_matrix(m, S), pooled)
    for freq in range(D // 2 + 1):
        expected = discriminant_analysis(pooled, cosine_direction(freq, D), 0.7, 1.3)
        assert pooling_bayes_accuracy(m, S, freq, 0.7, 1.3) == pytest.approx(expected, abs=1e-9)


def test_where_the_factor_does_not_divide_the_constant_no_longer_survives_for_certain() -> None:
    assert pooling_bayes_accuracy(box_prefilter(5, 30), 5, 0) == 1.0
    assert 0.5 < pooling_bayes_accuracy(box_prefilter(7, 30), 7, 0) < 0.999


def test_any_linear_map_by_discriminant_analysis() -> None:
    """Rank-deficient maps too, and directions that are seen wholly, in part, or not at all."""
    rng = np.random.default_rng(2)
    for M, D, rank in ((3, 8, 3), (6, 8, 4), (9, 8, 5), (2, 8, 1)):
        P = rng.standard_normal((M, rank)) @ rng.standard_normal((rank, D))
        rows = np.linalg.svd(P)[2]
        for v in (rows[0], rows[-1], *rng.standard_normal((3, D))):
            v = v / np.linalg.norm(v)
            for scale in (1e-12, 1.0, 1e12):
                found = linear_map_bayes_accuracy(scale * P, v, 0.7, 1.3)
                assert found == pytest.approx(discriminant_analysis(P, v, 0.7, 1.3), abs=1e-8)
        assert linear_map_bayes_accuracy(P, rows[0]) == 1.0
        assert linear_map_bayes_accuracy(P, rows[-1]) == pytest.approx(0.5, abs=1e-12)


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
    for variant in ("real", "complex", "printed", "appendix"):  # the frequencies would not fold onto each other
        with pytest.raises(InputError, match="S=3 does not divide D=128: no"):
            pooling_bayes_accuracy(box_prefilter(3, 128), 3, 1, variant=variant)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="S=3 does not divide D=128: no"):
        alias_gain(box_prefilter(3, 128), 3, 1)
    with pytest.raises(InputError, match="S=3 does not divide D=128: no"):
        spectral_pooling(np.ones(128), np.ones(128), 3)
    for S in (0, 9):
        with pytest.raises(InputError, match=r"at least 1, not 0|larger than the signal length D=8"):
            box_prefilter(S, 8)
    with pytest.raises(InputError, match="sigma=0"):
        pooling_bayes_accuracy(box_prefilter(4, 128), 4, 1, sigma=0)
    with pytest.raises(InputError, match="sigma=nan"):
        pooling_bayes_accuracy(box_prefilter(4, 128), 4, 1, sigma=np.nan)
    with pytest.raises(InputError, match="variant='best' is not known; there is appendix, complex, exact"):
        pooling_bayes_accuracy(box_prefilter(4, 128), 4, 1, variant="best")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="gap_convention='quarter' is not known; there is full, half"):
        pooling_bayes_accuracy(box_prefilter(4, 128), 4, 1, gap_convention="quarter")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"prefilter='box': an array of numbers is needed, e\.g\. box_prefilter"):
        pooling_bayes_accuracy("box", 4, 1)
    with pytest.raises(InputError, match=r"v='up': an array of numbers"):
        linear_map_bayes_accuracy(np.eye(2), "up")
    with pytest.raises(InputError, match=r"m_hat \[3\] do not fit"):
        spectral_pooling(np.ones(4), np.ones(3), 2)
    with pytest.raises(InputError, match="sigma=0"):
        curvature_ratio(np.ones(2), 1.0, 0)
    with pytest.raises(InputError, match=r"shape \[2, 4\]"):
        transfer(np.ones((2, 4)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: box_prefilter(2.5, 8), "S must be an integer, not 2.5"),  # type: ignore[arg-type]
        (lambda: pooling_matrix(np.ones(4), 2.0), "S must be an integer, not 2.0"),  # type: ignore[arg-type]
        (lambda: cosine_direction(1.5, 8), "l must be an integer, not 1.5"),  # type: ignore[arg-type]
        (lambda: cosine_direction(1, 0), "D must be at least 1, not 0"),
        (lambda: alias_gain(np.ones(4), 2, 0.5), "l must be an integer, not 0.5"),  # type: ignore[arg-type]
        (lambda: curvature_ratio([1.0, 0.5], float("nan"), 1.0), "eps=nan: a finite number is needed"),
    ],
)
def test_sizes_and_frequencies_are_whole_numbers(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()
