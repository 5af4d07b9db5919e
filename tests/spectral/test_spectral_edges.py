"""Scales, offsets, NaN, train mode and options out of range: right, or refused by name, and never a wrong number."""

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from biascope.spectral import (
    Segments,
    affine_map,
    autoneb,
    fourier_transform,
    linear_regions_1d,
    linear_regions_2d,
    rbf_eigenbasis,
    spectral_norm,
)
from biascope.spectral.decay import decay_exponent, lipschitz_bounds
from biascope.spectral.manifolds import composition_kernel, flower
from biascope.spectral.perturb import high_frequency_volume, perturbation_robustness, sphere_directions
from biascope.spectral.relu_network import relu_network
from biascope.support.errors import InputError, UnsupportedError

F64 = torch.float64
GRID = torch.arange(64)[:, None] / 64


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    """A ReLU network in float64 whose weights come from a generator of its own."""
    rng = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layer = nn.Linear(a, b).double()
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=rng, dtype=F64) / math.sqrt(a))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ---------------------------------------------------------------------------------------------- what is a network


def test_the_exponent_of_a_network_needs_its_regions() -> None:
    net = mlp(1, 16, 1)
    for given in (net, net.float(), relu_network(net)):
        with pytest.raises(InputError, match="is a network: pass linear_regions_1d"):
            decay_exponent(given)  # type: ignore[arg-type]
    assert decay_exponent(linear_regions_1d(net, -3.0, 3.0)).exponent == pytest.approx(-2, abs=0.2)
    with pytest.raises(InputError, match="NaN or infinite"):
        decay_exponent(lambda k: torch.full((len(k),), math.nan))
    with pytest.raises(InputError, match="per_bin"):
        decay_exponent(Segments.through([0.0, 0.5, 1.0], [0.0, 0.5, 0.0]), per_bin=0)


class Wrapped(nn.Module):
    """Two affine maps with something between, before or after them."""

    def __init__(self, between: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)
        self.between, self.after = between, after
        with torch.no_grad():
            self.a.bias.fill_(10.0)  # near the origin every unit is active

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.b(self.act(self.between(self.a(x)))))


class Skipping(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())  # here the same as its layers, but the module is not called


class Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1e6, 1e6)


class Branching(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if float(x.max()) < 3000 or float(x.max()) > 3001 else out + 1


def same(h: Tensor) -> Tensor:
    return h


@pytest.mark.parametrize(
    "net",
    [
        Wrapped(same, lambda out: out.clamp(-5e9, 5e9)),
        Wrapped(lambda h: h.clamp(max=1e9), same),
        Wrapped(lambda h: h.clamp_(-1e9), same),  # in place: the same tensor, other values
        Wrapped(same, lambda out: out * 1.0),
        Wrapped(lambda h: h.flip(1), same),
        Wrapped(lambda h: h.t().contiguous().t(), same),
        Skipping(same, same),
        nn.Sequential(Clipped(1, 4), nn.ReLU(), nn.Linear(4, 1)),
    ],
    ids=["clamped output", "clamped units", "in place", "product", "flip", "copy", "other relu", "own forward"],
)
def test_a_forward_that_differs_far_away_only_is_found_by_its_structure(net: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"not its Linear and ReLU layers|its own forward"):
        relu_network(net)


class Faint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1)
        with torch.no_grad():
            self.a.weight.fill_(1e-12)
            self.a.bias.fill_(1e-12)  # below any absolute tolerance

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.a(x)


def test_reshapes_work_and_values_count_relative_to_their_size() -> None:
    for between, after in ((lambda h: h.view(-1, 4), lambda out: out.squeeze(1)), (lambda h: h.reshape(h.shape), same)):
        net = Wrapped(between, after)
        x = torch.linspace(-40, 40, 7)[:, None]
        torch.testing.assert_close(relu_network(net)(x), net(x).double().reshape(7, 1), rtol=1e-5, atol=1e-5)
    inplace = nn.Sequential(nn.Linear(2, 5), nn.ReLU(inplace=True), nn.Identity(), nn.Linear(5, 1))
    assert relu_network(inplace).widths == (2, 5, 1)
    with torch.inference_mode():
        assert relu_network(inplace).widths == (2, 5, 1)
    with pytest.raises(UnsupportedError, match="not its Linear"):
        relu_network(Faint())
    deep = mlp(3, *[64] * 7, 2)
    assert len(relu_network(deep).weights) == 8  # rounding of many layers at large inputs is no difference


