"""The metric and the kernel have one spectrum: checked against the dense Jacobian in float64."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.kernels import duality
from biascope.support.errors import InputError

F64 = torch.float64


def make(n, c=2, seed=0):
    gen = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, c)).double()  # 26 parameters for c = 2
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=F64) / p.shape[-1] ** 0.5)
    return net, torch.randn(n, 3, generator=gen, dtype=F64)


def check(pairs, net, x, rtol=1e-9):
    n = len(x)
    J = bs.Jacobian(net, x).to_dense().flatten(0, 1)
    F, K = J.T @ J / n, J @ J.T
    k = len(pairs.values)
    truth = torch.linalg.eigvalsh(F).flip(0)
    torch.testing.assert_close(pairs.values, truth[:k], rtol=rtol, atol=1e-12)
    torch.testing.assert_close(pairs.values * n, torch.linalg.eigvalsh(K).flip(0)[:k], rtol=rtol, atol=1e-11)
    V, U = pairs.vectors, pairs.functions
    eye = torch.eye(k, dtype=F64)
    torch.testing.assert_close(V.T @ V, eye, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(U.T @ U, eye, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(F @ V, V * pairs.values, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(K @ U, U * pairs.values * n, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(J @ V, U * (n * pairs.values).sqrt(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("n", "side"), [(5, "kernel"), (40, "metric")])
def test_the_smaller_side_is_decomposed(n, side):
    net, x = make(n)
    pairs = bs.metric_eigenpairs(net, x)
    assert pairs.side == side
    check(pairs, net, x)


@pytest.mark.parametrize("n", [5, 40])
def test_both_sides_agree(n):
    net, x = make(n)
    a, b = (bs.metric_eigenpairs(net, x, k=6, side=s) for s in ("kernel", "metric"))
    check(a, net, x)
    check(b, net, x)
    overlap = (a.vectors * b.vectors).sum(0).abs()
    torch.testing.assert_close(overlap, torch.ones(6, dtype=F64), rtol=1e-6, atol=1e-6)


def test_traces_and_norms():
    net, x = make(7)
    K, J = bs.ntk(net, x), bs.Jacobian(net, x).to_dense().flatten(0, 1)
    F = J.T @ J / 7
    pairs = bs.metric_eigenpairs(net, x)
    assert float(F.trace()) == pytest.approx(K.trace() / 7, rel=1e-12)
    assert float(F.norm()) == pytest.approx(K.frobenius_norm() / 7, rel=1e-12)
    assert float(pairs.values.sum()) == pytest.approx(K.trace() / 7, rel=1e-10)
    assert float(pairs.values.norm()) == pytest.approx(K.frobenius_norm() / 7, rel=1e-10)


@pytest.mark.parametrize("side", ["kernel", "metric"])
def test_large_sides_are_reached_by_products(side, monkeypatch):
    net, x = make(12)
    monkeypatch.setattr(duality, "DENSE", 3)
    check(bs.metric_eigenpairs(net, x, k=4, side=side), net, x, rtol=1e-8)
    with pytest.raises(InputError, match="say how many"):
        bs.metric_eigenpairs(net, x, side=side)


def test_a_jacobian_over_a_loader_with_some_parameters():
    net, x = make(6)
    J = bs.Jacobian(net, [x[:2], x[2:]], params="2")
    pairs = bs.metric_eigenpairs(J, k=3)
    D = J.to_dense().flatten(0, 1)
    torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(D.T @ D / 6).flip(0)[:3], rtol=1e-9, atol=1e-12)
    v = pairs.vector(1)
    assert {k: tuple(t.shape) for k, t in v.items()} == {"2.weight": (2, 4), "2.bias": (2,)}
    torch.testing.assert_close(J @ v, (D @ pairs.vectors[:, 1]).view(6, 2))


@pytest.mark.parametrize("n", [6, 40])
def test_a_loader_in_order_and_one_that_shuffles_are_taken(n):
    net, x = make(n)
    data = torch.utils.data.TensorDataset(x)
    check(bs.metric_eigenpairs(net, torch.utils.data.DataLoader(data, batch_size=4)), net, x)
    gen = torch.Generator().manual_seed(0)
    with pytest.warns(UserWarning, match="shuffles"):
        check(
            bs.metric_eigenpairs(net, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=gen)),
            net,
            x,
        )


@pytest.mark.parametrize("side", ["kernel", "metric"])
def test_examples_that_change_between_passes_are_refused(side):
    net, x = make(8)

    class Turning:
        """The examples in another order at every pass."""

        passes = 0

        def __iter__(self):
            self.passes += 1
            yield from x.roll(self.passes, 0).split(4)

    with pytest.raises(InputError, match="is not what it was"):
        bs.metric_eigenpairs(net, Turning(), side=side)


def test_float32_models_give_float32_accuracy():
    net, x = make(6)
    exact = bs.metric_eigenpairs(net, x, k=5).values
    rough = bs.metric_eigenpairs(net.float(), x.float(), k=5).values
    torch.testing.assert_close(rough, exact, rtol=1e-5, atol=1e-6)


def test_bad_input_is_named():
    net, x = make(5)
    with pytest.raises(InputError, match="k=11: there are 10 eigenvalues"):
        bs.metric_eigenpairs(net, x, k=11)
    with pytest.raises(InputError, match="k=3: there are 2 eigenvalues that are not zero"):
        bs.metric_eigenpairs(net, x[:1].expand(4, 3), k=3)
    with pytest.raises(InputError, match="x is needed"):
        bs.metric_eigenpairs(net)
    with pytest.raises(InputError, match="leave x out"):
        bs.metric_eigenpairs(bs.Jacobian(net, x), x)
    with pytest.raises(InputError, match="side="):
        bs.metric_eigenpairs(net, x, side="left")


@pytest.mark.parametrize("side", ["kernel", "metric"])
def test_small_eigenvalues_by_products_are_right_or_refused(side, monkeypatch):
    """J = X has a known spectrum, far below its largest value: right to 1e-4, and refused where float32 ends."""
    monkeypatch.setattr(duality, "DENSE", 100)
    gen = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(300, 300, generator=gen, dtype=F64)).Q[:, :150] for _ in range(2))
    truth = torch.cat([torch.ones(1), 1e-8 * torch.arange(1, 150) ** -0.5]).double()
    X, net = (U * (300 * truth).sqrt()) @ V.T, nn.Linear(300, 1, bias=False).double()
    pairs = bs.metric_eigenpairs(net, X, k=30, side=side, precision="float64")
    torch.testing.assert_close(pairs.values, truth[:30], rtol=1e-4, atol=0)
    assert ((pairs.vectors * V[:, :30]).sum(0).abs() > 1 - 1e-6).all()
    with pytest.raises(InputError, match=r"resolved 1 of 30 eigenpairs.*ask for k=1, or use precision='float64'"):
        bs.metric_eigenpairs(net.float(), X.float(), k=30, side=side)
