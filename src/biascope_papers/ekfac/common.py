"""What the studies of EKFAC share: data, batches in a fixed order, a network along its training."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn import functional as F

from biascope import InputError, data
from biascope.studies import Run
from biascope.support import generator

Row = dict[str, Any]  # what a run has stored of one training


def require(holds: bool, wanted: str) -> None:
    """Options that make no sense together are refused in these words."""
    if not holds:
        raise InputError(wanted)


def images(name: str, n: int, run: Run, part: Literal["train", "test"] = "train") -> tuple[Tensor, Tensor]:
    """The first n images [n, d] of a part, in [0, 1], and their labels, on the run's device."""
    found = data.load(name, part)
    return found.x[:n].flatten(1).to(run.device), found.y[:n].to(run.device)


def batch(run: Run, seed: int, step: int, n: int, size: int) -> Tensor:
    """Indices of the batch of a step: the same for every optimiser."""
    return torch.randint(n, (size,), generator=generator(run.seed, "batch", seed, step)).to(run.device)


def along_training(
    run: Run, net: nn.Module, x: Tensor, y: Tensor, seed: int, points: int, steps: int, lr: float, size: int
) -> Iterator[int]:
    """0 for the network as it is, then 1, 2, ... after `steps` more steps of SGD (momentum 0.9) each."""
    sgd = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for point in range(points):
        for step in range(max(0, point - 1) * steps, point * steps):
            sgd.zero_grad()
            chosen = batch(run, seed, step, len(x), size)
            backward(F.cross_entropy(net(x[chosen]), y[chosen]))
            sgd.step()
        yield point


def reconstruction(net: nn.Module, x: Tensor) -> Tensor:
    """Cross-entropy of the pixels, summed over pixels, averaged over examples."""
    return F.binary_cross_entropy_with_logits(net(x), x, reduction="sum") / len(x)


@torch.no_grad()
def glorot(net: nn.Module, generator: torch.Generator) -> None:
    """Weights uniform within 4 sqrt(6 / (fan_in + fan_out)), biases 0: what Glorot and Bengio advise for sigmoids."""
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            bound = 4 * math.sqrt(6 / sum(layer.weight.shape))
            layer.weight.copy_((2 * torch.rand(layer.weight.shape, generator=generator) - 1) * bound)
            layer.bias.zero_()
