"""The architectures of the paper, as its experiments use them; "-narrow" and "-small" are made small enough for a
laptop.

Two hidden layers of 100 for the MLP, average pooling in LeNet, ReLU (GELU in the ViT). Initialisation is torch's own,
except in VGG11, whose convolutions have weights N(0, 2 / fan out) and biases 0, and for the class token and the
positions of the ViT, N(0, 0.02^2). Normalisation layers stay in for synthetic data and are removed for real data.
Studies also take the user's own networks (`module:factory`), as they are.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from biascope import InputError, nets
from biascope.ensembles import Factory
from biascope.studies.own_networks import own_classifier, own_factory

DESIGNS: dict[str, tuple[str, dict[str, Any], str | None]] = {  # name in the registry, options, kind of normalisation
    "mlp": ("mlp", {"hidden": (100, 100)}, None),
    "lenet": ("lenet-avg", {}, None),
    "lenet-small": ("lenet-small", {}, None),
    "resnet18": ("resnet18", {}, "batch"),
    "resnet18-narrow": ("resnet18", {"width": 8}, "batch"),
    "vit": ("vit", {}, "layer"),
    "vit-small": ("vit", {"depth": 3, "heads": 4, "width": 64, "mlp": 128}, "layer"),
    "vgg11": ("vgg11", {"dropout": 0.0}, "batch"),
    "vgg11-narrow": ("vgg11", {"dropout": 0.0, "width": 8, "hidden": (64, 64)}, "batch"),
}
ISOTROPIC = ("mlp",)  # without preferred directions: the paper expects nothing to depend on the direction for them


def factory(
    net: str, shape: Sequence[int], *, outputs: int = 2, norm: bool = True, activation: str | None = None
) -> Factory:
    """A function that builds the network `net` for inputs of shape (channels, side, side); own networks as they are."""
    if is_own(net):  # `shape_of` has found out whether it fits
        return own_factory(net.spec if isinstance(net, Own) else net)
    name, design, layers = DESIGNS[net]
    options = {**design, "outputs": outputs}
    if name == "mlp":
        options["in_features"] = math.prod(shape)
    else:
        options |= {"in_channels": shape[0], "image_size": shape[1]}
    if layers is not None:
        options["norm"] = layers if norm else "none"
    if activation is not None:
        options["activation"] = activation
    return lambda: nets.build(name, **options)


def shape_of(channels: int, side: int, names: Sequence[str], outputs: int = 2) -> tuple[int, int, int]:
    """The input shape, once every network is known to take it; own ones are tried on an image."""
    shape = (channels, side, side)
    if not names or any(name not in DESIGNS and not is_own(name) for name in names):
        raise InputError(
            f"nets={','.join(names) or '(none)'}: choose from {', '.join(DESIGNS)}, or name your own as module:factory "
            "or script.py:factory"
        )
    for name in names:
        if is_own(name):
            own_classifier(name.spec if isinstance(name, Own) else name, shape, outputs, exactly=True)
        else:
            factory(name, shape)()
    return shape


def at_least(least: float, **options: float) -> None:
    """Refuse options below a bound, by name."""
    for name, value in options.items():
        if value < least:
            raise InputError(f"{name} must be at least {least:g}, not {value:g}")


# ---- the user's own networks, and what a run has not tried ----


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
    """Whether a name is that of an own network."""
    return ":" in net


def is_a(net: str, *designs: str) -> bool:
    """Whether a network is of the paper and of one of these designs, in any size."""
    return not is_own(net) and net.startswith(designs)


def named(nets: Sequence[str]) -> tuple[str, ...]:
    """Networks by the names they have in results: own ones without their folder (see `Own`)."""
    made = tuple(Own(net) if is_own(net) and not isinstance(net, Own) else net for net in nets)
    for i, net in enumerate(made):
        if is_own(net) and net in made[:i]:
            raise InputError(f"nets={','.join(nets)}: two networks are called {net}; rename a script or a factory")
    return made


def scope(**parts: tuple[Sequence[object], Sequence[object]]) -> str:
    """Sentences for `measured` on own networks, and on what the paper speaks of and a run has not tried.

    Each part is a pair: what ran, and what the paper has.

    Example:
        >>> scope(networks=(["mlp"], ["mlp", "vit"]), rates=([1], [1]))
        ' Not tested: networks vit.'
        >>> scope(networks=(["a.py:net"], []))
        ' Not of the paper and taken as it is, with its own activations, normalisation and output layer: a.py:net.'
    """
    own = [str(net) for net in parts.get("networks", ((), ()))[0] if is_own(str(net))]
    they, s = ("it is, with its", "") if len(own) == 1 else ("they are, with their", "s")
    text = (
        f" Not of the paper and taken as {they} own activations, normalisation and output layer{s}: {', '.join(own)}."
    )
    left = {name: [str(each) for each in wanted if each not in ran] for name, (ran, wanted) in parts.items()}
    missing = "; ".join(f"{name} {', '.join(names)}" for name, names in left.items() if names)
    return (text if own else "") + (f" Not tested: {missing}." if missing else "")
