"""What rounding may take away: powers and inverses of large layers, low rank, and covariances, in float32."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.curvature.kronecker import Homogeneous, KroneckerPiece
from biascope.curvature.lowrank import LowRankPiece
from biascope.curvature.pieces import DiagonalPiece
from biascope.support.errors import InputError


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


@pytest.mark.parametrize("damping", [1e-2, 1e-4, 1e-6])
def test_factored_damping_in_float32(damping: float) -> None:
    """The inverse left out damped eigenvalues (0.99 off at 1e-6); the solve refused 1e-4. Oracle in float64."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(1500, 500, generator=g) * torch.logspace(-3, 1, 500)
    b = torch.randn(300, 6, generator=g) * torch.logspace(-2, 0, 6)
    A, B = (bs.linalg.stable.symmetrise(x.T @ x / len(x)) for x in (a, b))
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


def offset_case() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network whose loss gradients have mean^2 / variance ~ 1e6; and their exact covariance [p, p]."""
    g = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2))
    for p in net.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=g)
    x = 1 + 1e-3 * torch.randn(200, 1, 3, generator=g)
    y = torch.tensor([50.0, -30.0]) + 1e-2 * torch.randn(200, 2, generator=g)
    wide = copy.deepcopy(net).double()
    rows = []
    for a, b in zip(x.double(), y.double()):
        loss = 0.5 * (wide(a[None]) - b).square().sum()
        rows.append(torch.cat([t.flatten() for t in torch.autograd.grad(loss, list(wide.parameters()))]))
    R = torch.stack(rows)
    cov = torch.cov(R.T, correction=0)
    assert float(R.mean(0).square().sum() / cov.trace()) > 5e5
    return net, x, y, cov


@pytest.mark.parametrize(
    "representation", ["dense", "block", "diagonal", "quasidiagonal", "ekfac", "lowrank", "implicit"]
)
def test_covariances_in_float32(representation: str) -> None:
    """The second moment minus the mean's square, in float32, had no digit left and negative variances."""
    net, x, y, cov = offset_case()
    C = bs.curvature.gradient_covariance(net, (x, y), representation, likelihood="gaussian", batch_size=64)
    assert C.dtype == torch.float32
    # gradients are known to a few 6e-8 of their mean, deviations to 1e3 times that
    tolerance = 3e-3
    assert relative(C.trace(), cov.trace()) < tolerance
    assert float(C.diagonal().min()) >= 0
    if representation != "ekfac":  # exact in its own basis only
        assert relative(C.diagonal(), cov.diagonal()) < tolerance
    if representation in ("dense", "lowrank", "implicit"):
        V = torch.randn(len(cov), 3, generator=torch.Generator().manual_seed(1))
        assert relative(C @ V, cov @ V.double()) < tolerance
        assert relative(C @ V[:, 0], cov @ V[:, 0].double()) < tolerance
        assert relative(C.quadratic_form(V), ((cov @ V.double()) * V.double()).sum(0)) < tolerance
        assert relative(C.frobenius_norm(), cov.norm()) < tolerance


@pytest.mark.parametrize("estimator", ["exact", "monte-carlo"])
def test_centred_products_with_several_cotangents(estimator: str) -> None:
    """The implicit products of a centred Fisher matrix are those of the dense one, in float64."""
    g = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, V = (torch.randn(n, k, generator=g, dtype=torch.float64) for n, k in ((11, 3), (44, 2)))
    options = {"estimator": estimator, "samples": 3, "centred": True, "precision": "float64", "batch_size": 4}
    dense = bs.fisher(net, x, "dense", **options)
    implicit = bs.fisher(net, x, "implicit", **options)
    assert relative(implicit @ V, dense @ V) < 1e-10
    assert relative(implicit.quadratic_form(V), dense.quadratic_form(V)) < 1e-10
    assert relative(implicit.trace(), dense.trace()) < 1e-10


@pytest.mark.parametrize("representation", ["diagonal", "implicit"])
def test_a_covariance_below_rounding_says_so(representation: str) -> None:
    net, x = nn.Linear(3, 1), torch.ones(20, 3)
    y = torch.full((20, 1), 7.0)
    with pytest.warns(UserWarning, match="do not differ"):
        trace = bs.curvature.gradient_covariance(net, (x, y), representation, likelihood="gaussian").trace()
    assert float(trace) < 1e-10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
        bs.curvature.gradient_covariance(net, (x, torch.ones(20, 1)), representation, likelihood="gaussian").trace()


def test_an_estimated_frobenius_norm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    F = bs.fisher(nn.Linear(40, 3), torch.randn(9, 40, generator=torch.Generator().manual_seed(0)), "implicit")
    exact = float(F.frobenius_norm())
    monkeypatch.setattr("biascope.curvature.implicit.GRAM_BYTES", 0)
    with pytest.warns(UserWarning, match=r"is an estimate, .* \+- "):
        found = float(F.frobenius_norm())
    error = float(F.estimate_frobenius_norm().standard_error)
    assert 0 < error < 0.3 * exact
    assert abs(found - exact) < 4 * error


@pytest.mark.parametrize("damping", [1e-6, 1e-9])
def test_ekfac_solves_with_a_damping_below_its_rounding(damping: float) -> None:
    """Its eigenvalues are means of squares, which know zeros to eps^2; a tenth of their mean may be that small."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(40, 5)
    g = torch.Generator().manual_seed(1)
    x, v = torch.randn(12, 40, generator=g), torch.randn(205, generator=g)
    F, exact = (bs.fisher(module, data) for module, data in ((net, x), (copy.deepcopy(net).double(), x.double())))
    largest = float(exact.eigenvalues().max())
    found, truth = F.solve(v, damping * largest), exact.solve(v.double(), damping * largest)
    assert relative(found, truth) < 1e-3
