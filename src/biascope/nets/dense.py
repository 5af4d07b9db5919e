"""Dense networks: logistic regression, the multilayer perceptron in two parametrisations, the deep auto-encoder."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from biascope.nets.parts import Activation, Scale, make_activation
from biascope.nets.registry import register
from biascope.support.limits import Count
from biascope.support.signatures import checked

_COORDS = "ReLU network on coordinates, 4 hidden layers of 256: the baseline of the implicit representations"


@register("logreg", summary="logistic regression, one linear layer", input_shape=(1, 32, 32))
class LogReg(nn.Module):
    """One linear layer on the flattened input, the isotropic control: [n, ...] -> [n, outputs]."""

    @checked
    def __init__(self, *, in_features: Count = 1024, outputs: Count = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] -> [n, outputs]."""
        out: Tensor = self.linear(x.flatten(1))
        return out


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
        in_features: Count = 1024,
        hidden: Sequence[Count] = (500, 500, 500),
        outputs: Count = 1,
        activation: Activation = "relu",
        parametrization: Literal["standard", "ntk"] = "standard",
        bias: bool = True,
        flatten: bool = True,
    ) -> None:
        super().__init__()
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


@register("autoencoder", summary="784-1000-500-250-30 and back, sigmoid, untied, 8 layers", input_shape=(1, 28, 28))
class Autoencoder(nn.Module):
    """in_features-1000-500-250-30 and its mirror image, weights untied: [n, ...] -> [n, in_features].

    The activation follows every layer but the last, the code included. The output is left as logits by default, for a
    Bernoulli loss; `output_activation="sigmoid"` gives pixel intensities. `code_activation` sets the code's apart.

    Example:
        >>> import torch
        >>> net = Autoencoder(in_features=784)
        >>> net(torch.zeros(3, 1, 28, 28)).shape, net.encoder(torch.zeros(3, 784)).shape
        (torch.Size([3, 784]), torch.Size([3, 30]))
    """

    @checked
    def __init__(
        self,
        *,
        in_features: Count = 784,
        hidden: Sequence[Count] = (1000, 500, 250, 30),
        activation: Activation = "sigmoid",
        code_activation: Activation | None = None,
        output_activation: Activation = "identity",
    ) -> None:
        super().__init__()
        down = (in_features, *hidden)
        self.encoder = _stack(down, activation, last=activation if code_activation is None else code_activation)
        self.decoder = _stack(down[::-1], activation, last=output_activation)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] -> [n, in_features], the reconstruction (as logits by default)."""
        out: Tensor = self.decoder(self.encoder(x.flatten(1)))
        return out


def _stack(widths: Sequence[int], activation: Activation, last: Activation) -> nn.Sequential:
    stack = nn.Sequential()
    for index, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        stack.add_module(f"fc{index}", nn.Linear(fan_in, fan_out))
        stack.add_module(f"act{index}", make_activation(last if index == len(widths) - 1 else activation))
    return stack
