import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh as scipy_eigsh

from biascope.linalg import FromFunction, eigsh
from biascope.linalg.elementary import Dense, Diagonal, Identity
from biascope.support.errors import InputError

close = torch.testing.assert_close


def oracle(M: torch.Tensor, k: int, which: str) -> torch.Tensor:
    values = torch.linalg.eigvalsh(M.double())
    key = values.abs() if which == "LM" else values
    return values[key.argsort(descending=which != "SA")][:k]


def check(M: torch.Tensor, k: int, which: str, atol: float = 1e-10, **options: object) -> None:
    pairs = eigsh(Dense(M, symmetric=True), k, which, **options)  # type: ignore[arg-type]
    want = oracle(M, k, which)
    got = pairs.values.double()
    if which == "LM":
        got, want = got.abs(), want.abs()
    close(got, want, atol=atol, rtol=0)
    X = pairs.vectors
    close(X.T @ X, torch.eye(k, dtype=M.dtype), atol=max(atol, 1e-12), rtol=0)
    close(
        pairs.residuals, (M @ X - X * pairs.values).norm(dim=0), atol=1e-9 if M.dtype == torch.float64 else 1e-4, rtol=0
    )
    assert pairs.converged.all()


SPECTRA = {
    "decay": torch.arange(1, 301).double() ** -1.5,
    "flat": torch.linspace(-2, 3, 300).double(),
    "repeated": torch.cat(
        [torch.tensor([10, 9.99, 9.99, 9.98, 9.98, 9.98, 9.97]), torch.linspace(0, 9.5, 293)]
    ).double(),
    "projector": torch.cat([torch.ones(15), torch.zeros(285)]).double(),
    "outliers": torch.cat([torch.full((9,), 50.0), torch.full((1,), -60.0), torch.linspace(0, 0.1, 290)]).double(),
    "zero": torch.zeros(300).double(),
    "identity": torch.ones(300).double(),
}


@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
@pytest.mark.parametrize("k", [1, 6, 20])
@pytest.mark.parametrize("name", SPECTRA)
def test_against_dense(name: str, k: int, which: str, with_spectrum) -> None:  # type: ignore[no-untyped-def]
    if name == "decay" and which == "SA":
        pytest.skip("clustered at zero far below tol: covered by test_not_converged_says_so")
    check(with_spectrum(SPECTRA[name]), k, which)


def test_verification_is_what_finds_the_copies(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    """Without it a copy is missed on this matrix: the test above can fail."""
    M = with_spectrum(SPECTRA["repeated"])
    blind = eigsh(Dense(M), 6, verify=False)
    assert not torch.allclose(blind.values, oracle(M, 6, "LA"), atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 10, 64, 65, 80])
def test_all_eigenpairs(n: int, randn) -> None:  # type: ignore[no-untyped-def]
    A = randn(n, n)
    for which in ("LA", "SA", "LM"):
        check(A + A.T, n, which)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 120), share=st.floats(0.01, 1), which=st.sampled_from(["LA", "SA", "LM"]), seed=st.integers(0, 9)
)
def test_any_size(n: int, share: float, which: str, seed: int) -> None:
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    check(A @ A.T / n, max(1, int(share * n)), which, seed=seed)


def test_matrix_free_against_scipy(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.logspace(-3, 2, 500))
    op = FromFunction(lambda X: M @ X, (500, 500), torch.float64, symmetric=True)
    pairs = eigsh(op, 8)
    values = scipy_eigsh(M.numpy(), 8, which="LA", tol=1e-12, return_eigenvectors=False)
    close(pairs.values, torch.tensor(values).flip(0), atol=1e-10, rtol=0)
    peak = pairs.vectors.gather(0, pairs.vectors.abs().argmax(0, keepdim=True))
    assert (peak > 0).all()


def test_counts_every_product(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.logspace(-3, 2, 200))
    calls = []
    op = FromFunction(lambda X: calls.append(X.shape[1]) or M @ X, (200, 200), torch.float64, symmetric=True)
    assert eigsh(op, 4).matvecs == sum(calls)


