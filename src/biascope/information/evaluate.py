"""The value of an estimator on pairs that its critic was not trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from biascope.information.bounds import donsker_varadhan, info_nce, jensen_shannon, log_mean_exp, mine_f, nwj, smile
from biascope.information.critics import all_scores, block_scores

DRAWS = 200_000  # independent draws scored for the reported number
QUICK_DRAWS = 20_000  # and for a value on the curve


@dataclass(frozen=True)
class Report:
    """A number with its standard error, from `n` pairs; `carriers`: rows that carry E_Q[e^T] (see `carriers`)."""

    nats: float
    standard_error: float
    n: int
    carriers: float = math.inf
    cap: float | None = None
    plug_in: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Pairs x [n, ...], y [n, ...] in blocks of `block`, on which a critic is judged by an estimator."""

    estimator: str
    x: Tensor
    y: Tensor
    block: int
    clip: float

    def scores(self, critic: nn.Module, draws: int) -> tuple[Tensor, Tensor]:
        """Scores of pairs [B, b] and of independent draws [B, b, s], of which there are at most about `draws`."""
        shifts = min(self.block - 1, max(4, draws // len(self.x)))
        return block_scores(critic, self.x, self.y, self.block, shifts)

    def info_nce_blocks(self, critic: nn.Module) -> Tensor:
        """InfoNCE [B] of every block."""
        whole = len(self.x) - len(self.x) % self.block
        blocks = zip(torch.split(self.x[:whole], self.block), torch.split(self.y[:whole], self.block))
        with torch.no_grad():
            return torch.stack([info_nce(all_scores(critic, x, y).double()) for x, y in blocks])

    def validate(self, critic: nn.Module) -> tuple[float, float]:
        """The value for the curve, and the one by which the training step is chosen (others for smile and mine)."""
        if self.estimator == "infonce":
            value = float(self.info_nce_blocks(critic).mean())
            return value, value
        joint, marginal = self.scores(critic, QUICK_DRAWS)
        if self.estimator == "smile":
            return float(smile(joint, marginal, self.clip)), float(jensen_shannon(joint, marginal))
        if self.estimator == "mine":
            # chosen by what will be reported: a critic whose E_Q[e^T] differs between two halves is of no use
            halves = (joint[::2], marginal[::2]), (joint[1::2], marginal[1::2])
            crossed = [tangent(j, m, log_mean_exp(other)) for (j, m), (_, other) in zip(halves, halves[::-1])]
            return float(donsker_varadhan(joint, marginal)), float(sum(crossed) / 2)
        value = float({"mine-f": mine_f, "nwj": nwj}[self.estimator](joint, marginal))
        return value, value

    def report(self, critic: nn.Module, other: Evaluation) -> Report:
        """The number: mean over blocks, and their standard error. `other` holds pairs that are not these."""
        if self.estimator == "infonce":
            values = self.info_nce_blocks(critic)
            return _over_blocks(values, self.block, cap=math.log(self.block))
        joint, marginal = self.scores(critic, DRAWS)
        if self.estimator == "smile":
            # the logarithm is of the mean over all blocks; the blocks say how it varies, through its tangent there: the
            # logarithms of their own means, of two pairs each for few pairs, vary far more
            clipped = marginal.clamp(-self.clip, self.clip)
            at = log_mean_exp(clipped)
            spread = _over_blocks(torch.stack([tangent(j, m, at) for j, m in zip(joint, clipped)]), self.block)
            return Report(float(smile(joint, marginal, self.clip)), spread.standard_error, spread.n)
        plug_in = None
        if self.estimator == "mine":
            plug_in = float(donsker_varadhan(joint, marginal))
            log_partition = log_mean_exp(other.scores(critic, DRAWS)[1])
            values = torch.stack([tangent(j, m, log_partition) for j, m in zip(joint, marginal)])
        else:
            bound = mine_f if self.estimator == "mine-f" else nwj
            values = torch.stack([bound(j, m) for j, m in zip(joint, marginal)])
        return _over_blocks(values, self.block, carriers=carriers(marginal), plug_in=plug_in)


def _over_blocks(
    values: Tensor,
    block: int,
    carriers: float = math.inf,
    cap: float | None = None,
    plug_in: float | None = None,
) -> Report:
    error = float(values.std() / math.sqrt(len(values)))
    return Report(float(values.mean()), error, len(values) * block, carriers, cap, plug_in)


def tangent(joint: Tensor, marginal: Tensor, log_partition: Tensor) -> Tensor:
    """Donsker-Varadhan with log u replaced by its tangent at a, u/a + log a - 1 >= log u, for a given log a.

    With a from other pairs it is unbiased, and so a lower bound in expectation.

    Example:
        >>> joint, marginal = torch.tensor([2.0]), torch.tensor([0.5, 0.5])
        >>> tangent(joint, marginal, torch.tensor(0.5)).item(), tangent(joint, marginal, torch.tensor(0.0)).item() < 1.5
        (1.5, True)
    """
    return nwj(joint - log_partition, marginal - log_partition)


def carriers(marginal: Tensor) -> float:
    """(sum w)^2 / sum w^2 for w_i = sum_s e^T_is: how many rows x_i share the mean of e^T.

    Example:
        >>> round(carriers(torch.zeros(5, 8, 3)))
        40
    """
    rows = marginal.flatten(0, 1).logsumexp(1)
    return float((2 * rows.logsumexp(0) - (2 * rows).logsumexp(0)).exp())
