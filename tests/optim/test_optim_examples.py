"""The examples in the docstrings run; on a GPU the optimisers train and agree with the CPU."""

import copy
import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import biascope.optim
from biascope.optim import EKFAC, KFAC
from optim.optim_oracle import backward, conv, conv_data, error, seeded

NAMES = [m.name for m in pkgutil.iter_modules(biascope.optim.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    module = importlib.import_module(f"biascope.optim.{name}")
    assert doctest.testmod(module, extraglobs={"torch": torch, "nn": nn}).failed == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "refresh"), [(EKFAC, 1), (KFAC, 20)])
def test_steps_on_the_gpu_are_the_steps_on_the_cpu(make, refresh):
    """EKFAC with a new basis at every step: test_optim_formulas shows why an old one may differ between devices."""
    one, two, (x, y) = conv(), conv().cuda(), conv_data()
    for net, data in ((one, (x, y)), (two, (x.cuda(), y.cuda()))):
        opt = make(net, lr=0.1, damping=0.01, refresh_every=refresh)
        for _ in range(3):
            opt.zero_grad()
            backward(net, *data)
            opt.step()
    assert max(error(q.cpu(), p) for p, q in zip(one.parameters(), two.parameters())) < 1e-8


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"scalings": "running"}, {"damping_mode": "deep"}])
def test_equal_layers_under_sua_on_the_gpu(options):
    def make():
        layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(4 * 36, 3))

    one, (x, y) = seeded(make), conv_data(40)
    two = copy.deepcopy(one).cuda()
    for net, data in ((one, (x, y)), (two, (x.cuda(), y.cuda()))):
        opt = EKFAC(net, lr=0.1, damping=0.01, refresh_every=1, sua=True, **options)
        for _ in range(3):
            opt.zero_grad()
            backward(net, *data)
            opt.step()
    assert max(error(q.cpu(), p) for p, q in zip(one.parameters(), two.parameters())) < 1e-8


@pytest.mark.gpu
def test_float16_autocast_with_a_scaler_on_the_gpu():
    net = conv().float().cuda()
    x, y = (t.cuda() for t in conv_data(32))
    opt, scaler = EKFAC(net, lr=0.03, damping=0.1), torch.amp.GradScaler("cuda")
    losses = []
    for _ in range(20):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(x.float()), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
