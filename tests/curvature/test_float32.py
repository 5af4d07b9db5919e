"""Single precision: long sums, checked eigenbases, small damping; and work done in parts."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.curvature import contract, kronecker
from biascope.curvature.contract import add_second_moment, symmetric
from biascope.curvature.kronecker import Homogeneous, KroneckerPiece, decompose, eigen_error, eigh_of
from biascope.curvature.lowrank import LowRankPiece
from biascope.curvature.quasidiagonal import ArrowPiece
from biascope.support.errors import InputError
from biascope.support.inputs import finite


@pytest.mark.parametrize("representation", ["ekfac", "kfac"])
def test_a_large_layer_can_be_solved_in_float32(representation: str) -> None:
    net = nn.Linear(300, 400)
    F = bs.fisher(net, torch.randn(64, 300), representation=representation, likelihood="gaussian")
    v = torch.randn(300 * 400 + 400)
    for damping in (1e-1, 1e-3):
        x = F.solve(v, damping=damping)
        assert float(((F @ x) + damping * x - v).norm() / v.norm()) < 1e-2
    with pytest.raises(InputError, match="singular"):
        F.solve(v, damping=0.0)


@pytest.mark.parametrize(("groups", "N", "d"), [(1, 72 * 4096 + 5, 8), (2, 5000, 400), (1, 10, 385), (3, 1, 2)])
@pytest.mark.parametrize("cached", [("cpu",), ()])
def test_second_moments(groups, N, d, cached, monkeypatch):
    """Long sums, large matrices of which a triangle is computed, groups. One float32 product is off by 2e-4."""
    monkeypatch.setattr(contract, "CACHED", cached)  # (): as on a GPU
    Y = torch.randn(groups, N, d, generator=torch.Generator().manual_seed(0))
    exact = Y.double().mT @ Y.double()
    total = torch.zeros(groups, d, d)
    add_second_moment(total, Y.mT)
    add_second_moment(total, Y[:, : N // 2].mT.contiguous())
    exact = exact + Y[:, : N // 2].double().mT @ Y[:, : N // 2].double()
    assert float((symmetric(total) - exact).abs().max() / exact.max()) < 3e-6


def test_a_wrong_eigenbasis_is_noticed_and_mended(monkeypatch):
    g = torch.Generator().manual_seed(0)
    X = torch.randn(3, 40, 20, generator=g)
    S = X.mT @ X
    values, U = torch.linalg.eigh(S)
    assert eigen_error(S, values, U) < 1
    bent = U.clone()
    bent[1, :, 3] += 1e-3 * bent[1, :, 4]
    assert [bool(eigen_error(*one) < 1) for one in zip(S[:, None], values[:, None], bent[:, None])] == [
        True,
        False,
        True,
    ]
    assert not eigen_error(S, values, bent) < 1
    assert not eigen_error(S[:1], values[:1] * (1 + 1e-3 * torch.rand(20, generator=g)), U[:1]) < 1
    assert not eigen_error(S, values * float("nan"), U) < 1
    real = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: real(A) if A.dtype == torch.float64 else (values, bent))
    ((s, V),) = eigh_of([S])
    assert float(((V * s[:, None]) @ V.mT - S).abs().max() / S.abs().max()) < 1e-5


@pytest.mark.parametrize("room", [0, 2**31])
def test_matrices_side_by_side_come_back_in_their_order(monkeypatch, room):
    """As on a GPU, whose streams are imitated."""

    class Stream:
        def __init__(self, device=None):
            pass

        def wait_stream(self, other):
            pass

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(kronecker, "ROOM", room)
    g = torch.Generator().manual_seed(0)
    stacks = [
        torch.randn(n, 2 * d, d, generator=g, dtype=torch.float64) for n, d in ((1, 30), (2, 12), (1, 31), (3, 5))
    ]
    stacks = [X.mT @ X for X in stacks]
    for S, (values, U) in zip(stacks, kronecker._side_by_side(stacks), strict=True):
        torch.testing.assert_close((U * values[:, None]) @ U.mT, S)
    real = torch.linalg.eigh

    def fails_once(A):
        if A.shape[-1] == 12:
            raise RuntimeError("did not converge")
        return real(A)

    monkeypatch.setattr(torch.linalg, "eigh", fails_once)
    assert [pair is None for pair in kronecker._side_by_side(stacks)] == [False, True, False, False]


def test_factors_of_one_size_are_decomposed_together():
    g = torch.Generator().manual_seed(0)

    def factor(groups, d):
        X = torch.randn(groups, 2 * d, d, generator=g, dtype=torch.float64)
        return X.mT @ X

    shapes = [(1, 3, 4), (2, 4, 3), (1, 5, 3)]
    pieces = [
        KroneckerPiece((f"w{j}",), factor(n, o), factor(n, i), Homogeneous(n, o, i))
        for j, (n, o, i) in enumerate(shapes)
    ]
    alone = [KroneckerPiece(p.names, p.B, p.A, p.layout).eigen for p in pieces]
    decompose(pieces)
    for piece, E in zip(pieces, alone):
        assert torch.equal(piece.eigen.U_B, E.U_B)
        assert torch.equal(piece.eigen.U_A, E.U_A)
        assert torch.equal(piece.eigen.s, E.s)


def test_products_in_parts_are_the_products():
    g = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(10, 6, generator=g, dtype=torch.float64)
    v = torch.randn(sum(p.numel() for p in net.parameters()), 2, generator=g, dtype=torch.float64)
    whole, parts = (bs.fisher(net, x, "implicit", batch_size=b) for b in (None, 3))
    torch.testing.assert_close(whole @ v, parts @ v)
    torch.testing.assert_close(whole.quadratic_form(v), parts.quadratic_form(v))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_is_finite(bad):
    t = torch.full((30, 7), 3e38)
    assert all(finite([t, t[:0]]))
    t[17, 3] = bad
    assert finite([t]) == [False]
    assert finite([t[:0], t, torch.zeros(2)]) == [True, False, True]


def test_low_rank_solve_and_sample_in_float32() -> None:
    """A Gram with eigenvalues over nine decades: dividing by sqrt(lambda) would lose all digits (4.5e-3 was seen)."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.logspace(0, -4.5, 60, dtype=torch.float64)
    rows = torch.randn(60, 400, generator=g, dtype=torch.float64) * sizes[:, None]
    J = torch.linalg.qr(torch.randn(60, 60, generator=g, dtype=torch.float64)).Q @ rows
    X = torch.randn(400, 3, generator=g, dtype=torch.float64)
    F = J.T @ J
    damping = float(F.trace() / 400)
    piece = LowRankPiece(("w",), J.float())
    exact = torch.linalg.solve(F + damping * torch.eye(400, dtype=torch.float64), X)
    assert (piece.solve(X.float(), damping, "exact").double() - exact).norm() < 1e-5 * exact.norm()
    values, vectors = torch.linalg.eigh(F + damping * torch.eye(400, dtype=torch.float64))
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T @ X
    assert (piece.sample(X.float(), damping, "exact").double() - root).norm() < 1e-5 * root.norm()


@pytest.mark.parametrize("left", [1e-3, 1e-4])
def test_an_arrow_of_many_weights_is_solved_in_float32(left: float) -> None:
    """The weights take nearly all of the bias's variance: rounding of their sum must not pass for a singular matrix."""
    inputs = 4608  # of a convolution with 512 channels
    piece = ArrowPiece(
        ("w", "b"), torch.ones(1, inputs), torch.full((1, inputs), ((1 - left) / inputs) ** 0.5), torch.ones(1)
    )
    v = torch.randn(inputs + 1, 1, generator=torch.Generator().manual_seed(0))
    M = torch.diag(torch.cat([piece.D[0], piece.Db]).double())
    M[-1, :-1] = M[:-1, -1] = piece.C[0].double()
    exact = torch.linalg.solve(M, v.double())
    assert float((piece.solve(v, 0.0, "exact") - exact).norm() / exact.norm()) < 2e-7 / left
    bare = ArrowPiece(("w", "b"), torch.ones(1, 4), torch.full((1, 4), 0.5), torch.ones(1))
    with pytest.raises(InputError, match="singular"):
        bare.solve(v[:5], 0.0, "exact")
