"""KFAC and EKFAC pieces: Kronecker products and diagonals in a Kronecker eigenbasis, a pair per group.

Inside, a layer's parameters are the homogeneous matrix V = [W | b] [o, i + 1], one per group g; under SUA the e kernel
offsets of a convolution stay apart. All arrays are [g, e, o, i]-shaped in that order. (B (x) A) vec(V) = vec(B V A).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from biascope.curvature.eigh import batched_eigh, eigh_of
from biascope.curvature.pieces import Piece, matrix_rounding, powers
from biascope.errors import InputError, UnsupportedError
from biascope.linalg.eigenbasis import check_damping


@dataclass(frozen=True)
class Homogeneous:
    """How the flat order [weight..., bias...] of a layer and [g, e, o, i] correspond."""

    groups: int
    d_out: int
    d_in: int  # without the bias; under SUA the channels only
    offsets: int = 1
    bias: bool = False
    input_major: bool = False

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.groups * self.d_out * (self.d_in * self.offsets + self.bias)

    @property
    def columns(self) -> int:
        """Columns of V, with the bias's."""
        return self.d_in + self.bias

    def pack(self, X: Tensor) -> Tensor:
        """[p, k] to V [k, g, e, o, i]."""
        g, o, i, e = self.groups, self.d_out, self.d_in, self.offsets
        W = X[: g * o * i * e].T
        V = W.reshape(-1, g, i, o).mT[:, :, None] if self.input_major else W.reshape(-1, g, o, i, e).movedim(-1, 2)
        if not self.bias:
            return V
        return torch.cat([V, X[g * o * i :].T.reshape(-1, g, 1, o, 1)], -1)

    def unpack(self, V: Tensor) -> Tensor:
        """V [k, g, e, o, i] to [p, k]."""
        W = V[..., : self.d_in]
        flat = (W[:, :, 0].mT if self.input_major else W.movedim(2, -1)).flatten(1)
        return (torch.cat([flat, V[..., self.d_in].flatten(1)], 1) if self.bias else flat).T


