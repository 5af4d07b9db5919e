"""Orthogonal bases that are not Fourier: random ones, and the completion of a partial one."""

from __future__ import annotations

import torch
from torch import Tensor

from biascope.arguments import check_tensor
from biascope.data.dataset import Seed, generator
from biascope.errors import InputError
from biascope.signatures import checked


def check_floating(dtype: torch.dtype) -> None:
    """Raise where a dtype would round the entries of unit vectors to zero.

    Example:
        >>> check_floating(torch.int32)
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: dtype=torch.int32 cannot hold unit vectors; use torch.float32 or torch.float64
    """
    if not dtype.is_floating_point:
        raise InputError(f"dtype={dtype} cannot hold unit vectors; use torch.float32 or torch.float64")


@checked
def random_orthogonal(dim: int, *, seed: Seed = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A uniformly random rotation U in SO(dim), [dim, dim]; its columns (or rows) are a random basis.

    QR of a Gaussian matrix with the signs of diag(R) moved into Q, which makes Q Haar distributed; one column is
    flipped if det = -1.

    Example:
        >>> u = random_orthogonal(5, seed=0)
        >>> bool(torch.allclose(u @ u.T, torch.eye(5, dtype=u.dtype))), round(float(torch.det(u)))
        (True, 1)
    """
    if dim < 1:
        raise InputError(f"dim must be >= 1, got {dim}")
    check_floating(dtype)
    gaussian = torch.randn(dim, dim, generator=generator(seed), dtype=torch.float64)
    q: Tensor
    q, r = torch.linalg.qr(gaussian)
    q = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    if torch.linalg.slogdet(q).sign < 0:
        q[:, -1] = -q[:, -1]
    return q.to(dtype)


@checked
def complete_basis(rows: Tensor, tol: float = 1e-3) -> Tensor:
    """Orthonormal rows [k, D] completed to a full basis [D, D]; the given rows come first, unchanged.

    The sign of an added vector is fixed by making its largest entry positive.

    Example:
        >>> complete_basis(torch.eye(3)[:2]).tolist()[2]
        [0.0, 0.0, 1.0]
    """
    check_tensor(rows, "rows", floating=True)  # the added vectors come in its dtype
    if rows.dim() != 2 or len(rows) > rows.shape[1]:
        raise InputError(f"expected orthonormal rows [k, D] with k <= D, got {list(rows.shape)}")
    k, dim = rows.shape
    wide = rows.double()
    error = float((wide @ wide.T - torch.eye(k, dtype=torch.float64)).abs().max()) if k else 0.0
    if not error <= tol:
        raise InputError(f"the rows are not orthonormal (largest error of their Gram matrix {error:.3g} > {tol})")
    if k == dim:
        return rows
    q = torch.linalg.qr(wide.T, mode="complete").Q[:, k:].T
    largest = q.gather(1, q.abs().argmax(1, keepdim=True))
    q = q * torch.where(largest < 0, -1.0, 1.0) + 0.0  # + 0.0 turns -0 into 0
    return torch.cat([rows, q.to(rows.dtype)])
