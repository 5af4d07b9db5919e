"""Classical bounds of the risk by what is seen on n examples: Hoeffding, finite classes, Occam, PAC-Bayes.

All say L <= L_hat + sqrt(Q / (2 n)) with probability 1 - delta over the draw of the examples, for a loss in [0, 1].
They differ in Q, and in the predictors that they hold for. Bounds by margins and Rademacher complexities, which speak
of tangent features, are in `biascope.curvature` (`margin_bound`, `learning_flow_bound`).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from biascope.support.arguments import check_number
from biascope.support.errors import InputError
from biascope.support.signatures import checked


@checked
def hoeffding_bound(empirical_risk: float, n: int, delta: float = 0.05) -> float:
    """Risk <= empirical risk + sqrt(log(1 / delta) / (2 n)), for one predictor that was chosen without the n examples.

    So for a test set and not for a training set: what was fitted to the examples needs a bound that holds for all it
    could have become. `empirical_risk` is the mean loss on the examples, in [0, 1].
    """
    return empirical_risk + _gap(0.0, empirical_risk, n, delta)


@checked
def finite_class_bound(empirical_risk: float, log_size: float, n: int, delta: float = 0.05) -> float:
    """Risk <= empirical risk + sqrt((log |F| + log(1 / delta)) / (2 n)), for all of a finite class F at once.

    `log_size`: log |F| in nats; 32 p log 2 for p parameters of 32 bits.
    """
    return occam_bound(empirical_risk, log_size, n, delta)


@checked
def occam_bound(empirical_risk: float, description_length: float, n: int, delta: float = 0.05) -> float:
    """Risk <= empirical risk + sqrt((log(1 / pi(f)) + log(1 / delta)) / (2 n)), for all predictors f at once.

    `description_length`: log(1 / pi(f)) in nats, pi a distribution over predictors that was fixed before the examples
    were seen; log 2 times the bits of f in a code without a word that begins another.
    """
    return empirical_risk + _gap(description_length, empirical_risk, n, delta)


@checked
def pac_bayes_bound(
    empirical_risk: float, kl: float, n: int, delta: float = 0.05, form: Literal["maurer", "printed"] = "maurer"
) -> float:
    """E_Q risk <= E_Q empirical risk + sqrt((KL(Q || Q_0) + log(2 sqrt(n) / delta)) / (2 n)), for all Q at once.

    The text prints log(1 / delta) in place of log(2 sqrt(n) / delta) (equation 15, form="printed"). That holds for all
    Q within a radius KL(Q || Q_0) <= kl that was fixed before the examples were seen, but is not proved for the
    divergence of a Q that was found by training; Maurer's (2004) is. `kl` is in nats (see `gaussian_kl`), Q_0 fixed
    before the examples were seen, `empirical_risk` the mean over predictors drawn from Q.
    """
    check_number(kl, "kl", least=0)
    extra = math.log(2 * math.sqrt(n)) if form == "maurer" and n >= 1 else 0.0
    return empirical_risk + _gap(kl + extra, empirical_risk, n, delta)


@checked
def gaussian_kl(mean: Tensor, std: Tensor | float, prior_mean: Tensor | float, prior_std: Tensor | float) -> float:
    """KL(N(mean, std^2) || N(prior_mean, prior_std^2)) of independent Gaussians over all entries, in nats and float64.

    `mean`: of Q, for example the trained parameters, any shape; the others are one number or one for every entry.
    """
    # numbers straight to float64: by way of float32, 0.1 would be off in the ninth digit
    every = (torch.as_tensor(t, device=mean.device, dtype=torch.float64) for t in (mean, std, prior_mean, prior_std))
    m, s, m0, s0 = (t.detach() for t in every)
    ratio = (s / s0).square()
    # near 1 the logarithm of the ratio keeps all digits; far from it the square may leave the range of float64
    log = torch.where((ratio > 1e-300) & (ratio < 1e300), ratio.log(), 2 * (s.log() - s0.log()))
    terms = ratio - 1 - log + ((m - m0) / s0).square()
    if terms.shape != m.shape or not bool((s > 0).all() & (s0 > 0).all()):
        raise InputError("mean needs the shape of all entries, and std and prior_std must be positive")
    return 0.5 * float(terms.sum())


def _gap(complexity: float, empirical_risk: float, n: int, delta: float) -> float:
    if not (0 <= empirical_risk <= 1 and n >= 1 and 0 < delta < 1 and complexity >= 0):
        raise InputError("need a mean loss from 0 to 1, n >= 1, 0 < delta < 1, and complexities (in nats) >= 0")
    return math.sqrt((complexity - math.log(delta)) / (2 * n))
