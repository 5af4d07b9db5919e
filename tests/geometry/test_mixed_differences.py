"""Algorithm 2 with finite differences of grad_theta f, against gradients taken one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from biascope import nets
from biascope.ensembles import record
from biascope.geometry import nads
from biascope.geometry.mixed import difference_gram
from biascope.support.errors import InputError, UnsupportedError

F64 = torch.float64


def relu() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1))


def two_logits() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2))


def differences(module: nn.Module, x: Tensor, step: float) -> Tensor:
    """H_h [p, D], column after column."""

    def gradient(z: Tensor) -> Tensor:
        out = module(z[None])[0]
        f = out[-1] - (out[0] if len(out) == 2 else 0)
        return torch.cat([g.flatten() for g in torch.autograd.grad(f, list(module.parameters()))])

    shifts = step * torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    return torch.stack([(gradient(x + e) - gradient(x - e)) / (2 * step) for e in shifts], 1)


@pytest.mark.parametrize(("build", "shape"), [(relu, (5,)), (two_logits, (1, 3, 2))])
@pytest.mark.parametrize("step", [100.0, 0.5])
def test_against_gradients_one_by_one(build: Callable[[], nn.Module], shape: tuple[int, ...], step: float) -> None:
    T, x = 7, torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    found = nads(build, shape, T, "mixed-derivative", step, seed=2, x=x, derivative="finite-difference", dtype=F64)
    networks = record(build).draw(2, 0, T, dtype=F64)
    each = [differences(networks.module(t), x, step) for t in range(T)]
    moment = torch.stack([H.T @ H for H in each]).mean(0)
    U = found.directions.flatten(1)
    assert torch.allclose((U.T * found.eigenvalues) @ U, moment, atol=1e-12 * float(moment.trace()))
    assert found.trace == pytest.approx(float(moment.trace()))
    assert found.step == step
    energies = torch.stack([(H @ U.T).square().sum(0) for H in each])
    assert torch.allclose(found.standard_errors, energies.std(0) / T**0.5, rtol=1e-6, atol=1e-12)


def test_small_steps_are_the_exact_derivative_of_smooth_networks() -> None:
    def smooth() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))

    options: dict[str, Any] = {"seed": 3, "dtype": F64, "top": 5}
    exact = nads(smooth, (5,), 6, "mixed-derivative", **options)
    small = nads(smooth, (5,), 6, "mixed-derivative", 1e-3, derivative="finite-difference", **options)
    assert torch.allclose(small.eigenvalues, exact.eigenvalues, rtol=1e-5)
    with pytest.warns(UserWarning, match="made of rounding"):
        difference_gram(smooth(), torch.ones(5), 1e-8)


def test_wide_steps_of_lenet_find_the_directions_of_algorithm_1() -> None:
    """As the paper says of its Algorithm 2; exact derivatives, which leave kinks out, do not."""

    def lenet() -> nn.Module:
        return nets.build("lenet", in_channels=1, image_size=16, outputs=1)

    first = nads(lenet, (1, 16, 16), 200, head="marginal", seed=9)
    wide = nads(lenet, (1, 16, 16), 16, "mixed-derivative", x=first.x, derivative="finite-difference", top=5)
    exact = nads(lenet, (1, 16, 16), 8, "mixed-derivative", x=first.x, top=5)
    assert first.overlap(wide, 5) > 0.7
    assert first.overlap(exact, 5) < 0.3


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="derivative is for method mixed-derivative"):
        nads(relu, (5,), 3, "autograd", derivative="finite-difference")
    with pytest.raises(UnsupportedError, match="is for average='gram' and D <= 4096"):
        nads(relu, (5,), 3, "mixed-derivative", derivative="finite-difference", average="operator")
    with pytest.raises(UnsupportedError, match="derivative='finite-difference' is for"):
        nads(lambda: nn.Linear(5000, 1), (5000,), 3, "mixed-derivative", derivative="finite-difference")
    with pytest.raises(InputError, match="all mixed derivatives are zero"):
        nads(relu, (5,), 3, "mixed-derivative", derivative="finite-difference", scalarise=lambda out: 0 * out[:, 0])
