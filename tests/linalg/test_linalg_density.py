import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biascope.linalg.density import tridiagonal
from biascope.linalg.elementary import Dense, Diagonal, Identity
from biascope.support.errors import InputError

close = torch.testing.assert_close


def matrix_of(diagonal: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    return torch.diag(diagonal[0]) + torch.diag(off[0], 1) + torch.diag(off[0], -1)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 25), seed=st.integers(0, 99))
def test_quadrature_is_exact_per_probe(n: int, seed: int) -> None:
    """z^T A^k z / z^T z is exact for k < 2 steps; with n steps, for every function."""
    g = torch.Generator().manual_seed(seed)
    R = torch.randn(n, n, generator=g, dtype=torch.float64)
    M = (R + R.T) / 2
    z = torch.randn(n, 1, generator=g, dtype=torch.float64)
    steps = min(3, n)
    T, unit = matrix_of(*tridiagonal(Dense(M), z, steps, True)), (z / z.norm())[:, 0]
    for k in range(2 * steps):
        power = torch.linalg.matrix_power
        close(power(T, k)[0, 0], unit @ power(M, k) @ unit, atol=1e-9, rtol=1e-9)
    T = matrix_of(*tridiagonal(Dense(M), z, n, True))
    close(torch.linalg.matrix_exp(T)[0, 0], unit @ torch.linalg.matrix_exp(M) @ unit, atol=1e-9, rtol=1e-9)


def test_with_all_steps_the_nodes_are_the_eigenvalues(with_spectrum: Any) -> None:
    lam = torch.tensor([-3.0, -1.0, 0.5, 2.0, 2.0, 7.0]).double()
    M = with_spectrum(lam)
    found = Dense(M).spectral_density(probes=3)
    seen = found.weights > 0
    assert seen.sum(1).tolist() == [5, 5, 5]  # the twofold one is seen once
    for nodes, some in zip(found.nodes, seen, strict=True):
        close(nodes[some], lam.unique(), atol=1e-12, rtol=0)
    # the weight of an eigenvalue is the share of the probe in its eigenspace
    z = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).double()[0]
    shares = torch.linalg.eigh(M)[1].T.mv(z / z.norm()).square()
    want = torch.stack([shares[lam == each].sum() for each in lam.unique()])
    close(found.weights[0][seen[0]], want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_and_error_bars(device: str, dtype: torch.dtype, with_spectrum: Any) -> None:
    lam = torch.linspace(-1, 2, 300).double()
    A = Dense(with_spectrum(lam).to(device, dtype), symmetric=True)
    found = A.spectral_density(probes=20, steps=12, block=5)
    close(found.weights.sum(1), torch.ones(20).double(), atol=1e-6, rtol=0)
    assert found.matvecs == 240
    for k in range(1, 6):
        moment = found.integrate(lambda x, k=k: x**k)
        assert (moment.value - lam.pow(k).mean()).abs() < 4 * moment.standard_error
        # a Gaussian probe of unit length sees the mean with variance 2 var / (n + 2)
        want = (2 * lam.pow(k).var(correction=0) / 302 / 20).sqrt()
        assert 0.6 < moment.standard_error / want < 1.5


def test_density_and_picture(with_spectrum: Any) -> None:
    """Two thirds at 1, one third at 4: the density has these two peaks with these areas."""
    lam = torch.cat([torch.ones(200), torch.full((100,), 4.0)]).double()
    found = Dense(with_spectrum(lam)).spectral_density(probes=30, steps=20)
    grid = torch.linspace(-2, 8, 4001).double()
    curve = found.evaluate(grid, sigma=0.1).value
    close(torch.trapezoid(curve, grid).item(), 1.0, atol=1e-6, rtol=0)
    close(torch.trapezoid(curve[grid < 2.5], grid[grid < 2.5]).item(), 2 / 3, atol=0.02, rtol=0)
    peaks = grid[1:-1][(curve[1:-1] > curve[:-2]) & (curve[1:-1] > curve[2:]) & (curve[1:-1] > 0.1)]
    close(peaks, torch.tensor([1.0, 4.0]).double(), atol=0.01, rtol=0)
    pytest.importorskip("matplotlib").use("Agg")
    (line,) = found.plot().axes[0].lines
    x, y = (torch.as_tensor(v).double() for v in line.get_data())
    close(torch.trapezoid(y, x).item(), 1.0, atol=1e-3, rtol=0)


def test_an_exhausted_space_carries_no_weight() -> None:
    found = (3.0 * Identity(50, torch.float64)).spectral_density(probes=3, steps=10)
    close(found.integrate(torch.log).value.item(), math.log(3.0))
    assert found.integrate(torch.log).standard_error < 1e-12
    zero = Dense(torch.zeros(20, 20)).spectral_density(2, 4)
    assert zero.integrate(torch.square).value == 0


def test_without_reorthogonalisation_integrals_hold(with_spectrum: Any) -> None:
    A = Dense(with_spectrum(torch.logspace(-4, 0, 200)))
    kept, free = (A.spectral_density(4, 30, reorthogonalise=r) for r in (True, False))
    close(kept.integrate(torch.square).value, free.integrate(torch.square).value, rtol=1e-8, atol=0)


def test_seed_and_block(with_spectrum: Any) -> None:
    A = Dense(with_spectrum(torch.linspace(0, 1, 60)))
    one, two, other = (A.spectral_density(5, 8, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.nodes, two.nodes)
    assert not torch.equal(one.nodes, other.nodes)
    close(one.nodes, A.spectral_density(5, 8, seed=1, block=3).nodes)


def test_log_determinant(with_spectrum: Any) -> None:
    M = with_spectrum(torch.linspace(0.5, 3, 200))
    mean = Dense(M).spectral_density(probes=30, steps=40).integrate(torch.log)
    assert (200 * mean.value - torch.logdet(M)).abs() < 4 * 200 * mean.standard_error
    assert 200 * mean.standard_error < 3


def test_bad_input() -> None:
    A = Identity(10)
    with pytest.raises(InputError, match="steps must be at least 1"):
        A.spectral_density(2, 0)
    with pytest.raises(InputError, match="probes must be at least 1"):
        A.spectral_density(0)
    with pytest.raises(InputError, match="not marked symmetric"):
        Dense(torch.ones(3, 3).triu()).spectral_density()
    with pytest.raises(InputError, match=r"sigma=0.0"):
        A.spectral_density().evaluate(torch.zeros(3), 0.0)
    with pytest.raises(InputError, match="NaN or infinity in Lanczos step 1"):
        Diagonal(torch.full((9,), torch.nan)).spectral_density(2)
