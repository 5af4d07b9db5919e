"""The velocity that probes alone give: what a change of the geometry must exceed where each time has its own probes."""

from __future__ import annotations

import torch
from torch import Tensor

from biascope.ensembles import Networks, input_gradients
from biascope.ensembles.evaluate import Scalarise
from biascope.errors import InputError
from biascope.functional import refuse_batch_dependence
from biascope.inputs import check_inputs
from biascope.signatures import checked


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
        max_memory: of the gradients, for example "4GB".

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
    return floor_of_gradients(gradients.flatten(2))


def floor_of_gradients(gradients: Tensor) -> float:
    """`velocity_floor` from input gradients [T, n, D] of T networks at n probes.

    Example:
        >>> floor_of_gradients(torch.eye(2)[None]), floor_of_gradients(torch.ones(1, 2, 3))  # nothing, all in common
        (1.0, 0.0)
    """
    if gradients.dim() != 3 or gradients.shape[1] < 2:
        raise InputError(f"gradients {list(gradients.shape)}: need [T, n, D] at n >= 2 probes to tell their noise")
    g = gradients.detach().double().transpose(0, 1)  # [n, T, D]
    n, largest = len(g), g.abs().amax((1, 2))
    if not bool(largest.isfinite().all()):
        raise InputError("the gradients hold NaN or infinity")
    if not bool((largest > 0).any()):
        raise InputError("all gradients are zero at these probes: there is no geometry to compare")
    if int((largest > 0).sum()) < 2:
        raise InputError(
            f"the gradients are zero at all but one of {n} probes, which tells nothing of noise; take more"
        )
    g = g / largest.max()  # the result has no scale; fourth powers would leave the range of float64
    # <M_p, M_q>, times T^2: sums over networks of squared inner products of gradients
    pairs = torch.stack([(own @ g.flatten(0, 1).T).square().view(len(own), n, -1).sum((0, 2)) for own in g])
    apart = (pairs.sum() - pairs.trace()) / (n * (n - 1))
    spread = pairs.diagonal().mean() - apart  # of M_p, over the probes
    across = (spread - pairs.mean(1).var() / pairs.mean()).clamp_min(0.0)
    return float(across / (n * apart + across))
