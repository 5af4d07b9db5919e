"""Checks that need training: at the size of the check where a minute allows it, else smaller, and said so."""

from pathlib import Path

import pytest
import torch
from torch import nn

import biascope as bs
from biascope import nets
from biascope.data import directional, disk, disk_labels, random_orthogonal, square_grid, yin_yang
from biascope.data.images import nad_flip, poison
from biascope.kernels import ntk
from biascope.probes import Probe
from biascope.spectral import amplitude_spectrum
from biascope.spectral.manifolds import flower
from biascope.studies import Run, configure, execute
from biascope.support.seeds import derive
from biascope_papers.nad.directional import Protocol, architecture, train_directions
from biascope_papers.spectral.fitting import draw_mlps, fit, norms_of, rank_correlation
from biascope_papers.spectral.sinusoids import wave_targets

F64 = torch.float64


# ------------------------------------------------------------------------------------------------------------- NADs


@pytest.mark.slow
def test_logistic_regression_at_the_noise_of_the_paper(tmp_path: Path) -> None:
    """Spec 01 check 15: >= 99.9 % with sigma = 3, 32 x 32, 10,000 samples, the paper's protocol; three directions."""
    run = Run.create(tmp_path / "run", {"study": "nad/fig1", "seed": 0})
    v = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))
    v[1] = 1.0  # DC
    v[2] = torch.tensor([1.0, -1.0]).repeat(512).view(32, 32)  # the highest frequency of one axis
    v /= v.flatten(1).norm(dim=1)[:, None, None]
    protocol = Protocol(n=10_000, n_test=2000, sigma=3.0, eps=1.0, epochs=20)
    found = train_directions(run, "logreg", architecture("logreg", 32), v, protocol)
    assert found.test.min() >= 0.999


@pytest.mark.slow
def test_the_mlp_at_the_noise_of_the_paper(tmp_path: Path) -> None:
    """Spec 01 check 15: about 100 % for every direction, 32 x 32, 10,000 samples, the paper's protocol. Here 94 %, for
    the constant picture and for the highest frequency alike; 4000 samples give 71 % (the kept run of nad/fig20)."""
    run = Run.create(tmp_path / "run", {"study": "nad/fig20", "seed": 0})
    v = torch.stack([torch.ones(32, 32), torch.tensor([1.0, -1.0]).repeat(512).view(32, 32)]) / 32
    found = train_directions(run, "mlp", architecture("mlp", 32), v, Protocol(n_test=2000))
    assert found.train.min() == 1.0
    assert found.test.min() > 0.9
    assert abs(found.test[0] - found.test[1]) < 4 * (2 * 0.94 * 0.06 / 2000) ** 0.5


