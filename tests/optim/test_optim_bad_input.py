"""What goes wrong is said by name, and leaves parameters and state as they were."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import biascope as bs
from biascope.support.errors import CorruptError, InputError, UnsupportedError
from optim.optim_oracle import backward, conv, mlp, mlp_data, seeded, snapshot


def started(kind=bs.optim.EKFAC, **options):
    net = mlp()
    opt = kind(net, lr=0.1, damping=0.01, momentum=0.9, **options)
    backward(net, *mlp_data())
    opt.step()
    opt.zero_grad()
    return net, opt


def unchanged(net, opt, before, state):
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    now = opt.state_dict()
    assert now["curvature"]["steps"] == state["curvature"]["steps"]
    for name, unit in state["curvature"]["units"].items():
        assert all(torch.equal(now["curvature"]["units"][name][k], v) for k, v in unit.items() if torch.is_tensor(v))
    for key, entry in state["state"].items():
        assert all(torch.equal(now["state"][key][k], v) for k, v in entry.items())


@pytest.mark.parametrize("kind", [bs.optim.EKFAC, bs.optim.KFAC])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_loss_changes_nothing(kind, bad):
    net, opt = started(kind)
    before, state = snapshot(net), copy.deepcopy(opt.state_dict())
    (F.cross_entropy(net(mlp_data()[0]), mlp_data()[1]) * bad).backward()
    with pytest.raises(InputError, match="holds NaN or infinity; nothing was changed"):
        opt.step()
    unchanged(net, opt, before, state)
    opt.zero_grad()
    backward(net, *mlp_data())
    opt.step()
    assert all(bool(p.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize("options", [{}, {"scalings": "running"}])
def test_an_empty_batch_is_named_and_changes_nothing(options):
    net, opt = started(**options)
    before, state = snapshot(net), copy.deepcopy(opt.state_dict())
    net(mlp_data()[0][:0]).sum().backward()
    with pytest.raises(InputError, match="batch without examples"):
        opt.step()
    unchanged(net, opt, before, state)


def test_non_finite_gradient_of_a_plain_parameter_changes_nothing():
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    before = snapshot(net)
    backward(net, *mlp_data())
    net[1].weight.grad[0] = float("nan")
    with pytest.raises(InputError, match=r"gradient of 1\.weight"):
        opt.step()
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


def test_non_finite_closure():
    net, opt = started()
    before = snapshot(net)

    def closure():
        loss = F.cross_entropy(net(mlp_data()[0]), mlp_data()[1]) * float("nan")
        loss.backward()
        return loss

    with pytest.raises(InputError, match="the loss is nan"):
        opt.step(closure)
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


def test_an_output_gradient_that_overflows_is_found_before_the_state_moves():
    """The weight's own gradient is finite here, what the hooks saw is not."""
    net, opt = started()
    before, state = snapshot(net), copy.deepcopy(opt.state_dict())
    backward(net, *mlp_data())
    record = next(iter(opt.preconditioner.watcher.records.values()))
    record.calls[0].grad[0, 0] = float("inf")
    with pytest.raises(InputError, match="the output of"):
        opt.step()
    unchanged(net, opt, before, state)


@pytest.mark.parametrize("damping", [0.0, -1.0, float("nan"), float("inf")])
def test_damping_must_be_positive(damping):
    for make in (bs.optim.EKFAC, bs.optim.KFAC, bs.optim.KFACPreconditioner):
        with pytest.raises(InputError, match=r"damping=.*a finite number above 0"):
            make(mlp(), damping=damping)
    net, opt = started()
    before, state = snapshot(net), copy.deepcopy(opt.state_dict())
    opt.param_groups[0]["damping"] = damping
    backward(net, *mlp_data())
    with pytest.raises(InputError, match=r"damping=.*a finite number above 0"):
        opt.step()
    unchanged(net, opt, before, state)