class KroneckerPiece(Piece):
    """B (x) A per group: B [g, o, o]; A [g, i, i], or [g, i] where it is diagonal (embeddings)."""

    kind = "kfac"

    def __init__(self, names: tuple[str, ...], B: Tensor, A: Tensor, layout: Homogeneous) -> None:
        super().__init__(names)
        self.B, self.A, self.layout = B, A, layout
        self.symmetric = True

    @property
    def size(self) -> int:  # noqa: D102
        return self.layout.size

    @property
    def full(self) -> bool:
        """Is A a matrix (not a diagonal)?"""
        return self.A.dim() == 3

    def matmat(self, X: Tensor) -> Tensor:  # noqa: D102
        V = self.B[:, None] @ self.layout.pack(X)
        return self.layout.unpack(V @ self.A.mT[:, None] if self.full else V * self.A[:, None, None])

    def _outer(self, b: Tensor, a: Tensor) -> Tensor:
        """b [g, o] and a [g, i] to [g, e, o, i]."""
        return (b[:, :, None] * a[:, None, :])[:, None].expand(-1, self.layout.offsets, -1, -1)

    def diagonal(self) -> Tensor:  # noqa: D102
        a = self.A.diagonal(dim1=-2, dim2=-1) if self.full else self.A
        return self.layout.unpack(self._outer(self.B.diagonal(dim1=-2, dim2=-1), a)[None])[:, 0]

    def trace(self) -> Tensor:  # noqa: D102
        a = self.A.diagonal(dim1=-2, dim2=-1).sum(-1) if self.full else self.A.sum(-1)
        return self.layout.offsets * (self.B.diagonal(dim1=-2, dim2=-1).sum(-1) * a).sum()

    def frobenius_squared(self) -> Tensor:  # noqa: D102
        return self.layout.offsets * (self.B.square().sum((1, 2)) * self.A.square().flatten(1).sum(1)).sum()

    @cached_property
    def eigen(self) -> EigenPiece:
        """The same operator, diagonal in its Kronecker eigenbasis."""
        if not self.symmetric:
            raise UnsupportedError("a product of two metrics is not symmetric: it can be multiplied, not decomposed")
        a = batched_eigh(self.A) if self.full else (self.A, None)
        return self.in_basis(*batched_eigh(self.B), *a)

    def in_basis(self, s_B: Tensor, U_B: Tensor, s_A: Tensor, U_A: Tensor | None) -> EigenPiece:
        """B (x) A given the eigenvalues and eigenvectors of B and A."""
        return EigenPiece(self.names, U_B, U_A, self._outer(s_B, s_A), s_B, s_A, self.layout)

    def eigenvalues(self) -> Tensor:  # noqa: D102
        return self.eigen.eigenvalues()

    def to_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self.eigen.to_eigenbasis(X)

    def from_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self.eigen.from_eigenbasis(X)

    def with_eigenvalues(self, s: Tensor) -> Piece:  # noqa: D102
        return self.eigen.with_eigenvalues(s)

    def damped_factors(self, damping: float) -> tuple[Tensor, Tensor]:
        """Eigenvalues [g, o] of B + sqrt(damping) / pi I and [g, i] of A + pi sqrt(damping) I; none may vanish.

        pi^2 = (tr A / d_in) / (tr B / d_out), per group. Damping the eigenvalues adds no rounding; a product of two may
        be tiny, it is divided exactly.
        """
        check_damping(damping)
        a = (self.A.diagonal(dim1=-2, dim2=-1) if self.full else self.A).mean(-1)
        b = self.B.diagonal(dim1=-2, dim2=-1).mean(-1)
        pi = torch.where((a > 0) & (b > 0), (a / b).clamp_min(torch.finfo(a.dtype).tiny).sqrt(), 1.0)
        root = sqrt(damping)
        s_B, s_A = self.eigen.s_B + (root / pi)[:, None], self.eigen.s_A + (root * pi)[:, None]
        for s, which, exact in ((s_B, "output", False), (s_A, "input", not self.full)):
            own = 0 if exact else 1 if damping > 0 else s.shape[-1]  # undamped ones are as uncertain as their matrix
            floor = matrix_rounding(own, s.dtype) * s.amax(-1, keepdim=True)
            if not bool((s > floor).all()):
                raise InputError(
                    f"the {which} factor of {', '.join(self.names[:2])} is singular: {int((s <= floor).sum())} of "
                    f"{s.numel()} eigenvalues vanish beside the largest; give damping > {damping:g}"
                )
        return s_B, s_A

    def damped(self, damping: float, mode: str) -> Tensor:  # noqa: D102
        if mode == "exact":
            return self.invertible(self.eigenvalues() + damping)
        return self._outer(*self.damped_factors(damping)).flatten()

    def solve(self, X: Tensor, damping: float, mode: str) -> Tensor:  # noqa: D102
        if mode == "exact":
            return self.eigen.solve(X, damping, "exact")
        b, a = self.damped_factors(damping)  # one after the other: their product may be too small for a float32
        V = self.eigen.rotate(self.layout.pack(X)) / b[:, None, :, None] / a[:, None, None, :]
        return self.layout.unpack(self.eigen.rotate(V, back=True))

    def inverse(self, damping: float, mode: str) -> Piece | None:  # noqa: D102
        if mode == "exact":
            return self.eigen.inverse(damping, "exact")
        b, a = self.damped_factors(damping)
        return self._with_factors(1 / b, 1 / a)

    def sample(self, Z: Tensor, damping: float, mode: str) -> Tensor:  # noqa: D102
        if mode == "exact":
            return self.eigen.sample(Z, damping, "exact")
        return self.from_eigenbasis(Z / self.damped(damping, mode).sqrt()[:, None])

    def power(self, exponent: float, cutoff: float) -> Piece:
        """B^e (x) A^e stays Kronecker; eigenvalues are left out factor by factor, up to the factor's own rounding."""
        E, dtype = self.eigen, self.B.dtype
        n_B, n_A = E.s_B.shape[-1], E.s_A.shape[-1] if self.full else 0  # a diagonal factor is known entry by entry
        b = torch.stack([powers(s, exponent, cutoff, matrix_rounding(n_B, dtype)) for s in E.s_B])
        a = torch.stack([powers(s, exponent, cutoff, matrix_rounding(n_A, dtype)) for s in E.s_A])
        return self._with_factors(b, a)

    def _with_factors(self, b: Tensor, a: Tensor) -> KroneckerPiece:
        """The factors' eigenbases with other eigenvalues b [g, o] and a [g, i]."""
        U_B, U_A = self.eigen.U_B, self.eigen.U_A
        B = (U_B * b[:, None]) @ U_B.mT
        return KroneckerPiece(self.names, B, a if U_A is None else (U_A * a[:, None]) @ U_A.mT, self.layout)

    def scale(self, c: float) -> Piece:  # noqa: D102
        if c < 0 and self.symmetric:  # factors are decomposed as positive ones
            return self.eigen.scale(c)
        root = sqrt(abs(c))
        piece = KroneckerPiece(self.names, (root if c >= 0 else -root) * self.B, root * self.A, self.layout)
        piece.symmetric = self.symmetric
        return piece

    def product(self, other: Piece) -> Piece | None:  # noqa: D102
        if not isinstance(other, KroneckerPiece) or self.full != other.full or self.layout != other.layout:
            return None
        A = self.A @ other.A if self.full else self.A * other.A
        piece = KroneckerPiece(self.names, self.B @ other.B, A, self.layout)
        piece.symmetric = False
        return piece

    def arrays(self) -> dict[str, Tensor]:  # noqa: D102
        return {"B": self.B, "A": self.A}

    def header(self) -> dict[str, Any]:  # noqa: D102
        return {"layout": asdict(self.layout), "symmetric": self.symmetric}

    @classmethod
    def load(cls, names: tuple[str, ...], arrays: dict[str, Tensor], header: dict[str, Any]) -> Piece:  # noqa: D102
        piece = cls(names, arrays["B"], arrays["A"], Homogeneous(**header["layout"]))
        piece.symmetric = header["symmetric"]
        return piece


