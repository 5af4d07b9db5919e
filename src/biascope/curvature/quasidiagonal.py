"""Quasi-diagonal (Ollivier): per output unit an arrow, its diagonal and the covariances of the bias with the weights.

For unit o the matrix on (b_o, W_o1, W_o2, ...) is [[D_b, C^T], [C, diag D]]. Everything is in closed form. With one
weight per unit (a normalisation layer's scale and shift) the arrow is the whole 2 x 2 block: the unit-wise form.
Leaving out the covariances among weights can make an arrow indefinite: `solve` is then still the exact solution, but
no descent direction is promised; damping repairs it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from biascope.curvature.pieces import Mode, Piece
from biascope.support.errors import InputError


@dataclass(eq=False)
class ArrowPiece(Piece):
    """Arrows: D [o, i] weights' diagonal, C [o, i] covariance with the bias, Db [o] the bias's diagonal.

    `input_major` weights lie as [groups, i, o / groups] in the flat order.
    """

    D: Tensor
    C: Tensor
    Db: Tensor
    input_major: bool = False
    groups: int = 1
    kind = "quasidiagonal"
    invertible_alike = False

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
        D, Db = self.D + damping, (self.Db + damping).double()
        # with many weights the sum comes close to D_b, and in float32 its rounding would exceed what is left
        taken = (self.C.double().square() / D.double()).sum(-1)
        schur = Db - taken
        if bool((D <= 0).any()) or bool((schur.abs() <= torch.finfo(D.dtype).eps * (Db + taken)).any()):
            raise InputError(f"the quasi-diagonal metric of {self.names[0]} is singular; give damping > 0")
        return D, schur.to(D.dtype)

    def solve(self, X: Tensor, damping: float, mode: Mode) -> Tensor:  # noqa: D102
        D, schur = self._schur(damping)
        W, v = self.split(X)
        b = (v - (self.C * W / D).sum(-1)) / schur
        return self.join((W - self.C * b[..., None]) / D, b)

    def sample(self, Z: Tensor, damping: float, mode: Mode) -> Tensor:  # noqa: D102
        D, schur = self._schur(damping)
        if bool((schur < 0).any()):
            raise InputError(f"the metric of {self.names[0]} is not positive definite; give more damping, or use block")
        W, b = self.split(Z)
        b = b / schur.sqrt()  # the bias's marginal, then the weights given it
        return self.join(W / D.sqrt() - self.C * b[..., None] / D, b)

    def downdate(self, M: Tensor) -> Piece:  # noqa: D102
        W, b = self.split(M)
        D, Db = (self.D - W.square().sum(0)).clamp_min(0.0), (self.Db - b.square().sum(0)).clamp_min(0.0)
        return replace(self, D=D, C=self.C - (W * b[..., None]).sum(0), Db=Db)

    def scale(self, c: float) -> Piece:  # noqa: D102
        return replace(self, D=c * self.D, C=c * self.C, Db=c * self.Db)

    def add(self, other: Piece) -> Piece | None:  # noqa: D102
        if not isinstance(other, ArrowPiece):
            return None
        return replace(self, D=self.D + other.D, C=self.C + other.C, Db=self.Db + other.Db)
