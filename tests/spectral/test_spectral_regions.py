"""Activation patterns, affine maps and linear regions of ReLU networks against autograd and dense sampling."""

import doctest
import importlib
import pkgutil
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import biascope.spectral
from biascope.spectral import affine_map, linear_regions_1d, linear_regions_2d
from biascope.spectral.relu_network import activation_pattern, relu_network
from biascope.support.errors import InputError, UnsupportedError


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


@pytest.mark.parametrize(
    "name", [m.name for m in pkgutil.walk_packages(biascope.spectral.__path__, "biascope.spectral.")]
)
def test_docstring_examples(name: str) -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.testmod(importlib.import_module(name), optionflags=flags).failed == 0


@pytest.mark.parametrize("depth", range(1, 7))
def test_affine_map_is_value_and_gradient(depth: int) -> None:
    net, x = mlp(3, *[12] * (depth - 1), 2), torch.randn(20, 3, dtype=torch.float64)
    w, b = affine_map(net, x)
    assert torch.allclose(torch.einsum("ncd,nd->nc", w, x) + b, net(x), atol=1e-12)
    gradient = torch.func.vmap(torch.func.jacrev(lambda v: net(v)))(x)
    assert torch.allclose(w, gradient, atol=1e-12)
    masks = activation_pattern(net, x)
    assert len(masks) == depth - 1
    if depth > 1:
        assert torch.equal(masks[0], net[0](x) > 0)


def test_float32_network_to_1e_6() -> None:
    net, x = mlp(4, 32, 32, 1).float(), torch.randn(50, 4)
    w, b = affine_map(net, x)
    assert torch.allclose(torch.einsum("ncd,nd->nc", w.float(), x) + b.float(), net(x), atol=1e-5)


def test_what_counts_as_a_relu_network() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    shared = nn.Linear(4, 4)
    for net in (
        nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 2))),
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.ReLU(), nn.Linear(3, 1, bias=False), nn.ReLU()),
        nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 1)),
        nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.ReLU(), nn.Linear(3, 1)).eval(),
    ):
        net = net.double()
        assert torch.allclose(relu_network(net)(x), net(x))
    from biascope import nets

    registered = nets.build("mlp", seed=0, in_features=4, hidden=(8, 8), outputs=2).double()
    assert torch.allclose(relu_network(registered)(x), registered(x))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())  # the ReLU is no module: the layers alone do not tell


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 1)), "layer '1' is a GELU"),
        (nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1)), nn.ReLU()), "layer '0.0' is a Conv2d"),
        (nn.Sequential(nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 1)), "Dropout in train mode"),
        (Functional(), "not its Linear and ReLU layers"),
        (nn.Sequential(nn.ReLU(), nn.Linear(2, 1)), "before the first Linear"),
    ],
)
def test_others_are_refused_by_name(net: nn.Module, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        relu_network(net)


def test_module_is_left_alone() -> None:
    net = mlp(2, 5, 1).float().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    linear_regions_2d(net)
    assert net.training
    assert next(net.parameters()).dtype == torch.float32
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_regions_of_a_line_are_all_of_them() -> None:
    net = mlp(1, 16, 16, 16, 1)
    found = linear_regions_1d(net, -3.0, 3.0)
    t = torch.linspace(-3, 3, 20_001, dtype=torch.float64)[:, None]
    patterns = torch.cat(activation_pattern(net, t), 1)
    changes = (patterns[1:] != patterns[:-1]).any(1).nonzero()[:, 0]
    assert len(changes) > 10
    for i in changes.tolist():  # every change of pattern on a fine grid has a knot in its cell
        inside = (found.knots >= t[i, 0] - 1e-9) & (found.knots <= t[i + 1, 0] + 1e-9)
        assert inside.any()
    place = (torch.searchsorted(found.knots, t[:, 0]).clamp(1, len(found))) - 1
    rebuilt = found.values[place] + found.slopes[place] * (t - found.knots[place][:, None])
    assert torch.allclose(rebuilt, net(t), atol=1e-12)


def test_regions_along_a_segment_in_space() -> None:
    net = mlp(5, 20, 20, 2)
    a, b = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    found = linear_regions_1d(net, a, b)
    assert float(found.knots[-1]) == pytest.approx(float((b - a).norm()))
    middle = (found.knots[1:] + found.knots[:-1]) / 2
    x = a + middle[:, None] * (b - a) / (b - a).norm()
    assert torch.allclose(net(x), (found.values[1:] + found.values[:-1]) / 2, atol=1e-11)


def test_number_of_regions_of_lines_in_general_position() -> None:
    """n lines in general position cut the plane into 1 + n + n (n - 1) / 2 regions (all crossings inside the box)."""
    n, rng = 6, torch.Generator().manual_seed(1)
    net = mlp(2, n, 1)
    angle = torch.arange(n) * torch.pi / n + 0.1
    with torch.no_grad():
        net[0].weight.copy_(torch.stack([angle.cos(), angle.sin()], 1))
        net[0].bias.copy_(torch.rand(n, generator=rng) * 0.2)
    assert len(linear_regions_2d(net, (-50, -50), (50, 50))) == 1 + n + n * (n - 1) // 2


def test_regions_of_the_plane() -> None:
    net = mlp(2, 10, 10, 10, 1)
    found = linear_regions_2d(net, (-2.0, -1.0), (1.0, 1.5))
    assert float(found.areas.sum()) == pytest.approx(7.5, rel=1e-10)
    assert float(found.areas.min()) > 0
    for vertices, w, b in zip(found.vertices, found.weights, found.biases):
        assert torch.allclose(vertices @ w.T + b, net(vertices), atol=1e-9)
        inside = vertices.mean(0) + 0.999 * (vertices - vertices.mean(0))
        if found.areas.min() > 1e-8:  # one pattern in each region
            patterns = torch.cat(activation_pattern(net, inside), 1)
            assert (patterns == patterns[0]).all()


def test_bad_segments_and_boxes() -> None:
    net = mlp(1, 3, 1)
    with pytest.raises(InputError, match="is empty"):
        linear_regions_1d(net, 1.0, 0.0)
    with pytest.raises(InputError, match=r"high \[2\] do not fit"):
        linear_regions_1d(net, torch.zeros(2), torch.ones(2))
    with pytest.raises(InputError, match=r"x \[81, 2\] does not fit"):
        linear_regions_2d(net)
    with pytest.raises(InputError, match="more than 2 knots"):
        linear_regions_1d(mlp(1, 64, 1), -5.0, 5.0, max_knots=2)
    with pytest.raises(InputError, match=r"x \[3, 4\] does not fit"):
        affine_map(net, torch.zeros(3, 4))
