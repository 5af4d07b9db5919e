"""The trainer of alpha-scaled regimes against torch's SGD on `bs.lazy` and on the linearised model."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.support import InputError
from biascope.tangent import lazy, lazy_lr, linearize
from biascope_papers.lazy.crowd import cross, logistic, squares
from biascope_papers.lazy.training import (
    Linearity,
    Setting,
    Trajectory,
    Watched,
    batches,
    make_step,
    start_outputs,
    train,
)


@pytest.fixture(name="task")
def _task() -> tuple[nn.Module, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(60, 5, generator=rng, dtype=torch.float64)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long() + (x[:, 3] > 1).long()
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double().eval()
    return net, x, y


def steps(net: nn.Module, x: Tensor, y: Tensor, setting: Setting, count: int) -> tuple[nn.Module, list[float]]:
    net = copy.deepcopy(net)
    step = make_step(net, x, y, start_outputs(net, x, setting.batch_size), setting)
    feed = batches(len(x), setting.batch_size, 7, x.device)
    return net, [float(step(next(feed))) for _ in range(count)]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 30.0])
def test_steps_are_those_of_sgd_on_the_lazy_network(task: tuple[nn.Module, Tensor, Tensor], alpha: float) -> None:
    net, x, y = task
    setting = Setting(alpha=alpha, lr=0.05, batch_size=20)
    ours, losses = steps(net, x, y, setting, 12)
    theirs = lazy(copy.deepcopy(net), alpha)
    sgd = torch.optim.SGD(theirs.parameters(), lazy_lr(0.05, alpha), momentum=0.9)
    feed = batches(len(x), 20, 7, x.device)
    for expected in losses:
        batch = next(feed)
        loss = F.cross_entropy(theirs(x[batch]), y[batch])
        assert loss.item() == pytest.approx(expected, rel=1e-9)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_large_alpha_follows_the_linearised_model_and_alpha_1_does_not(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, x, y = task
    flat = linearize(net)
    sgd = torch.optim.SGD(flat.parameters(), 0.05, momentum=0.9)
    feed, expected = batches(len(x), 20, 7, x.device), []
    for _ in range(30):
        batch = next(feed)
        loss = F.cross_entropy(flat(x[batch]), y[batch])
        expected.append(float(loss))
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    far = torch.tensor(expected)
    for alpha, low, high in ((1e4, 0.0, 2e-3), (1.0, 0.05, 9.0)):
        _, found = steps(net, x, y, Setting(alpha=alpha, lr=0.05, batch_size=20), 30)
        assert low <= float((torch.tensor(found) - far).abs().max()) < high


def test_same_seed_same_batches_each_epoch_once() -> None:
    feed = batches(25, 10, 1, torch.device("cpu"))
    first = torch.cat([next(feed) for _ in range(2)])
    second = torch.cat([next(feed) for _ in range(2)])
    assert len(first.unique()) == 20  # without repetition; the last 5 are left out
    assert not torch.equal(first, second)
    again = batches(25, 10, 1, torch.device("cpu"))
    assert torch.equal(torch.cat([next(again) for _ in range(2)]), first)


def test_trajectory_probes_at_thresholds_and_measures_groups(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, x, y = task
    before = copy.deepcopy(net.state_dict())
    watched = Watched.of({"first": (x[:20], y[:20]), "rest": (x[20:], y[20:])})
    setting = Setting(alpha=2.0, lr=0.2, batch_size=20, steps=300, stop=0.2, factor=0.9, every=3, linearity_every=3)
    found = train(net, x, y, watched, setting, 0, x[:6])
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())  # a copy was trained
    assert int(found.steps[0]) == 0
    with torch.no_grad():
        at_start = F.cross_entropy(net(x[:20]), y[:20])
    assert float(found.losses("first")[0]) == pytest.approx(float(at_start), rel=1e-9)
    crossed = found.batch_loss[1:-1]
    grid = (crossed / math.log(3)).log() / math.log(0.9)
    assert bool((grid.floor().diff() >= 1).all())  # each probe is at least one threshold below the last
    assert float(found.batch_loss[-1]) < 0.2 or int(found.steps[-1]) == 300
    assert found.linearity[0].tolist() == pytest.approx([1, 1, 1])
    assert int(found.linearity_probes[-1]) == len(found.steps) - 1
    assert float(found.linearity[-1, 1]) < 0.999
    again = Trajectory.read(found.values())
    assert again.names == found.names
    assert torch.equal(again.loss, found.loss)


def test_lazy_stays_linear_and_hasty_does_not(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    """Check 35: alignment and sign similarity above .99 at the end with alpha = 100, smaller with alpha = 1."""
    net, x, y = task
    watched = Watched.of({"all": (x, y)})
    ends = []
    for alpha in (1.0, 1000.0):
        setting = Setting(alpha=alpha, lr=0.1, batch_size=60, steps=400, stop=0.4, momentum=0.0)
        ends.append(train(net, x, y, watched, setting, 0, x[:10]).linearity[-1])
    assert bool((ends[1] > 0.99).all())
    assert bool((ends[0] < ends[1]).all())
    assert float(ends[0][1]) < 0.97


def test_divergence_ends_a_training_without_a_crash(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, x, y = task
    found = train(net, x, y, Watched.of({"all": (x, y)}), Setting(lr=1e8, batch_size=20, steps=100, every=5))
    assert bool(found.loss.isfinite().all())
    assert int(found.steps[-1]) < 100


def test_groups_must_fit() -> None:
    with pytest.raises(InputError, match="2 inputs, 3 labels"):
        Watched(torch.zeros(2, 1), torch.zeros(3).long(), torch.zeros(2).long(), ("a",))


def test_linearity_is_the_metrics_by_hand() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    metric = Linearity(net, x)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.3 * torch.randn_like(p))
    found = metric(other)
    signs = [(n[0](x) > 0) for n in (net, other)]
    grams = [(r := n[1](n[0](x))) @ r.T for n in (net, other)]
    jacobians = []
    for n in (net, other):
        rows = [torch.autograd.grad(o, list(n.parameters()), retain_graph=True) for o in n(x).flatten()]
        jacobians.append(torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]))
    kernels = [J @ J.T for J in jacobians]

    def aligned(a: Tensor, b: Tensor) -> float:
        return float((a * b).sum() / (a.norm() * b.norm()))

    assert found.tolist() == pytest.approx(
        [float((signs[0] == signs[1]).double().mean()), aligned(*kernels), aligned(*grams)], rel=1e-9
    )


def test_crowd_is_gradient_descent_on_each_network_and_keeps_the_moment_of_crossing() -> None:
    """Every network of the crowd against a loop over `bs.lazy` with torch's SGD; outputs at the first crossing."""
    from biascope.ensembles import record

    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 12, 2, generator=rng, dtype=torch.float64)
    y = (x[..., 0] > 0).double()
    at = torch.randn(5, 2, generator=rng, dtype=torch.float64)

    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)).double()

    found = cross(factory, x, y, at, alpha=3.0, lr=0.3, steps=150, thresholds=(0.6, 0.4, 1e-9), seed=5)
    for i in range(3):
        net = lazy(record(factory).draw(5, i, i + 1, None, torch.float64).module(0), 3.0)
        sgd, crossed = torch.optim.SGD(net.parameters(), lazy_lr(0.3, 3.0)), {}
        for now in range(150):
            loss = logistic(net(x[i])[None, :, 0], y[i : i + 1])[0]
            for k, limit in enumerate((0.6, 0.4)):
                if float(loss) <= limit and k not in crossed:
                    crossed[k] = now, net(at)[:, 0].detach()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        for k, (now, out) in crossed.items():
            assert int(found.steps[i, k]) == now
            assert torch.allclose(found.outputs[i, k], out, atol=1e-9)
        assert set(crossed) == {k for k in (0, 1) if int(found.steps[i, k]) >= 0}
        assert 0 in crossed
    assert bool((found.steps[:, 2] == -1).all())
    assert bool(found.outputs[:, 2].isnan().all())


