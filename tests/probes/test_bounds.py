"""Classical generalisation bounds (spec 04, 2.20): how often they fail, exactly, for predictors that toss coins."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from scipy.stats import binom
from torch.distributions import Normal, kl_divergence

from biascope.probes.bounds import (
    finite_class_bound,
    gaussian_kl,
    hoeffding_bound,
    occam_bound,
    pac_bayes_bound,
)
from biascope.support.errors import InputError

N = 25
RISKS = (0.03, 0.3, 0.5, 0.8)


def fails(risk: float, bound: Callable[[float], float]) -> float:
    """Probability that the risk of a predictor that errs with it exceeds the bound, over N examples: a binomial sum."""
    return sum(float(binom.pmf(k, N, risk)) for k in range(N + 1) if risk > bound(k / N))


@pytest.mark.parametrize("delta", [0.3, 0.05, 1e-3])
@pytest.mark.parametrize("risk", RISKS)
def test_hoeffding_fails_seldom_enough(risk: float, delta: float) -> None:
    assert fails(risk, lambda r: hoeffding_bound(r, N, delta)) <= delta
    half = fails(0.5, lambda r: hoeffding_bound(r, N, delta) - 0.3 * (hoeffding_bound(r, N, delta) - r))
    assert half > fails(0.5, lambda r: hoeffding_bound(r, N, delta))  # a smaller bound fails more often


def test_the_bounds_by_hand() -> None:
    """sqrt(Q / (2 n)) with Q as printed, (9) to (11) and (15)."""
    r, n, delta, kl = 0.125, 200, 0.1, 3.0
    assert hoeffding_bound(r, n, delta) == pytest.approx(r + math.sqrt(math.log(10) / 400), rel=1e-15)
    assert finite_class_bound(r, math.log(7), n, delta) == pytest.approx(r + math.sqrt(math.log(70) / 400), rel=1e-14)
    assert occam_bound(r, math.log(7), n, delta) == finite_class_bound(r, math.log(7), n, delta)
    printed = r + math.sqrt((kl + math.log(10)) / 400)
    assert pac_bayes_bound(r, kl, n, delta, "printed") == pytest.approx(printed, rel=1e-15)
    maurer = r + math.sqrt((kl + math.log(2 * math.sqrt(200) / 0.1)) / 400)
    assert pac_bayes_bound(r, kl, n, delta) == pytest.approx(maurer, rel=1e-15)
    assert occam_bound(r, 0.0, n, delta) == hoeffding_bound(r, n, delta)
    assert 1.0 - hoeffding_bound(0.0, 10**8, delta) > 0.999


@pytest.mark.parametrize("delta", [0.3, 0.05])
def test_all_predictors_of_a_class_at_once(delta: float) -> None:
    """Independent predictors: some bound fails with 1 - prod(1 - each). One-predictor bounds would not do."""
    risks = [0.5] * 40
    together = 1 - math.prod(1 - fails(r, lambda s: finite_class_bound(s, math.log(40), N, delta)) for r in risks)
    assert together <= delta
    assert 1 - math.prod(1 - fails(r, lambda s: hoeffding_bound(s, N, delta)) for r in risks) > delta
    prior = [2.0**-j for j in range(1, 41)]
    weighed = [fails(r, lambda s, w=w: occam_bound(s, -math.log(w), N, delta)) for r, w in zip(risks, prior)]
    assert 1 - math.prod(1 - f for f in weighed) <= delta


def sup_over_mixtures(form: str, radius: float | None, risks: tuple[float, float], delta: float) -> float:
    """Probability that some mixture Q of two independent predictors breaks the bound, prior (1/2, 1/2)."""
    q = torch.linspace(0, 1, 201, dtype=torch.float64)
    kl = math.log(2) + torch.special.xlogy(q, q) + torch.special.xlogy(1 - q, 1 - q)
    kl = kl.clamp_min(0.0)
    if radius is not None:
        q, kl = q[kl <= radius], torch.full_like(kl[kl <= radius], radius)
    gaps = torch.tensor([pac_bayes_bound(0.0, float(k), N, delta, form) for k in kl], dtype=torch.float64)  # type: ignore[arg-type]
    total = 0.0
    for a, b in product(range(N + 1), repeat=2):
        excess = q * (risks[0] - a / N) + (1 - q) * (risks[1] - b / N)
        if bool((excess > gaps).any()):
            total += float(binom.pmf(a, N, risks[0]) * binom.pmf(b, N, risks[1]))
    return total


@pytest.mark.parametrize("delta", [0.3, 0.05])
@pytest.mark.parametrize("risks", [(0.5, 0.5), (0.1, 0.6)])
def test_pac_bayes_for_all_mixtures_at_once(risks: tuple[float, float], delta: float) -> None:
    assert sup_over_mixtures("maurer", None, risks, delta) <= delta
    for radius in (0.05, 0.5):  # the printed form, within a radius that was fixed beforehand
        assert sup_over_mixtures("printed", radius, risks, delta) <= delta


def test_the_constant_of_maurer() -> None:
    """E exp(n kl(L_hat, L)) <= sum_k C(n, k) (k / n)^k (1 - k / n)^(n - k) <= 2 sqrt(n), for every n."""
    for n in (*range(1, 60), 500, 1000):
        total = sum(float(binom.pmf(k, n, k / n)) for k in range(n + 1))
        assert math.sqrt(n) <= total + 1e-12
        assert total <= 2 * math.sqrt(n) + 1e-12


def test_divergence_of_gaussians() -> None:
    rng = torch.Generator().manual_seed(0)
    m, m0 = (torch.randn(3, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    s, s0 = (0.1 + torch.rand(3, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    expected = float(kl_divergence(Normal(m, s), Normal(m0, s0)).sum())
    assert gaussian_kl(m, s, m0, s0) == pytest.approx(expected, rel=1e-13)
    assert gaussian_kl(m.float(), 0.5, m.float(), 0.5) == 0.0
    step = gaussian_kl(m, 0.1, m0, 0.1)
    assert step == pytest.approx(float((m - m0).square().sum()) / (2 * 0.1**2), rel=1e-12)


def test_what_no_bound_is_for() -> None:
    for call, message in (
        (lambda: hoeffding_bound(1.5, 10), "a mean loss from 0 to 1"),
        (lambda: hoeffding_bound(float("nan"), 10), "a mean loss from 0 to 1"),
        (lambda: hoeffding_bound(0.5, 0), "n >= 1"),
        (lambda: pac_bayes_bound(0.5, 1.0, 0), "n >= 1"),
        (lambda: hoeffding_bound(0.5, 10, 1.0), "0 < delta < 1"),
        (lambda: occam_bound(0.5, -1.0, 10), r"complexities \(in nats\) >= 0"),
        (lambda: pac_bayes_bound(0.5, -1.0, 10), "kl=-1.0"),
        (lambda: pac_bayes_bound(0.5, 1.0, 10, form="catoni"), "form='catoni'"),  # type: ignore[arg-type]
        (lambda: gaussian_kl(torch.ones(2), 0.0, 0.0, 1.0), "std and prior_std must be positive"),
        (lambda: gaussian_kl(torch.ones(1), 1.0, torch.ones(3), 1.0), "mean needs the shape of all entries"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_divergences_of_very_different_spreads() -> None:
    """Squares of these ratios leave the range of float64; the divergence of the first does not."""
    assert gaussian_kl(torch.zeros(4), 1e-200, 0.0, 1.0) == pytest.approx(4 * (200 * math.log(10) - 0.5), rel=1e-12)
    assert gaussian_kl(torch.zeros(4), 1.0, 0.0, 1e-160) == math.inf
