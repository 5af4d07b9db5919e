"""KFAC's factors from their definition, and the cases where the approximation is exact."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import biascope as bs
from biascope.curvature import l2_metric
from curvature.curvature_zoo import brute_fisher, case, relative


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def test_exact_for_every_layer_of_a_deep_linear_network():
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2)))
    x = randn(7, 4)
    K = l2_metric(net, x, "kfac")
    truth = l2_metric(net, x, "block")
    assert relative(K.to_dense(), truth.to_dense()) < 1e-10
    assert relative(l2_metric(net, x, "ekfac").to_dense(), truth.to_dense()) < 1e-10


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_exact_for_one_repeated_datum(likelihood):
    net, x = case("mlp")
    x = x[:1].expand(5, -1)
    K = bs.fisher(net, x, "kfac", likelihood)
    assert relative(K.to_dense(), bs.fisher(net, x, "block", likelihood).to_dense()) < 1e-10


def test_exact_for_a_product_design():
    """Inputs and output gradients that vary independently: every a with every g."""
    a, g = randn(3, 4, seed=1), randn(2, 3, seed=2)
    x = a.repeat_interleave(2, 0)
    net = seeded(lambda: nn.Linear(4, 3))
    weights = g.repeat(3, 1)[None]
    # the weights follow the order of the examples
    K = bs.fisher(net, x, "kfac", likelihood=lambda z, y: weights[:, : len(z)])
    D = bs.fisher(net, x, "dense", likelihood=lambda z, y: weights[:, : len(z)])
    assert relative(K.to_dense(), D.to_dense()) < 1e-10


def test_trace_is_not_exact_in_general():
    net, x = case("mlp")
    K, D = bs.fisher(net, x, "kfac"), bs.fisher(net, x, "dense")
    assert relative(K.trace(), D.trace()) > 1e-3
    assert relative(K.trace(), sum(p.A[0].trace() * p.B[0].trace() for p in K.pieces)) < 1e-12


def layer_flow(net, layer, x, weights):
    """Inputs [n, ...] and output gradients [k, n, ...] of one layer by hooks, for cotangents [k, n, c]."""
    seen = {}
    handle = layer.register_forward_hook(lambda m, i, o: seen.update(a=i[0].detach(), o=o))
    out = net(x)
    handle.remove()
    grads = [torch.autograd.grad(out, seen["o"], w, retain_graph=True)[0] for w in weights]
    return seen["a"], torch.stack(grads)


def softmax_roots(net, x):
    """sqrt(p_k)(e_k - p), [c, n, c]: another square root than the library's; the factors must not care."""
    with torch.no_grad():
        p = torch.softmax(net(x), 1)
    return p.sqrt().T[:, :, None] * (torch.eye(p.shape[1], dtype=p.dtype)[:, None] - p[None])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["tokens", "conv2d"])
def test_factors_of_shared_weights(name, sharing):
    net, x = case(name)
    layer = net.inner if name == "tokens" else net[0]
    a, g = layer_flow(net, layer, x, softmax_roots(net, x))
    n = len(x)
    if name == "tokens":
        A, G = a.mT[:, None], g.mT[:, :, None]  # [n, 1, d, T]
    else:
        patches = F.unfold(a, 3, padding=1, stride=2)
        A = patches.reshape(n, 2, 18, -1)
        G = g.flatten(3).reshape(len(g), n, 2, 2, -1)
    A = torch.cat([A, torch.ones_like(A[:, :, :1])], 2)
    T = A.shape[-1]
    if sharing == "reduce":
        A, G, T = A.mean(-1, keepdim=True), G.sum(-1, keepdim=True), 1
    expected_A = torch.einsum("ngit,ngjt->gij", A, A) / n
    expected_B = torch.einsum("kngot,kngpt->gop", G, G) / (n * T)
    piece = bs.fisher(net, x, "kfac", sharing=sharing).pieces[0]
    assert relative(piece.A, expected_A) < 1e-10
    assert relative(piece.B, expected_B) < 1e-10
    dense = torch.zeros(piece.size, piece.size, dtype=A.dtype)
    groups, o, i = expected_B.shape[0], expected_B.shape[1], expected_A.shape[1] - 1
    for k in range(groups):
        W = torch.arange(o * i).reshape(o, i) + k * o * i
        b = groups * o * i + k * o + torch.arange(o)
        order = torch.cat([W, b[:, None]], 1).flatten()
        dense[order[:, None], order] = torch.kron(expected_B[k].contiguous(), expected_A[k].contiguous())
    assert relative(piece.to_dense(), dense) < 1e-10


