"""The path norm (spec 04, 2.23) against all paths one by one, and against products of the layers' dense matrices."""

import copy
import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from biascope import nets
from biascope.probes import Probe, path_norm
from biascope.support.errors import InputError, UnsupportedError
from probes.probe_zoo import batch, mlp

F64 = torch.float64


def one_by_one(net: nn.Sequential, p: float, bias: bool) -> float:
    """Every path through an MLP: a unit of every layer, beginning at an input or at the bias of some layer."""
    layers = [m for m in net if isinstance(m, nn.Linear)]
    weights = [m.weight.detach() for m in layers]
    total = 0.0
    for first in range(len(layers)):  # the layer that the path enters by
        sizes = [layers[i].out_features for i in range(first, len(layers))]
        for units in product(*map(range, sizes)):
            rest = math.prod(abs(float(weights[first + i][units[i], units[i - 1]])) ** p for i in range(1, len(units)))
            if first == 0:
                total += rest * sum(abs(float(w)) ** p for w in weights[0][units[0]])
            if bias and layers[first].bias is not None:
                total += rest * abs(float(layers[first].bias.detach()[units[0]])) ** p
    return total ** (1 / p)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("p", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("widths", [(3, 1), (3, 4, 2), (2, 3, 4, 2)])
def test_against_all_paths(widths: tuple[int, ...], p: float, bias: bool) -> None:
    net = mlp(*widths, act=nn.ReLU)
    found = path_norm(net, torch.ones(5, widths[0]), p, bias)
    assert found == pytest.approx(one_by_one(net, p, bias), rel=1e-12)
    assert path_norm(net.float(), torch.ones(5, widths[0]), p, bias) == pytest.approx(found, rel=1e-6)


def by_matrices(layers: Sequence[nn.Module], shape: tuple[int, ...], p: float) -> float:
    """|A_L|^p ... |A_1|^p applied to ones plus biases, summed; A_l the dense Jacobian of the affine layer l."""
    h, at = torch.ones(1, *shape, dtype=F64), torch.zeros(1, *shape, dtype=F64)
    for layer in layers:
        out = layer(at).detach()
        A = jacrev(lambda z, layer=layer: layer(z))(at).reshape(out.numel(), at.numel())
        h = (A.abs() ** p @ h.flatten()).view(out.shape) + layer(torch.zeros_like(at)).detach().abs() ** p
        at = torch.zeros_like(out)
    return float(h.detach().sum()) ** (1 / p)


def warmed(m: nn.Module) -> nn.Module:
    rng = torch.Generator().manual_seed(1)
    for t in (*m.parameters(), *(b for b in m.buffers() if b.is_floating_point())):
        t.data = 0.2 + torch.rand(t.shape, generator=rng, dtype=F64) * torch.randn((), generator=rng).sign()
    for b in m.modules():
        if isinstance(b, nn.modules.batchnorm._BatchNorm) and b.running_var is not None:
            b.running_var.abs_()
    return m.double().eval()


STACKS: dict[str, tuple[list[nn.Module], tuple[int, ...]]] = {
    "convolution": ([nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Conv2d(3, 2, 2, dilation=2)], (2, 7, 7)),
    "groups": ([nn.Conv2d(4, 4, 3, groups=2, padding="same"), nn.Conv2d(4, 2, 1, bias=False)], (4, 4, 4)),
    "circular": ([nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(12, 2)], (1, 6)),
    "transposed": ([nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Conv2d(3, 1, 3)], (2, 3, 3)),
    "volumes": ([nn.Conv3d(1, 2, 2), nn.AvgPool3d(2)], (1, 5, 5, 5)),
    "average pooling": ([nn.Conv2d(1, 2, 3), nn.AvgPool2d((2, 3), stride=1, padding=1), nn.Flatten()], (1, 6, 6)),
    "average pooling 1d": ([nn.Conv1d(1, 2, 3), nn.AvgPool1d(2)], (1, 8)),
    "adaptive pooling": ([nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 1)], (1, 6, 6)),
    "batch normalisation": ([nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 2)], (1, 4, 4)),
    "not affine": ([nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)], (4,)),
}


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("name", STACKS)
def test_layers_against_their_matrices(name: str, p: float) -> None:
    layers, shape = STACKS[name]
    layers = [warmed(copy.deepcopy(layer)) for layer in layers]
    between = [part for layer in layers for part in (layer, nn.ReLU(inplace=True), nn.Dropout(0.5))]
    net = nn.Sequential(*between)
    found = path_norm(net, torch.ones(2, *shape), p)
    assert found == pytest.approx(by_matrices(layers, shape, p), rel=1e-12)
    assert net.training  # the module is as it was
    assert found > 0.1


