from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from biascope.linalg import FromFunction, hutchinson
from biascope.linalg.elementary import Dense, Diagonal
from biascope.linalg.trace import SampledEstimate, diagonal, frobenius_norm_squared
from biascope.support.errors import InputError
from biascope.support.estimate import Estimate

close = torch.testing.assert_close
ESTIMATORS: tuple[Callable[..., SampledEstimate], ...] = (hutchinson, diagonal, frobenius_norm_squared)


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_unbiased_and_error_bars_true(probes: str, with_spectrum) -> None:  # type: ignore[no-untyped-def]
    """Over 300 seeds the mean is right within 4 standard errors, and the reported errors are the right size."""
    M = with_spectrum(torch.arange(1, 81).double() ** -0.7)
    runs = [hutchinson(Dense(M), 24, probes, seed=s) for s in range(300)]  # type: ignore[arg-type]
    values = torch.stack([r.value for r in runs])
    spread = values.std()
    assert (values.mean() - M.trace()).abs() < 4 * spread / 300**0.5
    reported = torch.stack([r.standard_error for r in runs]).square().mean().sqrt()
    assert 0.75 < reported / spread < 1.35, (reported, spread)


def test_diagonal_unbiased_and_error_bars_true(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.arange(1, 41).double() ** -1.0)
    runs = [diagonal(Dense(M), 20, seed=s) for s in range(300)]
    values = torch.stack([r.value for r in runs])
    spread = values.std(0)
    assert ((values.mean(0) - M.diagonal()).abs() < 4.5 * spread / 300**0.5).all()
    reported = torch.stack([r.standard_error for r in runs]).square().mean(0).sqrt()
    assert 0.8 < (reported / spread).mean() < 1.25


def test_all_products_give_the_exact_value(randn) -> None:  # type: ignore[no-untyped-def]
    M = randn(10, 10)
    for f, want in zip(ESTIMATORS, (M.trace(), M.diagonal(), M.square().sum())):
        estimate = f(Dense(M), 12)
        close(estimate.value, want)
        assert (estimate.standard_error == 0).all()
        assert estimate.n == estimate.samples == estimate.matvecs == 10


def test_an_estimate_is_one_of_support() -> None:
    one = SampledEstimate(torch.tensor(0.91234), torch.tensor(0.0123), 7, 9, 0)
    assert isinstance(one, Estimate)
    assert str(one) == "0.912 ± 0.012"
    assert float(one) == pytest.approx(0.91234)


def test_other_exact_cases(randn) -> None:  # type: ignore[no-untyped-def]
    d = randn(60)
    close(hutchinson(Diagonal(d), 1).value, d.sum())  # signs square to one
    assert torch.isnan(hutchinson(Diagonal(d), 1).standard_error)
    close(diagonal(Diagonal(d), 3).value, d)
    R = randn(7, 5)
    exact = frobenius_norm_squared(Dense(R), 5, block=2)
    close(exact.value, R.square().sum())
    assert exact.standard_error == 0
    close(diagonal(Dense(R @ R.T), 7).value, (R @ R.T).diagonal())


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_frobenius(probes: str, randn) -> None:  # type: ignore[no-untyped-def]
    R = randn(30, 50)
    op = FromFunction(lambda X: R @ X, (30, 50), torch.float64)  # no adjoint needed
    runs = [frobenius_norm_squared(op, 16, probes, seed=s) for s in range(200)]
    values = torch.stack([r.value for r in runs])
    assert (values.mean() - R.square().sum()).abs() < 4 * values.std() / 200**0.5
    reported = torch.stack([r.standard_error for r in runs]).square().mean().sqrt()
    assert 0.8 < reported / values.std() < 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_device_and_seed(device: str, dtype: torch.dtype, with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.linspace(0, 1, 100))
    A = Dense(M.to(device, dtype), symmetric=True)
    for f in ESTIMATORS:
        one, two, other = f(A, 20, seed=3), f(A, 20, seed=3), f(A, 20, seed=4)
        assert one.value.dtype == torch.float64
        assert torch.equal(one.value, two.value)
        assert not torch.equal(one.value, other.value)
        assert one.seed == 3
        # the same probes on every device and in every dtype
        close(one.value.cpu(), f(Dense(M), 20, seed=3).value, atol=1e-4, rtol=1e-4)


def test_blocks_do_not_change_the_numbers(randn) -> None:  # type: ignore[no-untyped-def]
    A = Dense(randn(50, 50))
    for f in (hutchinson, frobenius_norm_squared, diagonal):
        close(f(A, 11, block=1).value, f(A, 11, block=4).value)  # type: ignore[operator]


def test_counts_every_product(randn) -> None:  # type: ignore[no-untyped-def]
    M = randn(60, 60)
    for f in ESTIMATORS:
        calls: list[int] = []

        def product(X: Tensor, N: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(X.shape[1])
            return N @ X

        op = FromFunction(partial(product, N=M), (60, 60), torch.float64, rmatmat=partial(product, N=M.T))
        estimate = f(op, 24)
        assert estimate.matvecs == sum(calls) == 24


def test_zero_operator() -> None:
    Z = Dense(torch.zeros(50, 50))
    for f in ESTIMATORS:
        estimate = f(Z, 12)
        assert (estimate.value == 0).all()
        assert (estimate.standard_error == 0).all()


def test_bad_input() -> None:
    A = Diagonal(torch.ones(50))
    with pytest.raises(InputError, match="samples must be at least 1"):
        hutchinson(A, 0)
    with pytest.raises(InputError, match="probes='uniform' is not known; there is gaussian, rademacher"):
        hutchinson(A, 4, "uniform")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a square operator is needed"):
        hutchinson(Dense(torch.ones(2, 3)))
    with pytest.raises(InputError, match="wrap it"):
        hutchinson(torch.eye(3))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="block must be at least 1"):
        hutchinson(A, 4, block=0)
