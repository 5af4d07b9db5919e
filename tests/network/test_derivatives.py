"""What torch differentiates wrongly or not at all, against plain autograd on the module itself and differences."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

import biascope as bs
from biascope.network.derivatives import RightGradients, ThirdDerivatives, call, plain_containers
from biascope.support.errors import UnsupportedError
from zoo import Sliced

F64 = torch.float64


class OwnList(nn.ParameterList):
    """A class of the user's own."""


class SlicedOwn(Sliced):
    """The same in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = OwnList(self.weights)


class Copied(nn.Module):
    """The same with a ParameterDict that is copied and joined to another."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"a": nn.Parameter(torch.randn(3, 3))})
        self.others = nn.ParameterDict({"b": nn.Parameter(torch.randn(1, 3))})

    def forward(self, x: Tensor) -> Tensor:
        for w in (self.weights | self.others).values():
            x = torch.tanh(x @ w.T)
        return x


@pytest.mark.parametrize("kind", [Sliced, SlicedOwn, Copied])
def test_slices_of_parameter_lists_keep_their_derivatives(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net, x = kind().double(), torch.randn(4, 3, dtype=F64)
    rows = [torch.autograd.grad(net(one)[0, 0], list(net.parameters())) for one in x.split(1)]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    assert torch.allclose(bs.Jacobian(net, x).to_dense()[:, 0], J)
    assert torch.allclose(bs.ntk(net, x, precision="float64").tensor[:, 0, :, 0], J @ J.T)
    lin, moves = bs.linearize(net), torch.randn(J.shape[1], dtype=F64)
    start = lin(x).detach()
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(lin.parameters()) + moves, lin.parameters()
        )
    assert torch.allclose((lin(x) - start)[:, 0], J @ moves)
    assert {type(part) for part in net.modules()} == {type(part) for part in kind().modules()}


def test_containers_are_put_back_after_an_error() -> None:
    net = Sliced()
    with pytest.raises(ZeroDivisionError), plain_containers(net):
        raise ZeroDivisionError
    assert type(net.weights) is nn.ParameterList
    assert type(net.weights[:1]) is nn.ParameterList


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": lambda z: F.layer_norm(z, (6,), weight=torch.linspace(0.5, 2, 6, dtype=F64)),
    "layer of two axes": lambda z: F.layer_norm(z, (4, 6)),
    "instance": lambda z: F.instance_norm(z[None], weight=torch.linspace(0.5, 2, 4, dtype=F64))[0],
    "instance by running statistics": lambda z: F.instance_norm(
        z[None], torch.ones(4, dtype=F64), torch.ones(4, dtype=F64), use_input_stats=False
    )[0],
    "group": lambda z: F.group_norm(z[None], 2)[0],
    "gates": lambda z: torch.cat([F.glu(z, 0), F.glu(z, 0)]),
}


@pytest.mark.parametrize("name", NORMS)
def test_third_derivatives_of_normalisations(name: str) -> None:
    """Against differences of second derivatives, which torch takes rightly."""
    rng = torch.Generator().manual_seed(0)
    x, v, u, c = torch.randn(4, 4, 6, generator=rng, dtype=F64)

    def f(z: Tensor) -> Tensor:
        return (c * torch.sin(NORMS[name](z))).sum()

    def second(z: Tensor) -> Tensor:
        found: Tensor = jvp(grad(f), (z,), (v,))[1]
        return found

    h = 1e-4
    by_differences = (second(x + h * u) - second(x - h * u)) / (2 * h)
    with ThirdDerivatives():
        found = vmap(lambda z: jvp(second, (z,), (u,))[1])(x[None])[0]
        assert torch.allclose(f(x), (c * torch.sin(NORMS[name](x))).sum())
    assert torch.allclose(found, by_differences, rtol=1e-5, atol=1e-6)


def test_third_derivatives_of_solves_and_determinants_are_refused() -> None:
    with ThirdDerivatives():
        for of in (lambda A: torch.linalg.solve(A, A), torch.logdet, torch.linalg.slogdet):
            with pytest.raises(UnsupportedError, match=r"third derivatives of .* wrongly"):
                of(torch.eye(2))


class Steps(nn.Module):
    """A cell applied step by step, from the state that torch begins with."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.out = cell, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        assert state is not None
        return self.out(state[0] if isinstance(state, tuple) else state)  # type: ignore[no-any-return]


CELLS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTMCell(3, 4),
    "gru": lambda: nn.GRUCell(3, 4, bias=False),
    "tanh": lambda: nn.RNNCell(3, 4),
    "relu": lambda: nn.RNNCell(3, 4, bias=False, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells_of_recurrent_networks_have_all_derivatives(name: str) -> None:
    """What the error about fused recurrent layers advises: d2f/dtheta dx under vmap, against double backward."""
    torch.manual_seed(0)
    net, x = Steps(CELLS[name]()).double(), torch.randn(2, 2, 3, dtype=F64)
    params = dict(net.named_parameters())
    with RightGradients():
        assert torch.allclose(call(net, params, (x,)), net(x), atol=1e-14)

    def f(p: dict[str, Tensor], z: Tensor) -> Tensor:
        found: Tensor = call(net, p, (z[None],))[0, 0]
        return found

    v = torch.randn(2, 3, dtype=F64)
    held = {k: p.detach() for k, p in params.items()}
    found = vmap(lambda z: jvp(lambda y: grad(f)(held, y), (z,), (v,))[1])(x)
    for i in range(2):
        leaf = x[i].clone().requires_grad_()
        slopes = torch.autograd.grad(net(leaf[None])[0, 0], list(params.values()), create_graph=True)
        for k, slope in zip(params, slopes):
            rows = [
                torch.autograd.grad(s, leaf, retain_graph=True, allow_unused=True)[0] if s.requires_grad else None
                for s in slope.flatten()
            ]
            expected = torch.stack([torch.zeros((), dtype=F64) if r is None else (r * v).sum() for r in rows])
            assert torch.allclose(found[k][i].flatten(), expected, atol=1e-12)
