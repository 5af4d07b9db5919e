"""Quasi-diagonal (Ollivier): per output unit an arrow, its diagonal and the covariances of the bias with the weights.

For unit o the matrix on (b_o, W_o1, W_o2, ...) is [[D_b, C^T], [C, diag D]]. Everything is in closed form. With one
weight per unit (a normalisation layer's scale and shift) the arrow is the whole 2 x 2 block: the unit-wise form.
Leaving out the covariances among weights can make an arrow indefinite: `solve` is then still the exact solution, but
no descent direction is promised; damping repairs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from biascope.curvature.pieces import Piece
from biascope.errors import InputError
from biascope.linalg.eigenbasis import check_damping


class ArrowPiece(Piece):
    """Arrows: D [o, i] weights' diagonal, C [o, i] covariance with the bias, Db [o] the bias's diagonal.

    `input_major` weights lie as [groups, i, o / groups] in the flat order.
    """

    kind = "quasidiagonal"

    def __init__(
        self, names: tuple[str, ...], D: Tensor, C: Tensor, Db: Tensor, input_major: bool = False, groups: int = 1
    ) -> None:
        super().__init__(names)
        self.D, self.C, self.Db, self.input_major, self.groups = D, C, Db, input_major, groups

    @property
    def size(self) -> int:  # noqa: D102
        return self.D.numel() + self.Db.numel()

    def split(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """X [p, k] as weights [k, o, i] and biases [k, o]."""
        o, i = self.D.shape
        W, b = X[: o * i].T, X[o * i :].T
        if self.input_major:
            return W.reshape(-1, self.groups, i, o // self.groups).mT.reshape(-1, o, i), b
        return W.reshape(-1, o, i), b

    def join(self, W: Tensor, b: Tensor) -> Tensor:
        """Back to [p, k]."""
        if self.input_major:
            o, i = self.D.shape
            W = W.reshape(-1, self.groups, o // self.groups, i).mT
        return torch.cat([W.flatten(1), b], 1).T

    def matmat(self, X: Tensor) -> Tensor:  # noqa: D102
        W, b = self.split(X)
        return self.join(self.D * W + self.C * b[..., None], self.Db * b + (self.C * W).sum(-1))

    def diagonal(self) -> Tensor:  # noqa: D102
        return self.join(self.D[None], self.Db[None])[:, 0]

    def frobenius_squared(self) -> Tensor:  # noqa: D102
        return self.D.square().sum() + self.Db.square().sum() + 2 * self.C.square().sum()

    def _schur(self, damping: float) -> tuple[Tensor, Tensor]:
        """D + damping, and the Schur complement of the weights, D_b + damping - sum C^2 / D."""
        check_damping(damping)
        D = self.D + damping
        if bool((D <= 0).any()):
            raise InputError(f"the metric of {self.names[0]} is singular: weights with zero diagonal; give damping > 0")
        schur = self.Db + damping - (self.C.square() / D).sum(-1)
        floor = D.shape[1] * torch.finfo(D.dtype).eps * (self.Db + damping)
        if bool((schur.abs() <= floor).any()):
            unit = int((schur.abs() <= floor).nonzero()[0])
            raise InputError(f"the metric of {self.names[0]} is singular in unit {unit}; give damping > 0")
        return D, schur

    def solve(self, X: Tensor, damping: float, mode: str) -> Tensor:  # noqa: D102
        D, schur = self._schur(damping)
        W, v = self.split(X)
        b = (v - (self.C * W / D).sum(-1)) / schur
        return self.join((W - self.C * b[..., None]) / D, b)

    def inverse(self, damping: float, mode: str) -> Piece | None:
        """The inverse of an arrow is full: the metric gives a lazy inverse instead."""
        return None

    def sample(self, Z: Tensor, damping: float, mode: str) -> Tensor:  # noqa: D102
        D, schur = self._schur(damping)
        if bool((schur < 0).any()):
            raise InputError(
                f"the quasi-diagonal metric of {self.names[0]} is not positive definite in unit "
                f"{int((schur < 0).nonzero()[0])}: no Gaussian; give a larger damping, or use representation='block'"
            )
        W, b = self.split(Z)
        b = b / schur.sqrt()  # the bias's marginal, then the weights given it
        return self.join(W / D.sqrt() - self.C * b[..., None] / D, b)

    def downdate(self, M: Tensor) -> Piece:  # noqa: D102
        W, b = self.split(M)
        return self._like(
            (self.D - W.square().sum(0)).clamp_min(0.0),
            self.C - (W * b[..., None]).sum(0),
            (self.Db - b.square().sum(0)).clamp_min(0.0),
        )

    def scale(self, c: float) -> Piece:  # noqa: D102
        return self._like(c * self.D, c * self.C, c * self.Db)

    def add(self, other: Piece) -> Piece | None:  # noqa: D102
        if not isinstance(other, ArrowPiece):
            return None
        return self._like(self.D + other.D, self.C + other.C, self.Db + other.Db)

    def _like(self, D: Tensor, C: Tensor, Db: Tensor) -> ArrowPiece:
        return ArrowPiece(self.names, D, C, Db, self.input_major, self.groups)

    def arrays(self) -> dict[str, Tensor]:  # noqa: D102
        return {"D": self.D, "C": self.C, "Db": self.Db}

    def header(self) -> dict[str, Any]:  # noqa: D102
        return {"input_major": self.input_major, "groups": self.groups}
