"""Every awkward module again: the diagonal, EKFAC's trace and the implicit product of the L2 metric F = J^T J / n."""

from typing import Any

import pytest
import torch
from torch import Tensor

import biascope as bs
from zoo import ZOO, brute_force


def build(name: str) -> tuple[torch.nn.Module, Any, Tensor, int]:
    torch.manual_seed(sum(map(ord, name)))
    model, x = ZOO[name]()
    J = brute_force(model, x)
    return model, x, J.flatten(0, 1), len(J)


@pytest.mark.parametrize("name", ZOO)
def test_metrics_of_the_zoo(name: str) -> None:
    model, x, J, n = build(name)
    tol = 1e-6 if name == "scripted" else 1e-10  # TorchScript's own fuser is only accurate to 1e-8 in float64
    options: dict[str, Any] = {"likelihood": "gaussian", "precision": "float64"}
    diagonal = bs.fisher(model, x, representation="diagonal", **options).diagonal()
    exact = J.square().sum(0) / n
    assert float((torch.as_tensor(diagonal).flatten() - exact).norm()) <= tol * float(exact.norm())
    ekfac = bs.fisher(model, x, representation="ekfac", **options)
    assert abs(float(ekfac.trace()) - float(exact.sum())) <= tol * float(exact.sum())
    assert ekfac.shape == (J.shape[1], J.shape[1])
    v = torch.randn(J.shape[1], dtype=torch.float64)
    product = bs.fisher(model, x, representation="implicit", **options) @ v
    want = J.T @ (J @ v) / n
    assert float((torch.as_tensor(product) - want).norm()) <= tol * float(want.norm())
