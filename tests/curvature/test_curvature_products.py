"""Products with the Jacobian in one pass, alone and in blocks, against the dense matrix; what takes the slow way."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.curvature import contract, passes, products
from biascope.curvature.families import Bernoulli, Categorical, Gaussian, OutputShape
from biascope.network.functional import functional
from biascope.network.stream import Stream, anatomy
from biascope.support.errors import InputError, UnsupportedError
from curvature.curvature_zoo import case, relative


@pytest.fixture
def seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("name", ["mlp", "norms", "words", "conv2d", "attention", "reused", "tied"])
@pytest.mark.parametrize(
    "options",
    [{}, {"estimator": "monte-carlo", "samples": 3}, {"likelihood": "bernoulli"}, {"likelihood": "gaussian"}],
    ids=str,
)
def test_blocks_and_single_products_equal_the_dense_matrix(name, options, seeded):
    net, x = case(name)
    dense = bs.fisher(net, x, "dense", **options).to_dense()
    F = bs.fisher(net, x, "implicit", **options)
    V = torch.randn(len(dense), 3, generator=seeded, dtype=dense.dtype)
    exact = dense @ V
    scale = float(exact.abs().max())
    assert float((F @ V - exact).abs().max()) < 1e-12 * scale
    assert float((F @ V[:, 1] - exact[:, 1]).abs().max()) < 1e-12 * scale
    torch.testing.assert_close(F.quadratic_form(V), (V * exact).sum(0))
    torch.testing.assert_close(F.quadratic_form(V[:, 0]), (V[:, 0] * exact[:, 0]).sum())


def test_which_way_is_taken_and_said(seeded):
    net, x = case("mlp")
    F = bs.fisher(net, x, "implicit")
    F @ torch.randn(F.shape[0], 2, generator=seeded, dtype=torch.float64)
    assert F.info["block products"] == "together"
    words, tokens = case("words")  # the padding row has no tangent, as it has no gradient
    assert products.ways(functional(words, precision="float64"), tokens).single is products.one
    rounded = nn.Sequential(nn.Linear(3, 2), Rounded()).double()
    how = products.ways(functional(rounded), torch.ones(2, 3, dtype=torch.float64))
    assert how.single is products.slowly
    assert not how.block
    assert "adjoint" in how.why


class Rounded(nn.Module):
    """Rounds; its backward pass is that of the identity, its forward mode the true derivative."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.round()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, u):
            return u

        @staticmethod
        def jvp(ctx, v):
            return torch.zeros_like(v)

    def forward(self, x):
        return self.Round.apply(x)


