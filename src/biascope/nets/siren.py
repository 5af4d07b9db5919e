"""SIREN: a network of sines for coordinates."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from biascope.arguments import check_number
from biascope.signatures import checked

from .parts import Sine, check_sizes
from .registry import register


@register("siren", summary="sine network on coordinates, 4 hidden layers of 256", input_shape=(2,))
class SIREN(nn.Module):
    """sin(w0 (W_0 r + b_0)), then layers sin(w_h (W z + b)), then a linear layer: [..., in_features] -> [..., outputs].

    Weights: first layer U(-1/d, 1/d), d = in_features; the others, the last included, U(-c, c) with
    c = sqrt(6 / fan_in) / w_h. Biases as torch draws them. Both frequencies stand inside the sine, so the weights keep
    this scale whatever w0 is. `output_offset` is added to the output (0.5 for images in [0, 1]).

    Example:
        >>> import torch
        >>> image = SIREN(in_features=2, outputs=3, w0=30.0, output_offset=0.5)
        >>> image(torch.zeros(8, 8, 2)).shape
        torch.Size([8, 8, 3])
    """

    @checked
    def __init__(
        self,
        *,
        in_features: int = 2,
        hidden: Sequence[int] = (256, 256, 256, 256),
        outputs: int = 1,
        w0: float = 30.0,
        w_h: float = 30.0,
        output_offset: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, hidden=hidden, outputs=outputs)
        check_number(w0, "w0", above=0)
        check_number(w_h, "w_h", above=0)
        check_number(output_offset, "output_offset")
        self.output_offset = output_offset
        self.layers = nn.Sequential()
        for index, (fan_in, fan_out) in enumerate(pairwise((in_features, *hidden, outputs)), start=1):
            first, last = index == 1, index == len(hidden) + 1
            linear = nn.Linear(fan_in, fan_out)
            bound = 1 / fan_in if first else math.sqrt(6 / fan_in) / w_h
            nn.init.uniform_(linear.weight, -bound, bound)
            self.layers.add_module(f"fc{index}", linear)
            if not last:
                self.layers.add_module(f"sine{index}", Sine(w0 if first else w_h))

    def forward(self, r: Tensor) -> Tensor:
        """[..., in_features] -> [..., outputs]."""
        out: Tensor = self.layers(r) + self.output_offset
        return out
