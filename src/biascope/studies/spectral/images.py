"""Two classes of a real image set, as the studies of label noise use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from biascope import data
from biascope.errors import InputError
from biascope.seeds import generator
from biascope.studies.runs import Run


def two_classes(
    run: Run, name: str, classes: Sequence[int], n: int, seed: int, share: float = 0.8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [n, d] in [0, 1] and y in {0, 1} of two classes, `share` of them for training: x, y, x_val, y_val.

    n = 0 takes all there are.
    """
    if len(classes) != 2:
        raise InputError(f"give two classes, got {tuple(classes)}")
    found = data.load(name, "train")
    chosen = ((found.y == classes[0]) | (found.y == classes[1])).nonzero()[:, 0]
    chosen = chosen[torch.randperm(len(chosen), generator=generator(seed, "split"))][: n or None]
    x = found.x[chosen].flatten(1).to(run.device)
    y = (found.y[chosen] == classes[1]).float().to(run.device)
    cut = round(share * len(x))
    return x[:cut], y[:cut], x[cut:], y[cut:]


STAND_IN = " 8x8 digits stand in for MNIST."


def said(name: str) -> str:
    """What to add to `measured` when the data are not those of the paper."""
    return STAND_IN if name == "digits" else "" if name == "mnist" else f" {name} stands in for MNIST."