def test_a_maximum_is_the_sum_over_its_window() -> None:
    """As a convolution with ones would be; overlapping, padded and dilated windows too."""
    for options in ({}, {"stride": 1}, {"stride": 2, "padding": 1}, {"dilation": 2, "stride": 1}):
        conv = warmed(nn.Conv2d(1, 3, 2))
        pool = nn.MaxPool2d(2, **options)  # type: ignore[arg-type]
        ones = nn.Conv2d(3, 3, 2, groups=3, bias=False, **{"stride": 2, **options}).double()  # type: ignore[arg-type]
        nn.init.ones_(ones.weight)
        found, expected = (path_norm(nn.Sequential(conv, m), torch.ones(1, 1, 7, 7)) for m in (pool, ones))
        assert found == pytest.approx(expected, rel=1e-13)


class Branches(nn.Module):
    """Residual and concatenated branches, functional calls, tied weights, numbers and raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(6, 2)
        self.scale, self.shift = nn.Parameter(torch.tensor(-1.5)), nn.Parameter(torch.randn(3))
        self.W = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = x + F.relu(self.a(x))
        h += torch.tanh(self.a(h)) * self.scale - 0.5 * (h @ self.W) / 4 + self.shift
        out: Tensor = self.b(torch.cat([h, x.mean(1, keepdim=True).expand(-1, 3)], 1))
        return out


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_branches_by_hand(p: float) -> None:
    net = Branches().double()
    A, b, W, s, t, B, c = (
        v.detach().abs() ** p for v in (net.a.weight, net.a.bias, net.W, net.scale, net.shift, net.b.weight, net.b.bias)
    )
    x = torch.ones(3, dtype=F64)
    h = x + A @ x + b
    h = h + (A @ h + b) * s + 0.5**p * (h @ W) / 4**p + t
    mean = (x / 3**p).sum().expand(3)
    expected = float((B @ torch.cat([h, mean]) + c).sum()) ** (1 / p)
    assert path_norm(net, torch.ones(1, 3), p) == pytest.approx(expected, rel=1e-12)


def test_rescaling_of_units_changes_nothing() -> None:
    """A ReLU unit's incoming weights times a, the outgoing ones over a: the same function, the same path norm."""
    net = mlp(3, 5, 2, act=nn.ReLU)
    other, a = copy.deepcopy(net), torch.tensor([0.01, 7.0, 1.0, 100.0, 0.3], dtype=F64)
    with torch.no_grad():
        other[0].weight.mul_(a[:, None])
        other[0].bias.mul_(a)
        other[2].weight.div_(a)
    x, _ = batch()
    assert torch.allclose(net(x), other(x))
    for p in (1.0, 2.0):
        assert path_norm(other, x, p) == pytest.approx(path_norm(net, x, p), rel=1e-12)
    norms = [math.prod(float(m[i].weight.detach().norm()) for i in (0, 2)) for m in (net, other)]
    assert norms[1] > 3 * norms[0]


@pytest.mark.parametrize("name", ["lenet", "resnet18"])
def test_it_bounds_the_slope_of_networks(name: str) -> None:
    net = nets.build(name, 0, **({"width": 2} if name == "resnet18" else {})).eval()
    rng = torch.Generator().manual_seed(0)
    x, z = (torch.randn(4, *nets.info(name).input_shape, generator=rng) for _ in range(2))
    slope = (net(x) - net(z)).abs().sum(1) / (x - z).flatten(1).abs().amax(1)
    bound = path_norm(net, x, bias=False)
    assert float(slope.max()) <= bound
    assert math.isfinite(bound)


def test_slopes_below_zero_and_reparametrised_weights() -> None:
    net = mlp(3, 4, 2, act=nn.ReLU)
    leaky, steep = copy.deepcopy(net), copy.deepcopy(net)
    leaky[1], steep[1] = nn.LeakyReLU(0.2), nn.PReLU(4, init=-3.0).double()
    x = torch.ones(1, 3)
    assert path_norm(leaky, x, bias=False) == path_norm(net, x, bias=False)
    assert path_norm(steep, x, bias=False) == pytest.approx(3 * path_norm(net, x, bias=False), rel=1e-12)
    assert path_norm(nn.Sequential(weight_norm(net[0]), net[1], net[2]), x) == pytest.approx(
        one_by_one(mlp(3, 4, 2, act=nn.ReLU), 1.0, True), rel=1e-12
    )


def test_as_a_metric_of_a_probe() -> None:
    x, y = batch()
    net = mlp(3, 4, 2, act=nn.ReLU)
    probe = Probe(net, x, y, {"path": lambda view: path_norm(view.network, view.x)}, max_overhead=None)
    assert probe.measure(0.3)["path"] == pytest.approx(path_norm(net, x), rel=1e-15)


