"""Pairs of samples: what is accepted, what counts as a label, and how pairs are split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.seeds import generator


def is_discrete(values: Tensor) -> bool:
    """Whether a tensor holds labels (integers or booleans) rather than numbers.

    Example:
        >>> is_discrete(torch.tensor([1, 2])), is_discrete(torch.tensor([1.0, 2.0]))
        (True, False)
    """
    return not values.dtype.is_floating_point


def checked_pairs(x: Tensor, y: Tensor, least: int, why: str) -> tuple[Tensor, Tensor]:
    """x and y without gradients, after every check that does not depend on the estimator."""
    for name, values in (("x", x), ("y", y)):
        if not isinstance(values, Tensor):
            raise InputError(f"{name} must be a tensor [n, ...], got {type(values).__name__}; use torch.as_tensor")
        if values.dim() == 0 or values.numel() == 0:
            raise InputError(f"{name} has shape {list(values.shape)}: expected [n, ...] with at least one feature")
        if values.is_complex():
            raise InputError(f"{name} is complex: pass real and imaginary parts as two features (torch.view_as_real)")
    if len(x) != len(y):
        raise InputError(f"x has {len(x)} samples and y has {len(y)}: row i of both must belong to one pair")
    if x.device != y.device:
        raise InputError(f"x is on {x.device} and y on {y.device}: move both to one device")
    if len(x) < least:
        raise InputError(f"{len(x)} pairs are too few: {why} at least {least}")
    for name, values in (("x", x), ("y", y)):
        if not is_discrete(values):
            bad = ~torch.isfinite(values).reshape(len(values), -1).all(1)
            if bool(bad.any()):
                row, count = int(bad.nonzero()[0]), int(bad.sum())
                raise InputError(
                    f"{name} has NaN or infinite values in {count} of {len(values)} rows, first in row {row}"
                )
        else:
            _check_labels(name, values)
    return x.detach(), y.detach()


def _check_labels(name: str, values: Tensor) -> None:
    if values.numel() != len(values):
        raise InputError(
            f"{name} has dtype {values.dtype} and shape {list(values.shape)}: integers are read as labels, one per "
            f"sample; pass {name}.float() if they are numbers (pixels, counts)"
        )
    classes = len(torch.unique(values))
    if classes > max(2, len(values) // 4):
        raise InputError(
            f"{name} has dtype {values.dtype} and {classes} different values in {len(values)} samples: too many for "
            f"labels; pass {name}.float() if they are numbers"
        )


@dataclass(frozen=True)
class Split:
    """Three parts of the pairs: trained on, used to choose when to stop, and used for the reported number only."""

    train: Tensor
    validation: Tensor
    held_out: Tensor


def split_pairs(n: int, held_out: float, seed: int, device: torch.device) -> Split:
    """A seeded shuffle of 0..n-1 cut in three: `held_out` of all, half as many for validation, the rest to train on.

    Example:
        >>> [len(part) for part in vars(split_pairs(1000, 0.2, 0, torch.device("cpu"))).values()]
        [700, 100, 200]
    """
    if not 0 < held_out < 0.6:
        raise InputError(f"held_out is the share of pairs kept for the reported number, in (0, 0.6); got {held_out}")
    order = torch.randperm(n, generator=generator(seed, "split"), device="cpu").to(device)
    last = max(1, round(n * held_out))
    middle = max(1, last // 2)
    train, validation, kept = torch.split(order, [n - last - middle, middle, last])
    return Split(train, validation, kept)
