"""A submodule in several places: results are right and the network stays as it was."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

import biascope as bs
from biascope.ensembles import outputs, record
from biascope.network.swapped import functional_call


class Block(nn.Module):
    def __init__(self, position: nn.Module) -> None:
        super().__init__()
        self.position, self.lin = position, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x + self.position(x)))


class Shared(nn.Module):
    """Three blocks that hold the same layer, as CoaT's do, with a weight tied to another one besides."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(self.position) for _ in range(3))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.blocks[1].lin.weight
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.shift


@pytest.fixture
def net() -> Shared:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Shared()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def unchanged(net: nn.Module, before: dict[str, Tensor]) -> bool:
    now = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers(remove_duplicate=False))
    return set(now) == set(before) and all(now[name] is before[name] for name in now)


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    return dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers(remove_duplicate=False))


def test_the_call_gives_what_a_network_with_these_tensors_gives(net: Shared, x: Tensor) -> None:
    before = tensors_of(net)
    other = copy.deepcopy(net).double()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    given = {name: p.detach() for name, p in other.named_parameters()} | {"shift": other.shift}
    assert torch.equal(functional_call(net, given, (x.double(),)), other(x.double()))
    assert unchanged(net, before)
    split = ({n: t for n, t in given.items() if n != "shift"}, {"shift": other.shift})
    assert torch.equal(functional_call(net, split, (), {"x": x.double()}), other(x.double()))
    assert unchanged(net, before)


def test_any_name_of_a_tensor_will_do(net: Shared, x: Tensor) -> None:
    zero = torch.zeros(4, 4)
    names = [name for name, t in net.named_parameters(remove_duplicate=False) if t is net.position.weight]
    assert len(names) == 4
    found = [functional_call(net, {name: zero}, (x,)) for name in names]
    assert all(torch.equal(found[0], one) for one in found)
    assert not torch.equal(found[0], net(x))


def test_the_kernel_is_right_and_the_network_stays(net: Shared, x: Tensor) -> None:
    before = tensors_of(net)
    K = bs.ntk(net, x, precision="float64")
    assert unchanged(net, before)
    double = copy.deepcopy(net).double()
    J = jacrev(lambda p: functional_call(double, p, (x.double(),)))(dict(double.named_parameters()))
    flat = torch.cat([j.flatten(2) for j in J.values()], 2)
    assert torch.allclose(K.tensor, torch.einsum("iap,jbp->iajb", flat, flat), rtol=1e-10)


@pytest.mark.parametrize("representation", ["ekfac", "diagonal", "implicit"])
def test_metrics_leave_the_network_as_it_was(net: Shared, x: Tensor, representation: str) -> None:
    before = tensors_of(net)
    F = bs.fisher(net, (x, torch.arange(5) % 4), representation)
    assert torch.isfinite(F @ torch.ones(F.shape[0])).all()
    assert unchanged(net, before)


def test_linear_and_lazy_models(net: Shared, x: Tensor) -> None:
    before = tensors_of(net)
    assert torch.allclose(bs.linearize(net)(x), net(x), atol=1e-6)
    bs.lazy(net, 4.0)(x)
    assert unchanged(net, before)


def test_ensembles_draw_what_the_factory_builds(x: Tensor) -> None:
    drawn = record(Shared).draw(seed=0, start=0, stop=3)
    for t in range(3):
        assert torch.allclose(outputs(drawn, x)[t], drawn.module(t)(x), atol=1e-6)
