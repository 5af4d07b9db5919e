import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biascope.errors import InputError
from biascope.linalg import Dense, Diagonal, FromFunction, Identity, LowRank, Nystrom, cg, damped, jacobi

close = torch.testing.assert_close


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 30), k=st.integers(0, 4), seed=st.integers(0, 99))
def test_against_dense_solve(n: int, k: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    R = torch.randn(n, n, generator=g, dtype=torch.float64)
    M = R @ R.T / n + 0.1 * torch.eye(n, dtype=torch.float64)
    b = torch.randn(n, k, generator=g, dtype=torch.float64) if k else torch.randn(n, generator=g, dtype=torch.float64)
    result = cg(Dense(M), b, tol=1e-13)
    assert result.x.shape == b.shape
    assert result.residual_norms.shape == b.shape[1:]
    close(result.x, torch.linalg.solve(M, b), atol=1e-10, rtol=1e-10)
    assert result.converged.all()
    assert result.message.startswith("converged in")


def test_columns_converge_on_their_own() -> None:
    """An eigenvector is solved in one step, zero in none; A sees only the columns still open."""
    widths = []
    d = torch.linspace(1, 50, 40).double()
    op = FromFunction(lambda X: widths.append(X.shape[1]) or d[:, None] * X, (40, 40), torch.float64, symmetric=True)
    B = torch.stack([torch.zeros(40), torch.eye(40)[3], torch.ones(40)], 1).double()
    result = cg(op, B)
    assert widths[0] == 2
    assert widths[1] == 1
    assert sum(widths) == result.matvecs
    close(result.x, B / d[:, None], atol=1e-9, rtol=0)
    assert result.converged.tolist() == [True, True, True]


def test_zero_right_hand_side_costs_nothing() -> None:
    result = cg(Identity(4), torch.zeros(4))
    assert result.matvecs == 0
    assert result.converged
    assert (result.x == 0).all()


def test_x0(with_spectrum, randn) -> None:  # type: ignore[no-untyped-def]
    M, b = with_spectrum(torch.linspace(1, 5, 60)), randn(60, 2)
    x = torch.linalg.solve(M, b)
    assert cg(Dense(M), b, x0=x).iterations == 0
    x0 = torch.ones_like(b)
    close(cg(Dense(M), b, x0=x0).x, x, atol=1e-9, rtol=0)
    assert (x0 == 1).all()


def test_non_positive_curvature_is_reported() -> None:
    d = torch.tensor([1.0, 2.0, -1.0]).double()
    B = torch.eye(3).double()
    result = cg(Diagonal(d), B)
    assert result.negative_curvature.tolist() == [False, False, True]
    assert result.converged.tolist() == [True, True, False]
    assert "1 met non-positive curvature" in result.message
    assert "add damping" in result.message
    close(result.x[:, :2], B[:, :2] / d[:, None])
    single = cg(Diagonal(d), B[:, 2])
    assert single.negative_curvature
    assert single.residual_norms == 1.0
    assert cg(Dense(torch.zeros(3, 3)), torch.ones(3)).negative_curvature  # zero curvature too


def test_not_converged_says_so(with_spectrum, randn) -> None:  # type: ignore[no-untyped-def]
    M, b = with_spectrum(torch.logspace(-6, 0, 80)), randn(80)
    result = cg(Dense(M), b, max_iterations=5)
    assert not result.converged
    assert result.iterations == 5
    assert "1 of 1 right-hand sides did not converge in 5" in result.message
    close(result.residual_norms, (b - M @ result.x).norm())


def test_float32_residual_is_the_true_one(device: str, with_spectrum, randn) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.logspace(-2, 0, 200)).float().to(device)
    b = randn(200, 3).float().to(device)
    result = cg(Dense(M), b, tol=1e-5)
    assert result.converged.all()
    true = (b.double() - M.double() @ result.x.double()).norm(dim=0)
    assert (true <= 1.2e-5 * b.norm(dim=0)).all()
    # an unreachable tolerance ends, and does not claim to have been met
    assert not cg(Dense(M), b, tol=1e-12).converged.any()


def test_damped(with_spectrum, randn) -> None:  # type: ignore[no-untyped-def]
    M, b = with_spectrum(torch.linspace(0, 1, 30)), randn(30)
    A = damped(Dense(M), 0.3)
    close(A.to_dense(), M + 0.3 * torch.eye(30).double())
    close(cg(A, b).x, torch.linalg.solve(A.to_dense(), b), atol=1e-9, rtol=0)
    op = Dense(M)
    assert damped(op, 0) is op
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="damping must be a number >= 0"):
            damped(op, bad)


