"""The rule of two standard errors, errors over seeds, the jackknife and rank correlations, against closed forms."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from biascope.studies.estimates import (
    above,
    below,
    correlation,
    curve,
    difference,
    jackknife_error,
    mean_error,
    over_seeds,
    rank_correlation,
    rank_correlations,
    spearman,
    spread,
    sure,
)
from biascope.studies.result import Estimate


def test_two_standard_errors_decide() -> None:
    assert above(Estimate(1.0, 0.4))
    assert not above(Estimate(1.0, 0.6))
    assert above(Estimate(1.0, 0.2), 0.5)
    assert not above(Estimate(1.0, 0.3), 0.5)
    assert below(Estimate(-1.0, 0.4))
    assert not below(Estimate(-1.0, 0.6))


def test_no_error_bar_no_verdict() -> None:
    for alone in (Estimate(5.0), Estimate(-5.0)):
        assert not above(alone)
        assert not below(alone)


def test_few_repeats_are_wrong_as_seldom_as_many() -> None:
    """One-sided: draws of mean zero lie "surely above" zero in 2.3 % of cases, whatever their number."""
    rng = np.random.default_rng(0)
    for n in (2, 3, 5, 20):
        drawn = rng.normal(size=(40_000, n))
        errors = drawn.std(1, ddof=1) / n**0.5
        assert np.mean(drawn.mean(1) - sure(n) * errors > 0) == pytest.approx(0.02275, abs=0.003)
    assert sure(None) == 2.0
    assert sure(10_000) == pytest.approx(2.0, abs=1e-3)


def test_a_difference_of_few_repeats_is_wrong_as_seldom() -> None:
    rng = np.random.default_rng(1)
    pairs = [[Estimate.of(row) for row in rng.normal(size=(2, 3))] for _ in range(4000)]
    assert np.mean([above(difference(a, b)) for a, b in pairs]) == pytest.approx(0.02, abs=0.008)


def test_ranks_in_perfect_order_have_an_error() -> None:
    found = rank_correlation([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    swapped = spearman([1, 2, 3, 4, 5, 6], [2, 1, 3, 4, 5, 6])
    assert found.standard_error == pytest.approx(found.value - swapped)


def test_difference_adds_variances() -> None:
    assert difference(Estimate(3.0, 0.3), Estimate(1.0, 0.4)) == Estimate(2.0, 0.5)


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    samples = np.random.default_rng(0).normal(size=9)
    left_out = [np.delete(samples, i).mean() for i in range(9)]
    assert jackknife_error(left_out) == pytest.approx(samples.std(ddof=1) / 3)


def test_errors_are_over_seeds_where_there_are_some() -> None:
    rows = [[1.0, 9.0, 2.0, 8.0], [5.0, 5.0, 5.0, 6.0]]  # tasks differ far more than seeds do
    assert over_seeds(rows) == Estimate.of([5.0, 5.25])
    assert over_seeds(rows[:1]) == Estimate.of(rows[0])
    assert rank_correlations([1, 2, 3, 4], rows).n == 2
    alone = rank_correlations([1, 2, 3, 4, 5, 6], [[1.0, 2.0, 3.0, 4.0, 6.0, 5.0]])
    assert alone.n == 6
    assert above(alone)
    assert not above(rank_correlations([1, 2, 3, 4, 5], [[1.0, 5.0, 2.0, 4.0, 3.0]]))  # positive, by chance
    assert rank_correlations([1, 2, 3], [[1.0, 2.0, 3.0]]).standard_error is None  # too few points


def test_spearman() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=30), rng.integers(0, 5, 30)  # with ties
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert spearman(list(range(30)), torch.as_tensor(x)) == pytest.approx(spearmanr(np.arange(30), x).statistic)
    assert spearman([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]) == -1.0
    assert spearman([1, 2], [float("nan"), 1.0]) == 0.0


def test_rank_correlation_and_spread() -> None:
    x, rng = np.arange(200.0), np.random.default_rng(1)
    assert rank_correlation(x, -x).value == -1
    noise = rank_correlation(x, rng.normal(size=200))
    assert noise.standard_error == pytest.approx(1 / np.sqrt(199), rel=0.25)
    assert abs(noise.value) < 4 * (noise.standard_error or 0)
    assert rank_correlation(x, np.ones(200)).value == 0.0
    width = spread(rng.normal(size=2000))
    assert width.value == pytest.approx(1.0, abs=0.06)
    assert width.standard_error == pytest.approx(1 / np.sqrt(4000), rel=0.2)
    assert correlation(x, 3 - 2 * x).value == -1


def test_means_over_rows() -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    mean, error = mean_error(rows)
    assert error is not None
    for i, column in enumerate(rows.double().T):
        assert Estimate.of(column.tolist()).value == pytest.approx(float(mean[i]))
        assert Estimate.of(column.tolist()).standard_error == pytest.approx(float(error[i]))
    assert mean_error(rows[:1])[1] is None
    of_list = mean_error(list(rows))  # a list of tensors, one for each seed
    assert of_list[1] is not None
    assert torch.equal(of_list[0], mean)
    assert torch.equal(of_list[1], error)
    shown = curve("c", range(3), rows.numpy(), "dashed")
    assert shown.style == "dashed"
    assert shown.y == pytest.approx(mean.tolist())
