"""A metric made of pieces, one per layer (or a single one for everything): all explicit representations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from biascope.curvature.finite import finite
from biascope.curvature.lowrank import LowRankPiece
from biascope.curvature.metric import Metric, Vector
from biascope.curvature.pieces import Piece
from biascope.curvature.plan import Plan
from biascope.curvature.space import ParameterSpace
from biascope.errors import InputError, UnsupportedError
from biascope.linalg import Eigenpairs
from biascope.linalg.operator import LinearOperator, check_chunk
from biascope.signatures import checked

MODES = ("exact", "factored")


class BlockMetric(Metric):
    """Block diagonal over pieces; every operation is done piece by piece.

    Example:
        >>> import biascope as bs
        >>> net = torch.nn.Linear(3, 2)
        >>> F = bs.fisher(net, torch.randn(5, 3), representation="kfac")
        >>> F.trace().shape, F.solve(torch.ones(8), damping=0.1).shape
        (torch.Size([]), torch.Size([8]))
    """

    def __init__(
        self,
        space: ParameterSpace,
        pieces: list[Piece],
        plan: Plan,
        info: dict[str, Any],
        ask: Callable[[list[Tensor]], list[bool]] = finite,  # which of the pieces' tensors hold numbers only
    ) -> None:
        super().__init__(space, plan, info, symmetric=all(piece.symmetric for piece in pieces))
        self.pieces = pieces
        arrays = [(piece, name, t) for piece in pieces for name, t in piece.arrays().items()]
        good = ask([t for _, _, t in arrays])
        if not all(good):
            piece, name, _ = arrays[good.index(False)]
            raise InputError(f"the metric of {piece.names[0]} has NaN or infinity ({name}): gradients overflowed")

    def _each(self, X: Tensor, do: Callable[[Piece, Tensor], Tensor]) -> Tensor:
        """Apply `do` to every piece's share of X [p, k]."""
        out = torch.empty_like(X)
        for piece in self.pieces:
            self.space.put(piece.names, do(piece, self.space.take(piece.names, X)), out)
        return out

    def _matmat(self, X: Tensor) -> Tensor:
        return self._each(X, lambda piece, part: piece.matmat(part))

    def _rmatmat(self, Y: Tensor) -> Tensor:
        if self.symmetric:
            return self._matmat(Y)
        raise UnsupportedError("a product of two metrics has no adjoint here; multiply in the other order")

    @checked
    def diagonal(self, chunk: int = 256) -> Tensor:
        """[p]."""
        out = torch.empty(self.shape[0], 1, dtype=self.dtype, device=self.device)
        for piece in self.pieces:
            self.space.put(piece.names, piece.diagonal()[:, None], out)
        return out[:, 0]

    def trace(self) -> Tensor:
        """Sum of the pieces' traces."""
        return torch.stack([piece.trace() for piece in self.pieces]).sum()

    def frobenius_norm(self) -> Tensor:
        """Root of the sum of the pieces' squared norms."""
        return torch.stack([piece.frobenius_squared() for piece in self.pieces]).sum().sqrt()

    @property
    def _zero(self) -> Tensor:
        """An eigenvalue that a metric of low rank has but does not hold."""
        return torch.zeros(1, dtype=self.dtype, device=self.device)

    def spectral_norm(self) -> Tensor:
        """Largest |eigenvalue|."""
        try:
            return torch.cat([piece.eigenvalues().abs() for piece in self.pieces] + [self._zero]).max()
        except UnsupportedError:
            return super().spectral_norm()

    @checked
    def to_dense(self, chunk: int = 256) -> Tensor:
        """[p, p], in the flat parameter order; the pieces are put in as they are, whatever the chunk."""
        check_chunk(chunk)
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        index = torch.arange(self.shape[0], device=self.device)
        for piece in self.pieces:
            mine = self.space.take(piece.names, index)
            out[mine[:, None], mine] = piece.to_dense()
        return out

    # inverses ---------------------------------------------------------------------------------------------------

    def _check_mode(self, mode: str) -> None:
        if mode not in MODES:
            raise InputError(f"mode={mode!r}: exact or factored")
        if mode == "factored" and not any(piece.kind in {"kfac", "ekfac"} for piece in self.pieces):
            raise UnsupportedError(
                f"factored damping is not defined for representation={self.representation!r}: kfac and ekfac have it"
            )

    @checked
    def solve(self, v: Vector, damping: float = 0.0, mode: str = "exact", complement: str = "keep") -> Any:
        """(F + damping I)^-1 v, in v's form.

        mode "factored": KFAC damps its factors, (A + pi sqrt(damping) I) (x) (B + sqrt(damping) / pi I), EKFAC uses
        the deep-net damping made of the factors' eigenvalues; other pieces are damped exactly.
        complement "drop" (lowrank only): solve in the span of the rows instead of all of the space.
        """
        self._check_mode(mode)
        X, back = self._columns(v, "solve")
        if complement != "keep":
            piece = self.pieces[0]
            if not isinstance(piece, LowRankPiece):
                raise UnsupportedError("complement is a choice of representation='lowrank' only")
            return back(piece.solve(X, damping, mode, complement))
        return back(self._each(X, lambda piece, part: piece.solve(part, damping, mode)))

    @checked
    def inverse(self, damping: float = 0.0, mode: str = "exact") -> LinearOperator:
        """(F + damping I)^-1 as a metric; lazily for quasidiagonal and lowrank pieces, whose inverses are full."""
        self._check_mode(mode)
        pieces = [piece.inverse(damping, mode) for piece in self.pieces]
        if any(piece is None for piece in pieces):
            return super().inverse(damping, mode)
        return self._like([p for p in pieces if p is not None], f"inverse {self.info.get('what', 'metric')}")

    @checked
    def power(self, exponent: float, cutoff: float = 0.0) -> BlockMetric:
        """F^e, piece by piece."""
        return self._like([piece.power(exponent, cutoff) for piece in self.pieces], f"power {exponent:g}")

    @checked
    def sample(
        self, n: int, damping: float = 0.0, generator: torch.Generator | None = None, mode: str = "exact"
    ) -> Tensor:
        """n draws of N(0, (F + damping I)^-1), [n, p]; the generator is one of the CPU (seed 0 if None)."""
        self._check_mode(mode)
        if n < 1:
            raise InputError(f"sample needs n >= 1, not {n}")
        generator = generator if generator is not None else torch.Generator().manual_seed(0)
        Z = torch.randn(self.shape[0], n, generator=generator, dtype=torch.float64, device="cpu").to(
            self.device, self.dtype
        )
        return self._each(Z, lambda piece, part: piece.sample(part, damping, mode)).T

    # the spectrum -----------------------------------------------------------------------------------------------

    def eigenvalues(self) -> Tensor:
        """All eigenvalues the representation holds, descending."""
        return torch.cat([piece.eigenvalues() for piece in self.pieces]).sort(descending=True).values

    @checked
    def eigh(self, k: int | None = None) -> Eigenpairs:
        """The k largest eigenpairs (all if None), by pieces; low rank gives its non-zero ones by duality."""
        values = torch.cat([piece.eigenvalues() for piece in self.pieces])
        k = len(values) if k is None else k
        if not 1 <= k <= len(values):
            raise InputError(f"k={k}: this representation holds {len(values)} eigenpairs")
        values, index = values.sort(descending=True)
        hot = torch.zeros(len(values), k, dtype=self.dtype, device=self.device)
        hot[index[:k], torch.arange(k, device=self.device)] = 1.0
        vectors = self.from_eigenbasis(hot)
        residuals = (self._matmat(vectors) - vectors * values[:k]).norm(dim=0)
        done = torch.ones(k, dtype=torch.bool, device=self.device)
        return Eigenpairs(values[:k], vectors, residuals, done, 0, k)

    @checked
    def to_eigenbasis(self, v: Tensor) -> Tensor:
        """Coordinates of v [p] or [p, k] in the eigenbasis, piece after piece."""
        X, back = self._columns(v, "to_eigenbasis")
        parts = [piece.to_eigenbasis(self.space.take(piece.names, X)) for piece in self.pieces]
        out: Tensor = back(torch.cat(parts))
        return out

    @checked
    def from_eigenbasis(self, v: Tensor) -> Tensor:
        """Back from coordinates to [p] or [p, k]."""
        sizes = [len(piece.eigenvalues()) for piece in self.pieces]
        if v.dim() not in (1, 2) or v.shape[0] != sum(sizes):
            raise InputError(f"coordinates must be [{sum(sizes)}] or [{sum(sizes)}, k], got {list(v.shape)}")
        X = v.reshape(len(v), -1)
        out = torch.empty(self.shape[0], X.shape[1], dtype=self.dtype, device=self.device)
        for piece, part in zip(self.pieces, torch.split(X, sizes)):
            self.space.put(piece.names, piece.from_eigenbasis(part), out)
        return out[:, 0] if v.dim() == 1 else out

    # algebra ----------------------------------------------------------------------------------------------------

    def _like(self, pieces: list[Piece], what: str) -> BlockMetric:
        return BlockMetric(self.space, pieces, self.plan, {**self.info, "what": what})

    def _pairwise(self, other: Any, do: Callable[[Piece, Piece], Piece | None]) -> list[Piece] | None:
        """Pieces of a binary operation, or None where a pair does not fit."""
        if not isinstance(other, BlockMetric) or other.space.shapes != self.space.shapes:
            return None
        theirs = {piece.names: piece for piece in other.pieces}
        if set(theirs) != {piece.names for piece in self.pieces}:
            return None
        out = [do(piece, theirs[piece.names]) for piece in self.pieces]
        return None if any(piece is None for piece in out) else [piece for piece in out if piece is not None]

    def __add__(self, other: LinearOperator) -> LinearOperator:
        """F + G: a metric where the representation is closed under sums, else a lazy operator."""
        pieces = self._pairwise(other, lambda a, b: a.add(b))
        return super().__add__(other) if pieces is None else self._like(pieces, "sum")

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return self + (-1.0 * other) if isinstance(other, BlockMetric) else super().__sub__(other)

    def __mul__(self, scalar: float) -> LinearOperator:
        lazy = super().__mul__(scalar)  # checks the number
        pieces = [piece.scale(float(scalar)) for piece in self.pieces]
        if any(piece is None for piece in pieces):
            return lazy
        return self._like([p for p in pieces if p is not None], str(self.info.get("what", "metric")))

    def __matmul__(self, v: Any) -> Any:
        """F @ v, or the product of two metrics: a metric where the representation is closed, else lazy."""
        pieces = self._pairwise(v, lambda a, b: a.product(b)) if isinstance(v, BlockMetric) else None
        return super().__matmul__(v) if pieces is None else self._like(pieces, "product")

    # files ------------------------------------------------------------------------------------------------------

    @checked
    def save(self, path: str | Path) -> Path:
        """Write to one safetensors file."""
        from biascope.curvature.files import save_metric

        return save_metric(self, Path(path))