def test_memory_is_bounded_by_the_subspace(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    """It converges by restarting a basis of 12 vectors, many times fewer than the products it needs."""
    M = with_spectrum(SPECTRA["flat"])
    pairs = eigsh(Dense(M), 3, subspace=12)
    assert pairs.matvecs > 100
    close(pairs.values, oracle(M, 3, "LA"), atol=1e-10, rtol=0)


@pytest.mark.parametrize("which", ["LA", "LM"])
def test_float32(device: str, which: str, with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.logspace(-3, 1, 300)).float().to(device)
    pairs = eigsh(Dense(M), 5, which)
    assert pairs.vectors.device.type == device
    assert pairs.values.dtype == torch.float32
    close(pairs.values.double().cpu(), oracle(M, 5, which).cpu(), atol=1e-5, rtol=1e-5)
    assert pairs.converged.all()


def test_seeds_and_starts(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.logspace(-3, 1, 200))
    one, two, other = eigsh(Dense(M), 3, seed=5), eigsh(Dense(M), 3, seed=5), eigsh(Dense(M), 3, seed=6)
    assert torch.equal(one.vectors, two.vectors)
    assert not torch.equal(one.vectors, other.vectors)
    close(one.values, other.values, atol=1e-10, rtol=0)
    # an eigenvector as start is an exact breakdown at once
    start = torch.linalg.eigh(M).eigenvectors[:, 50]
    close(eigsh(Dense(M), 3, start=start).values, one.values, atol=1e-10, rtol=0)


def test_not_converged_says_so(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(SPECTRA["flat"])
    pairs = eigsh(Dense(M), 4, max_iterations=1)
    assert not pairs.converged.all()
    close(pairs.residuals, (M @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0))
    assert (pairs.values <= oracle(M, 4, "LA") + 1e-12).all()  # Ritz values never exceed


def test_bad_input() -> None:
    A = Identity(100)
    with pytest.raises(InputError, match="wrap it with aslinearoperator"):
        eigsh(torch.eye(3), 1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not marked symmetric"):
        eigsh(Dense(torch.ones(100, 100).triu()), 1)
    with pytest.raises(InputError, match="k=101 must be at most 100"):
        eigsh(A, 101)
    with pytest.raises(InputError, match="k must be at least 1, not 0"):
        eigsh(A, 0)
    with pytest.raises(InputError, match="which='BE' is not known"):
        eigsh(A, 1, "BE")
    with pytest.raises(InputError, match="tol=0"):
        eigsh(A, 1, tol=0.0)
    with pytest.raises(InputError, match="max_iterations"):
        eigsh(A, 1, max_iterations=0)
    with pytest.raises(InputError, match="the subspace, 5, larger than k"):
        eigsh(A, 5, subspace=5)
    with pytest.raises(InputError, match=r"shape \[99\] on cpu: it takes a vector \[100\]"):
        eigsh(A, 1, start=torch.ones(99))
    with pytest.raises(InputError, match="other than zero"):
        eigsh(A, 1, start=torch.zeros(100))
    with pytest.raises(InputError, match="float32 or float64"):
        eigsh(Identity(100, torch.float16), 1)
    with pytest.raises(InputError, match="seed must be an integer"):
        eigsh(A, 1, seed=0.5)  # type: ignore[arg-type]
    for n in (10, 100):
        with pytest.raises(InputError, match="NaN or infinity"):
            eigsh(Diagonal(torch.full((n,), torch.nan)), 1)


def test_a_basis_of_more_entries_than_blas_counts_is_multiplied_in_parts(
    monkeypatch: pytest.MonkeyPatch,
    with_spectrum,  # type: ignore[no-untyped-def]
) -> None:
    A = Dense(with_spectrum(torch.linspace(-1, 2, 130)))
    whole, density = eigsh(A, 3), A.spectral_density(2, 12, block=2)
    monkeypatch.setattr("biascope.linalg.spread.AT_ONCE", 500)
    found, other = eigsh(A, 3), A.spectral_density(2, 12, block=2)
    close(found.values, whole.values)
    close(found.vectors, whole.vectors, atol=1e-9, rtol=0)
    close(other.nodes, density.nodes)
