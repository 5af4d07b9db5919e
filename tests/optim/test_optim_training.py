"""The optimisers as torch optimisers: groups, schedulers, resuming, mixed precision, hooks, plain rules."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import biascope as bs
from optim.optim_oracle import backward, conv, error, mlp, mlp_data, seeded, snapshot

KINDS = {
    "kfac": lambda net, **k: bs.optim.KFAC(net, refresh_every=3, **k),
    "ekfac": lambda net, **k: bs.optim.EKFAC(net, refresh_every=3, **k),
    "ekfac-ra": lambda net, **k: bs.optim.EKFAC(net, refresh_every=3, scalings="running", on_refresh="project", **k),
    "adam-fallback": lambda net, **k: bs.optim.EKFAC(net, refresh_every=3, fallback="adam", **k),
}
OPTIONS = {"lr": 0.05, "damping": 0.01, "momentum": 0.9, "weight_decay": 1e-3}


def normed():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)))


def train(net, opt, steps, schedule=None):
    for i in steps:
        opt.zero_grad()
        backward(net, *mlp_data(8, seed=i))
        opt.step()
        if schedule:
            schedule.step()


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_is_the_uninterrupted_one_bit_for_bit(kind):
    whole = normed()
    opt = KINDS[kind](whole, **OPTIONS)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    train(whole, opt, range(4), schedule)
    file = io.BytesIO()
    torch.save({"net": whole.state_dict(), "opt": opt.state_dict(), "lr": schedule.state_dict()}, file)
    train(whole, opt, range(4, 9), schedule)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = normed()
    other.load_state_dict(saved["net"])
    again = KINDS[kind](other, **OPTIONS | {"lr": 1.0})
    schedule = torch.optim.lr_scheduler.StepLR(again, 2, 0.5)
    again.load_state_dict(saved["opt"])
    schedule.load_state_dict(saved["lr"])
    train(other, again, range(4, 9), schedule)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), other.parameters()))


def test_state_survives_deepcopy_and_pickle_and_is_not_shared():
    net = normed()
    opt = bs.optim.EKFAC(net, **OPTIONS)
    train(net, opt, range(2))
    state = opt.state_dict()
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        for name, entry in state["curvature"]["units"].items():
            assert torch.equal(copied["curvature"]["units"][name]["s"], entry["s"])
    opt.load_state_dict(state)
    loaded = opt.preconditioner.pieces()["0.weight"].s
    assert loaded.data_ptr() != state["curvature"]["units"]["0.weight"]["s"].data_ptr()


def test_schedulers_scale_the_step():
    one, two = mlp(), mlp()
    opts = [bs.optim.EKFAC(one, lr=0.1, damping=0.01), bs.optim.EKFAC(two, lr=0.1, damping=0.01)]
    torch.optim.lr_scheduler.LambdaLR(opts[1], lambda t: 0.5)
    before = snapshot(one)
    for net, opt in zip((one, two), opts):
        backward(net, *mlp_data())
        opt.step()
    for (name, p), q in zip(one.named_parameters(), two.parameters()):
        assert error(before[name] - q, (before[name] - p) / 2) < 1e-12


def test_parameter_groups_have_their_own_lr_decay_and_damping():
    """Layer 0 stands still; layer 4's damping is huge, so that it moves by lr * grad / damping."""
    net = mlp()
    groups = [
        {"params": net[0].parameters(), "lr": 0.0},
        {"params": net[2].parameters()},
        {"params": net[4].parameters(), "damping": 1e9, "lr": 1e9},
    ]
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01, params=groups)
    before = snapshot(net)
    backward(net, *mlp_data())
    opt.step()
    assert torch.equal(net[0].weight, before["0.weight"])
    assert error(before["4.weight"] - net[4].weight, net[4].weight.grad) < 1e-6
    assert not torch.equal(net[2].weight, before["2.weight"])


def test_bias_in_a_group_without_decay():
    """Weight and bias share factors even where they are in different groups."""
    one, two = mlp(), mlp()
    biases = [p for p in two.parameters() if p.dim() == 1]
    weights = [p for p in two.parameters() if p.dim() > 1]
    a = bs.optim.EKFAC(one, lr=0.1, damping=0.01)
    b = bs.optim.EKFAC(two, lr=0.1, damping=0.01, params=[{"params": weights, "weight_decay": 0.5}, {"params": biases}])
    start = snapshot(one)
    for net, opt in ((one, a), (two, b)):
        backward(net, *mlp_data())
        opt.step()
    assert torch.equal(one[0].bias, two[0].bias)
    assert error(one[0].weight - two[0].weight, 0.1 * 0.5 * start["0.weight"]) < 1e-10


