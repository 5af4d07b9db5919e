"""The studies of EKFAC at smoke size: what they measure against dense matrices, and what must hold (checks 32, 33)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from biascope import data, nets
from biascope.optim import EKFACPreconditioner
from biascope.studies import Run, StudyResult, configure, execute
from biascope.studies.result import Estimate
from biascope.support import InputError, generator
from biascope_papers.ekfac import autoencoder, cifar, contest, standings
from biascope_papers.ekfac.common import glorot, reconstruction
from biascope_papers.ekfac.contest import Setting
from biascope_papers.ekfac.directions import change, singular_vectors
from biascope_papers.ekfac.eigenbasis import drift, flow, gram, kfac_scalings, relative_error
from biascope_papers.ekfac.representations import LABELS, measure
from claim_outcome import outcome as judged


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
    """Check 33 and check 32. How far is "far less" is not tested: it is not met at this size."""
    result = run(tmp_path, "ekfac/fig4.2")
    assert result.numbers["mean |correlation|, KFE / parameter basis"].value < 0.8
    gap = result.numbers["error of KFAC minus EKFAC"]
    assert gap.value > 0.05
    kfac, ekfac = (np.array(series.y) for series in result.figures[1].series)
    assert (ekfac <= kfac + 1e-6).all()  # the same basis and data: EKFAC cannot be farther
    assert kfac[10] < kfac[9]  # refreshed at step 100


def test_fig4_4c_starts_at_zero_and_says_what_did_not_track(tmp_path: Path) -> None:
    result = run(tmp_path, "ekfac/fig4.4c", steps=40, seeds=1, refresh=20)
    curves = {series.label: series.y for series in result.figures[0].series}
    assert set(curves) == {"KFAC", "EKFAC", "EKFAC-ra", "EKFAC-ra times m", "KFAC, refreshed", "EKFAC, refreshed"}
    assert curves["KFAC"][0] < 0.1
    for label in ("KFAC", "EKFAC"):  # frozen and refreshed are one until the first refresh, at step 20
        assert curves[label][:2] == curves[f"{label}, refreshed"][:2]
        assert curves[label][2] != curves[f"{label}, refreshed"][2]
    with pytest.raises(InputError, match="must be a multiple of every"):
        run(tmp_path / "b", "ekfac/fig4.4c", refresh=15)
    assert judged("linearization/4.4c", result.numbers) in {"gate", "open"}  # one seed


def test_the_auto_encoder_with_batch_normalisation_begins_as_the_same_function() -> None:
    net = nets.build("autoencoder", seed=0, in_features=12, hidden=(8, 6, 4)).double()
    x = torch.rand(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = net(x)
    normed = autoencoder.normalised(net).eval()  # means 0 and variances 1 so far
    norms = [m for m in normed.modules() if isinstance(m, torch.nn.BatchNorm1d)]
    assert [m.num_features for m in norms] == [8, 6, 4, 6, 8]  # in front of every sigmoid, not of the output
    assert torch.allclose(normed.double()(x), before, atol=1e-4)


def test_glorot_weights_let_the_gradient_through() -> None:
    """Why rivals were stuck: as torch draws the weights, the first layer's gradient all but vanishes."""

    def ratio(init: str) -> float:
        net = nets.build("autoencoder", seed=0, in_features=64, hidden=(60, 40, 30, 20))
        if init == "glorot":
            glorot(net, torch.Generator().manual_seed(0))
            w = net.encoder.fc2.weight.detach()
            assert float(w.abs().max()) <= 4 * (6 / 100) ** 0.5
            assert float(w.std()) == pytest.approx(4 * (2 / 100) ** 0.5, rel=0.05)
        x = data.load("digits", "train").x[:200].flatten(1)
        reconstruction(net, x).backward()
        first, last = net.encoder.fc1.weight, net.decoder.fc4.weight
        return float(first.grad.norm() / last.grad.norm())

    assert ratio("torch") < 1e-4
    assert ratio("glorot") > 100 * ratio("torch")


