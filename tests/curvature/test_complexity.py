"""Complexity of the path, and Rademacher bounds where they are exact."""

import math
import warnings

import pytest
import torch

from biascope.curvature import complexity
from biascope.support.errors import InputError
from curvature.curvature_zoo import case, jacobian


def kernel(n=8, p=5, seed=0):
    Phi = torch.randn(n, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Phi, Phi @ Phi.T


@pytest.mark.parametrize("name", ["mlp", "conv2d", "norms", "words", "long_tokens", "bare"])
def test_feature_norm_is_the_norm_of_the_jacobian(name):
    net, x = case(name)
    expected = float(jacobian(net, x).norm())
    assert abs(complexity.feature_norm(net, x) - expected) < 1e-9 * expected


def test_path_complexity_sums_steps_times_features():
    net, x = case("mlp")
    C = complexity.PathComplexity(x)
    C.update(net)
    total = 0.0
    for t in range(3):
        before = float(jacobian(net, x).norm())
        g = torch.Generator().manual_seed(t)
        moved = [torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.1 for p in net.parameters()]
        with torch.no_grad():
            for p, d in zip(net.parameters(), moved):
                p += d
        total += before * math.sqrt(sum(float(d.square().sum()) for d in moved))
        assert abs(C.update(net) - total) < 1e-9 * total
    assert C.steps == 3


def test_ball_complexity_is_below_its_bound():
    Phi, K = kernel()
    mean, error = complexity.ball_complexity(2.0, K, samples=4000)
    bound = complexity.ball_bound(2.0, K)
    assert mean + 3 * error < bound
    signs = torch.tensor([[1.0 if (b >> i) & 1 else -1.0 for i in range(8)] for b in range(256)], dtype=torch.float64)
    exact = float((2.0 / 8 * (signs @ Phi).norm(dim=1)).mean())
    assert abs(mean - exact) < 4 * error


def test_flow_bound_reduces_to_the_ball_bound():
    _, K = kernel()
    root = math.sqrt(float(K.trace()))
    assert abs(complexity.learning_flow_bound([2.0], [root], 8) - complexity.ball_bound(2.0, K)) < 1e-12
    assert complexity.learning_flow_bound([1.0, 1.0], [root, root], 8) == pytest.approx(complexity.ball_bound(2.0, K))
    with pytest.raises(ValueError, match="longer"):
        complexity.learning_flow_bound([1.0], [1.0, 1.0], 8)


def test_optimal_norm_by_numerical_search():
    """Over A = sum sqrt(nu_j) v_j v_j^T, ||w*||_A ||A^-1 Phi^T||_F / n has its minimum where the formula says."""
    Phi, K = kernel(n=5, p=7, seed=1)
    y = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    bounds = complexity.optimal_norm_bound(K, y)
    values, U = torch.linalg.eigh(K)
    c = U.T @ y

    def bound(nu):
        return ((nu * c.square() / values).sum() * (values / nu).sum()).sqrt() / 5

    w = Phi.T @ torch.linalg.solve(K, y)
    assert abs(bounds.euclidean - float(w.norm()) * float(Phi.norm()) / 5) < 1e-9
    assert abs(float(bound(torch.ones(5, dtype=torch.float64))) - bounds.euclidean) < 1e-9
    assert abs(float(bound(bounds.weights)) - bounds.optimal) < 1e-9
    log_nu = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([log_nu], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure():
        search.zero_grad()
        value = bound(log_nu.exp())
        value.backward()
        return value

    search.step(closure)
    assert abs(float(bound(log_nu.detach().exp())) - bounds.optimal) < 1e-6 * bounds.optimal
    assert bounds.optimal < bounds.euclidean


def test_margins():
    outputs = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.5, 0.1], [1.0, 2.0, 0.0]])
    labels = torch.tensor([0, 1, 0])
    assert complexity.margin_risk(outputs, labels, 1.0) == pytest.approx((0.0 + 0.6 + 1.0) / 3)
    _, K = kernel()
    assert complexity.multiclass_complexity(1.0, K, 4, 0.5) == pytest.approx(16 * complexity.ball_bound(1.0, K))
    assert complexity.margin_bound(0.1, 0.0, 10**9) == pytest.approx(0.1, abs=1e-3)
    with pytest.raises(InputError, match="gamma"):
        complexity.margin_risk(outputs, labels, 0.0)
    with pytest.raises(InputError, match="delta"):
        complexity.margin_bound(0.1, 0.1, 5, delta=2.0)


