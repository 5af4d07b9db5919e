"""How stable leading directions are, by either way of finding them; small eigenvalues of an average geometry."""

import pytest
import torch

from biascope.geometry import AverageGeometry
from biascope.geometry.moments import BlockMoments, leading
from biascope.linalg import subspace_overlap
from biascope.linalg.elementary import Dense


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
    assert moments.split_half_overlap(2) == (pytest.approx(0.0, abs=1e-9), 2)
    moments.add(4, rows[[1, 0, 3, 2]][:, None])  # now both have seen all four
    assert moments.split_half_overlap(4) == (pytest.approx(1.0, abs=1e-9), 4)


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


@pytest.mark.parametrize("center", [False, True])
def test_a_few_rows_say_what_their_sums_say(center: bool) -> None:
    """Rows that are kept and sums of products give the same errors and overlaps; with more rows there are only sums."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 3, 96, generator=g, dtype=torch.float64) * torch.linspace(2, 0.1, 96, dtype=torch.float64)
    V = torch.linalg.qr(torch.randn(96, 96, generator=g, dtype=torch.float64)).Q
    few, summed = BlockMoments(96, 4), BlockMoments(96, 4)
    for moments in (few, summed):
        moments.add(0, rows[:5])
        moments.add(5, rows[5:])
    assert all(held is not None and len(held) == 6 for held in few.few)  # 96 / 16
    summed.few = [None] * 4
    torch.testing.assert_close(few.spread(V, center), summed.spread(V, center), rtol=1e-10, atol=0)
    expected, k = summed.split_half_overlap(5, center)
    assert few.split_half_overlap(5, center) == (pytest.approx(expected, abs=1e-8), k)
    assert k == 5
    few.add(8, rows[:1])
    assert few.few[0] is None
    torch.testing.assert_close(few.spread(V), _brute_spread(torch.cat([rows, rows[:1]]), V), rtol=1e-10, atol=0)


def _brute_spread(rows: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    """Network t is in block t mod 4: spread of the four means of sum_r (r . u)^2."""
    each = (rows @ V).square().sum(1)  # [T, k]
    means = torch.stack([each[b::4].mean(0) for b in range(4)])
    return means.std(0) / 2


def test_rows_of_mixed_products_are_not_kept() -> None:
    moments = BlockMoments(64, 2)
    a, b = torch.randn(2, 4, 1, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments.add(0, a, b)
    V = torch.eye(64, dtype=torch.float64)
    values = 2 * (a * b)[:, 0]
    expected = torch.stack([values[:2:2].add(values[2::2]) / 2, values[1::2].mean(0, keepdim=True)]).std(0)[0] / 2**0.5
    torch.testing.assert_close(moments.spread(V), expected, rtol=1e-10, atol=1e-14)


def test_eigenpairs_of_a_few_rows_are_those_of_their_matrix() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 2, 64, generator=g, dtype=torch.float64) * torch.logspace(0, -9, 64, dtype=torch.float64)
    few, summed = BlockMoments(64, 4), BlockMoments(64, 4)
    few.add(0, rows)
    summed.add(0, rows)
    summed.few = [None] * 4
    M = few.matrix()
    for moments in (few, summed):
        values, U = moments.eigh()
        torch.testing.assert_close(U.T @ U, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-12)
        torch.testing.assert_close((U * values) @ U.T, M, rtol=0, atol=1e-12 * float(M.norm()))
        assert bool((values.diff() <= 0).all())
    assert not few.eigh().values[12:].any()  # twelve rows
    exact = torch.linalg.svdvals(rows.reshape(12, 64)).square() / 6
    torch.testing.assert_close(few.eigh().values[:12], exact, rtol=1e-10, atol=0)
    torch.testing.assert_close(few.eigh(center=True).values, summed.eigh(center=True).values, rtol=1e-10, atol=1e-14)


def test_two_rows_about_their_mean_tell_no_spread() -> None:
    """Both are as far from it: the standard error was 0."""
    moments = BlockMoments(dimension=2, blocks=2)
    moments.add(0, torch.tensor([[[3.0, 0.0]], [[1.0, 2.0]]]))
    assert moments.spread(torch.eye(2, dtype=torch.float64), center=True).isnan().all()
    assert torch.equal(moments.spread(torch.eye(2, dtype=torch.float64)), torch.tensor([4.0, 2.0], dtype=torch.float64))
