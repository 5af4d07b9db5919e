"""Operations done by hand agree with torch's own forward mode."""

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import biascope as bs
from biascope.tangent import dual
from biascope.tangent.dual import _RULES, evaluate_dual


def conv(p: dict[str, Tensor]) -> Tensor:
    return F.conv2d(F.conv2d(X, p["v"]), p["w"], p["b"])  # value and tangent in one tensor


GEN = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GEN, dtype=torch.float64)


W, B = randn(3, 2, 3, 3), randn(3)
X = randn(4, 2, 6, 6)
MEAN, VAR = randn(3), randn(3).abs() + 0.5
EYE = randn(2, 2, 1, 1)
MLP = {"m": randn(5, 6), "m5": randn(4, 5), "b5": randn(5), "m65": randn(6, 5)}


def changed(t: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(t)  # what it returns is ignored
    return t * 1.5


CASES: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]]] = {
    "conv after conv": (
        lambda p: F.conv2d(F.conv2d(X, p["v"]), p["w"], p["b"], padding=1),
        {"v": randn(2, 2, 1, 1)},
    ),
    "conv, only inputs move": (lambda p: F.conv2d(X * p["s"], W, B), {"s": randn(2, 1, 1)}),
    "conv, only weights move": (lambda p: F.conv2d(X, p["w"], stride=2), {}),
    "conv without a batch": (lambda p: F.conv2d(X[0] * p["s"], p["w"]), {"s": randn(2, 1, 1)}),
    "conv by keywords": (
        lambda p: F.conv2d(input=X * p["s"], weight=p["w"], bias=p["b"], padding="same"),
        {"s": randn(2, 1, 1)},
    ),
    "conv, only shift moves": (lambda p: F.conv2d(X * p["s"], W, p["b"]), {"s": randn(2, 1, 1)}),
    "conv in groups": (lambda p: F.conv2d(F.conv2d(X, p["v"]), p["g"], groups=2), {"v": EYE, "g": randn(4, 1, 2, 2)}),
    "conv, transposed": (
        lambda p: F.conv_transpose2d(F.conv2d(X, p["v"]), p["t"], p["b"], stride=2, output_padding=1),
        {"v": EYE, "t": randn(2, 3, 3, 3)},
    ),
    "conv in one dimension": (
        lambda p: F.conv1d(F.conv1d(X[:, :, 0], p["a"]), p["a"], p["b"][:2], padding=1),
        {"a": randn(2, 2, 3)},
    ),
    "relu": (lambda p: F.relu(conv(p)), {"v": EYE}),
    "relu as a method": (lambda p: conv(p).relu(), {"v": EYE}),
    "relu of a product": (lambda p: torch.relu(F.linear(X, p["m"])), {"m": randn(5, 6)}),
    "relu in place": (lambda p: changed(conv(p), lambda t: F.relu(t, inplace=True)), {"v": EYE}),
    "relu in place, unstacked": (lambda p: changed(F.linear(X, p["m"]), torch.relu_), {"m": randn(5, 6)}),
    "relu6": (lambda p: F.relu6(4 * conv(p)) + F.hardtanh(conv(p)), {"v": EYE}),
    "relu6 in place": (lambda p: changed(conv(p), lambda t: F.relu6(t, inplace=True)), {"v": EYE}),
    "relu6 of a product": (lambda p: F.hardtanh(F.linear(X, p["m"]), -0.5, 0.5), {"m": randn(5, 6)}),
    "sum": (lambda p: conv(p) + F.relu(conv(p)), {"v": EYE}),
    "sum with a factor": (lambda p: torch.add(conv(p), conv(p), alpha=3), {"v": EYE}),
    "sum of two shapes": (lambda p: conv(p) + conv(p)[:1], {"v": EYE}),
    "sum with a number": (lambda p: 1.0 + conv(p), {"v": EYE}),
    "sum in place": (lambda p: changed(conv(p), lambda t: t.add_(F.relu(conv(p)))), {"v": EYE}),
    "change of a view": (lambda p: changed(conv(p), lambda t: t[:, 0].mul_(p["b"][0])), {"v": EYE}),
    "change of a constant": (lambda p: changed(torch.ones(2, 3).double(), lambda t: t.mul_(p["b"])), {}),
    "averages": (lambda p: F.avg_pool2d(conv(p), 3, 2, 1) * F.adaptive_avg_pool2d(conv(p), 1), {"v": EYE}),
    "product with a constant": (lambda p: 2 * conv(p) * X.sum() * p["b"].view(3, 1, 1), {"v": EYE}),
    "product with a wider constant": (lambda p: p["b"] * X[0, 0, :5, :3], {}),
    "quotients": (lambda p: conv(p) / 3 + 1 / (conv(p).square() + 1), {"v": EYE}),
    "rounded quotient": (lambda p: torch.div(conv(p), 3, rounding_mode="floor") * p["b"][0], {"v": EYE}),
    "linear, only inputs move": (lambda p: F.linear(F.linear(X, p["m"]), X[0, 0, :5, :5], p["b5"]), MLP),
    "linear, all move": (lambda p: F.linear(F.linear(X, p["m"]), p["m5"], p["b5"][:4]), MLP),
    "softmax": (lambda p: F.softmax(conv(p), 1) + conv(p).softmax(-1) + torch.softmax(conv(p), dim=0), {"v": EYE}),
    "layer norm": (lambda p: F.layer_norm(F.linear(X, p["m"]), (5,), p["b5"], p["b5"] - 1), MLP),
    "layer norm over two dimensions": (lambda p: F.layer_norm(F.linear(X, p["m"]), (6, 5), None, p["m65"]), MLP),
    "layer norm, only inputs move": (lambda p: F.layer_norm(F.linear(X, p["m"]), (5,), X[0, 0, 0, :5], eps=0.1), MLP),
    "layer norm, only scale moves": (lambda p: F.layer_norm(X[..., :5], (5,), p["b5"]), MLP),
    "list of tensors": (lambda p: torch.cat([conv(p), conv(p) * 2], 1), {"v": EYE}),
    "norm, all move": (
        lambda p: F.batch_norm(F.conv2d(X, p["w"]), MEAN, VAR, p["g"], p["b"]),
        {"g": randn(3)},
    ),
    "norm, only shift moves": (lambda p: F.batch_norm(F.conv2d(X, W), MEAN, VAR, None, p["b"]), {}),
    "norm, only scale moves": (lambda p: F.batch_norm(F.conv2d(X, W), MEAN, VAR, p["g"]), {"g": randn(3)}),
    "norm, only input moves": (lambda p: F.batch_norm(F.conv2d(X, p["w"]), MEAN, VAR), {}),
    "norm of vectors": (lambda p: F.batch_norm(X[:, 0, :, :3].flatten(0, 1) * p["b"], MEAN, VAR, p["b"]), {}),
    "norm of the batch": (lambda p: F.batch_norm(F.conv2d(X, p["w"]), None, None, training=True), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_derivative(name: str) -> None:
    f, more = CASES[name]
    params = {"w": W, "b": B, **{k: t.double() for k, t in more.items()}}
    v = {k: torch.randn_like(t) for k, t in params.items()}
    expected = torch.func.jvp(f, (params,), (v,))
    with torch.no_grad():
        (value,), (derivative,) = evaluate_dual(lambda p: [f(p)], params, v)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(derivative, expected[1])
    leaves = {k: t.clone().requires_grad_() for k, t in v.items()}
    u = torch.randn_like(value)
    (_,), (derivative,) = evaluate_dual(lambda p: [f(p)], params, leaves)
    got = torch.autograd.grad(derivative, list(leaves.values()), u, allow_unused=True, materialize_grads=True)
    for g, h in zip(got, torch.func.vjp(f, params)[1](u)[0].values()):
        torch.testing.assert_close(g, h)


def test_padding_row_has_no_tangent() -> None:
    ids = torch.tensor([[0, 1, 4]])
    for pad in (0, -1):
        e = nn.Embedding(5, 2, padding_idx=pad)
        ones = torch.ones_like(e.weight)
        _, (t,) = evaluate_dual(
            lambda p, pad=pad: [F.embedding(ids, p["w"], pad)], {"w": e.weight.detach()}, {"w": ones}
        )
        assert torch.equal(t[0, :, 0], (ids[0] != pad % 5).float())


def test_every_rule_is_one_torch_calls() -> None:
    seen = set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.add(func)
            return func(*args, **(kwargs or {}))

    one = torch.ones(1, 2, 5, 5)
    with Watch():
        nn.Conv1d(2, 3, 3)(one[..., 0])
        nn.Conv2d(2, 3, 3)(one)
        nn.Conv3d(2, 3, 1)(one.unsqueeze(-1))
        nn.ConvTranspose1d(2, 3, 3)(one[..., 0])
        nn.ConvTranspose2d(2, 3, 3)(one)
        nn.ConvTranspose3d(2, 3, 1)(one.unsqueeze(-1))
        nn.Linear(5, 2)(one)
        nn.Embedding(5, 2)(torch.tensor([1]))
        nn.LayerNorm(5)(one)
        nn.Sequential(nn.ReLU(), nn.ReLU6(), nn.Softmax(1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))(one)
        (torch.relu(one).relu() + 1).softmax(1)
        torch.add(torch.mul(torch.div(one, 2), 2), 1)
        other = 2 * one / 3
        other += torch.softmax(other, 0)
        F.scaled_dot_product_attention(one, one, one)
        torch.addmm(other[0, 0, 0], other[0, 0], other[0, 1])
    assert set(_RULES) <= seen


def test_nothing_of_a_call_stays_alive() -> None:
    """Operations without a rule (here GELU) make torch's dual tensors, which once kept themselves alive."""
    net = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    lin, x = bs.linearize(net), torch.randn(6, 3)

    def alive() -> int:
        gc.collect()
        return sum(type(thing) is dual._Dual for thing in gc.get_objects())

    def broken(params: dict[str, Tensor]) -> list[Tensor]:
        torch.special.erfcx(params["w"])
        raise ValueError("half-way")

    before = alive()
    with torch.no_grad():
        lin(x)
        with pytest.raises(ValueError, match="half-way"):
            evaluate_dual(broken, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    lin(x).sum().backward()
    assert alive() == before


def attention(mask: str) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    """Attention of tensors q, k, v and, where it has a tangent, a bias b."""
    allowed = torch.ones(4, 5, dtype=torch.bool).tril(1)
    closed = allowed.clone()
    closed[0] = False  # a row without any key: torch gives zeros
    how: dict[str, Any] = {
        "none": {},
        "scale": {"scale": 0.3},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": allowed},
        "closed row": {"attn_mask": closed},
        "float": {"attn_mask": torch.zeros(4, 5, dtype=torch.float64).masked_fill(~closed, -math.inf)},
        "grouped": {"enable_gqa": True},
    }.get(mask, {})

    def call(p: dict[str, Tensor]) -> list[Tensor]:
        k, v = (p["k"][:, :1], p["v"][:, :1]) if mask == "grouped" else (p["k"], p["v"])
        bias = {"attn_mask": p["b"]} if mask == "bias with a tangent" else how
        return [F.scaled_dot_product_attention(p["q"], k, v, **bias)]

    return call


MASKS = ["none", "scale", "causal", "boolean", "closed row", "float", "grouped", "bias with a tangent"]


@pytest.mark.parametrize("mask", MASKS)
def test_attention_has_torchs_derivative(mask: str) -> None:
    gen = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 2, 4, 3), "k": (2, 2, 5, 3), "v": (2, 2, 5, 6), "b": (2, 4, 5)}
    at = {k: torch.randn(s, generator=gen, dtype=torch.float64) for k, s in shapes.items()}
    v = {k: torch.randn(s, generator=gen, dtype=torch.float64) for k, s in shapes.items()}
    call = attention(mask)
    with torch.no_grad():
        value, tangent = evaluate_dual(call, at, v)
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(value[0], call(at)[0])
            expected = torch.func.jvp(lambda p: call(p)[0], (at,), (v,))[1]
    torch.testing.assert_close(tangent[0], expected)


def test_addmm_has_torchs_derivative() -> None:
    gen = torch.Generator().manual_seed(0)
    shapes = {"b": (5,), "x": (3, 4), "w": (4, 5)}
    at = {k: torch.randn(s, generator=gen, dtype=torch.float64) for k, s in shapes.items()}
    v = {k: torch.randn(s, generator=gen, dtype=torch.float64) for k, s in shapes.items()}

    def call(p: dict[str, Tensor]) -> list[Tensor]:
        return [torch.addmm(p["b"], p["x"], p["w"])]

    with torch.no_grad():
        value, tangent = evaluate_dual(call, at, v)
    torch.testing.assert_close(value[0], call(at)[0])
    torch.testing.assert_close(tangent[0], torch.func.jvp(lambda p: call(p)[0], (at,), (v,))[1])
