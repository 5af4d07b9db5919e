"""BatchNorm by hand: the maps themselves, which layers get one, and how many kernels a network then takes."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._python_dispatch import TorchDispatchMode

import biascope as bs
from biascope import nets
from biascope.tangent.norms import Norms
from tangent.linearize_zoo import displace, flat
from zoo import brute_force

VIEWS = {"view", "t", "select", "unbind", "split_with_sizes", "alias", "detach", "slice", "expand", "empty"}
VIEWS |= {"is_same_size", "_has_same_storage_numel"}  # questions


class Kernels(TorchDispatchMode):
    """Counts operations that do work on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return sum(n for name, n in self.seen.items() if name not in VIEWS)


def warmed(net: nn.Module) -> nn.Module:
    gen = torch.Generator().manual_seed(0)
    for name, t in [*net.named_buffers(), *net.named_parameters()]:
        if t.is_floating_point():
            t.data = torch.rand(t.shape, generator=gen).double() - (0.5 if "running" not in name else -0.5)
    return net.double().eval()


def state(net: nn.Module) -> dict[str, Tensor]:
    return {**{k: p.detach() for k, p in net.named_parameters()}, **dict(net.named_buffers())}


class Twin(nn.BatchNorm1d):
    """Two tied layers, and one that is used with another weight than its own."""

    def __init__(self) -> None:
        super().__init__(3)
        self.other = nn.BatchNorm1d(3)
        self.other.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(super().forward(x))
        return F.batch_norm(x, self.running_mean, self.running_var, 2 * self.weight, self.bias, False, 0.1, self.eps)


def parametrised() -> nn.Module:
    layer: nn.Module = register_parametrization(nn.BatchNorm1d(3), "weight", nn.Tanh())
    return layer


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "vectors": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3)), (4,)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.ReLU()), (2, 5)),
    "images": (lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU()), (1, 3, 3)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2)), (1, 3, 3, 3)),
    "not affine": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False, eps=0.1)), (4,)),
    "norm first": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), (4,)),
    "tied and reused": (lambda: nn.Sequential(nn.Linear(4, 3), Twin()), (4,)),
    "parametrised": (lambda: nn.Sequential(nn.Linear(4, 3), parametrised()), (4,)),
    "resnet": (lambda: nets.build("resnet18", 0, width=2, blocks=(1, 1), image_size=6), (1, 6, 6)),
}


@pytest.mark.parametrize("params", [None, "0", "some"])
@pytest.mark.parametrize("name", NETS)
def test_network_against_the_brute_force_jacobian(name: str, params: str | None) -> None:
    make, shape = NETS[name]
    net = warmed(make())
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names = [k for k, _ in net.named_parameters()]
    chosen = {None: names, "0": names[:1], "some": names[1::2]}[params]
    lin = bs.linearize(net, params=lambda k, _: k in chosen)
    displace(lin)
    with torch.no_grad():
        for k, p in lin.named_parameters():
            if k not in chosen:
                p.copy_(lin.origin[k])
    expected = net(x).flatten() + brute_force(net, x).flatten(0, -2) @ flat(lin.displacement)
    for _ in range(2):
        torch.testing.assert_close(lin(x).flatten().detach(), expected, rtol=1e-10, atol=1e-10)
        lin = copy.deepcopy(lin)
    assert list(lin._forward_mode.values()) == ["by hand"]


def test_maps_are_batch_norm_and_its_derivative() -> None:
    net = warmed(nn.Sequential(nn.BatchNorm2d(3, eps=0.3), nn.BatchNorm2d(2, affine=False)))
    point, x, dx = state(net), torch.randn(2, 3, 2, 2).double(), torch.randn(2, 3, 2, 2).double()
    v = {"0.weight": torch.randn(3).double(), "0.bias": torch.randn(3).double()}
    first, second = Norms(net, point).maps(v).values()

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(x, point["0.running_mean"], point["0.running_var"], w, b, eps=0.3)

    at = (x, point["0.weight"], point["0.bias"])
    value, derivative = torch.func.jvp(norm, at, (dx, v["0.weight"], v["0.bias"]))
    torch.testing.assert_close(first.scale * x + first.shift[0], value)
    torch.testing.assert_close(first.scale * dx + first.scale_tangent * x + first.shift[1], derivative)
    assert first.moves
    assert not second.moves
    assert not second.shift[1].any()


def test_maps_follow_the_frozen_state() -> None:
    net, x = warmed(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))), torch.randn(5, 4)
    lin = bs.linearize(net)
    displace(lin)
    expected = lin(x.double()).detach()
    torch.testing.assert_close(lin.float()(x).detach(), expected.float(), rtol=1e-5, atol=1e-5)
    moved = lin.double().state_dict()
    moved["1.running_mean"] = moved["1.running_mean"] + 1  # buffers belong to the expansion point
    lin.load_state_dict(moved)
    torch.testing.assert_close(lin(x.double()).detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_kernels_of_a_resnet(inplace: bool) -> None:
    net = nets.build("resnet18", 0, width=2, image_size=8).eval()
    for m in net.modules():
        if isinstance(m, nn.ReLU):
            m.inplace = inplace
    x = torch.randn(2, 1, 8, 8)
    lin = bs.linearize(net)
    counts = []
    with torch.no_grad():
        for model in (net, lin):
            model(x)
            with Kernels() as kernels:
                model(x)
            counts.append(kernels.count)
    assert counts[1] <= (2.3 if not inplace else 2.5) * counts[0]


def test_channels_last_stays_channels_last() -> None:
    net = nets.build("resnet18", 0, width=2, image_size=8).eval().to(memory_format=torch.channels_last)
    formats = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.convolution.default:
                formats.extend(t.is_contiguous(memory_format=torch.channels_last) for t in args[:2])
            return func(*args, **(kwargs or {}))

    lin, x = bs.linearize(net), torch.randn(2, 1, 8, 8).to(memory_format=torch.channels_last)
    with torch.no_grad():
        lin(x)
        with Watch():
            lin(x)
    assert len(formats) == 2 * 2 * 20
    assert all(formats)
