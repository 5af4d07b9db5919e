"""No direction is that of one input: by default the networks differ in their inputs."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from biascope.ensembles import input_gradients, record
from biascope.geometry import NADs, nads
from biascope.support.seeds import generator

SHAPE = (1, 6, 6)


class Bowl(nn.Module):
    """f(x) = a |x|^2 / 2, whose gradient is a x: wherever it is looked at, the only direction is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x.flatten(1).square().sum(1, keepdim=True) / 2


def smooth() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 10), nn.Tanh(), nn.Linear(10, 1))


def test_a_shared_input_is_found_and_said() -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    with pytest.warns(UserWarning, match=r"the first direction is nearly the input x itself \(cosine 1\.00\)"):
        found = nads(Bowl, SHAPE, 64, "autograd", x=x)
    assert found.towards_x == pytest.approx(1.0, abs=1e-6)
    assert found.stability[-1][1] > 1 / 36  # the halves agree, all the same: they share x
    assert "cosine of the first with x 1.00" in repr(found)
    assert "cosine of the first with x" in found._repr_html_()
    assert found.inputs == 1


def test_by_default_no_input_is_shared_and_the_halves_see_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = nads(Bowl, SHAPE, 400, "autograd", stability_k=1)
    assert found.x is None
    assert (found.inputs, found.towards_x) == (400, 0.0)
    assert found.eigenvalues[0] < 3 * found.trace / 36  # isotropic: the spread of a sample, no direction
    assert found.stability[-1][1] < 0.3
    assert "overlap of the first 1 between halves of the networks at other inputs" in repr(found)


@pytest.mark.parametrize("max_memory", [None, "40KB"])
def test_rows_are_those_of_each_networks_own_input(max_memory: str | None) -> None:
    """Autograd: network t at its own x_t; the second moment is that of the gradients there, by torch's own autograd."""
    T = 23
    found = nads(smooth, SHAPE, T, "autograd", dtype=torch.float64, max_memory=max_memory, seed=5)
    drawn, total = record(smooth).draw(5, 0, T, dtype=torch.float64), torch.zeros(36, 36, dtype=torch.float64)
    for t in range(T):
        of_t = generator(5, "x") if t == 0 else generator(5, "x", t)
        x = torch.randn(SHAPE, generator=of_t).double()[None].requires_grad_()
        row = torch.autograd.grad(drawn.module(t)(x).sum(), x)[0].flatten()
        total += torch.outer(row, row) / T
    U = found.directions.flatten(1)
    assert torch.allclose((U.T * found.eigenvalues) @ U, total, atol=1e-12 * float(total.norm()) + 1e-15)


@pytest.mark.parametrize("T", [1, 2, 9])
def test_differences_are_taken_at_one_input_for_even_and_one_for_odd_networks(T: int) -> None:
    found = nads(smooth, SHAPE, T, step=1e-4, dtype=torch.float64, seed=5)
    drawn = record(smooth).draw(5, 0, T, dtype=torch.float64)
    points = [torch.randn(SHAPE, generator=generator(5, "x", *which)).double() for which in ((), (1,))]
    rows = torch.cat([input_gradients(drawn[t : t + 1], points[t % 2][None]).flatten(1) for t in range(T)])
    U = found.directions.flatten(1)
    exact = rows.T @ rows / T
    assert float(((U.T * found.eigenvalues) @ U - exact).norm() / exact.norm()) < 1e-5
    assert found.inputs == min(T, 2)


def test_marginal_heads_and_many_entries_take_both_inputs_too() -> None:
    """Wide differences hardly depend on x, so that the halves of a network with a direction of its own agree."""

    def weighted() -> nn.Module:
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 1))
        nn.init.normal_(net[1].weight)  # type: ignore[arg-type]
        with torch.no_grad():
            net[1].weight[:, 0] *= 20  # type: ignore[index]
        return net

    found = nads(weighted, SHAPE, 64, head="marginal", stability_k=1)
    assert found.inputs == 2
    assert found.stability[-1][1] > 0.99
    assert abs(float(found.directions[0, 0, 0, 0])) > 0.99


def test_the_number_of_inputs_is_kept(tmp_path: Path) -> None:
    found = nads(smooth, SHAPE, 5, "autograd")
    found.save(tmp_path / "found.safetensors")
    assert NADs.load(tmp_path / "found.safetensors").inputs == 5