def test_what_branches_on_its_input_is_looked_at_where_it_is_asked_about() -> None:
    net = Branching(same, same)
    assert relu_network(net).widths == (1, 4, 1)
    assert len(linear_regions_1d(net, -100.0, 100.0)) >= 1
    with pytest.raises(UnsupportedError, match="not its Linear"):
        linear_regions_1d(net, 3000.0, 3000.5)
    for ask in (affine_map, lipschitz_bounds):
        with pytest.raises(UnsupportedError, match="not its Linear"):
            ask(net, torch.tensor([[3000.5]]))


def test_nan_is_in_no_region() -> None:
    net = mlp(2, 4, 1)
    for bad in (math.nan, math.inf):
        x = torch.tensor([[0.0, 1.0], [bad, 0.0]])
        for ask in (affine_map, lipschitz_bounds):
            with pytest.raises(InputError, match="x has a NaN or infinity, first in"):
                ask(net, x)
        with pytest.raises(InputError, match="not finite"):
            linear_regions_1d(mlp(1, 4, 1), 0.0, bad)
        with pytest.raises(InputError, match="not finite"):
            linear_regions_2d(net, (0.0, 0.0), (1.0, bad))
    with torch.no_grad():
        net[0].weight[0, 0] = math.nan
    with pytest.raises(InputError, match="NaN or infinite weights"):
        relu_network(net)


@pytest.mark.parametrize("scale", [1e-170, 1e-13, 1e-9, 1e9])
def test_regions_do_not_depend_on_the_scale_of_the_units(scale: float) -> None:
    """f(x) = W2 relu(W1 x + b1) is the same function with W1, b1 times s and W2 over s."""

    def scaled(net: nn.Sequential) -> nn.Sequential:
        with torch.no_grad():
            net[0].weight.mul_(scale)
            net[0].bias.mul_(scale)
            net[2].weight.div_(scale)
        return net

    line, same_line = mlp(1, 8, 8, 1, seed=1), scaled(mlp(1, 8, 8, 1, seed=1))
    knots = linear_regions_1d(line, -3.0, 3.0).knots
    torch.testing.assert_close(linear_regions_1d(same_line, -3.0, 3.0).knots, knots, rtol=1e-9, atol=1e-9)
    plane, same_plane = (linear_regions_2d(net) for net in (mlp(2, 8, 6, 1, seed=1), scaled(mlp(2, 8, 6, 1, seed=1))))
    assert len(plane) == len(same_plane) > 8
    k = torch.tensor([[3.0, 2.0]], dtype=F64)
    torch.testing.assert_close(fourier_transform(same_plane, k), fourier_transform(plane, k), rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------------------- frequencies and parameters


class Waves(nn.Module):
    """a sin(4 pi z) + b sin(14 pi z) with parameters of no dimension."""

    def __init__(self, b: float = 0.3) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(b))

    def forward(self, z: Tensor) -> Tensor:
        return self.a * torch.sin(4 * math.pi * z) + self.b * torch.sin(14 * math.pi * z)


