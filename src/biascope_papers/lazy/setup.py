"""What these studies train on and how: images and networks by name, at every size, and the regimes of training."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from biascope import InputError, data, nets
from biascope.data import Dataset
from biascope.support import derive
from biascope_papers.lazy.training import Setting, Trajectory, Watched, train

Factor = Annotated[float, "ratio of successive losses at which the groups are measured"]


def standardised(name: str, n: int, extra: int, seed: int, device: str) -> tuple[Dataset, Dataset]:
    """n training and `extra` held-out examples of the official training set, in seeded random order, standardised by
    the channel statistics of the first, on the device.
    """
    whole = load(name, "train")
    if n + extra > len(whole):
        raise InputError(f"{name} has {len(whole)} training images; asked for {n} + {extra}")
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))[: n + extra]
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
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))[:n]
    return data.normalise(whole.subset(order), like.info["mean"].cpu(), like.info["std"].cpu()).to(device)


def network(name: str, x: Tensor, outputs: int, width: int, depth: int, init: str, seed: int | None) -> nn.Module:
    """An untrained network for images x [n, c, s, s], on their device, in eval mode, without batch norm or dropout.

    `width`: hidden units (mlp) or channels of the first stage (64 is the published one); `depth`: hidden layers of the
    mlp. `init`: "torch" (the thesis), or "he", with which narrow deep networks learn at all (MLP and LeNet know only
    "torch").
    """
    options: dict[str, Any] = {"outputs": outputs}
    if name == "mlp":
        options |= {"in_features": math.prod(x.shape[1:]), "hidden": (width,) * depth}
    else:
        options |= {"in_channels": x.shape[1], "image_size": x.shape[2]}
    if name == "resnet18-nobn":
        options |= {"width": width, "init": "bn_free" if init == "he" else "default"}
    if name == "vgg11-nobn":
        options |= {"width": width, "init": "fan_in" if init == "he" else "default", "hidden": (), "dropout": 0.0}
    return nets.build(name, seed=seed, **options).to(x.device).eval()


@dataclass(frozen=True)
class ImageTask:
    """Images and the network that learns them: options of the studies on images."""

    dataset: Annotated[str, "digits, digits32, mnist, fashion-mnist or cifar10"] = "digits"
    n: Annotated[int, "training examples"] = 1000
    net: Annotated[Literal["mlp", "lenet", "resnet18-nobn", "vgg11-nobn"], "the network, without batch norm"] = "mlp"
    width: Annotated[int, "units of a hidden layer, or channels of the first stage (64 in the paper)"] = 64
    depth: Annotated[int, "hidden layers of the mlp"] = 4
    init: Annotated[Literal["torch", "he"], "torch (the paper), or he, with which narrow ones learn"] = "torch"
    lin: Annotated[int, "examples for the linearity metrics, 0 for none"] = 20

    @property
    def network(self) -> str:
        """The network in words, with what differs from the published one (64 channels, torch's initialisation)."""
        if self.net in ("mlp", "lenet"):  # a LeNet has one size; that of an MLP is no deviation from anything
            return self.net
        he = " with He initialisation" * (self.init == "he")
        return self.net + f" of width {self.width}" * (self.width != 64) + he

    def __str__(self) -> str:
        return f"{self.network} on {self.n} examples of {self.dataset}"

    def train(
        self, examples: Dataset, watched: Watched, lin: Tensor, setting: Setting, seed: int, outputs: int = 10
    ) -> Trajectory:
        """One training; networks of one seed share their start and the order of the batches."""
        net = network(self.net, examples.x, outputs, self.width, self.depth, self.init, derive(seed, "init"))
        own = lin[: self.lin] if self.lin else None
        return train(net, examples.x, examples.y, watched, setting, derive(seed, "order"), own)


@dataclass(frozen=True)
class Pace:
    """What the trainings of a study have in common."""

    batch: Annotated[int, "examples per step"] = 125
    stop: Annotated[float, "training loss at which a run ends"] = 0.05
    seeds: Annotated[int, "initialisations"] = 3
    capture: Annotated[bool, "replay a CUDA graph, on CUDA"] = True

    def setting(self, alpha: float, lr: float, steps: int, factor: float, every: int = 20) -> Setting:
        """One training, with momentum 0.9."""
        return Setting(alpha, lr, 0.9, self.batch, steps, self.stop, factor, every, capture=self.capture)


@dataclass(frozen=True)
class Regimes(Pace):
    """Regimes that differ in alpha alone."""

    alphas: Annotated[tuple[float, ...], "the non-linear and the linear regime (the largest alpha)"] = (1.0, 100.0)
    lr: Annotated[float, "learning rate of the plain network"] = 0.01
    steps: Annotated[tuple[int, ...], "steps at most, one number per alpha"] = (2000, 8000)

    def settings(self, factor: float, every: int = 20, kind: str = "") -> dict[str, Setting]:
        """One training per alpha, by label."""
        return {
            f"{kind}alpha = {alpha:g}": self.setting(alpha, self.lr, steps, factor, every)
            for alpha, steps in zip(self.alphas, self.steps, strict=True)
        }


REGIMES = Regimes()
