import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biascope.linalg import psd_eigh, stable
from biascope.linalg.stable import fix_signs, symmetrise, thin_svd
from biascope.support.errors import InputError

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
    with pytest.raises(InputError, match="2 dimension"):
        psd_eigh(torch.ones(2, 2, 2))
    with pytest.raises(InputError, match="floating-point"):
        psd_eigh(torch.ones(2, 2, dtype=torch.int32))
