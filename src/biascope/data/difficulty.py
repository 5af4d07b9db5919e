"""Sets with easy and difficult examples: label noise, mixes, balanced cells, spurious features painted on images."""

from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.data.dataset import Dataset, Seed, check_classes, generator, seed_of
from biascope.support.errors import InputError
from biascope.support.limits import Count, CountOrZero, Share, Vector, shaped
from biascope.support.signatures import checked


@checked
def corrupt_labels(
    y: Vector, fraction: Share = 0.15, *, n_classes: Count = 10, exact: bool = True, seed: Seed = 0
) -> tuple[Tensor, Tensor]:
    """Wrong labels for a fraction of y [n] (int64 classes): (new labels, mask of the changed ones).

    A wrong label is uniform among the other n_classes - 1. `exact` changes round(fraction n) examples, otherwise each
    one independently with that probability.

    Example:
        >>> y, changed = corrupt_labels(torch.zeros(20, dtype=torch.long), 0.15, n_classes=3)
        >>> int(changed.sum()), bool((y[changed] > 0).all())
        (3, True)
    """
    check_classes(y, n_classes)
    rng, n = generator(seed), len(y)
    if exact:
        changed = torch.zeros(n, dtype=torch.bool)
        changed[torch.randperm(n, generator=rng)[: round(fraction * n)]] = True
    else:
        changed = torch.rand(n, generator=rng) < fraction
    shift = torch.randint(1, n_classes, (n,), generator=rng)
    changed, shift = changed.to(y.device), shift.to(y.device)
    return torch.where(changed, (y + shift) % n_classes, y), changed


@checked
def easy_difficult(
    easy: Dataset,
    difficult: Dataset | None = None,
    n_easy: CountOrZero = 10_000,
    n_difficult: CountOrZero = 1_000,
    *,
    n_classes: Count = 10,
    seed: Seed = 0,
) -> Dataset:
    """n_easy examples of `easy` followed by n_difficult of `difficult`; `group` is 0 and 1.

    Without `difficult`, the difficult ones are further examples of `easy` with uniformly random labels (10 000 MNIST +
    1000 random-label MNIST in the paper; its other mix takes KMNIST as `difficult`).

    Example:
        >>> d = Dataset(torch.zeros(30, 2), torch.zeros(30, dtype=torch.long), "toy")
        >>> mix = easy_difficult(d, n_easy=20, n_difficult=10)
        >>> mix.group.tolist() == [0] * 20 + [1] * 10
        True
    """
    rng = generator(seed)
    needed = n_easy + (n_difficult if difficult is None else 0)
    if needed > len(easy) or (difficult is not None and n_difficult > len(difficult)):
        raise InputError(f"asked for {n_easy} easy and {n_difficult} difficult examples of {easy} and {difficult}")
    order = torch.randperm(len(easy), generator=rng)
    first = easy.subset(order[:n_easy])
    if difficult is None:
        rest = easy.subset(order[n_easy:needed])
        rest = replace(rest, y=torch.randint(n_classes, (n_difficult,), generator=rng).to(rest.y))
    else:
        rest = difficult.subset(torch.randperm(len(difficult), generator=rng)[:n_difficult])
    group = torch.cat([torch.zeros(n_easy), torch.ones(n_difficult)]).long()
    info = {"groups": ("easy", "difficult"), "difficult": "random labels" if difficult is None else difficult.name}
    x, y = torch.cat([first.x, rest.x]), torch.cat([first.y, rest.y])
    return Dataset(x, y, "easy-difficult", seed_of(seed), info, group)


@checked
def balanced_cells(y: Vector, attribute: Vector, per_cell: Count = 180, *, cap: bool = False, seed: Seed = 0) -> Tensor:
    """Positions of `per_cell` random examples of every (label, attribute) cell, sorted.

    A cell that is too small is an error that names it, or with `cap` every cell is cut to the smallest one.

    Example:
        >>> balanced_cells(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 0]), 5, cap=True).numel()
        2
    """
    rng = generator(seed)
    values = [torch.unique(t).tolist() for t in (y, attribute)]
    cells = {(a, b): ((y == a) & (attribute == b)).nonzero().flatten().cpu() for a in values[0] for b in values[1]}
    cells = {key: index for key, index in cells.items() if len(index)} if cap else cells
    small = {key: len(index) for key, index in cells.items() if len(index) < per_cell}
    if small and not cap:
        raise InputError(f"cells (label, attribute): count with fewer than {per_cell} examples: {small}; pass cap=True")
    size = min([per_cell, *small.values()])
    chosen = [index[torch.randperm(len(index), generator=rng)[:size]] for index in cells.values()]
    return torch.cat(chosen).sort().values


@checked
def spurious(
    images: Annotated[Tensor, shaped(4, finite=True)],
    y: Vector,
    kind: Literal["patch", "colour"] = "patch",
    *,
    agreement: Share = 0.95,
    patch: Count = 3,
    seed: Seed = 0,
) -> Dataset:
    """Grey images [n, 1, h, w] in [0, 1] with a spurious feature that agrees with the binary label y in {0, 1}.

    A stand-in for photographs with spurious attributes (blond hair and gender, birds and backgrounds): "patch" paints a
    white square into the top left (attribute 0) or top right corner (1); "colour" turns the grey image red (0) or green
    (1), [n, 3, h, w]. In each class exactly round(agreement * count) examples agree. `group` is 1 where it does not.

    Example:
        >>> d = spurious(torch.zeros(40, 1, 8, 8), torch.arange(40) % 2, agreement=0.9)
        >>> int(d.group.sum()), d.info["attribute"].shape
        (4, torch.Size([40]))
    """
    if images.shape[1] != 1 or patch > images.shape[3] or not set(y.tolist()) <= {0, 1}:
        given = f"{list(images.shape)} and {sorted(set(y.tolist()))}"
        raise InputError(f"need grey images [n, 1, h, w], at least {patch} wide, and labels 0 and 1; got {given}")
    rng = generator(seed)
    disagrees = torch.zeros(len(y), dtype=torch.bool)
    for value in (0, 1):
        index = (y.cpu() == value).nonzero().flatten()
        index = index[torch.randperm(len(index), generator=rng)]
        disagrees[index[round(agreement * len(index)) :]] = True
    disagrees = disagrees.to(y.device)
    attribute = torch.where(disagrees, 1 - y, y)
    if kind == "patch":
        x = images.clone()
        x[attribute == 0, :, :patch, :patch] = 1
        x[attribute == 1, :, :patch, -patch:] = 1
    else:
        x = images.new_zeros(len(images), 3, *images.shape[2:])
        x[torch.arange(len(y)), attribute.long()] = images[:, 0]
    info = {"attribute": attribute, "agreement": agreement, "stand_in": "synthetic spurious feature, not a photograph"}
    return Dataset(x, y, f"spurious-{kind}", seed_of(seed), info, disagrees.long())
