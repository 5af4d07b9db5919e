"""The alpha-scaled network: identities at the start, its limit, and what it refuses."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.support.errors import InputError, UnsupportedError
from biascope.tangent import lazy_lr
from tangent.linearize_zoo import call, conv_net, displace, double, images, mlp
from zoo import ZOO, Fn


def test_alpha_one_is_the_plain_network_bit_for_bit() -> None:
    for name in ("batch_norm2d_eval", "transformer_encoder_layer", "gru", "keyword_inputs"):
        net, x = ZOO[name]()
        slow = bs.lazy(net, 1.0)
        displace(slow, 0.1)
        moved = copy.deepcopy(net)
        moved.load_state_dict(slow.state_dict(), strict=True)
        assert torch.equal(call(slow, x), call(moved, x))


def test_definition_and_gradient() -> None:
    """Spec 05 check 26: f at the start is f0, the gradient is alpha times the plain one."""
    for name in ("conv2d", "multihead_attention", "vit_like"):
        net, x = ZOO[name]()
        net, x = net.double(), double(x)
        for alpha in (0.5, 100.0):
            slow = bs.lazy(net, alpha)
            f0 = call(net, x)
            torch.testing.assert_close(call(slow, x), f0)
            displace(slow, 0.01)
            moved = copy.deepcopy(net)
            moved.load_state_dict(slow.state_dict())
            f = call(moved, x)
            torch.testing.assert_close(call(slow, x), f0 + alpha * (f - f0))
            got = torch.autograd.grad(call(slow, x).sum(), list(slow.parameters()))
            for g, h in zip(got, torch.autograd.grad(f.sum(), list(moved.parameters()))):
                torch.testing.assert_close(g, alpha * h)
            assert not call(bs.lazy(net, alpha, include_init_output=False), x).any()


def test_in_float32_the_start_is_exact() -> None:
    net, x = ZOO["transformer_encoder_layer"]()  # eval without grad would take another attention kernel than training
    with torch.no_grad():
        expected = bs.lazy(net, 100.0)(x)
    assert torch.equal(bs.lazy(net, 100.0)(x), expected)
    assert not bs.lazy(net, 100.0, include_init_output=False)(x).any()


def test_large_alpha_trains_like_the_linearised_network() -> None:
    net, x = mlp(), torch.randn(8, 4, dtype=torch.float64)
    y = torch.randn(8, 2, dtype=torch.float64)

    def train(model: nn.Module, lr: float) -> Tensor:
        sgd = torch.optim.SGD(model.parameters(), lr)
        for _ in range(30):
            sgd.zero_grad()
            (0.5 * (model(x) - y).square().mean()).backward()
            sgd.step()
        return model(x).detach()

    target = train(bs.linearize(net), 0.5)
    gaps = [float((train(bs.lazy(net, a), lazy_lr(0.5, a)) - target).norm() / target.norm()) for a in (1.0, 1e2, 1e4)]
    assert gaps[0] > 10 * gaps[1]
    assert gaps[1] / gaps[2] == pytest.approx(100, rel=0.1)  # the gap is of order 1 / alpha
    assert gaps[2] < 1e-4


def test_learning_rate_rule() -> None:
    assert lazy_lr(0.1, 100.0) == pytest.approx(1e-5)
    assert lazy_lr(0.1, 1) == 0.1


def test_refusals_name_the_culprit() -> None:
    x = torch.randn(3, 4)
    for alpha in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match=r"alpha=.*: a finite number above 0 is needed"):
            bs.lazy(nn.Linear(4, 3), alpha)
    with pytest.raises(UnsupportedError, match="must not run under autocast"), torch.autocast("cpu", torch.bfloat16):
        bs.lazy(nn.Linear(4, 3), 100.0)(x)
    with torch.autocast("cpu", torch.bfloat16):
        bs.lazy(nn.Linear(4, 3), 1.0)(x)  # nothing is multiplied
    with pytest.raises(UnsupportedError, match=r"parameter 'weight' is torch\.bfloat16"):
        bs.lazy(nn.Linear(4, 3).bfloat16(), 10.0)
    with pytest.raises(UnsupportedError, match=r"an output is torch\.float16"):
        bs.lazy(Fn(lambda m, x: m.a(x).half(), a=nn.Linear(4, 3)), 10.0)(x)
    with pytest.raises(UnsupportedError, match=r"torch\.float32: its rounding error times alpha=10000"):
        bs.lazy(nn.Linear(4, 3), 1e4)
    with pytest.warns(UserWarning, match="alpha=1000 multiplies the rounding error"):
        bs.lazy(nn.Linear(4, 3), 1e3)
    bs.lazy(nn.Linear(4, 3).double(), 1e4)
    with pytest.raises(UnsupportedError, match="BatchNorm2d '1' is in train mode"):
        bs.lazy(conv_net().train(), 10.0)
    with pytest.raises(InputError, match="looks like a loss"):
        bs.lazy(Fn(lambda m, x: m.a(x).sum(), a=nn.Linear(4, 3)), 10.0)(x)


def test_the_warning_points_at_the_caller() -> None:
    with pytest.warns(UserWarning, match="alpha=1000") as caught:
        bs.lazy(nn.Linear(4, 3), 1e3)
    assert caught[0].filename == __file__


def test_names_states_and_copies() -> None:
    net, x = conv_net(), images()
    slow = bs.lazy(net, 10.0)
    assert list(slow.state_dict()) == list(net.state_dict())
    displace(slow, 0.01)
    again = bs.lazy(net, 10.0)
    again.load_state_dict(slow.state_dict(), strict=True)
    for twin in (again, copy.deepcopy(slow)):
        torch.testing.assert_close(twin(x), slow(x))


@pytest.mark.parametrize("include_init_output", [True, False])
def test_input_gradients_are_those_of_the_formula(include_init_output: bool) -> None:
    """f0 depends on the input as f does: d/dx = (1 - alpha) df0/dx + alpha df/dx, by autograd and by torch.func."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    slow = bs.lazy(net, 30.0, include_init_output)
    displace(slow, 0.1)
    moved = copy.deepcopy(net)
    moved.load_state_dict(slow.state_dict())

    def slopes(f: nn.Module) -> Tensor:  # [5, 2, 3]
        (W0, b0), (W1, _) = [(m.weight, m.bias) for m in f.modules() if isinstance(m, nn.Linear)]
        return torch.einsum("oh,nh,hi->noi", W1, 1 - (x @ W0.T + b0).tanh().square(), W0).detach()

    expected = 30 * (slopes(moved) - slopes(net)) + include_init_output * slopes(net)
    z = x.clone().requires_grad_()
    rows = [torch.autograd.grad(slow(z)[:, o].sum(), z)[0] for o in range(2)]
    torch.testing.assert_close(torch.stack(rows, 1), expected, rtol=1e-11, atol=1e-12)
    for mode in (torch.func.jacrev, torch.func.jacfwd):
        found = torch.func.vmap(mode(lambda row: slow(row[None])[0]))(x)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert all(p.grad is None for p in slow.parameters())


@dataclass
class Answer:
    logits: Tensor
    name: str


class Answers(nn.Module):
    def __init__(self, made: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(3, 2).double(), made

    def forward(self, x: Tensor) -> object:
        return self.made(self.linear(x).tanh())


def test_tensors_inside_a_dataclass_are_scaled_and_unknown_objects_refused() -> None:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    slow = bs.lazy(Answers(lambda t: Answer(t, "a")), 10.0)
    f0 = slow(x).logits
    displace(slow, 0.1)
    f = slow.linear(x).tanh()  # type: ignore[operator]
    assert slow(x).name == "a"
    torch.testing.assert_close(slow(x).logits, f0 + 10 * (f - f0))
    with pytest.raises(UnsupportedError, match="SimpleNamespace, which cannot be scaled"):
        bs.lazy(Answers(lambda t: SimpleNamespace(logits=t)), 10.0)(x)


def test_the_tangent_kernel_grows_with_the_square_of_alpha() -> None:
    net, x = mlp().double(), torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    plain, scaled = (bs.ntk(m, x, precision="float64") for m in (net, bs.lazy(net, 5.0)))
    torch.testing.assert_close(scaled.matrix(), 25 * plain.matrix(), rtol=1e-11, atol=1e-12)