def test_the_flip_does_not_matter_to_logistic_regression() -> None:
    """Spec 03 B9: a rotation is nothing to a linear classifier; poisoning with eps = 0 still removes content."""
    U = random_orthogonal(64, seed=0)
    train = directional(U[5].view(1, 8, 8), 400, eps=0.5, sigma=1.0, seed=1)
    test = directional(U[5].view(1, 8, 8), 400, eps=0.5, sigma=1.0, seed=2)
    accuracy = []
    for turn in (lambda x: x, lambda x: nad_flip(x, U.view(64, 8, 8))):
        X, y = turn(train.x).flatten(1), 2.0 * train.y.double() - 1
        w = torch.linalg.solve(X.T @ X + torch.eye(64, dtype=F64), X.T @ y)
        accuracy.append(float(((turn(test.x).flatten(1) @ w > 0) == (test.y == 1)).double().mean()))
    assert accuracy[0] == accuracy[1] > 0.9
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=F64)
    labels = torch.arange(6)
    emptied = poison(images, labels, U.view(64, 8, 8), eps=0.0)
    assert float((images - emptied).flatten(1).norm(dim=1).mean()) > 0.1
    assert torch.allclose(poison(emptied, labels, U.view(64, 8, 8), eps=0.0), emptied, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- spectral bias


@pytest.mark.slow
def test_low_frequencies_first_at_the_size_of_the_check() -> None:
    """Spec 04 checks 10 and 12: k = 5 to 50, 6 Linear layers, Adam 3e-4, 5000 steps. 128 units instead of 256, for
    time; with 256 (75 s): 1.09, 0.89 and 0.10 at k = 5, 10, 50, rank correlation -0.98, norms 3 to 15 times; and check
    11, growing amplitudes: 1.09, 1.46, 1.13 at k <= 15 and 0.09 at 50."""
    frequencies = tuple(range(5, 55, 5))
    z, y = wave_targets(frequencies, [1.0] * 10, 200, 1, 0)

    def measure(out: torch.Tensor, params: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"spectrum": amplitude_spectrum(out)[:, list(frequencies)], "norms": norms_of(params)}

    done = fit(draw_mlps(1, 1, 6, 128, 0), z[:, None], y, steps=5000, lr=3e-4, every=5000, measure=measure)
    last = done.records["spectrum"][-1, 0]
    assert float(last[:2].min()) > 0.8
    assert float(last[-1]) < 0.3
    assert float(rank_correlation(torch.tensor(frequencies), last[None])) < -0.7
    growth = done.records["norms"][-1, 0] / done.records["norms"][0, 0]
    assert float(growth[1:-1].min()) >= 2


@pytest.mark.slow
def test_noise_takes_high_frequencies_first(tmp_path: Path) -> None:
    """Spec 04 check 13: 1 at delta = 0, falling in delta for the highest k, and lower there in the middle."""
    run = Run.create(tmp_path / "run", configure("spectral/fig3.3", "smoke", seed=0, overrides={}))
    execute(run)
    left = torch.stack([run.load_arrays(f"network {i}")["left"] for i in range(3)]).mean(0)  # [deltas, k]
    assert torch.allclose(left[0], torch.ones_like(left[0]), atol=1e-4)
    assert bool((left[:4, -1].diff() < 0).all())
    assert float(left[2, -2:].mean()) < float(left[2, :2].mean())


@pytest.mark.slow
def test_petals_halve_the_error() -> None:
    """Spec 04 check 14: after 3000 steps the error with L = 10 or 16 is below half of that with L = 0. 64 units and
    k = 5 to 40 on 160 points instead of 256 units and k = 20 to 200 on 1000, for time."""
    frequencies = tuple(range(5, 45, 5))
    z, y = wave_targets(frequencies, [1.0] * 8, 160, 1, 0)
    x = torch.stack([flower(L)(z) for L in (0, 10, 16)])
    done = fit(draw_mlps(3, 2, 6, 64, derive(0, "init")), x, y.repeat(3, 1), steps=3000, lr=1e-3, every=3000)
    circle, ten, sixteen = done.losses[-1].tolist()
    assert ten < 0.5 * circle
    assert sixteen < 0.5 * circle


# -------------------------------------------------------------------------------------------- tangent kernels, disk


@pytest.mark.slow
def test_the_kernel_of_a_network_that_learns_a_disk() -> None:
    """Spec 04 check 24: 3000 steps of gradient descent at 0.05; CKA at least doubles, lambda_1 grows 50 times.

    The check's third number, the effective rank at step 300, is tested below on the network it was measured on.
    """
    task, points = disk(500, seed=0), square_grid(20)
    net, y = nets.build("mlp", seed=0, in_features=2, hidden=(60,) * 3), disk_labels(points).double() * 2 - 1
    sgd, seen = torch.optim.SGD(net.parameters(), 0.05), {}
    for step in range(3001):
        if step in (0, 300, 3000):
            K = ntk(net, points, outputs=0, precision="float64").centered()
            seen[step] = (K.alignment(y), float(K.eigh(1).values[0]), K.effective_rank())
        sgd.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(net(task.x.float())[:, 0], task.y.float()).backward()
        sgd.step()
    assert seen[3000][0] >= 2 * seen[0][0]
    assert seen[3000][1] >= 50 * seen[0][1]
    assert seen[300][2] < 0.9 * seen[0][2]


@pytest.mark.slow
def test_effective_rank_on_the_disk_falls_early() -> None:
    """Spec 04 check 24: centred effective rank at step 300 below 0.7 of the start (14.8 to 8.5 in the specification).

    On its network, six Linear layers of 256 units, torch's initialisation. It depends on the seed (0.60, 0.67 and 0.77
    for seeds 0 to 2), so the middle one of three is tested. With one layer more it is 0.80 to 0.83.
    """
    left = []
    for seed in range(3):
        task, points = disk(500, seed=seed), square_grid(20)
        net = nets.build("mlp", seed=seed, in_features=2, hidden=(256,) * 5)
        sgd, ranks = torch.optim.SGD(net.parameters(), 0.05), []
        for step in range(301):
            if step in (0, 300):
                ranks.append(ntk(net, points, outputs=0, precision="float64").centered().effective_rank())
            sgd.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(net(task.x.float())[:, 0], task.y.float()).backward()
            sgd.step()
        assert 12 < ranks[0] < 18
        left.append(ranks[1] / ranks[0])
    assert sorted(left)[1] < 0.7, left


@pytest.mark.slow
def test_spectrum_on_the_disk_at_initialisation() -> None:
    """Spec 05 check 28: 6 x 256 on 2500 points; lambda_20 / lambda_1 is 1.2 to 1.7 % centred, 0.005 to 0.6 % not."""
    K = ntk(nets.build("mlp", seed=0, in_features=2, hidden=(256,) * 6), square_grid(50), outputs=0)
    centred, raw = (kernel.eigh(20).values for kernel in (K.centered(), K))
    assert 0.010 < float(centred[19] / centred[0]) < 0.018
    assert 5e-5 < float(raw[19] / raw[0]) < 6e-3


# ------------------------------------------------------------------------------------------------- lazy and hasty


@pytest.mark.slow
def test_lazy_training_keeps_signs_and_kernel() -> None:
    """Spec 05 check 35 at alpha = 100 itself: both above .99 when the training loss has halved, smaller for alpha = 1.
    Two layers of 256: with 16 units one flipped unit is already a per cent."""
    task = yin_yang(100, seed=0)
    x, y = task.x.double(), task.y.double()
    net = nets.build("mlp", seed=0, in_features=2, hidden=(256, 256)).double()
    ends = {}
    for alpha in (1.0, 100.0):
        model = bs.lazy(net, alpha)
        probe = Probe(model, x, metrics=["ntk_alignment", "sign_similarity"], schedule=1500, max_overhead=None)
        sgd = torch.optim.SGD(model.parameters(), bs.tangent.lazy_lr(0.1, alpha))
        for _ in range(1500):
            sgd.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y)
            loss.backward()
            sgd.step()
            probe.step(float(loss.detach()))
        ends[alpha] = (probe.records[-1]["ntk_alignment"], probe.records[-1]["sign_similarity"], float(loss.detach()))
    assert min(ends[100.0][:2]) > 0.99, ends
    assert ends[1.0][0] < ends[100.0][0]
    assert ends[1.0][1] < ends[100.0][1]
    assert ends[100.0][2] < 0.6  # it has learnt something


