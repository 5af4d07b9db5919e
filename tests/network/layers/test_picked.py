"""Rows picked from a batch by an index: right on data that is routed otherwise than the first examples."""

import pytest
import torch
from torch import Tensor, nn

import biascope as bs


class Masked(nn.Module):
    """A layer for the tokens under a mask, as networks without padding have."""

    def __init__(self, how: str = "mask") -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        mask = (x[..., 0] > 0).flatten()
        h = self.first(x[..., 1:]).tanh().flatten(0, 1)
        where = mask.nonzero()[:, 0]
        picked = h[mask] if self.how == "mask" else h.index_select(0, where) if self.how == "select" else h[where]
        done = self.inner(picked).tanh()
        h = h.index_add(0, where, done) if self.how == "add" else h.index_put((where,), done)
        out: Tensor = self.last(h).view(len(x), -1, 2).sum(1)
        return out


class Experts(nn.Module):
    """Both choices of every token, the first choices first: an expert's rows need not come example by example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.experts = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x[..., 1:]).tanh().flatten(0, 1)
        first = x[..., 0].flatten().long()
        chosen = nn.functional.one_hot(torch.stack([first, (first + 1) % 3]), 3)  # [2, tokens, experts]
        out = h
        for e in range(3):
            place, token = torch.where(chosen[..., e] > 0)
            out = out.index_add(
                0, token, (1.0 + place[:, None]) * nn.functional.linear(h[token], self.experts[e]).tanh()
            )
        done: Tensor = self.last(out).view(len(x), -1, 2).sum(1)
        return done


class Pooled(nn.Module):
    """The token at a place that depends on the example, as classifiers of texts read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x[..., 1:]).tanh()
        out: Tensor = self.last(h[torch.arange(len(x)), x[..., 0].argmax(1)])
        return out


def inputs(marks: list[list[int]], seed: int = 0) -> Tensor:
    """[n, T, 4]; the first feature is the mark."""
    x = torch.randn(len(marks), len(marks[0]), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[..., 0] = torch.tensor(marks)
    return x


def kernel(net: nn.Module, x: Tensor) -> Tensor:
    """By autograd, one output at a time."""
    y = net(x).flatten()
    J = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(v, [*net.parameters()], retain_graph=True)]) for v in y]
    )
    return (J @ J.T).view(len(x), 2, len(x), 2)


EVEN = [[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0]]  # two tokens of every example: like a batch of two positions


@pytest.mark.parametrize("how", ["mask", "select", "add", "put"])
def test_tokens_under_a_mask(how: str) -> None:
    torch.manual_seed(0)
    net = Masked(how).double()
    uneven = inputs([[1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 0, 1]], 1)  # as many in all, but not of every example
    for x in (inputs(EVEN), uneven):  # the first are looked at
        K = bs.ntk(net, x, precision="float64").tensor
        assert float((K - kernel(net, x)).norm() / K.norm()) < 1e-12


def test_tokens_of_experts() -> None:
    torch.manual_seed(0)
    net = Experts().double()
    same = inputs([[0, 1], [0, 1], [0, 1]])
    for x in (same, inputs([[0, 1], [1, 0], [0, 1]], 1), inputs([[0, 0], [1, 2], [2, 1]], 2)):
        K = bs.ntk(net, x, precision="float64").tensor
        assert float((K - kernel(net, x)).norm() / K.norm()) < 1e-12
    why = {r.parameter: r.why for r in bs.Jacobian(net, same).coverage().rows}
    assert "picks" in why["experts"]
    assert why["last.weight"].startswith("linear rule")  # of rows that were put back


def test_one_token_of_every_example_is_no_such_pick() -> None:
    torch.manual_seed(0)
    net = Pooled().double()
    x = inputs([[0, 1, 0], [1, 0, 0], [0, 0, 1]])
    assert {r.handled_by for r in bs.Jacobian(net, x).coverage().rows} == {"layer rule"}
    K = bs.ntk(net, x, precision="float64").tensor
    assert float((K - kernel(net, x)).norm() / K.norm()) < 1e-12
