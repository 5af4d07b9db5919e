"""Networks that change their inputs in place are expanded at the inputs as they were given."""

import pytest
import torch
from torch import Tensor, nn

from biascope.support.errors import InputError, UnsupportedError
from biascope.tangent import lazy, linearize, linearized_prediction, taylor_residual


class Doubling(nn.Module):
    """sigmoid(W (2 x) + b), the 2 written into x; above `limit` only, if there is one."""

    def __init__(self, limit: float | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        if self.limit is None or float(x.abs().max()) > self.limit:
            x.mul_(2.0)
        out: Tensor = self.linear(x).sigmoid()
        return out


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moved(net: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach() + 0.5 * seeded(*p.shape, seed=7) for k, p in net.named_parameters()}


def oracle(net: Doubling, theta: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """f(theta0) + J (theta - theta0) [n, 3] and J [3 n, 15], written out without a network."""
    W, b = net.linear.weight.detach(), net.linear.bias.detach()

    def f(flat: Tensor) -> Tensor:
        return (2 * x @ flat[:12].view(3, 4).T + flat[12:]).sigmoid().flatten()

    start = torch.cat([W.flatten(), b])
    J = torch.autograd.functional.jacobian(f, start)
    end = torch.cat([theta["linear.weight"].flatten(), theta["linear.bias"]])
    return (f(start) + J @ (end - start)).view(-1, 3), J


@pytest.mark.parametrize("engine", ["vjp", "jvp"])
def test_values_and_gradients_are_those_of_the_inputs_as_given(engine: str) -> None:
    net, x, u = Doubling(), seeded(5, 4), seeded(5, 3, seed=1)
    theta = moved(net)
    expected, J = oracle(net, theta, x)
    lin = linearize(net, engine=engine)
    lin.load_state_dict(theta)
    for _ in range(2):  # the first call is also the one in which the forward mode is tried
        given = x.clone()
        out = lin(given)
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
        grads = torch.autograd.grad((out * u).sum(), list(lin.parameters()))
        torch.testing.assert_close(torch.cat([g.flatten() for g in grads]), u.flatten() @ J, rtol=1e-12, atol=1e-14)
        assert torch.equal(given, x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(lin(x.clone()), expected, rtol=1e-13, atol=1e-14)


def test_training_is_that_of_a_loop_by_hand() -> None:
    net, x, y = Doubling(), seeded(6, 4), seeded(6, 3, seed=3)
    lin = linearize(net)
    optimiser = torch.optim.SGD(lin.parameters(), lr=0.3, momentum=0.9)
    f0, J = oracle(net, dict(net.named_parameters()), x)
    w = torch.zeros(15, dtype=torch.float64)
    velocity = torch.zeros_like(w)
    for _ in range(4):
        optimiser.zero_grad()
        (lin(x) - y).square().mean().backward()
        optimiser.step()
        velocity = 0.9 * velocity + J.T @ (2 / 18 * (f0.flatten() + J @ w - y.flatten()))
        w = w - 0.3 * velocity
    found = torch.cat([d.flatten() for d in lin.displacement.values()])
    torch.testing.assert_close(found, w, rtol=1e-12, atol=1e-14)


def test_an_input_changed_before_the_backward_pass_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    x = torch.ones(2, 4)
    loss = linearize(net)(x).sum()
    x.zero_()
    with pytest.raises(InputError, match="changed in place between the forward and the backward pass"):
        loss.backward()


def test_a_network_that_writes_in_some_calls_only_is_refused_there() -> None:
    lin = linearize(Doubling(limit=1.0))
    small = torch.full((3, 4), 0.5, dtype=torch.float64)
    lin(small)
    with pytest.raises(UnsupportedError, match="Doubling changes its inputs in place"):
        lin(4 * small)


@pytest.mark.parametrize("inference", [False, True])
def test_lazy_networks_read_the_inputs_as_given_twice(inference: bool) -> None:
    net, x = Doubling(), seeded(5, 4)
    theta = moved(net)
    scaled = lazy(net, 50.0)
    scaled.load_state_dict(theta)
    f0 = (2 * x @ net.linear.weight.T + net.linear.bias).sigmoid()
    f = (2 * x @ theta["linear.weight"].T + theta["linear.bias"]).sigmoid()
    with torch.inference_mode(inference):
        out = scaled(x.clone())
    torch.testing.assert_close(out, f0 + 50 * (f - f0), rtol=1e-12, atol=1e-12)


def test_residuals_are_of_the_inputs_as_given_and_leave_them_alone() -> None:
    net, x = Doubling(), seeded(5, 4)
    kept, theta = x.clone(), moved(net)
    expected, _ = oracle(net, theta, x)
    torch.testing.assert_close(linearized_prediction(net, theta, x, precision="float64"), expected)
    start = (2 * x @ net.linear.weight.T + net.linear.bias).sigmoid().detach()
    end = (2 * x @ theta["linear.weight"].T + theta["linear.bias"]).sigmoid()
    residual = float((end - expected).norm() / (expected - start).norm())
    assert taylor_residual(net, theta, x, precision="float64") == pytest.approx(residual, rel=1e-9)
    assert torch.equal(x, kept)
    moody = Doubling(limit=3.0)  # begins to write with a later batch
    with pytest.raises(UnsupportedError, match="in this call and not in the first one"):
        taylor_residual(moody, moved(moody), [x.clamp(-1, 1), 5 * x], precision="float64")
    first = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3, dtype=torch.float64))  # the same on what it leaves
    plain = nn.Sequential(nn.ReLU(), nn.Linear(4, 3, dtype=torch.float64))
    plain.load_state_dict(first.state_dict())
    found, same = (linearized_prediction(m, moved(first), x, precision="float64") for m in (first, plain))
    assert torch.equal(found, same)
    assert taylor_residual(first, moved(first), x, precision="float64") < 1e-14
    assert torch.equal(x, kept)
