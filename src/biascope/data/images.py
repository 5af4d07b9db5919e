"""What studies do to images: two classes of ten, normalisation, and what the NAD papers do (poisoning along carriers,
the flip of a basis, a channel with its own task).
"""

import math
from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.data.bases import check_orthonormal, complete_basis
from biascope.data.dataset import Dataset, Labels, Seed, as_labels, check_classes, generator, seed_of
from biascope.data.directions import Gap, directional_inputs
from biascope.support.errors import InputError
from biascope.support.inputs import is_finite
from biascope.support.limits import Count, CountOrZero, Finite, FiniteTensor, NonNegative, Vector, shaped
from biascope.support.signatures import checked

Rule = Literal["choice", "code"]
Images = Annotated[Tensor, shaped(4, finite=True)]  # [n, c, h, w]
FloatImages = Annotated[Tensor, shaped(4, floating=True, finite=True)]
Directions = Annotated[Tensor, shaped(2, 3, 4, floating=True)]  # [k, h, w], [k, 1, h, w] or [k, h w]

ANIMALS = (2, 3, 4, 5, 6, 7)  # bird, cat, deer, dog, frog, horse
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
CHUNK = 4096  # images in float64 at a time


@checked
def cifar2(
    dataset: Dataset,
    rule: Literal["animals", "first-five"] = "animals",
    *,
    per_class: Count | None = None,
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
    animals = torch.isin(dataset.y, torch.tensor(ANIMALS, device=dataset.y.device))
    signs = torch.where(animals if rule == "animals" else dataset.y < 5, 1, -1)
    out = replace(dataset, y=as_labels(signs, labels), name=f"{dataset.name}-2", info={**dataset.info, "rule": rule})
    if per_class is None:
        return out
    rng, chosen = generator(seed), []
    for sign in (-1, 1):
        index = (signs == sign).nonzero().flatten().cpu()
        if len(index) < per_class:
            raise InputError(f"class {sign:+d} of {out.name} has {len(index)} images, asked for {per_class}")
        chosen.append(index[torch.randperm(len(index), generator=rng)[:per_class]])
    both = torch.cat(chosen)
    return out.subset(both[torch.randperm(len(both), generator=rng)].to(out.x.device))


@checked
def channel_stats(x: Images) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [c] of each channel of x [n, c, h, w], accumulated in float64.

    Example:
        >>> channel_stats(torch.tensor([0.0, 2.0]).view(2, 1, 1, 1))
        (tensor([1.]), tensor([1.]))
    """
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    square = total.clone()
    for start in range(0, len(x), CHUNK):
        wide = x[start : start + CHUNK].double()
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
    if not {len(m), len(s)} <= {1, x.shape[1]} or not is_finite(m) or not is_finite(s) or not bool((s > 0).all()):
        given = f"mean {m.flatten().tolist()} and std {s.flatten().tolist()}"
        raise InputError(f"{given}: one number for each of {x.shape[1]} channels is needed, finite, and std above 0")
    return replace(dataset, x=(x - m) / s, info={**dataset.info, "mean": m.flatten(), "std": s.flatten()})


@checked
def carriers(n_classes: Count, n_channels: Count = 3, rule: Rule = "choice") -> list[tuple[int, int, int]]:
    """For each class the (direction offset, channel, sign) that carries it; all triples are distinct.

    "choice": with p = y // 2, direction p // channels, channel p % channels, sign 2 (y % 2) - 1: the paper's printed
    rule, spilled into the next direction where its channel index runs out. "code": direction y // (2 channels), channel
    y % channels, same sign: the published code.
    """
    if rule == "choice":
        out = [(y // 2 // n_channels, y // 2 % n_channels, 2 * (y % 2) - 1) for y in range(n_classes)]
    else:
        out = [(y // (2 * n_channels), y % n_channels, 2 * (y % 2) - 1) for y in range(n_classes)]
    if len(set(out)) != n_classes:
        raise InputError(f'rule "code" gives two of {n_classes} classes one carrier with {n_channels} channels')
    return out


@checked
def poison(
    x: FloatImages,
    y: Vector,
    nads: Directions,
    index: CountOrZero = 0,
    *,
    eps: Finite = 0.05,
    rule: Rule = "choice",
    overwrite: Literal["own", "all"] = "own",
    n_classes: Count = 10,
) -> Tensor:
    """Images x [n, c, h, w] whose coefficient along their class's carrier is replaced by +-eps: x + (s eps - <x, k>) k.

    `nads` [k, h, w] or [k, h w]: orthonormal directions, of which those from `index` (0-based) on are used; see
    `carriers`. Of used ones that are not orthonormal the coefficients would not be +-eps; they are refused.
    `overwrite="all"` also sets every other carrier to 0, which makes the set linearly separable for certain. Poison
    images in [0, 1], before normalisation.
    """
    check_classes(y, n_classes)
    table = carriers(n_classes, x.shape[1], rule)
    last = index + max(offset for offset, _, _ in table)
    if last >= len(nads):
        raise InputError(f"index {index} needs directions {index}..{last}, nads has {len(nads)}")
    used = _channel_rows(nads, x, "nads")[index : last + 1].to(x)
    check_orthonormal(used, f"nads {index}..{last}")
    offset, channel, sign = (torch.tensor(column, device=x.device)[y.to(x.device)] for column in zip(*table))
    flat = x.flatten(2)
    now = flat @ used.T  # [n, c, directions]
    rows = torch.arange(len(x), device=x.device)
    target = now.clone()
    if overwrite == "all":
        for o, c, _ in table:
            target[:, c, o] = 0
    target[rows, channel, offset] = eps * sign.to(x.dtype)
    return (flat + (target - now) @ used).view_as(x)


@checked
def nad_flip(x: FloatImages, nads: Directions) -> Tensor:
    """U flip(U^T x) in every channel of x [n, c, h, w]: the content along the i-th NAD moves to the i-th from the end.

    Orthogonal, symmetric and its own inverse: no information is lost. `nads` [k, h, w] or [k, h w], most important
    first; a missing rest of the basis is completed (`complete_basis`).
    """
    u = complete_basis(_channel_rows(nads, x, "nads")).to(x)
    return ((x.flatten(2) @ u.T).flip(-1) @ u).view_as(x)


@checked
def underspecified(
    x: Images,
    y: Vector,
    v: Tensor,
    *,
    eps: Finite = 1.0,
    sigma: NonNegative = 3.0,
    gap: Gap = "full",
    seed: Seed = 0,
) -> Dataset:
    """Images x [n, c, h, w] with one more channel drawn from D(v) for the same binary labels y: two ways to be right.

    `gap` as in `directional`, "full" as in the studies.
    Test what was learnt with `zero_channels`: the last channel zeroed leaves the images, the others zeroed leave D(v).
    """
    one = _channel_rows(v[None], x, "v").view(1, *x.shape[2:])
    extra = directional_inputs(y, one, eps=eps, sigma=sigma, gap=gap, seed=seed)
    c = x.shape[1]
    info = {"image_channels": list(range(c)), "directional_channels": [c], "eps": eps, "sigma": sigma}
    return Dataset(torch.cat([x, extra.to(x)], 1), y, "underspecified", seed_of(seed), info | {"gap": gap, "v": v})


@checked
def zero_channels(x: Tensor, channels: list[int]) -> Tensor:
    """A copy of x [n, c, ...] with the named channels set to 0."""
    out = x.clone()
    out[:, channels] = 0
    return out


@checked
def class_mean_energies(x: FiniteTensor, y: Vector, directions: Tensor) -> Tensor:
    """How much of what tells the class means of a set apart lies along each direction: its alignment with a basis.

    e_i = sum_c p_c <mu_c - mu, u_i>^2 / sum_c p_c ||mu_c - mu||^2, with p_c the share of class c, mu_c the mean of its
    images and mu = sum_c p_c mu_c that of all. Over a complete basis (and all channels) the energies add up to 1. With
    the NADs of an architecture: a set whose energy lies along the first of them suits it. Means of few images keep some
    of the noise: with C classes, (C - 1) / n times its variance along u_i, in the mean and before the division.

    x [n, *shape], labels y [n]; orthonormal directions [k, *shape], or of one channel ([k, h, w], [k, 1, h, w] or
    [k, h w]), which are placed in each channel in turn. Gives [k], or [k, channels], in float64 on the CPU.
    """
    whole = directions.shape[1:] == x.shape[1:]
    rows = (directions.flatten(1) if whole else _channel_rows(directions, x, "directions")).detach().cpu().double()
    check_orthonormal(rows, "the directions")
    _, index, counts = torch.unique(y.cpu(), return_inverse=True, return_counts=True)
    sums, size = torch.zeros(len(counts), x[0].numel(), dtype=torch.float64, device="cpu"), 0.0
    for start in range(0, len(x), CHUNK):
        piece = x[start : start + CHUNK].detach().flatten(1).cpu().double()
        sums.index_add_(0, index[start : start + CHUNK], piece)
        size += float(piece.square().sum()) / len(x)
    shares, apart = counts.double() / len(x), sums / counts[:, None] - sums.sum(0) / len(x)
    energy = shares @ apart.square().sum(1)
    if not energy > 1e-26 * size:  # a difference of 1e-13 of the inputs is rounding
        raise InputError(f"the means of the {len(counts)} class(es) do not differ: there is no energy to share out")
    along = apart.view(len(apart), -1, rows.shape[1]) @ rows.T  # [classes, 1 or channels, k]
    energies: Tensor = torch.einsum("c,cjk->kj", shares, along.square()) / energy
    return energies[:, 0] if whole else energies


def _channel_rows(directions: Tensor, x: Tensor, name: str) -> Tensor:
    """Directions of one channel of x [n, c, *shape] as rows [k, entries]; equal numbers of entries are not enough."""
    shape = tuple(x.shape[2:])
    if not len(directions) or tuple(directions.shape[1:]) not in {shape, (1, *shape), (math.prod(shape),)}:
        found = f"{len(directions)} directions of shape {list(directions.shape[1:])}"
        raise InputError(f"{name}: {found}, but images have the shape {list(shape)}, or {math.prod(shape)} flat")
    return directions.flatten(1)
