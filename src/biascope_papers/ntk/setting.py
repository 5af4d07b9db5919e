"""Networks and image sets of the learning-complexity studies.

Networks have one output (a binary logit). As published, weights are drawn as flax does (`init=lecun`), and a network
trains with the statistics of its batches (`norm=batch`), while its kernels and linearisations have BatchNorm at its
initial mean 0 and variance 1, which switches it off. With `norm=off` it is off in the network too.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import nn

from biascope import InputError, data, nets
from biascope.data import Dataset
from biascope_papers.ntk.initial import Init, redraw

NETS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"hidden": (100, 100)}),
    "lenet": ("lenet-avg", {"padding": "same"}),  # the published code's padding and pooling
    "resnet18": ("resnet18", {}),
    "resnet18-narrow": ("resnet18", {"width": 8}),
}
TITLES = {"mlp": "MLP", "lenet": "LeNet", "resnet18": "ResNet-18", "resnet18-narrow": "ResNet-18, 8 channels"}

# options that several studies share
Net = Annotated[str, "mlp, lenet, resnet18 or resnet18-narrow"]
Nets = Annotated[tuple[str, ...], "mlp, lenet, resnet18 or resnet18-narrow"]
Images = Annotated[str, "cifar10, mnist, or digits as a stand-in"]
TwoClasses = Annotated[str, "cifar10, or digits as a stand-in (0-4 against 5-9)"]


PUBLISHED: Mapping[str, Any] = {"init": "lecun", "norm": "batch"}  # of the trainings, at any size


def network(name: str, shape: Sequence[int], seed: int, device: str = "cpu", init: Init = "torch") -> nn.Module:
    """A network with one output for inputs of this shape, in eval mode."""
    kind, options = design(name, shape)
    return redraw(nets.build(kind, seed=seed, **options), init, seed).to(device).eval()


def design(name: str, shape: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """Name in the registry and options of a network with one output for inputs of this shape."""
    if name not in NETS:
        raise InputError(f"no network is called {name!r} here; there is {', '.join(NETS)}")
    kind, options = NETS[name]
    return kind, options | nets.info(kind).options_for(shape) | {"outputs": 1}


def title(name: str) -> str:
    """How a network is called in charts."""
    return TITLES.get(name, name)


def noted(dataset: str) -> str:
    """For the text, where the images are not those of the thesis."""
    return "" if dataset == "cifar10" else f" Images: {dataset}."


def images(
    name: str, split: str | None, n: int | None, seed: int, device: str = "cpu", like: Dataset | None = None
) -> Dataset:
    """n random images of a real set (all, in their own order, if n is None or too large), channels standardised.

    The channels' mean and deviation are those of `like` (the training images), if given.
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
    """CIFAR2 (or its likeness): y = 1 for the first five classes, 0 otherwise; training and test images."""
    train = images(name, "train", n_train, seed, device)
    test = images(name, "test", n_test, seed, device, like=train)
    return data.cifar2(train, "first-five"), data.cifar2(test, "first-five")
