"""KFAC and EKFAC pieces: Kronecker products and diagonals in a Kronecker eigenbasis, a pair per group.

Inside, a layer's parameters are the homogeneous matrix V = [W | b] [o, i + 1], one per group g; under SUA the e kernel
offsets of a convolution stay apart. All arrays are [g, e, o, i]-shaped in that order. (B (x) A) vec(V) = vec(B V A).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.curvature.pieces import Mode, Piece, matrix_rounding, powers
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import finite

Sharing = Literal["expand", "reduce"]  # how KFAC treats several positions of a layer
THREADS, ROOM = 8, 2**31  # eigendecompositions at a time on a GPU, and bytes for all of them
JACOBI = 512  # up to here torch's solver in float32 is slower on a GPU than that in float64, which does no rotations


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
    def columns(self) -> int:
        """Columns of V, with the bias's."""
        return self.d_in + self.bias

    @property
    def cost(self) -> float:
        """Work of decomposing the factors."""
        return float(self.groups * (self.d_out**3 + self.columns**3))

    def pack(self, X: Tensor) -> Tensor:
        """[p, k] to V [k, g, e, o, i]."""
        g, o, i, e = self.groups, self.d_out, self.d_in, self.offsets
        W = X[: g * o * i * e].T
        V = W.reshape(-1, g, i, o).mT[:, :, None] if self.input_major else W.reshape(-1, g, o, i, e).movedim(-1, 2)
        if not self.bias:
            return V
        return torch.cat([V, X[g * o * i :].T.reshape(-1, g, 1, o, 1)], -1)

    def split(self, V: Tensor) -> list[Tensor]:
        """The weight, as it is stored, and the bias, of matrices [..., o, i e] whose last column is the bias."""
        W = V[..., :-1] if self.bias else V
        return [W.mT if self.input_major else W, *([V[..., -1]] if self.bias else [])]

    def unpack(self, V: Tensor) -> Tensor:
        """V [k, g, e, o, i] to [p, k]."""
        W = V[..., : self.d_in]
        flat = (W[:, :, 0].mT if self.input_major else W.movedim(2, -1)).flatten(1)
        return (torch.cat([flat, V[..., self.d_in].flatten(1)], 1) if self.bias else flat).T


