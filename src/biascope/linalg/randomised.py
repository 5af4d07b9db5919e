"""Block methods: subspace iteration, randomised eigenpairs and singular triplets (Halko, Martinsson, Tropp 2011)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from biascope.arguments import as_number, as_whole
from biascope.errors import InputError, UnsupportedError
from biascope.linalg.lanczos import (
    DENSE_BELOW,
    Eigenpairs,
    check_eigen_arguments,
    eigsh,
    wanted_order,
    with_residuals,
)
from biascope.linalg.operator import LinearOperator, need_operator
from biascope.linalg.random import draw, generator_from
from biascope.linalg.resolved import resolved
from biascope.linalg.stable import fix_signs, symmetrise, thin_svd
from biascope.tables import one_line


@dataclass(frozen=True)
class SingularTriplets:
    """The k leading singular triplets.

    Attributes:
        left: U [m, k], orthonormal columns.
        values: [k], descending.
        right: V [n, k], orthonormal columns, the entry of largest magnitude positive.
        residuals: [k], max(||A v - s u||, ||A^T u - s v||), computed.
        converged: [k] bool, residual <= tol * largest singular value.
        iterations: power iterations or restarts.
        matvecs: products of A or A^T with one vector.
    """

    left: Tensor = field(repr=False)
    values: Tensor
    right: Tensor = field(repr=False)
    residuals: Tensor
    converged: Tensor
    iterations: int
    matvecs: int
    __repr__ = one_line

    @property
    def resolved(self) -> Tensor:
        """Mask [k] of the triplets that are found: residual at most 1e-3 of their own singular value.

        Against the largest one (`converged`) any vectors would pass for those of a small singular value.
        """
        return resolved(self.values, self.residuals)


def subspace_iteration(
    A: LinearOperator,
    k: int,
    which: str = "LM",
    oversampling: int = 10,
    tol: float | None = None,
    max_iterations: int = 100,
    seed: int = 0,
) -> Eigenpairs:
    """Leading eigenpairs of a symmetric operator by block power iteration with Rayleigh-Ritz.

    Every product is with a whole block, which suits operators that cost as much for 20 vectors as for one. It stops as
    soon as the residuals are below `tol`. Slower than `eigsh` per product; repeated eigenvalues are no trouble.

    Args:
        A: symmetric operator [n, n].
        k: how many.
        which: "LM", or "LA" for the largest among the leading magnitudes (the same for positive operators).
        oversampling: extra columns in the block.
        tol: residual relative to ||A||; by default 1e-9 in float64, 1e-5 in float32.
        max_iterations: products with the block.
        seed: of the Gaussian start.

    Example:
        >>> import torch
        >>> from biascope.linalg import Diagonal
        >>> subspace_iteration(Diagonal(torch.tensor([8.0, 4.0, 2.0, 1.0])), k=1).values.round(decimals=3).tolist()
        [8.0]
    """
    tol = check_eigen_arguments(A, k, which, tol)
    if which == "SA":
        raise UnsupportedError("subspace_iteration finds the largest magnitudes; use eigsh for which='SA'")
    if as_whole(oversampling, "oversampling") < 0 or as_whole(max_iterations, "max_iterations") < 1:
        raise InputError(f"need oversampling >= 0 and max_iterations >= 1, not {oversampling} and {max_iterations}")
    n = A.shape[0]
    width = min(n, k + oversampling)
    with torch.no_grad():
        Q = torch.linalg.qr(draw(n, width, A, generator_from(seed)))[0]
        for iteration in range(1, max_iterations + 1):
            Y = A._matmat(Q)
            _need_finite(A, Y)
            theta, S = torch.linalg.eigh(symmetrise((Q.T @ Y).double()))
            order = wanted_order(theta, which)[:k]
            scale = theta.abs().max().item()
            chosen, S = theta[order], S[:, order].to(Q)
            residuals = (Y @ S - (Q @ S) * chosen.to(Q)).norm(dim=0)
            if iteration == max_iterations or bool((residuals <= 0.5 * tol * scale).all()):
                break
            Q = torch.linalg.qr(Y)[0]
        return with_residuals(A, chosen, fix_signs(Q @ S), tol, scale, iteration, iteration * width)


def randomized_eigsh(
    A: LinearOperator,
    k: int,
    which: str = "LM",
    oversampling: int = 10,
    power_iterations: int = 2,
    seed: int = 0,
    tol: float | None = None,
) -> Eigenpairs:
    """Leading eigenpairs from a fixed, small number of block products: `power_iterations + 2`.

    Exact when the rank is at most k + oversampling; else read `residuals`.

    Example:
        >>> import torch
        >>> from biascope.linalg import LowRank
        >>> randomized_eigsh(LowRank(torch.eye(50)[:, :2] * 3.0), k=2).values.round(decimals=3).tolist()
        [9.0, 9.0]
    """
    if as_whole(power_iterations, "power_iterations") < 0:
        raise InputError(f"power_iterations must be at least 0, not {power_iterations}")
    return subspace_iteration(A, k, which, oversampling, tol, power_iterations + 2, seed)


def randomized_svd(
    A: LinearOperator,
    k: int,
    oversampling: int = 10,
    power_iterations: int = 2,
    seed: int = 0,
    tol: float | None = None,
) -> SingularTriplets:
    """k leading singular triplets of A [m, n] with adjoint, from 2 power_iterations + 2 block products.

    Exact when the rank is at most k + oversampling; else read `residuals`.

    Example:
        >>> import torch
        >>> from biascope.linalg import Dense
        >>> randomized_svd(Dense(torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])), k=2).values.round().tolist()
        [3.0, 2.0]
    """
    tol = _check_svd(A, k, tol)
    if as_whole(oversampling, "oversampling") < 0 or as_whole(power_iterations, "power_iterations") < 0:
        raise InputError(f"need oversampling >= 0 and power_iterations >= 0, not {oversampling}, {power_iterations}")
    width = min(*A.shape, k + oversampling)
    with torch.no_grad():
        Q = torch.linalg.qr(A._matmat(draw(A.shape[1], width, A, generator_from(seed))))[0]
        for _ in range(power_iterations):
            P = torch.linalg.qr(A._rmatmat(Q))[0]
            Q = torch.linalg.qr(A._matmat(P))[0]
        _need_finite(A, Q)
        V, values, Wh = thin_svd(A._rmatmat(Q))
        U, V = Q @ Wh.T[:, :k], V[:, :k]
        return _triplets(A, U, values[:k], V, tol, power_iterations, 2 * width * (power_iterations + 1))


def svds(
    A: LinearOperator,
    k: int,
    tol: float | None = None,
    max_iterations: int = 300,
    seed: int = 0,
) -> SingularTriplets:
    """k leading singular triplets of A [m, n] with adjoint, by Lanczos on the smaller of A A^T and A^T A.

    The values are then taken from the singular values of A on the subspace found, not from square roots, so that small
    ones keep their digits. Singular values below about sqrt(eps) of the largest drown in those products; where some
    are not resolved, Lanczos goes on with [[0, A], [A^T, 0]], which costs more and reaches down to about 1000 eps. A
    warning says where that is not enough. Values up to 10 eps of the largest pass for zero.

    Example:
        >>> import torch
        >>> from biascope.linalg import Dense
        >>> svds(Dense(torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])), k=1).values.round().tolist()
        [3.0]
    """
    tol = _check_svd(A, k, tol)
    with torch.no_grad():
        scale = _scale(A, seed)
        found = _svds(A if scale == 1.0 else A * (1.0 / scale), k, tol, max_iterations, seed)
    if scale != 1.0:
        found = replace(found, values=found.values * scale, residuals=found.residuals * scale)
    _warn_unsure(found, _unsure(found))
    return replace(found, matvecs=found.matvecs + 1)


def _scale(A: LinearOperator, seed: int) -> float:
    """1, or a power of 2 near ||A|| where squares of it are far from 1, and might leave the range of the dtype."""
    Y = A._matmat(draw(A.shape[1], 1, A, generator_from(seed)))
    _need_finite(A, Y)
    largest = float(Y.abs().max())
    return 1.0 if largest == 0 or 1e-10 < largest < 1e10 else 2.0 ** round(math.log2(largest))


def _svds(A: LinearOperator, k: int, tol: float, max_iterations: int, seed: int) -> SingularTriplets:
    m, n = max(A.shape), min(A.shape)
    tall = A.shape[0] == m
    B = A if tall else A.T
    if n <= DENSE_BELOW or 2 * k + 10 >= n:  # A itself is no larger than the basis of a search
        return _triplets_on(B, tall, torch.eye(n, dtype=A.dtype, device=A.device), k, tol, 1, n)
    pairs = eigsh(_Gram(B), k, "LA", tol, max_iterations, seed)
    found = _triplets_on(B, tall, pairs.vectors, k, tol, pairs.iterations, 2 * pairs.matvecs + k)
    if not bool(_unsure(found).any()):
        return found
    finest = 1e-12 if A.dtype == torch.float64 else 1e-6
    pairs = eigsh(_Augmented(B), k, "LA", min(tol, finest), max_iterations, seed)
    V = torch.linalg.qr(pairs.vectors[m:])[0]
    spent = found.matvecs + 2 * pairs.matvecs + k
    again = _triplets_on(B, tall, V, k, tol, found.iterations + pairs.iterations, spent)
    return again if int(again.resolved.sum()) >= int(found.resolved.sum()) else replace(found, matvecs=again.matvecs)


def _unsure(found: SingularTriplets) -> Tensor:
    """Mask [k] of what is neither resolved nor zero up to rounding."""
    floor = 10 * torch.finfo(found.values.dtype).eps * found.values.max()
    return ~found.resolved & (found.values > floor)


def _warn_unsure(found: SingularTriplets, unsure: Tensor) -> None:
    if bool(unsure.any()):
        first = int(unsure.nonzero()[0])
        warnings.warn(
            f"only the first {first} of {len(unsure)} singular triplets are resolved: number {first} has value "
            f"{float(found.values[first]):.3g} and residual {float(found.residuals[first]):.1e}, the largest value is "
            f"{float(found.values[0]):.3g}; ask for k={first}, or give a float64 operator",
            stacklevel=3,
        )


class _Gram(LinearOperator):
    """B^T B, marked symmetric."""

    def __init__(self, B: LinearOperator) -> None:
        super().__init__((B.shape[1], B.shape[1]), B.dtype, B.device, symmetric=True)
        self.B = B

    def _matmat(self, X: Tensor) -> Tensor:
        return self.B._rmatmat(self.B._matmat(X))


class _Augmented(LinearOperator):
    """[[0, B], [B^T, 0]]: eigenvalues are the singular values of B and their negatives, none of them squared."""

    def __init__(self, B: LinearOperator) -> None:
        super().__init__((sum(B.shape), sum(B.shape)), B.dtype, B.device, symmetric=True)
        self.B = B

    def _matmat(self, X: Tensor) -> Tensor:
        m = self.B.shape[0]
        return torch.cat([self.B._matmat(X[m:]), self.B._rmatmat(X[:m])])


def _triplets_on(
    B: LinearOperator, tall: bool, V: Tensor, k: int, tol: float, iterations: int, matvecs: int
) -> SingularTriplets:
    """The k leading triplets of B (of B^T unless `tall`) on the span of the orthonormal columns of V."""
    U, values, Wh = thin_svd(B._matmat(V))
    U, values, V = U[:, :k], values[:k], V @ Wh[:k].T
    return (
        _triplets(B, U, values, V, tol, iterations, matvecs)
        if tall
        else _triplets(B.T, V, values, U, tol, iterations, matvecs)
    )


def _triplets(
    A: LinearOperator, U: Tensor, values: Tensor, V: Tensor, tol: float, iterations: int, matvecs: int
) -> SingularTriplets:
    signs = torch.where((fix_signs(V) * V).sum(0) < 0, -1.0, 1.0).to(V.dtype)
    U, V = U * signs, V * signs
    there = (A._matmat(V) - U * values).norm(dim=0)
    back = (A._rmatmat(U) - V * values).norm(dim=0)
    residuals = torch.maximum(there, back)
    limit = max(tol, 10 * torch.finfo(A.dtype).eps) * values.max()
    return SingularTriplets(U, values, V, residuals, residuals <= limit, iterations, matvecs + 2 * len(values))


def _check_svd(A: LinearOperator, k: int, tol: float | None) -> float:
    if not need_operator(A).has_adjoint:
        raise UnsupportedError(f"{A!r} has no adjoint: singular values need A.T, define _rmatmat or pass rmatmat=")
    if A.dtype not in (torch.float32, torch.float64):
        raise InputError(f"{A!r}: singular values need float32 or float64")
    if not 1 <= as_whole(k, "k") <= min(A.shape):
        raise InputError(f"k must be between 1 and {min(A.shape)} for {A!r}, not {k}")
    if tol is not None and not as_number(tol, "tol") > 0:
        raise InputError(f"tol must be positive, not {tol}")
    return tol if tol is not None else (1e-9 if A.dtype == torch.float64 else 1e-5)


def _need_finite(A: LinearOperator, Y: Tensor) -> None:
    if not torch.isfinite(Y).all():
        raise InputError(f"{A!r} gave NaN or infinity")
