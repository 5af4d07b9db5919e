import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biascope.linalg import FromFunction, cg
from biascope.linalg.conjugate_gradients import damped
from biascope.linalg.elementary import Dense, Diagonal, Identity
from biascope.support.errors import InputError

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


def test_preconditioner(randn) -> None:  # type: ignore[no-untyped-def]
    d = torch.logspace(0, 5, 100).double()
    R = 0.01 * randn(100, 100)
    M = torch.diag(d) + R @ R.T
    b = randn(100, seed=1)
    plain, pre = cg(Dense(M), b, max_iterations=2000), cg(Dense(M), b, Diagonal(1 / M.diagonal()))
    assert pre.converged
    assert pre.iterations < plain.iterations / 5
    close(pre.x, torch.linalg.solve(M, b), atol=1e-9, rtol=1e-9)


def test_bad_input() -> None:
    A = Identity(3)
    with pytest.raises(InputError, match=r"float32 tensor of shape \[4\] on cpu: it takes a vector \[3\]"):
        cg(A, torch.ones(4))
    with pytest.raises(InputError, match=r"torch\.float64 tensor"):
        cg(A, torch.ones(3).double())
    with pytest.raises(InputError, match="b has a NaN"):
        cg(A, torch.tensor([1.0, torch.nan, 0]))
    with pytest.raises(InputError, match="must be shaped as b"):
        cg(A, torch.ones(3), x0=torch.ones(3, 1))
    with pytest.raises(InputError, match="a square operator is needed"):
        cg(Dense(torch.ones(2, 3)), torch.ones(3))
    with pytest.raises(InputError, match="wrap it"):
        cg(torch.eye(3), torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"tol=0.0: a finite number above 0"):
        cg(A, torch.ones(3), tol=0.0)
    with pytest.raises(InputError, match="max_iterations"):
        cg(A, torch.ones(3), max_iterations=0)
    with pytest.raises(InputError, match="NaN or infinity in iteration 1"):
        cg(Diagonal(torch.full((3,), torch.inf)), torch.ones(3))
