"""The information bottleneck of discrete variables, exactly: what a trained bottleneck should come to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.seeds import generator
from biascope.signatures import checked

TINY = 1e-300
SHARP = 5.0  # of the random starts


@dataclass(frozen=True)
class Bottleneck:
    """q(z|x) `encoder` [x, z], I(x; z) `nats`, H(y|z) `uncertainty` in nats, and H(y|z) + beta I(x; z).

    An x that never occurs says nothing: its row is q(z).
    """

    encoder: Tensor
    nats: float
    uncertainty: float
    lagrangian: float


@checked
def discrete_bottleneck(
    joint: Tensor, beta: float, size: int | None = None, *, seed: int = 0, starts: int = 20, steps: int = 2000
) -> Bottleneck:
    """The encoder that minimises H(y|z) + beta I(x; z) for p(x, y) `joint` [x, y], by Blahut-Arimoto iterations.

    `size`: values of z (as many as of x by default). q(z), p(y|z) and q(z|x) ~ q(z) exp(-KL(p(y|x) | p(y|z)) / beta) in
    turn, each the best given the others, so the objective never rises; the best of `starts` random starts, as it has
    local minima. For beta >= 1 nothing is worth its price and I(x; z) = 0.

    Example:
        >>> joint = torch.tensor([[0.25, 0.0], [0.25, 0.0], [0.0, 0.5]])  # the first two x say the same
        >>> found = discrete_bottleneck(joint, beta=0.1)
        >>> round(found.nats, 4), round(found.uncertainty, 4)  # log 2: what y needs
        (0.6931, 0.0)
    """
    p = joint.double()
    if p.dim() != 2 or not bool((p >= 0).all() & p.isfinite().all()) or float(p.sum()) <= 0:
        raise InputError(
            f"joint must be a table [x, y] of probabilities, finite, not negative and not all 0; got shape "
            f"{list(joint.shape)} and a sum of {float(p.sum()):g}"
        )
    if not 0 < beta < math.inf or starts < 1 or steps < 1 or (size is not None and size < 1):
        raise InputError(
            f"need beta > 0, size >= 1, starts >= 1 and steps >= 1, got {beta}, {size}, {starts} and {steps}"
        )
    occurs = p.sum(1) > 0
    p = p[occurs] / p.sum()
    found = [_descend(p, beta, size or len(p), seed, start, steps) for start in range(starts)]
    best = min(found, key=lambda made: made.lagrangian)
    encoder = (p.sum(1) @ best.encoder).repeat(len(occurs), 1)
    encoder[occurs] = best.encoder
    return replace(best, encoder=encoder)


def _descend(p: Tensor, beta: float, size: int, seed: int, start: int, steps: int) -> Bottleneck:
    p_x = p.sum(1)
    p_y_x = p / p_x[:, None]
    rng = generator(seed, "bottleneck", start)
    logits = SHARP * torch.randn(len(p), size, generator=rng, dtype=torch.float64, device="cpu")
    encoder = logits.softmax(1).to(p.device)  # nearly one z for an x: blurred starts end in few z
    for _ in range(steps):
        q_z = p_x @ encoder
        p_y_z = (encoder.T @ p) / q_z.clamp_min(TINY)[:, None]
        cross = -p_y_x @ p_y_z.clamp_min(TINY).log().T  # the entropy of p(y|x) is the same for every z
        new = torch.softmax(q_z.clamp_min(TINY).log() - cross / beta, 1)
        still, encoder = bool((new - encoder).abs().max() < 1e-14), new
        if still:
            break
    q_z = p_x @ encoder
    q_yz = encoder.T @ p
    information = (p_x[:, None] * torch.xlogy(encoder, encoder)).sum() - torch.xlogy(q_z, q_z).sum()
    uncertainty = torch.xlogy(q_z, q_z).sum() - torch.xlogy(q_yz, q_yz).sum()
    nats, left = (max(0.0, float(v)) for v in (information, uncertainty))  # -1e-17 is 0
    return Bottleneck(encoder, nats, left, left + beta * nats)
