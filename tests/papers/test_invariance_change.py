"""Conjecture 2 and App. A.3 of the invariance paper: networks with known answers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from biascope.ensembles import record
from biascope.geometry import containment, evolution_of, geometry_of, moving_gradients
from biascope.geometry.loss_curvature import curvature_correlation, input_curvature
from biascope.studies import Run, configure
from biascope.support.seeds import generator
from biascope_papers.gih import conjecture2, curvature
from biascope_papers.gih.conjecture2 import Inside
from biascope_papers.gih.tracking import Descent, Task, train_stack, watched


def small(outputs: int = 2, activation: type[nn.Module] = nn.GELU) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), activation(), nn.Linear(8, outputs))


def data(n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6, generator=generator(0)), torch.arange(n) % 2


# ------------------------------------------------------------ conjecture 2


def test_shares_are_those_of_the_mean_without_noise() -> None:
    D, R, k = 30, 12, 5
    inside = torch.zeros(D, D, dtype=torch.float64)
    inside[:k, :k] = torch.randn(k, k, generator=generator(1), dtype=torch.float64)
    inside = inside + inside.T
    noise = torch.randn(R, D, D, generator=generator(2), dtype=torch.float64)
    reference = torch.diag(torch.arange(D, 0, -1.0, dtype=torch.float64))
    found = Inside.of(inside + 0.5 * (noise + noise.mT), {"GSG": reference}, [k, D])
    share = found.share("GSG", k)
    assert share.value == pytest.approx(1.0, abs=3 * (share.standard_error or 0))
    assert found.share("GSG", D).value == pytest.approx(1.0)
    assert found.single("GSG", k).value < 0.8  # a single matrix has its noise outside as well
    exact = Inside.of(inside.expand(3, D, D), {"GSG": reference}, [3])
    assert exact.share("GSG", 3).value == pytest.approx(containment(inside, reference, 3).share[0])
    pure = noise - 0.9 * noise.mean(0)  # products of different ones are below 0: nothing in common
    nothing = Inside.of(pure + pure.mT, {"GSG": reference}, [k]).share("GSG", k)
    assert math.isnan(nothing.value)
    assert not conjecture2.sharp(nothing)
    outside = Inside.of(inside.flip(0, 1).expand(3, D, D), {"GSG": reference}, [k])
    assert outside.share("GSG", k).value == pytest.approx(0.0, abs=1e-6)


def test_factors_give_the_evolution() -> None:
    x, y = data()
    drawn = record(small).draw(seed=0, start=0, stop=4)
    probes = torch.randn(3, 6, generator=generator(3))
    signs = 2.0 * y - 1
    g, u = moving_gradients(drawn, probes, x, signs, "logistic")
    B = torch.einsum("tpi,tpj->ij", u, g).double() / 12
    torch.testing.assert_close(B + B.T, evolution_of(drawn, probes, x, signs, "logistic").matrix, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(torch.einsum("tpi,tpj->ij", g, g).double() / 12, geometry_of(drawn, probes).matrix)


def test_networks_are_watched_at_the_epochs_asked_for(tmp_path: Path) -> None:
    x, y = data()
    run = Run.create(tmp_path / "r", configure("gih/curvature", "smoke"))
    task = Task(record(small), 5, x, y, Descent(3, 0.1, 0))
    seen = watched(run, "w", task, 2, [0, 3], lambda networks: {"w": networks.params["1.weight"].detach().clone()})
    assert set(seen) == {("w", 0), ("w", 3)}
    last: dict[int, Any] = {}
    train_stack(task, range(2), lambda epoch, networks: last.update({epoch: networks.params["1.weight"].clone()}))
    torch.testing.assert_close(seen["w", 3], last[3].double())
    assert not torch.equal(seen["w", 0], seen["w", 3])


# ------------------------------------------------------------ curvature


def test_squared_errors_are_trained(tmp_path: Path) -> None:
    x, y = data()
    fits: dict[str, float] = {}

    def error(networks: Any) -> float:
        logits = torch.stack([networks.module(i)(x).detach() for i in range(2)])
        return float((logits[..., 1] - logits[..., 0] - (2.0 * y - 1)).abs().mean())

    for loss in ("sse", "cross-entropy"):
        descent = Descent(400, 0.02, 0, optimiser="adam", loss=loss)  # type: ignore[arg-type]
        task = Task(record(small), 5, x, y, descent)
        train_stack(task, range(2), lambda epoch, networks, loss=loss: fits.update({loss: error(networks)}))  # type: ignore[misc]
    assert fits["sse"] < 0.05
    assert fits["cross-entropy"] > 1  # margins grow past 1


@pytest.mark.parametrize("loss", ["sse", "logistic"])
def test_curvature_agrees_with_the_library(loss: str) -> None:
    x, y = data()
    signs = 2.0 * y - 1
    drawn = record(small).draw(seed=1, start=0, stop=4)
    found = curvature.terms(drawn, x, signs, loss)
    value, excess = curvature.alike(found["H"], found["G"])
    library = curvature_correlation(drawn, x, signs, loss)
    assert value.value == pytest.approx(library.value, abs=1e-5)
    assert value.value - excess.value == pytest.approx(library.null, abs=1e-5)
    logits = drawn.module(2)(x)
    f = (logits[:, 1] - logits[:, 0]).detach().requires_grad_(True)
    losses = 0.5 * (f - signs) ** 2 if loss == "sse" else nn.functional.softplus(-signs * f)
    (slope,) = torch.autograd.grad(losses.sum(), f)
    assert float(found["slope"][2]) == pytest.approx(float(slope.abs().mean()), rel=1e-4)


@pytest.mark.parametrize("loss", ["sse", "logistic"])
def test_the_change_of_the_curvature_is_that_after_a_small_step(loss: Any) -> None:
    """Against differences of the Hessian itself along gradient flow; nothing of it is dropped."""
    x, y = (each.double() for each in data())
    signs = 2.0 * y - 1
    drawn = record(lambda: small().double()).draw(seed=1, start=0, stop=2)
    found = curvature.changes(drawn, x, signs, (x, signs), loss)
    step = 1e-5
    for i in range(2):
        hessians = []
        for side in (step, -step):
            net = drawn.module(i)
            logits = net(x)
            f = logits[:, 1] - logits[:, 0]
            total = (0.5 * (f - signs) ** 2 if loss == "sse" else nn.functional.softplus(-signs * f)).sum()
            slopes = torch.autograd.grad(total, list(net.parameters()))
            with torch.no_grad():
                for p, slope in zip(net.parameters(), slopes):
                    p -= side * slope
            hessians.append(input_curvature(net, x, signs, loss).hessian.mean(0))
        torch.testing.assert_close(found["dH"][i], (hessians[0] - hessians[1]) / (2 * step), rtol=1e-4, atol=1e-7)


def test_without_curvature_of_its_own_a_network_leaves_the_gradient_term() -> None:
    x, y = data()
    drawn = record(lambda: small(activation=nn.LeakyReLU)).draw(seed=1, start=0, stop=4)
    found = curvature.terms(drawn, x, 2.0 * y - 1, "sse")
    assert found["share"].tolist() == [1.0] * 4
    assert curvature.alike(found["H"], found["G"])[0].value == pytest.approx(1.0)
    moving = curvature.changes(drawn, x, 2.0 * y - 1, (x, 2.0 * y - 1), "sse")
    assert curvature.alike(moving["dH"], moving["Delta"])[0].value == pytest.approx(1.0)  # as the paper has it
