"""Real images for the studies (CIFAR-10, normalised), and a stand-in for smoke runs that needs no download."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope import data
from biascope.arguments import check_count
from biascope.data import Dataset
from biascope.errors import InputError
from biascope.seeds import generator
from biascope.studies.runs import Run

Source = Literal["cifar10", "synthetic"]


def ten_classes(run: Run, source: Source, side: int, n_synthetic: int = 2000) -> tuple[Dataset, Dataset]:
    """Training and test images [n, 3, side, side] of ten classes, channels normalised by the training set.

    CIFAR-10 is averaged down when `side` is 16 or 8. The stand-in has smooth random fields with a smooth pattern per
    class; `n_synthetic` of them for training and a quarter as many for testing.
    """
    if source == "cifar10":
        train, test = data.load("cifar10", "train"), data.load("cifar10", "test")
        if side not in (32, 16, 8):
            raise InputError(f"side={side}: CIFAR-10 can be used at 32, 16 or 8 pixels")
        train, test = (replace(d, x=F.avg_pool2d(d.x, 32 // side) if side < 32 else d.x) for d in (train, test))
    else:
        train = stand_in(n_synthetic, side, run.seed, "train")
        test = stand_in(max(20, n_synthetic // 4), side, run.seed, "test")
    mean, std = data.channel_stats(train.x)
    return data.normalise(train, mean, std), data.normalise(test, mean, std)


def stand_in(n: int, side: int, seed: int, part: str) -> Dataset:
    """n images [n, 3, side, side] of ten classes with a 1/f spectrum, as natural images have."""
    fields = smooth(torch.randn(n, 3, side, side, generator=generator(seed, "images", part)))
    patterns = smooth(torch.randn(10, 3, side, side, generator=generator(seed, "patterns")))
    y = torch.randint(10, (n,), generator=generator(seed, "labels", part))
    return Dataset(fields + 0.7 * patterns[y], y, "synthetic stand-in", seed)


def smooth(white: Tensor) -> Tensor:
    """White noise [..., side, side] with its amplitudes divided by the frequency."""
    side = white.shape[-1]
    k = torch.fft.fftfreq(side, 1 / side)
    radius = (k[:, None] ** 2 + k[None, :] ** 2).sqrt().clamp_min(1.0)
    made: Tensor = torch.fft.ifft2(torch.fft.fft2(white) / radius).real
    return made / made.std()


def two_classes(
    run: Run, source: Source, side: int, per_class: int, test_per_class: int | None = None
) -> tuple[Dataset, Dataset]:
    """CIFAR-2, animals against the rest: `per_class` random images of each class, and a balanced test set."""
    train, test = ten_classes(run, source, side, n_synthetic=4 * check_count(per_class, "per_class"))
    if test_per_class is None:
        test_per_class = min(int((data.cifar2(test).y == c).sum()) for c in (0, 1))
    return data.cifar2(train, per_class=per_class, seed=run.seed), data.cifar2(
        test, per_class=test_per_class, seed=run.seed
    )


def said(source: Source, side: int) -> str:
    """The data in words, for `measured`."""
    if source == "synthetic":
        return f"Synthetic 1/f images of 3 x {side} x {side} stand in for CIFAR-10"
    return "CIFAR-10" if side == 32 else f"CIFAR-10 averaged down to {side} x {side}"
