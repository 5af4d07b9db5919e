"""Rows of kernels and predictions belong to examples: a loader that shuffles would give them to others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import biascope as bs
from biascope.support.errors import InputError
from biascope.tangent import linearized_prediction

NET, DATA = nn.Linear(3, 2), TensorDataset(torch.eye(3), torch.arange(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: bs.ntk(NET, x),
        lambda x: bs.ntk(NET, torch.eye(3), x),
        lambda x: bs.kernels.sketched_ntk(NET, x, 4),
        lambda x: linearized_prediction(NET, nn.Linear(3, 2), x),
    ],
)
def test_shuffled_data_are_refused(call: Callable[[Any], object]) -> None:
    for loader in (DataLoader(DATA, shuffle=True), DataLoader(DATA, sampler=SubsetRandomSampler([0, 1, 2]))):
        with pytest.raises(InputError, match="DataLoader that shuffles"):
            call(loader)
    call(DataLoader(DATA, batch_size=2))
