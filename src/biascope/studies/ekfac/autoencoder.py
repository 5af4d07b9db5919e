"""The deep sigmoid auto-encoder on MNIST or digits, as a problem for a contest, with the grids of Fig. 4.3 and 4.4."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from biascope import nets
from biascope.studies.ekfac import contest
from biascope.studies.ekfac.common import images, reconstruction
from biascope.studies.ekfac.contest import Outcome, Problem, Setting
from biascope.studies.runs import Run


def problem(run: Run, dataset: str, n: int, hidden: tuple[int, ...]) -> Problem:
    """Reconstruct n images; no batch normalisation: every optimiser trains the same network."""
    x, _ = images(dataset, n, run)

    def build(seed: int, normed: bool) -> nn.Module:
        return nets.build("autoencoder", seed=seed, in_features=x.shape[1], hidden=hidden)

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return reconstruction(net, y)

    mean = x[: contest.LOOK].mean(0).expand_as(x[: contest.LOOK])
    plateau = float(F.binary_cross_entropy(mean, x[: contest.LOOK], reduction="sum")) / len(mean)
    return Problem(build, loss, x, x, plateau=plateau)


def grid(name: str, points: int) -> tuple[list[float], list[float]]:
    """The first `points` learning rates and second hyper-parameters of an optimiser, the middle of the range first."""
    lrs = {
        "sgd": [0.3, 0.1, 1.0, 0.03, 0.01],
        "adam": [0.03, 0.01, 0.1, 0.003, 0.001],
        "kfac": [0.1, 0.3, 0.03, 1.0, 0.01],
    }
    seconds = {
        "sgd": [0.9, 0.95, 0.5, 0.99, 0.0],
        "adam": [1e-8, 1e-4, 1e-2, 1e-6, 1.0],
        "kfac": [1e-1, 1.0, 1e-2, 1e-3, 1e-4],  # amortised KFAC diverges where EKFAC is at its best
    }
    ekfac = [0.1, 0.03, 0.3, 0.01, 0.003], [1e-3, 1e-2, 1e-4, 1e-1, 1.0]
    return lrs.get(name, ekfac[0])[:points], seconds.get(name, ekfac[1])[:points]


@dataclass(frozen=True)
class Encoder:
    """Options of every study that trains the auto-encoder by several optimisers."""

    dataset: Annotated[Literal["digits", "mnist"], "images to encode"] = "digits"
    n: Annotated[int, "training images"] = 1437
    hidden: Annotated[tuple[int, ...], "widths of the encoder"] = (60, 30, 15)
    size: Annotated[int, "examples per batch"] = 200

    def problem(self, run: Run) -> Problem:
        """Reconstruct the images."""
        return problem(run, self.dataset, self.n, self.hidden)


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
