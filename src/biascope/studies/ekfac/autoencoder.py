"""The deep sigmoid auto-encoder on MNIST or digits, as a problem for the contests of Fig. 4.3 and 4.4.

How the weights begin is not in the paper, and decides who learns. As torch draws them, eight sigmoid layers shrink the
gradient a thousandfold: SGD and Adam without batch normalisation stay on the plateau for thousands of steps, and so
does KFAC with any constant damping that does not diverge. `init="glorot"` draws them as Glorot and Bengio advise for
sigmoids (four times their uniform range, no biases): then everybody leaves the plateau.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import nets
from biascope.studies.ekfac import contest
from biascope.studies.ekfac.common import images, reconstruction
from biascope.studies.ekfac.contest import Outcome, Problem, Setting
from biascope.studies.runs import Run


def problem(run: Run, dataset: str, n: int, hidden: tuple[int, ...], init: str = "torch") -> Problem:
    """Reconstruct n images; batch normalisation for the optimisers with "-bn" in their name."""
    x, _ = images(dataset, n, run)

    def build(seed: int, normed: bool) -> nn.Module:
        net = nets.build("autoencoder", seed=seed, in_features=x.shape[1], hidden=hidden)
        if init == "glorot":
            glorot(net, torch.Generator().manual_seed(seed))
        return normalised(net) if normed else net

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return reconstruction(net, y)

    mean = x[: contest.LOOK].mean(0).expand_as(x[: contest.LOOK])
    plateau = float(F.binary_cross_entropy(mean, x[: contest.LOOK], reduction="sum")) / len(mean)
    return Problem(build, loss, x, x, plateau=plateau)


@torch.no_grad()
def glorot(net: nn.Module, generator: torch.Generator) -> None:
    """Weights uniform within 4 sqrt(6 / (fan_in + fan_out)), biases 0: what Glorot and Bengio advise for sigmoids."""
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            bound = 4 * math.sqrt(6 / sum(layer.weight.shape))
            layer.weight.copy_((2 * torch.rand(layer.weight.shape, generator=generator) - 1) * bound)
            layer.bias.zero_()


def normalised(net: nn.Module) -> nn.Module:
    """The same auto-encoder with batch normalisation in front of every sigmoid."""
    for name, stack in net.named_children():
        new, width = nn.Sequential(), 0
        for key, layer in stack.named_children():
            if isinstance(layer, nn.Linear):
                width = layer.out_features
            elif isinstance(layer, nn.Sigmoid):
                new.add_module(key.replace("act", "norm"), nn.BatchNorm1d(width))
            new.add_module(key, layer)
        setattr(net, name, new)
    return net


STARTS = {
    "ekfac": (0.03, 1e-3),
    "ekfac-ra": (0.1, 1e-3),
    "kfac": (300.0, 1e3),
    "sgd": (0.1, 0.8),
    "adam": (0.01, 1e-6),
}
"""Learning rate and damping (momentum, epsilon) where the walks begin: what was best at the laptop size, 500 steps.

KFAC's valley lr = damping / 3 to damping / 10 has no upper end: it is as low at a damping of 1e5, where KFAC is SGD.
Its floor is bumpy, so a walk along it may stop early.
EKFAC's first steps raise the loss at nearly all good settings: they are those of the dense formula, not a defect. At
the paper's widths they raise it more, and more damping is needed: from 945, after 20 steps, EKFAC is at 3079 with
(0.01, 0.001), 1451 with (0.01, 0.01), 392 with (0.01, 0.1).
"""


@dataclass(frozen=True)
class Encoder:
    """Options of every study that trains the auto-encoder by several optimisers."""

    dataset: Annotated[Literal["digits", "mnist"], "images to encode"] = "digits"
    n: Annotated[int, "training images"] = 1437
    hidden: Annotated[tuple[int, ...], "widths of the encoder"] = (60, 30, 15)
    size: Annotated[int, "examples per batch"] = 200
    init: Annotated[Literal["torch", "glorot"], "how weights begin (not in the paper)"] = "torch"

    def problem(self, run: Run) -> Problem:
        """Reconstruct the images."""
        return problem(run, self.dataset, self.n, self.hidden, self.init)


@dataclass(frozen=True)
class Contest(Encoder):
    """Options of the contests on the auto-encoder."""

    steps: Annotated[int, "iterations of every training"] = 500
    every: Annotated[int, "iterations between evaluations"] = 10
    trials: Annotated[int, "trainings of the search, per optimiser"] = 14
    trial: Annotated[float, "share of the iterations in a training of the search"] = 1.0
    extend: Annotated[bool, "search again with twice the share while the best is on the plateau"] = False
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3

    def hold(self, run: Run, task: Problem, names: tuple[str, ...], refresh: int) -> Outcome:
        """A contest with `refresh` iterations between refreshes."""
        frames = {
            name: Setting(name, *contest.beginning(STARTS, name), self.size, self.steps, refresh, self.every)
            for name in names
        }
        return contest.hold(run, task, frames, self.trials, self.seeds, self.trial, self.extend)


ENCODER = Encoder()
CONTEST = Contest()