def test_robustness_with_parameters_of_no_dimension_is_exact() -> None:
    """|b + delta sin t| / b over the circle of (a, b)."""
    found = perturbation_robustness(Waves(), GRID, [2, 7], [0.0, 1.0], draws=2000)
    torch.testing.assert_close(found.mean[0], torch.ones(2, dtype=F64), rtol=1e-4, atol=0)
    angle = torch.arange(100_000, dtype=F64) / 100_000 * 2 * math.pi
    exact = torch.tensor([(3 + angle.cos()).abs().mean() / 3, (0.3 + angle.sin()).abs().mean() / 0.3])
    assert ((found.mean[1] - exact).abs() < 4 * found.standard_error[1]).all()
    u = sphere_directions(dict(Waves().named_parameters()), 5, torch.Generator().manual_seed(0))
    torch.testing.assert_close(u["a"].square() + u["b"].square(), torch.ones(5))


def test_robustness_refuses_what_has_no_meaning() -> None:
    with pytest.raises(InputError, match=r"nothing at frequencies \[7\]"):  # float32 rounding is not an amplitude
        perturbation_robustness(Waves(b=0.0), GRID, [2, 7], [1.0], draws=2)
    for options, match in (
        ({"chunk": -1}, "chunk must be at least 1, not -1"),
        ({"chunk": 0}, "chunk must be at least 1, not 0"),
        ({"draws": 0}, "draws must be at least 1, not 0"),
        ({"draws": -3}, "draws must be at least 1, not -3"),
        ({"deltas": [math.nan]}, r"deltas\[0\]=nan: a finite number is needed"),
    ):
        with pytest.raises(InputError, match=match):
            perturbation_robustness(
                Waves(),
                GRID,
                **{"frequencies": [2], "deltas": [0.1], "draws": 4, **options},  # type: ignore[arg-type]
            )
    one = perturbation_robustness(Waves(), GRID, [2], [0.1], draws=1)
    assert bool(one.standard_error.isnan().all())
    assert bool(one.mean.isfinite().all())
    with pytest.raises(InputError, match="the model has nothing at frequencies"):
        perturbation_robustness(Waves(b=math.nan), GRID, [2], [0.1])
    with pytest.raises(InputError, match="draws must be at least 1"):
        sphere_directions({"a": torch.zeros(2)}, 0, torch.Generator())


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).train()


def test_train_mode_is_refused_before_anything_is_touched() -> None:
    net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).train()
    paths = normalised()
    ends, target = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(3, dtype=torch.long)
    before = [copy.deepcopy(n.state_dict()) for n in (net, paths)]
    with pytest.raises(UnsupportedError, match="train mode"):
        perturbation_robustness(net, GRID, [1], [0.1], draws=2)
    with pytest.raises(UnsupportedError, match="train mode"):
        autoneb(paths, ends[0], ends[1], target)
    for n, state in zip((net, paths), before):
        assert all(torch.equal(value, state[name]) for name, value in n.state_dict().items())
    with pytest.raises(UnsupportedError, match="active"):
        autoneb(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)).train(), ends[0], ends[1], target)
    assert autoneb(paths.eval(), ends[0], ends[1], target).connected.shape == (3,)


def ring(x: Tensor) -> Tensor:
    return torch.stack([1 - (x.norm(dim=1) - 1).abs(), torch.full((len(x),), 0.7)], 1)


