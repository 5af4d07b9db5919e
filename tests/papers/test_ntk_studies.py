"""The learning-complexity studies at tiny sizes, and the identities they rest on (checks A and C of the paper)."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from biascope import nets
from biascope.ensembles import record
from biascope.geometry import nads
from biascope.kernels import binarization_overlap, ntk, rotation_gain, target_alignments
from biascope.studies import Run, StudyResult, configure, execute
from biascope.support.errors import InputError
from biascope.support.seeds import derive
from biascope.tangent import linearize
from biascope_papers.ntk.cifar2 import neighbours
from biascope_papers.ntk.directions import first_network, initialiser, kernel_directions
from biascope_papers.ntk.eigenfunctions import Benchmark, learn
from biascope_papers.ntk.rotation import alignments, rank_of, squared_norm
from biascope_papers.ntk.setting import network, two_classes
from biascope_papers.ntk.training import Recipe, Training, evaluate, fit

TINY: dict[str, Any] = {"dataset": "digits", "batch": 32}


def start(folder: Path, name: str, **overrides: object) -> Run:
    return Run.create(folder / "run", configure(name, "smoke", seed=0, overrides=overrides))


def check(result: StudyResult) -> None:
    """What every result must have."""
    assert result.figures
    assert StudyResult.from_json(result.to_json()).numbers.keys() == result.numbers.keys()


# ---------------------------------------------------------------------------------------------------- building blocks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A folder for building blocks that cache what they compute."""
    return Run.create(tmp_path_factory.mktemp("blocks") / "run", {"study": "none", "seed": 0})


def test_the_benchmark_is_made_of_eigenfunctions(run: Run) -> None:
    bench = Benchmark(run, "digits", "mlp", 120, 40, ridge=1e-6)
    assert len(bench.x) == 120
    assert bench.n_train == 100
    K = ntk(bench.net, bench.x, outputs=0, precision="float64").matrix().double()
    V, values = bench.spectrum.vectors.double(), bench.spectrum.values.double()
    assert torch.allclose(K @ V, V * values, atol=2e-3 * float(values[0]))
    assert torch.allclose(V.T @ V, torch.eye(40, dtype=torch.float64), atol=1e-5)
    # alignments of eigenfunctions are their eigenvalues, without a Gram matrix
    found = target_alignments(bench.net, bench.x, V[:, :5], precision="float64")
    assert torch.allclose(found, values[:5], rtol=1e-4)
    (x, y), (test_x, test_y) = bench.task(3)
    assert torch.equal(torch.cat([x, test_x]), bench.x)
    assert torch.equal(torch.cat([y, test_y]), (V[:, 3] >= 0).long())
    overlap = binarization_overlap(V)
    assert bool((overlap > 0.5).all())
    assert abs(float(overlap[10:].mean()) - 0.798) < 0.08  # sqrt(2 / pi) for bell-shaped entries
    # kernel regression predicts the leading eigenfunctions better than the trailing ones on held-out points
    truth = V[100:].float()
    right = ((bench.held_out >= 0) == (truth >= 0)).double().mean(0)
    assert float(right[:5].mean()) > float(right[30:].mean()) + 0.1
    again = Benchmark(run, "digits", "mlp", 120, 40, ridge=1e-6)  # from disk
    assert torch.equal(again.spectrum.vectors, bench.spectrum.vectors)


def test_the_kernel_of_a_linearised_network_never_turns(run: Run) -> None:
    bench = Benchmark(run, "digits", "mlp", 120, 40, ridge=1e-6)
    lin, f = linearize(bench.net), copy.deepcopy(bench.net)
    recipe = Recipe(40, 20, 0.2)
    for model in (lin, f):
        found = learn(model, bench, 5, recipe, seed=0)
        assert found["distance"] > 0.1
    V = bench.spectrum.vectors[:, :8].double()
    before, linear, turned = (target_alignments(m, bench.x, V) for m in (bench.net, linearize(bench.net), f))
    assert torch.allclose(before, linear, rtol=1e-5)
    assert torch.allclose(target_alignments(lin, bench.x, V), before, rtol=1e-4)  # gains are 1: check C5
    assert not torch.allclose(turned, before, rtol=0.1)
    y = bench.labels(5).double() * 2 - 1
    energies = [ntk(m, bench.x, outputs=0).energy_concentration(y, 6) for m in (bench.net, lin)]
    assert energies[0] == pytest.approx(energies[1], rel=1e-4)  # check C4
    assert ntk(bench.net, bench.x, outputs=0).energy_concentration(y, 120) == pytest.approx(1.0)
    swapped = linearize(bench.net, at=f.state_dict(), centered=True)
    assert float(swapped(bench.x).detach().abs().max()) == 0.0  # check C6


