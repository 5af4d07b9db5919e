"""Problems with known information: closed forms, quadrature against Monte Carlo, critics that normalise."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from biascope.information.problems import (
    Problem,
    discrete_problem,
    gaussian_problem,
    mixture_problem,
    noisy_function_problem,
    sign_mixture_problem,
)
from biascope.support.errors import InputError

GAUSSIAN = {
    1: {0.1: 0.0050, 0.3: 0.0472, 0.5: 0.1438, 0.7: 0.3367, 0.9: 0.8304, 0.95: 1.1640, 0.99: 1.9585},
    2: {0.5: 0.2877, 0.9: 1.6607},
    20: {0.1: 0.1005, 0.3: 0.9431, 0.5: 2.8768, 0.7: 6.7334, 0.9: 16.607, 0.99: 39.170},
}


def test_gaussian_table() -> None:
    for dim, row in GAUSSIAN.items():
        for rho, nats in row.items():
            assert gaussian_problem(dim, rho).nats == pytest.approx(nats, abs=6e-4 if nats > 10 else 6e-5)
            assert gaussian_problem(dim, -rho).nats == gaussian_problem(dim, rho).nats


@pytest.mark.parametrize(
    "problem",
    [
        gaussian_problem(1, -0.6),
        gaussian_problem(3, 0.5, "cubic"),
        gaussian_problem(2, 0.5, "tanh"),
        noisy_function_problem("linear", 0.5),
        noisy_function_problem("cubic", 0.3),
        noisy_function_problem("sine", 0.7),
        sign_mixture_problem(0.9),
        sign_mixture_problem(-0.5),
        mixture_problem(3, 2.0),
        mixture_problem(2, 1.0),
        discrete_problem(torch.tensor([[0.3, 0.1, 0.1], [0.05, 0.25, 0.2]])),
    ],
    ids=lambda p: p.name,
)
def test_information_is_the_mean_of_the_log_ratio_which_normalises(problem: Problem) -> None:
    """E_P[log ratio] = I and E_Q[e^(log ratio)] = 1: true of the right ratio only."""
    n = 30_000
    x, y = problem.sample(n, 0)
    own = problem.log_ratio(x, y)
    assert own.shape == (n,)
    assert abs(float(own.mean()) - problem.nats) < 3.5 * float(own.std()) / math.sqrt(n)
    across = problem.log_ratio(x, problem.sample(n, 1)[1]).exp()
    assert abs(float(across.mean()) - 1) < 3.5 * float(across.std()) / math.sqrt(n)


@pytest.mark.parametrize("gap", [0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6])
def test_information_of_the_sign_mixture_at_every_correlation(gap: float) -> None:
    """E log ratio by the trapezoidal rule on x and the noise, with points as dense at the ridge as it is narrow."""
    problem = sign_mixture_problem(1 - gap)
    s = math.sqrt(gap * (2 - gap))
    a = torch.linspace(-1, 1, 3001, dtype=torch.float64) * math.asinh(9 / s)
    x, n = s * a.sinh(), torch.linspace(-9, 9, 721, dtype=torch.float64)
    at_x = (-x.square() / 2).exp() * s * a.cosh() * (a[1] - a[0]) / math.sqrt(2 * math.pi)
    at_n = (-n.square() / 2).exp() * (n[1] - n[0]) / math.sqrt(2 * math.pi)
    grid, noise = torch.meshgrid(x, n, indexing="ij")
    y = (1 - gap) * grid + s * noise
    values = problem.log_ratio(grid.reshape(-1, 1), y.reshape(-1, 1)).view_as(grid)
    assert float(at_x.sum() * at_n.sum()) == pytest.approx(1, abs=1e-9)
    assert problem.nats == pytest.approx(float(at_x @ values @ at_n), abs=1e-6)
    assert sign_mixture_problem(gap - 1).nats == problem.nats


def test_samples_follow_seeds_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    table = torch.full((2, 2), 0.25)
    for make in (lambda: gaussian_problem(2, 0.5), lambda: sign_mixture_problem(0.5), lambda: discrete_problem(table)):
        problem = make()
        (a, b), (c, d), (e, _) = problem.sample(50, 3), problem.sample(50, 3), problem.sample(50, 4)
        assert torch.equal(a, c)
        assert torch.equal(b, d)
        assert not torch.equal(a, e)
    assert torch.equal(before, torch.get_rng_state())


def test_limits() -> None:
    assert mixture_problem(4, 0.0).nats == pytest.approx(0, abs=1e-12)
    assert mixture_problem(4, 60.0).nats == pytest.approx(math.log(4))
    assert sign_mixture_problem(0.0).nats == pytest.approx(0, abs=1e-12)
    # the sign, one bit, is all that the mixture hides
    full = gaussian_problem(1, 0.99).nats
    assert full - math.log(2) < sign_mixture_problem(0.99).nats < full
    assert discrete_problem(torch.eye(3) / 3).nats == pytest.approx(math.log(3))
    assert discrete_problem(torch.full((3, 2), 1 / 6)).nats == pytest.approx(0, abs=1e-9)


def test_noise_lowers_information() -> None:
    for function in ("linear", "cubic", "sine"):
        values = [noisy_function_problem(function, s).nats for s in (0.1, 0.3, 0.5, 0.9)]  # type: ignore[arg-type]
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("sigma", [3e-3, 3e-4, 1e-4, 1e-6])
def test_information_under_little_noise(sigma: float) -> None:
    """y = x + noise: p(y) is a box with soft edges, each of which adds sigma / 2 times the integral of -Phi log Phi.

    A rule on fixed points gave 8.06 in place of 8.48 nats at 1e-4.
    """
    edge = quad(lambda t: -norm.cdf(t) * norm.logcdf(t), -12, 12, epsabs=1e-13)[0]
    flat = math.log(2) - 0.5 * math.log(2 * math.pi * math.e * sigma**2)
    assert noisy_function_problem("linear", sigma, dim=1).nats == pytest.approx(flat + sigma * edge, abs=1e-10)
    assert noisy_function_problem("linear", sigma, dim=3).nats == pytest.approx(3 * (flat + sigma * edge), abs=3e-10)


@pytest.mark.parametrize("sigma", [2.0, 0.1, 1e-4])
@pytest.mark.parametrize("function", ["linear", "cubic", "sine"])
def test_log_ratio_of_noisy_functions_at_single_points(function: str, sigma: float) -> None:
    """log p(y | x) / p(y) with p(y) by adaptive quadrature over x, also at the ends and where the cubic is flat."""
    f = {"linear": lambda t: t, "cubic": lambda t: t**3, "sine": math.sin}[function]
    inverse = {"linear": lambda m: m, "cubic": np.cbrt, "sine": np.arcsin}[function]
    problem = noisy_function_problem(function, sigma, dim=1)  # type: ignore[arg-type]
    for x, noise in ((0.0, 0.3), (0.02, -1.0), (0.6, 2.0), (1.0, 2.5), (-0.999, -4.0)):
        y = f(x) + sigma * noise
        ends = [float(inverse(np.clip(y + d * sigma, f(-1.0), f(1.0)))) for d in (-14, -4, -2, -1, 0, 1, 2, 4, 14)]
        density = sum(
            quad(lambda t, y=y: norm.pdf((y - f(t)) / sigma) / 2, a, b, epsabs=0, epsrel=1e-11)[0]
            for a, b in pairwise(ends)
            if b > a
        )
        found = problem.log_ratio(torch.tensor([[x]], dtype=torch.float64), torch.tensor([[y]], dtype=torch.float64))
        assert float(found) == pytest.approx(norm.logpdf((y - f(x)) / sigma) - math.log(density), abs=1e-9)


def test_arguments_are_checked() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(InputError, match=f"distance={bad}"):
            mixture_problem(2, bad)
        with pytest.raises(InputError, match="sum to 1"):  # NaN is neither below 0 nor far from 1: it gave 0 nats
            discrete_problem(torch.tensor([[bad, 0.5], [0.2, 0.3]]))
    with pytest.raises(InputError, match="rho"):
        gaussian_problem(1, 1.0)
    with pytest.raises(InputError, match="rho"):
        sign_mixture_problem(1.0)
    with pytest.raises(InputError, match="transform='foo' is not known; there is cubic, identity, tanh"):
        gaussian_problem(1, 0.5, "foo")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="classes must be at least 2"):
        mixture_problem(1)
    with pytest.raises(InputError, match="sigma"):
        noisy_function_problem("linear", 0.0)
    with pytest.raises(InputError, match="sum to 1"):
        discrete_problem(torch.ones(2, 2))
