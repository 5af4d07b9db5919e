"""Identities of tangent kernels from the papers' check lists that the other files of this room cover only in part."""

import copy
import math

import pytest
import torch
from torch import nn

import biascope as bs
from biascope import nets
from biascope.kernels import binarization_overlap, target_alignments

F64 = torch.float64


def make(n=12, c=2, width=9, seed=0):
    gen = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, c)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=F64) / p.shape[-1] ** 0.5)
    return net, torch.randn(n, 3, generator=gen, dtype=F64)


def descend(net, x, y, lr, steps):
    """Full-batch gradient descent on half the summed squared error, by torch alone."""
    net = copy.deepcopy(net)
    sgd = torch.optim.SGD(net.parameters(), lr)
    for _ in range(steps):
        sgd.zero_grad()
        (0.5 * (net(x) - y).square().sum()).backward()
        sgd.step()
    return net


# ------------------------------------------------------------------------------------------------- spec 03, part A


def test_symmetric_positive_and_its_trace_is_that_of_the_gradients():
    """A4: trace K = sum of squared gradients; symmetric, PSD, rank <= min(n c, p); equal to J (J^T identity)."""
    for n, c in ((12, 2), (40, 3)):
        net, x = make(n, c, width=4)
        K, J = bs.ntk(net, x), bs.Jacobian(net, x)
        M = K.matrix()
        squares = 0.0
        for i in range(n):
            for out in net(x[i : i + 1])[0]:
                grads = torch.autograd.grad(out, list(net.parameters()), retain_graph=True)
                squares += sum(float(g.square().sum()) for g in grads)
        assert K.trace() == pytest.approx(squares, rel=1e-12)
        assert torch.equal(M, M.T)
        values = torch.linalg.eigvalsh(M)
        assert float(values[0]) > -1e-12 * float(values[-1])
        assert int(torch.linalg.matrix_rank(M, hermitian=True)) <= min(n * c, J.p)
        assert J.p < n * c or n == 12  # the second case is bounded by the number of parameters
        eye = torch.eye(n * c, dtype=F64)
        columns = [(J @ (J.T @ e.view(n, c))).flatten() for e in eye]
        torch.testing.assert_close(torch.stack(columns, 1), M, rtol=1e-12, atol=1e-12)


def test_three_ways_to_the_alignment_agree_to_rounding():
    """A5: by a vector-Jacobian product, by f^T K f / n^2, and by the spectrum, to 1e-12."""
    net, x = make(15, 1)
    K, f = bs.ntk(net, x).matrix(), torch.randn(15, 1, generator=torch.Generator().manual_seed(3), dtype=F64)
    values, U = torch.linalg.eigh(K)
    by_vjp = float(target_alignments(net, x, f, normalize=False))
    assert by_vjp == pytest.approx(float(f[:, 0] @ K @ f[:, 0]) / 15**2, rel=1e-12)
    assert by_vjp == pytest.approx(float((values * (U.T @ f[:, 0]).square()).sum()) / 15**2, rel=1e-12)


def test_the_fit_of_modes_is_ordered_by_eigenvalue():
    """A7: after any number of steps the share of a mode that is left does not rise with its eigenvalue."""
    net, x = make(12, 1)
    K = bs.ntk(net, x)
    values, U = torch.linalg.eigh(K.matrix())
    y = (U.sum(1) * 2)[:, None]  # the same amount in every mode
    for t in (1, 10, 1000):
        left = U.T @ (y - bs.gradient_descent(K, y, t, 1 / float(values[-1])).train[0]).flatten() / (U.T @ y).flatten()
        torch.testing.assert_close(left, (1 - values / values[-1]) ** t, rtol=1e-12, atol=1e-14)
        assert bool((left.diff() <= 1e-12).all())


def test_a_trained_tangent_model_has_the_representer_form():
    """A8: after training to the end, f_lin = f0 + sum_i beta_i k(x_i, .), which is kernel regression on y - f0; and
    its displacement is the shortest that interpolates."""
    net, x = make(6, 1, width=30)
    new = torch.randn(5, 3, generator=torch.Generator().manual_seed(9), dtype=F64)
    y = torch.randn(6, 1, generator=torch.Generator().manual_seed(8), dtype=F64)
    K = bs.ntk(net, x)
    lin = bs.linearize(net)
    params = list(lin.parameters())
    # a step 1 / lambda_j removes mode j for good, so n steps are enough; more rounds take off what rounding left
    for value in torch.linalg.eigvalsh(K.matrix()).flip(0).repeat(4).tolist():
        grads = torch.autograd.grad(0.5 * (lin(x) - y).square().sum(), params)
        with torch.no_grad():
            for p, g in zip(params, grads):
                p -= g / value
    fit = bs.kernel_regression(K, y, 0.0, bs.ntk(net, new, x), net(x).detach(), net(new).detach())
    torch.testing.assert_close(lin(new).detach(), fit.test, rtol=1e-6, atol=1e-6)
    length = sum(float(v.square().sum()) for v in lin.displacement.values())
    assert length == pytest.approx(fit.rkhs_norm_squared, rel=1e-6)


def test_a_linear_model_on_white_data_prefers_no_direction():
    """A9: K = X X^T, and the alignment of x -> u^T x is the same for all u when X^T X = n I."""
    X = torch.linalg.qr(torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=F64))[0] * 20**0.5
    net = nn.Linear(4, 1, bias=False).double()
    torch.testing.assert_close(bs.ntk(net, X).matrix(), X @ X.T, rtol=1e-12, atol=1e-12)
    u = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=F64)
    u /= u.norm(dim=0)
    alpha = target_alignments(net, X, X @ u, normalize=False)
    torch.testing.assert_close(alpha, torch.ones(6, dtype=F64), rtol=1e-12, atol=1e-12)