def test_the_squared_jacobian_norm_is_the_mean_of_the_kernels_diagonal(run: Run) -> None:
    bench = Benchmark(run, "digits", "mlp", 120, 40, ridge=1e-6)
    rows = [torch.autograd.grad(bench.net(x[None]).sum(), list(bench.net.parameters())) for x in bench.x]
    squares = [sum(float(g.double().square().sum()) for g in row) for row in rows]
    assert squared_norm(bench.net, bench.x, size=50) == pytest.approx(sum(squares) / 120, rel=1e-5)


def test_an_unknown_network_is_named() -> None:
    with pytest.raises(InputError, match="no network is called 'lenat' here; there is mlp, lenet"):
        initialiser("lenat", 8)


def test_all_directions_of_the_kernel() -> None:
    drawn = initialiser("lenet", 8)
    directions, alignments = kernel_directions(drawn, 8, seed=3, n_points=12, columns=10)
    U = directions.flatten(1)
    assert torch.allclose(U @ U.T, torch.eye(64), atol=1e-4)
    leading = nads(drawn, (1, 8, 8), 1, method="ntk", top=3, n_points=12, seed=3)
    assert torch.allclose(leading.eigenvalues, alignments[:3], rtol=1e-2)
    assert float((leading.directions.flatten(1) * U[:3]).sum(1).abs().min()) > 0.99


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_steins_lemma(activation: str) -> None:
    """The alignment with x -> <u, x> is ||mean of grad_theta f(x) <u, x>||^2; kinks of ReLU are lost on the way."""
    drawn = record(lambda: nets.build("lenet-avg", image_size=8, padding="same", activation=activation))
    directions, alignments = kernel_directions(drawn, 8, seed=3, n_points=24)
    X = torch.randn(8000, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    net = first_network(drawn, 3, "cpu")
    first = target_alignments(net, X, X.flatten(1) @ directions[:3].flatten(1).T, normalize=False)
    ratio = first / alignments[:3]
    if activation == "tanh":
        assert torch.allclose(ratio, torch.ones(3, dtype=ratio.dtype), atol=0.15)
    else:
        assert bool((ratio > 1.2).all())


def test_a_linear_model_prefers_no_direction() -> None:
    drawn = record(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 1)))
    _, alignments = kernel_directions(drawn, 4, seed=0, n_points=3)
    assert torch.allclose(alignments, torch.ones(16, dtype=alignments.dtype), atol=1e-6)


def test_wide_networks_stay_close_to_their_linearisation() -> None:
    rng = torch.Generator().manual_seed(0)
    x, gaps = torch.randn(24, 4, generator=rng), []
    y = (x[:, 0] > 0).long()
    for width in (16, 512):
        net = nets.build("mlp-ntk", seed=0, in_features=4, hidden=(width,) * 2)
        f, lin = copy.deepcopy(net), linearize(net)
        for model in (f, lin):
            fit(model, x, y, Recipe(60, 24, 0.2, 0.0, "constant"), seed=0)
        moved = (lin(x) - net(x)).norm()
        gaps.append(float(((f(x) - lin(x)).norm() / moved).detach()))
    assert gaps[1] < 0.5 * gaps[0]  # check A10


def test_gains_by_the_kernel_are_those_without_it(run: Run) -> None:
    bench = Benchmark(run, "digits", "mlp", 120, 40, ridge=1e-6)
    net = copy.deepcopy(bench.net)
    learn(net, bench, 7, Recipe(60, 20, 0.2), seed=0)
    V = bench.spectrum.vectors
    slow = rotation_gain(bench.net, net, bench.x, V.double(), precision="float64")
    after, norm = alignments(net, bench.x, V)
    assert torch.allclose(after, slow.after, rtol=1e-3)
    assert norm == pytest.approx(sum(float(_gradient(net, x).square().sum()) for x in bench.x) / 120, rel=1e-4)
    assert torch.allclose(bench.spectrum.values[:20].double(), slow.before[:20], rtol=1e-2)


