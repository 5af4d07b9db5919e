"""The training loop against torch's own optimisers, and the small parts the kernel studies are made of."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from biascope import nets
from biascope.ensembles.graphs import Captured, capture
from biascope.support.errors import InputError
from biascope.support.seeds import generator
from biascope.tangent import linearize
from biascope_papers.ntk import training
from biascope_papers.ntk.initial import CUT, Init, redraw
from biascope_papers.ntk.setting import NETS, images, network, two_classes
from biascope_papers.ntk.training import (
    Recipe,
    Training,
    displacement,
    evaluate,
    expanded,
    fit,
    iterations_to,
    per_epoch,
    spread_out,
    steps_of,
)


def task(outputs: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=rng, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=rng, dtype=torch.float64))
    return net, x, y


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_fit_is_torchs_optimiser(outputs: int, optimiser: str, schedule: str) -> None:
    net, x, y = task(outputs)
    mine, theirs = copy.deepcopy(net), copy.deepcopy(net)
    recipe = Recipe(20, 16, 0.05, optimiser=optimiser, schedule=schedule)  # type: ignore[arg-type]
    losses = fit(mine, x, y, recipe, seed=3)
    kind = (
        torch.optim.SGD(theirs.parameters(), 0.05, 0.9) if optimiser == "sgd" else torch.optim.Adam(theirs.parameters())
    )
    for step in range(20):
        if step % 3 == 0:  # 50 // 16 full batches
            order = torch.randperm(50, generator=generator(3, "order", step // 3))
        batch = order[16 * (step % 3) : 16 * (step % 3) + 16]
        out = theirs(x[batch])
        if outputs == 1:
            loss = F.binary_cross_entropy_with_logits(out[:, 0], y[batch].double())
        else:
            loss = F.cross_entropy(out, y[batch])
        kind.param_groups[0]["lr"] = 0.05 * (1 - step / 20 if schedule == "linear" else 1)
        kind.zero_grad()
        loss.backward()
        kind.step()
        assert float(losses[step]) == pytest.approx(float(loss.detach()), rel=1e-4)
    for p, q in zip(mine.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, atol=1e-5), (p - q).abs().max()


def test_fit_looks_in_eval_mode_and_can_stop() -> None:
    net, x, y = task(1)
    net = nn.Sequential(net, nn.Dropout(0.0)).train()
    seen = []

    def look(step: int) -> bool:
        seen.append((step, net.training))
        return step == 6

    losses = fit(net, x, y, Recipe(10, 16), seed=0, at=[0, 3, 6, 10], look=look)
    assert seen == [(0, False), (3, False), (6, False)]
    assert len(losses) == 6
    assert net.training
    seen.clear()
    fit(net, x, y, Recipe(4, 16), seed=0, at=[4], look=look)
    assert seen == [(4, False)]


def test_fit_is_reproducible_and_leaves_the_global_state() -> None:
    net, x, y = task(1)
    state = torch.random.get_rng_state()
    one, two = copy.deepcopy(net), copy.deepcopy(net)
    a, b = (fit(n, x, y, Recipe(10, 8), seed=1) for n in (one, two))
    assert torch.equal(a, b)
    assert not torch.equal(a, fit(copy.deepcopy(net), x, y, Recipe(10, 8), seed=2))
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(InputError, match="50 inputs but 49"):
        fit(net, x, y[1:], Recipe(1), seed=0)


def test_a_linearised_network_takes_the_first_step_of_the_network() -> None:
    net, x, y = task(1)
    f, lin = copy.deepcopy(net), linearize(net)
    one, two = (fit(m, x, y, Recipe(2, 50, 0.01, 0.0), seed=0) for m in (f, lin))
    assert float(one[0]) == pytest.approx(float(two[0]), rel=1e-6)
    start = list(net.parameters())
    f, lin = copy.deepcopy(net), linearize(net)
    for m in (f, lin):
        fit(m, x, y, Recipe(1, 50, 0.01, 0.0), seed=0)
    for p, q, r in zip(f.parameters(), lin.parameters(), start):
        assert torch.allclose(p, q, atol=1e-12)
        assert not torch.equal(p, r)


@pytest.mark.gpu
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_captured_step_is_the_eager_one(optimiser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def seen(*step: Any, **more: Any) -> Any:
        made.append(capture(*step, **more))
        return made[-1]

    monkeypatch.setattr(training, "capture", seen)
    for linear in (False, True):
        net = network("lenet", (1, 8, 8), 0, "cuda")
        data = images("digits", "train", 200, 0, "cuda")
        losses = []
        for graph in (True, False):
            model = linearize(net) if linear else copy.deepcopy(net)
            recipe = Recipe(30, 32, 0.05, optimiser=optimiser, precision="float32", graph=graph)  # type: ignore[arg-type]
            losses.append(fit(model, data.x, (data.y < 5).long(), recipe, seed=0))
        assert torch.allclose(*losses, rtol=1e-3, atol=1e-4)
        assert losses[0][0] == pytest.approx(0.69, abs=0.1)
    assert [type(each) for each in made] == [Captured, Captured]  # neither fell back to eager steps


def test_small_parts() -> None:
    assert per_epoch(1000, 128) == 7
    assert per_epoch(50, 128) == 1
    assert steps_of(0.5, 1000, 128) == 4
    assert spread_out(5, 10, first=5) == [0, 5]
    assert spread_out(1000, 4, first=1) == [0, 1, 10, 100, 1000]
    assert iterations_to(torch.tensor([1.0, 0.0, 0.0]), 0.5, 1) == 2
    assert iterations_to(torch.tensor([1.0, 1.0]), 0.5, 1) == math.inf
    net = nn.Linear(3, 1)
    moved = copy.deepcopy(net)
    with torch.no_grad():
        moved.weight += 2.0
    assert displacement(moved, net)[0] == pytest.approx(2 * 3**0.5, rel=1e-5)
    with torch.no_grad():
        for p, q in zip(moved.parameters(), net.parameters()):
            p.copy_(-q)
    assert displacement(moved, net)[1] == pytest.approx(2.0)


def test_evaluate_counts_and_averages() -> None:
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(3.0)
    x = torch.tensor([[1.0], [-1.0], [2.0]])
    loss, right = evaluate(net, x, torch.tensor([1, 0, 0]), batch=2)
    assert right == pytest.approx(2 / 3)
    expected = (2 * math.log1p(math.exp(-3.0)) + math.log1p(math.exp(6.0))) / 3
    assert loss == pytest.approx(expected, rel=1e-5)


def test_networks_and_images() -> None:
    assert sum(p.numel() for p in network("mlp", (3, 32, 32), 0).parameters()) == 317_501  # as published
    for name in NETS:
        assert not network(name, (1, 32, 32), 0).training
    with pytest.raises(InputError, match="lenet"):
        network("lenat", (1, 8, 8), 0)
    train, test = two_classes("digits", 300, 100, 0, "cpu")
    plain = images("digits", "train", 300, 0)
    assert torch.equal(train.x, plain.x)
    assert torch.equal(train.y, (plain.y < 5).long())
    assert abs(float(train.x.mean())) < 1e-5
    assert abs(float(test.x.mean())) > 1e-5  # standardised with the training images' statistics
    assert len(images("digits", None, None, 0)) == 1797


@pytest.mark.parametrize(("init", "deviation"), [("lecun", 1.0), ("haiku", 0.8796)])
def test_weights_are_drawn_as_jax_does(init: Init, deviation: float) -> None:
    state = torch.random.get_rng_state()
    one, two = (network("lenet", (3, 32, 32), 5, init=init) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters()))
    weight = one.get_parameter("classifier.fc1.weight").detach()
    scaled = weight * weight.shape[1] ** 0.5
    assert float(scaled.std()) == pytest.approx(deviation, rel=0.01)
    assert float(scaled.abs().max()) <= 2 * deviation / CUT + 1e-4  # cut off at two deviations
    assert all(not p.detach().any() for name, p in one.named_parameters() if name.endswith("bias"))
    block = network("resnet18-narrow", (3, 8, 8), 0, init=init)
    scales = {n: p.detach().mean() for n, p in block.named_parameters() if "norm" in n and n.endswith("weight")}
    assert {n.rpartition(".")[0][-5:] for n, scale in scales.items() if scale == 0} == {"norm2"}
    siren = redraw(nets.build("siren", seed=1, hidden=(8,)), init, 0)
    for (name, p), q in zip(siren.named_parameters(), nets.build("siren", seed=1, hidden=(8,)).parameters()):
        assert torch.equal(p, torch.zeros_like(p) if name.endswith("bias") else q)


def test_a_network_trains_with_batch_statistics_and_its_kernel_without() -> None:
    data = images("digits", "train", 96, 0)
    y = (data.y < 5).long()
    start = network("resnet18-narrow", data.x.shape[1:], 0, init="lecun")
    options = Training(epochs=2, batch=32, norm="batch")
    net = options.copy_of(start, "f")
    fit(net, data.x, y, options.recipe(96), seed=0)
    kernels = expanded(net, start)
    assert float(dict(net.named_buffers())["stem.norm.running_var"].sub(1).abs().max()) > 0.01
    assert all(torch.equal(p, q) for p, q in zip(kernels.buffers(), start.buffers()))
    assert all(torch.equal(p, q) for p, q in zip(kernels.parameters(), net.parameters()))
    assert not kernels.training
    off = Training(epochs=2, batch=32).copy_of(start, "f")
    fit(off, data.x, y, options.recipe(96), seed=0)
    assert all(torch.equal(p, q) for p, q in zip(off.buffers(), start.buffers()))
