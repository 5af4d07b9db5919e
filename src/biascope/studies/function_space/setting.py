"""Networks and image sets of the learning-complexity studies.

Networks have one output (a binary logit) and stay in eval mode from beginning to end: BatchNorm keeps its initial mean
0 and variance 1, which switches it off, so that the linearised network is the tangent of the trained one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from biascope import data, nets
from biascope.data import Dataset
from biascope.errors import InputError

NETS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"hidden": (100, 100)}),
    "lenet": ("lenet-avg", {"padding": "same"}),  # the published code's padding and pooling
    "resnet18": ("resnet18", {}),
    "resnet18-narrow": ("resnet18", {"width": 8}),
}
TITLES = {"mlp": "MLP", "lenet": "LeNet", "resnet18": "ResNet-18", "resnet18-narrow": "ResNet-18, 8 channels"}


def network(name: str, shape: Sequence[int], seed: int, device: str = "cpu") -> nn.Module:
    """A network with one output for inputs of this shape, in eval mode.

    Example:
        >>> network("lenet", (3, 32, 32), 0)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 1])
    """
    kind, options = design(name, shape)
    return nets.build(kind, seed=seed, **options).to(device).eval()


def design(name: str, shape: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """Name in the registry and options of a network with one output for inputs of this shape.

    Example:
        >>> design("resnet18-narrow", (1, 8, 8))[0]
        'resnet18'
    """
    if name not in NETS:
        raise InputError(f"no network is called {name!r} here; there is {', '.join(NETS)}")
    kind, options = NETS[name]
    return kind, options | nets.info(kind).options_for(shape) | {"outputs": 1}


def title(name: str) -> str:
    """How a network is called in charts."""
    return TITLES.get(name, name)


def images(
    name: str, split: str | None, n: int | None, seed: int, device: str = "cpu", like: Dataset | None = None
) -> Dataset:
    """n random images of a real set (all, in their own order, if n is None or too large), channels standardised.

    The channels' mean and deviation are those of `like` (the training images), if given.

    Example:
        >>> found = images("digits", "train", 100, seed=0)
        >>> found.x.shape, bool(found.x.mean().abs() < 1e-4)
        (torch.Size([100, 1, 8, 8]), True)
    """
    found = data.load(name, split, dtype=torch.uint8)  # type: ignore[arg-type]
    if n is not None and n < len(found):
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
        found = found.subset(order[:n])
    x = found.x.to(device).float()
    mean, std = (like.info["mean"], like.info["std"]) if like is not None else data.channel_stats(x)
    plain = Dataset(x, found.y.to(device), found.name, seed, {"mean": mean, "std": std})
    return data.normalise(plain, mean, std)


def two_classes(name: str, n_train: int | None, n_test: int | None, seed: int, device: str) -> tuple[Dataset, Dataset]:
    """CIFAR2 (or its likeness): y = 1 for the first five classes, 0 otherwise; training and test images.

    Example:
        >>> train, test = two_classes("digits", 200, 50, 0, "cpu")
        >>> len(train), len(test), sorted(set(train.y.tolist()))
        (200, 50, [0, 1])
    """
    train = images(name, "train", n_train, seed, device)
    test = images(name, "test", n_test, seed, device, like=train)
    return data.cifar2(train, "first-five"), data.cifar2(test, "first-five")
