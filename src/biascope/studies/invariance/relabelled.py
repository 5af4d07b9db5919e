"""Images relabelled by a boundary along one direction: accuracy for every direction of a list (Figs 4 and 11).

As `biascope.data.relabel`, for many directions at once. The label noise of the paper (labels computed on x + noise, the
noise iid per pixel with 0.2 times the channel's variance) enters a label only through its projection on u, which is
Gaussian with variance 0.2 sum_c var_c |u_c|^2; that projection is drawn directly.

The sinusoidal label is the sign of sin(pi (x.u - mean)/std) minus its median ("projection", the published code), or of
sin(xbar.u) minus its median with every channel of xbar standardised ("channel", the text).

Given an image, its noisy label is random and depends on x.u alone. The ceiling is the expected accuracy of the best
rule there is, which gives every image its more likely label. (After a run at a laptop's size had been seen: the share
of labels that noise leaves unchanged had been taken for it. That is the same for the linear boundary, but lower for the
others, where the label without noise is not always the more likely one.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from biascope.arguments import check_number
from biascope.data import channel_stats
from biascope.data.boundaries import Boundary, Sinusoid, boundary_value, middle
from biascope.seeds import generator
from biascope.studies.invariance.networks import factory
from biascope.studies.invariance.tasks import Lazy
from biascope.studies.invariance.training import Protocol, train_tasks
from biascope.studies.runs import Run

Sine = Annotated[Sinusoid, "sin(pi (x.u - mean)/std) (projection, published code), or sin(xbar.u) (channel, text)"]


@dataclass(frozen=True)
class Labels:
    """Labels [directions, n] of training and test images, and the best expected accuracy on the test images."""

    train: Tensor = field(repr=False)
    test: Tensor = field(repr=False)
    ceiling: Tensor  # [directions]


def labels_along(
    train: Tensor,
    test: Tensor,
    U: Tensor,
    boundary: Boundary,
    noise: float,
    seed: int,
    repeat: int,
    sinusoid: Sinusoid = "projection",
) -> Labels:
    """Labels of images [n, c, h, w] for every unit direction of U [k, c, h, w]; bias: minus the training median."""
    check_number(noise, "noise", least=0)
    middles, std = channel_stats(train)
    standardised = boundary == "sinusoidal" and sinusoid == "channel"
    if standardised:  # by what the labels are computed on, so with the noise
        mean_, scale = (s.to(U).view(-1, 1, 1) for s in (middles, std * math.sqrt(1 + noise)))
        train, test = ((x - mean_.to(x)) / scale.to(x) for x in (train, test))
        _, std = channel_stats(train)
    spread = (noise * (std.square().to(U)[None] * U.flatten(2).square().sum(2)).sum(1)).sqrt()  # [k]
    clean = [x.flatten(1) @ U.flatten(1).T for x in (train, test)]  # [n, k]
    seen = []
    for part, values in zip(("train", "test"), clean):
        draw = torch.randn(values.shape, generator=generator(seed, "label noise", part, repeat)).to(values)
        seen.append(values + draw * spread.to(values))
    mean, deviation = seen[0].mean(0), seen[0].std(0, correction=0).clamp_min(1e-30)

    def angle(p: Tensor) -> Tensor:
        return p if standardised else math.pi * (p - mean) / deviation

    inner = [boundary_value(p, angle(p), boundary) for p in seen]
    median = middle(inner[0])
    y_train, y_test = ((value > median).long().T.contiguous() for value in inner)
    if boundary == "sinusoidal":
        wide = spread if standardised else math.pi * spread / deviation
        chance = chance_of_one(angle(clean[1]), wide, median, boundary)
    else:
        chance = chance_of_one(clean[1], spread, median, boundary)
    return Labels(y_train, y_test, chance.maximum(1 - chance).mean(0).float().cpu())


def chance_of_one(value: Tensor, spread: Tensor, bar: Tensor, boundary: Boundary) -> Tensor:
    """P(label 1 | value [n, k]) when Gaussian noise of deviation `spread` [k] is added to the value, [n, k], float64.

    The value is the projection, or the angle of a sinusoidal boundary; the label is 1 where the projection, its square
    or the angle's sine is above `bar` [k].

    Example:
        >>> chance_of_one(torch.zeros(1, 1), torch.ones(1), torch.ones(1), "quadratic")  # 1 - 0.683
        tensor([[0.3173]], dtype=torch.float64)
    """
    value, spread, bar = value.double(), spread.double().clamp_min(1e-30), bar.double()
    end = torch.full_like(bar, math.inf)
    if boundary == "linear":
        ranges = [(bar, end)]
    elif boundary == "quadratic":
        root = bar.clamp_min(0).sqrt()
        ranges = [(-end, -root), (root, end)]
    else:
        value, low = torch.remainder(value + math.pi, 2 * math.pi) - math.pi, bar.clamp(-1, 1).asin()
        spread = spread.clamp_max(10.0)  # wider noise makes the angle as uniform as this
        turns = 1 + math.ceil(8 * float(spread.max()) / (2 * math.pi))  # noise of 8 deviations does not happen
        ranges = [(low + 2 * math.pi * k, math.pi - low + 2 * math.pi * k) for k in range(-turns, turns + 1)]
    parts = [torch.special.ndtr((b - value) / spread) - torch.special.ndtr((a - value) / spread) for a, b in ranges]
    return torch.stack(parts).sum(0)


def sweep_labels(
    run: Run,
    key: str,
    net: str,
    train: Tensor,
    test: Tensor,
    directions: Sequence[Tensor],
    boundary: Boundary,
    protocol: Protocol,
    *,
    noise: float,
    repeats: int,
    chunk: int,
    sinusoid: Sinusoid = "projection",
) -> tuple[Tensor, Tensor, Tensor]:
    """Training accuracy, test accuracy and ceiling, each [repeats, directions]; one network for each entry."""
    U, count = torch.stack(list(directions)).to(run.device), len(directions)
    train, test = train.to(run.device), test.to(run.device)
    labels = [labels_along(train, test, U, boundary, noise, run.seed, r, sinusoid) for r in range(repeats)]
    done = train_tasks(
        run,
        f"{key} {net} {boundary}",
        factory(net, tuple(train.shape[1:]), norm=False),
        Lazy(lambda i: (train, labels[i // count].train[i % count]), repeats * count),
        [Lazy(lambda i: (test, labels[i // count].test[i % count]), repeats * count)],
        protocol,
        chunk=chunk,
    )
    ceiling = torch.stack([each.ceiling for each in labels])
    return done.train.view(repeats, count), done.test[:, 0].view(repeats, count), ceiling


def said_sinusoid(boundaries: Sequence[str], sinusoid: Sinusoid) -> str:
    """Which sinusoidal boundary was used, for `measured`; nothing where none was.

    Example:
        >>> said_sinusoid(["linear", "sinusoidal"], "channel")
        " Sinusoidal labels: sin(xbar.u) with standardised channels, the paper's text."
    """
    if "sinusoidal" not in boundaries:
        return ""
    if sinusoid == "channel":
        return " Sinusoidal labels: sin(xbar.u) with standardised channels, the paper's text."
    return " Sinusoidal labels: sin(pi (x.u - mean)/std), the published code's, not the text's sin(xbar.u)."
