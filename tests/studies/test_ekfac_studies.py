"""The studies of EKFAC at smoke size: what they measure against dense matrices, and what must hold (checks 32, 33)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from biascope import data, nets
from biascope.optim import EKFACPreconditioner
from biascope.studies import Run, StudyResult, configure, execute
from biascope.studies.ekfac.common import flow, gram, images, kfac_scalings, relative_error
from biascope.studies.ekfac.fig4_3 import _train, grid


def run(tmp_path: Path, name: str, **overrides: object) -> StudyResult:
    return execute(Run.create(tmp_path / "run", configure(name, "smoke", seed=1, overrides=overrides)))


def test_errors_without_a_dense_matrix() -> None:
    """Gram norm, EKFAC's and a stale KFAC's relative errors against the assembled second moment."""
    d = data.load("digits", "train")
    x, y = d.x[:40].flatten(1)[:, 20:26].double(), d.y[:40]
    net = nets.build("mlp", seed=0, in_features=6, hidden=(5, 4), outputs=10, activation="sigmoid").double()
    unit = "layers.fc2.weight"
    with EKFACPreconditioner(net, damping=1.0, refresh_every=10) as watch:
        for _ in range(2):
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()
            a, g = flow(watch, unit)
            watch.directions(lambda unit: 1.0)
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(0.1)  # the second time, the basis and KFAC's factors are old
    rows = (g[:, :, None] * a[:, None, :]).flatten(1)
    dense, E = rows.T @ rows / len(x), watch.pieces()[unit]
    assert float(gram(a, g).norm()) == pytest.approx(float(dense.norm()), rel=1e-10)
    assert E.U_A is not None
    Q = torch.kron(E.U_B[0], E.U_A[0])
    for s in (E.s, kfac_scalings(E)):
        direct = float((dense - Q @ torch.diag(s.flatten()) @ Q.T).norm() / dense.norm())
        assert relative_error(gram(a, g), E.s, s) == pytest.approx(direct, rel=1e-8)


def test_fig4_2_the_basis_decorrelates_and_ekfac_is_closer(tmp_path: Path) -> None:
    """Check 33 and check 32. The paper's "far less" drift is a verdict, not a test: it is not met at this size."""
    result = run(tmp_path, "ekfac/fig4.2")
    assert result.numbers["mean |correlation|, KFE / parameter basis"].value < 0.8
    gap = result.numbers["error of KFAC minus EKFAC"]
    assert gap.value > 0.05
    kfac, ekfac = (np.array(series.y) for series in result.figures[1].series)
    assert (ekfac <= kfac + 1e-6).all()  # the same basis and data: EKFAC cannot be farther
    assert kfac[10] < kfac[9]  # refreshed at step 100


def test_fig4_4c_starts_at_zero_and_says_what_did_not_track(tmp_path: Path) -> None:
    result = run(tmp_path, "ekfac/fig4.4c", steps=40, seeds=1)
    curves = {series.label: series.y for series in result.figures[0].series}
    assert set(curves) == {"KFAC", "EKFAC", "EKFAC-ra", "EKFAC-ra times m"}
    assert curves["KFAC"][0] < 0.1
    assert (result.verdict == "confirmed") != ("did not track" in result.measured)


def test_fig4_3_grids_are_equally_large() -> None:
    for points in (2, 3, 4, 5):
        for name in ("ekfac", "ekfac-ra", "kfac", "sgd", "adam"):
            lrs, seconds = grid(name, points)
            assert (len(set(lrs)), len(set(seconds))) == (points, points)


def test_fig4_3_end_to_end_and_resumed(tmp_path: Path) -> None:
    small = {"steps": 20, "hidden": (8, 4), "n": 100, "size": 50, "refresh": 5, "every": 6}
    result = run(tmp_path / "a", "ekfac/fig4.3", **small)
    assert [s.label for s in result.figures[0].series] == ["EKFAC", "EKFAC-ra", "KFAC", "SGD + momentum", "Adam"]
    assert all(s.y[-1] < s.y[0] for s in result.figures[0].series)
    assert all(list(s.x) == sorted(s.x) and s.x[-1] > 0 for s in result.figures[1].series)
    again = execute(Run.resume(tmp_path / "a" / "run"))
    assert again == result


def test_fig4_3_a_setting_that_diverges_is_a_bad_setting_not_an_error(tmp_path: Path) -> None:
    small = {"steps": 30, "hidden": (8, 4), "n": 100, "size": 50, "refresh": 30, "every": 10, "seeds": 1}
    result = run(tmp_path, "ekfac/fig4.3", optimisers="kfac,sgd", points=4, **small)
    assert result.verdict == "not tested"


@pytest.mark.slow
def test_ekfac_needs_fewer_iterations_than_sgd_and_amortised_kfac(tmp_path: Path) -> None:
    """Auto-encoder of digits, period 50; the best of 16 settings of each optimiser, and a second one for the rivals.

    Measured over three seeds: EKFAC and EKFAC-ra are below SGD's loss of step 400 after 120 to 130 steps.
    """
    here = Run.create(tmp_path / "run", configure("ekfac/fig4.3", "smoke", seed=1))
    x, _ = images("digits", 1437, here)

    def losses(name: str, lr: float, second: float) -> torch.Tensor:
        return torch.as_tensor(_train(here, name, x, (60, 30, 15), 300, 200, 50, 10, lr, second, seed=0)["loss"])

    rivals = [("kfac", 0.3, 0.1), ("kfac", 0.1, 0.1), ("sgd", 0.3, 0.95), ("sgd", 0.3, 0.9)]
    target = min(float(losses(*setting).min()) for setting in rivals)
    for setting in (("ekfac", 0.01, 1e-3), ("ekfac-ra", 0.03, 1e-4)):
        below = losses(*setting) < target
        assert bool(below.any()), setting
        assert 10 * int(below.float().argmax()) <= 200, setting
