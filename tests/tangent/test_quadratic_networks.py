"""The quadratic model as a real network: its linearisation, its lazy limit, and its tangent kernel (check 20)."""

import pytest
import torch
from torch import Tensor, nn

from biascope import data
from biascope.kernels import gradient_descent, gradient_flow, ntk
from biascope.kernels.regression import gradient_step_modes, time_constants
from biascope.tangent import lazy, lazy_lr, linearize
from biascope.tangent.quadratic import quadratic_model, simulate


class Quadratic(nn.Module):
    """f(x) = theta^T x, theta = 1/2 sum_l w_l^2 v_l."""

    def __init__(self, v: Tensor, theta0: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((v.shape[1],), (2 * theta0) ** 0.5, dtype=torch.float64))
        self.register_buffer("v", v)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.v @ (self.w.square() / 2)))[:, None]


TASK = data.quadratic_example3(n=8, q=2, d=12)
THETA0 = 0.01


def descend(net: nn.Module, lr: float, steps: int) -> Tensor:
    """Outputs [n] after gradient descent on 0.5 ||f - y||^2."""
    for _ in range(steps):
        loss = 0.5 * (net(TASK.x)[:, 0] - TASK.y).square().sum()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), gradients):
                p.sub_(lr * g)
    return net(TASK.x)[:, 0].detach()


def outputs(theta: Tensor) -> Tensor:
    return TASK.u @ (TASK.mu.sqrt() * theta)


def test_the_network_and_its_linearisation_are_the_two_regimes() -> None:
    model = quadratic_model(TASK.mu, TASK.y_mode, THETA0)
    plain = descend(Quadratic(TASK.v, THETA0), 1e-3, 60)
    flat = descend(linearize(Quadratic(TASK.v, THETA0)), 1e-3, 60)
    assert torch.allclose(plain, outputs(simulate(model, 1e-3, [60])[0]), atol=1e-10)
    assert torch.allclose(flat, outputs(simulate(model, 1e-3, [60], linearised=True)[0]), atol=1e-10)
    assert float((plain - flat).abs().max()) > 0.05


def test_large_alpha_tends_to_the_linearised_regime() -> None:
    model = quadratic_model(TASK.mu, TASK.y_mode, THETA0)
    flat = outputs(simulate(model, 1e-3, [60], linearised=True)[0])
    gaps = []
    for alpha in (1e2, 1e3, 1e4):
        net = lazy(Quadratic(TASK.v, THETA0), alpha)
        gaps.append(float((descend(net, lazy_lr(1e-3, alpha), 60) - flat).abs().max()))
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.1)  # first order in 1 / alpha
    assert gaps[1] / gaps[2] == pytest.approx(10, rel=0.1)
    assert gaps[2] < 1e-3


def test_linear_regime_is_kernel_gradient_flow_with_the_tangent_kernel() -> None:
    """K = sum_l 2 theta0 mu_l u_l u_l^T; every mode decays at its eigenvalue, which is the rate 2 mu theta0."""
    net = Quadratic(TASK.v, THETA0)
    K = ntk(net, TASK.x).matrix().double()
    assert torch.allclose(K, TASK.u @ torch.diag(2 * THETA0 * TASK.mu) @ TASK.u.T, atol=1e-10)
    model = quadratic_model(TASK.mu, TASK.y_mode, THETA0)
    f0 = net(TASK.x)[:, 0].detach()
    times = [0.0, 0.3, 2.0]
    flow = gradient_flow(K, TASK.y, times, f0_train=f0)
    assert torch.allclose(flow.train, torch.stack([outputs(t) for t in model.linearised(times)]), atol=1e-9)
    steps = gradient_descent(K, TASK.y, [5, 50], lr=1e-2, f0_train=f0)
    expected = simulate(model, 1e-2, [5, 50], linearised=True)
    assert torch.allclose(steps.train, torch.stack([outputs(t) for t in expected]), atol=1e-9)


def test_one_step_of_the_linearised_network_is_the_sum_of_its_modes() -> None:
    net = linearize(Quadratic(TASK.v, THETA0))
    before = net(TASK.x)[:, 0].detach()
    step = gradient_step_modes(ntk(Quadratic(TASK.v, THETA0), TASK.x).matrix(), before - TASK.y, lr=0.02)
    assert torch.allclose(descend(net, 0.02, 1) - before, step.change, atol=1e-10)
    # the steps in which a mode's residual falls by e, against the continuous rate, for small lr
    rates = (2 * THETA0 * TASK.mu).sort(descending=True).values
    assert torch.allclose(1e-3 * time_constants(rates, 1e-3), 1 / rates, rtol=2e-3)
