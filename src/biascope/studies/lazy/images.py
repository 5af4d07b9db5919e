"""The images and networks of these studies, by name, at every size."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from biascope import data, nets
from biascope.data import Dataset
from biascope.errors import InputError

NETS = ("mlp", "lenet", "resnet18-nobn", "vgg11-nobn")


def standardised(name: str, n: int, extra: int, seed: int, device: str) -> tuple[Dataset, Dataset]:
    """n training and `extra` held-out examples of the official training set, in seeded random order, standardised by
    the channel statistics of the first, on the device.
    """
    whole = load(name, "train")
    if n + extra > len(whole):
        raise InputError(f"{name} has {len(whole)} training images; asked for {n} + {extra}")
    order = torch.randperm(len(whole), generator=data.generator(seed))[: n + extra]
    first, rest = whole.subset(order[:n]), whole.subset(order[n:])
    mean, std = data.channel_stats(first.x)
    return data.normalise(first, mean, std).to(device), data.normalise(rest, mean, std).to(device)


def load(name: str, split: Literal["train", "test"]) -> Dataset:
    """A set by name; "digits32" are the digits that ship with the library (8 x 8), every pixel repeated 4 x 4."""
    if name != "digits32":
        return data.load(name, split)
    small = data.load("digits", split)
    large = small.x.repeat_interleave(4, 2).repeat_interleave(4, 3)
    return Dataset(large, small.y, "digits32", None, small.info)


def official_test(name: str, n: int, like: Dataset, seed: int, device: str) -> Dataset:
    """n examples of the official test set, standardised as `like` was."""
    whole = load(name, "test")
    order = torch.randperm(len(whole), generator=data.generator(seed))[:n]
    return data.normalise(whole.subset(order), like.info["mean"].cpu(), like.info["std"].cpu()).to(device)


def network(name: str, x: Tensor, outputs: int, width: int, depth: int, init: str, seed: int | None) -> nn.Module:
    """An untrained network for images x [n, c, s, s], on their device, in eval mode.

    `width`: hidden units (mlp) or channels of the first stage (resnet18-nobn, vgg11-nobn; 64 is the published one);
    `depth`: hidden layers of the mlp. No batch norm, no dropout. `init`: "torch" is torch's own (the thesis); "he" has
    variances 2 / fan-in (for the ResNet the variant for networks without batch norm), with which narrow deep networks
    learn at all; MLP and LeNet know only "torch".
    """
    if name not in NETS:
        raise InputError(f"net {name!r} is not one of {', '.join(NETS)}")
    channels, side = x.shape[1], x.shape[2]
    options: dict[str, Any] = {"outputs": outputs}
    if name == "mlp":
        options |= {"in_features": math.prod(x.shape[1:]), "hidden": (width,) * depth}
    else:
        options |= {"in_channels": channels, "image_size": side}
    if name == "resnet18-nobn":
        options |= {"width": width, "init": "bn_free" if init == "he" else "default"}
    if name == "vgg11-nobn":
        options |= {"width": width, "init": "fan_in" if init == "he" else "default", "hidden": (), "dropout": 0.0}
    return nets.build(name, seed=seed, **options).to(x.device).eval()


def said(name: str, width: int, init: str) -> str:
    """A network in words, with what differs from the published one (64 channels, torch's initialisation).

    Example:
        >>> said("resnet18-nobn", 16, "he"), said("resnet18-nobn", 64, "torch"), said("lenet", 64, "torch")
        ('resnet18-nobn of width 16 with He initialisation', 'resnet18-nobn', 'lenet')
    """
    if name in ("mlp", "lenet"):  # a LeNet has one size; that of an MLP is no deviation from anything
        return name
    return name + f" of width {width}" * (width != 64) + " with He initialisation" * (init == "he")
