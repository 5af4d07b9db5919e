"""Which of the leading eigenpairs are really found: judged against their own eigenvalue, not the largest.

Lanczos, and rounding in any solver, leave errors of a fixed share of the LARGEST eigenvalue. Against that, any vector
passes for an eigenvector of a small enough eigenvalue, with any value of that size.
"""

import warnings

import torch
from torch import Tensor

from biascope.linalg.lanczos import Eigenpairs

RESOLVED = 1e-3  # residual up to which a pair counts as found, relative to its own eigenvalue


def resolved(values: Tensor, residuals: Tensor) -> Tensor:
    """Mask [k] of the pairs whose residual is at most 1e-3 of their own eigenvalue (singular value) in size."""
    return residuals <= RESOLVED * values.abs()


def settled(values: Tensor, residuals: Tensor, size: int) -> Tensor:
    """Mask [k] of the pairs that are resolved, or zero up to rounding in float64: no solver knows more about them.

    Values and residuals of a matrix [size, size] that is known in float64, the largest magnitude among them.
    """
    floor = size * torch.finfo(torch.float64).eps * values.abs().max()
    return resolved(values, residuals) | ((values.abs() <= floor) & (residuals <= 10 * floor))


def warn_unresolved(pairs: Eigenpairs, remedy: str, stacklevel: int = 3) -> None:
    """Say which of the leading pairs are certain, where not all are."""
    found = resolved(pairs.values, pairs.residuals)
    if bool(found.all()):
        return
    first = int(found.long().cumprod(0).sum())
    value, residual = float(pairs.values[first]), float(pairs.residuals[first])
    largest = float(pairs.values.abs().max())
    warnings.warn(
        f"only the first {first} of {len(found)} eigenpairs are resolved: number {first} has eigenvalue {value:.3g} "
        f"and residual {residual:.1e}, the largest eigenvalue is {largest:.3g}. The others are zero or not "
        f"found; {remedy}",
        stacklevel=stacklevel,
    )
