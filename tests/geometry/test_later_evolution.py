"""Delta^t of networks at hand (spec 02, 2.2 and 2.10): the slope of G^t along gradient flow."""

import pytest
import torch
from torch import Tensor, nn

from biascope.ensembles import Networks, record
from biascope.geometry import containment, data_second_moment, evolution_of, geometry_evolution, geometry_of, gsg
from biascope.geometry.evolution import LOSSES as SCALAR_LOSSES
from biascope.geometry.loss_curvature import (
    curvature_correlation,
    curvature_evolution,
    evolution_correlation,
    input_curvature,
)
from biascope.support.errors import InputError, UnsupportedError

F64 = torch.float64


def net(outputs: int = 1, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), activation(), nn.Linear(6, outputs))


def data(n: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(n)
    return torch.randn(n, 2, 2, generator=rng, dtype=F64), torch.randn(n, generator=rng, dtype=F64).sign()


def stepped(networks: Networks, x: Tensor, y: Tensor, loss: str, h: float) -> Networks:
    """One step of full-batch gradient descent of every network, by plain autograd, one after another."""
    moved: dict[str, list[Tensor]] = {name: [] for name in networks.params}
    for t in range(len(networks)):
        module = networks.module(t)
        out = module(x)
        f = out[:, 0] if out.shape[1] == 1 else out[:, 1] - out[:, 0]
        total = torch.stack([SCALAR_LOSSES[loss](a, b) for a, b in zip(f, y)]).sum()
        named = dict(module.named_parameters())
        for name, slope in zip(named, torch.autograd.grad(total, list(named.values()))):
            moved[name].append(named[name].detach() - h * slope)
    return Networks(networks.template, {k: torch.stack(v) for k, v in moved.items()}, networks.buffers)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("loss", ["sse", "logistic"])
def test_it_is_the_slope_of_the_geometry(loss: str, outputs: int) -> None:
    """Central differences of `geometry_of`, at networks that have been trained for some steps."""
    probes, (x, y) = data(3)[0], data(7)
    networks = record(lambda: net(outputs)).draw(1, 0, 5, dtype=F64)
    for _ in range(3):
        networks = stepped(networks, x, y, loss, 0.05)
    h = 1e-5
    after, before = (geometry_of(stepped(networks, x, y, loss, s), probes).matrix for s in (h, -h))
    found = evolution_of(networks, probes, x, y, loss)
    expected = (after - before) / (2 * h)  # type: ignore[operator]
    assert torch.allclose(found.matrix, expected, rtol=1e-6, atol=1e-7)
    assert float(expected.norm()) > 0.01
    assert (found.n_networks, found.n_probes, found.kind) == (5, 3, "evolution")
    pieces = evolution_of(networks, probes, x, y, loss, batch=2, max_memory=200_000)
    assert torch.allclose(pieces.matrix, found.matrix, atol=1e-12)


def test_linear_regression_by_hand() -> None:
    """f = theta . x: u = -X^T (X theta - y), so Delta is the mean of u theta^T + theta u^T, whatever the probes."""
    X, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=F64), torch.ones(6, dtype=F64)
    networks = record(lambda: nn.Linear(4, 1, bias=False)).draw(5, 0, 20, dtype=F64)
    theta = networks.params["weight"][:, 0]
    u = -(theta @ X.T - y) @ X
    expected = (u.T @ theta + theta.T @ u) / 20
    found = evolution_of(networks, torch.zeros(2, 4), X, y)
    assert torch.allclose(found.matrix, expected, atol=1e-12)
    start = geometry_evolution(lambda: nn.Linear(4, 1, bias=False), X, y, 20, seed=5, dtype=F64)
    assert torch.allclose(start.matrix, expected, rtol=1e-5, atol=1e-6)


def test_matrix_free_is_the_same_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, (x, y) = data(3)[0], data(7)
    networks = record(net).draw(1, 0, 5, dtype=F64)
    dense = evolution_of(networks, probes, x, y)
    monkeypatch.setattr("biascope.geometry.average.blocks_within", lambda *_: 0)
    free = evolution_of(networks, probes, x, y)
    assert free.dense is None
    v = torch.eye(4)
    assert torch.allclose((free @ v).double(), dense.matrix, atol=1e-5)


