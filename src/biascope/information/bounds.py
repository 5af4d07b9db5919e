"""Bounds on mutual information from a critic's scores: T on pairs (joint) and T on independent draws (marginal).

P is the distribution of pairs (x, y), Q the product of its two marginals. Every function is differentiable, works on
logarithms of e^T throughout, and averages over all scores it is given.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from biascope.support.arguments import check_number
from biascope.support.errors import InputError
from biascope.support.signatures import checked


def log_mean_exp(scores: Tensor) -> Tensor:
    """log of the mean of e^scores over all entries, without overflow."""
    return _some(scores).flatten().logsumexp(0) - math.log(scores.numel())


def _some(scores: Tensor) -> Tensor:
    """The same scores, if there are any: torch's mean of none is a silent NaN."""
    if not scores.numel():
        raise InputError("no scores: a mean needs at least one")
    return scores


@checked
def donsker_varadhan(joint: Tensor, marginal: Tensor) -> Tensor:
    """E_P[T] - log E_Q[e^T], tight at T = log dP/dQ + any constant.

    joint, marginal: scores of any shape. With means over a finite sample in place of E_Q the logarithm is too small on
    average (Jensen), so the value is above the bound; `tangent` has no such bias.
    """
    return _some(joint).mean() - log_mean_exp(marginal)


@checked
def mine_f(joint: Tensor, marginal: Tensor) -> Tensor:
    """E_P[T] - E_Q[e^(T-1)], the f-divergence bound of MINE-f, tight at T = 1 + log dP/dQ.

    Never above Donsker-Varadhan for the same scores; unbiased in both means.
    """
    return _some(joint).mean() - (log_mean_exp(marginal) - 1).exp()


@checked
def nwj(joint: Tensor, marginal: Tensor) -> Tensor:
    """E_P[T] - E_Q[e^T] + 1: the same bound as `mine_f` with T moved by 1 (Nguyen, Wainwright, Jordan).

    Tight at T = log dP/dQ.
    """
    return _some(joint).mean() - log_mean_exp(marginal).exp() + 1


@checked
def info_nce(scores: Tensor) -> Tensor:
    """mean_i [T_ii - log mean_j e^T_ij] for scores [K, K] of x_i with y_j: at most log K, whatever the truth.

    The mean over j includes j = i; with it this is a lower bound in expectation for K independent pairs.
    """
    if scores.dim() != 2 or not scores.shape[0] == scores.shape[1] > 0:
        raise InputError(f"InfoNCE needs the scores of K >= 1 pairs, [K, K], got {list(scores.shape)}")
    return (scores.diagonal() - scores.logsumexp(1)).mean() + math.log(len(scores))


@checked
def smile(joint: Tensor, marginal: Tensor, clip: float = 5.0) -> Tensor:
    """E_P[T] - log E_Q[clip(e^T, e^-clip, e^clip)]: less variance than Donsker-Varadhan, but no bound any more.

    The critic that belongs to it is trained by `jensen_shannon`, whose optimum is log dP/dQ itself (Song and Ermon).
    """
    check_number(clip, "clip", above=0)
    return _some(joint).mean() - log_mean_exp(marginal.clamp(-clip, clip))


@checked
def jensen_shannon(joint: Tensor, marginal: Tensor) -> Tensor:
    """Lower bound on the Jensen-Shannon divergence of P and Q (at most log 2), tight at T = log dP/dQ.

    It is log 2 less the cross-entropy of telling pairs from independent draws by the logit T.
    """
    return math.log(2) - (softplus(-_some(joint)).mean() + softplus(_some(marginal)).mean()) / 2


def tangent(joint: Tensor, marginal: Tensor, log_partition: Tensor) -> Tensor:
    """Donsker-Varadhan with log u replaced by its tangent at a, u/a + log a - 1 >= log u, for a given log a.

    With a from other pairs it is unbiased, and so a lower bound in expectation.
    """
    return nwj(joint - log_partition, marginal - log_partition)


class MineObjective:
    """Donsker-Varadhan on a batch with the gradient of MINE: E[dT] - E[e^T dT] / (moving average of E[e^T]).

    The plain gradient of a batch divides by that batch's own mean of e^T and is biased. Here the divisor is an
    exponential moving average over batches (this batch counts with weight `rate`; with rate = 1 the gradient is the
    plain one). The value returned is the plain Donsker-Varadhan value of the batch. Needs no guard against overflow:
    the average is kept as a logarithm and is never below `rate` times the current mean.

    Example:
        >>> objective = MineObjective(rate=0.01)
        >>> joint, marginal = torch.tensor([2.0], requires_grad=True), torch.zeros(5, requires_grad=True)
        >>> value = objective(joint, marginal)
        >>> value.backward()
        >>> value.item(), round(marginal.grad[0].item(), 4)
        (2.0, -0.2)
    """

    @checked
    def __init__(self, rate: float = 0.01) -> None:
        if not 0 < rate <= 1:
            raise InputError(f"the rate of the moving average must lie in (0, 1], got {rate}")
        self.rate = rate
        self.log_average: Tensor | None = None

    def __call__(self, joint: Tensor, marginal: Tensor) -> Tensor:
        """Value of the batch, with the corrected gradient; moves the average."""
        log_mean = log_mean_exp(marginal)
        now = log_mean.detach()
        if self.log_average is None or self.rate == 1:
            self.log_average = now
        else:
            kept = self.log_average + math.log1p(-self.rate)
            self.log_average = torch.logaddexp(kept, now + math.log(self.rate))
        ratio = (log_mean - self.log_average).exp()
        return _some(joint).mean() - now - (ratio - ratio.detach())


@checked
def sample_size(
    parameters: int, accuracy: float, confidence: float, bound: float, radius: float, lipschitz: float
) -> int:
    """Pairs after which MINE's optimum over a bounded class is within `accuracy` of its population value (Theorem 5.5).

    n >= 2 M^2 (d log(16 K L sqrt(d) / eps) + 2 d M + log(2 / delta)) / eps^2 for d `parameters` with ||theta|| <= K
    (`radius`), a critic that is L-`lipschitz` in theta, |T| <= M and e^T <= M (`bound`), with probability
    1 - delta (`confidence`). Far from tight: it says how the need grows.
    """
    if not all(0 < v < math.inf for v in (parameters, accuracy, bound, radius, lipschitz)) or not 0 < confidence < 1:
        raise InputError("confidence must lie in (0, 1), all other numbers must be finite and positive")
    cover = parameters * math.log(16 * radius * lipschitz * math.sqrt(parameters) / accuracy)
    need = 2 * bound**2 * (cover + 2 * parameters * bound + math.log(2 / (1 - confidence))) / accuracy**2
    return math.ceil(need)
