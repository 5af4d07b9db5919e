"""Damping is enough for a large layer in float32, however small it is beside the largest eigenvalue."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.errors import InputError


@pytest.mark.parametrize("representation", ["ekfac", "kfac"])
def test_a_large_layer_can_be_solved_in_float32(representation: str) -> None:
    net = nn.Linear(300, 400)
    F = bs.fisher(net, torch.randn(64, 300), representation=representation, likelihood="gaussian")
    v = torch.randn(300 * 400 + 400)
    for damping in (1e-1, 1e-3):
        x = F.solve(v, damping=damping)
        assert float(((F @ x) + damping * x - v).norm() / v.norm()) < 1e-2
    with pytest.raises(InputError, match="singular"):
        F.solve(v, damping=0.0)
