"""Trace, diagonal and Frobenius norm from products with random vectors, each with its standard error.

Asked for as many products as the operator has columns, every estimator gives the exact value with standard error 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.linalg.operator import LinearOperator, Operator, SquareOperator
from biascope.linalg.random import Probes, blocks_of_probes
from biascope.linalg.spread import dots, join, rows_of
from biascope.support.estimate import Estimate
from biascope.support.limits import Count
from biascope.support.signatures import checked
from biascope.support.tables import facts, number, one_line


@dataclass(frozen=True)
class SampledEstimate(Estimate):
    """An estimate from products with random vectors: a number (0-dimensional) or a vector, in float64.

    Attributes:
        value: the estimate.
        standard_error: of the value; NaN when one sample cannot tell, 0 when exact.
        n: independent samples behind it.
        matvecs: products with one vector.
        seed: of the probes.
    """

    value: Tensor  # type: ignore[assignment]
    standard_error: Tensor  # type: ignore[assignment]
    matvecs: int = 0
    seed: int = 0
    __repr__ = one_line

    @property
    def samples(self) -> int | None:
        """The same as n."""
        return self.n

    def __str__(self) -> str:
        pairs = zip(self.value.flatten()[:5].tolist(), self.standard_error.flatten()[:5].tolist())
        return ", ".join(number(*pair) for pair in pairs) + (", ..." if self.value.numel() > 5 else "")

    def _repr_html_(self) -> str:
        """The value with its error, of a vector the first ones, for notebooks."""
        return facts("Estimate", {"value": str(self), "samples": self.n, "products": self.matvecs, "seed": self.seed})


def mean_estimate(samples: Tensor, matvecs: int, seed: int) -> SampledEstimate:
    """Mean and standard error over the first dimension of samples [m, ...]."""
    m = samples.shape[0]
    error = samples.std(0) / math.sqrt(m) if m > 1 else torch.full_like(samples[0], math.nan)
    return SampledEstimate(samples.mean(0), error, m, matvecs, seed)


@checked
def hutchinson(
    A: SquareOperator, samples: Count = 32, probes: Probes = "rademacher", seed: int = 0, block: Count = 32
) -> SampledEstimate:
    """tr A as the mean of z^T A z. The error falls as 1 / sqrt(samples).

    Example:
        >>> import torch
        >>> from biascope.linalg import aslinearoperator
        >>> float(hutchinson(aslinearoperator(torch.diag(torch.arange(50.0))), samples=4))
        1225.0
    """
    if samples >= A.shape[0]:
        return _exact(A.trace(), A, seed)
    with torch.no_grad():
        parts = [dots(A, Z, A._matmat(Z)) for Z in blocks_of_probes(A, samples, seed, probes, block)]
        return mean_estimate(torch.cat(parts), samples, seed)


@checked
def diagonal(A: SquareOperator, samples: Count = 64, seed: int = 0, block: Count = 32) -> SampledEstimate:
    """The diagonal [n] of A, as the mean of z * (A z).

    The error of entry i is about the off-diagonal norm of row i / sqrt(samples).
    """
    if samples >= A.shape[0]:
        return _exact(A.diagonal(), A, seed)
    with torch.no_grad():
        total = torch.zeros(rows_of(A), dtype=torch.float64, device=A.device)
        squares = torch.zeros_like(total)
        for Z in blocks_of_probes(A, samples, seed, "rademacher", block):
            products = (Z * A._matmat(Z)).double()
            total += products.sum(1)
            squares += products.square().sum(1)
        total, squares = join(A, total[:, None])[:, 0], join(A, squares[:, None])[:, 0]
        mean = total / samples
        variance = (squares / samples - mean.square()).clamp(min=0)
        error = (variance / (samples - 1)).sqrt() if samples > 1 else torch.full_like(mean, math.nan)
        return SampledEstimate(mean, error, samples, samples, seed)


@checked
def frobenius_norm_squared(
    A: Operator, samples: Count = 32, probes: Probes = "rademacher", seed: int = 0, block: Count = 32
) -> SampledEstimate:
    """||A||_F^2 as the mean of ||A z||^2, for any shape and without adjoint."""
    with torch.no_grad():
        if samples >= A.shape[1]:
            squares = [dots(A, Y, Y).sum() for _, E in A._identity(block) for Y in [A._matmat(E)]]
            return _exact(torch.stack(squares).sum(), A, seed)
        parts = []
        for Z in blocks_of_probes(A, samples, seed, probes, block):
            Y = A._matmat(Z)
            parts.append(dots(A, Y, Y))
        return mean_estimate(torch.cat(parts), samples, seed)


def _exact(value: Tensor, A: LinearOperator, seed: int) -> SampledEstimate:
    value = value.detach().double()
    return SampledEstimate(value, torch.zeros_like(value), A.shape[1], A.shape[1], seed)
