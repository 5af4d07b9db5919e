"""Covariances are differences of second moments, which float32 cannot tell apart where the mean dwarfs the spread.

So their sums are made in float64 of the float32 gradients (a product of two is exact there) and rounded at the end.
What is left is the rounding of the gradients themselves, eps |mean| against a deviation.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from biascope.curvature.passes import Chunk, InputFactors
from biascope.curvature.pieces import ParameterSpace, Piece
from biascope.network.layers.blocks import Factor, MatrixFactor

COPIES = 3  # memory of a chunk with a copy of its factors in float64, in units of its own
BELOW = 100  # a covariance of so many roundings of the second moment is no covariance


def wide(space: ParameterSpace) -> ParameterSpace:
    """The same parameters, in float64."""
    return replace(space, dtype=torch.float64)


def widened(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks with their factors in float64."""
    for chunk in chunks:
        yield replace(chunk, factors={names: _widened(factor) for names, factor in chunk.factors.items()})


def widened_inputs(factors: InputFactors) -> InputFactors:
    """What a forward pass says, in float64."""
    return {names: _matrix(factor) for names, factor in factors.items()}


def _widened(factor: Factor) -> Factor:
    return _matrix(factor) if isinstance(factor, MatrixFactor) else replace(factor, rows=factor.rows.double())


def _matrix(factor: MatrixFactor) -> MatrixFactor:
    inputs = [a.double() if a.is_floating_point() else a for a in factor.inputs]  # an embedding's are tokens
    return replace(factor, inputs=inputs, grads=[g.double() for g in factor.grads])


def centred_pieces(pieces: Sequence[Piece], means: Sequence[Tensor], dtype: torch.dtype) -> list[Piece]:
    """Pieces minus M M^T for the mean gradients M [p, k] of each, in `dtype`; a warning names what is rounding only."""
    out = [piece.downdate(M) for piece, M in zip(pieces, means, strict=True)]
    if not out:  # a process that owns none
        return out
    before, after = (torch.stack([piece.trace().double() for piece in some]) for some in (pieces, out))
    for piece, whole, left in zip(pieces, before.tolist(), after.tolist(), strict=True):
        warn_of_rounding(piece.names[0], whole, left, dtype)
    return [in_precision(piece, dtype) for piece in out]


def warn_of_rounding(name: str, whole: float, left: float, dtype: torch.dtype) -> None:
    """Warn where the trace of a covariance is rounding of that of the second moment, for gradients in `dtype`.

    The sums are known to float64's eps; a deviation from the mean to that of the gradients, its square to their eps^2.
    """
    if whole > 0 and left <= BELOW * max(torch.finfo(torch.float64).eps, torch.finfo(dtype).eps ** 2) * whole:
        warnings.warn(
            f"the covariance of the gradients of {name} (trace {left:.3g}) is below the rounding of their second "
            f"moment ({whole:.3g}): as far as {dtype} tells, the gradients do not differ",
            stacklevel=2,
        )


def in_precision(piece: Piece, dtype: torch.dtype) -> Piece:
    """The same piece with its arrays in `dtype`."""
    arrays = piece.arrays()
    if all(t.dtype == dtype for t in arrays.values()):
        return piece
    return type(piece).load(piece.names, {name: t.to(dtype) for name, t in arrays.items()}, piece.header())
