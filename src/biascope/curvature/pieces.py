"""A parameter space, and the pieces a metric on it is made of: symmetric operators on the parameters of one layer.

A piece works on vectors X [p, k] of its own parameters, in their flat order. Most operations follow from three things:
the eigenvalues, and the way to and from the eigenbasis; a piece that knows better overrides them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from biascope.linalg import psd_eigh
from biascope.linalg.stable import symmetrise
from biascope.network.functional import Functional, Params
from biascope.support.arguments import check_number, check_tensor
from biascope.support.errors import InputError, UnsupportedError

Mode = Literal["exact", "factored"]  # how damping is added


@dataclass(frozen=True)
class ParameterSpace:
    """Ordered parameters; a flat vector [p] is their row-major entries, one parameter after the other."""

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(f: Functional) -> ParameterSpace:
        """The differentiated parameters of a network."""
        return ParameterSpace({k: tuple(p.shape) for k, p in f.params.items()}, f.dtype, f.device)

    @cached_property
    def size(self) -> int:
        """Number of parameters, p."""
        return sum(prod(s) for s in self.shapes.values())

    @cached_property
    def ranges(self) -> dict[str, slice]:
        """Where each parameter lies in a flat vector."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            out[name] = slice(start, start + prod(shape))
            start += prod(shape)
        return out

    def numel(self, names: tuple[str, ...]) -> int:
        """Entries of some parameters."""
        return sum(prod(self.shapes[name]) for name in names)

    def flatten(self, v: Params) -> Tensor:
        """{name: tensor} to [p]; parameters left out count as zero."""
        out = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for name, t in v.items():
            known = self.shapes.get(name, "no such parameter")
            if tuple(check_tensor(t, name).shape) != known or t.device != self.device:
                got = f"{name!r} {tuple(t.shape)} on {t.device}"
                raise InputError(f"{got} does not fit the metric, which has {known} on {self.device}")
            out[self.ranges[name]] = t.detach().reshape(-1).to(self.dtype)
        return out

    def unflatten(self, v: Tensor) -> Params:
        """[p] to {name: tensor}, or [m, p] to {name: [m, *shape]}."""
        if check_tensor(v, "v").shape[-1:] != (self.size,):
            raise InputError(f"a vector [{self.size}] or rows [m, {self.size}] are needed, not shape {list(v.shape)}")
        lead = v.shape[:-1]
        return {name: v[..., self.ranges[name]].reshape((*lead, *shape)) for name, shape in self.shapes.items()}

    def take(self, names: tuple[str, ...], X: Tensor) -> Tensor:
        """Rows of X [p, k] that belong to some parameters, in the order of `names`."""
        parts = [X[self.ranges[name]] for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, names: tuple[str, ...], part: Tensor, X: Tensor) -> None:
        """Write what `take` reads."""
        start = 0
        for name in names:
            r = self.ranges[name]
            X[r] = part[start : start + r.stop - r.start]
            start += r.stop - r.start