def test_reduce_is_exact_for_a_linear_layer_and_mean_pooling():
    """The setting of KFAC-reduce: positions averaged at the end of a linear network."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x):
            return self.lin(x).mean(1)

    net, x = seeded(Pooled), randn(6, 5, 4)
    truth = l2_metric(net, x, "dense").to_dense()
    assert relative(l2_metric(net, x, "kfac", sharing="reduce").to_dense(), truth) < 1e-10
    assert relative(l2_metric(net, x, "kfac", sharing="expand").to_dense(), truth) > 1e-2


def test_embedding_factor_is_the_frequency_of_words():
    net, x = case("words")
    piece = bs.fisher(net, x, "kfac").pieces[0]
    counts = torch.bincount(x[x > 0], minlength=7).double() / len(x)
    assert piece.A.shape == (1, 7)
    assert relative(piece.A[0], counts) < 1e-12
    _, g = layer_flow(net, net.words, x, softmax_roots(net, x))
    g = g[:, x > 0]
    assert relative(piece.B[0], torch.einsum("kmd,kme->de", g, g) / g.shape[1]) < 1e-10


def test_sua_keeps_the_channels_and_the_trace_of_the_input_factor():
    net, x = case("conv2d")
    full, sua = (bs.fisher(net, x, "kfac", sua=s) for s in (False, True))
    piece, whole = sua.pieces[0], full.pieces[0]
    assert piece.A.shape == (2, 2, 2)
    assert sua.plan["0.bias"] == "dense"
    A = whole.A[:, :18, :18].reshape(2, 2, 9, 2, 9)
    channels = torch.einsum("gcedf,ef->gcd", A, torch.eye(9, dtype=A.dtype)) / 9
    assert relative(piece.A, channels) < 1e-10
    dense = torch.stack([torch.kron(torch.kron(b, a), torch.eye(9, dtype=a.dtype)) for b, a in zip(piece.B, piece.A)])
    assert relative(piece.to_dense(), torch.block_diag(*dense)) < 1e-10


def pooled_covariance(x, weights):
    """Channels' second moment over examples and pixels [c, c], the pixels weighted by [h, w]; x [n, c, h, w]."""
    return torch.einsum("nchw,ndhw,hw->cd", x, x, weights) / len(x)


@pytest.mark.parametrize(
    ("stride", "padding", "mode"), [(1, 1, "zeros"), (1, 0, "zeros"), (2, 1, "zeros"), (1, 1, "circular")]
)
def test_sua_pools_over_pixels_as_often_as_patches_cover_them(stride, padding, mode):
    """The paper's covariance, pooled over all pixels alike, is that of circular borders and stride 1."""
    side = (6 + 2 * padding - 3) // stride + 1
    net = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, stride, padding, padding_mode=mode), nn.Tanh(), nn.Flatten(), nn.Linear(4 * side**2, 2)
        )
    )
    x = randn(5, 3, 6, 6)
    A = bs.fisher(net, x, "kfac", sua=True).pieces[0].A[0]
    alike = pooled_covariance(x, torch.full((6, 6), side**2 / 36, dtype=x.dtype))
    if mode == "circular":
        assert relative(A, alike) < 1e-12
        return
    out = torch.ones(1, 1, side, side, dtype=x.dtype)
    pad = 6 - ((side - 1) * stride - 2 * padding + 3)
    covered = nn.functional.conv_transpose2d(
        out, torch.ones(1, 1, 3, 3, dtype=x.dtype), stride=stride, padding=padding, output_padding=pad
    )[0, 0]
    assert relative(A, pooled_covariance(x, covered / 9)) < 1e-12
    assert relative(A, alike) > 1e-2


