import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biascope.errors import InputError, UnsupportedError
from biascope.linalg import (
    Dense,
    FromFunction,
    Identity,
    LowRank,
    SingularTriplets,
    randomized_eigsh,
    randomized_svd,
    subspace_iteration,
    svds,
)

close = torch.testing.assert_close


def test_subspace_iteration(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.cat([torch.tensor([9.0, 9, 9, 5, -8]), torch.linspace(0, 1, 195)]))
    for which, want in (("LM", [9, 9, 9, -8, 5]), ("LA", [9, 9, 9, 5])):
        pairs = subspace_iteration(Dense(M), len(want), which)
        close(pairs.values, torch.tensor(want).double(), atol=1e-10, rtol=0)
        assert pairs.converged.all()
        close(pairs.residuals, (M @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0), atol=1e-12, rtol=0)
        assert pairs.matvecs == pairs.iterations * (len(want) + 10) + len(want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_randomized_eigsh_exact_for_low_rank(device: str, dtype: torch.dtype, randn) -> None:  # type: ignore[no-untyped-def]
    U = torch.linalg.qr(randn(150, 8))[0].to(device, dtype)
    s = torch.tensor([7.0, 6, 5, 4, 4, 4, 2, 1], dtype=dtype, device=device)
    pairs = randomized_eigsh(LowRank(U, s), 8, power_iterations=0, oversampling=0)
    close(pairs.values, s, atol=1e-10 if dtype == torch.float64 else 1e-5, rtol=0)
    assert pairs.converged.all()


def test_more_power_iterations_help(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    A = Dense(with_spectrum(torch.linspace(0, 1, 200)))
    residuals = [randomized_eigsh(A, 5, power_iterations=p).residuals.max() for p in (0, 5, 25)]
    assert residuals[0] > residuals[1] > residuals[2] > 1e-6
    assert not randomized_eigsh(A, 5, power_iterations=0).converged.any()


def check_triplets(M: torch.Tensor, got: SingularTriplets, k: int, atol: float) -> None:
    want = torch.linalg.svdvals(M.double())[:k].to(M.dtype)
    close(got.values, want, atol=atol, rtol=0)
    for Q in (got.left, got.right):
        close(Q.T @ Q, torch.eye(k, dtype=M.dtype, device=M.device), atol=max(atol, 1e-12), rtol=0)
    there, back = M @ got.right - got.left * got.values, M.T @ got.left - got.right * got.values
    measured = torch.maximum(there.norm(dim=0), back.norm(dim=0))
    close(got.residuals, measured, atol=10 * atol, rtol=0)
    assert (measured <= 1e3 * atol).all()
    assert got.converged.all()


@pytest.mark.parametrize("shape", [(120, 90), (90, 120), (300, 5), (5, 300), (1, 7), (100, 100)])
def test_svds_against_dense(shape: tuple[int, int], randn) -> None:  # type: ignore[no-untyped-def]
    M = randn(*shape)
    for k in {1, min(4, *shape), min(shape)}:
        check_triplets(M, svds(Dense(M), k), k, 1e-10)


@settings(max_examples=25, deadline=None)
@given(m=st.integers(1, 90), n=st.integers(1, 90), rank=st.integers(0, 5), k=st.integers(1, 8), seed=st.integers(0, 9))
def test_rank_deficient(m: int, n: int, rank: int, k: int, seed: int) -> None:
    k = min(k, m, n)
    g = torch.Generator().manual_seed(seed)
    M = torch.randn(m, rank, generator=g, dtype=torch.float64) @ torch.randn(rank, n, generator=g, dtype=torch.float64)
    A = Dense(M, symmetric=False)
    got = randomized_svd(A, k, oversampling=5, power_iterations=1)
    close(got.values, torch.linalg.svdvals(M)[:k], atol=1e-10, rtol=0)
    # a square root of the Gram eigenvalues would leave 1e-8 in null directions
    close(svds(A, k).values, torch.linalg.svdvals(M)[:k], atol=1e-10, rtol=0)


def test_svd_keeps_digits_of_small_values(randn) -> None:  # type: ignore[no-untyped-def]
    """1e-6 next to 1: the square root of a Gram eigenvalue would have four digits; A on the subspace gives more."""
    left, right = torch.linalg.qr(randn(80, 3))[0], torch.linalg.qr(randn(50, 3, seed=1))[0]
    values = torch.tensor([1.0, 1e-4, 1e-6]).double()
    got = svds(Dense((left * values) @ right.T), 3)
    close(got.values[2].item(), 1e-6, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("dtype", "smallest", "rtol"), [(torch.float32, 1e-3, 1e-4), (torch.float64, 1e-10, 1e-4)])
@pytest.mark.parametrize("shape", [(240, 200), (200, 240)])
def test_svds_reaches_below_the_square_root_of_eps(  # type: ignore[no-untyped-def]
    dtype: torch.dtype, smallest: float, rtol: float, shape: tuple[int, int], randn
) -> None:
    """The products with A^T A have lost these (errors up to 90 %): the search goes on with [[0, A], [A^T, 0]]."""
    left, right = (torch.linalg.qr(randn(size, 60, seed=size))[0] for size in shape)
    values = torch.logspace(0, torch.tensor(smallest).log10().item(), 60, dtype=torch.float64)
    got = svds(Dense(((left * values) @ right.T).to(dtype)), 60)
    close(got.values.double(), values, rtol=rtol, atol=0)
    assert got.resolved.all()
    assert ((got.left.double() * left).sum(0).abs() > 1 - 1e-5).all()


def test_svds_says_what_float32_cannot_resolve(randn) -> None:  # type: ignore[no-untyped-def]
    left, right = torch.linalg.qr(randn(200, 60))[0], torch.linalg.qr(randn(200, 60, seed=1))[0]
    values = torch.logspace(0, -7, 60, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"only the first \d+ of 50 singular triplets are resolved.*float64"):
        got = svds(Dense(((left * values) @ right.T).float()), 50)
    assert not got.resolved.all()
    wrong = (got.values.double() / values[:50] - 1).abs() > 1e-2
    assert wrong.any()
    assert not (wrong & got.resolved).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_randomized_svd(device: str, dtype: torch.dtype, randn) -> None:  # type: ignore[no-untyped-def]
    M = (randn(200, 6) @ randn(6, 70, seed=1)).to(device, dtype)
    got = randomized_svd(Dense(M), 6)
    check_triplets(M, got, 6, 1e-10 if dtype == torch.float64 else 1e-3)
    assert torch.equal(got.right, randomized_svd(Dense(M), 6).right)
    assert got.matvecs == 2 * 16 * 3 + 12


def test_zero() -> None:
    Z = Dense(torch.zeros(40, 70).double())
    for got in (svds(Z, 3), randomized_svd(Z, 3)):
        assert (got.values == 0).all()
        assert got.converged.all()


def test_bad_input() -> None:
    with pytest.raises(UnsupportedError, match="use eigsh"):
        subspace_iteration(Identity(10), 1, "SA")
    with pytest.raises(InputError, match="oversampling"):
        subspace_iteration(Identity(10), 1, oversampling=-1)
    with pytest.raises(InputError, match="power_iterations"):
        randomized_eigsh(Identity(10), 1, power_iterations=-1)
    with pytest.raises(UnsupportedError, match="has no adjoint"):
        svds(FromFunction(lambda X: X, (10, 10)), 1)
    for solver in (svds, randomized_svd):
        with pytest.raises(InputError, match="k must be between 1 and 2"):
            solver(Dense(torch.ones(2, 5)), 3)
        with pytest.raises(InputError, match="wrap it"):
            solver(torch.ones(2, 5), 1)  # type: ignore[operator]
        with pytest.raises(InputError, match="tol must be positive"):
            solver(Dense(torch.ones(2, 5)), 1, tol=-1.0)
        with pytest.raises(InputError, match="float32 or float64"):
            solver(Dense(torch.ones(2, 5).half()), 1)
    with pytest.raises(InputError, match="NaN or infinity"):
        subspace_iteration(Dense(torch.full((9, 9), torch.inf), symmetric=True), 1)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_singular_values_whose_squares_are_no_float32(with_spectrum, scale: float) -> None:  # type: ignore[no-untyped-def]
    """A^T A was 0, or infinite: arbitrary vectors had residuals that underflowed, and passed for resolved."""
    M = with_spectrum(torch.linspace(0.1, 1, 200))
    got = svds(Dense((scale * M).float()), 3)
    close(got.values.double() / scale, torch.linspace(0.1, 1, 200).double().flip(0)[:3], rtol=1e-5, atol=0)
    V, s = got.right.double(), got.values.double() / scale
    close(M @ V, got.left.double() * s, rtol=0, atol=1e-3)  # float32 vectors, neighbours 0.005 apart
    assert got.resolved.all()
