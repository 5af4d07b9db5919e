"""Figures 2.1, 3.1, 3.7 and 4.3 d: closed forms, and what must hold at smoke size."""

import math
from pathlib import Path

import pytest
import torch
from torch import distributions, nn

from biascope.curvature.plan import REPRESENTATIONS
from biascope.kernels import ntk
from biascope.studies import HeatMap, Run, StudyResult, configure, execute
from biascope_papers.ekfac.autoencoder import costs, steepest
from biascope_papers.ekfac.gaussians import GAUSSIANS, fisher_rao, kl
from biascope_papers.ekfac.kernel_blocks import blocks, normalised, pca, separation
from biascope_papers.ekfac.representations import REPRESENTATIONS as SHOWN
from biascope_papers.ekfac.theorems import best_scalings
from claim_outcome import outcome


def run(tmp_path: Path, name: str, **overrides: object) -> StudyResult:
    return execute(Run.create(tmp_path / "run", configure(name, "smoke", seed=1, overrides=overrides)))


# ---- Theorem 1


def test_scalings_by_least_squares_are_the_diagonal_in_the_basis(tmp_path: Path) -> None:
    """Q orthogonal: the matrices q_i q_i^T are orthonormal, so that the best D is diag(Q^T G Q)."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(6, 6, generator=g, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(6, 6, generator=g, dtype=torch.float64))[0]
    torch.testing.assert_close(best_scalings(X @ X.T, Q), (Q.T @ X @ X.T @ Q).diagonal())
    result = run(tmp_path, "ekfac/theorem1")
    assert outcome("linearization/theorem 1", result.numbers) == "holds"
    assert result.numbers["smallest error of KFAC minus EKFAC"].value > 1e-3  # not the same matrix


# ---- 2.1


@pytest.mark.parametrize("pair", ["AB", "BA", "CD", "AC", "DB"])
def test_the_integral_is_the_divergence(pair: str) -> None:
    p, q = (distributions.Normal(mu, math.sqrt(s2)) for mu, s2 in (GAUSSIANS[name] for name in pair))
    exact = float(distributions.kl_divergence(p, q))
    assert kl(GAUSSIANS[pair[0]], GAUSSIANS[pair[1]]) == pytest.approx(exact, rel=1e-6)


def test_the_geodesic_has_the_length_of_the_fisher_metric() -> None:
    """Locally d^2 = dmu^2 / s2 + ds2^2 / (2 s2^2); and it is a distance."""
    at = (0.3, 0.7)
    for step in ((1e-4, 0.0), (0.0, 1e-4), (1e-4, -2e-4)):
        squared = step[0] ** 2 / at[1] + step[1] ** 2 / (2 * at[1] ** 2)
        moved = (at[0] + step[0], at[1] + step[1])
        assert fisher_rao(at, moved) == pytest.approx(math.sqrt(squared), rel=1e-3)
    a, b, c = GAUSSIANS["A"], GAUSSIANS["B"], GAUSSIANS["C"]
    assert fisher_rao(a, c) <= fisher_rao(a, b) + fisher_rao(b, c)
    assert fisher_rao(a, b) == fisher_rao(b, a)


def test_fig2_1(tmp_path: Path) -> None:
    result = run(tmp_path, "ekfac/fig2.1")
    assert {outcome(f"linearization/2.1{part}", result.numbers) for part in ("", ", parameters")} == {"holds"}
    assert result.numbers["KL(C || D)"].value == pytest.approx(2 + math.sqrt(3), rel=1e-9)
    assert result.numbers["KL(B || A)"].value == pytest.approx(0.5 - math.log(2) / 2, rel=1e-9)


# ---- 3.1


def test_fig3_1_runs_for_all_and_the_exact_ones_agree(tmp_path: Path) -> None:
    result = run(tmp_path, "ekfac/fig3.1", n=30, width=6)
    assert outcome("linearization/3.1", result.numbers) == "holds"
    errors = {name: number.value for name, number in result.numbers.items()}
    assert SHOWN == REPRESENTATIONS  # a new representation belongs into this figure
    assert errors.pop("representations that fail") == 0
    assert len(errors) == 4 * len(REPRESENTATIONS)
    assert errors["relative error of solve, implicit"] < 1e-8
    assert errors["relative error of trace, diagonal"] < 1e-9  # exact by construction
    assert errors["relative error of product, diagonal"] > 0.1  # and no more than that: the errors can be large


# ---- 3.7


def test_kernel_pca_is_that_of_the_kernels_room() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    K = ntk(net, torch.randn(10, 3, dtype=torch.float64))
    theirs = K.normalized().pca(2)
    mine = pca(K.matrix())
    torch.testing.assert_close(mine.abs(), theirs.abs())  # signs are free
    torch.testing.assert_close(normalised(K.matrix()), K.normalized().matrix())


def test_blocks_and_separation_know_their_extremes() -> None:
    g = torch.Generator().manual_seed(0)
    label = torch.tensor([0] * 100 + [1] * 100)
    noise = torch.randn(200, 2, generator=g, dtype=torch.float64)
    assert abs(separation(noise, label) - 0.5) < 0.12  # leave one out: chance stays chance
    assert separation(noise + 8 * label[:, None], label) == 1.0
    features = torch.randn(200, 50, generator=g, dtype=torch.float64)
    assert abs(blocks(features @ features.T, label)) < 0.02
    centred = features + 1.0 * torch.where(label == 1, 1.0, -1.0)[:, None]
    assert blocks(centred @ centred.T, label) == pytest.approx(1.0, abs=0.15)  # cosines +1/2 and -1/2


def test_fig3_7_blocks_appear(tmp_path: Path) -> None:
    result = run(tmp_path, "ekfac/fig3.7")
    assert result.numbers["gain of block structure"].value > 0.02
    before, after = (next(f for f in result.figures if f.name == f"kernel-{when}") for when in ("before", "after"))
    assert isinstance(before, HeatMap)
    assert isinstance(after, HeatMap)
    assert len(after.z) == 50
    assert all(row[i] == pytest.approx(1.0) for i, row in enumerate(after.z))
    assert before.z != after.z


# ---- 4.3 d


def test_costs_are_shares_of_the_descent() -> None:
    losses = torch.tensor([[[2.0, 4.0], [6.0, 4.0]], [[10.0, 12.0], [1e30, 1e30]]], dtype=torch.float64)
    cost, best = costs(losses, torch.tensor([10.0, 12.0], dtype=torch.float64))
    assert best == (0, 0)
    assert cost.tolist() == [[[0.0, 0.0], [0.5, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]
    assert steepest(cost[:, 0], 0).value == 1.0
    assert steepest(cost[0], 0).value == 0.25


@pytest.mark.slow
def test_fig4_3d_the_grid_has_a_best_pair_and_bad_ones(tmp_path: Path) -> None:
    options = {
        "n": 100,
        "hidden": (16, 8),
        "epochs": 10,
        "size": 200,  # more than there are
        "lrs": (1e-3, 1e-1),
        "dampings": (1e-2, 10.0),
    }
    result = run(tmp_path, "ekfac/fig4.3d", **options)
    assert outcome("linearization/4.3d", result.numbers) == "gate"  # ten iterations: nobody has learnt
    assert "10 iterations (10 epochs)" in result.measured
    (shown,) = result.figures
    assert isinstance(shown, HeatMap)
    start = result.numbers["training loss at the start"].value
    lowest = min(cell for row in shown.z for cell in row)
    assert lowest < 0.9 * start
    assert shown.z[1][0] > 0.95 * start  # a step of 1e-3 with damping 10 does next to nothing
