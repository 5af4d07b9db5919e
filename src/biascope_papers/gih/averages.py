"""Averages over networks: their correlations with errors, without a matrix per epoch, and without sampling noise.

G^t = (1/RP) sum g g^T over gradients g, so <g g^T, h h^T> = (g.h)^2 and <g g^T, M> = g^T M g. Sums are kept per pair of
networks, so that leaving one out (the jackknife) costs nothing. The norm of a mean of R independent estimates A_i is
too long by its noise; products <A_i, A_j> with i != j in place of ||A||^2 have no such bias.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from biascope.studies import Estimate


def jackknife(function: Callable[[Tensor], Tensor], R: int) -> tuple[Tensor, Tensor | None]:
    """A function of weights [R] over networks at equal weights, and its standard error from leaving one out."""
    ones = torch.ones(R, dtype=torch.float64)
    whole = function(ones)
    if R < 3:
        return whole, None
    left = torch.stack([function(ones.index_fill(0, torch.tensor([i]), 0.0)) for i in range(R)])
    return whole, ((R - 1) / R * (left - left.mean(0)).square().sum(0)).sqrt()


def estimate(function: Callable[[Tensor], Tensor], R: int) -> Estimate:
    """A scalar function of the weights with its jackknife error."""
    value, error = jackknife(function, R)
    return Estimate(float(value), None if error is None else float(error), R)


def finite(found: Estimate) -> Estimate:
    """An estimate whose error is unknown where it is not finite."""
    known = found.standard_error is not None and math.isfinite(found.standard_error)
    return found if known else Estimate(found.value, None, found.n)


def overlap(A: Tensor, B: Tensor) -> Tensor:
    """[R, R]: sum over probes of (g.h)^2 between network i of A [R, P, D] and network j of B [R, P, D]."""
    R, P, D = A.shape
    products = A.reshape(R * P, D).double() @ B.reshape(R * P, D).double().T
    return products.square().view(R, P, R, P).sum((1, 3))


def energy(A: Tensor, M: Tensor) -> Tensor:
    """[R]: sum over probes of g^T M g for each network of A [R, P, D]."""
    flat = A.double()
    return torch.einsum("rpd,rpd->r", flat @ M.to(flat), flat)


class History:
    """Correlations along a training: gradients [epochs + 1, R, P, D] of R networks at the same probes throughout.

    All take weights w [R] over networks.
    """

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients
        self.times, self.R = len(gradients), gradients.shape[1]
        self.own = torch.stack([overlap(g, g) for g in gradients]).cpu()  # [T, R, R]
        self.first = torch.stack([overlap(g, gradients[0]) for g in gradients]).cpu()
        self.step = torch.stack([overlap(a, b) for a, b in zip(gradients[1:], gradients[:-1])]).cpu()

    def velocity(self, w: Tensor, between: bool = False) -> Tensor:
        """1 - Corr(G^t, G^{t-1}), [T - 1]; `between`: from products of different networks alone.

        A network that wanders moves its own g g^T, but not the mean over all that could have been drawn; the share 1 /
        R of it is seen as motion. `between` takes two networks or more and can be below 0.
        """
        kept = 1 - torch.eye(self.R, dtype=self.own.dtype) if between else torch.ones(())
        norms = _pairs(self.own * kept, w).sqrt()
        if between:
            return 1 - _pairs(self.step * kept, w) / (norms[1:] * norms[:-1])
        return 1 - (_pairs(self.step, w) / (norms[1:] * norms[:-1])).clamp(-1, 1)

    def with_start(self, w: Tensor) -> Tensor:
        """Corr(G^t, G^0), [T]."""
        norms = _pairs(self.own, w).sqrt()
        return (_pairs(self.first, w) / (norms * norms[0])).clamp(-1, 1)

    def energies(self, M: Tensor) -> Tensor:
        """<G^t, M> per network, [T, R]; give it to `with_matrix` and `change_with_matrix`."""
        return torch.stack([energy(g, M) for g in self.gradients]).cpu()

    def with_matrix(self, energies: Tensor, norm: float, w: Tensor) -> Tensor:
        """Corr(G^t, M), [T], from `energies(M)` and ||M||_F."""
        return ((energies @ w) / (_pairs(self.own, w).sqrt() * norm)).clamp(-1, 1)

    def moved(self, w: Tensor) -> Tensor:
        """||G^t - G^0||_F^2, [T], up to a factor."""
        own = _pairs(self.own, w)
        return own + own[0] - 2 * _pairs(self.first, w)

    def change_with_matrix(self, energies: Tensor, norm: float, w: Tensor) -> Tensor:
        """Signed Corr(G^t - G^0, M) for t = 1, ..., [T - 1]."""
        found: Tensor = ((energies - energies[0]) @ w)[1:] / (self.moved(w)[1:].clamp_min(1e-300).sqrt() * norm)
        return found.clamp(-1, 1)  # a change that is small beside G^t is a difference of large numbers


def probe_floor(gradients: Tensor) -> float:
    """The velocity that fresh probes alone would give: `geometry.velocity_floor` from gradients [R, P, D]."""
    by_probe, n = gradients.transpose(0, 1), gradients.shape[1]
    pairs = overlap(by_probe, by_probe)
    apart = (pairs.sum() - pairs.trace()) / (n * (n - 1))
    across = (pairs.diagonal().mean() - apart - pairs.mean(1).var() / pairs.mean()).clamp_min(0.0)
    return float(across / (n * apart + across))


def _pairs(sums: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("tij,i,j->t", sums, w, w)


@dataclass(frozen=True)
class Averages:
    """Independent estimates [R, D, D] of one symmetric matrix."""

    matrices: Tensor = field(repr=False)
    gram: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gram", gram(self.matrices))

    @property
    def R(self) -> int:
        """How many estimates."""
        return len(self.matrices)

    @property
    def mean(self) -> Tensor:
        """Their mean [D, D]."""
        return self.matrices.mean(0)

    def along(self, M: Tensor) -> Tensor:
        """<A_i, M>, [R]."""
        found: Tensor = torch.einsum("rij,ij->r", self.matrices, M.to(self.matrices))
        return found.double().cpu()

    def correlation(self, M: Tensor, between: bool = True) -> Estimate:
        """Signed Corr(mean, M), at most 1 in length as correlations are. NaN where `squared` is not above 0."""
        return limited(self.ratio(self.along(M) / M.double().norm().cpu(), between))

    def ratio(self, products: Tensor, between: bool = True) -> Estimate:
        """Mean of numbers [R], one of each estimate and linear in it, over the norm of the mean."""
        return finite(estimate(lambda w: (products @ w) / w.sum() / squared(self.gram, w, between).sqrt(), self.R))

    def noise(self) -> float:
        """Share of the mean that is sampling noise, ||mean - truth|| / ||mean||."""
        w = torch.ones(self.R, dtype=torch.float64)
        return float((1 - squared(self.gram, w) / squared(self.gram, w, between=False)).clamp(0, 1).sqrt())


def gram(matrices: Tensor) -> Tensor:
    """Products [R, R] of matrices [R, ...], float64."""
    flat = matrices.flatten(1)
    return (flat @ flat.T).double().cpu()


def squared(gram: Tensor, w: Tensor, between: bool = True) -> Tensor:
    """||mean||^2 with weights w [R] from products [R, R]; `between`: of different estimates alone, can be below 0."""
    pairs = torch.outer(w, w)
    if between:
        pairs = pairs - torch.diag(pairs.diagonal())
    return (gram * pairs).sum() / pairs.sum()


def limited(correlation: Estimate) -> Estimate:
    """In [-1, 1], which a correlation with the noise taken off its norm may leave: that norm is an estimate itself."""
    return replace(correlation, value=min(max(correlation.value, -1.0), 1.0))


def rotated_away(A: Averages, M: Tensor, between: bool = True) -> tuple[Estimate, Estimate]:
    """What random rotations of M would give, E Corr(mean, Q M Q^T), and Corr(mean, M) less that."""
    D = len(M)
    eye = torch.eye(D, dtype=M.dtype, device=M.device)
    flat = A.along(eye) * float(M.trace() / M.norm()) / D  # <A, I> <M, I> / (D ||M||): the mean over rotations
    return limited(A.ratio(flat, between)), A.ratio(A.along(M) / float(M.norm()) - flat, between)


def without_mean(A: Averages, M: Tensor) -> Estimate:
    """Corrected Corr(mean, M) after the mean eigenvalue has been taken out of both: what is not a multiple of I."""
    eye = torch.eye(len(M), dtype=M.dtype, device=M.device)
    shifts = (A.along(eye) / len(M)).to(A.matrices)[:, None, None]
    return Averages(A.matrices - shifts * eye.to(A.matrices)).correlation(M - M.trace() / len(M) * eye)


def stacked(parts: Sequence[Tensor]) -> Averages:
    """Estimates [D, D] one by one."""
    return Averages(torch.stack([part.double() for part in parts]))
