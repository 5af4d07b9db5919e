"""Heads that are not what they seem, examples that mix, and layers that vmap does not know."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.ensembles import input_gradients, outputs, record, train_ensemble
from biascope.geometry import average_geometry, evolution_of, geometry_evolution, geometry_of, nads
from biascope.geometry.dipole import dipole_derivatives, dipole_metric
from biascope.geometry.loss_curvature import (
    curvature_correlation,
    curvature_evolution,
    evolution_correlation,
    input_curvature,
)
from biascope.support.errors import InputError, UnsupportedError
from zoo import Sliced

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 3 * F.linear(input, self.weight, self.bias)


class Copied(nn.Module):
    """Starts with the weights of the head in the layer, or the buffer, below it."""

    gate: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head, self.kind = nn.Linear(3, 8), nn.Linear(8, 1), kind
        start = self.head.weight.detach()
        self.register_buffer("gate", start[0].abs().clone() if kind == "buffer" else torch.ones(8))
        if kind == "layer":
            self.body.weight.data.copy_(start.T.expand(8, 3) * torch.tensor([1.0, 5.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu() * self.gate)
        return out


def hooked(before: bool) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    if before:
        net[2].register_forward_pre_hook(lambda layer, args: (3 * args[0],))
    else:
        net[2].register_forward_hook(lambda layer, args, out: 3 * out)
    return net


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), Scaled(8, 1)), "is not its weight times what it gets"),
        (lambda: hooked(before=True), "is not its weight times what it gets"),
        (lambda: hooked(before=False), "is not its weight times what it gets"),
        (lambda: Copied("layer"), "made of the weights of 'head'"),
        (lambda: Copied("buffer"), "made of the weights of 'head'"),
    ],
    ids=["class", "hook before", "hook after", "layer", "buffer"],
)
def test_heads_that_cannot_be_averaged_out_are_refused(factory, message: str) -> None:  # type: ignore[no-untyped-def]
    """They gave eigenvalues that were wrong by factors, with small errors beside them."""
    with pytest.raises(UnsupportedError, match=message):
        nads(factory, (3,), 20, head="marginal")


def test_an_ordinary_head_is_drawn_apart() -> None:
    assert record(lambda: Copied("none")).drawn_apart("head.weight")
    assert not record(lambda: Copied("layer")).drawn_apart("head.weight")
    factory = lambda: Copied("none")  # noqa: E731
    sampled, marginal = (nads(factory, (3,), 2000, step=0.5, head=head, x=X[0]) for head in ("sampled", "marginal"))
    assert sampled.trace == pytest.approx(marginal.trace, rel=0.15)  # 3 standard errors of the sampled one


def by_the_batch() -> nn.Module:
    """Normalises each feature by the batch, and by two places, so that even a single example can be normalised."""
    parts = (nn.Linear(3, 8), nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4, track_running_stats=False), nn.Flatten())
    return nn.Sequential(*parts, nn.Tanh(), nn.Linear(8, 1))


def test_examples_that_mix_have_no_gradients_of_their_own() -> None:
    """Each of these gave a number, which depended on the other examples and on how they were cut into pieces."""
    drawn, y = record(by_the_batch).draw(0, 0, 3), torch.zeros(12)
    for gives in (
        lambda: input_gradients(drawn, X),
        lambda: geometry_of(drawn, X),
        lambda: geometry_evolution(by_the_batch, X, y, n_networks=2),
        lambda: evolution_of(drawn, X, X, y),
        lambda: dipole_derivatives(by_the_batch, X[0], X[1], n_networks=2),
        lambda: dipole_metric(drawn, X[0], X[1:]),
        lambda: nads(by_the_batch, (3,), 4, "mixed-derivative", top=1),
        lambda: nads(by_the_batch, (3,), 4, "ntk", top=1),
        lambda: nads(by_the_batch, (3,), 4),
    ):
        with pytest.raises(UnsupportedError, match="keeps no running statistics"):
            gives()


def test_what_vmap_does_not_know_is_done_in_turn() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.gru(x[:, None])[0][:, -1])
            return out

    drawn = record(Recurrent).draw(0, 0, 4, dtype=torch.float64)
    leaf = X.double().requires_grad_(True)
    found = input_gradients(drawn, X)
    for i in range(4):
        (expected,) = torch.autograd.grad(drawn.module(i)(leaf).sum(), leaf)
        torch.testing.assert_close(found[i], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(outputs(drawn, X)[i], drawn.module(i)(leaf).detach(), rtol=1e-9, atol=1e-12)
    small = nads(Recurrent, (3,), 6, step=1e-4, x=X[0], dtype=torch.float64)
    exact = nads(Recurrent, (3,), 6, method="autograd", x=X[0], dtype=torch.float64)
    torch.testing.assert_close(small.eigenvalues, exact.eigenvalues, rtol=1e-6, atol=1e-9)


class Counting(nn.Module):
    """Counts its calls in every mode, or in train mode only."""

    calls: Tensor

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.layer, self.always = nn.Linear(3, 2), always
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.always or self.training:
            self.calls += 1
        out: Tensor = self.layer(x) * (1 + self.calls)
        return out


def test_networks_that_count_their_calls_in_eval_mode_are_refused_and_left_as_drawn() -> None:
    """The constant that all networks share was counted up, for this ensemble and for all later draws."""
    initialiser = record(lambda: Counting(always=True))
    drawn = initialiser.draw(0, 0, 4)
    for gives in (
        lambda: outputs(drawn, X),
        lambda: outputs(drawn, X, engine="loop"),
        lambda: input_gradients(drawn, X),
        lambda: nads(initialiser, (3,), 4),
        lambda: nads(initialiser, (3,), 4, "mixed-derivative", top=1),
        lambda: geometry_evolution(initialiser, X, torch.zeros(12), n_networks=2),
        lambda: train_ensemble(initialiser, [(X, torch.arange(12) % 2)]),
    ):
        with pytest.raises(UnsupportedError, match="changes its buffer 'calls' when it is called in eval mode"):
            gives()
    assert drawn.buffers["calls"].tolist() == initialiser.draw(0, 0, 4).buffers["calls"].tolist() == [0.0] * 4


def test_networks_that_count_in_train_mode_are_fine() -> None:
    initialiser = record(lambda: Counting(always=False))
    done = train_ensemble(initialiser, [(X, torch.arange(12) % 2)] * 2, epochs=3, batch_size=5)
    assert done.networks is not None
    assert done.networks.buffers["calls"].tolist() == [9.0, 9.0]
    expected = torch.stack([done.networks.module(i)(X).detach() for i in range(2)])
    torch.testing.assert_close(outputs(done.networks, X), expected, rtol=1e-5, atol=1e-6)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(0.3 * torch.randn(3, 2, dtype=torch.complex128))
        self.v = nn.Parameter(torch.randn(2, 1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (torch.tanh(x.to(self.w.dtype) @ self.w) @ self.v).real
        return out


class TwoParts(nn.Module):
    """The same with real parameters, out of the complex ones of a network."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.view_as_real(p.detach()).clone() for p in of.parameters())

    def forward(self, x: Tensor) -> Tensor:
        w, v = (torch.view_as_complex(part) for part in self.parts)
        out: Tensor = (torch.tanh(x.to(w.dtype) @ w) @ v).real
        return out


