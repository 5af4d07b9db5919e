import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biascope.errors import InputError
from biascope.linalg import column_dots, fix_signs, long_dot, psd_eigh, stable, symmetrise, thin_svd

close = torch.testing.assert_close


def test_symmetrise(randn) -> None:  # type: ignore[no-untyped-def]
    S = symmetrise(randn(2, 5, 5))
    assert torch.equal(S, S.mT)
    close(symmetrise(S), S)
    with pytest.raises(InputError, match=r"\[2, 3\]"):
        symmetrise(torch.ones(2, 3))


@settings(deadline=None)
@given(n=st.integers(1, 12), rank=st.integers(0, 12), seed=st.integers(0, 99))
def test_psd_eigh(n: int, rank: int, seed: int) -> None:
    R = torch.randn(n, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    M = R @ R.T
    values, vectors = psd_eigh(M)
    close((vectors * values) @ vectors.T, M, atol=1e-10, rtol=0)
    close(vectors.T @ vectors, torch.eye(n).double(), atol=1e-12, rtol=0)
    assert (values >= 0).all()
    assert (values[:-1] >= values[1:]).all()
    assert (vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) > 0).all()


def test_psd_eigh_dtype_clip_and_signs(device: str) -> None:
    M = torch.diag(torch.tensor([2.0, -1e-3, 5.0], device=device))
    values, vectors = psd_eigh(M)
    assert values.dtype == torch.float32
    assert values.device.type == device
    assert values.tolist() == [5, 2, 0]
    assert psd_eigh(M, clip=False).values[2] < 0
    close(fix_signs(-vectors), vectors)
    close(psd_eigh(M.bfloat16()).values.float(), values, atol=0.02, rtol=0.01)


def test_psd_eigh_survives_a_failing_solver(monkeypatch: pytest.MonkeyPatch, with_spectrum) -> None:  # type: ignore[no-untyped-def]
    M = with_spectrum([3.0, 2, 1, 0])
    true, failures = torch.linalg.eigh, [0]

    def fail_twice(S: torch.Tensor) -> object:
        failures[0] += 1
        if failures[0] <= 2:
            raise torch.linalg.LinAlgError("no convergence")
        return true(S)

    monkeypatch.setattr(stable.torch.linalg, "eigh", fail_twice)
    close(psd_eigh(M).values, torch.tensor([3.0, 2, 1, 0]).double(), atol=1e-10, rtol=0)
    assert failures[0] == 3
    monkeypatch.setattr(stable.torch.linalg, "eigh", lambda S: (_ for _ in ()).throw(torch.linalg.LinAlgError("no")))
    values, vectors = psd_eigh(M)
    close((vectors * values) @ vectors.T, M, atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", [(50, 4), (4, 4), (3, 7)])
def test_thin_svd(device: str, shape: tuple[int, int], randn) -> None:  # type: ignore[no-untyped-def]
    X = randn(*shape)
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        U, s, Vh = (t.cpu().double() for t in thin_svd(X.to(device, dtype)))
        close(s, torch.linalg.svdvals(X), atol=10 * atol, rtol=0)
        close((U * s) @ Vh, X, atol=10 * atol, rtol=0)
        close(U.T @ U, torch.eye(len(s)).double(), atol=atol, rtol=0)


def test_psd_eigh_bad_input() -> None:
    with pytest.raises(InputError, match="3x3 matrix holds NaN"):
        psd_eigh(torch.full((3, 3), torch.nan))
    with pytest.raises(InputError, match="square"):
        psd_eigh(torch.ones(2, 3))
    with pytest.raises(InputError, match=r"matrix \[n, n\]"):
        psd_eigh(torch.ones(2, 2, 2))
    with pytest.raises(InputError, match="floating-point"):
        psd_eigh(torch.ones(2, 2, dtype=torch.int32))


@settings(deadline=None, max_examples=60)
@given(m=st.integers(0, 4), n=st.integers(0, 4), p=st.integers(0, 70), chunk=st.integers(1, 80))
def test_long_dot_any_shape(m: int, n: int, p: int, chunk: int) -> None:
    g = torch.Generator().manual_seed(m + 10 * n + 100 * p)
    A, B = torch.randn(m, p, generator=g, dtype=torch.float64), torch.randn(n, p, generator=g, dtype=torch.float64)
    close(long_dot(A, B, chunk), A @ B.T, atol=1e-12, rtol=0)
    close(long_dot(B.T.contiguous().T, A.T.contiguous().T, chunk), B @ A.T, atol=1e-12, rtol=0)  # strided


def test_long_dot_crosses_groups(randn) -> None:  # type: ignore[no-untyped-def]
    """So many output entries that the chunks are taken in several groups."""
    A = randn(600, 1000).float()
    close(long_dot(A, A, chunk=100).double(), A.double() @ A.double().T, atol=2e-4, rtol=1e-6)


def test_long_dot_is_accurate_where_a_plain_sum_is_not(device: str) -> None:
    """2.36 million products: adding them one after another in float32 loses three digits, in chunks none."""
    p = 2_360_000
    g = torch.Generator().manual_seed(0)
    A, B = (torch.rand(2, p, generator=g).to(device) for _ in range(2))
    exact = A.double() @ B.double().T
    one_after_another = np.cumsum((A[0] * B[0]).cpu().numpy(), dtype=np.float32)[-1].item()

    def error(got: torch.Tensor) -> float:
        return ((got.double() - exact).abs() / exact).max().item()

    assert error(long_dot(A, B)) < 3e-7
    assert error(long_dot(A, B, dtype=torch.float64)) < 3e-7
    assert long_dot(A, B, dtype=torch.float64).dtype == torch.float64
    assert abs(one_after_another / exact[0, 0].item() - 1) > 1e-4
    # half types are widened chunk by chunk: what remains is the rounding of the inputs
    h = A.bfloat16()
    close(long_dot(h, h, dtype=torch.float64), h.double() @ h.double().T, rtol=1e-6, atol=0)


def test_column_dots(randn) -> None:  # type: ignore[no-untyped-def]
    X, Y = randn(1000, 3), randn(1000, 3, seed=1)
    close(column_dots(X.float(), Y.float()), (X * Y).sum(0), atol=1e-4, rtol=0)
    close(column_dots(X, Y), (X * Y).sum(0))


def test_long_dot_bad_input() -> None:
    with pytest.raises(InputError, match=r"\[2, 3\] and \[2, 4\]"):
        long_dot(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(InputError, match=r"A is torch\.float32 on cpu, B is torch\.float64"):
        long_dot(torch.ones(2, 3), torch.ones(2, 3).double())
    with pytest.raises(InputError, match="chunk must be at least 1"):
        long_dot(torch.ones(2, 3), torch.ones(2, 3), chunk=0)
