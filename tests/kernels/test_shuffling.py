"""Rows of kernels and predictions belong to examples: a loader that shuffles is read in the order of its data set."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import biascope as bs
from biascope.tangent import linearized_prediction

NET, MOVED, DATA = nn.Linear(3, 2), nn.Linear(3, 2), TensorDataset(torch.eye(3), torch.arange(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: bs.ntk(NET, x),
        lambda x: bs.ntk(NET, torch.eye(3), x),
        lambda x: bs.kernels.sketched_ntk(NET, x, 4).features,
        lambda x: linearized_prediction(NET, MOVED, x),
    ],
)
def test_shuffled_data_are_read_in_order(call: Callable[[Any], Any]) -> None:
    def numbers(x: Any) -> Tensor:
        found = call(x)
        return getattr(found, "tensor", found)

    plain = DataLoader(DATA, batch_size=2)
    expected = numbers(plain)
    for loader in (DataLoader(DATA, shuffle=True), DataLoader(DATA, sampler=SubsetRandomSampler([0, 1, 2]))):
        with pytest.warns(UserWarning, match="in the order of its data set"):
            assert torch.allclose(numbers(loader), expected)
