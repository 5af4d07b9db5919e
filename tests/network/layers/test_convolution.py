"""Convolutions whose backward pass consists of forward convolutions."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import biascope as bs
from biascope.network.functional import functional
from biascope.network.layers import convolution
from biascope.network.layers.convolution import conv2d
from biascope.network.stream import anatomy, recorded
from biascope.support.precision import arithmetic

DOUBLE = torch.float64


@pytest.fixture
def everywhere(monkeypatch):
    """As on a GPU, in plain float32 or float64."""
    monkeypatch.setattr(convolution, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(convolution, "MANY", 1)
    monkeypatch.setattr(convolution, "convolves_in_tf32", lambda: False)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


@pytest.mark.parametrize("image", [(1, 1), (2, 3), (4, 4), (5, 9), (12, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_derivatives_are_torchs(everywhere, image, bias):
    seen = 0
    for kernel, padding in itertools.product([(1, 1), (3, 3), (2, 5)], [(0, 0), (1, 1), (0, 3), (1, 4)]):
        if any(i + 2 * p < k or p >= k for i, k, p in zip(image, kernel, padding)):
            continue
        module = nn.Conv2d(2, 3, kernel, padding=padding, bias=bias, dtype=DOUBLE)
        x = drawn(4, 2, *image).requires_grad_(True)
        found, expected = conv2d(x, *module.parameters(), padding=padding), module(x)
        assert type(found.grad_fn).__name__ == "_ConvolutionBackward"
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        g = drawn(*expected.shape, seed=1).requires_grad_(True)
        firsts = [torch.autograd.grad(y, x, g, create_graph=True)[0] for y in (found, expected)]
        torch.testing.assert_close(*firsts, rtol=1e-12, atol=1e-12)
        seconds = [torch.autograd.grad(first.square().sum(), g)[0] for first in firsts]
        torch.testing.assert_close(*seconds, rtol=1e-11, atol=1e-11)
        seen += 1
    assert seen >= 2


def test_under_vmap(everywhere):
    x, w, b = drawn(3, 2, 2, 6, 6), drawn(3, 4, 2, 3, 3, seed=1), drawn(3, 4, seed=2)
    loss = lambda conv: lambda x, w, b: conv(x, w, b, padding=1).square().sum()  # noqa: E731
    found, expected = (torch.func.vmap(torch.func.grad(loss(c)))(x, w, b) for c in (conv2d, F.conv2d))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Net(nn.Module):
    """Convolutions with a stride, on large images and on small ones, and a sum."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, 2, 1), nn.Conv2d(3, 3, 3, padding=1)
        self.short, self.head = nn.Conv2d(3, 3, 1, 2), nn.Linear(48, 4)

    def forward(self, x):
        x = self.a(x).relu()
        return self.head(self.c((self.b(x) + self.short(x)).relu()).relu().flatten(1))


def test_recorded_passes_use_it(everywhere, monkeypatch):
    f, x, cotangents = functional(Net(), precision="float64"), drawn(5, 2, 8, 8), drawn(3, 5, 4, seed=1)
    found = anatomy(f, x)
    assert [b.kind for b in found.blocks] == ["matrix"] * 5
    tape = recorded(f, found, x)
    kinds = [type(use.edge.node).__name__ for use in tape.uses]
    assert kinds.count("_ConvolutionBackward") == 1  # not the first, which sees data, nor those with a stride
    single = [tape.gradients(u) for u in cotangents]
    together = tape.batched_gradients(cotangents)
    monkeypatch.setattr(convolution, "DEVICES", ())
    plain = recorded(f, found, x)
    for j, u in enumerate(cotangents):
        for one, other, third in zip(single[j], plain.gradients(u), together, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(third[j], other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("representation", ["diagonal", "kfac", "ekfac"])
def test_fisher_matrices_are_the_same(everywhere, monkeypatch, representation):
    net, x = Net().double(), drawn(6, 2, 8, 8)
    v = drawn(sum(p.numel() for p in net.parameters()), seed=3)
    found = bs.fisher(net, x, representation, precision="float64") @ v
    monkeypatch.setattr(convolution, "DEVICES", ())
    torch.testing.assert_close(found, bs.fisher(net, x, representation, precision="float64") @ v, rtol=1e-9, atol=1e-13)


def test_left_to_torch_where_it_does_not_pay(everywhere, monkeypatch):
    def fail(*args):
        raise AssertionError

    monkeypatch.setattr(convolution._Convolution, "apply", fail)
    x, w = drawn(2, 4, 6, 6).requires_grad_(True), drawn(4, 2, 3, 3)
    assert torch.equal(conv2d(x[:, :2].detach(), w), F.conv2d(x[:, :2], w))
    assert torch.equal(conv2d(x, w, groups=2), F.conv2d(x, w, groups=2))
    assert torch.equal(conv2d(x[:, :2], w, padding="same"), F.conv2d(x[:, :2], w, padding="same"))
    assert torch.equal(conv2d(x[:, :2], w, stride=2), F.conv2d(x[:, :2], w, stride=2))
    assert torch.equal(conv2d(x[:, :2], w, padding=3), F.conv2d(x[:, :2], w, padding=3))
    assert torch.equal(conv2d(x[:, :2], w, dilation=2), F.conv2d(x[:, :2], w, dilation=2))
    assert torch.equal(conv2d(x[0, :2], w), F.conv2d(x[0, :2], w))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert conv2d(x[:, :2].float(), w.float()).dtype == torch.bfloat16
    monkeypatch.setattr(convolution, "MANY", 3)
    assert torch.equal(conv2d(x[:, :2], w), F.conv2d(x[:, :2], w))
    monkeypatch.setattr(convolution, "MANY", 1)
    monkeypatch.setattr(convolution, "convolves_in_tf32", lambda: True)
    assert torch.equal(conv2d(x[:, :2], w), F.conv2d(x[:, :2], w))


@pytest.mark.gpu
@pytest.mark.parametrize("image", [(4, 4), (8, 8), (33, 17)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_on_a_gpu_in_float32(image, kernel):
    x, w, padding = drawn(convolution.MANY, 5, *image), drawn(7, 5, kernel, kernel, seed=1), kernel // 2
    exact = F.conv2d(x.requires_grad_(True), w, padding=padding)
    g = drawn(*exact.shape, seed=2)
    with arithmetic("float32"):
        there = x.detach().float().cuda().requires_grad_(True)
        found = conv2d(there, w.float().cuda(), padding=padding)
        assert type(found.grad_fn).__name__ == "_ConvolutionBackward"
        (gradient,) = torch.autograd.grad(found, there, g.float().cuda())
    for one, other in ((found, exact), (gradient, torch.autograd.grad(exact, x, g)[0])):
        torch.testing.assert_close(one.detach().double().cpu(), other.detach(), rtol=1e-4, atol=1e-4)