def test_singular_factors_are_damped():
    """Inputs that are always zero, and units whose gradient never flows: zero rows in A and B."""
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    with torch.no_grad():
        net[0].bias.fill_(-100.0)  # all units dead
    for make in (bs.optim.EKFAC, bs.optim.KFAC):
        twin = copy.deepcopy(net)
        opt = make(twin, lr=0.1, damping=1e-8)
        backward(twin, *mlp_data())
        opt.step()
        assert all(bool(p.isfinite().all()) for p in twin.parameters())
        assert torch.equal(twin[0].weight, net[0].weight)


def test_step_without_backward():
    net, opt = started()
    with pytest.raises(InputError, match=r"call loss\.backward\(\) before the step"):
        opt.step()
    backward(net, *mlp_data())
    opt.step()
    with pytest.raises(InputError, match="no covered layer was seen"):
        opt.step()  # the gradients are still there, what belongs to them was used


def test_models_without_supported_layers():
    with pytest.raises(InputError, match="use a plain torch optimiser"):
        bs.optim.EKFAC(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="empty parameter list"):
        bs.optim.EKFAC(nn.ReLU())
    with pytest.raises(InputError, match=r"expected an nn\.Module, got list"):
        bs.optim.EKFAC(list(mlp().parameters()))
    with pytest.raises(InputError, match="has no values yet"):
        bs.optim.EKFAC(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(InputError, match="does not belong to the model"):
        bs.optim.EKFAC(mlp(), params=list(conv().parameters()))
    with pytest.raises(UnsupportedError, match="DataParallel"):
        bs.optim.KFACPreconditioner(nn.DataParallel(mlp()))


def test_mixed_devices_are_named():
    layer = nn.Linear(3, 2)
    layer.bias = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(InputError, match="has no values yet"):
        bs.optim.EKFAC(layer)
    net, opt = started()
    c = opt.preconditioner.curvatures["0.weight"]
    c.basis.s = c.basis.s.to("meta")  # as if the model had been moved after the first step
    backward(net, *mlp_data())
    with pytest.raises(InputError, match="the model was moved after the first step"):
        opt.step()


def test_inputs_without_a_batch_dimension():
    net = nn.Linear(4, 3)
    opt = bs.optim.EKFAC(net)
    net(torch.randn(4)).sum().backward()
    with pytest.raises(InputError, match="without a batch dimension"):
        opt.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping_mode": "factored", "damping": 0.01}, "damping_mode='factored' is not known; there is deep, plain"),
        ({"scalings": "ra", "damping": 0.01}, "scalings='ra' is not known; there is batch, running"),
        ({"on_refresh": "keep", "damping": 0.01}, "on_refresh='keep'"),
        ({"refresh_every": 0}, "refresh_every must be at least 1"),
        ({"decay": 1.0, "damping": 0.01}, "decay must be at least 0 and below 1"),
        ({"fallback": "rmsprop"}, "fallback='rmsprop' is not known; there is adam, sgd"),
        ({"loss_reduction": "none"}, "loss_reduction='none'"),
        ({"sharing": "sum"}, "sharing='sum'"),
        ({"lr": -1.0}, "lr=-1.0: a finite number from 0 on"),
        ({"lr": float("inf")}, "lr=inf: a finite number from 0 on"),
        ({"weight_decay": float("inf")}, "weight_decay=inf"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"lr": "0.1"}, "lr='0.1': one number is needed"),
        ({"momentum": "0.9"}, "momentum='0.9': one number is needed"),
        ({"damping": [0.1]}, r"damping=\[0.1\]: one number is needed"),
        ({"decay": "0.5", "damping": 0.01}, "decay='0.5': one number is needed"),
        ({"factor_decay": None}, "factor_decay=None: one number is needed"),
        ({"refresh_every": 2.5}, "refresh_every must be an integer, not 2.5"),
        ({"refresh_every": "10"}, "refresh_every must be an integer, not '10'"),
        ({"scalings": ["batch"], "damping": 0.01}, r"scalings=\['batch'\] is not known"),
        ({"fallback": ["sgd"]}, r"fallback=\['sgd'\]"),
        ({"sharing": ["expand"]}, r"sharing=\['expand'\]"),
        ({"params": 1}, "params=1: an iterable"),
        ({"scalings": "batch"}, "scalings goes with a damping"),
        ({"gradient_workers": 0.5}, "gradient_workers goes with a damping"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        bs.optim.EKFAC(mlp(), **options)


@pytest.mark.parametrize("bad", [None, "0.9", 1.0])
def test_decay_of_kfac_is_a_share(bad):
    with pytest.raises(InputError, match="factor_decay"):
        bs.optim.KFAC(mlp(), factor_decay=bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": [0.0, 0.0]}, "w: expected a tensor, got list"),
        ({"w": torch.zeros(2, dtype=torch.long)}, "w is torch.int64"),
        ({"w": torch.zeros(2, requires_grad=True) * 2}, "w is the result of a computation"),
        ({"features": "eye"}, "features: expected a tensor, got str"),
        ({"features": torch.ones(0, 2)}, r"disagree: \[0, 2\] on cpu"),
        ({"lr": "0.1"}, "lr='0.1': one number is needed"),
        ({"scale": None}, "scale=None: a number or 'first'"),
    ],
)
def test_arguments_of_supernat(change, message):
    given = {"w": torch.nn.Parameter(torch.zeros(2)), "features": torch.eye(2), "lr": 0.1} | change
    with pytest.raises(InputError, match=message):
        bs.optim.SuperNat(**given)