def test_paths_through_nan_connect_nothing() -> None:
    start, stop, target = torch.tensor([[1.0, 0.0]]), torch.tensor([[-0.1, 1.0]]), torch.tensor([0])
    for options, match in (
        ({"start": torch.tensor([[math.nan, 0.0]])}, "start has a NaN or infinity, first in"),
        ({"stop": torch.tensor([[math.inf, 0.0]])}, "stop has a NaN or infinity, first in"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": -0.1}, r"lr=-0\.1: a finite number above 0 is"),
        ({"samples": 0}, "samples must be at least 1, not 0"),
    ):
        with pytest.raises(InputError, match=match):
            autoneb(ring, **{"start": start, "stop": stop, "target": target, **options})  # type: ignore[arg-type]

    def broken(x: Tensor) -> Tensor:  # NaN for the class away from the axis: argmax calls it the largest
        return torch.stack([1 + x[:, 0] * math.nan, x[:, 1]], 1)

    found = autoneb(broken, start, stop, target)
    assert not bool(found.connected.any())
    assert not bool(found.straight_connected.any())


# ------------------------------------------------------------------------------------------------ scales and offsets


@pytest.mark.parametrize("offset", [0.0, 10.0, 2024.0, 1e5])
def test_rbf_eigenbasis_does_not_depend_on_the_origin(offset: float) -> None:
    x = offset + torch.linspace(0, 1, 50, dtype=F64)[:, None]
    basis = rbf_eigenbasis(x, 0.05)
    exact = torch.linalg.eigvalsh(torch.exp(-((x - x.T) ** 2) / 0.05**2)).flip(0)
    # both round in eigh, by 1e-16 of the largest eigenvalue; the smallest is 4e-3 of it
    torch.testing.assert_close(basis.values, exact, rtol=1e-10, atol=1e-13)


def test_rbf_eigenbasis_refuses_nan() -> None:
    x = torch.rand(5, 1, generator=torch.Generator().manual_seed(0))
    for width in (math.inf, math.nan):
        with pytest.raises(InputError, match="width="):
            rbf_eigenbasis(x, width)
    with pytest.raises(InputError, match="NaN"):
        rbf_eigenbasis(x * math.nan, 1.0)


@pytest.mark.parametrize("exponent", [-30, -20, -14, 0, 10, 20, 30])
def test_power_iteration_at_any_scale(exponent: int) -> None:
    w = torch.randn(3, 12, 8, generator=torch.Generator().manual_seed(1))
    w[1] = 0.0
    exact = torch.linalg.svdvals(w.double())[:, 0]
    found = spectral_norm(w * 10.0**exponent, 200).double() / 10.0**exponent
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=0)


def test_power_iteration_in_half_precision() -> None:
    half = spectral_norm(torch.ones(300, 300, dtype=torch.float16), 5)  # W^T W v passes the largest half number
    assert float(half) == pytest.approx(300, rel=1e-2)


def test_aliased_latent_frequencies_are_refused() -> None:
    k = torch.tensor([[1.5, 0.0]])
    for cycles in (4096.0, -2048.0, 10_000.0):  # 4096 cycles on 4096 points look like 0: |P| = J_0(1.5) = 0.51
        with pytest.raises(InputError, match="take points >"):
            composition_kernel(flower(0), 2 * math.pi * torch.tensor([cycles]), k)
    with pytest.raises(InputError, match="smaller l and k"):
        composition_kernel(flower(0), torch.zeros(1), 1e5 * k)
    with pytest.raises(InputError, match="points must be at least 1, not 0"):
        composition_kernel(flower(0), torch.zeros(1), k, points=0)
    near = 2 * math.pi * torch.tensor([1500.0], dtype=F64)
    assert float(composition_kernel(flower(0), near, k).abs()) < 1e-12


def test_volume_refuses_what_it_would_count_wrong() -> None:
    given = {"widths": (1, 8, 1), "clip": 2.0, "eps": 0.01, "cutoffs": (1, 4), "samples": 8, "grid": 64}
    for options, match in (
        ({"cutoffs": (-1, 4)}, r"cut-offs \(-1, 4\) lie from 0 to grid / 2"),
        ({"cutoffs": (1.5,)}, r"cutoffs\[0\] must be an integer, not 1.5"),
        ({"cutoffs": (31,)}, r"cut-offs \(31,\) lie from 0 to grid / 2 -"),
        ({"samples": 0}, "samples must be at least 1, not 0"),
        ({"clip": -2.0}, r"clip=-2\.0: a finite number above 0 is"),
        ({"eps": -0.01}, r"eps=-0\.01: a finite number from 0 on is"),
        ({"widths": (1, 0, 1)}, r"widths\[1\] must be at least 1, not 0"),
    ):
        with pytest.raises(InputError, match=match):
            high_frequency_volume(**{**given, **options})  # type: ignore[arg-type]
    assert high_frequency_volume(**{**given, "cutoffs": (30,)}).volume.shape == (1,)  # type: ignore[arg-type]