def test_jacobi_preconditioner(randn) -> None:  # type: ignore[no-untyped-def]
    d = torch.logspace(0, 5, 100).double()
    R = 0.01 * randn(100, 100)
    M = torch.diag(d) + R @ R.T
    b = randn(100, seed=1)
    plain, pre = cg(Dense(M), b, max_iterations=2000), cg(Dense(M), b, jacobi(Dense(M)))
    assert pre.converged
    assert pre.iterations < plain.iterations / 5
    close(pre.x, torch.linalg.solve(M, b), atol=1e-9, rtol=1e-9)
    close(jacobi(d, 2.0).values, 1 / (d + 2))
    with pytest.raises(InputError, match="2 diagonal entries are not positive"):
        jacobi(torch.tensor([1.0, 0.0, -1.0]))


def test_nystrom_preconditioner(with_spectrum, randn) -> None:  # type: ignore[no-untyped-def]
    lam = 1e-3
    M = with_spectrum(torch.arange(1, 301).double() ** -2.0)
    b = randn(300)
    A = damped(Dense(M), lam)
    N = Nystrom(Dense(M), 60)
    P = N.preconditioner(lam)
    plain, pre = cg(A, b), cg(A, b, P)
    assert pre.iterations < plain.iterations / 3
    close(pre.x, torch.linalg.solve(A.to_dense(), b), atol=1e-7, rtol=0)
    # the inverse of its formula
    U, s = N.U, N.s
    eye = torch.eye(300).double()
    want = U @ torch.diag((s + lam) / (s[-1] + lam)) @ U.T + eye - U @ U.T
    close(P.to_dense() @ want, eye, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nystrom_exact_for_low_rank(device: str, dtype: torch.dtype, randn) -> None:  # type: ignore[no-untyped-def]
    U = torch.linalg.qr(randn(80, 4))[0]
    s = torch.tensor([5.0, 3, 2, 1]).double()
    M = ((U * s) @ U.T).to(device, dtype)
    N = Nystrom(Dense(M, symmetric=True), 9)
    atol = 1e-10 if dtype == torch.float64 else 1e-4
    close(N.s[:4].cpu().double(), s, atol=atol, rtol=0)
    close(N.to_dense(), M, atol=atol, rtol=0)
    b = randn(80, 2).to(device, dtype)
    want = torch.linalg.solve(M + 0.1 * torch.eye(80, dtype=dtype, device=device), b)
    close(N.solve(b, 0.1), want, atol=10 * atol, rtol=0)
    close(N.solve(b[:, 0], 0.1), want[:, 0], atol=10 * atol, rtol=0)
    assert torch.equal(N.U, Nystrom(Dense(M, symmetric=True), 9).U)


def test_nystrom_never_exceeds(with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum(torch.linspace(0, 1, 50))
    gap = torch.linalg.eigvalsh(M - Nystrom(Dense(M), 20).to_dense())
    assert gap.min() > -1e-10


def test_nystrom_of_zero_and_of_indefinite() -> None:
    zero = Nystrom(Dense(torch.zeros(5, 5)), 2)
    assert (zero.to_dense() == 0).all()
    close(zero.solve(torch.ones(5), 0.5), torch.full((5,), 2.0))
    with pytest.raises(InputError, match="damping > 0 is needed"):
        zero.preconditioner(0.0)
    with pytest.raises(InputError, match="needs damping > 0"):
        zero.solve(torch.ones(5), 0.0)
    with pytest.raises(InputError, match="not positive semi-definite"):
        Nystrom(Diagonal(-torch.arange(1.0, 20)), 5)
    with pytest.raises(InputError, match="NaN or infinity"):
        Nystrom(Diagonal(torch.full((9,), torch.nan)), 2)


def test_bad_input() -> None:
    A = Identity(3)
    with pytest.raises(InputError, match=r"b is torch.float32 \[4\]"):
        cg(A, torch.ones(4))
    with pytest.raises(InputError, match=r"b is torch\.float64"):
        cg(A, torch.ones(3).double())
    with pytest.raises(InputError, match="b holds NaN"):
        cg(A, torch.tensor([1.0, torch.nan, 0]))
    with pytest.raises(InputError, match="must be shaped as b"):
        cg(A, torch.ones(3), x0=torch.ones(3, 1))
    with pytest.raises(InputError, match="preconditioner <Identity 4x4 float32> does not fit <Identity 3x3"):
        cg(A, torch.ones(3), Identity(4))
    with pytest.raises(InputError, match="needs a square operator"):
        cg(Dense(torch.ones(2, 3)), torch.ones(3))
    with pytest.raises(InputError, match="wrap it"):
        cg(torch.eye(3), torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tol must be positive"):
        cg(A, torch.ones(3), tol=0.0)
    with pytest.raises(InputError, match="max_iterations"):
        cg(A, torch.ones(3), max_iterations=0)
    with pytest.raises(InputError, match="float32 or float64"):
        cg(Identity(3, torch.float16), torch.ones(3).half())
    with pytest.raises(InputError, match="NaN or infinity in iteration 1"):
        cg(LowRank(torch.full((3, 1), torch.inf)), torch.ones(3))
