"""Kernels leave out positions without a gradient, and take attention apart where that lets cotangents share a pass."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs
from biascope.network.functional import functional
from biascope.network.stream import anatomy
from zoo import brute_force


class Reader(nn.Module):
    """Attention, then layers of which one position is read; which one may depend on the example."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.qkv, self.mix, self.last = nn.Linear(6, 18), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = self.last(self.mix(y).tanh())
        if self.reads == "first":
            return y[:, 0]
        if self.reads == "two":
            return y[:, 1:3].flatten(1)
        where = (x[:, 0, 0] > 100).long()  # position 0, but for what the pilot does not see
        return y[torch.arange(len(y)), where]


def exact(model: nn.Module, x: Tensor, outputs: str) -> Tensor:
    J = brute_force(model, x)
    full = torch.einsum("iap,jbp->iajb", J, J)
    return full if outputs == "full" else torch.einsum("iaja->ij", full)


@pytest.mark.parametrize("strategy", ["auto", "gram", "contract"])
@pytest.mark.parametrize("outputs", ["full", "trace"])
@pytest.mark.parametrize(("reads", "positions"), [("first", 1), ("two", 2)])
def test_values_and_positions(reads: str, positions: int, outputs: Any, strategy: Any) -> None:
    torch.manual_seed(0)
    model, x = Reader(reads), torch.randn(6, 5, 6)
    K = bs.ntk(model, x, outputs=outputs, strategy=strategy, precision="float64")
    torch.testing.assert_close(K.tensor, exact(model, x, outputs), rtol=1e-10, atol=1e-10)
    assert K.plan is not None
    looked_at = {b.block.names[0]: b.block.sizes.positions for b in K.plan.blocks if b.block.sizes is not None}
    assert looked_at == {"qkv.weight": 5, "mix.weight": positions, "last.weight": positions}


@pytest.mark.parametrize("outputs", ["full", "trace"])
def test_gradients_at_positions_that_were_left_out_are_seen(outputs: Any) -> None:
    torch.manual_seed(0)
    model, x = Reader("depends"), torch.randn(6, 5, 6)
    x[4, 0, 0] = 200.0
    first = bs.ntk(model, x[:4], outputs=outputs, precision="float64")
    torch.testing.assert_close(first.tensor, exact(model, x[:4], outputs), rtol=1e-10, atol=1e-10)
    for _ in range(2):  # when it is noticed, and when it is known
        K = bs.ntk(model, x, outputs=outputs, precision="float64")
        torch.testing.assert_close(K.tensor, exact(model, x, outputs), rtol=1e-10, atol=1e-10)
    assert all(b.block.live is None for b in K.plan.blocks)  # type: ignore[union-attr]
    cross = bs.ntk(model, x[:4], x, outputs=outputs, precision="float64")
    torch.testing.assert_close(cross.tensor, K.tensor[:4], rtol=1e-10, atol=1e-10)


def test_cross_kernels_and_chunks_notice_it_too() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 5, 6)
    x[7, 0, 0] = 200.0
    for budget in ("auto", "60kB"):
        model = Reader("depends")
        memory = None if budget == "auto" else budget
        K = bs.ntk(model, x[:6], x, outputs="trace", precision="float64", max_memory=memory)
        torch.testing.assert_close(K.tensor, exact(model, x, "trace")[:6], rtol=1e-10, atol=1e-10)


def test_attention_is_taken_apart_where_that_shares_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("biascope.network.layers.pilot.FOLDED", ("cpu",))
    monkeypatch.setattr("biascope.network.layers.record.FOLDED", ("cpu",))
    torch.manual_seed(0)
    model, x = Reader("first"), torch.randn(6, 5, 6)
    found = anatomy(f := functional(model), x)
    assert found.together is not None
    assert found.together[0].written_out
    assert found.batching().batched
    K = bs.ntk(model, x)
    assert K.plan is not None
    assert K.plan.batched
    assert float((K.tensor - exact(model, x, "full")).norm()) < 1e-5 * float(K.tensor.norm())
    assert f.certificate.anatomies  # one pilot for both


def test_attention_over_many_positions_stays_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("biascope.network.layers.pilot.FOLDED", ("cpu",))
    torch.manual_seed(0)
    model, x = Reader("first"), torch.randn(3, 400, 6)
    found = anatomy(functional(model), x)
    assert found.together is None
    assert found.batched  # a loop over attention alone