def test_squares_and_a_start_at_zero() -> None:
    out = cross(
        lambda: nn.Linear(2, 1, bias=False).double(),
        torch.eye(2, dtype=torch.float64)[None],
        torch.tensor([[1.0, 2.0]], dtype=torch.float64),
        torch.eye(2, dtype=torch.float64),
        alpha=10.0,
        lr=0.1,
        steps=300,
        thresholds=(2.5, 1e-3),
        loss=squares,
        include_init_output=False,
    )
    assert int(out.steps[0, 0]) == 0  # 0.5 (1 + 4): nothing is said at the start
    assert out.outputs[0, 0].tolist() == [0.0, 0.0]
    # linear, so alpha cancels: the residual falls by (1 - lr) a step
    expected = math.ceil(math.log(1e-3 / 2.5) / (2 * math.log(0.9)))
    assert int(out.steps[0, 1]) == expected


@pytest.mark.gpu
def test_captured_steps_are_the_eager_ones() -> None:
    rng = torch.Generator().manual_seed(3)
    x, y = torch.randn(64, 5, generator=rng).cuda(), torch.randint(3, (64,), generator=rng).cuda()
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)).cuda().eval()
    ends = []
    for capture in (False, True):
        setting = Setting(alpha=100.0, lr=0.1, batch_size=16, steps=60, stop=0.0, capture=capture)
        ends.append(train(net, x, y, Watched.of({"all": (x, y)}), setting).loss)
    assert torch.allclose(ends[0], ends[1], rtol=1e-3)
    crossed = []
    for capture in (False, True):
        found = cross(
            lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)),
            x[None, :, :2],
            (y[None] > 0).float(),
            x[:, :2],
            alpha=10.0,
            lr=0.5,
            steps=300,
            thresholds=(0.66, 0.65),
            capture=capture,
        )
        crossed.append(found.steps)
    assert torch.equal(*crossed)
