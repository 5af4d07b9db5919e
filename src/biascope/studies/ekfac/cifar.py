"""VGG-11 and a ResNet without normalisation on CIFAR-10, as problems for the contests of chapter 4.

KFAC and EKFAC treat convolutions as spatially uncorrelated (SUA); EKFAC has the damping for deep networks (App. A.4).
The networks they and plain SGD train have no batch normalisation; "SGD + momentum + BN" trains the same network with
it. ResNets without normalisation begin as App. A.3 says.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import data, nets
from biascope.errors import InputError
from biascope.precision import arithmetic
from biascope.studies.ekfac import contest
from biascope.studies.ekfac.contest import Outcome, Problem, Setting
from biascope.studies.runs import Run

Network = Literal["vgg11", "resnet34"]
FAMILY = ("ekfac", "ekfac-ra", "kfac")
SIDE = 32
STARTS = {
    "ekfac": (1e-2, 1e-2),
    "ekfac-ra": (1e-2, 1e-2),
    "kfac": (1e-2, 1e-2),
    "sgd": (0.03, 0.9),
    "sgd-bn": (0.1, 0.9),
    "adam": (1e-3, 1e-8),
}
"""Learning rate and damping (momentum, epsilon) where the walks begin: in the paper's decades; usual values for SGD."""


def pictures(dataset: str, n: int, run: Run) -> tuple[Tensor, Tensor]:
    """The first n training images [n, c, 32, 32], channels with mean 0 and variance 1, and labels, on the device."""
    found = data.load(dataset, "train")
    x = found.x[:n].to(run.device)
    if x.shape[-1] != SIDE:
        x = F.interpolate(x, (SIDE, SIDE), mode="nearest")
    x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    return x, found.y[:n].to(run.device)


def build(network: str, seed: int, normed: bool, width: int, channels: int) -> nn.Module:
    """A network with or without batch normalisation; `width` channels in the first stage (64 in the paper)."""
    norm = "batch" if normed else "none"
    shape: dict[str, Any] = {"in_channels": channels, "outputs": 10, "width": width, "norm": norm}
    if network == "vgg11":
        return nets.build("vgg11", seed=seed, hidden=(), dropout=0.0, init="fan_in", **shape)
    if network == "resnet34":
        return nets.build("resnet34", seed=seed, init="default" if normed else "bn_free", **shape)
    raise InputError(f"network={network!r}: vgg11 or resnet34")


def problem(run: Run, network: str, dataset: str, n: int, width: int, momentum: float) -> Problem:
    """Classify n images by cross-entropy."""
    x, y = pictures(dataset, n, run)

    def make(seed: int, normed: bool) -> nn.Module:
        return build(network, seed, normed, width, x.shape[1])

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    share = y[: contest.LOOK].bincount(minlength=10) / len(y[: contest.LOOK])
    plateau = float(torch.special.entr(share).sum())
    return Problem(make, loss, x, y, {"sua": True, "momentum": momentum}, {"damping_mode": "deep"}, plateau)


def frames(
    names: tuple[str, ...], n: int, epochs: float, size: int, plain: int, refresh: int, looks: int, halve: float = 0.0
) -> dict[str, Setting]:
    """The same number of epochs for everyone: batches of `size` for the KFAC family, of `plain` for the others."""
    out = {}
    for name in names:
        batch = min(n, size if name in FAMILY else plain)
        steps = max(1, round(epochs * n / batch))
        out[name] = Setting(
            name,
            *contest.beginning(STARTS, name),
            batch,
            steps,
            refresh,
            max(1, steps // looks),
            max(1, round(halve * n / batch)) if halve else 0,
        )
    return out


@dataclass(frozen=True)
class OnCifar:
    """Options of the contests on CIFAR-10."""

    dataset: Annotated[Literal["digits", "cifar10"], "images to classify"] = "cifar10"
    n: Annotated[int, "training images"] = 5000
    width: Annotated[int, "channels of the first stage; 64 in the paper"] = 16
    epochs: Annotated[float, "epochs of every training"] = 10.0
    refresh: Annotated[int, "iterations between refreshes"] = 500
    trials: Annotated[int, "trainings of the search, per optimiser"] = 14
    trial: Annotated[float, "share of the epochs in a training of the search"] = 0.5
    looks: Annotated[int, "evaluations along a training"] = 10
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3
    momentum: Annotated[float, "of KFAC and EKFAC (the paper does not say)"] = 0.0
    tf32: Annotated[bool, "let the GPU use tf32"] = True

    def problem(self, run: Run, network: str) -> Problem:
        """Classify the images with a network."""
        return problem(run, network, self.dataset, self.n, self.width, self.momentum)

    def hold(
        self, run: Run, task: Problem, names: tuple[str, ...], size: int, plain: int, halve: float = 0.0
    ) -> Outcome:
        """A contest with batches of `size` for the KFAC family, of `plain` for the others."""
        own = frames(names, len(task.x), self.epochs, size, plain, self.refresh, self.looks, halve)
        with arithmetic("tf32" if self.tf32 else "float32"):
            return contest.hold(run, task, own, self.trials, self.seeds, self.trial)


ON_CIFAR = OnCifar()
