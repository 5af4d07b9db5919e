"""What rounding may take away: powers and inverses of large layers, and low rank, in single precision."""

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.curvature.kronecker import Homogeneous, KroneckerPiece
from biascope.curvature.lowrank import LowRankPiece
from biascope.curvature.pieces import DiagonalPiece
from biascope.errors import InputError


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_a_power_of_a_diagonal_leaves_out_zeros_alone() -> None:
    """A floor that grew with the layer left out every entry of a layer of 3000 x 3000, all of them equal."""
    d = torch.full((3000 * 3000,), 0.3)
    assert relative(DiagonalPiece(("w",), d).power(-1.0, 0.0).diagonal(), 1 / d) < 1e-7
    d = torch.logspace(0, -30, 500)
    d[7] = 0.0
    inverse = DiagonalPiece(("w",), d).power(-1.0, 0.0).diagonal()
    assert float(inverse[7]) == 0.0
    assert torch.equal(inverse[d > 0], 1 / d[d > 0])
    cut = DiagonalPiece(("w",), d).power(-1.0, 1e-3).diagonal()  # a cutoff that is asked for
    assert torch.equal(cut > 0, d > 1e-3)


def test_subnormal_entries_have_lost_their_digits() -> None:
    d = torch.tensor([1.0, 1e-40])
    assert DiagonalPiece(("w",), d).power(-1.0, 0.0).diagonal().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("representation", ["diagonal", "ekfac", "kfac"])
def test_powers_of_a_large_layer_undo_it(representation: str) -> None:
    """512 x 512 and eigenvalues within a factor 500: all are above rounding, none is left out."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 512, generator=g) * torch.logspace(-0.5, 0, 512)
    F = bs.fisher(nn.Linear(512, 512, bias=False), x, representation, likelihood="gaussian", estimator="monte-carlo")
    v = torch.randn(512 * 512, generator=g)
    inverse = F.power(-1.0)
    s = F.eigenvalues()
    assert float(s.min() / s.max()) > 1e-4
    assert int((inverse.eigenvalues() == 0).sum()) == 0
    assert relative(F @ (inverse @ v), v) < 1e-3


def test_a_power_of_ekfac_leaves_out_what_the_data_do_not_reach() -> None:
    """20 examples in 60 dimensions: 40 directions of the inputs are rounding in float32."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20, 60, generator=g)
    F = bs.fisher(nn.Linear(60, 3, bias=False), x, "ekfac", likelihood="gaussian")
    for metric in (F, -1.0 * F):
        assert int((metric.power(-1.0).eigenvalues() != 0).sum()) == 3 * 20
    v = torch.randn(180, generator=g)
    assert relative(F @ (F.power(-1.0) @ (F @ v)), F @ v) < 1e-4
    damped = F.inverse(0.1)  # its eigenvalue where the data do not reach is 10, no rounding
    assert relative(damped.power(-1.0) @ v, F @ v + 0.1 * v) < 1e-4


def test_powers_of_a_kronecker_eigenbasis() -> None:
    """Eigenvalues within 1e4, each known by itself; and of a product whose factor is singular."""
    E = bs.linalg.KroneckerEigen(torch.eye(2000), torch.eye(2), torch.logspace(-4, 0, 4000).reshape(2000, 2))
    assert torch.equal(E.power(-1).s, 1 / E.s)
    X = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    K = bs.linalg.KroneckerOperator(torch.eye(3), X.T @ X)
    assert int((K.eigen().power(-1).s != 0).sum()) == 3 * 5


