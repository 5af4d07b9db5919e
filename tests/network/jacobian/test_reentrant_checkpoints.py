"""Checkpoints of the reentrant kind hide layers from autograd: refused by everything that differentiates."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import biascope as bs
from biascope.support.errors import UnsupportedError


class Net(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(3, 4), nn.Linear(4, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda z: torch.tanh(self.a(z)), x, use_reentrant=self.reentrant)
        assert isinstance(h, Tensor)
        out: Tensor = self.b(h)
        return out


X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
WORK = {
    "ntk": lambda net: bs.ntk(net, X),
    "fisher": lambda net: bs.fisher(net, [(X, torch.zeros(5, dtype=torch.long))], representation="kfac"),
    "Jacobian": lambda net: bs.Jacobian(net, X) @ torch.ones(26, dtype=torch.float64),
    "linearize": lambda net: bs.linearize(net)(X),
}


@pytest.mark.parametrize("what", WORK)
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_is_refused_and_the_other_kind_is_not(what: str) -> None:
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        WORK[what](Net(reentrant=True).double())
    WORK[what](Net(reentrant=False).double())
