"""The dipole metric and its bounds on networks, against plain loops of autograd in float64 (spec 01, 2.9; check 10)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from biascope.ensembles import Networks, input_gradients, record
from biascope.geometry import dipole as dipole_module
from biascope.geometry.dipole import (
    dipole_derivatives,
    dipole_metric,
    general_learning_bound,
    learning_bound,
    markov_bound,
)
from biascope.support.errors import InputError, UnsupportedError

F64 = torch.float64
SHAPE = (1, 4, 4)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 1))


def relu_cnn() -> nn.Module:  # two logits, a pooling layer, BatchNorm
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 2)
    )


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def scalar(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x[None])[0]
    return out[0] if len(out) == 1 else out[1] - out[0]


def directional_of(net: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """v^T grad_x f, to be differentiated again."""
    leaf = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(scalar(net, leaf), leaf, create_graph=True)
    return (gradient * v).sum()


def gradient_length(net: nn.Module, value: Tensor) -> float:
    found = torch.autograd.grad(value, list(net.parameters()), allow_unused=True)
    return math.sqrt(sum(float(part.square().sum()) for part in found if part is not None))


def loop(networks: Networks, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """directional and mixed [T], one network and one derivative after another."""
    rows = []
    for i in range(len(networks)):
        net = networks.module(i)
        along = directional_of(net, x, v)
        rows.append((float(along), gradient_length(net, along)))
    directional, mixed = torch.tensor(rows, dtype=F64).T
    return directional, mixed


@pytest.mark.parametrize("factory", [mlp, relu_cnn])
def test_dipole_metric_is_a_difference_of_outputs(factory: Callable[[], nn.Module]) -> None:
    networks = record(factory).draw(0, 0, 7, dtype=F64)
    x, V = gaussian(*SHAPE), gaussian(3, *SHAPE, seed=1)
    for g in (torch.square, lambda t: 0.3 * t**2 + 0.7 * t, torch.tanh):
        expected = torch.empty(7, 3, dtype=F64)
        for i in range(7):
            net = networks.module(i)
            for j, v in enumerate(V):
                expected[i, j] = g((scalar(net, x) - scalar(net, x + v)).abs()).detach()
            assert torch.allclose(dipole_metric(net, x, V, g), expected[i], atol=1e-13)
            assert dipole_metric(net, x, V[1], g).item() == pytest.approx(float(expected[i, 1]), abs=1e-13)
        assert torch.allclose(dipole_metric(networks, x, V, g), expected, atol=1e-13)
        assert torch.allclose(dipole_metric(networks, x, V[2], g), expected[:, 2], atol=1e-13)


def test_dipole_metric_of_more_outputs_and_other_precisions() -> None:
    net = nn.Linear(4, 3)
    x, v = gaussian(4), gaussian(4, seed=1)
    q = dipole_metric(net, x, v, scalarise=lambda out: out[:, 2])
    assert q.dtype == torch.float32  # the network's own
    assert q.item() == pytest.approx(float((net.weight[2].detach().double() @ v) ** 2), rel=1e-5)
    with pytest.raises(InputError, match="3 outputs"):
        dipole_metric(net, x, v)


def test_short_dipoles_are_added_in_the_networks_precision() -> None:
    """1 + 1e-8 is 1 in single precision, and whole numbers have no half."""
    linear = nn.Linear(3, 1).double()
    stack = record(lambda: nn.Linear(3, 1)).draw(0, 0, 4, dtype=F64)
    v = torch.tensor([1e-8, 2e-8, -1e-8], dtype=F64)
    half = torch.full((3,), 0.5)
    for weight, of in ((linear.weight[0], linear), (stack.params["weight"][:, 0], stack)):
        expected = (weight.detach() @ v) ** 2
        assert torch.allclose(dipole_metric(of, torch.ones(3), v).detach(), expected, rtol=1e-6)
        expected = (weight.detach() @ half.double()) ** 2
        for zero in (torch.zeros(3), torch.zeros(3, dtype=torch.int64)):
            assert torch.allclose(dipole_metric(of, zero, half).detach(), expected, rtol=1e-12)
    assert dipole_metric(nn.Flatten(0), torch.tensor(0), half[0], scalarise=lambda out: out[:, 0]).item() == 0.25


def test_dipoles_of_names_stay_whole() -> None:
    """An embedding takes whole numbers; from entry 1 to entry 3."""
    stack = record(lambda: nn.Sequential(nn.Embedding(5, 1), nn.Flatten())).draw(0, 0, 4)
    table = stack.params["0.weight"][:, :, 0]
    found = dipole_metric(stack, torch.tensor([1]), torch.tensor([2]))
    assert torch.allclose(found, (table[:, 1] - table[:, 3]) ** 2)


@pytest.mark.parametrize("factory", [mlp, relu_cnn])
def test_derivatives_against_a_loop(factory: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    x, V = gaussian(*SHAPE), gaussian(3, *SHAPE, seed=1)
    networks = record(factory).draw(5, 0, 11, dtype=F64)
    both = [loop(networks, x, v) for v in V]
    expected = torch.stack([d for d, _ in both], 1), torch.stack([m for _, m in both], 1)
    for held in (2**27, 1):  # all networks at once, and one by one
        monkeypatch.setattr(dipole_module, "HELD", held)
        for source in (factory, networks):
            found = dipole_derivatives(source, x, V, n_networks=11, seed=5, dtype=F64)
            assert torch.allclose(found.directional, expected[0], rtol=1e-11, atol=1e-14)
            assert torch.allclose(found.mixed, expected[1], rtol=1e-11, atol=1e-14)
            one = dipole_derivatives(source, x, V[1], n_networks=11, seed=5, dtype=F64)
            assert one.directional.shape == one.mixed.shape == (11,)
            assert torch.allclose(one.directional, expected[0][:, 1], rtol=1e-11, atol=1e-14)
            assert torch.allclose(one.mixed, expected[1][:, 1], rtol=1e-11, atol=1e-14)


def test_frozen_parameters_are_no_part_of_the_mixed_derivative() -> None:
    """f = w2 (w1 x): with w1 frozen H v = w1 v, else (w2 v, w1 v)."""

    def factory(frozen: bool) -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1, bias=False))
        net[0].weight.requires_grad_(not frozen)
        return net

    x, v = gaussian(3), gaussian(3, seed=1)
    for frozen in (True, False):
        networks = record(lambda: factory(frozen)).draw(0, 0, 6, dtype=F64)  # noqa: B023
        values = {**networks.params, **networks.buffers}
        w1, w2 = values["0.weight"][:, 0], values["1.weight"][:, 0, 0]
        energy = (w1 @ v) ** 2 + (0 if frozen else w2**2 * v.square().sum())
        assert torch.allclose(dipole_derivatives(networks, x, v).mixed, energy.sqrt(), rtol=1e-12)
        assert torch.allclose(dipole_derivatives(networks, x, v).directional, w2 * (w1 @ v), rtol=1e-12)


@pytest.mark.parametrize("factory", [mlp, relu_cnn])
@pytest.mark.parametrize("beta", [0.0, 0.05, 1.0])
def test_lemma_2_on_networks(factory: Callable[[], nn.Module], beta: float) -> None:
    """g = alpha t^2 / 2 + beta t, so g' = alpha t + beta: the bound at its tightest, E||grad_theta q|| by autograd."""
    networks = record(factory).draw(1, 0, 60, dtype=F64)
    x = gaussian(*SHAPE)
    for seed in range(3):
        v = gaussian(*SHAPE, seed=10 + seed)
        found = dipole_derivatives(networks, x, v)
        for alpha in (0.05, 0.5, 3.0):
            left = 0.0
            for i in range(len(networks)):
                net = networks.module(i)
                t = directional_of(net, x, v).abs()
                left += gradient_length(net, alpha / 2 * t**2 + beta * t) / len(networks)
            bound = learning_bound(found.directional, found.mixed, alpha, beta)
            assert 0 < left <= bound * (1 + 1e-12)
            assert bound < 4 * left  # a bound, and no empty one
            general = general_learning_bound(found.directional, found.mixed, lambda t: alpha * t + beta)  # noqa: B023
            assert left <= general * (1 + 1e-12)
            printed = learning_bound(found.directional, found.mixed, alpha**2, beta)
            if beta == 0 and alpha == 0.05:  # the paper's alpha^2 is no bound
                assert left > 5 * printed


