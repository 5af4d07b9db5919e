from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from biascope.errors import InputError, UnsupportedError
from biascope.linalg import (
    Dense,
    Diagonal,
    Estimate,
    FromFunction,
    LowRank,
    diagonal,
    draw,
    frobenius_norm_squared,
    generator_from,
    hutchinson,
    hutchpp,
    xtrace,
)

close = torch.testing.assert_close
TRACES: dict[str, Callable[..., Estimate]] = {"hutchinson": hutchinson, "hutchpp": hutchpp, "xtrace": xtrace}
DIAGONALS: dict[str, Callable[..., Estimate]] = {
    "hutchinson": diagonal,
    "xdiag": partial(diagonal, method="xdiag"),
}


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
@pytest.mark.parametrize("name", TRACES)
def test_unbiased_and_error_bars_true(name: str, probes: str, with_spectrum) -> None:  # type: ignore[no-untyped-def]
    """Over 300 seeds the mean is right within 4 standard errors, and the reported errors are the right size."""
    M = with_spectrum(torch.arange(1, 81).double() ** -0.7)
    runs = [TRACES[name](Dense(M), 24, probes, seed=s) for s in range(300)]
    values = torch.stack([r.value for r in runs])
    spread = values.std()
    assert (values.mean() - M.trace()).abs() < 4 * spread / 300**0.5
    reported = torch.stack([r.standard_error for r in runs]).square().mean().sqrt()
    low, high = (1.0, 3.0) if name == "xtrace" else (0.75, 1.35)  # the jackknife of XTrace errs on the large side
    assert low < reported / spread < high, (reported, spread)


@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonal_unbiased_and_error_bars_true(name: str, with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.arange(1, 41).double() ** -1.0)
    runs = [DIAGONALS[name](Dense(M), 20, seed=s) for s in range(300)]
    values = torch.stack([r.value for r in runs])
    spread = values.std(0)
    assert ((values.mean(0) - M.diagonal()).abs() < 4.5 * spread / 300**0.5).all()
    reported = torch.stack([r.standard_error for r in runs]).square().mean(0).sqrt()
    low, high = (1.0, 3.0) if name == "xdiag" else (0.8, 1.25)
    assert low < (reported / spread).mean() < high


def explicit_xtrace(M: Tensor, omega: Tensor, rescale: bool) -> Tensor:
    """Leave one probe out, find the range of the others by QR, sample the rest with the one left out; average."""
    n, k = omega.shape
    samples = []
    for i in range(k):
        Q = torch.linalg.qr(M @ omega[:, [j for j in range(k) if j != i]])[0]
        u = omega[:, i] - Q @ (Q.T @ omega[:, i])
        rest = u @ M @ u * ((n - k + 1) / (u @ u) if rescale else 1.0)
        samples.append((Q.T @ M @ Q).trace() + rest)
    return torch.stack(samples).mean()


def explicit_xdiag(M: Tensor, omega: Tensor) -> Tensor:
    k = omega.shape[1]
    samples = []
    for i in range(k):
        Q = torch.linalg.qr(M @ omega[:, [j for j in range(k) if j != i]])[0]
        y = M @ omega[:, i]
        samples.append((Q @ Q.T @ M).diagonal() + omega[:, i] * (y - Q @ (Q.T @ y)))
    return torch.stack(samples).mean(0)


@pytest.mark.parametrize("probes", ["rademacher", "gaussian", "diagonal"])
def test_exchangeable_estimators_equal_their_definition(probes: str, randn) -> None:  # type: ignore[no-untyped-def]
    """Value and jackknife error, against the slow formula with explicit QRs, on a matrix that is not symmetric."""
    M, k = randn(30, 30), 6
    A = Dense(M)
    generator = generator_from(2)
    kind = "gaussian" if probes == "gaussian" else "rademacher"
    omega = torch.cat([draw(30, 1, A, generator, kind) for _ in range(k)], 1)

    def explicit(columns: Tensor) -> Tensor:
        return explicit_xdiag(M, columns) if probes == "diagonal" else explicit_xtrace(M, columns, kind == "gaussian")

    got = diagonal(A, 2 * k, "xdiag", seed=2) if probes == "diagonal" else xtrace(A, 2 * k, kind, seed=2)
    close(got.value, explicit(omega), atol=1e-10, rtol=0)
    fewer = torch.stack([explicit(omega[:, [j for j in range(k) if j != i]]) for i in range(k)])
    want = ((k - 1) / k * (fewer - fewer.mean(0)).square().sum(0)).sqrt()
    close(got.standard_error, want, atol=1e-10, rtol=0)


