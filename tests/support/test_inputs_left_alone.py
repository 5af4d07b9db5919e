"""Networks that write into their inputs: everything measures them as those that do not, and leaves the data alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.ensembles import accuracy, input_gradients, outputs, record
from biascope.geometry import evolution_of, geometry_of, velocity_floor
from biascope.geometry.dipole import dipole_derivatives
from biascope.geometry.loss_curvature import curvature_correlation, input_curvature
from biascope.network.derivatives import call, writes_into_inputs

N, D = 6, 4


class Doubling(nn.Module):
    """tanh network of 2 x; `writes` decides where the 2 x is put."""

    def __init__(self, writes: bool, out: int = 1) -> None:
        super().__init__()
        self.body, self.head, self.writes = nn.Linear(D, 3), nn.Linear(3, out), writes

    def forward(self, x: Tensor) -> Tensor:
        doubled = x.mul_(2) if self.writes else 2 * x
        out: Tensor = self.head(torch.tanh(self.body(doubled)))
        return out


def data() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=rng), torch.tensor([0, 1, 1, 0, 1, 0])


def one(writes: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Doubling(writes, 2)


def flat(net: nn.Module) -> Tensor:
    return torch.ones(sum(p.numel() for p in net.parameters()))


ONE: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "ntk": lambda f, x, y: bs.ntk(f, x).tensor,
    "ntk of blocks": lambda f, x, y: bs.ntk(f, x, x[:2], outputs="trace", max_memory="100kB").tensor,
    "ntk by layer": lambda f, x, y: bs.ntk(f, x, by_layer=True).by_layer()["body"].tensor,
    "J": lambda f, x, y: bs.Jacobian(f, x).to_dense(),
    "J v": lambda f, x, y: bs.Jacobian(f, x) @ flat(f),
    "J' u": lambda f, x, y: bs.Jacobian(f, x).T @ torch.ones(N, 2),
    "hessian": lambda f, x, y: bs.hessian(f, (x, y), representation="dense").to_dense(),
    "ggn": lambda f, x, y: bs.ggn(f, (x, y)) @ flat(f),
    **{
        f"fisher, {kind}": lambda f, x, y, kind=kind: bs.fisher(f, (x, y), representation=kind) @ flat(f)  # type: ignore[misc]
        for kind in ("dense", "diagonal", "kfac", "ekfac", "implicit")
    },
    "label alignment": lambda f, x, y: torch.tensor(float(bs.label_alignment(f, x, y).value)),
    "linearised": lambda f, x, y: bs.linearize(f)(x).detach(),
    "input curvature": lambda f, x, y: input_curvature(f, x, y.float()).hessian,
}


@pytest.mark.parametrize("name", ONE)
def test_one_network(name: str) -> None:
    x, y = data()
    given = x.clone()
    found, expected = ONE[name](one(True), given, y), ONE[name](one(False), x.clone(), y)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert float(expected.abs().max()) > 0
    assert torch.equal(given, x)


def stack(writes: bool) -> bs.ensembles.Networks:
    return record(lambda: Doubling(writes)).draw(0, 0, 5)


MANY: dict[str, Callable[[bool, Tensor, Tensor], Tensor]] = {
    **{
        f"outputs, {engine}": lambda w, x, y, engine=engine: outputs(stack(w), x, engine=engine)  # type: ignore[misc]
        for engine in ("auto", "loop", "vmap")
    },
    **{
        f"gradients, {engine}": lambda w, x, y, engine=engine: input_gradients(stack(w), x, engine=engine)  # type: ignore[misc]
        for engine in ("auto", "loop", "vmap")
    },
    "outputs on inputs of their own": lambda w, x, y: outputs(stack(w), x.expand(5, N, D).clone(), per_network=True),
    "accuracy": lambda w, x, y: accuracy(stack(w), x.expand(5, N, D).clone(), y.expand(5, N)),
    **{
        f"nads, {method}": lambda w, x, y, method=method: (  # type: ignore[misc]
            bs.nads(lambda: Doubling(w), (D,), 16, method=method).eigenvalues
        )
        for method in ("finite-difference", "autograd", "mixed-derivative", "ntk")
    },
    "nads, marginal": lambda w, x, y: bs.nads(lambda: Doubling(w), (D,), 16, head="marginal").eigenvalues,
    "average geometry": lambda w, x, y: bs.average_geometry(lambda: Doubling(w), (D,), 16).matrix,
    "geometry of networks": lambda w, x, y: geometry_of(stack(w), x).matrix,
    "evolution": lambda w, x, y: bs.geometry_evolution(lambda: Doubling(w), x, y.float(), 16).matrix,
    "evolution of networks": lambda w, x, y: evolution_of(stack(w), x, x, y.float()).matrix,
    "curvature": lambda w, x, y: torch.tensor(curvature_correlation(stack(w), x, y.float()).value),
    "floor": lambda w, x, y: torch.tensor(velocity_floor(input_gradients(stack(w), x))),
    "dipoles": lambda w, x, y: dipole_derivatives(stack(w), x[0], x[1]).directional,
}


@pytest.mark.parametrize("name", MANY)
def test_many_networks(name: str) -> None:
    x, y = data()
    given = x.clone()
    found, expected = MANY[name](True, given, y), MANY[name](False, x.clone(), y)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert float(expected.abs().max()) > 0
    assert torch.equal(given, x)


def test_what_a_network_does_is_seen_in_its_mode_of_now() -> None:
    """A network may write in one mode and not in the other; keyword arguments are looked at too."""

    class Moody(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return scale.add_(1) * x if self.training else scale * x

    net, x, scale = Moody().eval(), torch.ones(2), torch.ones(2)
    assert call(net, {}, (x,), {"scale": scale}).tolist() == [1, 1]
    assert writes_into_inputs(net) is False
    net.train()
    assert writes_into_inputs(net) is None
    for _ in range(3):
        assert call(net, {}, (x,), {"scale": scale}).tolist() == [2, 2]
    assert writes_into_inputs(net)
    assert scale.tolist() == [1, 1]