def test_lemma_2_on_short_dipoles() -> None:
    """The same for q itself, f(x) - f(x + v) with ||v|| = 1e-4: equal to its linear form to 1e-3."""
    networks = record(mlp).draw(2, 0, 40, dtype=F64)
    x = gaussian(*SHAPE)
    v = 1e-4 * nn.functional.normalize(gaussian(16, seed=3), dim=0).view(SHAPE)
    found = dipole_derivatives(networks, x, v)
    alpha = 0.2
    left, linear = [], []
    for i in range(len(networks)):
        net = networks.module(i)
        left.append(gradient_length(net, dipole_metric(net, x, v, lambda t: alpha / 2 * t**2)))
        linear.append(alpha * abs(float(found.directional[i])) * float(found.mixed[i]))
    mean = sum(left) / len(left)
    # entry by entry only up to the curvature of f along v, of order ||v||, so compared in the mean
    assert mean == pytest.approx(sum(linear) / len(linear), rel=1e-3)
    assert mean < learning_bound(found.directional, found.mixed, alpha)
    assert mean > learning_bound(found.directional, found.mixed, alpha**2)


@pytest.mark.parametrize("factory", [mlp, relu_cnn])
def test_markov_on_the_gradients_of_networks(factory: Callable[[], nn.Module]) -> None:
    networks = record(factory).draw(3, 0, 80, dtype=F64)
    x, V = gaussian(*SHAPE), gaussian(40, *SHAPE, seed=4)
    gradients = input_gradients(networks, x[None]).flatten(1)
    Sigma = gradients.T @ gradients / len(networks)
    found = dipole_derivatives(networks, x, V)
    squares = found.directional.square()
    for j, v in enumerate(V):
        mean = float(squares[:, j].mean())
        for eta in [*(mean * torch.logspace(-3, 2, 30).double()).tolist(), float(squares[:, j].max())]:
            share = float((squares[:, j] >= eta).double().mean())
            assert share <= markov_bound(v, Sigma, eta) + 1e-12
            if eta > mean:
                assert markov_bound(v, Sigma, eta) == pytest.approx(mean / eta, rel=1e-9)


