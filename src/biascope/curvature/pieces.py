"""The pieces a metric is made of: each a symmetric operator on the parameters of one layer (or of all).

A piece works on vectors X [p, k] of its own parameters, in their flat order. Most operations follow from three things:
the eigenvalues, and the way to and from the eigenbasis; a piece that knows better overrides them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from biascope.arguments import check_number
from biascope.errors import InputError, UnsupportedError
from biascope.linalg import psd_eigh, symmetrise
from biascope.linalg.eigenbasis import check_damping


class Piece:
    """A symmetric operator [p, p] on the parameters `names`."""

    kind: ClassVar[str] = ""
    symmetric = True

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    @property
    def size(self) -> int:
        """p."""
        raise AssertionError("a piece knows its size")

    def matmat(self, X: Tensor) -> Tensor:
        """F X for X [p, k]."""
        raise AssertionError("a piece multiplies")

    def diagonal(self) -> Tensor:
        """[p]."""
        raise AssertionError("a piece knows its diagonal")

    def trace(self) -> Tensor:
        """A number."""
        return self.diagonal().sum()

    def frobenius_squared(self) -> Tensor:
        """Sum of squared entries."""
        return self.eigenvalues().square().sum()

    def to_dense(self) -> Tensor:
        """[p, p]."""
        like = self.diagonal()
        return self.matmat(torch.eye(self.size, dtype=like.dtype, device=like.device))

    # the eigenbasis ---------------------------------------------------------------------------------------------

    def eigenvalues(self) -> Tensor:
        """In the order of the basis, [r] (r = p but for low rank)."""
        raise UnsupportedError(f"a {self.kind} piece has no eigendecomposition; use representation='block' or 'dense'")

    def to_eigenbasis(self, X: Tensor) -> Tensor:
        """Coordinates [r, k] of X [p, k]."""
        raise UnsupportedError(f"a {self.kind} piece has no eigenbasis; use representation='block' or 'dense'")

    def from_eigenbasis(self, X: Tensor) -> Tensor:
        """Back from coordinates [r, k] to [p, k]."""
        raise UnsupportedError(f"a {self.kind} piece has no eigenbasis; use representation='block' or 'dense'")

    def with_eigenvalues(self, s: Tensor) -> Piece:
        """The same eigenbasis with other eigenvalues."""
        raise UnsupportedError(f"a {self.kind} piece has no eigenbasis; use representation='block' or 'dense'")

    # what follows -----------------------------------------------------------------------------------------------

    def damped(self, damping: float, mode: str) -> Tensor:
        """Eigenvalues plus damping, refused where they vanish."""
        check_damping(damping)
        return self.invertible(self.eigenvalues() + damping)

    def invertible(self, s: Tensor) -> Tensor:
        """Refuse eigenvalues that vanish to rounding (a bound that grew with the size would refuse real damping)."""
        floor = 10 * torch.finfo(s.dtype).eps * s.abs().max()
        if not bool((s.abs() > floor).all()):
            raise InputError(
                f"the metric of {', '.join(self.names[:2])} is singular: {int((s.abs() <= floor).sum())} of {len(s)} "
                "eigenvalues vanish; give damping > 0, or use power(-1) for the pseudo-inverse"
            )
        return s

    def solve(self, X: Tensor, damping: float, mode: str) -> Tensor:
        """(F + damping I)^-1 X."""
        return self.from_eigenbasis(self.to_eigenbasis(X) / self.damped(damping, mode)[:, None])

    def inverse(self, damping: float, mode: str) -> Piece | None:
        """(F + damping I)^-1 as a piece; None where it is of no such form."""
        return self.with_eigenvalues(1.0 / self.damped(damping, mode))

    def power(self, exponent: float, cutoff: float) -> Piece:
        """F^e; for e < 0 eigenvalues up to `cutoff` times the largest, or up to rounding, are left out."""
        s = self.eigenvalues()
        return self.with_eigenvalues(powers(s, exponent, cutoff, matrix_rounding(len(s), s.dtype)))

    def sample(self, Z: Tensor, damping: float, mode: str) -> Tensor:
        """N(0, (F + damping I)^-1) from standard normal Z [p, k]."""
        s = self.damped(damping, mode)
        if bool((s <= 0).any()):
            raise InputError(f"the metric of {self.names[0]} has negative eigenvalues: no Gaussian; give more damping")
        return self.from_eigenbasis(Z / s.sqrt()[:, None])

    def downdate(self, M: Tensor) -> Piece:
        """F - M M^T for M [p, k]: the centred form, given the mean gradients."""
        raise UnsupportedError(f"a {self.kind} piece cannot be centred; use ekfac, diagonal, block or dense")

    # algebra; None where the representation is not closed -------------------------------------------------------

    def scale(self, c: float) -> Piece | None:
        """C F."""
        return None

    def add(self, other: Piece) -> Piece | None:
        """F + G."""
        return None

    def product(self, other: Piece) -> Piece | None:
        """F G (in general not symmetric)."""
        return None

    # files ------------------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, Tensor]:
        """What is saved."""
        raise AssertionError("a piece can be saved")

    def header(self) -> dict[str, Any]:
        """What is saved beside the arrays."""
        return {}

    @classmethod
    def load(cls, names: tuple[str, ...], arrays: dict[str, Tensor], header: dict[str, Any]) -> Piece:
        """Back from `arrays` and `header`."""
        return cls(names, **arrays, **header)


def matrix_rounding(n: int, dtype: torch.dtype) -> float:
    """What rounding does to an eigenvalue of a matrix [n, n], over the largest: n eps."""
    return n * torch.finfo(dtype).eps


def powers(s: Tensor, exponent: float, cutoff: float, rounding: float, known: Tensor | None = None) -> Tensor:
    """s^e; for e < 0 without what is no larger than max(cutoff, rounding) times the largest.

    Entries that are each known by themselves (a diagonal) have `rounding` 0: then zeros are left out, and numbers too
    small for all their digits. `known`: False where an entry is rounding alone, whatever its size.
    """
    check_number(exponent, "exponent")
    check_number(cutoff, "cutoff")
    largest = s.abs().max() if len(s) else s.new_zeros(())
    floor = (max(cutoff, rounding) * largest).clamp_min(torch.finfo(s.dtype).tiny)
    keep = torch.ones_like(s, dtype=torch.bool)
    if exponent < 0:
        keep = s.abs() > floor if known is None else (s.abs() > floor) & known
    if exponent != int(exponent):
        if bool((s < -floor).any()):
            raise InputError(f"power {exponent} of a matrix with negative eigenvalues")
        s = s.clamp_min(0.0)
    return torch.where(keep, torch.where(keep, s, 1.0) ** exponent, 0.0)


class DiagonalPiece(Piece):
    """diag(d)."""

    kind = "diagonal"

    def __init__(self, names: tuple[str, ...], d: Tensor) -> None:
        super().__init__(names)
        self.d = d

    @property
    def size(self) -> int:  # noqa: D102
        return len(self.d)

    def matmat(self, X: Tensor) -> Tensor:  # noqa: D102
        return self.d[:, None] * X

    def diagonal(self) -> Tensor:  # noqa: D102
        return self.d

    def eigenvalues(self) -> Tensor:  # noqa: D102
        return self.d

    def to_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return X

    from_eigenbasis = to_eigenbasis

    def with_eigenvalues(self, s: Tensor) -> Piece:  # noqa: D102
        return DiagonalPiece(self.names, s)

    def invertible(self, s: Tensor) -> Tensor:  # a diagonal is divided exactly, however small  # noqa: D102
        if bool((s == 0).any()):
            raise InputError(
                f"the metric of {self.names[0]} is singular: {int((s == 0).sum())} of {len(s)} diagonal entries are "
                "zero; give damping > 0"
            )
        return s

    def power(self, exponent: float, cutoff: float) -> Piece:
        """Entry by entry: without a `cutoff` nothing but zeros is left out."""
        return DiagonalPiece(self.names, powers(self.d, exponent, cutoff, 0.0))

    def downdate(self, M: Tensor) -> Piece:  # noqa: D102
        return DiagonalPiece(self.names, (self.d - M.square().sum(1)).clamp_min(0.0))

    def scale(self, c: float) -> Piece:  # noqa: D102
        return DiagonalPiece(self.names, c * self.d)

    def add(self, other: Piece) -> Piece | None:  # noqa: D102
        return DiagonalPiece(self.names, self.d + other.d) if isinstance(other, DiagonalPiece) else None

    def product(self, other: Piece) -> Piece | None:  # noqa: D102
        return DiagonalPiece(self.names, self.d * other.d) if isinstance(other, DiagonalPiece) else None

    def arrays(self) -> dict[str, Tensor]:  # noqa: D102
        return {"d": self.d}


class DensePiece(Piece):
    """A matrix [p, p], weights and biases one after the other."""

    kind = "dense"

    def __init__(self, names: tuple[str, ...], H: Tensor, symmetric: bool = True) -> None:
        super().__init__(names)
        self.H, self.symmetric = H, symmetric

    @property
    def size(self) -> int:  # noqa: D102
        return len(self.H)

    def matmat(self, X: Tensor) -> Tensor:  # noqa: D102
        return self.H @ X

    def diagonal(self) -> Tensor:  # noqa: D102
        return self.H.diagonal()

    def frobenius_squared(self) -> Tensor:  # noqa: D102
        return self.H.square().sum()

    def to_dense(self) -> Tensor:  # noqa: D102
        return self.H

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        if not self.symmetric:
            raise UnsupportedError("a product of two metrics is not symmetric: it can be multiplied, not decomposed")
        return psd_eigh(self.H, clip=False)

    def eigenvalues(self) -> Tensor:  # noqa: D102
        return self._eigen[0]

    def to_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self._eigen[1].T @ X

    def from_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self._eigen[1] @ X

    def with_eigenvalues(self, s: Tensor) -> Piece:  # noqa: D102
        U = self._eigen[1]
        return DensePiece(self.names, symmetrise((U * s) @ U.T))

    def downdate(self, M: Tensor) -> Piece:  # noqa: D102
        return DensePiece(self.names, self.H - M @ M.T)

    def scale(self, c: float) -> Piece:  # noqa: D102
        return DensePiece(self.names, c * self.H, self.symmetric)

    def add(self, other: Piece) -> Piece | None:  # noqa: D102
        if not isinstance(other, DensePiece):
            return None
        return DensePiece(self.names, self.H + other.H, self.symmetric and other.symmetric)

    def product(self, other: Piece) -> Piece | None:  # noqa: D102
        return DensePiece(self.names, self.H @ other.H, False) if isinstance(other, DensePiece) else None

    def arrays(self) -> dict[str, Tensor]:  # noqa: D102
        return {"H": self.H}

    def header(self) -> dict[str, Any]:  # noqa: D102
        return {"symmetric": self.symmetric}
