"""A pass with the module's own parameters: the same numbers, and only where nothing has to be swapped."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.functional import functional
from biascope.layers import anatomy, leaves, record, recorded
from biascope.layers.passes import own_parameters


@pytest.fixture
def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


class Counting(nn.Module):
    """Replaces a buffer in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return self.inner(x)


class Capricious(nn.Module):
    """Another path when its weight is a Parameter: what a swapped tensor is not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))

    def forward(self, x):
        return nn.functional.linear(x, self.w) if not isinstance(self.w, nn.Parameter) else x @ self.w.T


def test_same_tape_as_with_swapped_leaves(seeded):
    net, x = mlp(), torch.randn(4, 3, generator=seeded, dtype=torch.float64)
    f = functional(net)
    own, swapped = recorded(f, anatomy(f, x), x), record(f, leaves(f), x)
    torch.testing.assert_close(own.rows, swapped.rows, rtol=0, atol=0)
    assert [use.roles for use in own.uses] == [use.roles for use in swapped.uses]
    cotangent = torch.randn(4, 2, generator=seeded, dtype=torch.float64)
    for mine, theirs in zip(own.gradients(cotangent), swapped.gradients(cotangent), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert all(p.grad is None for p in net.parameters())


def test_own_parameters_only_where_they_are_everything():
    net = mlp()
    assert own_parameters(functional(net)) is not None
    assert own_parameters(functional(net, params="0")) is None  # the rest is frozen
    assert own_parameters(functional(net.float(), precision="float64")) is None
    assert own_parameters(functional(Counting())) is None
    f = functional(mlp())
    moved = type(f)(f.module, {k: p + 1 for k, p in f.params.items()}, f.frozen, f.output, f.dtype, f.device)
    assert own_parameters(moved) is None  # f stands at other parameters than the module does
    net = mlp()
    net[0].weight.requires_grad_(False)
    assert own_parameters(functional(net, params="all")) is None


def test_buffers_of_the_user_stay(seeded):
    net, x = Counting(), torch.randn(4, 3, generator=seeded, dtype=torch.float64)
    want = bs.fisher(net.inner, x, "dense").to_dense()
    torch.testing.assert_close(bs.fisher(net, x, "dense").to_dense(), want)
    assert float(net.count) == 0


@pytest.mark.parametrize("representation", ["dense", "kfac", "diagonal"])
def test_another_path_with_own_parameters_falls_back(representation, seeded):
    x = torch.randn(4, 3, generator=seeded, dtype=torch.float64)
    plain = nn.Linear(3, 2, bias=False).double()
    plain.weight.data.fill_(1.0)
    got, want = (bs.fisher(net, x, representation, likelihood="gaussian") for net in (Capricious(), plain))
    torch.testing.assert_close(got.to_dense(), want.to_dense())