@pytest.mark.parametrize("bad", [[1.0, 0.0], 1.0, torch.ones(2, dtype=torch.complex64)])
def test_gradients_of_supernat(bad):
    opt = bs.optim.SuperNat(torch.nn.Parameter(torch.zeros(2)), torch.eye(2), lr=0.1)
    with pytest.raises(InputError, match="gradient"):
        opt.step(bad)


def test_states_of_others_are_refused_and_change_nothing():
    net, opt = started()
    state = copy.deepcopy(opt.state_dict())
    _, other = started(bs.optim.KFAC)
    with pytest.raises(InputError, match="the state is of kind 'kfac', this is 'ekfac'"):
        opt.load_state_dict(other.state_dict())
    wide = seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False), nn.Tanh(), nn.Linear(3, 3))
    )
    wrong = bs.optim.EKFAC(wide, lr=0.1, momentum=0.9)
    backward(wide, *mlp_data())
    wrong.step()
    with pytest.raises(InputError, match=r"0\.weight: "):
        opt.load_state_dict(wrong.state_dict())
    with pytest.raises(CorruptError, match="no 'curvature'"):
        opt.load_state_dict(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())
    unchanged(net, opt, snapshot(net), state)


def test_an_optimiser_is_not_copied_its_state_is():
    _, opt = started()
    with pytest.raises(UnsupportedError, match=r"state_dict\(\)"):
        copy.deepcopy(opt)


