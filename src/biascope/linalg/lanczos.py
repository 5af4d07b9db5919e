"""Extreme eigenpairs of a symmetric operator by thick-restart Lanczos, with true residuals.

A cycle grows an orthonormal basis V to `subspace` columns (fully reorthogonalised, so no ghosts), solves the small
problem H = V^T A V, and restarts from the best Ritz vectors (Wu and Simon, 2000). Memory is `subspace` vectors.
A Krylov space sees only one direction of a repeated eigenvalue; so once the wanted pairs have converged, the search
goes on from a random vector orthogonal to them until the best of the rest is known: what was missed comes up there.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from biascope.linalg.operator import LinearOperator, SymmetricOperator
from biascope.linalg.random import draw, generator_from
from biascope.linalg.spread import combined, coordinates, fix_signs, norms, own, rows_of
from biascope.linalg.stable import symmetrise
from biascope.support.errors import InputError
from biascope.support.limits import Count, Positive
from biascope.support.signatures import checked
from biascope.support.tables import one_line

DENSE_BELOW = 64  # smaller problems are solved by torch.linalg.eigh


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues and eigenvectors with the evidence.

    Attributes:
        values: [k], the most wanted first: descending for LA, by magnitude for LM, ascending for SA.
        vectors: [n, k], orthonormal columns, the entry of largest magnitude positive.
        residuals: [k], ||A v - lambda v||, computed, not estimated.
        converged: [k] bool, residual <= tol * ||A|| (estimated by the largest Ritz value).
        iterations: restarts, or power iterations.
        matvecs: products of A with one vector.
    """

    values: Tensor
    vectors: Tensor = field(repr=False)
    residuals: Tensor
    converged: Tensor
    iterations: int
    matvecs: int
    __repr__ = one_line


@checked
def eigsh(
    A: SymmetricOperator,
    k: Count,
    which: Literal["LA", "SA", "LM"] = "LA",
    tol: Positive | None = None,
    max_iterations: Count = 300,
    seed: int = 0,
    start: Tensor | None = None,
    subspace: int | None = None,
    verify: bool = True,
) -> Eigenpairs:
    """k eigenpairs of a symmetric operator [n, n].

    Args:
        A: operator with `symmetric=True`, float32 or float64.
        k: how many, 1 to n.
        which: "LA" largest, "SA" smallest, "LM" largest magnitude.
        tol: residual relative to ||A||; by default 1e-9 in float64, 1e-5 in float32.
        max_iterations: restarts allowed; pairs not there yet come back with converged False.
        seed: of the random start and of what is put in after a breakdown.
        start: first vector [n], random by default.
        subspace: basis size between restarts, max(2 k + 10, 20) by default.
        verify: go on after convergence to find missed copies of repeated eigenvalues (often a third more products).

    Example:
        >>> import torch
        >>> from biascope.linalg import aslinearoperator
        >>> eigsh(aslinearoperator(torch.diag(torch.arange(100.0).double())), k=2).values.round(decimals=6).tolist()
        [99.0, 98.0]
    """
    n = A.shape[0]
    size = max(2 * k + 10, 20) if subspace is None else subspace
    if k > n or size <= k:
        raise InputError(f"k={k} must be at most {n} for {A!r}, and the subspace, {size}, larger than k")
    if start is not None:
        A.check_fits(start)
        if start.ndim != 1 or not 0 < norms(A, start).item() < float("inf"):
            raise InputError("start must be a finite vector other than zero")
    tol = tol or (1e-9 if A.dtype == torch.float64 else 1e-5)
    generator = generator_from(seed)
    with torch.no_grad():
        if n <= DENSE_BELOW or size >= n:
            return _dense(A, k, which, tol)
        first = draw(n, 1, A, generator)[:, 0] if start is None else start
        return _Lanczos(A, size, generator, first).run(k, which, tol, max_iterations, verify)


