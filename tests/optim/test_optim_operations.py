"""A step sends a GPU few operations, however many layers of one form there are, and waits for it once, at the end."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import biascope as bs
from biascope.curvature import contract
from biascope.network.layers.rules import Conv
from biascope.optim.checks import Finite
from biascope.optim.scalings import conv_squares
from optim.optim_oracle import backward, dense_steps, error, homogeneous, mlp_data, moved, rng, seeded, snapshot

WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "lift_fresh"}  # the last: torch.tensor(...)
FREE = {"detach", "empty", "empty_like", "new_empty", "_unsafe_view"}


class Sent(TorchDispatchMode):
    """The names of what computes or waits, in order: views are free."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and name not in FREE and not name.startswith("_record_function"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def like_a_gpu(monkeypatch):
    monkeypatch.setattr(contract, "CACHED", ())


OPTIMISERS = {
    "kfac": lambda net: bs.optim.KFAC(net, lr=1e-3, damping=1e-2, factor_decay=0.0, sua=True),
    "ekfac": lambda net: bs.optim.EKFAC(net, lr=1e-3, damping=1e-2, sua=True, damping_mode="deep"),
    "ekfac-ra": lambda net: bs.optim.EKFAC(
        net, lr=1e-3, damping=1e-2, sua=True, damping_mode="deep", scalings="running"
    ),
}


def sent(name, depth):
    """Operations of a step between refreshes for `depth` equal convolutions."""
    layers = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(depth)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 64, 3))
    opt = OPTIMISERS[name](net)
    x, y = torch.randn(6, 4, 8, 8, generator=rng()), torch.arange(6) % 3
    for _ in range(2):
        opt.zero_grad()
        backward(net, x, y)
        opt.step()
    opt.zero_grad()
    backward(net, x, y)
    with Sent() as seen:
        opt.step()
    return seen.names


@pytest.mark.parametrize(("name", "bound", "per_layer"), [("kfac", 20, 0), ("ekfac", 64, 12), ("ekfac-ra", 38, 0)])
def test_operations_and_waits_of_a_step(name, bound, per_layer, like_a_gpu):
    few, more = sent(name, 2), sent(name, 5)
    assert len(few) <= bound, Counter(few)
    assert len(more) - len(few) <= 3 * per_layer, Counter(more)
    waits = [i for i, operation in enumerate(more) if operation in WAITING]
    assert len(waits) == 1
    assert more[waits[0] + 1 :] == ["_foreach_add_"]  # when the GPU is waited for, it has all but the update