def test_rank_of() -> None:
    assert [rank_of(torch.tensor([3.0, 1.0, 2.0]), k) for k in range(3)] == [1, 3, 2]


def test_the_order_of_table4_1_is_the_published_one_not_that_of_the_options() -> None:
    wanted = [("mlp", "lenet"), ("lenet", "resnet18")]
    assert neighbours(["mlp", "lenet", "resnet18"]) == wanted == neighbours(["resnet18", "lenet", "mlp"])
    assert neighbours(["resnet18", "mlp"]) == [("mlp", "resnet18")]
    assert neighbours(["resnet18", "resnet18-narrow"]) == []
    assert neighbours(["resnet18", "resnet18-narrow", "lenet"]) == [
        ("lenet", "resnet18"),
        ("lenet", "resnet18-narrow"),
    ]


# --------------------------------------------------------------------------------------------------------- the studies


def test_table4_1(tmp_path: Path) -> None:
    run = start(tmp_path, "ntk/table4.1", nets="mlp", n_train=300, n_kernel=150, epochs=8, k=10, **TINY)
    result = execute(run)
    check(result)
    gain = result.numbers["gain of energy, mlp"]
    assert gain.value > 2 * (gain.standard_error or 0)
    # the first energy, again from scratch
    kept = run.load_arrays("mlp 0")["energy"]
    assert len(kept) == len(result.figures[0].series[0].x)  # type: ignore[union-attr]
    train, _ = two_classes("digits", 300, 200, derive(0, "images"), "cpu")
    net = network("mlp", (1, 8, 8), derive(0, "init", "mlp", 0), init="lecun")
    J = torch.stack([_gradient(net, x) for x in train.x[:150]]).double()
    vectors = torch.linalg.eigh(J @ J.T).eigenvectors
    y = train.y[:150].double() * 2 - 1
    share = float((vectors[:, -10:].T @ y).square().sum() / y.square().sum())
    assert float(kept[0]) == pytest.approx(share, rel=1e-3)
    alone = execute(
        start(tmp_path / "b", "ntk/table4.1", nets="mlp", n_train=100, n_kernel=50, epochs=1, seeds=1, **TINY)
    )
    assert alone.numbers["gain of energy, mlp"].standard_error is None
    assert "one seed, no error bar" in alone.measured


