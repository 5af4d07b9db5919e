"""Vectors in parts: every process of a group holds some of the entries, and what is a number is a sum over all of them.

An operator with a `spread` takes and gives such parts. Its shape is that of the whole matrix; `rows` entries are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from biascope.support.processes import Processes

if TYPE_CHECKING:
    from biascope.linalg.operator import LinearOperator

AT_ONCE = 2**31 - 1  # entries of a basis in one product: BLAS counts in 32 bits, and reads astray on a GPU


@dataclass(frozen=True)
class Spread:
    """Who takes part, how many entries are here, and the way to and from whole vectors [n, k]."""

    team: Processes
    rows: int
    own: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor]


def rows_of(A: LinearOperator) -> int:
    """Entries of a vector of A on this process."""
    return A.shape[1] if A.spread is None else A.spread.rows


def own(A: LinearOperator, X: Tensor) -> Tensor:
    """This process's entries of whole vectors."""
    return X if A.spread is None else A.spread.own(X).contiguous()


def join(A: LinearOperator, X: Tensor) -> Tensor:
    """Whole vectors."""
    return X if A.spread is None else A.spread.join(X)


def total(A: LinearOperator, t: Tensor) -> Tensor:
    """Sum over the processes that hold A's vectors."""
    return t if A.spread is None else A.spread.team.sum(t)


def coordinates(A: LinearOperator, V: Tensor, w: Tensor) -> Tensor:
    """Dot products [m] of the rows of a basis V [m, rows] with a vector w [rows]."""
    if V.numel() <= AT_ONCE:
        return total(A, V @ w)
    return total(A, torch.stack([V[:, s].contiguous() @ w[s] for s in _columns(V)]).sum(0))


def combined(H: Tensor, V: Tensor) -> Tensor:
    """H V, vectors [rows] or [k, rows], for H [m] or [k, m] and a basis V [m, rows]."""
    return H @ V if V.numel() <= AT_ONCE else torch.cat([H @ V[:, s].contiguous() for s in _columns(V)], -1)


def _columns(V: Tensor) -> list[slice]:
    m, n = V.shape
    step = max(1, AT_ONCE // (2 * m))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def norms(A: LinearOperator, X: Tensor) -> Tensor:
    """Norms [k] of the columns of X [rows, k], or of a vector."""
    if A.spread is None:
        here: Tensor = torch.linalg.vector_norm(X, dim=0)
        return here
    squares = total(A, X.double().square().sum(0))
    return squares.sqrt().to(X.dtype)


def dots(A: LinearOperator, X: Tensor, Y: Tensor) -> Tensor:
    """Dot products [k] of the columns of X and Y, added in float64."""
    return total(A, (X * Y).sum(0, dtype=torch.float64))


def fix_signs(A: LinearOperator, X: Tensor) -> Tensor:
    """Flip columns so that each one's entry of largest magnitude is positive, wherever it is held."""
    if not X.shape[1]:
        return X.clone()
    peak = X.new_zeros(1, X.shape[1])
    if len(X):
        peak = X.gather(0, X.abs().argmax(0, keepdim=True))
    if A.spread is not None:
        every = A.spread.team.concatenate(peak)
        peak = every.gather(0, every.abs().argmax(0, keepdim=True))
    return X * torch.where(peak < 0, -1.0, 1.0).to(X.dtype)
