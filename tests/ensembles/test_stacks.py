"""Pools before ReLU: the same values and gradients, in a different order of work."""

import copy

import pytest
import torch
from torch import Tensor, nn

from biascope.ensembles.stacks import PoolFirst, pool_first


def net(pool: nn.Module, inplace: bool = False) -> nn.Sequential:
    torch.nn.init.normal_(
        (conv := nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)).weight, generator=torch.Generator().manual_seed(0)
    )
    return nn.Sequential(conv, nn.ReLU(inplace), pool, nn.Sequential(nn.Tanh(), nn.MaxPool2d(2)))


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1), nn.MaxPool2d(2, ceil_mode=True)])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_values_and_gradients_are_the_same(pool, ties, inplace) -> None:  # type: ignore[no-untyped-def]
    plain = net(pool, inplace)
    swapped = pool_first(copy.deepcopy(plain))
    x = torch.randn(4, 2, 9, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if ties:  # whole windows of equal values: the first one has the gradient
        x = x.sign() * (x.abs() > 1.0)
        nn.init.constant_(plain[0].weight, 1.0)
        nn.init.constant_(swapped[0].weight, 1.0)
    seen: list[int] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(args[0].numel()) if type(module) is nn.ReLU else None
    )
    results = []
    for module in (plain, swapped):
        value = x.clone().requires_grad_(True)
        out = module(value)
        results.append((out, *torch.autograd.grad(out.sin().sum(), (value, *module.parameters()))))
    handle.remove()
    assert seen[1] < seen[0] / 2  # it did change places
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_what_others_see_keeps_its_order() -> None:
    plain = net(nn.MaxPool2d(2))
    watched: list[Tensor] = []
    plain[1].register_forward_hook(lambda module, args, out: watched.append(out))
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    swapped = pool_first(plain)
    assert isinstance(swapped, PoolFirst)
    assert isinstance(swapped[3], PoolFirst)
    assert [type(part) for part in swapped][1:3] == [nn.ReLU, nn.MaxPool2d]
    swapped(x)
    assert watched[0].shape == (1, 3, 8, 8)  # a hook asks for the ReLU of all values
    assert torch.equal(swapped[:2](x), swapped[0](x).relu())


def test_pools_that_tell_their_indices_stay_where_they_are() -> None:
    x = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    values, indices = pool_first(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)))(x)
    assert torch.equal(values, x.relu().flatten().take(indices))