class Equal(nn.Module):
    """Three linear layers of one form, of which the second may be left out, and a head."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(4, o) for o in (4, 4, 4, 3))
        self.short = False

    def forward(self, x):
        x = torch.tanh(self.a(x))
        x = x if self.short else torch.tanh(self.b(x))
        return self.head(torch.tanh(self.c(x)))


CASES = [("EKFAC", "plain"), ("EKFAC", "deep"), ("KFAC", "factored"), ("KFAC", "exact")]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_layers_of_one_form_step_by_their_own_dense_formulas(kind, mode):
    net, (x, y) = seeded(Equal), mlp_data(20)
    opt = getattr(bs.optim, kind)(net, lr=0.3, damping=0.01, damping_mode=mode)
    oracle = dense_steps(net, x, y, kind.lower(), 0.01, mode)
    before = snapshot(net)
    backward(net, x, y)
    opt.step()
    assert len(opt.preconditioner.stacks.joined) == 2
    step = moved(net, before, 0.3)
    assert max(error(homogeneous(net, step, layer), V) for layer, V in oracle.items()) < 1e-10


def test_layers_with_dampings_of_their_own_step_apart():
    net, (x, y) = seeded(Equal), mlp_data(20)
    groups = [{"params": net.b.parameters(), "damping": 0.5}]
    groups += [{"params": [p for m in (net.a, net.c, net.head) for p in m.parameters()]}]
    opt = bs.optim.EKFAC(net, lr=0.3, damping=0.01, params=groups)
    oracles = {eps: dense_steps(net, x, y, "ekfac", eps) for eps in (0.5, 0.01)}
    before = snapshot(net)
    backward(net, x, y)
    opt.step()
    step = moved(net, before, 0.3)
    for layer in ("a", "b", "c", "head"):
        assert error(homogeneous(net, step, layer), oracles[0.5 if layer == "b" else 0.01][layer]) < 1e-10


@pytest.mark.parametrize("scalings", ["batch", "running"])
def test_a_layer_that_is_left_out_keeps_its_curvature_and_the_others_go_on(scalings):
    """Two optimisers, one of which never knew the other layers of the form."""
    net, twin = seeded(Equal), seeded(Equal)
    options = {"lr": 0.1, "damping": 0.05, "scalings": scalings}
    opt = bs.optim.EKFAC(net, **options)
    alone = bs.optim.EKFAC(twin, params=list(twin.a.parameters()), **options)
    for i, short in enumerate((False, True, False, True, True, False)):
        (x, y), old = mlp_data(20, seed=i), opt.preconditioner.pieces().get("b.weight")
        for module, one in ((net, opt), (twin, alone)):
            module.short = short
            one.zero_grad()
            backward(module, x, y)
            one.step()
        assert (opt.preconditioner.pieces()["b.weight"] is old) == short
        assert error(net.a.weight, twin.a.weight) < 1e-10
        twin.load_state_dict(net.state_dict())


CONVOLUTIONS = {
    "pairs": ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), (3, 4)),
    "many": ((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (6, 5)),
    "dilated": ((2, 3), (1, 2), ((0, 1), (2, 2)), (2, 1), (7, 9)),
    "long": ((3,), (1,), ((1, 1),), (1,), (80,)),
    "solid": ((2, 1, 2), (1, 1, 1), ((0, 0),) * 3, (1, 1, 1), (4, 3, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("gpu", [False, True])
def test_squares_of_turned_convolution_gradients(name, gpu, monkeypatch):
    """Against autograd, example by example; a workspace for two examples."""
    *arguments, size = CONVOLUTIONS[name]
    rule = Conv(*arguments, 1)
    n, c, o, e = 5, 3, 4, torch.Size(rule.kernel).numel()
    x = torch.randn(n, c, *size, generator=rng(), dtype=torch.float64)
    W = torch.zeros(o, c, *rule.kernel, dtype=torch.float64, requires_grad=True)
    padded = F.pad(x, [p for pair in reversed(rule.padding) for p in pair])
    run = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    out = run(padded, W, None, rule.stride, 0, rule.dilation)
    g = torch.randn(out.shape, generator=rng(1), dtype=torch.float64)
    rows = torch.stack([torch.autograd.grad(out[i], W, g[i], retain_graph=True)[0] for i in range(n)]).flatten(3)
    U_A, U_B = (torch.linalg.qr(torch.randn(1, d, d, generator=rng(2), dtype=torch.float64))[0] for d in (c, o))
    expected = torch.einsum("op,nocE,cd->npEd", U_B[0], rows, U_A[0]).square().sum(0)
    T = g[0, 0].numel()
    monkeypatch.setattr(contract, "WORKSPACE", {"cpu": 2 * 8 * e * c * (T + o)})
    if gpu:
        monkeypatch.setattr(contract, "CACHED", ())
    assert error(conv_squares(x, g, U_B, U_A, rule).view(o, e, c), expected) < 1e-12


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(bad, gpu, monkeypatch):
    if gpu:
        monkeypatch.setattr(contract, "CACHED", ())
    huge = torch.tensor([1.0, -1e300], dtype=torch.float64)
    tensors = {"huge": huge, "none": torch.ones(0, 3), "half": torch.ones(3, dtype=torch.bfloat16)}
    assert Finite(tensors).bad() is None
    assert Finite({}).bad() is None
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        wrong = torch.tensor([[1.0, bad, 2.0]]).to(dtype).expand(4, 3)
        assert Finite({**tensors, "wrong": wrong, "wrong too": wrong}).bad() == "wrong"


@pytest.mark.gpu
def test_the_answer_of_a_gpu_is_waited_for():
    x = torch.ones(2**24, device="cuda")
    assert Finite({"x": x}).bad() is None
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[-1] = bad
        assert Finite({"ones": torch.ones(3), "x": x}).bad() == "x"