class Conditional(nn.Module):
    """A custom function with a forward mode, but no batching rule."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

        @staticmethod
        def jvp(ctx, t):
            return 2 * t * ctx.saved_tensors[0]

    def __init__(self):
        super().__init__()
        self.lin, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.Square.apply(self.lin(x)))


def test_what_cannot_be_vmapped_is_done_one_by_one(seeded):
    net = Conditional().double()
    x = torch.randn(5, 3, generator=seeded, dtype=torch.float64)
    F = bs.fisher(net, x, "implicit")
    V = torch.randn(F.shape[0], 3, generator=seeded, dtype=torch.float64)
    torch.testing.assert_close(F @ V, bs.fisher(net, x, "dense").to_dense() @ V)
    assert F.info["block products"].startswith("one by one (")


def test_a_small_budget_takes_fewer_vectors_and_examples(monkeypatch, seeded):
    net, x = case("mlp")
    F = bs.fisher(net, x, "implicit")
    V = torch.randn(F.shape[0], 7, generator=seeded, dtype=torch.float64)
    exact = F @ V
    monkeypatch.setattr(passes, "FEW", 2)
    p, each = F.shape[0], 4 * (F.stream.found.activation_bytes + F.stream.family.shape.total * 8)
    F.stream.limit = 2 * 3 * (32 * p + 4 * each)
    seen = [(len(part.part.inputs), group) for part, group in F.stream.parts(7)]
    assert {group for _, group in seen} == {3}
    assert max(size for size, _ in seen) < len(x)
    torch.testing.assert_close(F @ V, exact)


def test_nobody_asks_for_free_memory_where_little_is_needed(monkeypatch):
    asked = []
    monkeypatch.setattr(passes, "budget", lambda limit, device: asked.append(limit) or 2**30)
    net, x = case("mlp")
    small = {kind: bs.fisher(net, x, kind) for kind in ("diagonal", "kfac", "ekfac", "lowrank")}
    assert asked == []
    monkeypatch.setattr(passes, "SMALL", 0)
    for kind, F in small.items():
        assert relative(bs.fisher(net, x, kind).to_dense(), F.to_dense()) < 1e-12
    assert len(asked) == 4
    with pytest.raises(InputError, match="not a size"):
        bs.fisher(net, x, "diagonal", max_memory="much")


def test_a_budget_that_is_given_counts():
    net, x = case("mlp")
    f = functional(net)
    found = anatomy(f, x)
    data = passes.Pass(Stream(f, x), found, Categorical(OutputShape.of(found.shape, 1)), 0, 2000)
    assert max(chunk.n for chunk in data.chunks(found.blocks)) < len(x)


def test_what_is_no_number_stays_none(seeded):
    net, x = case("mlp")
    for representation in ("implicit", "kfac"):
        F = bs.fisher(net, x, representation)
        v = torch.randn(F.shape[0], generator=seeded, dtype=torch.float64)
        v[3] = float("nan")
        assert bool((F @ v).isnan().any())


@pytest.mark.parametrize("family", [Categorical, Bernoulli, Gaussian])
@pytest.mark.parametrize("shape", [OutputShape(4, 1, False), OutputShape(4, 1, True), OutputShape(3, 2, True)], ids=str)
def test_cotangents_in_groups_are_a_square_root(family, shape, seeded):
    z = 3 * torch.randn(5, shape.total, generator=seeded, dtype=torch.float64)
    z[1, 1:] = -800.0  # probabilities of exactly zero and one
    made = family(shape, 0.7)
    S = made.cotangents(z, None, None, range(made.width))
    parts = [made.cotangents(z, None, None, range(k, min(k + 2, made.width))) for k in range(0, made.width, 2)]
    assert torch.equal(torch.cat(parts), S)
    assert bool(torch.isfinite(S).all())
    u = torch.randn(2, 5, shape.total, generator=seeded, dtype=torch.float64)
    root = torch.einsum("knc,jnc,knd->jnd", S, u, S)
    torch.testing.assert_close(root, made.apply(z, None, None, u))
    torch.testing.assert_close(root[1], made.apply(z, None, None, u[1]))


@pytest.mark.parametrize("representation", ["diagonal", "kfac", "ekfac"])
@pytest.mark.parametrize(("name", "sua"), [("mlp", 0), ("tokens", 0), ("conv2d", 0), ("conv2d", 1), ("reused", 0)])
def test_the_branches_of_a_gpu_agree_with_those_of_a_cpu(monkeypatch, name, sua, representation):
    net, x = case(name)
    here = bs.fisher(net, x, representation, sua=bool(sua)).to_dense()
    for constant in ("BAND", "WORKSPACE", "TRIANGLE"):
        monkeypatch.setitem(getattr(contract, constant), "cpu", getattr(contract, constant)["cuda"])
    monkeypatch.setattr(contract, "CACHED", ())
    monkeypatch.setattr(contract, "TERMS", 3)
    monkeypatch.setattr(contract, "PADDED", {})  # sums beside the products, as of large inputs
    there = bs.fisher(net, x, representation, sua=bool(sua)).to_dense()
    torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-12 * float(here.abs().max()))


@pytest.mark.parametrize("groups", [1, 2])
def test_scalings_of_grouped_convolutions_on_a_gpu(monkeypatch, groups):
    net = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=groups), nn.Tanh(), nn.Conv2d(6, 4, 3, groups=groups))
    net, x = net.append(nn.Flatten()).append(nn.Linear(64, 3)).double(), torch.randn(5, 4, 6, 6, dtype=torch.float64)
    here = bs.fisher(net, x, "ekfac", sua=True).to_dense()
    monkeypatch.setattr(contract, "CACHED", ())
    torch.testing.assert_close(bs.fisher(net, x, "ekfac", sua=True).to_dense(), here, rtol=1e-9, atol=1e-14)


class Bad(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x):
        return self.lin(x) / (x[:, :1] - 7.0)


@pytest.mark.parametrize("representation", ["diagonal", "kfac", "ekfac", "dense", "lowrank"])
@pytest.mark.parametrize("batch_size", [None, 2, 5])
@pytest.mark.parametrize("bad", [3, 5])
def test_late_refusals_name_the_example(representation, batch_size, bad):
    x = torch.zeros(6, 2)
    x[bad] = 7.0
    with pytest.raises(InputError, match=f"NaN or infinity for example {bad}"):
        bs.fisher(Bad(), x, representation, batch_size=batch_size)
    with pytest.raises(InputError, match=f"NaN or infinity for example {bad}"):
        bs.fisher(Bad(), [x[:4], x[4:]], representation, estimator="monte-carlo", batch_size=batch_size)
    with pytest.raises(InputError, match=f"NaN or infinity for example {bad}"):  # a loss that would fail on NaN
        bs.ggn(Bad(), x, representation, loss=lambda z, y: z.square().sum(1), batch_size=batch_size)


def test_trace_and_diagonal_of_products_refuse_nan_too():
    x = torch.zeros(6, 2)
    x[5] = 7.0
    F = bs.fisher(Bad(), x, "implicit")
    for number in (F.trace, F.diagonal):
        with pytest.raises(InputError, match="NaN or infinity for example 5"):
            number()


class Turning(nn.Module):
    """Six logits as [2, 3] or as [3, 2]: the same layers, another meaning."""

    def __init__(self):
        super().__init__()
        self.lin, self.turned = nn.Linear(4, 6), False

    def forward(self, x):
        return self.lin(x).reshape(-1, 3, 2) if self.turned else self.lin(x).reshape(-1, 2, 3)


def test_a_changed_module_is_looked_at_again(seeded):
    net = Turning().double()
    x = torch.randn(5, 4, generator=seeded, dtype=torch.float64)
    before = bs.fisher(net, x, "dense").to_dense()
    net.turned = True
    after = bs.fisher(net, x, "dense").to_dense()
    fresh = Turning().double()
    fresh.load_state_dict(net.state_dict())
    fresh.turned = True
    assert torch.equal(after, bs.fisher(fresh, x, "dense").to_dense())
    assert not torch.allclose(before, after)
    F = bs.fisher(net, x, "implicit")
    net.turned = False
    with pytest.raises(UnsupportedError, match=r"gives \[2, 3\] per example here"):
        F @ torch.ones(F.shape[0], dtype=torch.float64)


def test_weights_are_no_activations():
    net = nn.Sequential(nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))
    found = anatomy(functional(net), torch.randn(8, 50))
    # the inputs of both layers and tanh's result, which is the second layer's input: per example, in float32
    assert found.activation_bytes == 4 * (50 + 40 + 40)
    assert found.shape == (3,)
