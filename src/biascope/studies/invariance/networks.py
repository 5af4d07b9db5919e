"""The architectures of the paper, as its experiments use them.

Two hidden layers of 100 for the MLP, average pooling in LeNet, ReLU (GELU in the ViT). Initialisation is torch's own,
except in VGG11, whose convolutions have weights N(0, 2 / fan out) and biases 0 (He's, as in the NAD work), and for the
class token and the positions of the ViT, N(0, 0.02^2).
Normalisation layers stay in for synthetic data and are removed for real data. The geometry at initialisation is
estimated with GELU. "-narrow" and "-small" are the same designs made small enough for a laptop.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from biascope import nets
from biascope.ensembles import Factory
from biascope.errors import InputError


@dataclass(frozen=True)
class Design:
    """A name of the registry, options, and what its normalisation is called (None: it has none)."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    norm: str | None = None


DESIGNS = {
    "mlp": Design("mlp", {"hidden": (100, 100)}),
    "lenet": Design("lenet-avg"),
    "lenet-small": Design("lenet-small"),
    "resnet18": Design("resnet18", norm="batch"),
    "resnet18-narrow": Design("resnet18", {"width": 8}, "batch"),
    "vit": Design("vit", norm="layer"),
    "vit-small": Design("vit", {"depth": 3, "heads": 4, "width": 64, "mlp": 128}, "layer"),
    "vgg11": Design("vgg11", {"dropout": 0.0}, "batch"),
    "vgg11-narrow": Design("vgg11", {"dropout": 0.0, "width": 8, "hidden": (64, 64)}, "batch"),
}
ISOTROPIC = ("mlp",)
"""Nets without preferred directions: the paper expects nothing to depend on the direction for them."""


def factory(
    net: str, shape: Sequence[int], *, outputs: int = 2, norm: bool = True, activation: str | None = None
) -> Factory:
    """A function that builds the network `net` for inputs of shape (channels, side, side).

    Example:
        >>> import torch
        >>> factory("lenet", (1, 16, 16), outputs=2)()(torch.zeros(3, 1, 16, 16)).shape
        torch.Size([3, 2])
    """
    check([net])
    design = DESIGNS[net]
    options = {**design.options, "outputs": outputs}
    if design.name == "mlp":
        options["in_features"] = math.prod(shape)
    else:
        options |= {"in_channels": shape[0], "image_size": shape[1]}
    if design.norm is not None:
        options["norm"] = design.norm if norm else "none"
    if activation is not None:
        options["activation"] = activation
    return lambda: nets.build(design.name, **options)


def check(names: Sequence[str]) -> None:
    """Refuse names that are not in the list, before any work is done."""
    unknown = [name for name in names if name not in DESIGNS]
    if unknown or not names:
        raise InputError(f"nets={','.join(names) or '(none)'}: choose from {', '.join(DESIGNS)}")


def shape_of(channels: int, side: int, names: Sequence[str]) -> tuple[int, int, int]:
    """The input shape, after checking that every network can be built for it."""
    for name in names:
        factory(name, (channels, side, side))()
    return (channels, side, side)
