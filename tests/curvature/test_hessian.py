"""Hessians and Gauss-Newton matrices against torch.autograd.functional.hessian."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import biascope as bs
from biascope.support.errors import InputError
from curvature.curvature_zoo import case, relative

LOSSES = {
    "ce": lambda z, y: F.cross_entropy(z, y),
    "mse": lambda z, y: F.mse_loss(z, y),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, y),
}


def labels(loss, n=6, c=3):
    g = torch.Generator().manual_seed(2)
    return (
        torch.randint(0, c, (n,), generator=g) if loss == "ce" else torch.rand(n, c, generator=g, dtype=torch.float64)
    )


def brute_hessian(net, x, y, loss):
    names, params = zip(*net.named_parameters())
    sizes = [p.numel() for p in params]

    def total(flat):
        parts = {n: t.view_as(p) for n, t, p in zip(names, flat.split(sizes), params)}
        return LOSSES[loss](torch.func.functional_call(net, parts, x), y)

    flat = torch.cat([p.detach().flatten() for p in params])
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        return torch.autograd.functional.hessian(total, flat)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("representation", ["implicit", "dense"])
def test_hessian(loss, representation):
    net, x = case("mlp")
    y = labels(loss)
    truth = brute_hessian(net, x, y, loss)
    H = bs.hessian(net, [(x[:4], y[:4]), (x[4:], y[4:])], representation, loss)
    assert relative(H.to_dense(), truth) < 1e-10
    v = torch.randn(len(truth), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert relative(H @ v, truth @ v) < 1e-10
    assert relative(H.trace(), truth.trace()) < 1e-9
    assert relative(H.quadratic_form(v), v @ truth @ v) < 1e-9
    values = torch.linalg.eigvalsh(truth)
    assert relative(H.spectral_norm(), values.abs().max()) < 1e-7
    damping = float(-values.min() + 0.5)
    expected = torch.linalg.solve(truth + damping * torch.eye(len(truth), dtype=truth.dtype), v)
    assert relative(H.solve(v, damping=damping), expected) < 1e-7


def test_a_function_as_loss():
    net, x = case("mlp")
    y = labels("ce")
    given = bs.hessian(net, (x, y), "dense", lambda z, t: F.cross_entropy(z, t, reduction="none"))
    assert relative(given.to_dense(), bs.hessian(net, (x, y), "dense").to_dense()) < 1e-12
    G = bs.ggn(net, (x, y), "dense", lambda z, t: F.cross_entropy(z, t, reduction="none"))
    assert relative(G.to_dense(), bs.ggn(net, x, "dense").to_dense()) < 1e-8
    with pytest.raises(InputError, match="not convex"):
        bs.ggn(net, (x, y), "dense", lambda z, t: z.sin().sum(1))
    with pytest.raises(InputError, match=r"one number per example \[6\]"):
        bs.hessian(net, (x, y), "dense", lambda z, t: z.sum())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("representation", ["dense", "implicit"])
def test_ggn_is_the_hessian_of_a_linear_model(loss, representation):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(4, 3).double()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = labels(loss)
    G = bs.ggn(net, x, representation, loss)
    assert relative(G.to_dense(), brute_hessian(net, x, y, loss)) < 1e-10


def test_ggn_of_cross_entropy_is_the_fisher_and_differs_from_the_hessian():
    net, x = case("conv2d")
    assert relative(bs.ggn(net, x, "dense").to_dense(), bs.fisher(net, x, "dense").to_dense()) < 1e-12
    y = labels("ce", 5)
    assert relative(bs.ggn(net, x, "dense").to_dense(), brute_hessian(net, x, y, "ce")) > 1e-2


def test_ggn_with_positions_averages_them_as_torch_does():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Conv2d(2, 3, 2).double()
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.randint(0, 3, (4, 2, 2), generator=torch.Generator().manual_seed(1))
    truth = brute_hessian(net, x, y, "ce")
    assert relative(bs.ggn(net, x, "dense").to_dense(), truth) < 1e-10
    assert relative(bs.hessian(net, (x, y), "dense").to_dense(), truth) < 1e-10
    z = torch.rand(4, 3, 2, 2, dtype=torch.float64)
    assert relative(bs.ggn(net, x, "dense", "bce").to_dense(), brute_hessian(net, x, z, "bce")) < 1e-10


def test_hessian_block_of_a_linear_layer():
    """H of a layer = mean of a a^T (x) the Hessian in its outputs."""
    net, x = case("mlp")
    y = labels("ce")
    H = bs.hessian(net, (x, y), "dense", params="2").to_dense()
    a = torch.tanh(net[0](x)).detach()
    h = torch.cat([a, torch.ones(6, 1, dtype=a.dtype)], 1)
    p = torch.softmax(net(x), 1).detach()
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    kron = torch.stack([torch.kron(b, torch.outer(v, v)) for b, v in zip(blocks, h)]).mean(0)
    order = torch.cat([torch.arange(15).reshape(3, 5), 15 + torch.arange(3)[:, None]], 1).flatten()
    assert relative(H[order[:, None], order], kron) < 1e-10


def test_bad_calls():
    net, x = case("mlp")
    with pytest.raises(InputError, match="there is dense, implicit"):
        bs.hessian(net, (x, labels("ce")), "kfac")
    with pytest.raises(InputError, match="needs labels"):
        bs.hessian(net, x) @ torch.ones(43, dtype=torch.float64)
    with pytest.raises(InputError, match="there is bce, ce, mse"):
        bs.hessian(net, (x, labels("ce")), loss="hinge")
    with pytest.raises(InputError, match="there is bce, ce, mse"):
        bs.ggn(net, x, loss="hinge")
    with pytest.raises(InputError, match="use 'implicit'"):
        bs.hessian(net, (x, labels("ce")), "dense", max_memory="1KB")
    H = bs.hessian(net, (x, labels("ce")))
    with pytest.raises(InputError, match="did not converge"):
        H.solve(torch.ones(43, dtype=torch.float64), damping=0.0)
    with pytest.raises(InputError, match="the loss has a NaN"):
        bs.hessian(net, (x, labels("mse")), loss=lambda z, t: (z / 0).sum(1)) @ torch.ones(43, dtype=torch.float64)


def test_attention_has_second_derivatives():
    net, x = case("attention")
    y = labels("ce", 4)
    assert relative(bs.hessian(net, (x, y), "dense").to_dense(), brute_hessian(net, x, y, "ce")) < 1e-8
