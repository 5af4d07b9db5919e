"""Which of the leading eigenpairs are really found: judged against their own eigenvalue, not the largest.

Lanczos, and rounding in any solver, leave errors of a fixed share of the LARGEST eigenvalue. Against that, any vector
passes for an eigenvector of a small enough eigenvalue, with any value of that size.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from biascope.linalg.lanczos import Eigenpairs

RESOLVED = 1e-3  # residual up to which a pair counts as found, relative to its own eigenvalue


def resolved(values: Tensor, residuals: Tensor) -> Tensor:
    """Mask [k] of the pairs whose residual is at most 1e-3 of the magnitude of their own eigenvalue (singular value).

    Example:
        >>> import torch
        >>> resolved(torch.tensor([1.0, 1e-6]), torch.tensor([1e-8, 1e-8])).tolist()
        [True, False]
    """
    return residuals <= RESOLVED * values.abs()


def settled(values: Tensor, residuals: Tensor, size: int) -> Tensor:
    """Mask [k] of the pairs that are resolved, or zero up to rounding in float64: no solver there tells more of them.

    Values and residuals of a matrix [size, size] that is known in float64, the largest magnitude among them.

    Example:
        >>> import torch
        >>> settled(torch.tensor([1.0, 1e-9, 0.0]).double(), torch.tensor([0.0, 1e-11, 0.0]).double(), 100).tolist()
        [True, False, True]
    """
    floor = size * torch.finfo(torch.float64).eps * values.abs().max()
    return resolved(values, residuals) | ((values.abs() <= floor) & (residuals <= 10 * floor))


def warn_unresolved(pairs: Eigenpairs, remedy: str, stacklevel: int = 3) -> None:
    """Say which of the leading pairs are certain, where not all are.

    Example:
        >>> import torch
        >>> from biascope.linalg import Diagonal, eigsh
        >>> warn_unresolved(eigsh(Diagonal(torch.arange(9.0)), 2), "ask for fewer")  # both are found: silent
    """
    found = resolved(pairs.values, pairs.residuals)
    if bool(found.all()):
        return
    first = int(found.long().cumprod(0).sum())
    value, residual, largest = (
        float(pairs.values[first]),
        float(pairs.residuals[first]),
        float(pairs.values.abs().max()),
    )
    warnings.warn(
        f"only the first {first} of {len(found)} eigenpairs are resolved: number {first} has eigenvalue {value:.3g} "
        f"and residual {residual:.1e}, the largest eigenvalue is {largest:.3g}. The others are zero or not "
        f"found; {remedy}",
        stacklevel=stacklevel,
    )