def test_margins_of_a_single_output():
    """y f for two classes; the maximum over no other output made every margin infinite and the risk 0."""
    outputs = torch.tensor([[-5.0], [0.25], [3.0]])
    for labels in (torch.tensor([1, 1, -1]), torch.tensor([1, 1, 0]), torch.tensor([1.0, 1.0, -1.0])):
        assert complexity.margin_risk(outputs, labels, 1.0) == pytest.approx((1.0 + 0.75 + 1.0) / 3)
    assert complexity.margin_risk(outputs[2:], torch.tensor([1]), 1.0) == 0.0
    for labels in (torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 1])):
        with pytest.raises(InputError, match="single output"):
            complexity.margin_risk(outputs, labels, 1.0)
    with pytest.raises(InputError, match="labels"):
        complexity.margin_risk(outputs, torch.tensor([1]), 1.0)
    for gamma in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="gamma"):
            complexity.multiclass_complexity(1.0, torch.eye(3), 3, gamma)


def test_no_bound_where_no_interpolator_exists():
    K = torch.diag(torch.tensor([4.0, 0.0]))
    found = complexity.optimal_norm_bound(K, torch.tensor([1.0, 1.0]))
    assert math.isinf(found.euclidean)
    assert math.isinf(found.optimal)
    assert (found.outside, found.rank) == (0.5, 1)
    inside = complexity.optimal_norm_bound(K, torch.tensor([1.0, 0.0]))
    assert (inside.outside, inside.rank) == (0.0, 1)
    assert inside.optimal == inside.euclidean == 0.5  # one mode: |u^T y| / n
    part = complexity.optimal_norm_bound(K, torch.tensor([1.0, 1.0]), cutoff=1e-10)  # asked for: the part inside
    assert (part.optimal, part.outside) == (0.5, 0.5)
    for dtype in (torch.float32, torch.float64):  # labels in the range of a singular kernel, up to rounding
        Phi, _ = kernel(n=30, p=6)
        y = Phi @ torch.ones(6, dtype=torch.float64)
        found = complexity.optimal_norm_bound((Phi @ Phi.T).to(dtype), y.to(dtype))
        assert found.rank == 6
        assert found.euclidean == pytest.approx(6**0.5 * float(Phi.norm()) / 30, rel=1e-4)


def test_norm_bounds_refuse_what_is_no_kernel():
    y = torch.ones(2)
    for K, match in (
        (torch.tensor([[1.0, math.nan], [math.nan, 1.0]]), "NaN"),
        (torch.zeros(2, 2), "positive semi-definite"),
        (torch.diag(torch.tensor([1.0, -1.0])), "positive semi-definite"),
    ):
        with pytest.raises(InputError, match=match):
            complexity.optimal_norm_bound(K, y)
    with pytest.raises(InputError, match="y has a NaN"):
        complexity.optimal_norm_bound(torch.eye(2), torch.tensor([1.0, math.inf]))
    for cutoff in (-1.0, 1.0, math.nan):
        with pytest.raises(InputError, match="cutoff"):
            complexity.optimal_norm_bound(torch.eye(2), y, cutoff=cutoff)


def test_a_bound_that_the_cutoff_sets_says_so():
    K = torch.diag(torch.logspace(0, -12, 13, dtype=torch.float64))
    y = torch.ones(13, dtype=torch.float64)
    with pytest.warns(UserWarning, match="ill-conditioned"):
        found = complexity.optimal_norm_bound(K, y, cutoff=3e-9)
    assert found.rank == 9
    assert found.outside == pytest.approx(4 / 13)
    assert found.euclidean == pytest.approx((float((1 / K.diagonal()[:9]).sum() * K.diagonal()[:9].sum())) ** 0.5 / 13)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        complexity.optimal_norm_bound(torch.diag(torch.tensor([4.0, 1.0])), torch.ones(2))
        complexity.optimal_norm_bound(K, torch.eye(13, dtype=torch.float64)[0], cutoff=1e-6)  # y has nothing there
