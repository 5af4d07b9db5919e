"""Networks whose layers are called more often for more examples."""

import torch
from torch import Tensor, nn

import biascope as bs


class Split(nn.Module):
    """Takes two examples at a time."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(part) for part in x.split(2)])


def test_batches_that_a_network_cuts_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 6), (53,)))
    for representation in ("diagonal", "lowrank", "implicit"):
        found, expected = (bs.fisher(model, x, representation, precision="float64") @ v for model in (Split(net), net))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