@dataclass(eq=False)
class Piece(ABC):
    """A symmetric operator [p, p] on the parameters `names`; tensors among its fields are saved as arrays."""

    names: tuple[str, ...]
    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Piece]]] = {}
    symmetric = True
    invertible_alike = True  # else the inverse is full, and the metric gives a lazy one instead

    def __init_subclass__(cls) -> None:
        if cls.kind:
            Piece.kinds[cls.kind] = cls

    @abstractmethod
    def matmat(self, X: Tensor) -> Tensor:
        """F X for X [p, k]."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """[p]."""

    def trace(self) -> Tensor:
        """A number."""
        return self.diagonal().sum()

    def frobenius_squared(self) -> Tensor:
        """Sum of squared entries."""
        return self.eigenvalues().square().sum()

    def to_dense(self) -> Tensor:
        """[p, p]."""
        like = self.diagonal()
        return self.matmat(torch.eye(len(like), dtype=like.dtype, device=like.device))

    @property
    def eigen(self) -> Piece:
        """The same operator in a form that knows its eigenbasis."""
        raise UnsupportedError(f"a {self.kind} piece has no eigenbasis; use representation='block' or 'dense'")

    def eigenvalues(self) -> Tensor:
        """In the order of the basis, [r] (r = p but for low rank)."""
        return self.eigen.eigenvalues()

    def to_eigenbasis(self, X: Tensor) -> Tensor:
        """Coordinates [r, k] of X [p, k]."""
        return self.eigen.to_eigenbasis(X)

    def from_eigenbasis(self, X: Tensor) -> Tensor:
        """Back from coordinates [r, k] to [p, k]."""
        return self.eigen.from_eigenbasis(X)

    def with_eigenvalues(self, s: Tensor) -> Piece:
        """The same eigenbasis with other eigenvalues."""
        return self.eigen.with_eigenvalues(s)

    def damped(self, damping: float, mode: Mode) -> Tensor:
        """Eigenvalues plus damping, refused where they vanish."""
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

    def solve(self, X: Tensor, damping: float, mode: Mode) -> Tensor:
        """(F + damping I)^-1 X."""
        return self.from_eigenbasis(self.to_eigenbasis(X) / self.damped(damping, mode)[:, None])

    def inverse(self, damping: float, mode: Mode) -> Piece | None:
        """(F + damping I)^-1 as a piece; None where it is of no such form."""
        return self.with_eigenvalues(1.0 / self.damped(damping, mode)) if self.invertible_alike else None

    def power(self, exponent: float, cutoff: float) -> Piece:
        """F^e; for e < 0 eigenvalues up to `cutoff` times the largest, or up to rounding, are left out."""
        s = self.eigenvalues()
        return self.with_eigenvalues(powers(s, exponent, cutoff, matrix_rounding(len(s), s.dtype)))

    def sample(self, Z: Tensor, damping: float, mode: Mode) -> Tensor:
        """N(0, (F + damping I)^-1) from standard normal Z [p, k]."""
        s = self.damped(damping, mode)
        if bool((s <= 0).any()):
            raise InputError(f"the metric of {self.names[0]} has negative eigenvalues: no Gaussian; give more damping")
        return self.from_eigenbasis(Z / s.sqrt()[:, None])

    def downdate(self, M: Tensor) -> Piece:
        """F - M M^T for M [p, k]: the centred form, given the mean gradients."""
        raise UnsupportedError(f"a {self.kind} piece cannot be centred; use ekfac, diagonal, block or dense")

    def scale(self, c: float) -> Piece | None:
        """C F."""
        return None

    def add(self, other: Piece) -> Piece | None:
        """F + G."""
        return None

    def product(self, other: Piece) -> Piece | None:
        """F G (in general not symmetric)."""
        return None

    def cost(self) -> float:
        """Work of decomposing it, by which pieces are dealt out to processes: d^3 for every matrix."""
        return float(sum(t.numel() * (t.shape[-1] if t.dim() > 1 else 1) for t in self.arrays().values()))

    def arrays(self) -> dict[str, Tensor]:
        """Its tensors, by name."""
        return {f.name: t for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}

    def header(self) -> dict[str, Any]:
        """What is saved beside the arrays."""
        return {f.name: t for f in fields(self)[1:] if not isinstance(t := getattr(self, f.name), Tensor | None)}

    @classmethod
    def load(cls, names: tuple[str, ...], arrays: Mapping[str, Tensor], header: Mapping[str, Any]) -> Piece:
        """Back from `arrays` and `header`."""
        absent = {f.name: None for f in fields(cls)[1:] if f.default is MISSING}
        return cls(names, **{**absent, **arrays, **header})


def matrix_rounding(n: int, dtype: torch.dtype) -> float:
    """What rounding does to an eigenvalue of a matrix [n, n], over the largest: n eps."""
    return n * torch.finfo(dtype).eps


def powers(s: Tensor, exponent: float, cutoff: float, rounding: float, known: Tensor | None = None) -> Tensor:
    """s^e; for e < 0 without what is no larger than max(cutoff, rounding) times the largest.

    Entries that are each known by themselves (a diagonal) have `rounding` 0: then zeros are left out, and numbers too
    small for all their digits. `known`: False where an entry is rounding alone, whatever its size.
    """
    check_number(exponent, "exponent")
    largest = s.abs().max() if len(s) else s.new_zeros(())
    floor = (max(check_number(cutoff, "cutoff"), rounding) * largest).clamp_min(torch.finfo(s.dtype).tiny)
    keep = torch.ones_like(s, dtype=torch.bool)
    if exponent < 0:
        keep = s.abs() > floor if known is None else (s.abs() > floor) & known
    if exponent != int(exponent):
        if bool((s < -floor).any()):
            raise InputError(f"power {exponent} of a matrix with negative eigenvalues")
        s = s.clamp_min(0.0)
    return torch.where(keep, torch.where(keep, s, 1.0) ** exponent, 0.0)


@dataclass(eq=False)
class DiagonalPiece(Piece):
    """diag(d)."""

    d: Tensor
    kind = "diagonal"

    def matmat(self, X: Tensor) -> Tensor:  # noqa: D102
        return self.d[:, None] * X

    def diagonal(self) -> Tensor:  # noqa: D102
        return self.d

    eigenvalues = diagonal

    def to_eigenbasis(self, X: Tensor) -> Tensor:  # noqa: D102
        return X

    from_eigenbasis = to_eigenbasis

    def with_eigenvalues(self, s: Tensor) -> Piece:  # noqa: D102
        return DiagonalPiece(self.names, s)

    def invertible(self, s: Tensor) -> Tensor:
        """A diagonal is divided exactly, however small its entries are."""
        if bool((s == 0).any()):
            raise InputError(f"the metric of {self.names[0]} is singular: it has zeros; give damping > 0")
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


@dataclass(eq=False)
class DensePiece(Piece):
    """A matrix [p, p], weights and biases one after the other."""

    H: Tensor
    symmetric: bool = True
    kind = "dense"

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
        return replace(self, H=c * self.H)

    def add(self, other: Piece) -> Piece | None:  # noqa: D102
        if not isinstance(other, DensePiece):
            return None
        return DensePiece(self.names, self.H + other.H, self.symmetric and other.symmetric)

    def product(self, other: Piece) -> Piece | None:  # noqa: D102
        return DensePiece(self.names, self.H @ other.H, False) if isinstance(other, DensePiece) else None