@pytest.mark.parametrize(("fallback", "rule"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)])
def test_what_no_factor_covers_is_stepped_by_the_named_plain_rule(fallback, rule):
    net, twin = normed(), normed()
    extra = {"momentum": 0.9} if fallback == "sgd" else {}
    opt = bs.optim.EKFAC(net, lr=0.05, damping=0.01, fallback=fallback, momentum=0.9, weight_decay=0.01)
    plain = rule(twin[1].parameters(), lr=0.05, weight_decay=0.01, **extra)
    for i in range(3):
        opt.zero_grad()
        backward(net, *mlp_data(8, seed=i))
        for p, q in zip(twin[1].parameters(), net[1].parameters()):
            p.grad = q.grad.clone()
        opt.step()
        plain.step()
    assert max(error(p, q) for p, q in zip(net[1].parameters(), twin[1].parameters())) < 1e-12
    table = opt.coverage()
    assert (table["0.weight"], table["1.weight"]) == ("ekfac", fallback)
    assert "BatchNorm1d has no Kronecker factors" in str(table)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_tied_modules_are_stepped_plainly_and_named():
    net = seeded(Tied)
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    before = snapshot(net)
    backward(net, *mlp_data())
    opt.step()
    assert opt.coverage()["a.weight"] == "sgd"
    assert "a.weight is tied: a and b share it" in str(opt.coverage())
    assert error(before["a.weight"] - net.a.weight, 0.1 * net.a.weight.grad) < 1e-12
    assert opt.coverage()["head.weight"] == "ekfac"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))


def test_layers_that_are_not_called_as_modules_are_found_out():
    net = seeded(Attention)
    x, y = torch.randn(5, 3, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    before = snapshot(net)
    backward(net, x, y)
    opt.step()
    assert opt.coverage()["mix.out_proj.weight"] == "sgd"
    assert error(before["mix.out_proj.weight"] - net.mix.out_proj.weight, 0.1 * net.mix.out_proj.weight.grad) < 1e-12


class Elsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.fc(x)) @ self.fc.weight.T * 3


def test_a_weight_used_outside_its_module_is_warned_about():
    net, (x, y) = seeded(Elsewhere), mlp_data()
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    backward(net, x, y)
    with pytest.warns(UserWarning, match=r"explain the gradient of fc\.weight only in part"):
        opt.step()
    opt.zero_grad()
    backward(net, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()  # once is enough


def test_clipped_gradients_are_not_warned_about():
    net = mlp()
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    backward(net, *mlp_data())
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()


# ---- hooks ----


def hooks(net):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()) + sum(
        len(p._post_accumulate_grad_hooks or {}) for p in net.parameters()
    )


def test_hooks_are_removable_and_do_not_keep_the_optimiser_alive():
    net = mlp()
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    assert hooks(net) == 1 + 3 + 3
    opt.close()
    assert hooks(net) == 0
    with bs.optim.KFACPreconditioner(net):
        assert hooks(net) > 0
    assert hooks(net) == 0
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    del opt
    gc.collect()
    assert hooks(net) == 0


@pytest.mark.parametrize("way", ["whole model", "BatchNorm"])
def test_fine_tuning_in_eval_mode(way):
    """BatchNorm with the statistics it has, as in fine-tuning: the same steps as of the layers without it."""

    def built():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Tanh(), nn.Linear(5, 3))

    frozen = built()
    plain = nn.Sequential(frozen[0], frozen[2], frozen[3])
    frozen[1].eps = 0.0  # mean 0, variance 1: the identity
    trained = built()
    trained[1].eps = 0.0
    trained.eval() if way == "whole model" else trained[1].eval()
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    for net in (plain, trained):
        opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
        for _ in range(3):
            opt.zero_grad()
            backward(net, x, y)
            opt.step()
    for a, b in zip(plain.parameters(), trained.parameters()):
        torch.testing.assert_close(a, b)


def test_only_calls_with_gradients_are_watched():
    net, (x, y) = mlp(), mlp_data()
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    records = opt.preconditioner.watcher.records
    with torch.no_grad():
        net(x)
    net.eval()
    net(x)
    net.train()
    assert not any(r.calls for r in records.values())
    F.cross_entropy(net(x), y)  # no backward
    torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))  # accumulates nothing
    backward(net, x, y)
    assert [len(r.calls) for r in records.values()] == [1, 1, 1]
    net.zero_grad()  # not the optimiser's: the next pass notices that the gradients are gone
    backward(net, x, y)
    assert [len(r.calls) for r in records.values()] == [1, 1, 1]


def test_two_backwards_through_one_graph_add_up():
    one, two, (x, y) = mlp(), mlp(), mlp_data()
    a, b = (bs.optim.EKFAC(net, lr=0.1, damping=0.01) for net in (one, two))
    backward(one, x, y)
    a.step()
    loss = F.cross_entropy(two(x), y)
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()
    b.step()
    assert max(error(q, p) for p, q in zip(one.parameters(), two.parameters())) < 1e-12


