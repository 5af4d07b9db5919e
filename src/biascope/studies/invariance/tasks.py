"""Data with planted directions, made on the device: Gaussian noise drawn once, the directions exchanged.

All synthetic sets of the paper have the form x = w - sum_k (w.u_k) u_k + sum_k c_k u_k: noise w, orthonormal directions
u_k, and coefficients c_k that carry the label. With the same noise for every direction, differences between directions
are not differences between samples. The same sets, one at a time, are in `biascope.data`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from biascope.arguments import check_count, check_number
from biascope.data.boundaries import Boundary, boundary_value, middle
from biascope.errors import InputError
from biascope.seeds import generator

Task = tuple[Tensor, Tensor]


class Lazy(Sequence[Task]):
    """Tasks made when they are asked for, so that a sweep needs memory for a few of them only.

    Example:
        >>> tasks = Lazy(lambda i: (torch.full((2, 1), float(i)), torch.zeros(2)), 3)
        >>> len(tasks), tasks[2][0][0].item()
        (3, 2.0)
    """

    def __init__(self, make: Callable[[int], Task], n: int) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            chosen = range(self.n)[index]
            return Lazy(lambda i: self.make(chosen[i]), len(chosen))
        return self.make(range(self.n)[index])


@dataclass(frozen=True)
class Noise:
    """The part of the data that does not depend on the directions: w [n, *shape] and uniform/normal numbers per row.

    `pairs` [n, 2] are normal; they place the examples along the planted directions.
    """

    w: Tensor = field(repr=False)
    pairs: Tensor = field(repr=False)

    @classmethod
    def draw(cls, n: int, shape: Sequence[int], sigma: float, seed: int, device: str, *name: object) -> "Noise":
        """n examples; `name` tells train from test and seeds apart."""
        check_count(n, "the number of examples")
        check_number(sigma, "sigma", least=0)
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

    Example:
        >>> planted(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[7.0]]))
        tensor([[7., 4.]])
    """
    U, flat = directions.to(w).flatten(1), w.flatten(1)
    products = U.double() @ U.double().T  # not in w's precision, which may be tf32
    off = float((products - torch.eye(len(U)).to(products)).abs().max())
    if off > 1e-4:
        raise InputError(
            f"directions {list(directions.shape)} must be orthonormal: their products are off by {off:.2g}"
        )
    return (flat + (coefficients.to(w) - flat @ U.T) @ U).view_as(w)


def boundary_task(noise: Noise, u: Tensor, boundary: Boundary, eps: float, bias: float | None = None) -> Task:
    """Isotropic data (Eq. 8): x.u = eps al with al ~ N(0, 1), labelled by a boundary on it; see `boundary_bias`."""
    al = noise.pairs[:, 0]
    inner = boundary_value(eps * al, math.pi * al, boundary)
    shift = boundary_bias(noise, boundary, eps) if bias is None else bias
    return planted(noise.w, u[None], (eps * al)[:, None]), (inner + shift > 0).long()


def boundary_bias(noise: Noise, boundary: Boundary, eps: float) -> float:
    """Minus the median of the training values, so that the classes balance."""
    al = noise.pairs[:, 0]
    return -float(middle(boundary_value(eps * al, math.pi * al, boundary)))


def circle_coefficients(noise: Noise, radii: tuple[float, float]) -> Tensor:
    """Points on circles of radius radii[0] (class 0) and radii[1] (class 1), [n, 2]."""
    if not 0 < radii[0] < radii[1]:
        raise InputError(f"radii {radii[0]:g} and {radii[1]:g}: the second circle must be the outer one")
    radius = torch.where(noise.signs > 0, radii[1], radii[0])
    points: Tensor = radius[:, None] * noise.pairs / noise.pairs.norm(dim=1, keepdim=True)
    return points


def circles_task(noise: Noise, u1: Tensor, u2: Tensor, radii: tuple[float, float]) -> Task:
    """Class y on a circle of radius radii[y] in span(u1, u2)."""
    return planted(noise.w, torch.stack([u1, u2]), circle_coefficients(noise, radii)), (noise.signs > 0).long()


def contest_task(noise: Noise, u: Sequence[Tensor], eps: float, radii: tuple[float, float]) -> Task:
    """A linear feature +-eps/2 along u[0] and circles in span(u[1], u[2]); each of them alone solves the task."""
    check_number(eps, "eps", above=0)  # without it the linear feature tells nothing
    c = torch.cat([(eps / 2 * noise.signs)[:, None], circle_coefficients(noise, radii)], dim=1)
    return planted(noise.w, torch.stack(list(u)), c), (noise.signs > 0).long()


def without(task: Task, *directions: Tensor) -> Task:
    """The same examples with their components along orthonormal directions removed."""
    x, y = task
    return planted(x, torch.stack(directions), x.new_zeros(len(x), len(directions))), y