def test_better_methods_are_better(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    """On a decaying spectrum: XTrace < Hutch++ < Hutchinson at the same number of products."""
    M = with_spectrum(torch.arange(1, 201).double() ** -2.0)
    error = {
        name: torch.stack([f(Dense(M), 48, seed=s).value - M.trace() for s in range(20)]).square().mean().sqrt()
        for name, f in TRACES.items()
    }
    assert error["xtrace"] < error["hutchpp"] < error["hutchinson"]
    rough, fine = (
        torch.stack([f(Dense(M), 40, seed=s).value - M.diagonal() for s in range(10)]).norm()
        for f in DIAGONALS.values()
    )
    assert fine < 0.2 * rough


@pytest.mark.parametrize("name", ["hutchpp", "xtrace"])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_exact_for_low_rank(name: str, rank: int, randn) -> None:  # type: ignore[no-untyped-def]
    M = randn(90, rank) @ randn(rank, 90, seed=1)  # not symmetric, not positive
    estimate = TRACES[name](Dense(M, symmetric=False), 24)
    close(estimate.value, M.trace(), atol=1e-10, rtol=0)
    assert estimate.standard_error < 1e-10
    d = diagonal(Dense(M, symmetric=False), 24, "xdiag")
    close(d.value, M.diagonal(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", TRACES)
def test_exact_with_n_products(name: str, randn) -> None:  # type: ignore[no-untyped-def]
    M = randn(10, 10)
    estimate = TRACES[name](Dense(M), 10)
    close(estimate.value, M.trace())
    assert estimate.standard_error == 0
    assert estimate.matvecs == 10


def test_other_exact_cases(randn) -> None:  # type: ignore[no-untyped-def]
    d = randn(60)
    close(hutchinson(Diagonal(d), 1).value, d.sum())  # signs square to one
    assert torch.isnan(hutchinson(Diagonal(d), 1).standard_error)
    close(diagonal(Diagonal(d), 3).value, d)
    R = randn(7, 5)
    exact = frobenius_norm_squared(Dense(R), 5, block=2)
    close(exact.value, R.square().sum())
    assert exact.standard_error == 0
    for f in DIAGONALS.values():
        close(f(Dense(R @ R.T), 7).value, (R @ R.T).diagonal())


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
    for f in (*TRACES.values(), *DIAGONALS.values(), frobenius_norm_squared):
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
    for f in (*TRACES.values(), *DIAGONALS.values(), frobenius_norm_squared):
        calls: list[int] = []

        def product(X: Tensor, N: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(X.shape[1])
            return N @ X

        op = FromFunction(partial(product, N=M), (60, 60), torch.float64, rmatmat=partial(product, N=M.T))
        estimate = f(op, 24)
        assert estimate.matvecs == sum(calls) == 24


def test_zero_operator() -> None:
    Z = Dense(torch.zeros(50, 50))
    for f in (*TRACES.values(), *DIAGONALS.values(), frobenius_norm_squared):
        estimate = f(Z, 12)
        assert (estimate.value == 0).all()
        assert (estimate.standard_error == 0).all()


def test_bad_input() -> None:
    A = LowRank(torch.ones(50, 1))
    with pytest.raises(InputError, match="at least one sample"):
        hutchinson(A, 0)
    with pytest.raises(InputError, match="at least 3 matvecs"):
        hutchpp(A, 2)
    with pytest.raises(InputError, match="at least 4 matvecs"):
        xtrace(A, 3)
    with pytest.raises(InputError, match="at least 4 samples"):
        diagonal(A, 3, "xdiag")
    with pytest.raises(InputError, match="'rademacher' or 'gaussian'"):
        hutchinson(A, 4, "uniform")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="method must be"):
        diagonal(A, 4, "exact")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs a square operator"):
        hutchinson(Dense(torch.ones(2, 3)))
    with pytest.raises(InputError, match="wrap it"):
        hutchinson(torch.eye(3))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="block must be at least 1"):
        hutchinson(A, 4, block=0)
    with pytest.raises(UnsupportedError, match="xdiag needs the adjoint"):
        diagonal(FromFunction(lambda X: X, (50, 50)), 8, "xdiag")