def test_sua_is_nearest_to_the_exact_factor_among_channel_covariances():
    net = seeded(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2))
    )
    x = randn(5, 3, 6, 6)
    exact, A = (bs.fisher(net, x, "kfac", sua=sua).pieces[0].A[0] for sua in (False, True))
    eye = torch.eye(9, dtype=x.dtype)
    pooled = pooled_covariance(x, torch.ones(6, 6, dtype=x.dtype))  # T = 36: the paper's
    distance, other = (float((exact - torch.kron(M, eye)).norm()) for M in (A, pooled))
    assert distance < other
    moved = A + 1e-3 * torch.eye(3, dtype=x.dtype)
    assert distance < float((exact - torch.kron(moved, eye)).norm())


def test_kernel_size_one_makes_sua_exact():
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.Flatten(), nn.Linear(16, 2)))
    x = randn(5, 3, 2, 2)
    assert relative(bs.fisher(net, x, "kfac", sua=True).to_dense(), bs.fisher(net, x, "kfac").to_dense()) < 1e-12


def test_reused_layers_count_their_uses_as_positions():
    net, x = case("reused")
    piece = bs.fisher(net, x, "kfac", "gaussian").pieces[0]
    first = torch.tanh(net.twice(x)).detach()
    homogeneous = torch.cat([torch.stack([x, first], 1), torch.ones(len(x), 2, 1, dtype=x.dtype)], 2)
    assert relative(piece.A[0], torch.einsum("nti,ntj->ij", homogeneous, homogeneous) / len(x)) < 1e-10


def test_scalings_formula_for_linear_layers():
    """((g U_B)^2)^T ((a U_A)^2) / n equals the mean of squared projected gradients."""
    net, x = case("mlp")
    piece = bs.fisher(net, x, "ekfac").pieces[0]
    a, g = layer_flow(net, net[0], x, softmax_roots(net, x))
    h = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
    per_example = torch.einsum("kno,ni->knoi", g @ piece.U_B[0], h @ piece.U_A[0])
    assert relative(piece.s[0, 0], per_example.square().sum(0).mean(0)) < 1e-10
    identity = piece.U_B[0].T @ piece.U_B[0]
    assert relative(identity, torch.eye(len(identity), dtype=a.dtype)) < 1e-12


def test_depthwise_convolution_has_a_pair_per_channel():
    net = seeded(lambda: nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)))
    x = randn(4, 6, 4, 4)
    E = bs.fisher(net, x, "ekfac")
    assert E.pieces[0].U_A.shape == (6, 10, 10)
    truth = brute_fisher(net, x)
    Q = E.from_eigenbasis(torch.eye(len(truth), dtype=truth.dtype))
    s = torch.cat([piece.eigenvalues() for piece in E.pieces])
    assert relative(s, (Q.T @ truth @ Q).diagonal()) < 1e-10


def test_large_normalisation_layers_are_unit_wise():
    net = seeded(lambda: nn.Sequential(nn.LayerNorm(600), nn.Linear(600, 2)))
    net[0].weight.data.uniform_(0.5, 1.5)
    x = randn(3, 600)
    E = bs.fisher(net, x)
    assert E.plan["0.weight"] == "quasidiagonal"
    truth = bs.fisher(net, x, "lowrank")
    rows = truth.pieces[0].J[:, :1200]
    w, b = rows[:, :600], rows[:, 600:]
    v = randn(E.shape[0], seed=3)
    out = E @ v
    expected = (w * w).sum(0) * v[:600] + (w * b).sum(0) * v[600:1200]
    assert relative(out[:600], expected) < 1e-10