class MatrixPiece(Piece):
    """A piece whose parameters are the matrices V of a layout."""

    layout: Homogeneous

    def cost(self) -> float:  # noqa: D102
        return self.layout.cost

    def header(self) -> dict[str, Any]:  # noqa: D102
        return super().header() | {"layout": asdict(self.layout)}

    @classmethod
    def load(cls, names: tuple[str, ...], arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Piece:  # noqa: D102
        return super().load(names, arrays, {**header, "layout": Homogeneous(**header["layout"])})


@dataclass(eq=False)
class KroneckerPiece(MatrixPiece):
    """B (x) A per group: B [g, o, o]; A [g, i, i], or [g, i] where it is diagonal (embeddings)."""

    B: Tensor
    A: Tensor
    layout: Homogeneous
    symmetric: bool = True
    kind = "kfac"

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
        return decompose([self])[0]

    def damped_factors(self, damping: float) -> tuple[Tensor, Tensor]:
        """Eigenvalues [g, o] of B + sqrt(damping) / pi I and [g, i] of A + pi sqrt(damping) I; none may vanish.

        pi^2 = (tr A / d_in) / (tr B / d_out), per group. Damping the eigenvalues adds no rounding; a product of two may
        be tiny, it is divided exactly.
        """
        a = (self.A.diagonal(dim1=-2, dim2=-1) if self.full else self.A).mean(-1)
        b = self.B.diagonal(dim1=-2, dim2=-1).mean(-1)
        pi = torch.where((a > 0) & (b > 0), (a / b).clamp_min(torch.finfo(a.dtype).tiny).sqrt(), 1.0)
        root = sqrt(damping)
        s_B, s_A = self.eigen.s_B + (root / pi)[:, None], self.eigen.s_A + (root * pi)[:, None]
        for s, which, exact in ((s_B, "output", False), (s_A, "input", not self.full)):
            own = 0 if exact else 1 if damping > 0 else s.shape[-1]  # undamped ones are as uncertain as their matrix
            floor = matrix_rounding(own, s.dtype) * s.amax(-1, keepdim=True)
            if not bool((s > floor).all()):
                raise InputError(f"the {which} factor of {self.names[0]} is singular; give damping > {damping:g}")
        return s_B, s_A

    def damped(self, damping: float, mode: Mode) -> Tensor:  # noqa: D102
        return (
            super().damped(damping, mode) if mode == "exact" else self._outer(*self.damped_factors(damping)).flatten()
        )

    def solve(self, X: Tensor, damping: float, mode: Mode) -> Tensor:  # noqa: D102
        if mode == "exact":
            return super().solve(X, damping, mode)
        b, a = self.damped_factors(damping)  # one after the other: their product may be too small for a float32
        V = self.eigen.rotate(self.layout.pack(X)) / b[:, None, :, None] / a[:, None, None, :]
        return self.layout.unpack(self.eigen.rotate(V, back=True))

    def inverse(self, damping: float, mode: Mode) -> Piece | None:  # noqa: D102
        if mode == "exact":
            return super().inverse(damping, mode)
        b, a = self.damped_factors(damping)
        return self._with_factors(1 / b, 1 / a)

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
        return replace(self, B=(root if c >= 0 else -root) * self.B, A=root * self.A)

    def product(self, other: Piece) -> Piece | None:  # noqa: D102
        if not isinstance(other, KroneckerPiece) or self.full != other.full or self.layout != other.layout:
            return None
        A = self.A @ other.A if self.full else self.A * other.A
        return KroneckerPiece(self.names, self.B @ other.B, A, self.layout, symmetric=False)


@dataclass(eq=False)
class EigenPiece(MatrixPiece):
    """diag(s) in the basis U_B (x) U_A (U_A None: the identity); s [g, e, o, i].

    s_B, s_A are the Kronecker factors' eigenvalues the basis came with: the factored damping of deep nets uses them. A
    power, an inverse and most sums have no such factors (`factored` is False, s_B = s_A = 1).
    """

    U_B: Tensor
    U_A: Tensor | None
    s: Tensor
    s_B: Tensor
    s_A: Tensor
    layout: Homogeneous
    factored: bool = True
    kind = "ekfac"

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
        s_B, s_A = torch.ones_like(self.s_B), torch.ones_like(self.s_A)
        return replace(self, s=s.reshape(self.s.shape), s_B=s_B, s_A=s_A, factored=False)

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

    def damped(self, damping: float, mode: Mode) -> Tensor:
        """Exact: s + damping. Factored: s + (s_B + r)(s_A + r) - s_B s_A with r = sqrt(damping), for deep nets."""
        s = self.s + damping
        if mode == "factored":
            if not self.factored:
                raise UnsupportedError(f"the metric of {self.names[0]} has no Kronecker factors: use mode='exact'")
            s = s + sqrt(damping) * (self.s_B[:, None, :, None] + self.s_A[:, None, None, :])
        s = s.flatten()
        noise = (self.s_B.shape[-1] + self.s_A.shape[-1]) * torch.finfo(s.dtype).eps ** 2  # of means of squares
        return s if damping > 0 and bool((s > 10 * noise * s.max()).all()) else self.invertible(s)

    def downdate(self, M: Tensor) -> Piece:  # noqa: D102
        means = self.to_eigenbasis(M).square().sum(1)
        return replace(self, s=(self.s - means.reshape(self.s.shape)).clamp_min(0.0))

    def scale(self, c: float) -> Piece:  # noqa: D102
        root = sqrt(abs(c))  # shared by the factors, whose eigenvalues the factored damping is made of
        factored = self.factored and c >= 0
        return replace(self, s=c * self.s, s_B=root * self.s_B, s_A=root * self.s_A, factored=factored)

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
        return replace(self, s=self.s + other.s, s_B=s_B, s_A=s_A)

    def product(self, other: Piece) -> Piece | None:
        """(B (x) A)(B' (x) A') = B B' (x) A A'."""
        if not isinstance(other, EigenPiece) or not self._same_basis(other):
            return None
        s, s_B, s_A = self.s * other.s, self.s_B * other.s_B, self.s_A * other.s_A
        return replace(self, s=s, s_B=s_B, s_A=s_A, factored=self.factored and other.factored)


def decompose(pieces: Sequence[KroneckerPiece]) -> list[EigenPiece]:
    """Several pieces in their eigenbases, which they keep; on a GPU factors of one size go to the solver together."""
    groups: dict[tuple[object, ...], list[tuple[KroneckerPiece, str, Tensor]]] = {}
    for piece in pieces:
        for side, S in [("B", piece.B), ("A", piece.A)] if piece.full else [("B", piece.B)]:
            alone = (id(piece), side) if S.device.type == "cpu" else ()  # there, only the copies would cost
            groups.setdefault((S.shape[-1], S.dtype, S.device, alone), []).append((piece, side, S))
    found: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    stacks = [[S for _, _, S in members] for members in groups.values()]
    joined = [torch.cat(stack) if len(stack) > 1 else stack[0] for stack in stacks]
    for members, (values, U) in zip(groups.values(), eigh_of(joined)):
        sizes = [len(S) for _, _, S in members]
        for (piece, side, _), s, u in zip(members, torch.split(values, sizes), torch.split(U, sizes)):
            found[id(piece), side] = s, u
    for piece in pieces:
        (s_B, U_B), (s_A, U_A) = found[id(piece), "B"], found.get((id(piece), "A"), (piece.A, None))
        eigen = EigenPiece(piece.names, U_B, U_A, piece._outer(s_B, s_A), s_B, s_A, piece.layout)
        piece.__dict__["eigen"] = eigen  # where cached_property keeps it
    return [piece.eigen for piece in pieces]


# eigendecompositions, checked: solvers in single precision may fail without saying so ---------------------------


def eigh_of(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues [g, d] descending, clipped at 0, and vectors [g, d, d] of every S [g, d, d].

    All are checked before a GPU is asked for an answer. In the precision of S, whose own rounding is no smaller than
    the solver's; again in float64 where the solver did not converge or its answer fails a check.
    """
    if not all(finite(matrices)):
        raise InputError("a Kronecker factor holds NaN or infinity: the outputs or gradients overflowed")
    found = _side_by_side(matrices) if matrices[0].is_cuda and len(matrices) > 1 else [_eigh(S) for S in matrices]
    certain = torch.zeros((), dtype=torch.float64, device=matrices[0].device)
    doubts = [
        certain if pair is None or S.dtype == torch.float64 else eigen_error(S, *pair)
        for S, pair in zip(matrices, found)
    ]
    errors = torch.stack(doubts).tolist()
    out = []
    for S, pair, error in zip(matrices, found, errors):
        values, U = pair if pair is not None and error < 1 else torch.linalg.eigh(S.double())
        values, U = values.flip(-1).clamp_min(0.0), U.flip(-1)
        peak = U.gather(1, U.abs().argmax(1, keepdim=True))  # each vector's largest entry shall be positive
        U = (U * peak.sign()).contiguous()  # as it comes back from a file
        out.append((values.to(S.dtype), U.to(S.dtype)))
    return out


def _eigh(S: Tensor) -> tuple[Tensor, Tensor] | None:
    """Ascending eigenvalues and vectors of S [g, d, d]; None where the solver did not converge."""
    double = S.is_cuda and S.shape[-1] <= JACOBI
    try:
        values, U = torch.linalg.eigh(S.double() if double else S)  # reads one triangle
    except RuntimeError:  # the solver did not converge in single precision
        return None
    return values.to(S.dtype), U.to(S.dtype)


def _side_by_side(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor] | None]:
    """Every matrix by a thread and on a stream of its own: one eigendecomposition leaves most of a GPU idle."""
    device = matrices[0].device
    here = torch.cuda.current_stream(device)

    def work(S: Tensor) -> tuple[Tensor, Tensor] | None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            pair = _eigh(S)
        stream.synchronize()
        for tensor in pair or ():
            tensor.record_stream(here)  # made on one stream, used on another
        return pair

    single = [(j, S[i : i + 1]) for j, S in enumerate(matrices) for i in range(len(S))]
    largest_first = sorted(single, key=lambda item: -item[1].shape[-1])
    each = 4 * 8 * largest_first[0][1].numel()  # the matrix, its vectors and the solver's own two, in float64 at worst
    with ThreadPoolExecutor(max(1, min(THREADS, ROOM // each))) as pool:
        pending = [(j, pool.submit(work, S)) for j, S in largest_first]
        found = [[done.result() for i, done in pending if i == j] for j in range(len(matrices))]
    return [_joined([pair for pair in pairs if pair is not None], len(pairs)) for pairs in found]


def _joined(pairs: list[tuple[Tensor, Tensor]], wanted: int) -> tuple[Tensor, Tensor] | None:
    if len(pairs) < wanted:
        return None
    return torch.cat([values for values, _ in pairs]), torch.cat([U for _, U in pairs])


def eigen_error(S: Tensor, values: Tensor, U: Tensor) -> Tensor:
    """How far S U = U diag(values) and U^T U = 1 [g, d, d] fail, in units of what rounding allows: a number.

    Asked of two random vectors: d^2 work beside d^3. NaN if the answer has one.
    """
    g, d = values.shape
    z = _random_vectors(d, S.dtype, S.device).expand(g, d, 2)
    Uz = U @ z
    turned = torch.baddbmm(z, U.mT, Uz, beta=-1)
    residual = torch.baddbmm(U @ (values[..., None] * z), S, Uz, beta=-1)
    errors = torch.stack([turned, residual]).abs().amax((-2, -1))
    errors[1] /= values.abs().amax(-1).clamp_min(torch.finfo(S.dtype).tiny)
    return errors.max().double() / (30 * sqrt(d) * torch.finfo(S.dtype).eps)


@lru_cache(maxsize=64)
def _random_vectors(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    z = torch.randn(d, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    unit: Tensor = z / z.norm(dim=0)
    return unit.to(device, dtype)
