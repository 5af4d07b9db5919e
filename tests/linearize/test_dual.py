"""Operations done by hand agree with torch's own forward mode."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.linearize.dual import _RULES, evaluate_dual

GEN = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GEN, dtype=torch.float64)


W, B = randn(3, 2, 3, 3), randn(3)
X = randn(4, 2, 6, 6)
MEAN, VAR = randn(3), randn(3).abs() + 0.5

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

    with Watch():
        nn.BatchNorm2d(3)(nn.Conv2d(2, 3, 3)(X.float()))
        nn.Conv1d(2, 3, 3)(torch.randn(1, 2, 5))
        nn.Conv3d(2, 3, 1)(torch.randn(1, 2, 5, 5, 5))
        nn.Embedding(5, 2)(torch.tensor([1]))
        nn.Linear(2, 2)(torch.randn(1, 2))
    assert set(_RULES) <= seen
