"""Complexity bounds, KFAC's exact cases and products compared: checks that other files of this room cover in part."""

import itertools
import math

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.curvature import complexity, l2_metric
from curvature.curvature_zoo import relative

F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize(("n", "p"), [(10, 4), (10, 40), (6, 1)])
def test_exact_rademacher_complexity_lies_between_the_bound_and_its_half(n, p):
    """Spec 04 check 28, spec 05 check 24: all 2^n signs; (M/n) sqrt(tr K) / sqrt 2 <= R <= (M/n) sqrt(tr K)."""
    Phi = randn(n, p)
    K = Phi @ Phi.T
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=F64)
    exact = float((1.5 / n * (signs @ Phi).norm(dim=1)).mean())
    bound = complexity.ball_bound(1.5, K)
    assert bound / math.sqrt(2) <= exact <= bound
    mean, error = complexity.ball_complexity(1.5, K, samples=4000)
    assert abs(mean - exact) < 4 * error
    if p == 40:
        assert exact / bound == pytest.approx(0.99, abs=0.01)


def test_multiclass_bound_with_one_class_is_the_binary_one():
    """Spec 04 check 29: c^{3/2} M sqrt(tr K) / (gamma n), and R(F) / gamma for c = 1."""
    K = randn(9, 5) @ randn(9, 5).T
    assert complexity.multiclass_complexity(2.0, K, 1, 0.4) == pytest.approx(complexity.ball_bound(2.0, K) / 0.4)
    for c in (2, 3, 10):
        ratio = complexity.multiclass_complexity(2.0, K, c, 0.4) / complexity.multiclass_complexity(2.0, K, 1, 0.4)
        assert ratio == pytest.approx(c**1.5, rel=1e-12)


def test_flow_bound_is_never_below_the_bound_of_the_end_point():
    """Spec 04 checks 30 and 31: with constant features a path is at least as long as its displacement."""
    Phi = randn(8, 5)
    root = float(Phi.norm())
    for seed in range(20):
        steps = randn(6, 5, seed=seed)
        path = complexity.learning_flow_bound(steps.norm(dim=1).tolist(), [root] * 6, 8)
        assert path >= complexity.ball_bound(float(steps.sum(0).norm()), Phi @ Phi.T)
    straight = torch.ones(6, 1, dtype=F64) * randn(1, 5)
    path = complexity.learning_flow_bound(straight.norm(dim=1).tolist(), [root] * 6, 8)
    assert path == pytest.approx(complexity.ball_bound(float(straight.sum(0).norm()), Phi @ Phi.T), rel=1e-12)


def test_trace_of_the_kernel_by_random_vectors():
    """Spec 04 check 31: Hutchinson's estimate of tr K = n tr G within three standard errors; seeded."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = randn(10, 4)
    found = l2_metric(net, x, "implicit").estimate_trace(
        samples=20, seed=1
    )  # fewer than the 51 parameters: an estimate
    exact = bs.ntk(net, x).trace()
    assert abs(10 * float(found) - exact) < 3 * 10 * float(found.standard_error)
    assert 10 * float(found.standard_error) < 0.2 * exact


def test_margin_ramp_and_the_bound_for_many_examples():
    """Spec 04 check 35: 1, 1, 1/2, 0 at u = -1, 0, gamma/2, above gamma; n -> infinity leaves the empirical risk."""
    gamma = 0.8
    for u, value in ((-1.0, 1.0), (0.0, 1.0), (gamma / 2, 0.5), (gamma * 1.01, 0.0), (gamma, 0.0)):
        outputs = torch.tensor([[u, 0.0]], dtype=F64)
        assert complexity.margin_risk(outputs, torch.tensor([0]), gamma) == pytest.approx(value, abs=1e-12)
    excess = [complexity.margin_bound(0.17, 0.0, n) - 0.17 for n in (10**2, 10**4, 10**12)]
    assert excess == pytest.approx([3 * math.sqrt(math.log(2 / 0.05) / (2 * n)) for n in (10**2, 10**4, 10**12)])
    assert excess[-1] < 1e-5


def test_kfac_is_exact_for_the_last_layer_with_a_gaussian_likelihood():
    """Spec 05 check 7: the output gradient of the last layer is the identity, whatever comes before it."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = randn(7, 4)
    for params, exact in (("2", True), ("0", False)):
        error = relative(
            l2_metric(net, x, "kfac", params=params).to_dense(), l2_metric(net, x, "dense", params=params).to_dense()
        )
        assert (error < 1e-10) == exact


def test_ekfac_equals_kfac_where_kfac_is_right():
    """Spec 05 check 8: the two errors agree there and only there; elsewhere EKFAC's is strictly smaller."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = randn(7, 4)
    for params, equal in (("2", True), ("0", False)):
        truth = l2_metric(net, x, "dense", params=params).to_dense()
        errors = [relative(l2_metric(net, x, kind, params=params).to_dense(), truth) for kind in ("ekfac", "kfac")]
        assert errors[0] <= errors[1] + 1e-12
        assert (errors[1] - errors[0] < 1e-10) == equal


def test_products_with_ekfac_point_closer_to_the_truth():
    """Spec 05 check 34: cos(EKFAC v, F v) >= cos(KFAC v, F v) in most draws (85 % against the blocks, 64 % against the
    whole matrix, whose blocks between layers neither has); EKFAC's trace is exact, KFAC's is not. Nothing is said of
    inverses: there is no such guarantee."""
    shares, gains = {"dense": 0.0, "block": 0.0}, {"dense": [], "block": []}
    for seed in range(10):
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).double()
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.copy_(randn(*p.shape, seed=100 * seed + i) * (2 / p.shape[-1]) ** 0.5)
        x = randn(30, 5, seed=seed)
        K, E = (bs.fisher(net, x, kind) for kind in ("kfac", "ekfac"))
        V = randn(K.shape[0], 20, seed=seed)
        for truth in shares:
            F = bs.fisher(net, x, truth)
            assert relative(E.trace(), F.trace()) < 1e-10 < relative(K.trace(), F.trace())
            ours, theirs = (torch.cosine_similarity(G @ V, F @ V, dim=0) for G in (E, K))
            shares[truth] += float((ours >= theirs).double().mean()) / 10
            gains[truth].append(float((ours - theirs).mean()))
    assert shares["block"] > 0.75
    assert shares["dense"] > 0.55
    for each in gains.values():
        gain = torch.tensor(each)
        assert float(gain.mean()) > 2 * float(gain.std()) / 10**0.5
