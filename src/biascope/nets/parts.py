"""Small parts shared by the networks: activations by name, normalisation by name, option checks."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from biascope.arguments import check_count
from biascope.errors import InputError

Activation = str | Callable[[], nn.Module]
"""What every network takes as `activation`: a name of `ACTIVATIONS`, or anything that builds a module when called."""


class Sine(nn.Module):
    """z -> sin(frequency * z), elementwise. The frequency stands inside the sine and is not trained.

    Example:
        >>> Sine(30.0)(torch.zeros(2))
        tensor([0., 0.])
    """

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
    """z -> factor * z. A layer of its own, so that the linear layer behind it stays a plain `nn.Linear`.

    Example:
        >>> Scale(0.5)(torch.ones(2))
        tensor([0.5000, 0.5000])
    """

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
    """A fresh activation module: one per place in the network, never shared and never in-place.

    Example:
        >>> make_activation("gelu")
        GELU(approximate='none')
    """
    if isinstance(activation, str):
        check_choice("activation", activation, ACTIVATIONS)
        return ACTIVATIONS[activation]()
    module = activation()
    if not isinstance(module, nn.Module):
        raise InputError(
            f"activation={activation!r} built a {type(module).__name__}, not an nn.Module: "
            f"give a name ({', '.join(ACTIVATIONS)}) or a class such as nn.Tanh"
        )
    return module


def make_norm2d(norm: str, channels: int) -> nn.Module:
    """`norm="batch"`: BatchNorm2d; `norm="none"`: nothing.

    Example:
        >>> make_norm2d("none", 8)
        Identity()
    """
    check_choice("norm", norm, ("batch", "none"))
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.Identity()


def make_pool2d(pool: str) -> nn.Module:
    """`pool="max"` or `"avg"`: 2x2 pooling that halves the side; `"none"`: nothing.

    Example:
        >>> make_pool2d("none")
        Identity()
    """
    check_choice("pool", pool, ("max", "avg", "none"))
    if pool == "none":
        return nn.Identity()
    return nn.MaxPool2d(2) if pool == "max" else nn.AvgPool2d(2)


def check_choice(option: str, value: object, choices: Collection[object]) -> None:
    """Refuse a value that is not among the choices, and name them.

    Example:
        >>> check_choice("pool", "max", ("max", "avg"))
    """
    if value not in choices:
        raise InputError(f"{option}={value!r} is not known; choose one of {', '.join(repr(c) for c in choices)}")


def check_sizes(**sizes: int | Sequence[int]) -> None:
    """Refuse widths, channels and other extents below 1, by name.

    Example:
        >>> check_sizes(in_features=2, hidden=(256, 0))
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: hidden[1] must be at least 1, not 0
    """
    for name, size in sizes.items():
        if isinstance(size, int):
            check_count(size, name)
        else:
            for i, one in enumerate(size):
                check_count(one, f"{name}[{i}]")
