"""The tangent feature alignment studies at tiny sizes, and the statistics they measure, against slow oracles."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from biascope.data import disk_labels, square_grid
from biascope.kernels import ntk
from biascope.studies import Estimate, Run, StudyResult, configure, execute
from biascope.studies.claims import claims_of
from biascope.studies.conditions import all_hold
from biascope.studies.judging import judgements
from biascope.support.errors import InputError
from biascope_papers.alignment.complexity import norms
from biascope_papers.alignment.difficulty import (
    Mixture,
    half_rise,
    largest_ratio,
    lasting,
    mean_ratio,
    mixture,
    steepest,
)
from biascope_papers.alignment.disk import radial_share
from biascope_papers.alignment.labels import highest
from biascope_papers.alignment.line import wave_power
from biascope_papers.alignment.spectrum import at_end, end_of_training
from biascope_papers.alignment.tracking import STATISTICS, Setting, build, cka, randomise, repeats, statistics
from biascope_papers.ntk.setting import images

SMALL: dict[str, Any] = {"n_train": 200, "n_test": 60, "epochs": 12, "probes": 3, "probe_size": 15}


def start(folder: Path, name: str, **overrides: object) -> Run:
    return Run.create(folder / "run", configure(name, "smoke", seed=0, overrides=overrides))


def check(result: StudyResult) -> None:
    assert result.figures
    assert StudyResult.from_json(result.to_json()).numbers.keys() == result.numbers.keys()


# ---------------------------------------------------------------------------------------------------- building blocks


def test_statistics_are_those_of_the_centred_features() -> None:
    net = build("mlp", (1, 3, 3), 0, width=7, depth=2).double()
    x = torch.randn(12, 1, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(12) % 10
    params = list(net.parameters())
    rows = []
    for example in x:  # one row per (example, output), by plain autograd
        out = net(example[None])[0]
        rows.append([torch.cat([g.flatten() for g in torch.autograd.grad(o, params, retain_graph=True)]) for o in out])
    J = torch.stack([torch.stack(row) for row in rows])  # [12, 10, p]
    centred = (J - J.mean(0)).reshape(120, -1)
    values = torch.linalg.svdvals(centred).square()
    values = torch.cat([values, values.new_zeros(120 - len(values))])
    mu = values[values > 1e-12 * values[0]] / values.sum()
    Y = nn.functional.one_hot(y, 10).double()
    labels = (Y - Y.mean(0)).reshape(-1)
    top = (centred.T @ labels).square().sum()
    K = centred @ centred.T
    plain = J.reshape(120, -1)
    oracle = {
        "largest": values[0],
        "mean": values.mean(),
        "rank": torch.exp(-(mu * mu.log()).sum()),
        "T1": values[:5].sum() / values.sum(),  # 4 % of 120 is 5
        "T2": values[:10].sum() / values.sum(),
        "T3": values[:19].sum() / values.sum(),
        "cka": top / (K.norm() * labels.square().sum()),
        "uncentred": (plain.T @ Y.reshape(-1)).square().sum() / ((plain @ plain.T).norm() * 12),
    }
    found, layers = statistics(net, x, y)
    for name, value in oracle.items():
        assert float(found[STATISTICS.index(name)]) == pytest.approx(float(value), rel=1e-4), name
    blocks = dict(zip(layers, (slice(0, 70), slice(70, 126), slice(126, 206))))
    for name, part in blocks.items():  # weights and biases of a layer stand together
        own = centred[:, part]
        expected = (own.T @ labels).square().sum() / ((own @ own.T).norm() * labels.square().sum())
        assert layers[name] == pytest.approx(float(expected), rel=1e-4), name


def test_cka_of_the_identity_and_of_a_dead_layer() -> None:
    from biascope.kernels import Kernel

    n, c = 20, 10
    eye = torch.eye(n * c, dtype=torch.float64).view(c, n, c, n)
    y = torch.arange(n) % c
    assert cka(Kernel(eye, "full", "full", symmetric=True), y) == pytest.approx(1 / math.sqrt(c * (n - 1)))
    assert math.isnan(cka(Kernel(torch.zeros_like(eye), "full", "full", symmetric=True), y))


def test_random_labels() -> None:
    y = torch.arange(2000) % 10
    noisy, drawn = randomise(y, 0.5, seed=1)
    assert int(drawn.sum()) == 1000
    assert torch.equal(noisy[~drawn], y[~drawn])
    assert 0.85 < float((noisy[drawn] != y[drawn]).double().mean()) < 0.95  # one in ten is right by chance
    assert torch.equal(randomise(y, 0.0, seed=1)[0], y)


def test_networks_of_the_alignment_studies() -> None:
    vgg = build("vgg19", (3, 32, 32), 0, width=4)
    convolutions = [m for m in vgg.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 16
    assert not any(isinstance(m, nn.BatchNorm2d) for m in vgg.modules())
    mlp = build("mlp", (1, 28, 28), 0, width=80, depth=6)
    weights = [p for p in mlp.parameters() if p.dim() == 2]
    assert [tuple(w.shape) for w in weights] == [(80, 784), *[(80, 80)] * 5, (10, 80)]
    assert len({w.data_ptr() for w in weights}) == 7  # layers do not share weights, as they did in the published code
    assert float(weights[0].detach().std()) == pytest.approx(math.sqrt(2 / 784), rel=0.05)


def test_a_network_without_biases_on_a_line_has_rank_two() -> None:
    net = build("mlp", (1,), 0, width=64, depth=3)  # He weights, zero biases: linear for positive inputs
    x = torch.linspace(0.02, 1, 30, dtype=torch.float64)[:, None]
    values = ntk(net.double(), x, outputs=0, precision="float64").eigh().values
    assert float(values[2] / values[0]) < 1e-12 < float(values[1] / values[0])


def test_easy_and_difficult_images(tmp_path: Path) -> None:
    run = start(tmp_path, "alignment/fig4.4")
    mixed = mixture(run, Mixture("digits", n_easy=300, n_difficult=60), "random", seed=0)
    assert mixed.group is not None
    assert mixed.group.tolist() == [0] * 300 + [1] * 60
    assert len(mixed.x.flatten(1).unique(dim=0)) > 340  # no image is both easy and difficult
    again = images("digits", "train", None, 0)
    true = {tuple((x > x.min()).flatten().tolist()): int(y) for x, y in zip(again.x, again.y)}
    right = [int(y) == true.get(tuple((x > x.min()).flatten().tolist())) for x, y in zip(mixed.x, mixed.y)]
    assert sum(right[:300]) > 290
    assert sum(right[300:]) < 20  # about one in ten
    with pytest.raises(InputError, match=r"random\|fashion"):
        start(tmp_path / "b", "alignment/fig4.4", kinds="kmnist")


def test_curves() -> None:
    steps = torch.tensor([0, 10, 100, 1000])
    assert half_rise(steps, torch.tensor([0.0, 0.2, 0.6, 1.0])) == 2.0
    assert half_rise(steps, torch.tensor([0.0, 1.0, 0.9, 0.8])) == 1.0
    assert largest_ratio({"easy": torch.tensor([5.0, 1.0]), "difficult": torch.tensor([1.0, 0.5])}) == 2.0
    assert highest(torch.tensor([[0.9, 0.1, 0.4, 0.8], [0.9, 0.5, 0.2, 0.8]])) == (1, 1)
    assert highest(torch.tensor([[0.3, 0.4], [0.2, 0.9]])) == (0, 0)  # no layer in between
    runs = [{"train_accuracy": torch.tensor([0.1, 0.995, 1.0])}, {"train_accuracy": torch.tensor([0.1, 0.5, 0.9])}]
    assert end_of_training(runs) == [1, None]
    table = torch.arange(3.0).view(3, 1, 1).expand(3, 2, len(STATISTICS))
    # a seed is one repeat, whatever its batches; with one seed its batches are the repeats
    assert at_end([{"train": table}] * 2, [1, None], lambda v, i: v[:, i], "rank") == [1.0, 2.0]
    assert at_end([{"train": table}], [1], lambda v, i: v[:, i], "rank") == [1.0, 1.0]
    two = torch.stack([table[:, 0], table[:, 0] + 4], 1)  # batches that differ
    assert repeats([{"train": two}], "train", "rank").tolist() == [[0.0, 1.0, 2.0], [4.0, 5.0, 6.0]]
    assert repeats([{"train": two}, {"train": table}], "train", "rank").tolist() == [[2.0, 3.0, 4.0], [0.0, 1.0, 2.0]]


def test_what_is_picked_on_noise_does_not_pass() -> None:
    """Two equal noisy curves: the largest ratio is above 1, the ratio of means is not."""
    noise = 0.3 + 0.03 * torch.randn(2, 40, 25, generator=torch.Generator().manual_seed(0))
    curves = [{"easy": easy, "difficult": difficult} for easy, difficult in noise.transpose(0, 1)]
    assert min(largest_ratio(c) for c in curves) > 1.05
    ratios = torch.tensor([mean_ratio(c) for c in curves])
    assert abs(float(ratios.mean()) - 1) < 2.5 * float(ratios.std()) / 40**0.5


def test_norms() -> None:
    net = build("mlp", (1, 2, 2), 0, width=4, depth=1)
    moved = build("mlp", (1, 2, 2), 0, width=4, depth=1)
    with torch.no_grad():
        net.layers.fc1.weight.copy_(2 * torch.eye(4))  # type: ignore[union-attr,operator]
        moved.layers.fc1.weight.copy_(5 * torch.eye(4))  # type: ignore[union-attr,operator]
        for each in (net, moved):
            each.layers.fc2.weight.copy_(torch.eye(10, 4))  # type: ignore[union-attr,operator]
    found = norms(moved, net)
    assert found["frobenius"] == pytest.approx(10 * 2)
    assert found["spectral"] == pytest.approx(5)
    assert found["neyshabur"] == pytest.approx(2 * (6 + 2))  # ||V|| (||U - U0|| + ||U0||_2)
    assert math.isnan(norms(build("mlp", (4,), 0, depth=2), build("mlp", (4,), 0, depth=2))["neyshabur"])


def test_settings_have_names_of_their_own() -> None:
    one = Setting(epochs=3.0)
    assert one.key(0) != one.key(1)
    assert one.key(0) != Setting(epochs=4.0).key(0)
    assert one.key(0) == Setting(epochs=3.0).key(0)


# --------------------------------------------------------------------------------------------------------- the studies


@pytest.mark.slow
def test_fig4_1(tmp_path: Path) -> None:
    run = start(tmp_path, "alignment/fig4.1")
    result = execute(run)
    check(result)
    assert result.numbers["growth of lambda_1"].value > 20
    assert result.numbers["rise of the CKA"].value > 0.03
    assert result.numbers["accuracy on the grid"].value > 0.8
    assert all((run.path / "figures" / f"eigenfunctions.{kind}").exists() for kind in ("png", "svg", "pdf"))
    # what is drawn are orthonormal, centred functions
    kept = run.load_arrays("seed 0")
    functions = kept["functions"][0].double()
    points = square_grid(12)
    y = disk_labels(points).double() * 2 - 1
    overlap = (functions @ (y - y.mean())).square() / (y - y.mean()).square().sum()
    assert float(overlap.sum()) <= 1 + 1e-6
    assert torch.allclose(functions @ functions.T, torch.eye(6, dtype=torch.float64), atol=1e-4)
    assert torch.allclose(functions.sum(1), torch.zeros(6, dtype=torch.float64), atol=1e-3)  # centred


def test_fig_b2(tmp_path: Path) -> None:
    result = execute(start(tmp_path, "alignment/figB.2", networks=3, width=128))
    check(result)
    assert result.numbers["rank correlation of index and dominant frequency, first half"].value > 0.8
    assert 0 < result.numbers["energy of an eigenvector in its best wave, first half"].value < 1
    ratio = result.numbers["lambda_10 / lambda_1, centred"].value
    assert 1e-4 < ratio < 0.1
    assert result.numbers["lambda_10 / lambda_1, uncentred"].value < 0.1 * ratio


def test_fig4_2_is_judged_by_the_minimum_over_training_of_networks_that_learned() -> None:
    claim = next(each for each in claims_of("alignment/fig4.2") if each.id == "alignment/4.2, rank")
    rank, learned = (
        "lowest effective rank relative to the first, 0% random labels",
        "training accuracy, 0% random labels",
    )
    assert all_hold(claim.rule, {rank: Estimate(0.08, 0.001, 5)})[0] is True
    assert all_hold(claim.rule, {rank: Estimate(0.24, 0.001, 5)})[0] is False
    assert all_hold(claim.gate, {learned: Estimate(0.5)})[0] is False


def test_waves_round_functions_and_steep_curves() -> None:
    z = torch.linspace(0, 1, 50, dtype=torch.float64)
    power = wave_power(torch.stack([(torch.pi * 3 * z + 0.7).cos(), z * 0 + 1 - 2 * (z > 0.5).double()], 1))
    assert power.argmax(0).tolist() == [2, 0]  # rows are 1/2, 1, 3/2, ... periods
    assert float(power[2, 0]) == pytest.approx(1)
    assert 0.7 < float(power[0, 1]) < 0.9  # a step has 8 / pi^2 of its energy in its first wave
    points = square_grid(30).double()
    ring, slope = (points.norm(dim=1) * 5).sin(), points[:, 0]
    shares = radial_share(torch.stack([ring, slope]), points)
    assert float(shares[0]) > 0.9
    assert float(shares[1]) < 0.05
    steps = torch.tensor([0, 10, 100, 1000])
    assert steepest(steps, torch.tensor([0.0, 0.1, 0.6, 0.7])) == pytest.approx(0.5)
    assert lasting(steps, torch.tensor([9.0, 1.1, 3.0, 1.2])) == pytest.approx(0.09)


def test_fig4_2_then_4_3_reads_its_trainings(tmp_path: Path) -> None:
    run = start(tmp_path / "a", "alignment/fig4.2", noises="0", **SMALL)
    result = execute(run)
    check(result)
    assert result.numbers["growth of the largest eigenvalue, 0% random labels"].value > 2
    stored = run.load_arrays(run.arrays()[0])
    ratios = stored["train"][:, :, [STATISTICS.index(name) for name in ("T1", "T2", "T3")]]
    assert bool((ratios.diff(dim=2) >= 0).all())
    assert bool((ratios <= 1 + 1e-12).all())
    ranks = stored["train"][:, :, STATISTICS.index("rank")]
    assert bool(((ranks >= 1) & (ranks <= 150)).all())
    second = start(tmp_path / "b", "alignment/fig4.3", noises="0", reuse=str(run.path), **SMALL)
    reused = execute(second)
    check(reused)
    assert second.metrics() == []  # nothing was trained again,
    assert second.arrays() == run.arrays()  # and the run stands by itself
    ckas = stored["test"][:, :, STATISTICS.index("cka")]
    largest, rise = float(ckas.amax(0).mean()), float((ckas[-1] - ckas[0]).mean())
    assert reused.numbers["largest CKA with test labels, 0% random labels"].value == pytest.approx(largest)
    assert reused.numbers["rise of the CKA with test labels, 0% random labels"].value == pytest.approx(rise)
    assert "errors over 2 probe batches of one network" in reused.measured


@pytest.mark.slow
def test_fig4_4_and_b7(tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_easy": 300, "n_difficult": 60, "probes": 4, "seeds": 2}
    result = execute(start(tmp_path / "a", "alignment/fig4.4", epochs=20, **options))
    check(result)
    assert result.numbers["ratio of mean CKAs easy / difficult, random"].value > 1.1
    assert result.numbers["largest CKA, easy, random"].value > result.numbers["largest CKA, difficult, random"].value
    result = execute(start(tmp_path / "b", "alignment/figB.7", epochs=8, depths="1,4", **options))
    check(result)
    assert len(result.figures) == 3


@pytest.mark.slow
def test_fig4_6(tmp_path: Path) -> None:
    result = execute(start(tmp_path, "alignment/fig4.6", corruptions="0,0.7", seeds=1, epochs=80))
    check(result)
    assert result.numbers["rank correlation of corruption and C(f)"].value == 1.0
    assert result.numbers["rank correlation of corruption and C(f)"].standard_error is None  # one seed
    assert "Not tested: sweeps width, channels." in result.measured
    ends = [result.numbers[f"gap at the ends of the sweep, {end}, corruption"].value for end in ("first", "last")]
    assert ends[1] > ends[0] + 0.1
    with pytest.raises(InputError, match=r"width\|corruption\|channels"):
        start(tmp_path / "b", "alignment/fig4.6", sweeps="depth")


@pytest.mark.slow
def test_fig_b5_and_b8(tmp_path: Path) -> None:
    result = execute(start(tmp_path / "a", "alignment/figB.5", **SMALL))
    check(result)
    assert result.numbers["rise of the centred alignment, mlp"].value > 0
    with pytest.raises(InputError, match="side 32"):
        execute(start(tmp_path / "c", "alignment/figB.5", nets="vgg19"))
    result = execute(start(tmp_path / "b", "alignment/figB.8", **SMALL))
    check(result)
    assert result.numbers["ratio of the lowest effective ranks, 0% random labels"].value > 0.8


def test_the_best_rescalings_are_those_of_the_propositions(tmp_path: Path) -> None:
    run = start(tmp_path, "alignment/proposition4.3")
    numbers = execute(run).numbers
    assert {each.verdict for each in judgements(run, numbers)} == {"supported"}
    assert len(numbers) == 4
