"""What is known of a network from its first examples is used again only for calls of the same kind."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.support.errors import InputError, UnsupportedError


class Arms(nn.Module):
    """Which layer works is told by the name of the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
        return self.right(x * right) if left is None else self.left(x * left)


class DropPath(nn.Module):
    """Chance that no layer of torch brings in, as in ConvNeXt; it leaves out one example in a thousand."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.line, self.noise = nn.Linear(3, 2), noise

    def forward(self, x: Tensor) -> Tensor:
        out = self.line(x)
        if self.training:
            out = out * (torch.rand(len(x), 1) > 0.001)
        return out + self.noise * torch.randn(len(x), 2)


@pytest.mark.parametrize("call", [bs.ntk, bs.fisher, lambda net, x: bs.Jacobian(net, x).coverage()])
def test_chance_that_strikes_rarely_is_refused(call: Callable[[nn.Module, Tensor], object]) -> None:
    """It was seen only where it struck the first three examples; else kernels were those of thinned-out networks."""
    net, x = DropPath(), torch.ones(4, 3)
    with pytest.raises(UnsupportedError, match=r"it draws random numbers in train mode; call \.eval\(\) first$"):
        call(net, x)
    call(net.eval(), x)  # numbers that are drawn and not used are no chance
    with pytest.raises(UnsupportedError, match="different outputs for the same inputs: switch off what is random"):
        call(DropPath(0.1).eval(), x)


def test_other_keywords_are_looked_at_anew() -> None:
    """They were taken for the first ones: "another path", or torch's own TypeError for a name that forward lacks."""
    net, x = Arms().double(), torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = 2 * x
    inner = ((x * z) @ (x * z).T + 1) * 2  # two outputs, each with weights and a bias
    for arm in ("left", "right"):
        assert torch.allclose(bs.ntk(net, {"x": x, arm: z}, outputs="trace").tensor, inner)
    with pytest.raises(InputError, match="a dict holds the keyword arguments of forward"):
        bs.ntk(net, {"x": x, "middle": z}, outputs="trace")


@pytest.mark.parametrize("period", [1, 5, 2**20])
def test_a_wrong_rule_is_found_out(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cotangents: a rule that is right stays."""
    from biascope.network.layers import pilot, rules

    monkeypatch.setattr(pilot, "PERIOD", period)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    assert {r.handled_by for r in bs.Jacobian(net, x).coverage().rows} == {"layer rule"}
    right = rules.Linear.weight_rows

    def wrong(self: rules.Linear, a: Tensor, g: Tensor) -> Tensor:
        return right(self, a, g) * (2 if a.shape[-1] == 4 else 1)

    monkeypatch.setattr(rules.Linear, "weight_rows", wrong)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    found = {r.parameter: r.handled_by for r in bs.Jacobian(net, x).coverage().rows}
    assert found["2.weight"] == "autograd fallback"
    assert found["0.weight"] == found["2.bias"] == "layer rule"
