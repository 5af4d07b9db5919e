"""Low rank: F = J^T J kept as the scaled rows J [r, p] themselves; the small Gram matrix J J^T does the work."""

from __future__ import annotations

from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from biascope.curvature.pieces import Piece, powers
from biascope.errors import InputError
from biascope.linalg import long_dot, psd_eigh
from biascope.linalg.eigenbasis import check_damping


class LowRankPiece(Piece):
    """J^T J with J [r, p]; `owner` [r] says which cotangent a row came from (for centring)."""

    kind = "lowrank"

    def __init__(self, names: tuple[str, ...], J: Tensor, owner: Tensor | None = None) -> None:
        super().__init__(names)
        self.J, self.owner = J, owner

    @property
    def size(self) -> int:  # noqa: D102
        return self.J.shape[1]

    def matmat(self, X: Tensor) -> Tensor:  # noqa: D102
        return self.J.T @ (self.J @ X)

    def diagonal(self) -> Tensor:  # noqa: D102
        return self.J.square().sum(0)

    def frobenius_squared(self) -> Tensor:  # noqa: D102
        return self.gram.square().sum()

    def to_dense(self) -> Tensor:  # noqa: D102
        return self.J.T @ self.J

    @cached_property
    def gram(self) -> Tensor:
        """J J^T [r, r]: the tangent kernel over n."""
        return long_dot(self.J, self.J)

    @cached_property
    def _dual(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues [r] and eigenvectors U [r, r] of the Gram."""
        values, U = psd_eigh(self.gram)
        return values, U

    def _inside(self, weights: Tensor, X: Tensor) -> Tensor:
        """J^T U diag(weights) U^T J X: a function of F without the division by sqrt(lambda), which loses all digits of
        float32 where lambda is tiny.
        """
        U = self._dual[1]
        return self.J.T @ (U @ (weights[:, None] * (U.T @ (self.J @ X))))

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Non-zero eigenvalues [r'] and eigenvectors [p, r'] by duality: v = J^T u / sqrt(lambda)."""
        values, U = self._dual
        keep = values > len(values) * torch.finfo(values.dtype).eps * values[0]
        values, U = values[keep], U[:, keep]
        V = self.J.T @ (U / values.sqrt())
        return values, V

    def eigenvalues(self) -> Tensor:
        """The non-zero ones; all others vanish."""
        return self._eigen[0]

    def to_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self._eigen[1].T @ X

    def from_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self._eigen[1] @ X

    def with_eigenvalues(self, s: Tensor) -> Piece:  # noqa: D102
        return LowRankPiece(self.names, (self._eigen[1] * s.sqrt()).T.contiguous())

    def solve(self, X: Tensor, damping: float, mode: str, complement: str = "keep") -> Tensor:
        """(F + damping I)^-1 X by Woodbury; complement="drop" solves in the span of the rows only."""
        check_damping(damping)
        if complement not in ("keep", "drop"):
            raise InputError(f"complement={complement!r}: keep (all of the space) or drop (the span of the rows only)")
        if complement == "keep" and damping > 0:
            return (X - self._inside(1 / (self._dual[0] + damping), X)) / damping
        values, V = self._eigen
        if complement == "drop":
            return V @ ((V.T @ X) / (values + damping)[:, None])
        if len(values) == self.size:
            return V @ ((V.T @ X) / values[:, None])
        raise InputError(
            f"a low-rank metric (rank {len(values)} of {self.size}) is singular: give damping > 0, or "
            "complement='drop' to solve in the span of its rows"
        )

    def inverse(self, damping: float, mode: str) -> Piece | None:
        """Full rank, so not a piece of this kind: the metric gives a lazy inverse instead."""
        return None

    def power(self, exponent: float, cutoff: float) -> Piece:  # noqa: D102
        return self.with_eigenvalues(powers(self.eigenvalues(), exponent, cutoff))

    def sample(self, Z: Tensor, damping: float, mode: str) -> Tensor:  # noqa: D102
        check_damping(damping)
        if damping <= 0:
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
