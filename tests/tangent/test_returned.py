"""Networks that return a dataclass of their own are linearised like those that return its tensors."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from tangent.linearize_zoo import mlp


@dataclass
class Answer:
    logits: Tensor
    cache: Tensor | None = None
    steps: int = 1
    shown: str = field(default="", init=False)


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.net(x), steps=3)


@pytest.mark.parametrize("engine", ["vjp", "jvp"])
def test_a_dataclass_comes_back_with_its_tensors_linearised(engine: str) -> None:
    plain = mlp().double()
    net = Answering().double()
    net.net.load_state_dict(plain.state_dict())
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lin, reference = bs.linearize(net, engine=engine), bs.linearize(plain, engine=engine)
    with torch.no_grad():
        for p, q in zip(lin.parameters(), reference.parameters()):
            p.add_(0.1)
            q.add_(0.1)
    out = lin(x)
    assert isinstance(out, Answer)
    assert (out.cache, out.steps) == (None, 3)
    torch.testing.assert_close(out.logits, reference(x), rtol=1e-12, atol=1e-12)
    out.logits.sum().backward()
    assert all(p.grad is not None for p in lin.parameters())