def test_fig4_3_end_to_end_and_resumed(tmp_path: Path) -> None:
    small = {"steps": 20, "hidden": (8, 4), "n": 100, "size": 50, "refresh": 5, "every": 6}
    result = run(tmp_path / "a", "ekfac/fig4.3", **small)
    assert [s.label for s in result.figures[0].series] == [
        "EKFAC",
        "EKFAC-ra",
        "KFAC",
        "SGD + momentum + BN",
        "Adam + BN",
    ]
    assert all(s.y[-1] < s.y[0] for s in result.figures[0].series)
    assert all(list(s.x) == sorted(s.x) and s.x[-1] > 0 for s in result.figures[1].series)
    again = execute(Run.resume(tmp_path / "a" / "run"))
    assert again == result


def test_fig4_3_a_setting_that_diverges_is_a_bad_setting_not_an_error(tmp_path: Path) -> None:
    small = {"steps": 30, "hidden": (8, 4), "n": 100, "size": 50, "refresh": 30, "every": 10, "seeds": 1}
    result = run(tmp_path, "ekfac/fig4.3", optimisers="kfac,sgd", grid="1000,0.01", **small)
    here = Run.open(tmp_path / "run")
    ends = [float(here.load_arrays(name)["loss"][-1]) for name in here.arrays() if name.startswith("kfac")]
    assert len(ends) == 4
    assert max(ends) > 1e3  # inf, or as good as
    assert result.numbers["final training loss, KFAC"].value == pytest.approx(min(ends))


def outcome(plateau: float = 200.0, **finals: list[float]) -> contest.Outcome:
    """Trainings of one second that begin at 500 and end as told."""
    seconds = torch.tensor([0.0, 1.0])
    rows = {
        n: [{"loss": torch.tensor([500.0, e]), "seconds": seconds, "final": e} for e in f] for n, f in finals.items()
    }
    return contest.Outcome({}, rows, {}, [], 100, plateau)  # type: ignore[arg-type]


def test_a_rival_on_the_plateau_is_not_beaten() -> None:
    def verdict(**finals: list[float]) -> str:
        out = outcome(**finals)
        numbers, _ = standings.compare(out, ("ekfac",), ("kfac",))
        return judged("linearization/4.5", {**numbers, **standings.progress_made(out)})

    good, better, flat = [150.0, 151.0, 150.0], [100.0, 101.0, 101.0], [199.0, 201.0, 200.0]
    assert verdict(ekfac=better, kfac=good) == "holds"
    assert verdict(ekfac=better, kfac=flat) == "gate"  # nobody tuned KFAC
    assert verdict(ekfac=good, kfac=better) == "fails"
    assert verdict(ekfac=flat, kfac=flat) == "gate"  # nobody learnt
    assert verdict(ekfac=[100.0], kfac=[150.0]) == "open"  # one seed
    assert "KFAC" in standings.remarks(outcome(ekfac=better, kfac=flat))


def test_at_equal_time_the_slower_one_is_read_where_the_faster_one_ends() -> None:
    slow = {"loss": torch.tensor([10.0, 6.0, 0.0]), "seconds": torch.tensor([0.0, 2.0, 4.0])}
    fast = {"loss": torch.tensor([10.0, 3.0]), "seconds": torch.tensor([0.0, 3.0])}
    assert standings.at_equal_time(fast, slow) == pytest.approx(3.0 - 3.0)  # half-way between 6 and 0
    assert standings.at_equal_time(slow, fast) == 0.0


def test_who_did_not_take_part_is_named() -> None:
    good, better = [150.0, 151.0], [100.0, 101.0]
    gaps, text = standings.compare(outcome(ekfac=better, kfac=good), ("ekfac", "ekfac-ra"), ("kfac", "sgd"))
    assert text == "Did not take part, and is not judged: EKFAC-ra; SGD + momentum."
    assert list(gaps) == ["loss of KFAC minus EKFAC", "loss at equal time of KFAC minus EKFAC"]
    assert standings.compare(outcome(ekfac=better, kfac=good), ("ekfac",), ("kfac",))[1] == ""


