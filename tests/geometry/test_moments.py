"""How stable leading directions are, by either way of finding them; small eigenvalues of an average geometry."""

import pytest
import torch

from biascope.geometry import AverageGeometry
from biascope.geometry.moments import BlockMoments, leading
from biascope.linalg import Dense, subspace_overlap


@pytest.mark.parametrize("dense", [False, True])
def test_leading_eigenvectors_of_a_known_matrix(dense: bool) -> None:
    Q = torch.linalg.qr(torch.randn(60, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    values = torch.tensor([9.0, 7.0, 5.0] + [1.0] * 57, dtype=torch.float64)
    found = leading((Q * values) @ Q.T, 3, dense)
    assert found.shape == (60, 3)
    assert subspace_overlap(found, Q[:, :3]) == pytest.approx(1.0, abs=1e-9)


def test_leading_eigenvectors_far_below_the_largest() -> None:
    """One large eigenvalue and a slow tail at 1e-7 of it, where Lanczos with tol=1e-6 calls anything converged."""
    Q = torch.linalg.qr(torch.randn(800, 800, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    values = torch.cat([torch.ones(1), 1e-7 * torch.arange(1, 800) ** -0.5]).double()
    found = leading((Q * values) @ Q.T, 60, dense=False)
    assert subspace_overlap(found, Q[:, :60]) == pytest.approx(1.0, abs=1e-9)  # 0.98 by Lanczos alone


def test_halves_that_see_other_directions_do_not_overlap() -> None:
    moments = BlockMoments(dimension=6, blocks=2)
    rows = torch.eye(6)[[0, 3, 1, 4]]  # networks 0 and 2 see the first axes, 1 and 3 others
    moments.add(0, rows[:, None])
    assert moments.split_half_overlap(2) == pytest.approx(0.0, abs=1e-9)
    moments.add(4, rows[[1, 0, 3, 2]][:, None])  # now both have seen all four
    assert moments.split_half_overlap(4) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("kind", ["geometry", "evolution"])
def test_eigenvalues_far_below_the_largest(kind: str) -> None:
    """A slow tail far below the largest eigenvalue, next to D / 4: each one to 1e-5 of itself, zeros as zeros."""
    Q = torch.linalg.qr(torch.randn(800, 800, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    sign = 1.0 if kind == "geometry" else -1.0
    for scale, k in ((1e-7, 60), (1e-10, 30), (1e-10, 199)):
        values = torch.cat([torch.ones(1), sign * scale * torch.arange(1, 800) ** -0.5]).double()
        M = (Q * values) @ Q.T
        M = (M + M.T) / 2
        found = AverageGeometry(Dense(M, symmetric=True), M, (800,), 1, 1, 0, float("nan"), kind).eigh(k)
        torch.testing.assert_close(found.values, values[:k], rtol=1e-5, atol=0)
        assert found.converged.all()
    values = torch.cat([torch.ones(5), torch.zeros(795)]).double()
    M = (Q * values) @ Q.T
    found = AverageGeometry(Dense(M, symmetric=True), M, (800,), 1, 1, 0, float("nan"), kind).eigh(9)
    torch.testing.assert_close(found.values, values[:9], rtol=1e-10, atol=1e-12)
    assert found.converged.all()