class EigenPiece(Piece):
    """diag(s) in the basis U_B (x) U_A (U_A None: the identity); s [g, e, o, i].

    s_B, s_A are the Kronecker factors' eigenvalues the basis came with: the factored damping of deep nets uses them. A
    power, an inverse and most sums have no such factors (`factored` is False, s_B = s_A = 1).
    """

    kind = "ekfac"

    def __init__(
        self,
        names: tuple[str, ...],
        U_B: Tensor,
        U_A: Tensor | None,
        s: Tensor,
        s_B: Tensor,
        s_A: Tensor,
        layout: Homogeneous,
        factored: bool = True,
    ) -> None:
        super().__init__(names)
        self.U_B, self.U_A, self.s, self.s_B, self.s_A, self.layout = U_B, U_A, s, s_B, s_A, layout
        self.factored = factored

    @property
    def size(self) -> int:  # noqa: D102
        return self.layout.size

    def rotate(self, V: Tensor, back: bool = False) -> Tensor:
        """U_B^T V U_A, or U_B V U_A^T."""
        U_B = self.U_B[:, None]
        V = (U_B if back else U_B.mT) @ V
        if self.U_A is None:
            return V
        return V @ (self.U_A.mT if back else self.U_A)[:, None]

    def matmat(self, X: Tensor) -> Tensor:  # noqa: D102
        V = self.rotate(self.layout.pack(X)) * self.s
        return self.layout.unpack(self.rotate(V, back=True))

    def diagonal(self) -> Tensor:  # noqa: D102
        V = self.U_B.square()[:, None] @ self.s
        return self.layout.unpack((V if self.U_A is None else V @ self.U_A.square().mT[:, None])[None])[:, 0]

    def trace(self) -> Tensor:  # noqa: D102
        return self.s.sum()

    def eigenvalues(self) -> Tensor:  # noqa: D102
        return self.s.flatten()

    def to_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self.rotate(self.layout.pack(X)).flatten(1).T

    def from_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return self.layout.unpack(self.rotate(X.T.reshape(-1, *self.s.shape), back=True))

    def with_eigenvalues(self, s: Tensor) -> Piece:  # noqa: D102
        return self._with(s, torch.ones_like(self.s_B), torch.ones_like(self.s_A), False)

    def power(self, exponent: float, cutoff: float) -> Piece:
        """Entry by entry. For e < 0 without the directions that a factor knows by its rounding alone.

        The others are means of squares, each with a rounding of its own: that of a squared gradient.
        """
        s, n_B, n_A = self.eigenvalues(), self.s_B.shape[-1], self.s_A.shape[-1]
        squared = matrix_rounding(n_B, s.dtype) * matrix_rounding(n_A, s.dtype)
        in_B = self.s_B > matrix_rounding(n_B, s.dtype) * self.s_B.amax(-1, keepdim=True)
        full = self.U_A is not None  # an embedding's factor is a diagonal: it counts words
        in_A = self.s_A > (matrix_rounding(n_A, s.dtype) if full else 0.0) * self.s_A.amax(-1, keepdim=True)
        known = (in_B[:, None, :, None] & in_A[:, None, None, :]).expand(self.s.shape).flatten()
        return self.with_eigenvalues(powers(s, exponent, cutoff, squared, known))

    def with_scalings(self, s: Tensor) -> Piece:
        """The same Kronecker factors, with other second moments of gradients in their eigenbasis."""
        return self._with(s, self.s_B, self.s_A, self.factored)

    def _with(self, s: Tensor, s_B: Tensor, s_A: Tensor, factored: bool) -> Piece:
        return EigenPiece(
            self.names, self.U_B, self.U_A, s.reshape(self.s.shape), s_B, s_A, self.layout, factored=factored
        )

    def damped(self, damping: float, mode: str) -> Tensor:
        """Exact: s + damping. Factored: s + (s_B + r)(s_A + r) - s_B s_A with r = sqrt(damping), for deep nets."""
        check_damping(damping)
        s = self.s + damping
        if mode == "factored":
            if not self.factored:
                raise UnsupportedError(
                    f"the metric of {self.names[0]} has no Kronecker factors to damp: it is a power, an inverse, a "
                    "negative multiple, or a sum of metrics whose factors differ; use mode='exact'"
                )
            s = s + sqrt(damping) * (self.s_B[:, None, :, None] + self.s_A[:, None, None, :])
        return self.invertible(s.flatten())

    def downdate(self, M: Tensor) -> Piece:  # noqa: D102
        means = self.to_eigenbasis(M).square().sum(1)
        return self.with_scalings((self.eigenvalues() - means).clamp_min(0.0))

    def scale(self, c: float) -> Piece:  # noqa: D102
        root = sqrt(abs(c))  # shared by the factors, whose eigenvalues the factored damping is made of
        return self._with(c * self.s, root * self.s_B, root * self.s_A, self.factored and c >= 0)

    def _same_basis(self, other: EigenPiece) -> bool:
        if self.layout != other.layout:
            return False
        pairs = [(self.U_B, other.U_B), (self.U_A, other.U_A)]
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

    def add(self, other: Piece) -> Piece | None:
        """B (x) A + (q B) (x) (q A) has the factors (1 + q^2)^(1/2) B and A; other sums are no Kronecker product."""
        if not isinstance(other, EigenPiece) or not self._same_basis(other):
            return None
        mine, theirs = (torch.cat([E.s_B.flatten(), E.s_A.flatten()]) for E in (self, other))
        m, t = mine.max(), theirs.max()
        multiple = bool((t * mine - m * theirs).abs().max() <= 64 * torch.finfo(m.dtype).eps * m * t)
        if not (multiple and self.factored and other.factored):
            return self.with_eigenvalues(self.s + other.s)
        s_B, s_A = torch.hypot(self.s_B, other.s_B), torch.hypot(self.s_A, other.s_A)
        return self._with(self.s + other.s, s_B, s_A, True)

    def product(self, other: Piece) -> Piece | None:
        """(B (x) A)(B' (x) A') = B B' (x) A A'."""
        if not isinstance(other, EigenPiece) or not self._same_basis(other):
            return None
        factored = self.factored and other.factored
        return self._with(self.s * other.s, self.s_B * other.s_B, self.s_A * other.s_A, factored)

    def arrays(self) -> dict[str, Tensor]:  # noqa: D102
        out = {"U_B": self.U_B, "s": self.s, "s_B": self.s_B, "s_A": self.s_A}
        return out if self.U_A is None else out | {"U_A": self.U_A}

    def header(self) -> dict[str, Any]:  # noqa: D102
        return {"layout": asdict(self.layout), "factored": self.factored}

    @classmethod
    def load(cls, names: tuple[str, ...], arrays: dict[str, Tensor], header: dict[str, Any]) -> Piece:  # noqa: D102
        a, layout = arrays, Homogeneous(**header["layout"])
        factored = header.get("factored", True)  # older files do not say
        return cls(names, a["U_B"], a.get("U_A"), a["s"], a["s_B"], a["s_A"], layout, factored)