def test_a_drift_is_less_only_than_one_that_is_there() -> None:
    def less(ours: list[float], theirs: list[float]) -> str:
        numbers = {"lowest training accuracy": Estimate(0.9)}
        numbers["drift between refreshes, KFAC minus EKFAC"] = Estimate.of([b - a for a, b in zip(ours, theirs)])
        numbers["smallest drift of KFAC between refreshes"] = Estimate(min(theirs))
        return judged("linearization/4.2b", numbers)

    assert less([0.1, 0.12, 0.11], [1.0, 1.1, 0.9]) == "holds"
    assert less([1.1, 1.22, 1.01], [1.0, 1.1, 0.9]) == "fails"
    assert less([-2.1, -2.12, -2.11], [-1.0, -1.1, -0.9]) == "gate"  # KFAC's error falls
    assert less([0.1, 0.12, 0.11], [1.0, 1.1, -0.9]) == "gate"
    assert drift(torch.tensor([1.0, 2.0, 4.0, 1.0, 1.0, 2.0, 9.0]), 3) == 2.0  # 4 - 1 and 2 - 1; the rest is no period


def test_the_plateau_is_the_loss_of_the_best_constant_output(tmp_path: Path) -> None:
    here = Run.create(tmp_path / "run", configure("ekfac/fig4.3", "smoke"))
    task = autoencoder.problem(here, "digits", 300, (8, 4))
    logits = torch.zeros(task.x.shape[1], requires_grad=True)
    sgd = torch.optim.Adam([logits], lr=0.3)
    for _ in range(800):
        sgd.zero_grad()
        loss = F.binary_cross_entropy_with_logits(logits.expand_as(task.x), task.x, reduction="sum") / len(task.x)
        loss.backward()
        sgd.step()
    assert task.plateau == pytest.approx(float(loss.detach()), rel=1e-3)
    images = cifar.problem(here, "vgg11", "digits", 300, 2, 0.0)
    share = torch.bincount(images.y, minlength=10) / 300
    assert images.plateau == pytest.approx(float(F.cross_entropy(share.log().expand(300, 10), images.y)))


@pytest.mark.slow
def test_ekfac_needs_fewer_iterations_than_sgd_and_amortised_kfac(tmp_path: Path) -> None:
    """Auto-encoder of digits, period 50; the best of 16 settings of each optimiser, and a second one for the rivals.

    Measured over three seeds: EKFAC and EKFAC-ra are below SGD's loss of step 400 after 120 to 130 steps.
    """
    here = Run.create(tmp_path / "run", configure("ekfac/fig4.3", "smoke", seed=1))
    task = autoencoder.problem(here, "digits", 1437, (60, 30, 15))

    def losses(name: str, lr: float, second: float) -> torch.Tensor:
        return torch.as_tensor(contest.train(here, task, Setting(name, lr, second, 200, 300, 50, 10), seed=0)["loss"])

    rivals = [("kfac", 0.3, 0.1), ("kfac", 0.1, 0.1), ("sgd", 0.3, 0.95), ("sgd", 0.3, 0.9)]
    target = min(float(losses(*setting).min()) for setting in rivals)
    for setting in (("ekfac", 0.01, 1e-3), ("ekfac-ra", 0.03, 1e-4)):
        below = losses(*setting) < target
        assert bool(below.any()), setting
        assert 10 * int(below.float().argmax()) <= 200, setting


# ---- contests on images ----