def _gradient(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    grads = torch.autograd.grad(net(x[None])[0, 0], list(net.parameters()))
    return torch.cat([g.flatten() for g in grads])


@pytest.mark.slow
def test_fig4_2(tmp_path: Path) -> None:
    options = {**TINY, "n": 180, "rhos": "0,6,40", "epochs": 12}
    result = execute(start(tmp_path, "ntk/fig4.2", **options))
    check(result)
    assert [c.name for c in result.figures] == [f"{w}-mlp" for w in ("accuracy", "iterations", "distance", "turn")]
    for kind in ("f", "lin"):
        assert result.numbers[f"rank correlation of rho and accuracy of {kind}, mlp"].value < 0
    assert 0.6 < result.numbers["overlap of phi with its signs, mlp"].value < 1
    assert result.numbers["accuracy on CIFAR2, mlp"].value > 0.6
    line = result.figures[0].series[-1]  # type: ignore[union-attr]
    assert set(line.y) == {result.numbers["accuracy on CIFAR2, mlp"].value}


@pytest.mark.slow
def test_fig4_8(tmp_path: Path) -> None:
    run = start(tmp_path, "ntk/fig4.8", n=180, top=30, targets="5,15", seeds=2, epochs=25, **TINY)
    result = execute(run)
    check(result)
    gains = [[run.load_arrays(f"mlp {k} {seed}")["gains"] for k in (5, 15)] for seed in (0, 1)]
    worst = max(rank_of(torch.as_tensor(row[1]), 15) for row in gains)
    assert result.numbers["rank of the gain of target 15, mlp"].value == worst
    logs = [math.log(row[1][15] / row[0][5]) for row in gains]  # by seed, not pooled
    found = result.numbers["log gain of the last target minus the first, mlp"]
    assert (found.value, found.n) == (pytest.approx(sum(logs) / 2), 2)
    assert result.numbers["gain of the target, mlp"].value > 1.2
    assert result.numbers["general growth, mlp"].value > 1
    rows = [run.cached(f"mlp {k} {seed}", dict) for seed in (0, 1) for k in (5, 15)]
    log2s = [math.log2(float(row["growth"]) / float(row["norm"])) for row in rows]
    apart = result.numbers["growth of the alignments over that of the norm (log2), mlp"]
    assert apart.value == pytest.approx(sum(log2s) / 4)


@pytest.mark.slow
def test_fig4_11(tmp_path: Path) -> None:
    run = start(tmp_path, "ntk/fig4.11", n=180, targets="10", epochs=30, swaps="0,30", **TINY)
    result = execute(run)
    check(result)
    initial, trained = (result.numbers[f"iterations to 0.01, kernel of epoch {t}"].value for t in (0, 30))
    assert trained < initial
    kept = run.load_arrays("10 0")["accuracy"]  # the network, then the kernels
    paired = result.numbers["accuracy, kernel of epoch 30 minus the network"]
    assert paired.value == pytest.approx(float(kept[2] - kept[0]))


@pytest.mark.slow
def test_fig4_12_on_cifar2(tmp_path: Path) -> None:
    options = {**TINY, "n_train": 120, "n_test": 100, "epochs": 8, "swaps": "0,8"}
    run = start(tmp_path, "ntk/fig4.12-cifar2", seeds=2, **options)
    result = execute(run)
    check(result)
    kept = [run.load_arrays(f"mlp {seed}")["accuracy"] for seed in (0, 1)]  # the network, then the kernels
    gain = sum(float(row[2] - row[1]) for row in kept) / 2
    assert result.numbers["accuracy of the trained kernel minus the initial one, mlp"].value == pytest.approx(gain)
    train, test = two_classes("digits", 120, 100, derive(0, "images"), "cpu")
    net = network("mlp", (1, 8, 8), derive(0, "init", "mlp", 0), init="lecun")
    model = linearize(net, centered=True)  # the kernel of epoch 0 is that of the start
    fit(model, train.x, train.y, Training(epochs=8, batch=32).recipe(120), derive(0, "order", 0))
    assert evaluate(model, test.x, test.y)[1] == pytest.approx(float(kept[0][1]))


@pytest.mark.slow
def test_fig4_4_and_4_5(tmp_path: Path) -> None:
    result = execute(start(tmp_path / "a", "ntk/fig4.4", epochs=12, n=384))
    check(result)
    series = result.figures[0].series  # type: ignore[union-attr]
    assert series[0].y[0] > series[0].y[1]  # the first direction is learnt better
    assert series[2].y[0] == 1.0 > series[2].y[1]
    run = start(tmp_path / "b", "ntk/fig4.5")
    result = execute(run)
    check(result)
    assert result.numbers["overlap of the first 10 with the architecture's, lenet"].value > 2 * 10 / 64
    assert (run.path / "figures" / "directions-lenet.png").exists()


@pytest.mark.slow
def test_fig4_6(tmp_path: Path) -> None:
    result = execute(start(tmp_path, "ntk/fig4.6", sizes="40,300", epochs=6, seeds=2, n_test=150))
    check(result)
    few, many = (result.numbers[f"accuracy of f with {n} images"].value for n in (40, 300))
    assert many > few + 0.03
    curves = result.figures[0].series  # type: ignore[union-attr]
    gap = result.numbers["advantage with 300 images"].value
    assert gap == pytest.approx(curves[0].y[1] - curves[1].y[1])


def test_theorems_4_1_and_4_2_hold_to_rounding(tmp_path: Path) -> None:
    numbers = execute(start(tmp_path, "ntk/theorems")).numbers
    assert numbers["largest relative difference of the two sides of theorem 4.2"].value < 1e-12
    assert numbers["smallest of it for other functions"].value > 1.01  # the bound is not always tight
    assert numbers["largest of it for an eigenfunction, minus 1"].value < 1e-9
