"""Problems with known information: closed forms, quadrature against Monte Carlo, critics that normalise."""

import math

import pytest
import torch

from biascope.errors import InputError
from biascope.information import (
    Problem,
    discrete_problem,
    gaussian_problem,
    mixture_problem,
    noisy_function_problem,
    sign_mixture_problem,
)

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


def test_arguments_are_checked() -> None:
    with pytest.raises(InputError, match="rho"):
        gaussian_problem(1, 1.0)
    with pytest.raises(InputError, match="rho"):
        sign_mixture_problem(1.0)
    with pytest.raises(InputError, match="transform='foo' is not known; there is cubic, identity, tanh"):
        gaussian_problem(1, 0.5, "foo")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="two classes"):
        mixture_problem(1)
    with pytest.raises(InputError, match="sigma"):
        noisy_function_problem("linear", 0.0)
    with pytest.raises(InputError, match="sum to 1"):
        discrete_problem(torch.ones(2, 2))
