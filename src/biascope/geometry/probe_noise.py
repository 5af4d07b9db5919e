"""The velocity that probes alone give: what a change of the geometry must exceed where each time has its own probes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from biascope.ensembles import Networks, input_gradients
from biascope.ensembles.evaluate import Scalarise
from biascope.errors import InputError
from biascope.inputs import check_inputs
from biascope.memory import budget
from biascope.refusals import refuse_batch_dependence
from biascope.signatures import checked

LARGEST_BLOCK = 4096  # rows of a product of gradients: more are not faster


@checked
def velocity_floor(
    networks: Networks, probes: Tensor, scalarise: Scalarise | None = None, max_memory: str | int | None = None
) -> float:
    """1 - Corr(G, G') of the same networks at two independent sets of as many probes, expected from one set.

    G is a mean of M_p, the mean over networks of g g^T at probe p, over n probes. Noise along G only scales it, which a
    correlation does not see; noise of variance V / n across it gives Corr = 1 / (1 + V / (n ||E G||^2)) to leading
    order. V is the variance of M_p less that of its part along G, and ||E G||^2 the mean of <M_p, M_q> over p != q.
    Leading order: in simulations with ten probes right within 3 % up to a floor of 0.18, 15 % too low at 0.29.
    `velocity` with common probes has no such floor.

    Args:
        networks: T networks, stacked, in eval mode as far as batch normalisation and dropout are concerned.
        probes: [n, *input_shape], two or more independent draws.
        scalarise: outputs [n, c] -> [n]; one output, or the difference of two logits, by default.
        max_memory: of computing the gradients, and of what is held beside them, for example "4GB".

    Example:
        >>> from torch import nn
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=20)
        >>> abs(velocity_floor(drawn, torch.randn(4, 3))) < 1e-6  # the same gradient at every probe
        True
    """
    check_inputs(probes, "probes")
    if probes.dim() < 2 or len(probes) < 2:
        raise InputError(f"probes {list(probes.shape)}: two or more [n, *input_shape] are needed to tell their noise")
    refuse_batch_dependence(networks.template)
    gradients = input_gradients(networks, probes, scalarise=scalarise, max_memory=max_memory)
    return floor_of_gradients(gradients.flatten(2), max_memory)


def floor_of_gradients(gradients: Tensor, max_memory: str | int | None = None) -> float:
    """`velocity_floor` from input gradients [T, n, D] of T networks at n probes, in float64.

    Gradients are turned to float64 and multiplied in blocks, so that what is held beside them fits into `max_memory`.

    Example:
        >>> floor_of_gradients(torch.eye(2)[None]), floor_of_gradients(torch.ones(1, 2, 3))  # nothing, all in common
        (1.0, 0.0)
    """
    if gradients.dim() != 3 or gradients.shape[1] < 2 or not gradients.numel():
        raise InputError(f"gradients {list(gradients.shape)}: need [T, n, D] at n >= 2 probes to tell their noise")
    g, n = gradients.detach(), gradients.shape[1]
    size = _block(g, budget(max_memory, g.device))
    starts = range(0, g.shape[0] * n, size)
    largest = torch.cat([_rows(g, start, size).abs().amax(1) for start in starts]).view(-1, n).amax(0)
    if not bool(largest.isfinite().all()):
        raise InputError("the gradients hold NaN or infinity")
    if not bool((largest > 0).any()):
        raise InputError("all gradients are zero at these probes: there is no geometry to compare")
    if int((largest > 0).sum()) < 2:
        raise InputError(
            f"the gradients are zero at all but one of {n} probes, which tells nothing of noise; take more"
        )
    scale = float(largest.max())  # the result has no scale; fourth powers would leave the range of float64
    pairs = _inner_products(g, scale, size)
    apart = (pairs.sum() - pairs.trace()) / (n * (n - 1))
    spread = pairs.diagonal().mean() - apart  # of M_p, over the probes
    across = (spread - pairs.mean(1).var() / pairs.mean()).clamp_min(0.0)
    return float(across / (n * apart + across))


def _inner_products(g: Tensor, scale: float, size: int) -> Tensor:
    """<M_p, M_q> [n, n], times T^2: sums over networks of squared inner products of gradients; `size` rows at once."""
    T, n, _ = g.shape
    probe = torch.arange(T * n, device=g.device) % n
    pairs = torch.zeros(n, n, dtype=torch.float64, device=g.device)
    for i in range(0, T * n, size):
        own = _rows(g, i, size).div_(scale)
        for j in range(i, T * n, size):
            other = own if i == j else _rows(g, j, size).div_(scale)
            squares = (own @ other.T).square_()
            found = squares.new_zeros(len(own), n).index_add_(1, probe[j : j + size], squares)
            both = torch.zeros_like(pairs).index_add_(0, probe[i : i + size], found)
            pairs += both if i == j else both + both.T
    return pairs


def _rows(g: Tensor, start: int, size: int) -> Tensor:
    """A copy in float64 of rows `start` to `start + size` of the gradients [T n, D], network by network."""
    row = torch.arange(start, min(start + size, g.shape[0] * g.shape[1]), device=g.device)
    return g[row // g.shape[1], row % g.shape[1]].double()


def _block(g: Tensor, room: int) -> int:
    """Rows r at a time: three blocks [r, D] (one on its way to float64), products [r, r], their sums [r, n]."""
    linear = 3 * g.shape[2] + g.shape[1]
    return max(1, min(LARGEST_BLOCK, int((math.sqrt(linear**2 + room / 2) - linear) / 2)))