def test_contained_in_the_leading_eigenvectors_of_gsg() -> None:
    """What it is for: with data in a plane, gradients of a linear network move in that plane alone."""
    X = torch.zeros(8, 5, dtype=F64)
    X[:, :2] = torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    networks = record(lambda: nn.Linear(5, 1, bias=False)).draw(2, 0, 4000, dtype=F64)
    probes = torch.ones(1, 5)
    Delta = evolution_of(networks, probes, X, torch.zeros(8))
    G = geometry_of(networks, probes)
    target = gsg(torch.eye(5, dtype=F64), data_second_moment(X))
    shares = containment(Delta.matrix, target, (2,))
    # Delta = -(S M + M S) with M the sample of E[theta theta^T] = I / 15: outside the plane only its sampling error
    assert shares.share[0] > 0.99
    M = G.matrix
    S = data_second_moment(X)
    assert torch.allclose(Delta.matrix, -(S @ M + M @ S), atol=1e-9)


def test_frozen_parameters_and_refusals() -> None:
    probes, (x, y) = data(3)[0], data(7)

    def half_frozen() -> nn.Module:
        made = net()
        made[1].requires_grad_(False)  # type: ignore[index]
        return made

    networks = record(half_frozen).draw(1, 0, 3, dtype=F64)
    expected = torch.zeros(4, 4, dtype=F64)
    for t in range(3):
        m = networks.module(t)
        W, v = m[1].weight.detach(), m[3].weight.detach()[0]  # type: ignore[index,union-attr]
        dv = -((m(x)[:, 0] - y).detach() @ m[:3](x).detach())  # type: ignore[index]
        slopes = 1 - m[:3](probes).detach().square()  # type: ignore[index]
        g, u = (slopes * v) @ W, (slopes * dv) @ W
        expected += (u.T @ g + g.T @ u) / 9
    assert torch.allclose(evolution_of(networks, probes, x, y).matrix, expected, atol=1e-12)
    dropout = record(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 1))).draw(0, 0, 2, dtype=F64)
    dropout.template.train()
    with pytest.raises(UnsupportedError, match="Dropout '1' is active"):
        evolution_of(dropout, probes, x, y)
    for call, message in (
        (lambda: evolution_of(networks, probes, x, y[:3]), r"y_train \[3\] do not fit"),
        (lambda: evolution_of(networks, probes.flatten(1), x, y), r"probes \[3, 4\] and x_train \[7, 2, 2\]"),
        (lambda: evolution_of(networks, probes, x, y, "hinge"), "loss='hinge'"),
        (lambda: evolution_of(networks, probes, x, y / 2, "logistic"), 'y_train: "logistic" wants labels -1 and'),
        (lambda: evolution_of(networks, probes / 0, x, y), "probes has a NaN or infinity"),
        (lambda: evolution_of(networks, probes, x, y, batch=0), "batch must be at least 1, not 0"),
        (lambda: evolution_of(Networks(net(), {}, networks.buffers), probes, x, y), "all parameters of Sequential are"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_a_loss_per_example_is_refused() -> None:
    x, y = data(3)
    with pytest.raises(InputError, match=r"loss gave a tensor of shape \[3\] for"):
        evolution_of(record(net).draw(0, 0, 2, dtype=F64), x, x, y, lambda f, t: (f - t).square())


def test_pixels_of_whole_numbers_are_refused() -> None:
    """`geometry_evolution` refused them; these took 0 to 255 as they are."""
    drawn = record(lambda: nn.Linear(3, 1)).draw(0, 0, 2)
    x, y, one = torch.ones(4, 3), torch.ones(4), nn.Linear(3, 1)
    whole = 255 * x.byte()
    for call, name in (
        (lambda: evolution_of(drawn, x, whole, y), "x_train"),
        (lambda: evolution_of(drawn, whole, x, y), "probes"),
        (lambda: input_curvature(one, whole, y), "x"),
        (lambda: curvature_correlation(drawn, whole, y), "x"),
        (lambda: curvature_evolution(one, x, y, whole, y), "x_train"),
        (lambda: evolution_correlation(drawn, whole, y, x, y), "x"),
    ):
        with pytest.raises(InputError, match=rf"^{name} is torch.uint8: .* {name}.float\(\)"):
            call()