def test_every_optimiser_sees_the_same_number_of_examples() -> None:
    frames = cifar.frames(("ekfac", "kfac", "sgd", "sgd-bn"), 50000, 4.0, 500, 200, 500, 10, halve=2.0)
    assert {s.steps * s.size for s in frames.values()} == {200000}
    assert {s.halve * s.size for s in frames.values()} == {100000}
    assert (frames["ekfac"].size, frames["sgd-bn"].size) == (500, 200)


def test_only_the_normed_networks_have_norms() -> None:
    for network in ("vgg11", "resnet34"):
        for normed in (True, False):
            net = cifar.build(network, 0, normed, 2, 1)
            assert any(isinstance(m, torch.nn.BatchNorm2d) for m in net.modules()) == normed


def test_the_learning_rate_is_halved_and_nothing_else_changes(tmp_path: Path) -> None:
    """SGD without momentum on a linear loss: the steps' lengths are the learning rates, 2 (1 + 1/2 + 1/4)."""
    here = Run.create(tmp_path / "run", configure("ekfac/fig4.5", "smoke"))

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w * torch.ones(len(x))

    task = contest.Problem(lambda s, b: Line(), lambda net, x, y: -net(x).mean(), torch.ones(4, 1), torch.ones(4, 1))
    row = contest.train(here, task, Setting("sgd", 1.0, 0.0, 2, 6, 1, 3, halve=2), seed=0)
    assert torch.as_tensor(row["loss"]).tolist() == [0.0, -2.5, -3.5]
    constant = contest.train(here, task, Setting("sgd", 1.0, 0.0, 2, 6, 1, 6), seed=0)
    assert float(constant["final"]) == -6.0


@pytest.mark.parametrize("name", ["ekfac/fig4.5", "ekfac/fig4.6", "ekfac/figA.4"])
def test_image_contests_end_to_end(tmp_path: Path, name: str) -> None:
    result = run(tmp_path, name, epochs=1.0, looks=1)
    by_name = {chart.name: chart for chart in result.figures}
    assert set(by_name) == {"iterations", "time", "test"}
    times = [value.value for key, value in result.numbers.items() if key.startswith("milliseconds per iteration")]
    assert len(times) == len(by_name["time"].series)  # type: ignore[union-attr]
    assert min(times) > 0


def test_figA_1_counts_the_gain_by_batch_size(tmp_path: Path) -> None:
    result = run(tmp_path, "ekfac/figA.1", epochs=1.0, looks=1, seeds=2, network="vgg11")
    gain = {b: result.numbers[f"loss of KFAC minus EKFAC-ra, batch {b}"] for b in (25, 50)}
    finals = {
        (k, b): result.numbers[f"final loss, {k}, batch {b}"].value for k in ("KFAC", "EKFAC-ra") for b in (25, 50)
    }
    for b in (25, 50):
        assert gain[b].value == pytest.approx(finals["KFAC", b] - finals["EKFAC-ra", b], abs=1e-6)
    difference = result.numbers["gain of EKFAC-ra at the largest batch minus at the smallest"]
    assert difference.value == pytest.approx(gain[50].value - gain[25].value, abs=1e-6)
    assert "gain of EKFAC at the largest batch minus at the smallest" in result.numbers


def test_fig4_4ab_end_to_end(tmp_path: Path) -> None:
    result = run(tmp_path, "ekfac/fig4.4ab", hidden=(8, 4), n=100, size=50, steps=20)
    assert [s.label for s in result.figures[0].series] == ["EKFAC", "EKFAC-ra", "KFAC"]  # type: ignore[union-attr]
    assert result.figures[0].series[0].x == (3.0, 30.0)  # type: ignore[union-attr]
    assert len(result.figures) == 7
    assert judged("linearization/4.4ab", result.numbers) == "gate"  # twenty steps: still on the plateau
    assert "plateau" in result.measured


# ---- representations ----