def test_an_input_changed_in_place_under_autocast_is_named():
    """Autograd keeps a copy in low precision there and would not notice."""
    net = nn.Linear(4, 3)
    opt = bs.optim.EKFAC(net)
    x = torch.randn(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
    x.add_(1.0)
    with pytest.raises(InputError, match="changed in place"):
        out.float().square().mean().backward()
    opt.close()


@pytest.mark.parametrize("kind", [bs.optim.KFAC, bs.optim.EKFAC])
def test_examples_that_the_loss_ignores_are_noticed(kind):
    """The mean is over 4 of 7 examples, the metric takes it as one over 7: 7 / 4 too large, as the warning says."""
    (x, y), net = mlp_data(), mlp()
    y[1:4] = -100
    opt = kind(net, lr=0.0, damping=0.01)
    backward(net, x, y)
    with pytest.warns(UserWarning, match=r"3 of 7 examples have no gradient.* too large by 1\.75"):
        opt.step()
    few = mlp()
    right = kind(few, lr=0.0, damping=0.01)
    backward(few, x[y >= 0], y[y >= 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right.step()
        opt.zero_grad()
        backward(net, x, y)
        opt.step()  # said once
    if kind is bs.optim.EKFAC:  # KFAC's input factors also see what is ignored
        ours, theirs = opt.preconditioner.pieces(), right.preconditioner.pieces()
        for name, piece in theirs.items():
            assert float(ours[name].trace() / piece.trace()) == pytest.approx(7 / 4, rel=1e-9)


def tokens(ignored=10):
    """A tagger, 6 sentences of 4 words, labels of which some are ignored."""
    gen = torch.Generator().manual_seed(0)
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = torch.randn(6, 4, 4, generator=gen, dtype=torch.float64)
    y = torch.randint(0, 3, (24,), generator=gen)
    y[torch.randperm(24, generator=gen)[:ignored]] = -100
    x[(y < 0).view(6, 4)] *= 5  # padding looks otherwise
    return net, x, y


def head_oracle(net, x, y, labelled):
    """Inputs with a 1 and output gradients of the words' own losses, [words, 6] and [words, 3]."""
    a = net[1](net[0](x)).detach().flatten(0, 1)
    g = (net[2](a).softmax(1) - F.one_hot(y.clamp_min(0), 3)).detach() * (y >= 0)[:, None]
    return torch.cat([a, torch.ones_like(a[:, :1])], 1)[labelled], g[labelled]


def test_words_that_the_loss_ignores_are_noticed_by_kfac():
    """A is of all words; with the head on the words with labels alone it is of those, as the warning advises."""
    net, x, y = tokens()
    opt = bs.optim.KFAC(net, lr=0.0, damping=0.01)
    F.cross_entropy(net(x).flatten(0, 1), y).backward()
    with pytest.warns(UserWarning, match=r"10 of 24 positions at the output of 2\.weight have no gradient.*use EKFAC"):
        opt.step()
    every, labelled = torch.ones(24, dtype=torch.bool), y >= 0
    a, g = head_oracle(net, x, y, every)
    found = opt.preconditioner.curvatures["2.weight"]
    torch.testing.assert_close(found.A[0], a.T @ a / 6)
    torch.testing.assert_close(found.B[0], (6 / 14) ** 2 * g.T @ g / 24)
    opt.zero_grad()
    F.cross_entropy(net(x).flatten(0, 1), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()  # said once
        opt.close()
        opt = bs.optim.KFAC(net, lr=0.0, damping=0.01)
        opt.zero_grad()
        F.cross_entropy(net[2](net[1](net[0](x)).flatten(0, 1)[labelled]), y[labelled]).backward()
        opt.step()
    a, g = head_oracle(net, x, y, labelled)
    found = opt.preconditioner.curvatures["2.weight"]
    torch.testing.assert_close(found.A[0], a.T @ a / 14)
    torch.testing.assert_close(found.B[0], g.T @ g / 14)


def test_words_that_the_loss_ignores_do_not_enter_the_scalings_of_ekfac():
    net, x, y = tokens()
    opt = bs.optim.EKFAC(net, lr=0.0, damping=0.01)
    F.cross_entropy(net(x).flatten(0, 1), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    a, g = head_oracle(net, x, y, torch.ones(24, dtype=torch.bool))
    rows = torch.einsum("nto,nti->noi", g.view(6, 4, 3), a.view(6, 4, 6)) * 6 / 14  # of the sentences' losses
    E = opt.preconditioner.pieces()["2.weight"]
    expected = (E.U_B[0].T @ rows @ E.U_A[0]).square().mean(0)
    torch.testing.assert_close(E.s[0].reshape(3, 6), expected)


def test_batches_with_all_labels_are_not_warned_of():
    net, x, y = tokens(ignored=0)
    opt = bs.optim.KFAC(net, lr=0.0, damping=0.01)
    F.cross_entropy(net(x).flatten(0, 1), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()


def test_sums_and_fitted_batches_are_not_warned_of():
    (x, y), net = mlp_data(), mlp()
    y[1:4] = -100
    opt = bs.optim.EKFAC(net, lr=0.0, damping=0.01, loss_reduction="sum")
    F.cross_entropy(net(x), y, reduction="sum").backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
