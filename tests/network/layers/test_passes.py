"""A pass with the module's own parameters: the same numbers, and only where nothing has to be swapped."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.network import stream as passes
from biascope.network.functional import functional
from biascope.network.layers.blocks import leaves
from biascope.network.layers.record import record
from biascope.network.stream import anatomy, own_parameters, recorded


@pytest.fixture
def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


class Counting(nn.Module):
    """Replaces a buffer in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return self.inner(x)


class Capricious(nn.Module):
    """Another path when its weight is a Parameter: what a swapped tensor is not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))

    def forward(self, x):
        return nn.functional.linear(x, self.w) if not isinstance(self.w, nn.Parameter) else x @ self.w.T


def test_same_tape_as_with_swapped_leaves(seeded):
    net, x = mlp(), torch.randn(4, 3, generator=seeded, dtype=torch.float64)
    f = functional(net)
    own, swapped = recorded(f, anatomy(f, x), x), record(f, leaves(f), x)
    torch.testing.assert_close(own.rows, swapped.rows, rtol=0, atol=0)
    assert [use.roles for use in own.uses] == [use.roles for use in swapped.uses]
    cotangent = torch.randn(4, 2, generator=seeded, dtype=torch.float64)
    for mine, theirs in zip(own.gradients(cotangent), swapped.gradients(cotangent), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert all(p.grad is None for p in net.parameters())


def test_own_parameters_only_where_they_are_everything():
    net = mlp()
    assert own_parameters(functional(net)) is not None
    assert own_parameters(functional(net, params="0")) is None  # the rest is frozen
    assert own_parameters(functional(net.float(), precision="float64")) is None
    assert own_parameters(functional(Counting())) is None
    f = functional(mlp())
    moved = type(f)(f.module, {k: p + 1 for k, p in f.params.items()}, f.frozen, f.output, f.dtype, f.device)
    assert own_parameters(moved) is None  # f stands at other parameters than the module does
    net = mlp()
    net[0].weight.requires_grad_(False)
    assert own_parameters(functional(net, params="all")) is None


def test_buffers_of_the_user_stay(seeded):
    net, x = Counting(), torch.randn(4, 3, generator=seeded, dtype=torch.float64)
    want = bs.fisher(net.inner, x, "dense").to_dense()
    torch.testing.assert_close(bs.fisher(net, x, "dense").to_dense(), want)
    assert float(net.count) == 0


@pytest.mark.parametrize("representation", ["dense", "kfac", "diagonal"])
def test_another_path_with_own_parameters_falls_back(representation, seeded):
    x = torch.randn(4, 3, generator=seeded, dtype=torch.float64)
    plain = nn.Linear(3, 2, bias=False).double()
    plain.weight.data.fill_(1.0)
    got, want = (bs.fisher(net, x, representation, likelihood="gaussian") for net in (Capricious(), plain))
    torch.testing.assert_close(got.to_dense(), want.to_dense())


class Loud(nn.Linear):
    """A linear layer that is more than that."""

    def forward(self, x):
        return 2 * super().forward(x)


def _global_hook(net, monkeypatch):
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: out * 2 if m is net[0] else out)
    monkeypatch.setattr(net, "undo", handle.remove, raising=False)


CHANGES = {
    "hook": lambda net, patch: net[0].register_forward_hook(lambda m, args, out: out * 2),
    "hook of the function": lambda net, patch: net[1].register_forward_hook(lambda m, args, out: out * 2),
    "hook before": lambda net, patch: net[2].register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "hook of all": lambda net, patch: net.register_forward_hook(lambda m, args, out: out * 2),
    "global hook": _global_hook,
    "forward of the layer": lambda net, patch: patch.setattr(
        net[0], "forward", lambda x: 2 * nn.Linear.forward(net[0], x)
    ),
    "forward of the class": lambda net, patch: patch.setattr(nn.Tanh, "forward", lambda self, x: x**2),
    "subclass": lambda net, patch: net.__setitem__(2, Loud(5, 2).double()),
    "nested": lambda net, patch: net.__setitem__(1, nn.Sequential(nn.Tanh(), nn.Tanh())),
    "parametrised": lambda net, patch: nn.utils.parametrizations.weight_norm(net[0]),
    "spectral norm": lambda net, patch: nn.utils.spectral_norm(net[0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_changed_since_it_was_looked_at_is_called_as_it_is(change, seeded, monkeypatch):
    net, x = mlp().eval(), torch.randn(4, 3, generator=seeded, dtype=torch.float64)
    bs.fisher(net, x, "diagonal", likelihood="gaussian")  # looked at before it changes
    CHANGES[change](net, monkeypatch)
    try:
        got = bs.fisher(net, x, "diagonal", likelihood="gaussian").diagonal()
        f = functional(net)
        J = torch.func.jacrev(lambda p: f(p, x))(f.params)
    finally:
        getattr(net, "undo", lambda: None)()
    want = torch.cat([j.flatten(2).square().sum((0, 1)) for j in J.values()]) / len(x)
    torch.testing.assert_close(got, want)


def test_prelu_is_recorded_once(monkeypatch, seeded):
    """Written out for the pilot and for every pass after it alike, else each would be made twice."""
    net, x = (
        nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)).double(),
        torch.randn(5, 3, dtype=torch.float64),
    )
    f = functional(net)
    found = anatomy(f, x)
    assert [block.kind for block in found.blocks] == ["matrix", "rows", "matrix"]
    made = []
    monkeypatch.setattr(passes, "record", lambda *args: made.append(1) or record(*args))
    recorded(f, found, x)
    assert made == [1]