def test_bad_dipoles_are_named() -> None:
    x = gaussian(*SHAPE)
    with pytest.raises(InputError, match=r"shape of x \[1, 4, 4\], .* got \[4, 4\]"):
        dipole_metric(mlp(), x, torch.ones(4, 4))
    with pytest.raises(InputError, match=r"g made 3\.0 of \[1\]; it must act entry by"):
        dipole_metric(mlp(), x.float(), torch.ones(*SHAPE), lambda t: 3.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match=r"of \[2\]; it must act entry by entry"):
        dipole_metric(mlp(), x.float(), torch.ones(2, *SHAPE), torch.sum)
    with pytest.raises(InputError, match=r"got \[0, 1, 4, 4\]"):
        dipole_derivatives(mlp, x, torch.ones(0, *SHAPE))
    with pytest.raises(InputError, match="n_networks must be at least 1, not 0"):
        dipole_derivatives(mlp, x, x, n_networks=0)
    with pytest.raises(InputError, match="frozen"):
        dipole_derivatives(record(lambda: mlp().requires_grad_(False)).draw(0, 0, 2), x, x)
    with pytest.raises(UnsupportedError, match="train mode"):
        dipole_metric(relu_cnn(), x, x)
    with pytest.raises(InputError, match=r"w made 2\.0 of \[2\]; it must act entry by"):
        general_learning_bound(torch.ones(2), torch.ones(2), torch.sum)
    with pytest.raises(InputError, match="is negative: covariance is no second moment"):
        markov_bound(torch.ones(2), -torch.eye(2), 1.0)
