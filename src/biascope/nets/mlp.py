"""Multilayer perceptron, in the standard and in the NTK parametrisation."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from biascope.signatures import checked

from .parts import Activation, Scale, check_choice, check_sizes, make_activation
from .registry import register

_COORDS = "ReLU network on coordinates, 4 hidden layers of 256: the baseline of the implicit representations"


@register("mlp", summary="3 hidden layers of 500", input_shape=(1, 32, 32))
@register("mlp-ntk", summary="3 x 500, NTK parametrisation", input_shape=(1, 32, 32), parametrization="ntk")
@register("relu-coords", summary=_COORDS, input_shape=(2,), in_features=2, hidden=(256,) * 4, flatten=False)
class MLP(nn.Module):
    """Linear layers with an activation between them: [n, ...] -> [n, outputs].

    `parametrization="standard"`: torch's own initialisation. `"ntk"`: z_l = h(W_l z_{l-1} / sqrt(F_{l-1}) + b_l) with
    every entry of W_l and b_l drawn from N(0, 1). Erratum: the paper (Eq. 2.7) prints the layer's output width F_l and
    leaves the last layer unscaled; that does not converge as the width grows, so the fan-in F_{l-1} scales every layer.

    `flatten=False` acts on the last axis instead ([..., in_features] -> [..., outputs]), for grids of coordinates.

    Example:
        >>> import torch
        >>> digits = MLP(in_features=784, hidden=(512, 512), outputs=10, activation="gelu")
        >>> digits(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """

    @checked
    def __init__(
        self,
        *,
        in_features: int = 1024,
        hidden: Sequence[int] = (500, 500, 500),
        outputs: int = 1,
        activation: Activation = "relu",
        parametrization: str = "standard",
        bias: bool = True,
        flatten: bool = True,
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, hidden=hidden, outputs=outputs)
        check_choice("parametrization", parametrization, ("standard", "ntk"))
        self.flatten = flatten
        self.layers = nn.Sequential()
        for index, (fan_in, fan_out) in enumerate(pairwise((in_features, *hidden, outputs)), start=1):
            if index > 1:
                self.layers.add_module(f"act{index - 1}", make_activation(activation))
            linear = nn.Linear(fan_in, fan_out, bias=bias)
            if parametrization == "ntk":
                for parameter in linear.parameters():
                    nn.init.normal_(parameter)
                # W (z / sqrt(fan_in)) + b: scaling the input keeps the layer an ordinary nn.Linear
                self.layers.add_module(f"scale{index}", Scale(fan_in**-0.5))
            self.layers.add_module(f"fc{index}", linear)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] -> [n, outputs], or [..., in_features] -> [..., outputs] with flatten=False."""
        out: Tensor = self.layers(x.flatten(1) if self.flatten else x)
        return out