class _Lanczos:
    """The basis V, H = V^T A V, and the vector to continue with."""

    def __init__(self, A: LinearOperator, size: int, generator: torch.Generator, start: Tensor) -> None:
        self.A, self.size, self.generator = A, size, generator
        self.V = torch.empty(size, rows_of(A), dtype=A.dtype, device=A.device)  # a row per basis vector: contiguous
        self.H = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        self.filled, self.matvecs, self.scale = 0, 0, 0.0
        self.next, self.beta = start / norms(A, start), 0.0

    def run(self, k: int, which: str, tol: float, max_iterations: int, verify: bool) -> Eigenpairs:
        before: Tensor | None = None  # the wanted values when verification began; None while they are still sought
        for iteration in range(1, max_iterations + 1):
            self._grow()
            theta, S = torch.linalg.eigh(symmetrise(self.H))
            order = wanted_order(theta, which)
            theta, S = theta[order], S[:, order]
            self.scale = max(self.scale, theta.abs().max().item())
            error = self.beta * S[-1].abs()
            done = bool((error[:k] <= 0.5 * tol * self.scale).all())
            if before is not None and not (done and bool(((theta[:k] - before).abs() <= tol * self.scale).all())):
                before = None  # something better came up
            if iteration == max_iterations or (done and not verify):
                break
            if done and before is None:  # converged: from here on look only outside what was found
                before = theta[:k].clone()
                self._restart(theta[:k], S[:, :k])
                self.next, self.beta = self._random_direction(), 0.0
                continue
            # nothing missed once the best of the rest is known to lie below what was found
            gap = (theta[k - 1].abs() - theta[k].abs() if which == "LM" else theta[k - 1] - theta[k]).abs()
            if before is not None and error[k] <= max(gap.item(), tol**0.5 * self.scale):
                break
            keep = k + (self.size - k) // 2
            self._restart(theta[:keep], S[:, :keep])
        X = fix_signs(self.A, combined(S[:, :k].T.to(self.V), self.V).T)
        return with_residuals(self.A, theta[:k], X, tol, self.scale, iteration, self.matvecs)

    def _grow(self) -> None:
        eps = torch.finfo(self.V.dtype).eps
        while self.filled < self.size:
            j = self.filled
            self.V[j] = self.next
            w = self.A._matmat(self.V[j].unsqueeze(1)).squeeze(1)
            self.matvecs += 1
            length = norms(self.A, w).item()
            if not length < float("inf"):
                raise InputError(f"{self.A!r} gave NaN or infinity in product {self.matvecs}")
            self.scale = max(self.scale, length)
            basis = self.V[: j + 1]
            h = coordinates(self.A, basis, w)
            w = w - combined(h, basis)
            again = coordinates(self.A, basis, w)  # twice is enough: this removes what the first left by cancellation
            w = w - combined(again, basis)
            self.H[: j + 1, j] = self.H[j, : j + 1] = (h + again).double().cpu()
            self.filled += 1
            self.beta = norms(self.A, w).item()
            if self.beta <= 100 * eps * self.scale:  # an invariant subspace: go on outside it
                self.beta = 0.0
                self.next = self._random_direction() if self.filled < self.A.shape[0] else w
            else:
                self.next = w / self.beta

    def _restart(self, theta: Tensor, S: Tensor) -> None:
        keep = len(theta)
        self.V[:keep] = combined(S.T.to(self.V), self.V)
        self.H.zero_()
        self.H[:keep, :keep] = torch.diag(theta)
        self.filled = keep

    def _random_direction(self) -> Tensor:
        w = draw(self.A.shape[0], 1, self.A, self.generator)[:, 0]
        basis = self.V[: self.filled]
        for _ in range(2):
            w = w - combined(coordinates(self.A, basis, w), basis)
            w = w / norms(self.A, w)
        return w


def wanted_order(theta: Tensor, which: str) -> Tensor:
    """Indices of Ritz values [m], the most wanted first."""
    key = theta.abs() if which == "LM" else theta
    return key.argsort(descending=which != "SA", stable=True)


def with_residuals(
    A: LinearOperator, values: Tensor, X: Tensor, tol: float, scale: float, iterations: int, matvecs: int
) -> Eigenpairs:
    """Apply A once more to measure ||A x - lambda x||, and pack the result in A's dtype and device."""
    values = values.to(A.device, A.dtype)
    residuals = norms(A, A._matmat(X) - X * values)
    floor = 10 * torch.finfo(A.dtype).eps * scale  # no product is more accurate than its rounding
    return Eigenpairs(
        values=values,
        vectors=X,
        residuals=residuals,
        converged=residuals <= max(tol * scale, floor),
        iterations=iterations,
        matvecs=matvecs + X.shape[1],
    )


def _dense(A: LinearOperator, k: int, which: str, tol: float) -> Eigenpairs:
    matrix = A.to_dense()
    if not torch.isfinite(matrix).all():
        raise InputError(f"{A!r} gave NaN or infinity")
    theta, S = torch.linalg.eigh(symmetrise(matrix.double()))
    order = wanted_order(theta, which)
    scale = theta.abs().max().item()
    X = fix_signs(A, own(A, S[:, order[:k]])).to(A.dtype)
    return with_residuals(A, theta[order[:k]], X, tol, scale, 1, A.shape[0])
