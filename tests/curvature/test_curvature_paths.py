"""Networks whose layers are called more often for more examples."""

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.support.errors import UnsupportedError


class Split(nn.Module):
    """Takes two examples at a time."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(part) for part in x.split(2)])


def test_refused_with_a_way_out_that_works() -> None:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 6), (53,)))
    with pytest.raises(UnsupportedError, match=r'on their number.*"implicit"'):
        bs.fisher(Split(net), x, "diagonal", precision="float64")
    found, expected = (bs.fisher(model, x, "implicit", precision="float64") @ v for model in (Split(net), net))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
