"""The inputs at which networks of the atlas are compared: natural ones for each kind of input, and circles of them."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from biascope.support.errors import InputError
from biascope.support.seeds import generator

Kind = Literal["image", "signal", "tabular", "coordinates", "tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TOKEN_STD = 0.02  # of embeddings at initialisation, in transformers' configurations
MEANING: dict[Kind, str] = {
    "image": "Gaussian images with the 1/f amplitudes of natural ones",
    "signal": "Gaussian signals with 1/f amplitudes",
    "tabular": "standard normal rows",
    "coordinates": "points in the square [-1, 1]^d",
    "tokens": "embeddings of random tokens",
}


def kind_of(shape: Sequence[int]) -> Kind:
    """What inputs of a shape most likely are; token models say so themselves.

    Example:
        >>> kind_of((3, 32, 32)), kind_of((1, 128)), kind_of((20,)), kind_of((2,))
        ('image', 'signal', 'tabular', 'coordinates')
    """
    if len(shape) == 1:
        return "coordinates" if shape[0] <= 3 else "tabular"
    if len(shape) in (2, 3):
        return "signal" if len(shape) == 2 else "image"
    raise InputError(f"inputs of shape {tuple(shape)} have no place in the atlas: it knows [d], [c, length], [c, h, w]")


def axes_of(kind: Kind, shape: Sequence[int]) -> tuple[int, ...]:
    """The axes of one input along which there are frequencies."""
    if kind == "image":
        return (1, 2)
    if kind == "signal":
        return (len(shape) - 1,)
    return (0,) if kind == "tokens" else ()


def inputs(kind: Kind, shape: Sequence[int], n: int, seed: int, *path: object) -> Tensor:
    """n inputs [n, *shape] with mean square 1 (tokens: that of embeddings; coordinates: 1/3)."""
    rng = generator(seed, "atlas inputs", *path)
    if kind == "coordinates":
        return 2 * torch.rand(n, *shape, generator=rng, device="cpu") - 1
    x = torch.randn(n, *shape, generator=rng, device="cpu")
    if kind == "tokens":
        return TOKEN_STD * x
    axes = tuple(axis + 1 for axis in axes_of(kind, shape))
    if not axes:
        return x
    amplitude = 1 / radius(shape, tuple(axis - 1 for axis in axes), floor=True)
    x = torch.fft.ifftn(torch.fft.fftn(x, dim=axes) * amplitude, dim=axes).real
    size: Tensor = x.flatten(1).square().mean(1).sqrt()
    scaled: Tensor = x / size.view(-1, *[1] * len(shape))
    return scaled


def radius(shape: Sequence[int], axes: Sequence[int], floor: bool = False) -> Tensor:
    """Frequency of every bin in units of Nyquist's, for `shape`; with `floor` the mean counts as the lowest."""
    squares = torch.zeros([1] * len(shape), device="cpu")
    for axis in axes:
        frequency = torch.fft.fftfreq(shape[axis]) * 2
        squares = squares + frequency.square().view([-1 if a == axis else 1 for a in range(len(shape))])
    lowest = 2 / max(shape[axis] for axis in axes)
    return squares.sqrt().clamp_min(lowest) if floor else squares.sqrt()


def circle(kind: Kind, shape: Sequence[int], points: int, seed: int, *path: object) -> Tensor:
    """Inputs [points, *shape] on a circle: a cos t + b sin t, where a and b are two inputs.

    A function on it has harmonics, whatever its inputs are. Gaussian inputs stay Gaussian on the way; coordinates go
    round in a random plane, inside the square.
    """
    t = torch.arange(points, device="cpu") * (2 * math.pi / points)
    if kind == "coordinates":
        pair = torch.randn(math.prod(shape), 2, generator=generator(seed, "atlas circle", *path), device="cpu")
        line = torch.tensor([[1.0], [0.0]], device="cpu")
        a, b = 0.7 * (torch.linalg.qr(pair)[0].T if math.prod(shape) > 1 else line)
    else:
        a, b = inputs(kind, shape, 2, seed, "circle", *path)
    sides = [1] * len(shape)
    ring: Tensor = t.cos().view(-1, *sides) * a.view(*shape) + t.sin().view(-1, *sides) * b.view(*shape)
    return ring