@pytest.mark.parametrize("damping", [1e-2, 1e-4, 1e-6])
def test_factored_damping_in_float32(damping: float) -> None:
    """The inverse left out damped eigenvalues (0.99 off at 1e-6); the solve refused 1e-4. Oracle in float64."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(1500, 500, generator=g) * torch.logspace(-3, 1, 500)
    b = torch.randn(300, 6, generator=g) * torch.logspace(-2, 0, 6)
    A, B = (bs.linalg.symmetrise(x.T @ x / len(x)) for x in (a, b))
    layout = Homogeneous(1, 6, 500)
    piece = KroneckerPiece(("w",), B[None], A[None], layout)
    exact = KroneckerPiece(("w",), B[None].double(), A[None].double(), layout)
    X = torch.randn(3000, 2, generator=g)
    pi = float((exact.A[0].trace() / 500 / (exact.B[0].trace() / 6)).sqrt())
    left = exact.B[0] + damping**0.5 / pi * torch.eye(6, dtype=torch.float64)
    right = exact.A[0] + damping**0.5 * pi * torch.eye(500, dtype=torch.float64)
    V = X.double().T.reshape(2, 6, 500)
    oracle = torch.linalg.solve(left, torch.linalg.solve(right, V, left=False)).reshape(2, 3000).T
    # the smallest damped eigenvalue of A is known to eps times the largest over it
    tolerance = 1e-5 + 20 * 1.2e-7 * float(exact.A[0].diagonal().max()) / (damping**0.5 * pi)
    solved, inverse = piece.solve(X, damping, "factored"), piece.inverse(damping, "factored")
    assert inverse is not None
    assert relative(exact.solve(X.double(), damping, "factored"), oracle) < 1e-8
    assert relative(solved, oracle) < tolerance
    assert relative(inverse.matmat(X), solved) < 1e-3
    Z = torch.randn(3000, 1, generator=g)  # a draw S has S^T F S = Z^T Z
    S = piece.sample(Z, damping, "factored").double().reshape(6, 500)
    assert float((S * (left @ S @ right)).sum() / Z.square().sum()) == pytest.approx(1.0, abs=tolerance)
    with pytest.raises(InputError, match="input factor of w is singular"):
        KroneckerPiece(("w",), B[None], torch.zeros(1, 500, 500), layout).solve(X, 0.0, "factored")


@pytest.mark.parametrize("damping", [1e-3, 1e-5, 1e-6])
def test_low_rank_solves_in_the_span_in_float32(damping: float) -> None:
    """Right sides J^T u lie in the span: `drop` must agree with the exact solve, and was 0.07, 0.7 and 0.99 off."""
    g = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(60, 60, generator=g, dtype=torch.float64)).Q
    rows = torch.linalg.qr(torch.randn(500, 60, generator=g, dtype=torch.float64)).Q.T
    J = (U @ (torch.logspace(0, -5, 60, dtype=torch.float64)[:, None] * rows)).float()
    X = (J.double().T @ torch.randn(60, 3, generator=g, dtype=torch.float64)).float()
    F = J.double().T @ J.double()
    exact = torch.linalg.solve(F + damping * torch.eye(500, dtype=torch.float64), X.double())
    piece = LowRankPiece(("w",), J)
    keep, drop = (relative(piece.solve(X, damping, "exact", c), exact) for c in ("keep", "drop"))
    assert drop < max(1e-5, 2 * keep)
    V = piece._eigen[1]
    assert float((V.T @ V - torch.eye(V.shape[1])).abs().max()) < 1e-5  # 0.4 with a Gram in float32


def test_a_power_of_low_rank_in_float32() -> None:
    """F F^-1 F = F, and the root squared, on four decades."""
    g = torch.Generator().manual_seed(0)
    J = torch.randn(30, 200, generator=g) * torch.logspace(0, -2, 30)[:, None]
    piece, X = LowRankPiece(("w",), J), torch.randn(200, 2, generator=g)
    assert relative(piece.matmat(piece.power(-1.0, 0.0).matmat(piece.matmat(X))), piece.matmat(X)) < 1e-4
    root = piece.power(0.5, 0.0)
    assert relative(root.matmat(root.matmat(X)), piece.matmat(X)) < 1e-5


def test_a_low_rank_metric_of_zero() -> None:
    F = bs.fisher(nn.Linear(3, 2, bias=False), torch.zeros(4, 3), "lowrank")
    assert float(F.spectral_norm()) == 0.0
    zero = F.power(-1.0)
    assert float(zero.trace()) == float(zero.spectral_norm()) == float(zero.power(0.5).frobenius_norm()) == 0.0
    v = torch.ones(6)
    assert torch.equal(F.solve(v, damping=0.5), 2 * v)
    assert torch.equal(zero.solve(v, damping=0.5), 2 * v)
    assert torch.equal(F.solve(v, damping=0.5, complement="drop"), 0 * v)
