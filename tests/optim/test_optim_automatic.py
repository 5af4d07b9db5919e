"""KFAC and EKFAC without a damping: Adam's lengths, natural directions, a stretch and a damping that adapt."""

import math
import warnings

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.optim import adaptive as automatic
from optim.optim_oracle import backward, error, mlp, mlp_data, snapshot

KINDS = [bs.optim.KFAC, bs.optim.EKFAC]


def moved(net, before):
    """How far every layer went: weight and bias together."""
    out = {}
    for name, p in net.named_parameters():
        layer = name.rpartition(".")[0]
        out[layer] = out.get(layer, 0.0) + float((p.detach() - before[name]).square().sum())
    return {layer: math.sqrt(value) for layer, value in out.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_goes_as_far_as_with_adam(kind):
    net, twin = mlp(), mlp()
    opt, adam = kind(net, lr=0.01), torch.optim.Adam(twin.parameters(), lr=0.01)
    before = snapshot(net)
    for made, one in ((net, opt), (twin, adam)):
        backward(made, *mlp_data())
        one.step()
    mine, adams = moved(net, before), moved(twin, before)
    for layer, length in mine.items():
        assert length == pytest.approx(automatic.FIRST * adams[layer], rel=1e-6)
    assert max(error(p, q) for p, q in zip(net.parameters(), twin.parameters())) > 1e-3  # another way


@pytest.mark.parametrize(
    ("kind", "make"), [(bs.optim.KFAC, "KFACPreconditioner"), (bs.optim.EKFAC, "EKFACPreconditioner")]
)
def test_it_goes_along_the_natural_gradient_with_relative_damping(kind, make):
    net, twin = mlp(), mlp()
    more = {"scalings": "running", "decay": 0.95} if kind is bs.optim.EKFAC else {}
    opt = kind(net, momentum=0.0)
    before = snapshot(net)
    with getattr(bs.optim, make)(twin, damping=1.0, damping_mode="relative", **more) as pre:
        for made in (net, twin):
            backward(made, *mlp_data())
        pre.precondition()
    opt.step()
    for (name, p), q in zip(net.named_parameters(), twin.parameters()):
        way, d = (before[name] - p).flatten(), q.grad.flatten()
        assert float(way @ d / (way.norm() * d.norm())) == pytest.approx(1.0, abs=1e-9)


def test_relative_damping_is_a_multiple_of_the_mean_scaling():
    net, twin = mlp(), mlp()
    for made in (net, twin):
        backward(made, *mlp_data())
    x, y = mlp_data()
    with (
        bs.optim.KFACPreconditioner(net, damping=0.3, damping_mode="relative") as one,
        bs.optim.KFACPreconditioner(twin, damping=1.0, damping_mode="exact") as two,
    ):
        for made in (net, twin):
            made.zero_grad()
            backward(made, x, y)
        relative = one.directions(lambda unit: 0.3)
        basis = {unit.name: unit for unit in two.units}
        two.directions(lambda unit: 1.0)  # to know the scalings
        means = {name: float(piece.s.mean()) for name, piece in two.pieces().items()}
        two.curvatures = {name: type(c)() for name, c in two.curvatures.items()}
        two.steps = 0
        two.watcher.capture = True
        twin.zero_grad()
        backward(twin, x, y)
        exact = two.directions(lambda unit: 0.3 * means[unit.name])
    assert basis
    for a, b in zip(relative.values(), exact.values()):
        assert error(a, b) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_of_the_loss_does_not_matter(kind):
    paths = []
    for scale in (1.0, 1e3):
        net = mlp()
        opt = kind(net)
        for i in range(8):
            opt.zero_grad()
            x, y = mlp_data(8, seed=i)
            (scale * nn.functional.cross_entropy(net(x), y)).backward()
            opt.step()
        paths.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert error(paths[1], paths[0]) < 1e-4  # Adam's eps


def test_the_stretch_grows_where_steps_are_short_and_shrinks_where_they_are_long():
    x = torch.randn(64, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = {}
    for lr in (1e-5, 1.0):
        torch.manual_seed(0)
        net = nn.Linear(6, 1).double()
        opt = bs.optim.EKFAC(net, lr=lr, momentum=0.0)
        for _ in range(60):
            opt.zero_grad()
            (net(x) - x[:, :1]).square().mean().backward()
            opt.step()
        found[lr] = float(opt.param_groups[0]["stretch"])
    assert found[1e-5] > 5
    assert found[1.0] < automatic.FIRST
    assert all(automatic.SHORTEST <= value <= automatic.LONGEST for value in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bitwise_the_same(kind):
    whole, parts = mlp(), mlp()
    opt, first = kind(whole), kind(parts)

    def steps(net, opt, some):
        for i in some:
            opt.zero_grad()
            backward(net, *mlp_data(8, seed=i))
            opt.step()

    steps(whole, opt, range(12))
    steps(parts, first, range(7))
    again = mlp()
    again.load_state_dict(parts.state_dict())
    second = kind(again)
    second.load_state_dict(first.state_dict())
    steps(again, second, range(7, 12))
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters()))


def test_decay_is_apart_from_the_gradient():
    one, two = mlp(), mlp()
    before = snapshot(one)
    for net, decay in ((one, 0.0), (two, 0.1)):
        opt = bs.optim.EKFAC(net, lr=0.01, weight_decay=0.1 * bool(decay))
        backward(net, *mlp_data())
        opt.step()
    for (name, p), q in zip(one.named_parameters(), two.parameters()):
        assert error(p - q, 0.01 * 0.1 * before[name]) < 1e-8


def test_what_is_given_is_taken():
    net = mlp()
    opt = bs.optim.EKFAC(net, momentum=0.5, scalings="batch", refresh_every=7, fallback="sgd")
    assert opt.param_groups[0]["momentum"] == 0.5
    assert (opt.preconditioner.scalings, opt.preconditioner.refresh_every, opt.fallback) == ("batch", 7, "sgd")
    assert not opt.preconditioner.growing
    plain = bs.optim.EKFAC(mlp(), damping=0.02)
    assert (plain.param_groups[0]["lr"], plain.param_groups[0]["momentum"]) == (0.1, 0.0)
    assert (plain.preconditioner.scalings, plain.preconditioner.damping_mode) == ("batch", "plain")
    assert (plain.fallback, plain.preconditioner.growing) == ("sgd", False)


def digits(opt_of, epochs=3):
    """Test accuracies after each epoch of a small network on a thousand digits."""
    train, test = bs.data.load("digits", "train"), bs.data.load("digits", "test")
    x, y = train.x[:1000].flatten(1), train.y[:1000]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    opt, rng, found = opt_of(net), torch.Generator().manual_seed(1), []
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=rng).split(50):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            opt.step()
        with torch.no_grad():
            found.append(float((net(test.x.flatten(1)).argmax(1) == test.y).float().mean()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_given_is_no_worse_than_adam_after_every_epoch(kind):
    adam = digits(lambda net: torch.optim.Adam(net.parameters()))
    mine = digits(kind)
    assert all(a >= b for a, b in zip(mine, adam)), (mine, adam)


def test_examples_that_are_fitted_beyond_rounding_are_not_taken_for_ignored_ones():
    """Large logits: the gradients of some examples are 0 in float32, those of others nearly."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    x, y = torch.randn(64, 4), torch.arange(64) % 3
    with torch.no_grad():
        net.weight.mul_(200.0)
    y[: len(y) // 2] = net(x).argmax(1)[: len(y) // 2]
    opt = bs.optim.EKFAC(net)
    nn.functional.cross_entropy(net(x), y).backward()
    out = net(x).detach()
    silent = (out.softmax(1) - nn.functional.one_hot(y, 3)).abs().amax(1) == 0
    assert 0 < int(silent.sum()) < len(y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()


def test_supernat_needs_no_learning_rate():
    Phi = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    opt = bs.optim.SuperNat(w, Phi)
    assert opt.param_groups[0]["lr"] == pytest.approx(float(1 / torch.linalg.eigvalsh(Phi.T @ Phi)[-1]))
    target = Phi[:, 0]
    for _ in range(100):
        opt.step(Phi @ w.detach() - target)
    assert float((Phi @ w - target).square().mean() / target.square().mean()) < 0.05


def test_a_layer_that_is_too_wide_has_a_diagonal_factor():
    """(B (x) diag(A) + damping)^-1 G, and a state that can be read again."""
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 6, generator=gen, dtype=torch.float64), torch.arange(9) % 3
    net = nn.Linear(6, 3, bias=False).double()
    with bs.optim.KFACPreconditioner(net, damping=0.1, damping_mode="exact", widest=5) as pre:
        out = net(x)
        nn.functional.cross_entropy(out, y).backward()
        G, g = net.weight.grad.clone(), out.detach().softmax(1) - nn.functional.one_hot(y, 3)
        found = pre.directions(lambda unit: 0.1)[net.weight]
        a, (s, U) = x.square().mean(0), torch.linalg.eigh(g.T @ g / 9)
        assert error(found, U @ ((U.T @ G) / (s[:, None] * a + 0.1))) < 1e-10
        assert "diagonal A" in str(pre.coverage())
        pre.load_state_dict(pre.state_dict())
        assert pre.pieces()["weight"].U_A is None


def test_a_wide_convolution_shares_its_factor_between_offsets():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3))
    with bs.optim.KFACPreconditioner(net, widest=20) as pre:
        sua = {unit.name: unit.sua for unit in pre.units if "weight" in unit.name}
    assert sua == {"0.weight": False, "1.weight": True}  # 18 and 27 inputs