def test_complex_parameters_count_as_two_real_ones() -> None:
    """||H v|| dropped imaginary parts, and nads took x for complex."""
    drawn = record(Complex).draw(0, 0, 6)
    v, y = torch.tensor([1.0, 2.0, -1.0]).double(), torch.linspace(-1, 1, 12).double()
    x, data = X[0].double(), X.double()
    nets = [TwoParts(drawn.module(i)) for i in range(6)]
    rows, lengths, deltas = [], [], []
    for net in nets:
        leaf = x.clone().requires_grad_(True)
        (g,) = torch.autograd.grad(net(leaf[None]).sum(), leaf, create_graph=True)
        lengths.append(sum(h.square().sum() for h in torch.autograd.grad(g @ v, net.parts, retain_graph=True)).sqrt())
        flow = torch.autograd.grad(0.5 * (net(data)[:, 0] - y).square().sum(), net.parts)
        u = torch.stack(
            [-sum((a * b).sum() for a, b in zip(torch.autograd.grad(e, net.parts, retain_graph=True), flow)) for e in g]
        )
        rows.append(g.detach())
        deltas.append(torch.outer(u, g.detach()) + torch.outer(g.detach(), u))
    torch.testing.assert_close(dipole_derivatives(drawn, x, v).mixed, torch.stack(lengths), rtol=1e-10, atol=0)
    moment = torch.stack(rows).T @ torch.stack(rows) / 6
    for method, step, tolerance in (("autograd", 100.0, 1e-10), ("finite-difference", 1e-4, 1e-6)):
        found = nads(Complex, (3,), 6, method, step=step, x=x)
        expected = torch.linalg.eigvalsh(moment).flip(0)
        torch.testing.assert_close(found.eigenvalues, expected, rtol=tolerance, atol=1e-9)
    Delta = evolution_of(drawn, x[None], data, y).matrix
    torch.testing.assert_close(Delta, torch.stack(deltas).mean(0), rtol=1e-9, atol=1e-10)
    assert geometry_evolution(Complex, data, y, n_networks=2).matrix.isfinite().all()
    with pytest.raises(UnsupportedError, match="method='mixed-derivative' needs real"):
        nads(Complex, (3,), 6, "mixed-derivative")