@pytest.mark.slow
def test_bounds_of_rbf_features_at_the_size_of_the_check(tmp_path: Path) -> None:
    """Spec 05 check 31: medians over 80 draws at c = 0, .5, .9, .99, 1. The table is that of other random features:
    where the smallest eigenvalues decide (c >= .99) the bound with A = Id differs from draw to draw of the features
    (0.60 here, 0.98 in the table; 4e3 and 1.3e3 at c = 1), so only its size is asserted there."""
    overrides = {"scales": "0,0.5,0.9,0.99,1", "draws": 80}
    run = Run.create(tmp_path / "run", configure("lazy/figB.3", "laptop", seed=0, overrides=overrides))
    numbers = execute(run).numbers
    identity = {c: numbers[f"A = Id bound, c = {c}, median"].value for c in ("0", "0.5", "0.9", "0.99", "1")}
    optimal = {c: numbers[f"optimal bound, c = {c}, median"].value for c in identity}
    assert [identity[c] for c in ("0", "0.5", "0.9")] == pytest.approx([1.0, 0.65, 0.64], abs=0.12)
    assert 0.5 < identity["0.99"] < 2
    assert identity["1"] > 100 * max(identity["0.99"], 0.98)
    assert optimal["0"] == pytest.approx(0.81, abs=0.01)
    assert list(optimal.values())[1:] == pytest.approx([0.49] * 4, abs=0.08)
    errors = [numbers[f"test error, c = {c}"].value for c in identity]
    assert errors[0] == pytest.approx(0.48, abs=0.06)
    assert max(errors[1:4]) < 0.05
