"""The deep sigmoid auto-encoder on MNIST or digits, as a problem for a contest, with the grids of Fig. 4.3 and 4.4.

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


LRS = {
    "ekfac": [0.03, 0.01, 0.1, 0.003, 0.3],
    "ekfac-ra": [0.1, 0.03, 0.3, 0.01, 1.0],
    "kfac": [300.0, 100.0, 1000.0, 30.0, 3000.0],
    "sgd": [0.1, 0.03, 0.3, 0.01, 1.0],
    "adam": [0.01, 0.003, 0.03, 0.001, 0.1],
}
SECONDS = {
    "ekfac": [1e-3, 1e-2, 1e-4, 1e-1, 1e-5],
    "ekfac-ra": [1e-3, 1e-2, 1e-4, 1e-1, 1e-5],
    "kfac": [1e3, 1e4, 1e2, 1e5, 10.0],
    "sgd": [0.8, 0.9, 0.5, 0.95, 0.0],
    "adam": [1e-6, 1e-4, 1e-8, 1e-2, 1e-10],
}


def grid(name: str, points: int) -> tuple[list[float], list[float]]:
    """The first `points` learning rates and second hyper-parameters of an optimiser, the middle of the range first.

    The rule, the same for all: 28 to 35 settings in decades (SGD and Adam: half-decades of the learning rate), 200
    steps of the laptop size, one seed; around the best by training loss 3 x 3 settings with the study's 500 steps,
    moved until the best was in their middle. It comes first here, then learning rates a half-decade and dampings a
    decade below and above. EKFAC's square moved once. KFAC had not left the plateau (206) after 200 steps: 13 more
    settings with 500. Training losses after 500 steps, at the best and at its neighbours:

        optimiser   lr, second      best   lr / 3, lr x 3   second / 10, x 10
        EKFAC       0.03, 0.001     81.4   89.7, 102.8      87.7, 96.5
        EKFAC-ra    0.1, 0.001      99.8   180.8, 124.4     139.7, 101.9
        KFAC        300, 1000       153    176, 852         1346, 192
        SGD + BN    0.1, 0.8        85.9   92.6, 91.4       momentum 0.5: 90.8, 0.9: 87.2
        Adam + BN   0.01, 1e-6      85.0   93.0, 86.1       epsilon 1e-8: 86.1, 1e-4: 85.1

    KFAC's valley lr = damping / 3 to damping / 10 has no upper end: it is as low at a damping of 1e5 (157), where KFAC
    is SGD. EKFAC's first steps raise the loss at nearly all good settings (700 to 1459 at its best): they are those of
    the dense formula, not a defect. At the paper's widths they raise it more, and more damping is needed: from 945,
    after 20 steps, EKFAC is at 3079 with (0.01, 0.001), 1451 with (0.01, 0.01), 392 with (0.01, 0.1).
    """
    plain = name.removesuffix("-bn")
    return LRS[plain][:points], SECONDS[plain][:points]


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
    points: Annotated[int, "values of each of the two hyper-parameters"] = 4
    trial: Annotated[float, "share of the iterations with which the grid is searched"] = 1.0
    extend: Annotated[bool, "double the trial while its best setting is on the plateau"] = False
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3

    def hold(self, run: Run, task: Problem, names: tuple[str, ...], refresh: int) -> Outcome:
        """A contest with `refresh` iterations between refreshes."""
        frames = {name: Setting(name, 0.0, 0.0, self.size, self.steps, refresh, self.every) for name in names}
        return contest.hold(run, task, frames, self.points, self.seeds, grid, self.trial, self.extend)


ENCODER = Encoder()
CONTEST = Contest()