def test_wide_networks_move_less_and_so_do_their_kernels():
    """A10 and spec 04 check 27: distance, |f - f_lin| and the change of K fall with the width; with the learning rate
    (at the same number of steps) they grow. NTK parametrisation, two seeds."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=gen, dtype=F64)
    y = x[:, :1].sign()

    def moved(width, lr, steps):
        totals = torch.zeros(3, dtype=F64)
        for seed in range(2):
            net = nets.build("mlp-ntk", seed=seed, in_features=4, hidden=(width,) * 2, outputs=1).double()
            K = bs.ntk(net, x).matrix()
            lr_ = lr / float(torch.linalg.eigvalsh(K)[-1])
            after = descend(net, x, y, lr_, steps)
            lin = descend(bs.linearize(net), x, y, lr_, steps)
            start = torch.cat([p.detach().flatten() for p in net.parameters()])
            end = torch.cat([p.detach().flatten() for p in after.parameters()])
            gap = (after(x) - lin(x)).norm() / (lin(x) - net(x)).norm()
            change = (bs.ntk(after, x).matrix() - K).norm() / K.norm()
            totals += torch.stack([(end - start).norm() / start.norm(), gap, change]).detach() / 2
        return totals

    narrow, wide = (moved(width, 0.5, 40) for width in (16, 256))
    assert bool((wide < 0.5 * narrow).all())  # theory: a quarter
    slow = moved(16, 0.05, 40)
    assert float(slow[2]) < float(narrow[2])


# ------------------------------------------------------------------------------------------------- spec 03, part C


def test_random_vectors_overlap_as_one_over_the_root_of_n():
    """C3: two random unit vectors have an overlap of standard deviation n^-1/2 (4e-3 at n = 60,000; not 1e-4); a
    bell-shaped vector and its signs one of sqrt(2 / pi), in [0.75, 0.80]."""
    v = torch.randn(60_000, 60, generator=torch.Generator().manual_seed(0))
    v /= v.norm(dim=0)
    overlaps = (v[:, :30].T @ v[:, 30:]).flatten()
    assert float(overlaps.std()) * 60_000**0.5 == pytest.approx(1, abs=0.1)  # 900 pairs: 0.024
    assert bool(((binarization_overlap(v) > 0.75) & (binarization_overlap(v) < 0.80)).all())


# ------------------------------------------------------------------------------------------------ spec 04, 19 to 23


def test_linear_regression_follows_the_closed_form_for_100_steps():
    """Check 19: gradient descent on the weights at t = 1, 10, 100, to 1e-10, from a start in the span."""
    gen = torch.Generator().manual_seed(0)
    X, y = torch.randn(8, 12, generator=gen, dtype=F64), torch.randn(8, generator=gen, dtype=F64)
    K = X @ X.T
    lr = 1.0 / float(torch.linalg.eigvalsh(K)[-1])
    w = X.T @ torch.randn(8, generator=gen, dtype=F64) * 0.1
    f0, at = X @ w, {}
    for t in range(101):
        at[t] = X @ w
        w = w - lr * X.T @ (X @ w - y)
    found = bs.gradient_descent(K, y, [1, 10, 100], lr, f0_train=f0).train
    for row, t in zip(found, (1, 10, 100)):
        torch.testing.assert_close(row, at[t], rtol=1e-10, atol=1e-10)


def test_effective_rank_and_trace_ratios():
    """Checks 20, 21 (and spec 05, 23): erank of (1, 1, 1, 1, 0, ...) is 4, does not see the scale, lies between 1 and
    the rank; T_k does not fall and ends at 1."""
    four = bs.Kernel(torch.diag(torch.tensor([1.0] * 4 + [0.0] * 6, dtype=F64)), "trace", "trace", True)
    assert four.effective_rank() == pytest.approx(4, rel=1e-12)
    net, x = make()
    K = bs.ntk(net, x)
    scaled = bs.Kernel(123.0 * K.values, K.outputs, K.mode, True)
    assert scaled.effective_rank() == pytest.approx(K.effective_rank(), rel=1e-12)
    assert 1 <= K.effective_rank() <= int(torch.linalg.matrix_rank(K.matrix(), hermitian=True))
    ratios = list(K.trace_ratios(tuple(range(1, 25))).values())
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(1, rel=1e-12)


def test_cka_does_not_see_the_order_of_the_examples():
    """Check 22: a common permutation of the examples, and any positive factor, leave CKA alone."""
    a, x = make(seed=0)
    b, _ = make(seed=1)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    K, L = bs.ntk(a, x), bs.ntk(b, x)
    value = K.alignment(L)
    assert 0 <= value <= 1
    assert bs.ntk(a, x[order]).alignment(bs.ntk(b, x[order])) == pytest.approx(value, rel=1e-12)
    assert bs.Kernel(3.0 * K.values, K.outputs, K.mode, True).alignment(L) == pytest.approx(value, rel=1e-12)


def test_cka_of_the_identity_in_the_numbers_of_the_check():
    """Check 23: 0.03164 with one centring over r = 1000 pairs, 0.03178 with one per class (n = 100, c = 10)."""
    n, c = 100, 10
    K = bs.Kernel(torch.eye(n * c, dtype=F64).view(c, n, c, n), "full", "full", True)
    y = torch.arange(n) % c
    assert K.alignment(y, "global") == pytest.approx(1 / math.sqrt(n * c - 1), rel=1e-10)
    assert K.alignment(y, "global") == pytest.approx(0.03164, abs=5e-6)
    assert K.alignment(y, "per-output") == pytest.approx(1 / math.sqrt(c * (n - 1)), rel=1e-10)
    assert K.alignment(y, "per-output") == pytest.approx(0.03178, abs=5e-6)
