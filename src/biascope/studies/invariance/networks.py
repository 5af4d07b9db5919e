"""The architectures of the paper, as its experiments use them.

Two hidden layers of 100 for the MLP, average pooling in LeNet, ReLU (GELU in the ViT). Initialisation is torch's own,
except in VGG11, whose convolutions have weights N(0, 2 / fan out) and biases 0 (He's, as in the NAD work), and for the
class token and the positions of the ViT, N(0, 0.02^2).
Normalisation layers stay in for synthetic data and are removed for real data. The geometry at initialisation is
estimated with GELU. "-narrow" and "-small" are the same designs made small enough for a laptop.

Studies also take the user's own networks (`module:factory`), as they are: their activations and normalisation stay in,
and so does their output layer, of which G has one gradient per network.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from biascope import nets
from biascope.ensembles import Factory
from biascope.errors import InputError
from biascope.studies.own_networks import own_classifier, own_factory


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
    """A function that builds the network `net` for inputs of shape (channels, side, side); own networks as they are.

    Example:
        >>> import torch
        >>> factory("lenet", (1, 16, 16), outputs=2)()(torch.zeros(3, 1, 16, 16)).shape
        torch.Size([3, 2])
    """
    check([net])
    if is_own(net):  # whether it fits has been found out by `shape_of`
        return own_factory(net.spec if isinstance(net, Own) else net)
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
    unknown = [name for name in names if name not in DESIGNS and not is_own(name)]
    if unknown or not names:
        raise InputError(
            f"nets={','.join(names) or '(none)'}: choose from {', '.join(DESIGNS)}, or name your own as module:factory "
            "or script.py:factory"
        )


def shape_of(channels: int, side: int, names: Sequence[str], outputs: int = 2) -> tuple[int, int, int]:
    """The input shape, after checking that every network can be built for it; own ones are tried out on an image."""
    shape = (channels, side, side)
    for name in names:
        if is_own(name):
            own_classifier(name.spec if isinstance(name, Own) else name, shape, outputs, exactly=True)
        else:
            factory(name, shape)()
    return shape


# ---- the user's own networks ----


class Own(str):
    """An own network: what it is called in files, figures and random streams, and the `spec` that builds it.

    A script goes without its folder: names stay short, and results do not depend on where it lies.

    Example:
        >>> net = Own("/home/me/nets.py:cnn")
        >>> net, net.spec
        ('nets.py:cnn', '/home/me/nets.py:cnn')
    """

    spec: str

    def __new__(cls, spec: str) -> "Own":
        """The short name of `module:factory` or `script.py:factory`."""
        where, _, name = spec.rpartition(":")
        made = super().__new__(cls, f"{Path(where).name}:{name}" if where.endswith(".py") else spec)
        made.spec = spec
        return made


def is_own(net: str) -> bool:
    """Whether a name is that of an own network.

    Example:
        >>> is_own("nets.py:cnn"), is_own("lenet")
        (True, False)
    """
    return ":" in net


def is_a(net: str, *designs: str) -> bool:
    """Whether a network is of the paper and of one of these designs, in any size.

    Example:
        >>> is_a("resnet18-narrow", "resnet", "vit"), is_a("resnet.py:build", "resnet")
        (True, False)
    """
    return not is_own(net) and net.startswith(designs)


def named(nets: Sequence[str]) -> tuple[str, ...]:
    """Networks by the names they have in results: own ones without their folder (see `Own`).

    Example:
        >>> named(["lenet", "models/nets.py:cnn"])
        ('lenet', 'nets.py:cnn')
    """
    made = tuple(Own(net) if is_own(net) and not isinstance(net, Own) else net for net in nets)
    for i, net in enumerate(made):
        if is_own(net) and net in made[:i]:
            raise InputError(f"nets={','.join(nets)}: two networks are called {net}; rename a script or a factory")
    return made


def as_they_are(nets: Sequence[str]) -> str:
    """A sentence for `measured` on own networks; nothing where there are none.

    Example:
        >>> as_they_are(["lenet", "nets.py:cnn"])
        ' Not of the paper and taken as it is, with its own activations, normalisation and output layer: nets.py:cnn.'
    """
    own = [net for net in nets if is_own(net)]
    they = "it is, with its" if len(own) == 1 else "they are, with their"
    layers = "output layer" if len(own) == 1 else "output layers"
    what = f" Not of the paper and taken as {they} own activations, normalisation and {layers}: {', '.join(own)}."
    return what if own else ""
