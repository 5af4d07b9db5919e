"""Small steps that every image study takes: two-class CIFAR-10, channel statistics, normalisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from biascope.arguments import check_count
from biascope.data.dataset import Dataset, Labels, Seed, as_labels, generator
from biascope.errors import InputError
from biascope.inputs import is_finite
from biascope.signatures import checked

ANIMALS = (2, 3, 4, 5, 6, 7)  # bird, cat, deer, dog, frog, horse
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


@checked
def cifar2(
    dataset: Dataset,
    rule: Literal["animals", "first-five"] = "animals",
    *,
    per_class: int | None = None,
    labels: Labels = "01",
    seed: Seed = 0,
) -> Dataset:
    """Ten classes made two: positive = animals, or the first five classes (which also suits digits: 0 to 4).

    `per_class` draws that many random images of each of the two classes (5000 in the papers' CIFAR-2), in random order.

    Example:
        >>> d = Dataset(torch.zeros(10, 3, 2, 2), torch.arange(10), "toy")
        >>> cifar2(d, "first-five").y.tolist()
        [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    """
    if rule == "animals":
        positive = torch.isin(dataset.y, torch.tensor(ANIMALS, device=dataset.y.device))
    else:
        positive = dataset.y < 5
    signs = torch.where(positive, 1, -1)
    out = replace(dataset, y=as_labels(signs, labels), name=f"{dataset.name}-2", info={**dataset.info, "rule": rule})
    if per_class is None:
        return out
    check_count(per_class, "per_class")
    rng, chosen = generator(seed), []
    for sign in (-1, 1):
        index = (signs == sign).nonzero().flatten().cpu()
        if len(index) < per_class:
            raise InputError(f"class {sign:+d} of {out.name} has {len(index)} images, asked for {per_class}")
        chosen.append(index[torch.randperm(len(index), generator=rng)[:per_class]])
    both = torch.cat(chosen)
    return out.subset(both[torch.randperm(len(both), generator=rng)].to(out.x.device))


@checked
def channel_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [c] of each channel of x [n, c, h, w], accumulated in float64.

    Example:
        >>> channel_stats(torch.tensor([0.0, 2.0]).view(2, 1, 1, 1))
        (tensor([1.]), tensor([1.]))
    """
    if x.dim() != 4 or not x.numel():
        raise InputError(f"expected images [n, c, h, w], got {list(x.shape)}")
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    square = total.clone()
    for chunk in torch.split(x, 4096):  # float64 of a whole set would be large
        wide = chunk.double()
        total += wide.sum((0, 2, 3))
        square += (wide**2).sum((0, 2, 3))
    count = x.numel() / x.shape[1]
    mean = total / count
    std = (square / count - mean**2).clamp_min(0).sqrt()
    dtype = x.dtype if x.is_floating_point() else torch.float64
    return mean.to(dtype), std.to(dtype)


@checked
def normalise(dataset: Dataset, mean: Tensor | tuple[float, ...], std: Tensor | tuple[float, ...]) -> Dataset:
    """(x - mean) / std per channel; take the statistics of the training set for both splits.

    Example:
        >>> d = Dataset(torch.ones(2, 1, 1, 1), torch.zeros(2), "toy")
        >>> normalise(d, (0.5,), (0.25,)).x.flatten().tolist()
        [2.0, 2.0]
    """
    x = dataset.x
    if not x.is_floating_point():
        raise InputError(f"normalise needs floating images, got {x.dtype}: load(..., dtype=torch.float32)")
    m, s = (torch.as_tensor(v, dtype=x.dtype, device=x.device).view(-1, 1, 1) for v in (mean, std))
    if len(m) not in (1, x.shape[1]) or len(s) not in (1, x.shape[1]):
        raise InputError(f"x has {x.shape[1]} channels, mean has {len(m)} and std {len(s)} entries")
    if not is_finite(m) or not is_finite(s) or not bool((s > 0).all()):
        raise InputError(f"mean {m.flatten().tolist()} must be finite and std {s.flatten().tolist()} above 0")
    return replace(dataset, x=(x - m) / s, info={**dataset.info, "mean": m.flatten(), "std": s.flatten()})
