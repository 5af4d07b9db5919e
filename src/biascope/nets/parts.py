"""Small parts shared by the networks: activations, normalisation and pooling by name."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from biascope.support.arguments import check_choice
from biascope.support.errors import InputError, no_network

Activation = str | Callable[[], nn.Module]
"""What every network takes as `activation`: a name of `ACTIVATIONS`, or anything that builds a module when called."""
Norm = Literal["batch", "none"]
Pool = Literal["max", "avg", "none"]


class Sine(nn.Module):
    """z -> sin(frequency * z), elementwise. The frequency stands inside the sine and is not trained."""

    def __init__(self, frequency: float = 1.0) -> None:
        super().__init__()
        self.frequency = float(frequency)

    def forward(self, z: Tensor) -> Tensor:
        """Any shape in, the same shape out."""
        return torch.sin(self.frequency * z)

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return f"frequency={self.frequency:g}"


class Scale(nn.Module):
    """z -> factor * z. A layer of its own, so that the linear layer behind it stays a plain `nn.Linear`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = float(factor)

    def forward(self, z: Tensor) -> Tensor:
        """Any shape in, the same shape out."""
        return self.factor * z

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return f"factor={self.factor:g}"


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
    "leaky_relu": nn.LeakyReLU,
    "sin": Sine,
    "identity": nn.Identity,
}


def make_activation(activation: Activation) -> nn.Module:
    """A fresh activation module: one per place in the network, never shared and never in-place."""
    if isinstance(activation, str):
        return ACTIVATIONS[check_choice(activation, "activation", ACTIVATIONS)]()
    module = activation()
    if not isinstance(module, nn.Module):
        raise InputError(f"activation={activation!r} gave {no_network(module)}, or be a name: {', '.join(ACTIVATIONS)}")
    return module


def make_norm2d(norm: Norm, channels: int) -> nn.Module:
    """`norm="batch"`: BatchNorm2d; `norm="none"`: nothing."""
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.Identity()


def make_pool2d(pool: Pool) -> nn.Module:
    """`pool="max"` or `"avg"`: 2x2 pooling that halves the side; `"none"`: nothing."""
    kinds = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}
    return kinds[pool](2) if pool in kinds else nn.Identity()