def decompose(pieces: Sequence[KroneckerPiece]) -> None:
    """Fill in `eigen` of several pieces; factors of the same size go to the solver together, which a GPU is glad of."""
    if not pieces:  # a step of an optimiser between two refreshes
        return
    parts = [(piece, "B") for piece in pieces] + [(piece, "A") for piece in pieces if piece.full]
    groups: dict[tuple[object, ...], list[tuple[KroneckerPiece, str]]] = {}
    for piece, side in parts:
        S: Tensor = getattr(piece, side)
        alone = (id(piece), side) if S.device.type == "cpu" else ()  # there, only the copies would cost
        groups.setdefault((S.shape[-1], S.dtype, S.device, alone), []).append((piece, side))
    found: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    stacks = [[getattr(piece, side) for piece, side in members] for members in groups.values()]
    joined = [torch.cat(stack) if len(stack) > 1 else stack[0] for stack in stacks]
    for members, (values, U) in zip(groups.values(), eigh_of(joined)):
        sizes = [len(getattr(piece, side)) for piece, side in members]
        for (piece, side), s, u in zip(members, torch.split(values, sizes), torch.split(U, sizes)):
            found[id(piece), side] = s, u
    for piece in pieces:
        a = found[id(piece), "A"] if piece.full else (piece.A, None)
        piece.__dict__["eigen"] = piece.in_basis(*found[id(piece), "B"], *a)  # where cached_property keeps it
