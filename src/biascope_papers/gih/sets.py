"""Data sets of the studies: images (CIFAR-10, or a stand-in that needs no download), and noise with planted directions.

Synthetic sets have the form x = w - sum_k (w.u_k) u_k + sum_k c_k u_k with coefficients c_k that carry the label; noise
w is the same for every direction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope import InputError, data
from biascope.data import Dataset
from biascope.data.boundaries import boundary_value, middle
from biascope.studies import Run
from biascope.support import generator
from biascope_papers.gih.networks import at_least
from biascope_papers.gih.training import Task

Source = Literal["cifar10", "synthetic"]
Boundary = Literal["linear", "quadratic", "sinusoidal"]
Angle = Literal["text", "code"]


# ---- images ----


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
    fields = _smooth(torch.randn(n, 3, side, side, generator=generator(seed, "images", part)))
    patterns = _smooth(torch.randn(10, 3, side, side, generator=generator(seed, "patterns")))
    y = torch.randint(10, (n,), generator=generator(seed, "labels", part))
    return Dataset(fields + 0.7 * patterns[y], y, "synthetic stand-in", seed)


def _smooth(white: Tensor) -> Tensor:
    """White noise [..., side, side] with its amplitudes divided by the frequency."""
    side = white.shape[-1]
    k = torch.fft.fftfreq(side, 1 / side)
    radius = (k[:, None] ** 2 + k[None, :] ** 2).sqrt().clamp_min(1.0)
    made: Tensor = torch.fft.ifft2(torch.fft.fft2(white) / radius).real
    return made / made.std()


def two_classes(run: Run, source: Source, side: int, per_class: int) -> tuple[Dataset, Dataset]:
    """CIFAR-2, animals against the rest: `per_class` random images of each class, and a balanced test set."""
    at_least(1, per_class=per_class)
    train, test = ten_classes(run, source, side, n_synthetic=4 * per_class)
    fewest = min(int((data.cifar2(test).y == c).sum()) for c in (0, 1))
    return tuple(data.cifar2(part, per_class=n, seed=run.seed) for part, n in ((train, per_class), (test, fewest)))  # type: ignore[return-value]


def describe(source: Source, side: int) -> str:
    """The images in words, for `measured`."""
    if source == "synthetic":
        return f"Synthetic 1/f images of 3 x {side} x {side} stand in for CIFAR-10"
    return "CIFAR-10" if side == 32 else f"CIFAR-10 averaged down to {side} x {side}"


# ---- planted directions ----


@dataclass(frozen=True)
class Noise:
    """The part of the data that does not depend on the directions: w [n, *shape] and normal numbers `pairs` [n, 2].

    The pairs place the examples along the planted directions.
    """

    w: Tensor = field(repr=False)
    pairs: Tensor = field(repr=False)

    @classmethod
    def draw(cls, n: int, shape: Sequence[int], sigma: float, seed: int, device: str, *name: object) -> "Noise":
        """n examples; `name` tells train from test and seeds apart."""
        at_least(1, examples=n)
        at_least(0, sigma=sigma)
        rng = generator(seed, "noise", *name, device=device)
        pairs = torch.randn(n, 2, generator=rng, device=device)
        return cls(sigma * torch.randn(n, *shape, generator=rng, device=device), pairs)

    @property
    def signs(self) -> Tensor:
        """Balanced classes -1, +1, -1, ..."""
        return 2.0 * (torch.arange(len(self.w), device=self.w.device) % 2) - 1.0


def planted(w: Tensor, directions: Tensor, coefficients: Tensor) -> Tensor:
    """w [n, *shape] with its components along orthonormal `directions` [k, *shape] replaced by `coefficients` [n, k].

    Directions that are not orthonormal are refused: the components would not be the coefficients.
    """
    U, flat = directions.to(w).flatten(1), w.flatten(1)
    products = U.double() @ U.double().T  # not in w's precision, which may be tf32
    off = float((products - torch.eye(len(U)).to(products)).abs().max())
    if off > 1e-4:
        raise InputError(
            f"directions {list(directions.shape)} must be orthonormal: their products are off by {off:.2g}"
        )
    return (flat + (coefficients.to(w) - flat @ U.T) @ U).view_as(w)


def boundary_task(
    noise: Noise, u: Tensor, boundary: Boundary, eps: float, bias: float | None = None, angle: Angle = "code"
) -> Task:
    """Isotropic data (Eq. 8): x.u = eps al with al ~ N(0, 1), labelled by a boundary on it; see `boundary_bias`.

    The sine is that of x.u (`angle="text"`) or of pi al ("code").
    """
    al = noise.pairs[:, 0]
    inner = boundary_value(eps * al, al * (eps if angle == "text" else math.pi), boundary)
    shift = boundary_bias(noise, boundary, eps, angle) if bias is None else bias
    return planted(noise.w, u[None], (eps * al)[:, None]), (inner + shift > 0).long()


def boundary_bias(noise: Noise, boundary: Boundary, eps: float, angle: Angle = "code") -> float:
    """Minus the median of the training values, so that the classes balance."""
    al = noise.pairs[:, 0]
    return -float(middle(boundary_value(eps * al, al * (eps if angle == "text" else math.pi), boundary)))


def circle_coefficients(noise: Noise, radii: tuple[float, float]) -> Tensor:
    """Points on circles of radius radii[0] (class 0) and radii[1] (class 1), [n, 2]."""
    if not 0 < radii[0] < radii[1]:
        raise InputError(f"radii {radii[0]:g} and {radii[1]:g}: the second circle must be the outer one")
    radius = torch.where(noise.signs > 0, radii[1], radii[0])
    points: Tensor = radius[:, None] * noise.pairs / noise.pairs.norm(dim=1, keepdim=True)
    return points


def circles_task(noise: Noise, axes: Tensor, radii: tuple[float, float]) -> Task:
    """Class y on a circle of radius radii[y] in the plane of two axes [2, *shape]."""
    return planted(noise.w, axes, circle_coefficients(noise, radii)), (noise.signs > 0).long()


def contest_task(noise: Noise, u: Sequence[Tensor], eps: float, radii: tuple[float, float]) -> Task:
    """A linear feature +-eps/2 along u[0] and circles in span(u[1], u[2]); each of them alone solves the task."""
    at_least(1e-12, eps=eps)  # without it the linear feature tells nothing
    c = torch.cat([(eps / 2 * noise.signs)[:, None], circle_coefficients(noise, radii)], dim=1)
    return planted(noise.w, torch.stack(list(u)), c), (noise.signs > 0).long()


def without(task: Task, *directions: Tensor) -> Task:
    """The same examples with their components along orthonormal directions removed."""
    x, y = task
    return planted(x, torch.stack(directions), x.new_zeros(len(x), len(directions))), y
