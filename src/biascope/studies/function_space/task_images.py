"""Image sets as tasks of one encoder: all grey, of one size, in parts that do not overlap.

A set is named `mnist`, `quickdraw:0-30` (its classes 0 to 29, counted anew) or `digits/inverted` (its images turned).
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope import data
from biascope.errors import InputError, near
from biascope.seeds import generator

Labelled = tuple[Tensor, Tensor]  # images [n, 1, side, side], classes [n]
TURNS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "inverted": torch.neg,
    "turned": lambda x: torch.rot90(x, 1, (2, 3)),
    "mirrored": lambda x: x.flip(3),
}
TOP = {"digits": 16.0}  # the largest grey level, where it is not 255


@dataclass(frozen=True)
class TaskImages:
    """The parts of one set: `few` for pre-training, `tune` for fine-tuning, `held` to find coefficients on, `test`."""

    classes: int
    few: Labelled
    tune: Labelled
    held: Labelled
    test: Labelled


def grey(name: str, split: str, side: int, index: Tensor | None = None) -> Labelled:
    """Images of a set (those at `index`) between -1 and 1, [n, 1, side, side], with their classes counted from 0.

    Example:
        >>> x, y = grey("digits:3-5/inverted", "test", 8)
        >>> x.shape[1:], float(x.max()), sorted(set(y.tolist()))
        (torch.Size([1, 8, 8]), 1.0, [0, 1])
    """
    name, _, turn = name.partition("/")
    if turn and turn not in TURNS:
        raise InputError(f"images cannot be {turn!r}{near(turn, TURNS)}")
    x, y = stored(name, split)
    if index is not None:
        x, y = x[index], y[index]
    x = x.float().mean(1, keepdim=True) / TOP.get(name.partition(":")[0], 255.0) * 2 - 1
    if x.shape[-1] != side:
        x = F.interpolate(x, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
    return (TURNS[turn](x) if turn else x), y


@functools.lru_cache(maxsize=16)  # several seeds cut the same sets, which are checked against their sums when loaded
def stored(name: str, split: str) -> Labelled:
    """Images as stored (grey levels, [n, channels, side, side]) of the classes `name` asks for, counted from 0."""
    name, _, span = name.partition(":")
    found = data.load(name, split, dtype=torch.uint8)  # type: ignore[arg-type]
    if not span:
        return found.x, found.y
    low, high = _span(name, span)
    keep = (found.y >= low) & (found.y < high)
    if not bool(keep.any()):
        raise InputError(f"{name} has no classes {span}")
    return found.x[keep], found.y[keep] - low


def task_images(
    name: str, side: int, seed: int, *, few: int, tune: int, held: int, test: int, device: str = "cpu"
) -> TaskImages:
    """Disjoint parts of a set: `few` per class, then at most so many images to tune and hold out, and test images.

    At most one sixth of what `few` leaves is held out, if there is something to tune on.

    Example:
        >>> parts = task_images("digits", 8, 0, few=5, tune=300, held=100, test=100)
        >>> [len(part[1]) for part in (parts.few, parts.tune, parts.held, parts.test)]
        [50, 300, 100, 100]
    """
    y = stored(name.partition("/")[0], "train")[1]
    order = torch.randperm(len(y), generator=generator(seed, "parts", name))
    classes = int(y.max()) + 1
    shown = torch.cat([order[y[order] == c][:few] for c in range(classes)])
    rest = order[~torch.isin(order, shown)]
    cut = min(held, len(rest) // 6 if tune else len(rest))
    there = len(stored(name.partition("/")[0], "test")[1])
    chosen = torch.randperm(there, generator=generator(seed, "test", name))[:test]

    def part(split: str, index: Tensor) -> Labelled:
        x, y = grey(name, split, side, index)
        return x.to(device), y.to(device)

    spans = (("train", shown), ("train", rest[cut : cut + tune]), ("train", rest[:cut]), ("test", chosen))
    return TaskImages(classes, *(part(split, index) for split, index in spans))


def _span(name: str, span: str) -> tuple[int, int]:
    low, _, high = span.partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise InputError(
            f"{name}:{span}: write classes as first-end, the end left out, e.g. {name}:0-30 for the first thirty"
        )
    return int(low), int(high)
