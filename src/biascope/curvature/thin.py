"""EKFAC pieces whose two bases are less than matrices: in blocks, the identity, or a few columns.

A basis U is [g, d, d] or [g, d, r] (some columns), [g, h, d / h, d / h] (h blocks), or the identity: [g, 0] for U_B,
None for U_A.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.curvature.kronecker import EigenPiece
from biascope.curvature.pieces import Mode, Piece, matrix_rounding, powers
from biascope.support.errors import InputError


@dataclass(eq=False)
class ReducedEigenPiece(EigenPiece):
    """An `EigenPiece` in such bases."""

    kind = "ekfac, reduced"

    def rotate(self, V: Tensor, back: bool = False) -> Tensor:  # noqa: D102
        return turn_right(self.U_A, turn_left(self.U_B, V, back), back)

    def diagonal(self) -> Tensor:  # noqa: D102
        V = turn_left(self.U_B.square(), self.s[None], back=True)
        return self.layout.unpack(turn_right(None if self.U_A is None else self.U_A.square(), V, back=True))[:, 0]

    def power(self, exponent: float, cutoff: float) -> Piece:
        """As of an `EigenPiece`, but a factor that is a diagonal is known entry by entry, and a block by itself."""
        s, known, squared = self.eigenvalues(), torch.ones_like(self.s, dtype=torch.bool), 1.0
        for U, values, shape in ((self.U_B, self.s_B, (-1, 1)), (self.U_A, self.s_A, (1, -1))):
            own = 0.0 if U is None or U.dim() == 2 else matrix_rounding(U.shape[-2], s.dtype)
            squared *= own
            kept = values > own * values.amax(-1, keepdim=True)
            known = known & kept.view(len(values), 1, *shape)
        return self.with_eigenvalues(powers(s, exponent, cutoff, squared, known.flatten()))


@dataclass(eq=False)
class LowRankEigenPiece(ReducedEigenPiece):
    """One whose U_B [g, o, r] has fewer columns than rows: outside of their span, F is exactly zero.

    `eigenvalues` are those in the span. Functions of F + damping I treat the rest by itself.
    """

    kind = "ekfac, low rank"
    invertible_alike = False

    def _outside(self, damping: float, mode: Mode) -> Tensor:
        """Eigenvalues of F + damping I outside of the span [g, 1, 1, i]."""
        if not damping > 0:
            raise InputError(f"the metric of {self.names[0]} is singular (low rank): give damping > 0")
        root = damping**0.5 if mode == "factored" else 0.0
        return (damping + root * self.s_A)[:, None, None]

    def _apply(self, X: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
        """A function of F with these values in the span [g, e, r, i] and outside [g, 1, 1, i], times X."""
        V = turn_right(self.U_A, self.layout.pack(X))
        own = turn_left(self.U_B, V)
        V = V * outside + turn_left(self.U_B, own * (inside - outside), back=True)
        return self.layout.unpack(turn_right(self.U_A, V, back=True))

    def solve(self, X: Tensor, damping: float, mode: Mode) -> Tensor:  # noqa: D102
        outside = self._outside(damping, mode)
        return self._apply(X, 1 / self.damped(damping, mode).view(self.s.shape), 1 / outside)

    def sample(self, Z: Tensor, damping: float, mode: Mode) -> Tensor:  # noqa: D102
        outside = self._outside(damping, mode)
        return self._apply(Z, self.damped(damping, mode).view(self.s.shape).rsqrt(), outside.rsqrt())


def turn_left(U: Tensor, V: Tensor, back: bool = False) -> Tensor:
    """U^T V, or U V, for V [k, g, e, o, i]."""
    if U.dim() == 2:
        return V
    if U.dim() == 3:
        return (U if back else U.mT)[:, None] @ V
    k, g, e, o, i = V.shape
    apart = V.reshape(k, g, e, U.shape[1], -1, i)
    return ((U if back else U.mT)[:, None] @ apart).reshape(k, g, e, o, i)


def turn_right(U: Tensor | None, V: Tensor, back: bool = False) -> Tensor:
    """V U, or V U^T, for V [k, g, e, o, i]."""
    if U is None:
        return V
    if U.dim() == 3:
        return V @ (U.mT if back else U)[:, None]
    apart = V.reshape(*V.shape[:-1], U.shape[1], -1).transpose(-3, -2)  # [k, g, e, h, o, i / h]
    return (apart @ (U.mT if back else U)[:, None]).transpose(-3, -2).flatten(-2)
