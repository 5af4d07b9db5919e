import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biascope.linalg import spectral_density
from biascope.linalg.density import lanczos_tridiagonal
from biascope.linalg.elementary import Dense, Diagonal, Identity
from biascope.support.errors import InputError

close = torch.testing.assert_close


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 25), seed=st.integers(0, 99))
def test_quadrature_is_exact_per_probe(n: int, seed: int) -> None:
    """z^T A^k z / z^T z is exact for k < 2 steps; with n steps, for every function."""
    g = torch.Generator().manual_seed(seed)
    R = torch.randn(n, n, generator=g, dtype=torch.float64)
    M = (R + R.T) / 2
    z = torch.randn(n, 1, generator=g, dtype=torch.float64)
    steps = min(3, n)
    alpha, beta = lanczos_tridiagonal(Dense(M), z, steps)
    T = torch.diag(alpha[0]) + torch.diag(beta[0], 1) + torch.diag(beta[0], -1)
    unit = (z / z.norm())[:, 0]
    for k in range(2 * steps):
        close(
            torch.linalg.matrix_power(T, k)[0, 0], unit @ torch.linalg.matrix_power(M, k) @ unit, atol=1e-9, rtol=1e-9
        )
    alpha, beta = lanczos_tridiagonal(Dense(M), z, n)
    T = torch.diag(alpha[0]) + torch.diag(beta[0], 1) + torch.diag(beta[0], -1)
    close(torch.linalg.matrix_exp(T)[0, 0], unit @ torch.linalg.matrix_exp(M) @ unit, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_and_error_bars(device: str, dtype: torch.dtype, with_spectrum) -> None:  # type: ignore[no-untyped-def]
    lam = torch.linspace(-1, 2, 300).double()
    A = Dense(with_spectrum(lam).to(device, dtype), symmetric=True)
    rho = spectral_density(A, probes=20, steps=12, block=5)
    close(rho.weights.sum(1), torch.ones(20).double(), atol=1e-6, rtol=0)
    assert rho.matvecs == 240
    close(rho.moment(0).value.item(), 1.0)
    for k in range(1, 6):
        moment = rho.moment(k)
        assert (moment.value - lam.pow(k).mean()).abs() < 4 * moment.standard_error
        # a Gaussian probe of unit length sees the mean with variance 2 var / (n + 2)
        want = (2 * lam.pow(k).var(correction=0) / 302 / 20).sqrt()
        assert 0.6 < moment.standard_error / want < 1.5


def test_density_and_cumulative(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    """Two thirds at 1, one third at 4: the density has these two peaks with these areas."""
    lam = torch.cat([torch.ones(200), torch.full((100,), 4.0)]).double()
    rho = spectral_density(Dense(with_spectrum(lam)), probes=30, steps=20)
    grid = torch.linspace(-2, 8, 4001).double()
    curve = rho.evaluate(grid, sigma=0.1)
    close(torch.trapezoid(curve, grid).item(), 1.0, atol=1e-6, rtol=0)
    close(torch.trapezoid(curve[grid < 2.5], grid[grid < 2.5]).item(), 2 / 3, atol=0.02, rtol=0)
    peaks = grid[1:-1][(curve[1:-1] > curve[:-2]) & (curve[1:-1] > curve[2:]) & (curve[1:-1] > 0.1)]
    close(peaks, torch.tensor([1.0, 4.0]).double(), atol=0.01, rtol=0)
    steps = rho.cumulative(torch.tensor([0.0, 2.0, 5.0]))
    close(steps, torch.tensor([0, 2 / 3, 1]).double(), atol=0.02, rtol=0)


def test_breakdown_carries_no_weight() -> None:
    rho = spectral_density(3.0 * Identity(50, torch.float64), probes=3, steps=10)
    close(rho.moment(1).value.item(), 3.0)
    close(rho.cumulative(torch.tensor([2.9, 3.1])), torch.tensor([0.0, 1.0]).double())
    close(rho.integrate(torch.log).value.item(), math.log(3.0))
    zero = spectral_density(Dense(torch.zeros(20, 20)), probes=2, steps=4)
    assert zero.moment(2).value == 0


def test_without_reorthogonalisation_moments_hold(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    A = Dense(with_spectrum(torch.logspace(-4, 0, 200)))
    with_, without = (spectral_density(A, 4, 30, reorthogonalise=r) for r in (True, False))
    close(with_.moment(2).value, without.moment(2).value, rtol=1e-8, atol=0)


def test_seed_and_block(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    A = Dense(with_spectrum(torch.linspace(0, 1, 60)))
    one, two, other = (spectral_density(A, 5, 8, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.nodes, two.nodes)
    assert not torch.equal(one.nodes, other.nodes)
    close(one.nodes, spectral_density(A, 5, 8, seed=1, block=3).nodes)


def test_log_determinant(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.linspace(0.5, 3, 200))
    mean = spectral_density(Dense(M), probes=30, steps=40, kind="rademacher").integrate(torch.log)
    assert (200 * mean.value - torch.logdet(M)).abs() < 4 * 200 * mean.standard_error
    assert 200 * mean.standard_error < 2
    d = torch.linspace(1, 2, 30).double()
    exact = spectral_density(Diagonal(d), probes=3, kind="rademacher").integrate(torch.log)  # signs see a diagonal
    close(30 * exact.value, d.log().sum(), atol=1e-9, rtol=0)


def test_bad_input() -> None:
    A = Identity(10)
    with pytest.raises(InputError, match="steps must be at least 1"):
        spectral_density(A, 2, 0)
    with pytest.raises(InputError, match="probes must be at least 1"):
        spectral_density(A, 0)
    with pytest.raises(InputError, match="not marked symmetric"):
        spectral_density(Dense(torch.ones(3, 3).triu()))
    with pytest.raises(InputError, match=r"sigma=0.0"):
        spectral_density(A).evaluate(torch.zeros(3), 0.0)
    with pytest.raises(InputError, match="grid has shape"):
        spectral_density(A).cumulative(torch.zeros(3, 3))
    with pytest.raises(InputError, match="k must be at least 0"):
        spectral_density(A).moment(-1)
    with pytest.raises(InputError, match="NaN or infinity in Lanczos step 1"):
        spectral_density(Diagonal(torch.full((9,), torch.nan)), 2)
