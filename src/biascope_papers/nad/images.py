"""Trainings on images for Figs. 7, 8 and the one on underspecification: real CIFAR-10, or a tiny stand-in.

50 epochs of SGD, learning rate falling linearly from 0.21, momentum 0.9, weight decay 5e-4, batches of 128, gradient
clipped to norm 0.5 (both from the public code), no augmentation. The stand-in are 8 x 8 digits, every pixel doubled.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from biascope.data import channel_stats, info, load
from biascope.data.images import CIFAR10_MEAN, CIFAR10_STD
from biascope.ensembles import accuracy, record, train_ensemble
from biascope.studies import Run
from biascope.support import derive, generator
from biascope_papers.nad import anisotropy as a
from biascope_papers.nad import directional as d

SMOKE = {"dataset": "digits", "image_size": 16, "n": 600, "epochs": 8, "networks": 16}
LAPTOP = {"n": 10_000, "epochs": 10, "networks": 128}


@dataclass(frozen=True)
class Setting:
    """The images, the training on them, and how directions are measured; the defaults are the published ones."""

    dataset: Annotated[Literal["cifar10", "digits"], "images; digits are a small stand-in"] = "cifar10"
    image_size: Annotated[int, "side of the images: 32 for cifar10, 16 for digits"] = 32
    width: d.Width = 0
    n: Annotated[int, "training images; 0: all"] = 0
    epochs: Annotated[int, "passes over the images"] = 50
    networks: a.Networks = 1000
    head: a.Head = "marginal"
    step: a.Step = 100.0
    precision: d.Arithmetic = "auto"

    def __str__(self) -> str:
        known = info(self.dataset)
        name = "8 x 8 digits as a stand-in for CIFAR-10" if self.dataset == "digits" else "CIFAR-10"
        return f"{min(self.n or known.n_train, known.n_train)} training images of {name}"

    def directions(self, run: Run, net: str, reuse: str = "") -> Tensor:
        """All directions [D, side, side] of a network for one channel of these images."""
        source = a.Source(net, self.image_size, self.width, self.networks, self.head, self.step, reuse)
        return a.directions_of(run, source, self.precision)[0]


PAPER = Setting()


@dataclass(frozen=True)
class ImageSet:
    """Training and test images [n, 3, side, side] in [0, 1] with labels [n], and their statistics [3]."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    mean: Tensor
    std: Tensor

    def normalised(self, x: Tensor) -> Tensor:
        """(x - mean) / std per channel. Images are poisoned before this, as in the public code, and flipped after it.

        For the flip F of a channel the order matters: F((x - m 1) / s) = (F x - m F 1) / s. Flipped first, every image
        has the constant picture m (F 1 - 1) / s added to it, almost three times as large as the image itself. The paper
        does not say.
        """
        return (x - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)


def image_set(run: Run, dataset: Literal["cifar10", "digits"], n: int) -> ImageSet:
    """The images of a study; n of the training images, chosen at random, or all with n = 0."""
    train, test = load(dataset, "train"), load(dataset, "test")
    if n and n < len(train.y):
        train = train.subset(torch.randperm(len(train.y), generator=generator(run.seed, "images"))[:n])
    x, test_x = train.x, test.x
    # of all training pixels, to four digits; the public code cuts two of them off (.247, .243, .261), so that its
    # second and third channel are larger by 0.2 %: the exact ones are kept, as every kept run was made with them
    mean, std = torch.tensor(CIFAR10_MEAN), torch.tensor(CIFAR10_STD)
    if dataset == "digits":
        x, test_x = (each.repeat_interleave(2, -1).repeat_interleave(2, -2).repeat(1, 3, 1, 1) for each in (x, test_x))
        mean, std = channel_stats(x)
    return ImageSet(*(part.to(run.device) for part in (x, train.y, test_x, test.y, mean, std)))


def train_on_images(
    run: Run,
    names: Sequence[str],
    factory: Callable[[], nn.Module],
    data: Callable[[int], tuple[Tensor, Tensor]],
    tests: Callable[[int], Mapping[str, tuple[Tensor, Tensor]]],
    setting: Setting,
) -> list[dict[str, float]]:
    """Train networks together, one for every name: the accuracy of each on its training data ("train") and on each
    named test set, stored by its name. `data` and `tests` take its place in the list.
    """

    @functools.cache
    def work() -> list[dict[str, float]]:
        initialiser, places = record(factory), range(len(names))
        small = sum(p.numel() for p in initialiser.template.parameters()) <= d.SMALL
        done = train_ensemble(
            initialiser, [data(i) for i in places], epochs=setting.epochs, batch_size=128, lr=0.21, momentum=0.9,
            weight_decay=5e-4, clip_norm=0.5, seed=derive(run.seed, names[0]), device=run.device,
            precision=d.resolve_precision(setting.precision, run.device, small),
        )  # fmt: skip
        run.log(pieces=", ".join(names), seconds=done.seconds, engine=done.engine)
        networks: Any = done.networks
        found, trained = [{"train": float(each)} for each in done.train_accuracy], networks.to(run.device)
        for i, row in enumerate(found):
            row |= {key: float(accuracy(trained[i : i + 1], x[None], y[None])) for key, (x, y) in tests(i).items()}
        return found

    stored: list[dict[str, Any]] = [run.cached(name, lambda i=i: work()[i]) for i, name in enumerate(names)]  # type: ignore[misc]
    return [{key: float(value) for key, value in row.items()} for row in stored]
