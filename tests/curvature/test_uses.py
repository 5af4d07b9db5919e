"""Consolidation, pruning, natural gradient, posterior samples, influence, effective dimension."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import biascope as bs
from biascope.curvature import uses
from biascope.support.errors import InputError
from curvature.curvature_zoo import case, relative


@pytest.fixture
def setting():
    net, x = case("mlp")
    y = torch.arange(6) % 3
    return net, x, y, dict(net.named_parameters())


def randn_like(params, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn(p.shape, generator=g, dtype=p.dtype) for k, p in params.items()}


@pytest.mark.parametrize("representation", ["dense", "ekfac", "implicit", "quasidiagonal"])
def test_consolidation_penalty(setting, representation):
    net, x, _, params = setting
    metric = bs.fisher(net, x, representation)
    D, step = metric.to_dense(), randn_like(params)
    anchor = {k: p.detach() - step[k] for k, p in params.items()}
    d = metric.space.flatten(step)
    penalty = uses.consolidation_penalty(metric, params, anchor, strength=3.0)
    assert relative(penalty.detach(), 1.5 * d @ D @ d) < 1e-10
    grads = torch.autograd.grad(penalty, list(params.values()))
    assert relative(torch.cat([g.flatten() for g in grads]), 3.0 * D @ d) < 1e-10
    with pytest.raises(InputError, match="needs the parameter"):
        uses.consolidation_penalty(metric, {}, anchor)


def test_pruning_scores(setting):
    net, x, _, params = setting
    metric = bs.fisher(net, x, "dense")
    D, w = metric.to_dense(), metric.space.flatten(params)
    scores = uses.pruning_scores(metric, params)
    assert relative(metric.space.flatten(scores), w**2 * D.diagonal() / 2) < 1e-10
    inverse = torch.linalg.inv(D + 0.1 * torch.eye(len(D), dtype=D.dtype))
    surgeon = uses.pruning_scores(metric, params, "surgeon", damping=0.1)
    assert relative(metric.space.flatten(surgeon), w**2 / (2 * inverse.diagonal())) < 1e-8
    with pytest.raises(InputError, match="there is damage, surgeon"):
        uses.pruning_scores(metric, params, "guess")


def test_natural_gradient_minimises_the_local_model(setting):
    net, x, y, params = setting
    metric = bs.fisher(net, x, "dense")
    grads = dict(zip(params, torch.autograd.grad(F.cross_entropy(net(x), y), list(params.values()))))
    step = metric.space.flatten(uses.natural_gradient(metric, grads, damping=0.2))
    g, D = metric.space.flatten(grads), metric.to_dense()
    assert relative(D @ step + 0.2 * step, -g) < 1e-10
    assert float(step @ g) < 0


def test_laplace_samples(setting):
    net, x, _, params = setting
    metric = bs.fisher(net, x, "kfac")
    draws = uses.laplace_samples(metric, params, 50, 4.0, 20_000, torch.Generator().manual_seed(0))
    flat = torch.cat([draws[k].flatten(1) for k in params], 1)
    covariance = torch.linalg.inv(50 * metric.to_dense() + 4.0 * torch.eye(43, dtype=torch.float64))
    assert relative(flat.mean(0), metric.space.flatten(params)) < 0.01
    assert relative(torch.cov(flat.T), covariance) < 0.05
    with pytest.raises(InputError, match="a finite number above 0"):
        uses.laplace_samples(metric, params, 50, 0.0)


def test_influence_scores(setting):
    net, x, y, params = setting
    metric = bs.fisher(net, x, "dense")
    rows = []
    for i in range(6):
        loss = F.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(params.values()))]))
    G = torch.stack(rows)
    assert relative(uses.loss_gradients(net, (x, y)), G) < 1e-10
    inverse = torch.linalg.inv(metric.to_dense() + 0.1 * torch.eye(43, dtype=torch.float64))
    for some in (slice(0, 2), slice(0, 6)):
        scores = uses.influence_scores(metric, net, (x, y), (x[some], y[some]), damping=0.1)
        assert relative(scores, G[some] @ inverse @ G.T) < 1e-9
    scores = uses.influence_scores(metric, net, (x[:2], y[:2]), (x, y), damping=0.1)
    assert relative(scores, G @ inverse @ G[:2].T) < 1e-9
    with pytest.raises(InputError, match="solve: v must be"):
        uses.influence_scores(metric, net, (x, y), (x, y), 0.1, params="2")


def test_the_order_of_the_examples_is_that_of_the_data(setting):
    """A loader that shuffles is read in the order of its data set."""
    net, x, y, _ = setting
    metric, data = bs.fisher(net, x, "dense"), TensorDataset(x, y)
    ordered, shuffled = (DataLoader(data, batch_size=4, shuffle=s) for s in (False, True))
    found, wanted = uses.loss_gradients(net, ordered), uses.loss_gradients(net, (x, y))
    assert relative(found, wanted) < 1e-14  # products of 4 and of 8 rows may round differently
    with pytest.warns(UserWarning, match="shuffles"):
        assert relative(uses.loss_gradients(net, shuffled), wanted) < 1e-14
    wanted = uses.influence_scores(metric, net, ordered, ordered, damping=0.1)
    for train, test in ((shuffled, ordered), (ordered, shuffled)):
        with pytest.warns(UserWarning, match="shuffles"):
            assert relative(uses.influence_scores(metric, net, train, test, damping=0.1), wanted) < 1e-12
    with pytest.raises(InputError, match="one-shot iterator"):
        uses.loss_gradients(net, iter([(x, y)]))


@pytest.mark.parametrize("representation", ["dense", "ekfac", "lowrank", "quasidiagonal", "implicit"])
def test_effective_dimension(setting, representation):
    net, x, _, _ = setting
    metric = bs.fisher(net, x, representation)
    D = metric.to_dense()
    expected = torch.linalg.solve(D + 0.05 * torch.eye(43, dtype=D.dtype), D).trace()
    assert abs(uses.effective_dimension(metric, 0.05) - float(expected)) < 1e-6
    with pytest.raises(InputError, match="a finite number above 0"):
        uses.effective_dimension(metric, 0.0)
