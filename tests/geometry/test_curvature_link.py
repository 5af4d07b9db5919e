"""Curvature of the loss in input space, batches of it, and whether it is proportional to G^t (spec 02, 2.8)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn import functional as F

from biascope.ensembles import Networks, record
from biascope.geometry import geometry_evolution
from biascope.geometry.loss_curvature import (
    curvature_correlation,
    curvature_evolution,
    evolution_correlation,
    input_curvature,
)
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.precision import convolves_in_tf32

F64 = torch.float64
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sse": lambda f, y: 0.5 * (f - y) ** 2,
    "logistic": lambda f, y: F.softplus(-y * f),
}


def net(activation: type[nn.Module], outputs: int = 1) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 6), activation(), nn.Linear(6, outputs))


def data(n: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(n)
    return torch.randn(n, 2, 2, generator=rng, dtype=F64), torch.randn(n, generator=rng, dtype=F64).sign()


def drawn(activation: type[nn.Module], count: int) -> Networks:
    return record(net(activation)).draw(3, 0, count, dtype=F64)


def brute(model: nn.Module, x: Tensor, y: Tensor, loss: str) -> Tensor:
    """[n, D, D] by double backward, one example after another."""

    def of(flat: Tensor, label: Tensor) -> Tensor:
        out = model(flat.view(1, 2, 2))[0]
        return LOSSES[loss](out[0] if len(out) == 1 else out[1] - out[0], label)

    return torch.stack([hessian(lambda z, b=b: of(z, b), a.flatten()) for a, b in zip(x, y)])


@pytest.mark.parametrize("loss", ["sse", "logistic"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_batch_is_one_example_after_another(loss: str, outputs: int) -> None:
    x, y = data(5)
    model = net(nn.Tanh, outputs)().double()
    found = input_curvature(model, x, y, loss)
    assert torch.allclose(found.hessian, brute(model, x, y, loss), atol=1e-12)
    alone = [input_curvature(model, a, b, loss) for a, b in zip(x, y)]
    assert torch.allclose(found.gradient_term, torch.stack([t.gradient_term for t in alone]), atol=1e-12)
    assert found.shares.shape == (5,)
    assert torch.allclose(found.shares, torch.stack([t.shares for t in alone]), atol=1e-12)
    norms = [t.flatten(1).norm(dim=1) for t in (found.function_term, found.gradient_term)]
    assert found.gradient_share == pytest.approx(float((norms[1] / (norms[0] + norms[1])).mean()))
    assert 0.01 < found.gradient_share < 0.99


@pytest.mark.parametrize("loss", ["sse", "logistic"])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_correlation_of_the_mean_curvature_with_the_geometry(activation: type[nn.Module], loss: str) -> None:
    """Against Hessians by double backward and gradients by autograd, averaged by hand."""
    networks, (x, y) = drawn(activation, 4), data(3)
    mean, G = torch.zeros(4, 4, dtype=F64), torch.zeros(4, 4, dtype=F64)
    for t in range(4):
        model = networks.module(t)
        mean += brute(model, x, y, loss).mean(0) / 4
        points = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(points).sum(), points)
        G += g.flatten(1).T @ g.flatten(1) / 12
    expected = float((mean * G).sum() / (mean.norm() * G.norm()))
    found = curvature_correlation(networks, x, y, loss)
    assert found.value == pytest.approx(expected, abs=1e-12)
    exact = activation is nn.ReLU and loss == "sse"  # l'' = 1 and no curvature of f
    assert (found.value == pytest.approx(1.0, abs=1e-12)) == exact


def test_curvature_tends_to_the_geometry_as_the_slope_of_the_loss_vanishes() -> None:
    """SSE, labels f + r: the first term is -r Hess_x f, so the correlation goes to 1 as r does, quadratically."""
    networks, (x, _) = drawn(nn.Tanh, 1), data(3)
    f = networks.module(0)(x)[:, 0].detach()
    gaps = [1 - curvature_correlation(networks, x, f + r).value for r in (1.0, 0.1, 0.01)]
    assert gaps[0] > 1e-3
    assert gaps[1] / gaps[2] == pytest.approx(100, rel=0.1)


def test_what_cannot_be_differentiated_is_refused() -> None:
    x, y = data(3)
    bn = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    with pytest.raises(UnsupportedError, match=r"BatchNorm1d '2' is in train mode.*eval"):
        input_curvature(bn, x, y)
    dropout = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()
    with pytest.raises(UnsupportedError, match="Dropout '2' is active"):
        input_curvature(dropout, x, y)
    for model in (bn.eval(), dropout.eval()):
        assert torch.allclose(input_curvature(model, x, y).hessian, brute(model, x, y, "sse"), atol=1e-12)
    networks = drawn(nn.Tanh, 1)
    networks.template.insert(1, nn.Dropout(0.5))  # type: ignore[operator]
    networks.template.train()
    with pytest.raises(UnsupportedError, match="Dropout '1' is active"):
        curvature_correlation(networks, x, y)
    model = net(nn.Tanh)().double()
    for call, message in (
        (lambda: input_curvature(model, x, y[:2]), r"x \[3, 2, 2\] and y \[2\] do not fit"),
        (lambda: input_curvature(model, x, y[:, None]), r"y \[3, 1\] do not fit"),
        (lambda: input_curvature(model, x * torch.nan, y), "x has a NaN"),
        (lambda: input_curvature(model, x, y, max_memory=700), "Hessians of 3 inputs of 4 entries need 768.0 B"),
        (lambda: input_curvature(net(nn.Tanh, 3)().double(), x, y), "3 outputs"),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("labels", [(0.0, 1.0), (1.0, 2.0), (0.3, -1.0)])
def test_the_logistic_loss_wants_signs(labels: tuple[float, float]) -> None:
    """Classes 0 and 1 would give half of the examples a constant loss."""
    x, y = torch.ones(2, 4), torch.tensor(labels)
    message = r'"logistic" wants labels -1 and \+1; for classes 0 and 1 give 2 y - 1'
    with pytest.raises(InputError, match=message):
        input_curvature(nn.Linear(4, 1), x, y, "logistic")
    with pytest.raises(InputError, match=message):
        geometry_evolution(lambda: nn.Linear(4, 1), x, y, 4, loss="logistic")
    assert geometry_evolution(lambda: nn.Linear(4, 1), x, y, 4).n_networks == 4  # the squared error takes any


def test_convolutions_are_in_full_float32() -> None:
    """cuDNN's default, tf32, has three digits; the setting can be seen without a GPU, and is put back."""
    seen: list[bool] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(convolves_in_tf32())
            return super().forward(x)

    (x, y), before = data(2), convolves_in_tf32()
    drawn = record(lambda: nn.Sequential(nn.Flatten(), Looks(4, 1))).draw(0, 0, 1, dtype=F64)
    measured: tuple[Callable[[], object], ...] = (
        lambda: input_curvature(drawn.module(0), x, y),
        lambda: curvature_correlation(drawn, x, y),
        lambda: curvature_evolution(drawn.module(0), x, y, x, y),
        lambda: evolution_correlation(drawn, x, y, x, y),
    )
    for measure in measured:
        seen.clear()
        measure()
        assert seen
        assert not any(seen)
        assert convolves_in_tf32() == before
