"""What a spectrum says: effective rank, angles between subspaces, and the spread that sampling alone makes."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from biascope.linalg.stable import thin_svd
from biascope.support.errors import InputError
from biascope.support.limits import Count, Matrix, Positive, Vector
from biascope.support.signatures import checked


@checked
def effective_rank(values: Vector, kind: Literal["entropy", "participation"] = "entropy") -> float:
    """How many eigenvalues [n] matter: between 1 and the rank, equal to r for r equal ones.

    entropy: exp(-sum mu log mu) with mu = lambda / sum lambda; participation: (sum lambda)^2 / sum lambda^2.
    Computed in float64; eigenvalues below 1e-12 of the largest (and negative ones) are rounding and are dropped.

    Example:
        >>> import torch
        >>> round(effective_rank(torch.tensor([1.0, 1.0, 0.0])), 6)
        2.0
    """
    lam = values.detach().double()
    top = lam.max() if len(lam) else lam.sum()
    if not 0 < top < math.inf:
        raise InputError(f"effective_rank needs finite eigenvalues, at least one above 0; the largest is {top:g}")
    mu = lam[lam > 1e-12 * top] / top
    mu = mu / mu.sum()
    if kind == "participation":
        return 1.0 / mu.square().sum().item()
    return math.exp(-(mu * mu.log()).sum().item())


def orthonormal_basis(U: Tensor) -> Tensor:
    """Orthonormal basis [n, rank] of the span of the columns of U [n, k]; nearly dependent columns are dropped."""
    left, values, _ = thin_svd(U)
    tiny = torch.finfo(U.dtype).tiny
    return left[:, values > max(U.shape) * torch.finfo(U.dtype).eps * values[:1].clamp(min=tiny)]


@checked
def principal_angles(U: Matrix, V: Matrix) -> Tensor:
    """Principal angles in radians, ascending, between the spans of U [n, k] and V [n, l]; [min(ranks)] in float64.

    Small angles come from the sine, large ones from the cosine (Bjorck and Golub), so both are accurate.

    Example:
        >>> import torch
        >>> principal_angles(torch.eye(3)[:, :1], torch.eye(3)[:, 1:]).round(decimals=3).item()
        1.571
    """
    P, Q = orthonormal_basis(U.detach().double()), orthonormal_basis(V.detach().double())
    if P.shape[1] == 0 or Q.shape[1] == 0:
        raise InputError("principal_angles: a subspace spanned by zero vectors has no angles")
    if P.shape[1] < Q.shape[1]:
        P, Q = Q, P
    cosines = torch.linalg.svdvals(P.T @ Q).clamp(max=1.0)
    sines = torch.linalg.svdvals(Q - P @ (P.T @ Q)).flip(0).clamp(max=1.0)
    return torch.where(cosines.square() < 0.5, cosines.acos(), sines.asin())


def subspace_overlap(U: Tensor, V: Tensor) -> float:
    """Mean squared cosine of the principal angles, ||P^T Q||_F^2 / min(k, l): 1 for nested spans, 0 for orthogonal.

    Two random subspaces of dimension k in n overlap by max(k, l) / n on average.

    Example:
        >>> import torch
        >>> subspace_overlap(torch.eye(4)[:, :2], torch.eye(4)[:, 1:3])
        0.5
    """
    return principal_angles(U, V).cos().square().mean().item()


@dataclass(frozen=True)
class MarchenkoPastur:
    """Limit law of the eigenvalues of X^T X / n_samples for X [n_samples, dim] with i.i.d. entries.

    Attributes:
        ratio: dim / n_samples.
        variance: of one entry.
        lower: left edge, variance (1 - sqrt(ratio))^2.
        upper: right edge, variance (1 + sqrt(ratio))^2.
        mass_at_zero: share of exact zeros, 1 - 1 / ratio when dim > n_samples.
    """

    ratio: float
    variance: float
    lower: float
    upper: float
    mass_at_zero: float

    def density(self, x: Tensor) -> Tensor:
        """Density at x of any shape, without the mass at zero; integrates to 1 - mass_at_zero."""
        x = x.double()
        inside = (x > self.lower) & (x < self.upper)
        safe = torch.where(inside, x, torch.ones_like(x))
        root = ((self.upper - safe) * (safe - self.lower)).clamp(min=0).sqrt()
        return torch.where(inside, root / (2 * math.pi * self.variance * self.ratio * safe), 0.0)

    def outliers(self, values: Tensor, slack: float = 0.0) -> Tensor:
        """Mask [n] of the eigenvalues that sampling noise does not explain: above upper * (1 + slack)."""
        return values > self.upper * (1.0 + slack)


@checked
def marchenko_pastur(n_samples: Count, dim: Count, variance: Positive = 1.0) -> MarchenkoPastur:
    """The spread of sample eigenvalues that an isotropic distribution shows by sampling alone.

    Example:
        >>> law = marchenko_pastur(10_000, 1024)
        >>> round(law.upper / law.lower, 2)
        3.77
    """
    ratio = dim / n_samples
    return MarchenkoPastur(
        ratio=ratio,
        variance=variance,
        lower=variance * (1 - math.sqrt(ratio)) ** 2,
        upper=variance * (1 + math.sqrt(ratio)) ** 2,
        mass_at_zero=max(0.0, 1 - 1 / ratio),
    )