def test_networks_of_buffers_alone_have_directions() -> None:
    class Fixed(nn.Module):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(3, 1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    rows = record(Fixed).draw(0, 0, 30).buffers["weight"][:, :, 0]
    found = nads(Fixed, (3,), 30, "autograd")
    torch.testing.assert_close(found.eigenvalues, torch.linalg.eigvalsh(rows.T @ rows / 30).flip(0), rtol=1e-10, atol=0)


class Written(Sliced):
    """The same without a slice."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weights[0].T) @ self.weights[1].T


def test_slices_of_parameter_lists_count() -> None:
    """Derivatives by what is read through a slice were zero: of Delta a tenth was left, and vmap trained half."""
    y = torch.ones(len(X))
    deltas = [geometry_evolution(kind, X, y, 20).matrix for kind in (Sliced, Written)]
    assert torch.allclose(*deltas, rtol=1e-5)
    directions = [nads(kind, (3,), 20, "mixed-derivative", top=3).eigenvalues for kind in (Sliced, Written)]
    assert torch.allclose(*directions, rtol=1e-5)
    tasks = [(X, y[:, None])] * 2
    trained = [train_ensemble(Sliced, tasks, epochs=2, batch_size=4, loss="mse", engine=e) for e in ("loop", "vmap")]
    a, b = (done.networks.params["weights.0"] for done in trained if done.networks is not None)
    assert torch.allclose(a, b, atol=1e-5)


def test_old_weight_norm_has_an_average_geometry() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1))

    assert average_geometry(build, (3,), 20, probes=X).matrix.shape == (3, 3)


class Centred(nn.Module):
    """Takes the mean of the batch off by hand, which no layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        out: Tensor = self.head(torch.tanh(h - h.mean(0)))
        return out


@pytest.mark.parametrize("build", [by_the_batch, Centred])
def test_outputs_of_examples_that_mix_are_those_of_all_of_them(build) -> None:  # type: ignore[no-untyped-def]
    """Whatever memory there is: 300 inputs would be cut into pieces of 64 or 256."""
    drawn, x = record(build).draw(0, 0, 3, dtype=torch.float64), torch.randn(300, 3, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([drawn.module(i)(x) for i in range(3)])
    for options in ({}, {"max_memory": "1KB"}, {"engine": "loop"}, {"engine": "vmap"}):
        torch.testing.assert_close(outputs(drawn, x, **options), expected, rtol=1e-9, atol=1e-12)


def test_examples_that_mix_by_hand_have_no_derivatives_of_their_own() -> None:
    """Alone every example is its own mean: curvatures were zero, and Delta mixed two different functions."""
    drawn, net, y = record(Centred).draw(0, 0, 3), Centred(), torch.ones(len(X))
    for use in (
        lambda: evolution_of(drawn, X, X, y),
        lambda: input_curvature(net, X, y),
        lambda: curvature_evolution(net, X, y, X, y),
        lambda: curvature_correlation(drawn, X, y),
        lambda: evolution_correlation(drawn, X, y, X, y),
        lambda: dipole_metric(drawn, X[0], X[1:3]),
        lambda: dipole_metric(net, X[0], X[1:3]),
    ):
        with pytest.raises(UnsupportedError, match="its examples mix"):
            use()


def test_dipoles_of_networks_with_hidden_chance_or_fused_layers_are_refused() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = torch.randn(4, 3), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(x @ self.features.T))
            return out

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.steps(x)[0][:, -1])
            return out

    with pytest.raises(InputError, match="'features' of Hidden, which is neither a parameter nor a buffer"):
        dipole_derivatives(Hidden, X[0], X[1], n_networks=4)
    with pytest.raises(UnsupportedError, match="'steps' is fused"):
        dipole_derivatives(Recurrent, X[:2], X[2:8].view(3, 2, 3), n_networks=4)
