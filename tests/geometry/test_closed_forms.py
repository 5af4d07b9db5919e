"""Closed forms of the NAD paper against autograd on sampled models (spec 01, checks 5, 6, 8, 10)."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, vmap

from biascope.geometry.closed_forms import (
    aliasing_matrix,
    deep_linear_hessians,
    linear_pooling_covariance,
    linear_pooling_mixed,
    mlp_geometry_constant,
    nonlinear_pooling_covariance,
    xi_averaged_over_signs,
    xi_matrix,
)
from biascope.geometry.dipole import general_learning_bound, learning_bound, markov_bound
from biascope.support.errors import InputError

D, S = 6, 2
M = D // S
m = torch.tensor([1.0, 0.9, 0.5, 0.2, 0.7, 0.3], dtype=torch.float64)
A = aliasing_matrix(D, S)


def sampled(n: int, s_theta: float, s_phi: float) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    theta = s_theta * torch.randn(n, M, generator=rng, dtype=torch.float64)
    return theta, s_phi * torch.randn(n, D, generator=rng, dtype=torch.float64)


def f(theta: torch.Tensor, phi: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return theta @ (A @ (m * phi * x))


def close(estimate: torch.Tensor, samples: torch.Tensor, exact: torch.Tensor, z: float = 5.0) -> None:
    """Every entry within z standard errors."""
    error = samples.std(0) / math.sqrt(len(samples))
    assert ((estimate - exact).abs() <= z * error + 1e-12).all(), (estimate, exact)


def test_gradient_covariance_of_linear_pooling() -> None:
    theta, phi = sampled(200_000, 0.7, 1.3)
    g = vmap(grad(f, argnums=2), in_dims=(0, 0, None))(theta, phi, torch.ones(D, dtype=torch.float64))
    outer = g[:, :, None] * g[:, None, :]
    exact = linear_pooling_covariance(m, S, 0.7, 1.3)
    close(outer.mean(0), outer, exact)
    assert torch.equal(exact.diagonal().argsort(descending=True), m.square().argsort(descending=True))
    printed = S * exact  # the paper's form is rejected by the same test
    assert ((outer.mean(0) - printed).diagonal().abs() > 5 * (outer.std(0) / 200_000**0.5).diagonal()).all()


def test_mixed_derivative_of_linear_pooling() -> None:
    """H is linear in the parameters, so E[H^T H] needs only a few thousand draws."""
    theta, phi = sampled(20_000, 0.7, 1.3)
    x = torch.ones(D, dtype=torch.float64)

    def HtH(theta: torch.Tensor, phi: torch.Tensor) -> torch.Tensor:
        by_theta = torch.func.jacrev(lambda t: grad(f, argnums=2)(t, phi, x))(theta)  # [D, M]
        by_phi = torch.func.jacrev(lambda q: grad(f, argnums=2)(theta, q, x))(phi)  # [D, D]
        return by_theta @ by_theta.T + by_phi @ by_phi.T

    found = vmap(HtH)(theta, phi)
    close(found.mean(0), found, linear_pooling_mixed(m, S, 0.7, 1.3))


def test_expected_hessians_of_the_deep_linear_model() -> None:
    eps, sigma, at, n = 1.5, 0.6, 4, 100_000
    theta, phi = sampled(n, 0.8, 1.2)
    rng = torch.Generator().manual_seed(1)
    y = (torch.randint(0, 2, (n,), generator=rng) * 2 - 1).double()
    x = sigma * torch.randn(n, D, generator=rng, dtype=torch.float64)
    x[:, at] += eps * y

    def loss(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (y - f(params[:M], params[M:], x)) ** 2

    H = vmap(hessian(loss))(torch.cat([theta, phi], 1), x, y)
    exact = torch.zeros(M + D, M + D, dtype=torch.float64)
    exact[:M, :M], exact[M:, M:], exact[:M, M:] = deep_linear_hessians(m, S, at, eps, sigma, 0.8, 1.2)
    exact[M:, :M] = exact[:M, M:].T
    close(H.mean(0), H, exact)
    assert (exact[:M, M:] != 0).sum() == 1


def test_nonlinear_pooling() -> None:
    theta, phi = sampled(200_000, 0.7, 1.3)
    x = torch.tensor([1.0, -2.0, 0.3, 0.4, -0.1, 2.0], dtype=torch.float64)
    g = (theta @ A) * m * phi * (phi * x > 0)
    outer = g[:, :, None] * g[:, None, :]
    close(outer.mean(0), outer, nonlinear_pooling_covariance(m, S, x, 0.7, 1.3))


WITH_ZEROS = torch.tensor([1.0, 0.0, -2.0, 0.0, 0.4, -0.1], dtype=torch.float64)  # 0 and 3, 1 and 4, 2 and 5 alias


@pytest.mark.parametrize("slope", [1.0, 0.5, 0.0])
def test_xi_at_zero_entries(slope: float) -> None:
    """relu'(0) = slope written out, float64: every entry within 5 standard errors of 400,000 draws."""
    phi = 1.3 * torch.randn(400_000, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    argument = phi * WITH_ZEROS
    gated = phi * ((argument > 0).double() + slope * (argument == 0).double())
    outer = gated[:, :, None] * gated[:, None, :]
    Xi = xi_matrix(WITH_ZEROS, 1.3, slope)
    close(outer.mean(0), outer, Xi)
    assert Xi.diagonal().tolist() == pytest.approx([1.3**2 * v for v in (0.5, slope**2, 0.5, slope**2, 0.5, 0.5)])
    off = Xi - torch.diag(Xi.diagonal())
    assert float(off[1].abs().max()) == float(off[:, 3].abs().max()) == 0.0
    assert float(off[0, 2]) == pytest.approx(-(1.3**2) / (2 * math.pi))


def test_nonlinear_pooling_at_zero_entries_in_either_convention() -> None:
    """The paper's relu'(0) = 1 by an explicit derivative, torch's relu'(0) = 0 by torch's own autograd."""
    theta, phi = sampled(200_000, 0.7, 1.3)
    g = (theta @ A) * m * phi * (phi * WITH_ZEROS >= 0)
    outer = g[:, :, None] * g[:, None, :]
    close(outer.mean(0), outer, nonlinear_pooling_covariance(m, S, WITH_ZEROS, 0.7, 1.3))

    def net(theta: torch.Tensor, phi: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return theta @ (A @ (m * torch.relu(phi * x)))

    g = vmap(grad(net, argnums=2), in_dims=(0, 0, None))(theta, phi, WITH_ZEROS)
    outer = g[:, :, None] * g[:, None, :]
    close(outer.mean(0), outer, nonlinear_pooling_covariance(m, S, WITH_ZEROS, 0.7, 1.3, slope_at_zero=0.0))
    nonzero = torch.where(WITH_ZEROS == 0, 1.0, WITH_ZEROS)  # without zeros the convention says nothing
    either = [nonlinear_pooling_covariance(m, S, nonzero, slope_at_zero=slope) for slope in (0.0, 1.0)]
    assert torch.equal(*either)


def test_xi_averaged_over_all_signs() -> None:
    """All 2^6 sign patterns, exactly; the covariance is half of the linear model's (the paper prints the same)."""
    patterns = [torch.tensor(signs, dtype=torch.float64) for signs in itertools.product((-2.0, 0.3), repeat=D)]
    mean = torch.stack([xi_matrix(x, 1.3) for x in patterns]).mean(0)
    assert torch.allclose(mean, xi_averaged_over_signs(D, 1.3), atol=1e-14)
    covariance = torch.stack([nonlinear_pooling_covariance(m, S, x, 0.7, 1.3) for x in patterns]).mean(0)
    averaged = nonlinear_pooling_covariance(m, S, None, 0.7, 1.3)
    assert torch.allclose(covariance, averaged, atol=1e-14)
    assert torch.allclose(averaged, linear_pooling_covariance(m, S, 0.7, 1.3) / 2, atol=1e-14)


def test_xi_refuses_wrong_shapes() -> None:
    with pytest.raises(InputError, match=r"x has shape \[2, 3\]"):
        xi_matrix(torch.ones(2, 3))


NAN = float("nan")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: xi_matrix(torch.tensor([NAN, 1.0])), "x has a NaN"),  # its sign is 0, as if x were 0
        (lambda: linear_pooling_covariance(torch.tensor([NAN, 1.0]), 2), "m has a NaN"),
        (lambda: linear_pooling_mixed(m, S, -1.0), "s_theta=-1.0: a finite number from 0 on"),
        (lambda: nonlinear_pooling_covariance(m, S, None, 1.0, NAN), "s_phi=nan"),
        (lambda: deep_linear_hessians(m, S, 1, NAN, 1.0), "eps=nan"),
        (lambda: deep_linear_hessians(m, S, 1, 1.0, -1.0), "sigma=-1.0"),
        (lambda: aliasing_matrix(-4, 2), "D must be at least 1, not -4"),
        (lambda: xi_averaged_over_signs(0), "D must be at least 1, not 0"),
        (lambda: mlp_geometry_constant(0, [3]), "fan_in must be at least 1, not 0"),
        (lambda: mlp_geometry_constant(4, [-3], [1.0, 1.0]), r"widths\[0\] must be at least 1, not -3"),
        (lambda: mlp_geometry_constant(4, [3], [1.0, NAN]), r"stds\[1\]=nan"),
    ],
)
def test_what_is_no_number_is_refused_by_name(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()


@pytest.mark.parametrize(("L", "trace"), [(1, 0.0556), (2, 0.00926), (3, 0.00154)])
def test_default_initialised_mlp(L: int, trace: float) -> None:
    assert mlp_geometry_constant(11, [13] * L) * 11 == pytest.approx(trace, rel=3e-3)


def test_dipole_bounds() -> None:
    """f = theta x, g = 0.1 t^2: left side 0.160, alpha version 0.200, printed alpha^2 version 0.040 (spec 01, 2.9)."""
    theta = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left = (0.2 * theta.abs()).mean().item()  # |d/dtheta 0.1 (v theta)^2| with v = 1
    bound = learning_bound(theta, torch.ones_like(theta), alpha=0.2)
    assert left == pytest.approx(0.160, abs=2e-3)
    assert bound == pytest.approx(0.200, abs=2e-3)
    assert left < bound
    assert left > learning_bound(theta, torch.ones_like(theta), alpha=0.2**2)  # the printed one is no bound
    cubic = general_learning_bound(theta, torch.ones_like(theta), lambda t: 0.3 * t**2)  # g = 0.1 |t|^3
    assert (0.3 * theta.abs() ** 2).mean().item() < cubic


def test_markov_holds_on_every_sample() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        g = torch.randn(7, 3, generator=rng, dtype=torch.float64) * torch.rand(3, generator=rng).double()
        v = nn.functional.normalize(torch.randn(3, generator=rng, dtype=torch.float64), dim=0)
        Sigma = g.T @ g / 7
        for eta in (1e-3, 0.1, 1.0):
            assert ((g @ v) ** 2 >= eta).double().mean().item() <= markov_bound(v, Sigma, eta) + 1e-12
    with pytest.raises(InputError, match="eta"):
        markov_bound(v, Sigma, 0.0)


@pytest.mark.parametrize("law", [linear_pooling_covariance, linear_pooling_mixed])
def test_a_pooling_factor_that_does_not_divide_is_refused(law) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="S=3 must divide D=4"):
        law(torch.ones(4), 3)


def test_lists_are_taken_and_matrices_are_refused_by_name() -> None:
    numbers = [1.0, 2.0]
    for law in (linear_pooling_covariance, linear_pooling_mixed):
        assert torch.equal(law(numbers, 2), law(torch.tensor(numbers), 2))  # type: ignore[arg-type]
    assert torch.equal(xi_matrix(numbers), xi_matrix(torch.tensor(numbers)))  # type: ignore[arg-type]
    for call in (
        lambda: linear_pooling_covariance(torch.ones(2, 2), 2),
        lambda: deep_linear_hessians(torch.ones(2, 2), 2, 0, 1.0, 1.0),
    ):
        with pytest.raises(InputError, match=r"m has shape \[2, 2\]"):
            call()
    with pytest.raises(InputError, match=r"widths=7: a sequence of integers is needed, e\.g\. \[7\]"):
        mlp_geometry_constant(5, 7)  # type: ignore[arg-type]