def test_copies_of_the_model_are_not_watched_and_the_model_can_be_pickled():
    net, (x, y) = mlp(), mlp_data()
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    other = copy.deepcopy(net)
    pickle.loads(pickle.dumps(net))
    backward(other, x, y)
    assert not any(r.calls for r in opt.preconditioner.watcher.records.values())


def test_checkpointed_layers():
    """Recomputed in backward: the same step."""
    from torch.utils.checkpoint import checkpoint

    class Saved(nn.Sequential):
        def forward(self, x):
            return self[4](checkpoint(nn.Sequential(*self[:4]), x, use_reentrant=False))

    one, (x, y) = mlp(), mlp_data()
    two = Saved(*mlp())
    for net in (one, two):
        opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
        backward(net, x, y)
        opt.step()
    assert max(error(q, p) for p, q in zip(one.parameters(), two.parameters())) < 1e-12


# ---- mixed precision ----


def test_autocast_bf16_keeps_factors_in_float32_and_trains():
    net = mlp().float()
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.05, refresh_every=5)
    x = mlp_data(64, torch.float32)[0]
    y, losses = x[:, :3].argmax(1), []
    for _ in range(30):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert opt.preconditioner.pieces()["0.weight"].s.dtype == torch.float32
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_gives_the_step_without_it(unscale):
    one, two, (x, y) = mlp(), mlp(), mlp_data()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    a = bs.optim.EKFAC(one, lr=0.1, damping=0.01)
    b = bs.optim.EKFAC(two, lr=0.1, damping=0.01, grad_scaler=scaler if unscale else None)
    backward(one, x, y)
    a.step()
    scaler.scale(F.cross_entropy(two(x), y)).backward()
    if unscale:
        scaler.unscale_(b)
    scaler.step(b)
    scaler.update()
    assert max(error(q, p) for p, q in zip(one.parameters(), two.parameters())) < 1e-12


def test_grad_scaler_unscaled_early_must_be_known():
    net, (x, y) = mlp(), mlp_data()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    scaler.scale(F.cross_entropy(net(x), y)).backward()
    scaler.unscale_(opt)
    with pytest.raises(bs.errors.InputError, match="grad_scaler=scaler"):
        scaler.step(opt)


@pytest.mark.parametrize("early", [False, True])
def test_overflow_under_a_grad_scaler_skips_the_step(early):
    """Also at the first step, where there is no curvature yet."""
    net = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    if not early:
        scaler.scale(F.cross_entropy(net(mlp_data()[0]), mlp_data()[1])).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    before, state = snapshot(net), copy.deepcopy(opt.state_dict())
    (scaler.scale(F.cross_entropy(net(mlp_data()[0]), mlp_data()[1])) * float("inf")).backward()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    assert opt.state_dict()["curvature"]["steps"] == state["curvature"]["steps"]
    opt.zero_grad()
    scaler.scale(F.cross_entropy(net(mlp_data()[0]), mlp_data()[1])).backward()
    scaler.step(opt)
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_preconditioner_with_grad_scaler():
    one, two, (x, y) = mlp(), mlp(), mlp_data()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    a, b = bs.optim.KFACPreconditioner(one), bs.optim.KFACPreconditioner(two, grad_scaler=scaler)
    backward(one, x, y)
    a.precondition()
    sgd = torch.optim.SGD(two.parameters(), lr=0.1)
    scaler.scale(F.cross_entropy(two(x), y)).backward()
    scaler.unscale_(sgd)
    b.precondition()
    assert max(error(q.grad, p.grad) for p, q in zip(one.parameters(), two.parameters())) < 1e-12


def test_bfloat16_parameters_keep_float32_curvature():
    net = mlp().bfloat16()
    opt = bs.optim.KFAC(net, lr=0.05, damping=0.05)
    x, y = mlp_data(16, torch.bfloat16)
    backward(net, x, y)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    assert opt.preconditioner.pieces()["0.weight"].U_A.dtype == torch.float32
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_closure():
    one, two, (x, y) = mlp(), mlp(), mlp_data()
    a, b = (bs.optim.EKFAC(net, lr=0.1, damping=0.01) for net in (one, two))
    backward(one, x, y)
    a.step()
    assert float(b.step(lambda: backward(two, x, y)).detach()) > 0
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters()))


def test_convolutions_with_sua_train():
    net = conv()
    opt = bs.optim.EKFAC(net, lr=0.05, damping=0.05, sua=True, scalings="running")
    x, y = torch.randn(16, 2, 6, 6, dtype=torch.float64), torch.arange(16) % 3
    losses = []
    for _ in range(20):
        opt.zero_grad()
        losses.append(float(backward(net, x, y).detach()))
        opt.step()
    assert losses[-1] < 0.8 * losses[0]
