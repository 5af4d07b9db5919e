"""Correlations of a mean of independent matrices: as they are, and without the length that sampling noise adds.

With A the mean of R independent estimates A_i, ||A||^2 is too long by the noise of A, and Corr(A, M) too small.
Products of different estimates, <A_i, A_j> with i != j, have the expectation ||truth||^2; with them in place of ||A||^2
the correlation has no such bias. Errors are a jackknife over the estimates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.studies.invariance.factors import estimate
from biascope.studies.result import Estimate


@dataclass(frozen=True)
class Averages:
    """Independent estimates [R, D, D] of one symmetric matrix."""

    matrices: Tensor = field(repr=False)
    gram: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        flat = self.matrices.flatten(1)
        object.__setattr__(self, "gram", (flat @ flat.T).double().cpu())

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

    def squared(self, w: Tensor, between: bool = True) -> Tensor:
        """||mean||^2 with weights w [R]; `between`: from products of different estimates alone, can be below 0."""
        return squared(self.gram, w, between)

    def correlation(self, M: Tensor, between: bool = True, minus: Tensor | None = None) -> Estimate:
        """Signed Corr(mean, M); with `minus` the same less Corr(mean, minus). NaN where `squared` is not above 0."""
        products = self.along(M) / M.double().norm().cpu()
        if minus is not None:
            products = products - self.along(minus) / minus.double().norm().cpu()
        return self.ratio(products, between)

    def ratio(self, products: Tensor, between: bool = True) -> Estimate:
        """Mean of numbers [R], one of each estimate and linear in it, over the norm of the mean."""
        found = estimate(lambda w: (products @ w) / w.sum() / squared(self.gram, w, between).sqrt(), self.R)
        known = found.standard_error is not None and math.isfinite(found.standard_error)
        return found if known else Estimate(found.value, None, self.R)

    def noise(self) -> float:
        """Share of the mean that is sampling noise, ||mean - truth|| / ||mean||."""
        w = torch.ones(self.R, dtype=torch.float64)
        return float((1 - self.squared(w) / self.squared(w, between=False)).clamp(0, 1).sqrt())


def squared(gram: Tensor, w: Tensor, between: bool = True) -> Tensor:
    """Weighted mean of products [R, R], of different estimates alone if `between`.

    Example:
        >>> squared(torch.tensor([[5.0, 1.0], [1.0, 5.0]]), torch.ones(2)).item()
        1.0
        >>> squared(torch.tensor([[5.0, 1.0], [1.0, 5.0]]), torch.ones(2), between=False).item()
        3.0
    """
    pairs = torch.outer(w, w)
    if between:
        pairs = pairs - torch.diag(pairs.diagonal())
    return (gram * pairs).sum() / pairs.sum()


def rotated_away(A: Averages, M: Tensor, between: bool = True) -> tuple[Estimate, Estimate]:
    """What random rotations of M would give, E Corr(mean, Q M Q^T), and Corr(mean, M) less that."""
    D = len(M)
    eye = torch.eye(D, dtype=M.dtype, device=M.device)
    flat = A.along(eye) * float(M.trace() / M.norm()) / D  # <A, I> <M, I> / (D ||M||): the mean over rotations
    return A.ratio(flat, between), A.ratio(A.along(M) / float(M.norm()) - flat, between)


def without_mean(A: Averages, M: Tensor) -> Estimate:
    """Corrected Corr(mean, M) after the mean eigenvalue has been taken out of both: what is not a multiple of I."""
    eye = torch.eye(len(M), dtype=M.dtype, device=M.device)
    shifts = (A.along(eye) / len(M)).to(A.matrices)[:, None, None]
    return Averages(A.matrices - shifts * eye.to(A.matrices)).correlation(M - M.trace() / len(M) * eye)


def stacked(parts: Sequence[Tensor]) -> Averages:
    """Estimates [D, D] one by one.

    Example:
        >>> round(stacked([torch.eye(2), torch.eye(2)]).correlation(torch.eye(2)).value, 9)
        1.0
    """
    return Averages(torch.stack([part.double() for part in parts]))
