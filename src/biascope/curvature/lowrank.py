"""Low rank: F = J^T J kept as the scaled rows J [r, p] themselves; the small Gram matrix J J^T does the work.

Eigenvectors v = J^T u / sqrt(lambda) divide by what may be tiny: the Gram and the projections on it are in float64,
some columns of J at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from biascope.curvature.pieces import Mode, Piece, matrix_rounding, powers
from biascope.linalg import psd_eigh
from biascope.support.errors import InputError

WIDE = 2**22  # entries of J that are float64 at a time


@dataclass(eq=False)
class LowRankPiece(Piece):
    """J^T J with J [r, p]; `owner` [r] says which cotangent a row came from (for centring; it is not saved)."""

    J: Tensor
    owner: Tensor | None = None
    kind = "lowrank"
    invertible_alike = False

    def matmat(self, X: Tensor) -> Tensor:  # noqa: D102
        return self.J.T @ (self.J @ X)

    def diagonal(self) -> Tensor:  # noqa: D102
        return self.J.square().sum(0)

    def frobenius_squared(self) -> Tensor:  # noqa: D102
        return self.gram.square().sum().to(self.J.dtype)

    def to_dense(self) -> Tensor:  # noqa: D102
        return self.J.T @ self.J

    @cached_property
    def gram(self) -> Tensor:
        """J J^T [r, r] in float64: the tangent kernel over n."""
        total = self.J.new_zeros(len(self.J), len(self.J), dtype=torch.float64)
        for _, J in self._columns():
            total.addmm_(J, J.T)
        return total

    def _columns(self) -> Iterator[tuple[slice, Tensor]]:
        """Some columns of J at a time, in float64."""
        step = max(1, WIDE // max(1, len(self.J)))
        for start in range(0, self.J.shape[1], step):
            some = slice(start, start + step)
            yield some, self.J[:, some].double()

    def _down(self, X: Tensor) -> Tensor:
        """J X [r, k] in float64."""
        total = X.new_zeros(len(self.J), X.shape[1], dtype=torch.float64)
        for some, J in self._columns():
            total.addmm_(J, X[some].double())
        return total

    def _up(self, W: Tensor) -> Tensor:
        """J^T W [p, k] for W in float64, summed in float64, in J's precision."""
        out = self.J.new_empty(self.J.shape[1], W.shape[1])
        for some, J in self._columns():
            out[some] = J.T @ W
        return out

    @cached_property
    def _dual(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues [r] and eigenvectors U [r, r] of the Gram, in float64."""
        if not len(self.J):  # a power of zero
            return self.gram[0:0].flatten(), self.gram
        return psd_eigh(self.gram)

    def _inside(self, weights: Tensor, X: Tensor) -> Tensor:
        """J^T U diag(weights) U^T J X: a function of F without the division by sqrt(lambda), which loses all digits of
        float32 where lambda is tiny.
        """
        U = self._dual[1].to(X.dtype)
        return self.J.T @ (U @ (weights.to(X.dtype)[:, None] * (U.T @ (self.J @ X))))

    def _kept(self, rounding: float) -> tuple[Tensor, Tensor]:
        """Eigenvalues [r'] of the Gram above this times the largest, and their eigenvectors [r, r'], in float64."""
        values, U = self._dual
        keep = values > rounding * values[:1]
        return values[keep], U[:, keep]

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Non-zero eigenvalues [r'] and eigenvectors [p, r'] by duality: v = J^T u / sqrt(lambda)."""
        values, U = self._kept(matrix_rounding(len(self.J), self.J.dtype))
        return values.to(self.J.dtype), self._up(U / values.sqrt())

    def _solve_in_span(self, X: Tensor, damping: float) -> Tensor:
        """V ((V^T X) / (lambda + damping)) with V = J^T U / sqrt(lambda) on all that J tells from its own rounding.

        Without damping X's rounding would be divided by the smallest eigenvalues: then on `eigenvalues` only.
        """
        eps = torch.finfo(self.J.dtype).eps
        own = len(self.J) * max(eps**2, torch.finfo(torch.float64).eps)  # eigenvalues are squares of singular values
        values, U = self._kept(own if damping > 0 else len(self.J) * eps)
        return self._up(U @ ((U.T @ self._down(X)) / (values * (values + damping))[:, None]))

    def eigenvalues(self) -> Tensor:
        """The non-zero ones; all others vanish."""
        return self._eigen[0]

    def to_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self._eigen[1].T @ X

    def from_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self._eigen[1] @ X

    def with_eigenvalues(self, s: Tensor) -> Piece:  # noqa: D102
        return LowRankPiece(self.names, (self._eigen[1] * s.sqrt()).T.contiguous())

    def solve(self, X: Tensor, damping: float, mode: Mode, complement: str = "keep") -> Tensor:
        """(F + damping I)^-1 X by Woodbury; complement="drop" solves in the span of the rows only."""
        if complement == "keep" and damping > 0:
            return (X - self._inside(1 / (self._dual[0] + damping), X)) / damping
        if complement == "drop" or len(self.eigenvalues()) == self.J.shape[1]:
            return self._solve_in_span(X, damping)
        raise InputError("a low-rank metric is singular: give damping > 0, or complement='drop' for the rows' span")

    def power(self, exponent: float, cutoff: float) -> Piece:
        """On the span of the rows; the power of zero is zero."""
        return self.with_eigenvalues(powers(self.eigenvalues(), exponent, cutoff, 0.0))  # rounding is left out already

    def sample(self, Z: Tensor, damping: float, mode: Mode) -> Tensor:  # noqa: D102
        if damping == 0:
            raise InputError("a low-rank metric is singular: sampling N(0, (F + damping I)^-1) needs damping > 0")
        root, far = sqrt(damping), (self._dual[0] + damping).sqrt()
        # (d^-1/2 - (lam + d)^-1/2) / lam, written without the difference
        return Z / root - self._inside(1 / (root * far * (root + far)), Z)

    def downdate(self, M: Tensor) -> Piece:  # noqa: D102
        if self.owner is None:
            raise InputError("these rows no longer know their cotangents: centre when the metric is built")
        n = (self.owner == 0).sum()
        return LowRankPiece(self.names, self.J - M.T[self.owner] / n.sqrt(), self.owner)

    def scale(self, c: float) -> Piece | None:  # noqa: D102
        return LowRankPiece(self.names, sqrt(c) * self.J, self.owner) if c >= 0 else None

    def add(self, other: Piece) -> Piece | None:  # noqa: D102
        return LowRankPiece(self.names, torch.cat([self.J, other.J])) if isinstance(other, LowRankPiece) else None

    def arrays(self) -> dict[str, Tensor]:  # noqa: D102
        return {"J": self.J}
