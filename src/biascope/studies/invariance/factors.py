"""G^t from its factors: correlations of averages of outer products, with errors, without a matrix per epoch.

With R networks and P probes, G^t = (1/RP) sum g g^T over gradients g. Inner products of such averages are sums of
squared products of gradients, <g g^T, h h^T> = (g.h)^2, and <g g^T, M> = g^T M g. Sums are kept per pair of networks,
so that leaving one network out (the jackknife, for standard errors) costs nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from biascope.studies.result import Estimate


def overlap(A: Tensor, B: Tensor) -> Tensor:
    """[R, R]: sum over probes of (g.h)^2 between network i of A [R, P, D] and network j of B [R, P, D].

    Example:
        >>> overlap(torch.eye(2)[:, None], torch.eye(2)[:, None]).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    R, P, D = A.shape
    products = A.reshape(R * P, D).double() @ B.reshape(R * P, D).double().T
    return products.square().view(R, P, R, P).sum((1, 3))


def energy(A: Tensor, M: Tensor) -> Tensor:
    """[R]: sum over probes of g^T M g for each network of A [R, P, D].

    Example:
        >>> energy(torch.ones(1, 1, 2), torch.eye(2)).tolist()
        [2.0]
    """
    flat = A.double()
    return torch.einsum("rpd,rpd->r", flat @ M.to(flat), flat)


def jackknife(function: Callable[[Tensor], Tensor], R: int) -> tuple[Tensor, Tensor | None]:
    """A function of weights [R] over networks at equal weights, and its standard error from leaving one out."""
    whole = function(torch.ones(R, dtype=torch.float64))
    if R < 3:
        return whole, None
    left = torch.stack([function(torch.ones(R, dtype=torch.float64).index_fill(0, torch.tensor([i]), 0.0))
                        for i in range(R)])  # fmt: skip
    return whole, ((R - 1) / R * (left - left.mean(0)).square().sum(0)).sqrt()


class History:
    """Correlations along a training: gradients [epochs + 1, R, P, D] of R networks at the same probes throughout."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients
        self.times, self.R = len(gradients), gradients.shape[1]
        self.own = torch.stack([overlap(g, g) for g in gradients]).cpu()  # [T, R, R]
        self.first = torch.stack([overlap(g, gradients[0]) for g in gradients]).cpu()
        self.step = torch.stack([overlap(a, b) for a, b in zip(gradients[1:], gradients[:-1])]).cpu()

    def velocity(self, w: Tensor) -> Tensor:
        """1 - Corr(G^t, G^{t-1}), [T - 1], with weights w over networks."""
        norms = _pairs(self.own, w).sqrt()
        return 1 - _pairs(self.step, w) / (norms[1:] * norms[:-1])

    def velocity_between(self, w: Tensor) -> Tensor:
        """The same from products of different networks alone, so that their small number does not count, [T - 1].

        A network that wanders moves its own g g^T, but not the mean over all networks that could have been drawn; in
        an average over R networks the share 1 / R of it is seen as motion. Two networks or more; can be below 0.
        """
        apart = 1 - torch.eye(self.R, dtype=self.own.dtype)
        norms = _pairs(self.own * apart, w).sqrt()
        return 1 - _pairs(self.step * apart, w) / (norms[1:] * norms[:-1])

    def with_start(self, w: Tensor) -> Tensor:
        """Corr(G^t, G^0), [T]."""
        norms = _pairs(self.own, w).sqrt()
        return _pairs(self.first, w) / (norms * norms[0])

    def energies(self, M: Tensor) -> Tensor:
        """<G^t, M> per network, [T, R]; give it to `with_matrix` and `change_with_matrix`."""
        return torch.stack([energy(g, M) for g in self.gradients]).cpu()

    def with_matrix(self, energies: Tensor, norm: float, w: Tensor) -> Tensor:
        """Corr(G^t, M), [T], from `energies(M)` and ||M||_F."""
        return (energies @ w) / (_pairs(self.own, w).sqrt() * norm)

    def moved(self, w: Tensor) -> Tensor:
        """||G^t - G^0||_F^2, [T], up to a factor."""
        own = _pairs(self.own, w)
        return own + own[0] - 2 * _pairs(self.first, w)

    def change_with_matrix(self, energies: Tensor, norm: float, w: Tensor) -> Tensor:
        """Signed Corr(G^t - G^0, M) for t = 1, ..., [T - 1]."""
        squares = self.moved(w)
        found: Tensor = ((energies - energies[0]) @ w)[1:] / (squares[1:].clamp_min(1e-300).sqrt() * norm)
        return found


def estimate(function: Callable[[Tensor], Tensor], R: int) -> Estimate:
    """A scalar function of the weights with its jackknife error."""
    value, error = jackknife(function, R)
    return Estimate(float(value), None if error is None else float(error), R)


def _pairs(sums: Tensor, w: Tensor) -> Tensor:
    found: Tensor = torch.einsum("tij,i,j->t", sums, w, w)
    return found
