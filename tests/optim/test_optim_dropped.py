"""Gradients that are dropped or zeroed without a step take the examples behind them along."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import biascope as bs
from optim.optim_oracle import backward, mlp, mlp_data, rng

MAKERS = {
    "kfac": lambda net: bs.optim.KFAC(net, lr=0.1),
    "ekfac": lambda net: bs.optim.EKFAC(net, lr=0.1),
    "running": lambda net: bs.optim.EKFAC(net, lr=0.1, damping=1e-3, scalings="running"),
}


def zero_in_place(net, opt):
    for p in net.parameters():
        p.grad.zero_()


def replace_by_zeros(net, opt):
    for p in net.parameters():
        p.grad = torch.zeros_like(p)


DROPS = {
    "set to None": lambda net, opt: net.zero_grad(),
    "zeroed by the model": lambda net, opt: net.zero_grad(set_to_none=False),
    "zeroed by the optimiser": lambda net, opt: opt.zero_grad(set_to_none=False),
    "zeroed in place": zero_in_place,
    "replaced by zeros": replace_by_zeros,
}


class Pair(nn.Module):
    """The last layer is called, or its weights are used without it."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.called = nn.Linear(5, 4), nn.Linear(4, 3), True
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=rng(1)))

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h) if self.called else F.linear(h, self.last.weight, self.last.bias)


def batch(seed, n):
    r = rng(seed)
    return torch.randn(n, 5, generator=r, dtype=torch.float64), torch.randint(3, (n,), generator=r)


def values(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("late", [False, True])
def test_a_batch_whose_gradient_was_dropped_does_not_count(maker, drop, late):
    """`late`: dropped between the next forward pass and its backward pass, as many loops do."""
    found = []
    for skipped in (False, True):
        net = Pair().double()
        opt = MAKERS[maker](net)
        x, y = batch(2, 7)
        if skipped:
            other, labels = batch(3, 4)
            F.cross_entropy(net(other), labels).backward()
            if not late:
                DROPS[drop](net, opt)
        loss = F.cross_entropy(net(x), y)
        if skipped and late:
            DROPS[drop](net, opt)
        loss.backward()
        opt.step()
        found.append(values(net))
    assert torch.equal(*found)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_gradient_that_is_only_changed_still_counts(maker):
    """Accumulation with the gradient scaled in between: both halves are the batch."""
    x, y = batch(2, 8)
    found = []
    for halves in (False, True):
        net = Pair().double()
        opt = MAKERS[maker](net)
        if halves:
            F.cross_entropy(net(x[:4]), y[:4]).div(4).backward()
            for p in net.parameters():
                p.grad.mul_(2)
            F.cross_entropy(net(x[4:]), y[4:]).div(2).backward()
        else:
            weights = torch.tensor([0.25] * 4 + [0.5] * 4, dtype=torch.float64) / 4
            (F.cross_entropy(net(x), y, reduction="none") * weights).sum().backward()
            right = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
            for p, g in zip(net.parameters(), right):
                p.grad.copy_(g)
        opt.step()
        found.append(values(net))
    assert torch.allclose(*found, rtol=0, atol=1e-12)


def test_adam_takes_over_a_parameter_that_has_a_momentum():
    """A layer that is covered in one step and used without its module in the next: Adam begins there."""
    net = Pair().double()
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01, momentum=0.9, fallback="adam")
    for step in range(4):
        net.called = step % 2 == 0
        opt.zero_grad()
        x, y = batch(step, 6)
        F.cross_entropy(net(x), y).backward()
        before, g = net.last.weight.detach().clone(), net.last.weight.grad.clone()
        opt.step()
        if step == 1:  # Adam's first step is lr g / (|g| + eps)
            assert torch.allclose(before - net.last.weight, 0.1 * g / (g.abs() + 1e-8), rtol=1e-9)
    assert opt.state[net.last.weight]["step"] == 2


@pytest.mark.parametrize("maker", MAKERS)
def test_two_calls_of_the_model_before_one_backward(maker):
    """Of different sizes they are more examples; of one size they could be pairs, and a warning says what is done."""
    x, y = batch(2, 8)
    for first in (3, 4):
        net = Pair().double()
        opt = MAKERS[maker](net)
        parts = [F.cross_entropy(net(x[s]), y[s], reduction="sum") for s in (slice(0, first), slice(first, 8))]
        (sum(parts) / 8).backward()
        if first == 4:
            with pytest.warns(UserWarning, match="called several times with 4 examples before one backward"):
                opt.step()
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.step()
        whole = Pair().double()
        other = MAKERS[maker](whole)
        F.cross_entropy(whole(x), y).backward()
        other.step()
        assert torch.allclose(values(net), values(whole), rtol=0, atol=1e-12)


def test_a_layer_reused_inside_the_model_is_no_pair_of_calls():
    class Twice(Pair):
        def forward(self, x):
            return self.last(self.first(x).tanh() + self.first(2 * x).tanh())

    net = Twice().double()
    opt = bs.optim.EKFAC(net, lr=0.1)
    x, y = batch(2, 8)
    F.cross_entropy(net(x), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()


def test_coverage_tells_of_a_weight_frozen_later():
    """Its bias is stepped plainly then: a factor is of both."""
    net = Pair().double()
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01)
    net.first.weight.requires_grad_(False)
    x, y = batch(2, 8)
    F.cross_entropy(net(x), y).backward()
    before, g = net.first.bias.detach().clone(), net.first.bias.grad.clone()
    opt.step()
    assert torch.allclose(net.first.bias, before - 0.1 * g, rtol=0, atol=1e-15)  # the step may be one fused operation
    plan = opt.coverage()
    assert (plan["first.bias"], plan["last.weight"]) == ("sgd", "ekfac")
    assert "first.weight had no gradient" in str(plan)


def test_metrics_of_a_watched_model_do_not_enter_its_steps():
    """Their backward passes, vmapped ones among them, accumulate no gradient."""
    one, two = mlp(), mlp()
    (x, y), opts = mlp_data(), []
    bs.fisher(two, x, "ekfac")  # found out how to differentiate it before it is watched
    for net in (one, two):
        opts.append(bs.optim.EKFAC(net, lr=0.1, damping=0.01))
        for _ in range(2):
            opts[-1].zero_grad()
            backward(net, x, y)
            if net is two:
                bs.fisher(net, x, "ekfac")
                bs.ntk(net, x)
            opts[-1].step()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters()))