class Calls(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self.layer(x))  # type: ignore[operator]
        return out


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda h: h.softmax(1), "calls softmax, which is no sum"),
        (lambda h: F.layer_norm(h, (4,)), "calls layer_norm, which is no sum"),
        (lambda h: h * h, "on a product of activations"),
        (lambda h: h @ h.T, "calls __get__, which is no sum"),
        (lambda h: h / h, "to divide by activations"),
        (lambda h: 1 / h, "calls __rdiv__|__rtruediv__|reciprocal, which is no sum"),
        (lambda h: h.amax(1), "calls amax, which is no sum"),
        (lambda h: h.add(h, alpha=2), "with alpha"),
        (lambda h: F.pad(h, (1, 1), value=3.0), "pads with 3.0"),
        (lambda h: F.dropout(h, 0.5), "dropout with training=True"),
        (lambda h: F.batch_norm(h, None, None, training=True), "the batch's own statistics"),
        (lambda h: torch.cat([h, torch.ones(1, 4)], 1), "joins activations and other tensors by cat"),
        (lambda h: (h, h), "gave a tuple"),
        (lambda h: h * h.sum().item(), "reads values of its activations .item."),
        (lambda h: h if h.sum() else 2 * h, "reads values of its activations .__bool__."),
        (lambda h: h * torch.as_tensor(h.numpy()), "reads values of its activations .numpy."),
        (lambda h: torch.zeros(1, 4).index_put_((torch.tensor([0]),), h[0]), "calls index_put_, which is no sum"),
        (
            lambda h: F.linear(h, torch.ones(4, 4), h[0]),
            "has activations or complex numbers in place of weights or biases",
        ),
        (lambda h: h * torch.ones(4, dtype=torch.complex64), "has activations or complex numbers"),
    ],
)
def test_what_is_no_sum_over_paths_is_refused(function: object, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        path_norm(Calls(function), torch.ones(1, 4))


def test_activations_written_into_a_plain_tensor_are_refused() -> None:
    def into_zeros(h: Tensor) -> Tensor:
        made = torch.zeros(1, 4)
        made[:, :2] = h[:, :2]
        return h + made

    with pytest.raises(UnsupportedError, match="writes activations into another tensor"):
        path_norm(Calls(into_zeros), torch.ones(1, 4))


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_entries_that_are_written(p: float) -> None:
    """A number or a weight in the place of a unit is a bias, another branch is itself."""

    def written(h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 0] = -3.0
        h[:, 1] = h[:, 2]
        return h

    net = Calls(written)
    sums = net.layer.weight.detach().double().abs().pow(p).sum(1)
    full = sums + net.layer.bias.detach().double().abs().pow(p)
    without = float(2 * sums[2] + sums[3])
    assert path_norm(net, torch.ones(1, 4), p, False) == pytest.approx(without ** (1 / p), rel=1e-12)
    assert path_norm(net, torch.ones(1, 4), p) == pytest.approx(
        float(3**p + 2 * full[2] + full[3]) ** (1 / p), rel=1e-12
    )


def test_what_is_added_to_an_activation_stays_out_of_its_input() -> None:
    def apart(h: Tensor) -> Tensor:
        a = F.relu(h)
        a += 5.0
        return a + h

    def together(h: Tensor) -> Tensor:
        a = F.relu(h, inplace=True)
        a += 5.0
        return a + h

    for function, expected in ((apart, 2), (together, 4)):  # times four units with 5 added
        net = Calls(function)
        sums = float(net.layer.weight.detach().double().abs().sum() + net.layer.bias.detach().double().abs().sum())
        assert path_norm(net, torch.ones(1, 4)) == pytest.approx(2 * sums + 10 * expected, rel=1e-12)


def test_windows_of_several_sizes() -> None:
    for pool in (nn.AdaptiveAvgPool2d(2), nn.AvgPool2d(2, padding=1, count_include_pad=False)):
        net, x = nn.Sequential(warmed(nn.Conv2d(1, 1, 1)), pool), torch.ones(1, 1, 5, 5)
        assert path_norm(net, x) == pytest.approx(by_matrices(list(net), (1, 5, 5), 1.0), rel=1e-12)
        with pytest.raises(UnsupportedError, match="windows of several sizes"):
            path_norm(net, x, 2.0)
    with pytest.raises(UnsupportedError, match="ceil_mode or return_indices"):
        path_norm(nn.MaxPool2d(2, ceil_mode=True), torch.ones(1, 1, 5, 5))


def test_arguments() -> None:
    for call, message in (
        (lambda: path_norm(nn.Linear(2, 1), torch.ones(1, 2), 0.0), "p=0.0: a finite number above 0"),
        (lambda: path_norm(nn.Linear(9, 9), torch.ones(2, 9), 1e4), "too small for float64; take a smaller p"),
        (lambda: path_norm(nn.LazyLinear(2), torch.ones(2, 9)), "lazy parameters without values"),
    ):
        with pytest.raises(InputError, match=message):
            call()
