"""How stable leading directions are, by either way of finding them."""

import pytest
import torch

from biascope.geometry.moments import BlockMoments, leading
from biascope.linalg import subspace_overlap


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