def test_fig3_3_numbers_are_those_of_the_dense_matrices() -> None:
    from biascope.curvature import fisher

    net = nets.build("mlp", seed=0, in_features=6, hidden=(5, 4), outputs=10).double()
    x = data.load("digits", "train").x[:30].flatten(1)[:, 20:26].double()
    found = measure(net, x, 3, 4, (0.1,), seed=7)

    def dense(kind: str) -> torch.Tensor:
        same = generator(7, "labels")
        options = {"estimator": "monte-carlo", "samples": 3, "generator": same, "precision": "float64"}
        return fisher(net, x, kind, **options).to_dense()

    truth = dense("dense")
    V = torch.randn(len(truth), 4, generator=generator(7, "vectors")).double()
    V = V / V.norm(dim=0)
    lam = 0.1 * float(truth.diagonal().max())
    eye = torch.eye(len(truth)).double()
    for kind in LABELS:
        G = dense(kind)
        cosines = torch.cosine_similarity(G @ V, truth @ V, dim=0)
        assert float(found[f"product {kind}"]) == pytest.approx(float(cosines.mean()), abs=1e-4)
        W = torch.linalg.solve(G + lam * eye, (truth + lam * eye) @ V)
        assert float(found[f"solve {kind}"]) == pytest.approx(
            float(torch.cosine_similarity(W, V, dim=0).mean()), abs=1e-3
        )
        assert float(found[f"trace {kind}"]) == pytest.approx(float((G.trace() / truth.trace() - 1).abs()), abs=1e-5)


def test_fig3_3_traces(tmp_path: Path) -> None:
    result = run(tmp_path, "ekfac/fig3.3", seeds=1, draws=2, steps=5)
    assert judged("linearization/3.6, exact", result.numbers) == "holds"
    assert judged("linearization/3.4", result.numbers) == "open"  # one seed
    for label in ("diagonal", "quasi-diagonal", "EKFAC"):
        assert result.numbers[f"relative error of the trace, {label}"].value < 1e-4
    assert result.numbers["relative error of the trace, KFAC"].value > 1e-3


# ---- singular directions ----


def test_singular_vectors_and_the_change_along_them() -> None:
    net = nets.build("mlp", seed=0, in_features=6, hidden=(5,), outputs=3, activation="tanh").double()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    params = dict(net.named_parameters())
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(params)
    J = torch.cat([j.reshape(12, -1) for j in jacobian.values()], 1)
    _, sigma, Vt = torch.linalg.svd(J.detach())
    V, found = singular_vectors(net, x, 5)
    assert torch.allclose(found.double(), sigma[:5], rtol=1e-5)
    assert torch.allclose((V.double() * Vt[:5].T).sum(0).abs(), torch.ones(5).double(), atol=1e-4)
    moved = change(net, x, 1e-5 * V.double())
    assert torch.allclose(moved, 1e-5 * sigma[:5] / 12**0.5, rtol=1e-3)


def test_figB_1_end_to_end(tmp_path: Path) -> None:
    result = run(tmp_path, "ekfac/figB.1")
    assert judged("alignment/B.1", result.numbers) == "open"  # one seed
    assert result.numbers["change along top / along random directions (medians)"].value > 1
    assert result.numbers["change on the sample / first order"].value == pytest.approx(1.0, abs=0.2)
    top, random, _ = (np.array(s.y) for s in result.figures[0].series)  # type: ignore[union-attr]
    assert top[0] > random.max()
    assert result.numbers["worst final loss / plateau"].value < 0.9


def test_figB_1_goes_on_with_a_smaller_learning_rate_where_a_training_diverges(tmp_path: Path) -> None:
    numbers = run(tmp_path, "ekfac/figB.1", lr=0.1).numbers
    assert numbers["smallest learning rate"].value == pytest.approx(0.1 / 3)
    assert np.isfinite(numbers["change along top / along random directions (medians)"].value)
    with pytest.raises(InputError, match=r"did not learn with any learning rate of 1e\+04, 3\.33e\+03"):
        run(tmp_path / "b", "ekfac/figB.1", lr=1e4, epochs=1.0)
