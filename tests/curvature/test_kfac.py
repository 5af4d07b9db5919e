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
    dense = torch.zeros(len(piece.diagonal()), len(piece.diagonal()), dtype=A.dtype)
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


class Tokens(nn.Module):
    """Tokens [n, T, 4] -> logits [n, T, 3]: token by token, or with a mean over tokens in between."""

    def __init__(self, mixed: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.mixed, self.causal = nn.Linear(4, 5), nn.Linear(5, 3), mixed, causal

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.mixed:
            h = h + h.mean(-2, keepdim=True)
        if self.causal:
            h = h.cumsum(-2)
        return self.last(h)


def labelled(n=6, T=5, seed=3):
    """Tokens, and labels of which some are missing: all of example 0, none of example 1."""
    x, gen = randn(n, T, 4), torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n, T), generator=gen)
    y[torch.rand(n, T, generator=gen) < 0.4] = -100
    y[0], y[1] = -100, 1
    return x, y


def empirical(net, x, y, representation="kfac", **options):
    return bs.fisher(net, (x, y), representation, estimator="empirical", class_dim=-1, **options)


@pytest.mark.parametrize("batch_size", [None, 2, 1])
def test_tokens_without_labels_are_not_in_the_input_factor(batch_size):
    """A token-wise network on the tokens with labels alone, each an example of its own, has the same factors.

    There the mean is over the tokens, here over the examples: A is the sum over tokens by the number of examples.
    """
    net, (x, y) = seeded(Tokens), labelled()
    known = y != -100
    kept = bs.fisher(net, (x[known], y[known]), "kfac", estimator="empirical")
    found = empirical(net, x, y, batch_size=batch_size)
    for here, alone in zip(found.pieces, kept.pieces, strict=True):
        assert relative(here.A, alone.A * int(known.sum()) / len(x)) < 1e-12
        assert relative(here.B, alone.B) < 1e-12
    everything = empirical(net, x, torch.where(known, y, 0))
    assert relative(found.pieces[0].A, everything.pieces[0].A) > 0.1  # what was counted before


def test_exact_for_the_labelled_tokens_of_one_layer():
    """The same input at all labelled tokens, others elsewhere: KFAC of one layer is its Fisher matrix."""
    net, (x, y) = seeded(lambda: nn.Linear(4, 3)), labelled()
    x = torch.where((y != -100)[..., None], randn(4, seed=5), x)
    rows = []
    for i in range(len(x)):
        for t in (y[i] != -100).nonzero()[:, 0]:
            loss = F.cross_entropy(net(x[i, t])[None], y[i, t][None])
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
    by_token = torch.stack(rows).T @ torch.stack(rows) / len(x)  # of one token after another, as expand takes them
    assert relative(empirical(net, x, y).to_dense(), by_token) < 1e-10
    one = torch.arange(5) == 2  # one labelled token per example: then the sum over tokens is the token
    y = torch.where(one, y.clamp_min(0), -100)
    x = torch.where(one[:, None], x[:1, :1], x)
    truth = empirical(net, x, y, "dense").to_dense()
    assert relative(empirical(net, x, y).to_dense(), truth) < 1e-10


def test_tokens_that_others_read_count():
    """Below a mean over tokens, those without a label have a gradient, and are in A; not where no token has a label."""
    net, (x, y) = seeded(lambda: Tokens(mixed=True)), labelled()
    found = empirical(net, x, y)
    read = torch.cat([x[1:].flatten(0, 1), torch.ones(25, 1, dtype=x.dtype)], 1)
    assert relative(found.pieces[0].A[0], read.T @ read / len(x)) < 1e-12
    h = torch.tanh(net.first(x))
    a = (h + h.mean(1, keepdim=True))[y != -100]
    a = torch.cat([a, torch.ones(len(a), 1, dtype=x.dtype)], 1).detach()
    assert relative(found.pieces[1].A[0], a.T @ a / len(x)) < 1e-12


def test_tokens_after_the_last_label_are_not_read_by_causal_layers():
    net, (x, _) = seeded(lambda: Tokens(causal=True)), labelled()
    y = torch.full((6, 5), -100)
    y[:, 2] = torch.tensor([0, 1, 2, 0, 1, 2])
    seen = torch.cat([x[:, :3].flatten(0, 1), torch.ones(18, 1, dtype=x.dtype)], 1)
    assert relative(empirical(net, x, y).pieces[0].A[0], seen.T @ seen / 6) < 1e-12


@pytest.mark.parametrize("channels", [3, 32])  # 32: patches are not formed where all pixels count
@pytest.mark.parametrize("missing", ["in all batches", "in the last"])
@pytest.mark.parametrize("sua", [False, True])
def test_pixels_without_labels_are_not_in_the_input_factor(channels, missing, sua):
    net = seeded(lambda: nn.Conv2d(channels, 2, 3, padding=1))
    x, y = randn(4, channels, 4, 4), torch.randint(0, 2, (4, 4, 4), generator=torch.Generator().manual_seed(0))
    y[0 if missing == "in all batches" else 2 :, 1:3] = -100
    found = bs.fisher(net, (x, y), "kfac", estimator="empirical", batch_size=2, sua=sua)
    patches = F.unfold(x, 3, padding=1).mT[y.flatten(1) != -100]  # [pixels, c e]
    if sua:
        each = patches.reshape(len(patches), channels, 9)
        A = torch.einsum("pce,pde->cd", each, each) / 9
    else:
        patches = torch.cat([patches, torch.ones(len(patches), 1, dtype=x.dtype)], 1)
        A = patches.T @ patches
    assert relative(found.pieces[0].A[0], A / 4) < 1e-12
    g = torch.autograd.functional.jacobian(lambda z: F.cross_entropy(z, y, reduction="sum"), net(x).detach()).movedim(
        1, -1
    )[y != -100]
    assert relative(found.pieces[0].B[0], g.T @ g / len(g)) < 1e-12


def test_examples_without_labels_are_not_in_the_input_factor():
    net, x, y = seeded(lambda: nn.Linear(4, 3)), randn(7, 4), torch.tensor([0, -100, 2, 1, -100, 0, 1])
    known = y != -100
    found, kept = (bs.fisher(net, (x[i], y[i]), "kfac", estimator="empirical") for i in (known | True, known))
    assert relative(found.pieces[0].A, kept.pieces[0].A * 5 / 7) < 1e-12
    assert relative(found.pieces[0].B, kept.pieces[0].B) < 1e-12
    assert relative(found.trace(), kept.trace() * 5 / 7) < 1e-12


@pytest.mark.parametrize("representation", ["dense", "diagonal", "ekfac"])
def test_other_representations_do_not_depend_on_inputs_without_labels(representation):
    net, (x, y) = seeded(Tokens), labelled()
    other = torch.where((y != -100)[..., None], x, 3 * randn(*x.shape, seed=9))
    found, changed = (empirical(net, given, y, representation).to_dense() for given in (x, other))
    assert relative(found, changed) < 1e-10
