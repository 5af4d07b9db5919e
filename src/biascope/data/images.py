"""What the NAD papers do to images: poisoning along carriers, the flip of a basis, a channel with its own task; and how
much of what tells the classes of a set apart lies along which direction.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from biascope.arguments import check_count, check_number, check_tensor
from biascope.data.bases import complete_basis
from biascope.data.dataset import Dataset, Seed, check_classes, seed_of
from biascope.data.directional import Gap, directional_inputs
from biascope.errors import InputError
from biascope.inputs import check_inputs
from biascope.signatures import checked

Rule = Literal["choice", "code"]
CHUNK = 4096  # images in float64 at a time


@checked
def carriers(n_classes: int, n_channels: int = 3, rule: Rule = "choice") -> list[tuple[int, int, int]]:
    """For each class the (direction offset, channel, sign) that carries it; all triples are distinct.

    "choice": with p = y // 2, direction p // channels, channel p % channels, sign 2 (y % 2) - 1: the paper's printed
    rule, spilled into the next direction where its channel index runs out. "code": direction y // (2 channels), channel
    y % channels, same sign: the published code.

    Example:
        >>> carriers(4)
        [(0, 0, -1), (0, 0, 1), (0, 1, -1), (0, 1, 1)]
    """
    check_count(n_classes, "n_classes")
    check_count(n_channels, "n_channels")
    if rule == "choice":
        out = [(y // 2 // n_channels, y // 2 % n_channels, 2 * (y % 2) - 1) for y in range(n_classes)]
    else:
        out = [(y // (2 * n_channels), y % n_channels, 2 * (y % 2) - 1) for y in range(n_classes)]
    if len(set(out)) != n_classes:
        raise InputError(
            f'rule "{rule}" gives two of {n_classes} classes one carrier with {n_channels} channels; use "choice"'
        )
    return out


@checked
def poison(
    x: Tensor,
    y: Tensor,
    nads: Tensor,
    index: int = 0,
    *,
    eps: float = 0.05,
    rule: Rule = "choice",
    overwrite: Literal["own", "all"] = "own",
    n_classes: int = 10,
) -> Tensor:
    """Images x [n, c, h, w] whose coefficient along their class's carrier is replaced by +-eps: x + (s eps - <x, k>) k.

    `nads` [k, h, w] or [k, h w]: orthonormal directions, of which those from `index` (0-based) on are used; see
    `carriers`. Of used ones that are not orthonormal the coefficients would not be +-eps; they are refused.
    `overwrite="all"` also sets every other carrier to 0, which makes the set linearly separable for
    certain. Poison images in [0, 1], before normalisation.

    Example:
        >>> x = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
        >>> p = poison(x, torch.tensor([0, 1]), torch.eye(4), 0, n_classes=2)
        >>> [round(v, 4) for v in p[:, 0, 0, 0].tolist()]
        [-0.05, 0.05]
    """
    check_inputs(check_tensor(x, "x", dims=4, floating=True))
    check_classes(y, len(x))
    check_number(eps, "eps")
    check_tensor(nads, "nads", dims=(2, 3, 4))
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= n_classes):
        raise InputError(f"labels run from {int(y.min())} to {int(y.max())}; n_classes is {n_classes}")
    table = carriers(n_classes, x.shape[1], rule)
    n_directions = 1 + max(offset for offset, _, _ in table)
    if index < 0 or index + n_directions > len(nads):
        raise InputError(f"index {index} needs directions {index}..{index + n_directions - 1}, nads has {len(nads)}")
    used = _channel_rows(nads, x, "nads")[index : index + n_directions].to(x)
    _refuse_oblique(used, f"nads {index}..{index + n_directions - 1}")
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
def nad_flip(x: Tensor, nads: Tensor) -> Tensor:
    """U flip(U^T x) in every channel of x [n, c, h, w]: the content along the i-th NAD moves to the i-th from the end.

    Orthogonal, symmetric and its own inverse: no information is lost. `nads` [k, h, w] or [k, h w], most important
    first; a missing rest of the basis is completed (`complete_basis`).

    Example:
        >>> nad_flip(torch.arange(4.0).view(1, 1, 2, 2), torch.eye(4)).flatten().tolist()
        [3.0, 2.0, 1.0, 0.0]
    """
    check_inputs(check_tensor(x, "x", floating=True))
    if not len(check_tensor(nads, "nads", dims=(2, 3, 4), floating=True)):
        raise InputError("nads is empty: there is no direction to flip")
    if x.dim() != 4:
        raise InputError(f"expected x [n, c, h, w] with h w = {nads[0].numel()} (from nads), got {list(x.shape)}")
    u = complete_basis(_channel_rows(nads, x, "nads")).to(x)
    return ((x.flatten(2) @ u.T).flip(-1) @ u).view_as(x)


@checked
def underspecified(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    eps: float = 1.0,
    sigma: float = 3.0,
    gap: Gap = "full",
    seed: Seed = 0,
) -> Dataset:
    """Images x [n, c, h, w] with one more channel drawn from D(v) for the same binary labels y: two ways to be right.

    `gap` as in `directional`, "full" as in the studies.
    Test what was learnt with `zero_channels`: the last channel zeroed leaves the images, the others zeroed leave D(v).

    Example:
        >>> d = underspecified(torch.zeros(4, 3, 2, 2), torch.tensor([0, 1, 0, 1]), torch.ones(2, 2))
        >>> d.x.shape, d.info["image_channels"], d.info["directional_channels"]
        (torch.Size([4, 4, 2, 2]), [0, 1, 2], [3])
    """
    check_inputs(x)
    check_tensor(y, "y", dims=1)
    if len(y) != len(x):
        raise InputError(f"x has {len(x)} examples, y has {len(y)}")
    if x.dim() != 4:
        raise InputError(f"expected x [n, c, h, w], got {list(x.shape)}")
    extra = directional_inputs(
        y, _channel_rows(v[None], x, "v").view(1, *x.shape[2:]), eps=eps, sigma=sigma, gap=gap, seed=seed
    )
    c = x.shape[1]
    info = {
        "image_channels": list(range(c)),
        "directional_channels": [c],
        "eps": eps,
        "sigma": sigma,
        "gap": gap,
        "v": v,
    }
    return Dataset(torch.cat([x, extra.to(x)], 1), y, "underspecified", seed_of(seed), info)


@checked
def zero_channels(x: Tensor, channels: list[int]) -> Tensor:
    """A copy of x [n, c, ...] with the named channels set to 0.

    Example:
        >>> zero_channels(torch.ones(1, 2, 1, 1), [1]).flatten().tolist()
        [1.0, 0.0]
    """
    if x.dim() < 2 or not all(-x.shape[1] <= channel < x.shape[1] for channel in channels):
        raise InputError(f"channels {list(channels)} are not all in x [n, c, ...] of shape {list(x.shape)}")
    out = x.clone()
    out[:, channels] = 0
    return out


@checked
def class_mean_energies(x: Tensor, y: Tensor, directions: Tensor) -> Tensor:
    """How much of what tells the class means of a set apart lies along each direction: its alignment with a basis.

    e_i = sum_c p_c <mu_c - mu, u_i>^2 / sum_c p_c ||mu_c - mu||^2, with p_c the share of class c, mu_c the mean of its
    images and mu = sum_c p_c mu_c that of all. Over a complete basis (and all channels) the energies add up to 1. With
    the NADs of an architecture: a set whose energy lies along the first of them suits it. Means of few images keep some
    of the noise: with C classes, (C - 1) / n times its variance along u_i, in the mean and before the division.

    Args:
        x: images (or any inputs) [n, *shape].
        y: labels [n], any integers.
        directions: orthonormal, [k, *shape]; or directions of one channel, [k, h, w], [k, 1, h, w] or [k, h w] for x
            [n, channels, h, w], which are placed in each channel in turn.

    Returns:
        Energies in float64 on the CPU: [k], or [k, channels] for directions of one channel.

    Example:
        >>> x = torch.tensor([[1.0, 5.0], [1.0, -5.0], [-1.0, 3.0], [-1.0, -3.0]])
        >>> class_mean_energies(x, torch.tensor([0, 0, 1, 1]), torch.eye(2))
        tensor([1., 0.], dtype=torch.float64)
    """
    if x.dim() < 2 or y.shape != x.shape[:1] or not len(x):
        raise InputError(f"expected x [n, ...] and y [n], n > 0, got {list(x.shape)} and {list(y.shape)}")
    if directions.dim() < 2 or not len(directions):
        raise InputError(f"directions have shape {list(directions.shape)}; pass [k, ...], e.g. one as directions[None]")
    whole = directions.shape[1:] == x.shape[1:]
    if not whole and (x.dim() < 3 or not _of_a_channel(directions, x)):
        raise InputError(
            f"directions {list(directions.shape)} have neither the shape of an input {list(x.shape[1:])} nor that of "
            "one of its channels"
        )
    rows = directions.detach().flatten(1).cpu().double()
    _refuse_oblique(rows, "the directions")
    apart, shares = _class_means(x, y)  # [classes, D]
    shape = (len(apart), -1, rows.shape[1])  # [classes, 1 or channels, entries]
    energies = torch.einsum("c,cjk->kj", shares, (apart.view(shape) @ rows.T).square())
    energies = energies / (shares @ apart.square().sum(1))
    return energies[:, 0] if whole else energies


def _of_a_channel(directions: Tensor, x: Tensor) -> bool:
    """Are directions [k, ...] shaped like one channel of x [n, c, *shape]: [k, *shape], [k, 1, *shape] or flat?"""
    shape = tuple(x.shape[2:])
    return tuple(directions.shape[1:]) in {shape, (1, *shape), (math.prod(shape),)}


def _channel_rows(directions: Tensor, x: Tensor, name: str) -> Tensor:
    """Directions of one channel of x [n, c, h, w] as rows [k, h w]; equal numbers of entries are not enough."""
    if not _of_a_channel(directions, x):
        h, w = x.shape[2:]
        raise InputError(
            f"{name}: directions of {directions[0].numel()} entries, shape {list(directions.shape[1:])}, for images of "
            f"{h} x {w}; each needs the shape [{h}, {w}], [1, {h}, {w}] or [{h * w}]"
        )
    return directions.flatten(1)


def _class_means(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """mu_c - mu of every class, [classes, D], and the shares p_c, [classes]; refused where they all are the same."""
    _, index, counts = torch.unique(y.cpu(), return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), x[0].numel(), dtype=torch.float64, device="cpu")
    size = 0.0
    for start in range(0, len(x), CHUNK):
        piece = x[start : start + CHUNK].detach().flatten(1).cpu().double()
        sums.index_add_(0, index[start : start + CHUNK], piece)
        size += float(piece.square().sum()) / len(x)
    if not math.isfinite(size):
        raise InputError("x has entries that are not finite")
    shares = counts.double() / len(x)
    apart = sums / counts[:, None] - sums.sum(0) / len(x)
    energy = float(shares @ apart.square().sum(1))
    if not energy > 1e-26 * size:  # a difference of 1e-13 of the inputs is rounding
        raise InputError(f"the means of the {len(counts)} class(es) do not differ: there is no energy to share out")
    return apart, shares


def _refuse_oblique(rows: Tensor, what: str, tol: float = 1e-3) -> None:
    """Raise where rows [k, D] are not orthonormal; the tolerance is that of `complete_basis`."""
    wide = rows.double()
    error = float((wide @ wide.T - torch.eye(len(wide), dtype=wide.dtype, device=wide.device)).abs().max())
    if not error <= tol:
        raise InputError(f"{what} are not orthonormal (largest error of their Gram matrix {error:.3g} > {tol})")
