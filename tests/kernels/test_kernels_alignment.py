"""Centring, CKA, effective rank and trace ratios against the formulas written out with C = I - 11^T / r."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.support.errors import InputError, UnsupportedError

F64 = torch.float64


def make(n=9, c=3, seed=0):
    gen = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, c)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=F64) / p.shape[-1] ** 0.5)
    return net, torch.randn(n, 4, generator=gen, dtype=F64), torch.arange(n) % c


def centring_matrix(n, c, kind):
    """On the index (example, output), examples major."""
    if kind == "global":
        r = n * c
        return torch.eye(r, dtype=F64) - 1 / r
    return torch.kron(torch.eye(n, dtype=F64) - 1 / n, torch.eye(c, dtype=F64))


@pytest.mark.parametrize("kind", ["per-output", "global"])
def test_centring_is_C_K_C(kind):
    net, x, _ = make()
    K = bs.ntk(net, x)
    C = centring_matrix(9, 3, kind)
    got = K.centered(kind).matrix()
    torch.testing.assert_close(got, C @ K.matrix() @ C, rtol=1e-12, atol=1e-12)
    if kind == "per-output":
        assert K.centered(kind).tensor.sum(0).abs().max() < 1e-12  # rows of every block sum to zero
    assert got.sum(1).abs().max() < 1e-12
    assert (K.centered("per-output").matrix() - K.centered("global").matrix()).norm() > 1e-3  # they differ


@pytest.mark.parametrize("kind", ["per-output", "global", False])
def test_label_cka_is_the_written_out_formula(kind):
    net, x, y = make()
    K = bs.ntk(net, x)
    C = centring_matrix(9, 3, kind) if kind else torch.eye(27, dtype=F64)
    v = C @ nn.functional.one_hot(y, 3).double().flatten()
    Kc = C @ K.matrix() @ C
    truth = v @ Kc @ v / (Kc.norm() * (v @ v))
    assert K.alignment(y, kind) == pytest.approx(float(truth), rel=1e-12)
    # with the Gram matrix of the labels as an explicit kernel: Tr[Kc Lc] / (|Kc| |Lc|)
    L = torch.outer(v, v)
    assert float((Kc * L).sum() / (Kc.norm() * L.norm())) == pytest.approx(float(truth), rel=1e-12)


def test_label_cka_of_trace_and_diagonal_kernels():
    net, x, y = make()
    C = torch.eye(9, dtype=F64) - 1 / 9
    Y = nn.functional.one_hot(y, 3).double()
    T = bs.ntk(net, x, outputs="trace")
    L, Kc = C @ Y @ Y.T @ C, C @ T.tensor @ C
    assert T.alignment(y) == pytest.approx(float((Kc * L).sum() / (Kc.norm() * L.norm())), rel=1e-12)
    D = bs.ntk(net, x, outputs="diagonal")
    big = torch.block_diag(*[C @ k @ C for k in D.tensor])
    v = (C @ Y).T.reshape(-1)
    assert D.alignment(y) == pytest.approx(float(v @ big @ v / (big.norm() * (v @ v))), rel=1e-12)
    with pytest.raises(UnsupportedError, match="between outputs"):
        D.alignment(y, "global")


def test_cka_between_kernels():
    a, x, _ = make(seed=0)
    b, *_ = make(seed=1)
    K, L = bs.ntk(a, x), bs.ntk(b, x)
    C = centring_matrix(9, 3, "per-output")
    Kc, Lc = C @ K.matrix() @ C, C @ L.matrix() @ C
    truth = float(torch.trace(Kc @ Lc) / (Kc.norm() * Lc.norm()))
    assert K.alignment(L) == pytest.approx(truth, rel=1e-12)
    assert 0 <= truth < 1
    assert K.alignment(K) == pytest.approx(1, rel=1e-12)
    scaled = bs.Kernel(7.5 * K.values, K.outputs, K.mode, True)
    assert scaled.alignment(L) == pytest.approx(truth, rel=1e-12)
    with pytest.raises(InputError, match="different shapes"):
        K.alignment(bs.ntk(b, x[:5]))


def test_labels_kernel_has_alignment_one():
    y = torch.tensor([0, 1, 2, 1, 0, 2])
    v = nn.functional.one_hot(y, 3).double()
    values = torch.einsum("ia,jb->aibj", v, v)
    for kind in ("per-output", "global", False):
        assert bs.Kernel(values, "full", "full", True).alignment(y, kind) == pytest.approx(1, rel=1e-12)


def test_integers_are_classes_unless_signs():
    K = bs.Kernel(torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=F64)), "trace", "trace", True)
    signs = torch.tensor([1, -1, 1])
    assert K.alignment(signs) == pytest.approx(K.alignment(signs.double()), rel=1e-14)
    assert K.alignment(torch.tensor([1, 0, 1])) == pytest.approx(K.alignment(signs), rel=1e-12)  # centred: the same


@pytest.mark.parametrize("r", [1, 3, 5])
def test_effective_rank_and_trace_ratio_of_a_projection(r):
    gen = torch.Generator().manual_seed(r)
    Q = torch.linalg.qr(torch.randn(8, r, generator=gen, dtype=F64))[0]
    K = bs.Kernel(2.5 * Q @ Q.T, "trace", "trace", True)
    for kind in ("entropy", "participation"):
        assert K.effective_rank(kind) == pytest.approx(r, rel=1e-9)
    assert K.trace_ratios((r,))[r] == pytest.approx(1, rel=1e-12)
    if r > 1:
        assert K.trace_ratios((1,))[1] == pytest.approx(1 / r, rel=1e-9)


def test_effective_rank_and_trace_ratios_brute_force():
    net, x, y = make()
    K = bs.ntk(net, x)
    lam = torch.linalg.eigvalsh(K.matrix()).flip(0).clamp_min(0)
    mu = lam / lam.sum()
    entropy = torch.exp(-torch.where(mu > 1e-12, mu * mu.clamp_min(1e-300).log(), 0.0).sum())
    assert K.effective_rank() == pytest.approx(float(entropy), rel=1e-8)
    assert K.effective_rank("participation") == pytest.approx(float(1 / mu.square().sum()), rel=1e-9)
    assert K.effective_rank() <= torch.linalg.matrix_rank(K.matrix())
    assert K.trace_ratios((4, 99)) == pytest.approx({4: float(mu[:4].sum()), 99: 1.0}, rel=1e-10)
    U = K.eigh().vectors
    v = nn.functional.one_hot(y, 3).double().flatten()
    share = float((U[:, :5].T @ v).square().sum() / (v @ v))
    assert K.energy_concentration(y, 5) == pytest.approx(share, rel=1e-10)
    assert K.energy_concentration(y, 5, squared=False) == pytest.approx(share**0.5, rel=1e-10)
    assert K.energy_concentration(y, 27) == pytest.approx(1, rel=1e-10)
    T = bs.ntk(net, x, outputs="trace")
    Y = nn.functional.one_hot(y, 3).double()
    V = torch.linalg.eigh(T.tensor)[1].flip(1)[:, :2]
    assert T.energy_concentration(y, 2) == pytest.approx(float((V.T @ Y).square().sum() / Y.square().sum()), rel=1e-9)


def test_layer_kernels_align_and_sum():
    net, x, y = make()
    K = bs.ntk(net, x, by_layer=True)
    layers = K.by_layer()
    total = sum(k.values for k in layers.values())
    torch.testing.assert_close(total, K.values, rtol=1e-12, atol=1e-12)
    assert all(0 <= k.alignment(y) <= 1 for k in layers.values())


def test_bad_labels_and_kernels_are_named():
    net, x, y = make()
    K = bs.ntk(net, x)
    with pytest.raises(InputError, match="y has a NaN or infinity"):
        K.alignment(torch.tensor([0.0, 1.0, float("nan")] + [0.0] * 6))
    with pytest.raises(InputError, match="4 labels for 9 examples"):
        K.alignment(y[:4])
    with pytest.raises(InputError, match="classes 1 to 3, but the model has outputs 0 to 2"):
        K.alignment(y + 1)
    with pytest.raises(InputError, match="classes -1 to 1"):
        K.alignment(y - 1)
    with pytest.raises(InputError, match="2 columns for 3 outputs"):
        K.alignment(torch.ones(9, 2))
    with pytest.raises(InputError, match="all labels are equal"):
        K.alignment(torch.zeros(9, dtype=torch.long))
    with pytest.raises(InputError, match="same tangent features"):
        bs.ntk(net, x[:1].expand(9, 4)).alignment(y)
    with pytest.raises(InputError, match="between 1 and 27"):
        K.energy_concentration(y, 28)
    with pytest.raises(InputError, match="at least 1"):
        K.trace_ratios((0,))
    with pytest.raises(InputError, match="there is global, per-output"):
        K.alignment(y, "rows")


def test_indefinite_kernels_are_refused_and_rounding_is_reported():
    bad = bs.Kernel(torch.diag(torch.tensor([1.0, -0.5])), "trace", "trace", True)
    with pytest.raises(InputError, match=r"eigenvalues go from -0\.5 to 1"):
        bad.eigh()
    slightly = bs.Kernel(torch.diag(torch.tensor([1.0, -1e-6])), "trace", "trace", True)
    spec = slightly.eigh()
    assert spec.negative == pytest.approx(-1e-6, rel=1e-5)
    assert float(spec.values.min()) == 0


@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal"])
def test_equal_labels_are_refused_whatever_rounding_leaves_of_them(outputs):
    net, x, _ = make()
    K = bs.ntk(net, x, outputs=outputs)
    for value in (0.1, 1e8 / 3, -1e-9 / 7):
        equal = torch.full((9, 3), value, dtype=F64)
        with pytest.raises(InputError, match="all labels are equal"):
            K.alignment(equal)
        nearly = equal * (1 + 1e-10 * torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=F64))
        assert 0 < K.alignment(nearly) <= 1
