"""What is known of a network from its first examples is used again only for calls of the same kind."""

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.errors import InputError, UnsupportedError


class Arms(nn.Module):
    """Which layer works is told by the name of the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
        return self.right(x * right) if left is None else self.left(x * left)


class DropPath(nn.Module):
    """Chance that no layer of torch brings in, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * (torch.rand(len(x), 1) if self.training else 1.0)


def test_chance_of_train_mode_is_told_how_to_end() -> None:
    net, x = DropPath(), torch.ones(4, 3)
    with pytest.raises(UnsupportedError, match=r"different outputs .* it is in train mode: call \.eval\(\) first$"):
        bs.ntk(net, x)
    assert bs.ntk(net.eval(), x).tensor.shape == (4, 2, 4, 2)


def test_other_keywords_are_looked_at_anew() -> None:
    """They were taken for the first ones: "another path", or torch's own TypeError for a name that forward lacks."""
    net, x = Arms().double(), torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = 2 * x
    inner = ((x * z) @ (x * z).T + 1) * 2  # two outputs, each with weights and a bias
    for arm in ("left", "right"):
        assert torch.allclose(bs.ntk(net, {"x": x, arm: z}, outputs="trace").tensor, inner)
    with pytest.raises(InputError, match="a dict holds the keyword arguments of forward"):
        bs.ntk(net, {"x": x, "middle": z}, outputs="trace")
