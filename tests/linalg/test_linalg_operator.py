import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh as scipy_eigsh

from biascope.linalg import FromFunction, LinearOperator, aslinearoperator
from biascope.linalg.elementary import Dense, Diagonal, Identity, is_symmetric
from biascope.linalg.operator import Product
from biascope.support.errors import InputError, UnsupportedError

close = torch.testing.assert_close
sizes = st.integers(1, 6)


def gen(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(m=sizes, n=sizes, p=sizes, k=sizes, seed=st.integers(0, 99))
def test_algebra_equals_dense_algebra(m: int, n: int, p: int, k: int, seed: int) -> None:
    a, b, c = gen(m, n, seed=seed), gen(m, n, seed=seed + 1), gen(n, p, seed=seed + 2)
    A, B, C = Dense(a), Dense(b), Dense(c)
    op = (2 * A - B / 4 + -A) @ C
    want = (2 * a - b / 4 - a) @ c
    x, y = gen(p, k, seed=seed + 3), gen(m, seed=seed + 4)
    close(op @ x, want @ x)
    close(op @ x[:, 0], want @ x[:, 0])
    close(op.T @ y, want.T @ y)
    close(op.H @ y, want.T @ y)
    close(op.adjoint().T @ x, want @ x)
    close(y @ op, y @ want)
    close(torch.stack([y, 2 * y]) @ op, torch.stack([y, 2 * y]) @ want)
    for chunk in (1, 3, 256):
        close(op.to_dense(chunk), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elementary_operators(device: str, dtype: torch.dtype) -> None:
    n = 5
    d, M = gen(n).to(device, dtype), gen(n, n, seed=3).to(device, dtype)
    cases: list[tuple[LinearOperator, torch.Tensor]] = [
        (Dense(M), M),
        (Diagonal(d), torch.diag(d)),
        (Identity(n, dtype, device), torch.eye(n, dtype=dtype, device=device)),
        (FromFunction(lambda X: M @ X, (n, n), dtype, device, rmatmat=lambda Y: M.T @ Y), M),
        (Dense(M) + 0.5 * Diagonal(d), M + 0.5 * torch.diag(d)),
        (Dense(M) @ Diagonal(d), M @ torch.diag(d)),
    ]
    for op, want in cases:
        assert op.dtype == dtype
        assert op.device.type == device
        close(op.to_dense(), want)
        close(op.T.to_dense(), want.T)
        close(op.diagonal(chunk=2), want.diagonal())
        close(op.trace(), want.trace())
        assert op.symmetric == is_symmetric(want), op


def test_device_without_index_fits_tensors(device: str) -> None:
    """ "cuda" and "cuda:0" are one place."""
    eye = Identity(3, device=device)
    close(((Dense(torch.eye(3, device=device)) + eye) @ torch.ones(3, device=device)).cpu(), torch.full((3,), 2.0))


def test_base_class_diagonal_on_blocks() -> None:
    M = gen(7, 7)
    op = FromFunction(lambda X: M @ X, (7, 7), torch.float64)
    for chunk in (1, 3, 7, 100):
        close(op.diagonal(chunk), M.diagonal())


def test_lazy() -> None:
    calls = []
    op = FromFunction(lambda X: calls.append(1) or X, (3, 3), symmetric=True)
    combined = (op + 2 * op) @ op - op / 3
    assert not calls
    assert combined @ torch.ones(3) is not None
    assert len(calls) == 4


def test_repr() -> None:
    A = Dense(torch.eye(100, dtype=torch.float64))
    eye = Identity(100, torch.float64)
    assert repr(A) == "<Dense 100x100 float64>"
    assert repr(A + 0.1 * eye) == "<Sum 100x100 float64: Dense + 0.1 * Identity>"
    assert repr(A - eye - 2 * A) == "<Sum 100x100 float64: Dense - Identity - 2 * Dense>"
    assert repr(2 * (3 * A)) == "<Scaled 100x100 float64: 6 * Dense>"
    R = Dense(torch.ones(2, 3))
    assert repr(R.T @ R) == "<Product 3x3 float32: Dense.T @ Dense>"
    assert repr((R.T @ R + Identity(3)) @ R.T) == "<Product 3x2 float32: (Dense.T @ Dense + Identity) @ Dense.T>"
    assert "FromFunction(square)" in repr(FromFunction(torch.square, (2, 2)))


def test_symmetry_is_inferred() -> None:
    R, S = Dense(gen(3, 4)), Dense(torch.eye(3, dtype=torch.float64))
    assert (R.T @ R).symmetric
    assert (R @ R.T).symmetric
    assert (R.T @ S @ R).symmetric
    assert (S @ S).symmetric
    assert not (S @ Dense(torch.diag(gen(3)))).symmetric
    assert not Product(R.T, Dense(gen(3, 4))).symmetric
    assert (S + 2 * (R @ R.T)).symmetric
    assert S.T is S
    assert R.T.T is R
    assert not is_symmetric(torch.tensor([[1.0, 2.0], [2.1, 1.0]]))
    assert is_symmetric(torch.tensor([[1.0, 2.0], [2.0 + 2e-7, 1.0]]))
    assert not is_symmetric(torch.full((2, 2), torch.nan))


def test_scalars_of_every_kind() -> None:
    A = Dense(gen(2, 2))
    for two in (2, 2.0, torch.tensor(2.0), np.float64(2.0), np.float32(2)):
        close((two * A).to_dense(), 2 * A.matrix)
        close((A * two).to_dense(), 2 * A.matrix)
    close((A / 2).to_dense(), A.matrix / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_to_scipy(device: str, dtype: torch.dtype) -> None:
    R = gen(4, 6).to(device, dtype)
    S = Dense(R).to_scipy()
    assert S.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    x, X, y = np.ones(6), np.ones((6, 2)), np.ones(4)
    tol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2}[dtype]
    M = R.double().cpu().numpy()
    np.testing.assert_allclose(S @ x, M @ x, atol=tol)
    np.testing.assert_allclose(S @ X, M @ X, atol=tol)
    np.testing.assert_allclose(S.T @ y, M.T @ y, atol=tol)


def test_scipy_solver_runs_on_it() -> None:
    values = scipy_eigsh(Diagonal(torch.arange(50.0).double()).to_scipy(), 2, return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(values), [48, 49], atol=1e-9)


def test_function_may_differentiate() -> None:
    """An operator from a function keeps autograd on even where the caller switched it off."""

    def hessian_products(X: torch.Tensor) -> torch.Tensor:
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
        return torch.stack([torch.autograd.grad(g @ x, w, retain_graph=True)[0] for x in X.T], 1)

    op = aslinearoperator(hessian_products, (3, 3), torch.float64, symmetric=True)
    with torch.no_grad():
        close(op.to_dense(), 6 * torch.eye(3, dtype=torch.float64))


def test_aslinearoperator() -> None:
    A = Identity(2)
    assert aslinearoperator(A) is A
    assert isinstance(aslinearoperator(torch.eye(2)), Dense)
    with pytest.raises(InputError, match="needs shape="):
        aslinearoperator(lambda X: X)
    with pytest.raises(InputError, match="expected a tensor, got str"):
        aslinearoperator("A")  # type: ignore[arg-type]


def test_errors_name_both_sides() -> None:
    A, B = Dense(torch.ones(2, 3)), Dense(torch.ones(3, 2))
    double = Dense(torch.ones(2, 3).double())
    with pytest.raises(InputError, match="<Dense 3x2 float32> on cpu: their shapes do not fit"):
        A + B
    with pytest.raises(InputError, match=r"cannot multiply <Dense 2x3 float32> on cpu and <Dense 2x3 float32>"):
        A @ A
    with pytest.raises(InputError, match=r"<Dense 2x3 float32> on cpu and <Dense 2x3 float64> on cpu"):
        A + double
    with pytest.raises(
        InputError,
        match=r"<Dense 2x3 float32> by .* shape \[2\] on cpu: it takes a vector \[3\]",
    ):
        A @ torch.ones(2)
    with pytest.raises(InputError, match=r"shape \[3, 1, 1\]"):
        A @ torch.ones(3, 1, 1)
    with pytest.raises(InputError, match=r"float64 tensor of shape \[3\] on cpu: it takes .* of torch.float32"):
        A @ torch.ones(3).double()
    with pytest.raises(InputError, match="on meta"):
        A @ torch.ones(3, device="meta")
    with pytest.raises(InputError, match="wrap it with aslinearoperator"):
        A + torch.ones(2, 3)  # type: ignore[operator]
    with pytest.raises(InputError, match="by a finite number, not a Tensor"):
        A * torch.ones(2, 3)  # type: ignore[operator]
    with pytest.raises(InputError, match="by a finite number, not a float"):
        A * float("nan")
    with pytest.raises(ZeroDivisionError):
        A / 0
    with pytest.raises(InputError, match="a square operator is needed"):
        A.diagonal()
    with pytest.raises(InputError, match="chunk must be at least 1"):
        (2 * A).to_dense(chunk=0)
    with pytest.raises(TypeError):
        A @ "x"  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match="has no adjoint"):
        FromFunction(lambda X: X, (2, 2)).T @ torch.ones(2)
    with pytest.raises(InputError, match=r"gave \[2, 2\] instead of \[2, 1\]"):
        FromFunction(lambda X: torch.ones(2, 2), (2, 2)) @ torch.ones(2)


def test_bad_construction() -> None:
    with pytest.raises(InputError, match=r"matrix has shape .* 2 dimension"):
        Dense(torch.ones(3))
    with pytest.raises(InputError, match=r"values has shape .* 1 dimension"):
        Diagonal(torch.ones(3, 3))
    with pytest.raises(InputError, match="real floating-point"):
        Dense(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(InputError, match="matrix is complex"):
        Dense(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(InputError, match="whole numbers from 1 on"):
        Identity(0)
    with pytest.raises(InputError, match="must be square"):
        Dense(torch.ones(2, 3), symmetric=True)
    with pytest.raises(NotImplementedError, match="must define _matmat"):
        LinearOperator((2, 2), torch.float32, "cpu") @ torch.ones(2)


@pytest.mark.parametrize("chunk", [0, -1])
def test_blocks_of_no_columns_are_refused(chunk: int) -> None:
    """By those that need none, too: a matrix that is there already."""
    for A in (Dense(torch.eye(3)), Diagonal(torch.ones(3))):
        with pytest.raises(InputError, match="chunk must be at least 1"):
            A.to_dense(chunk=chunk)
