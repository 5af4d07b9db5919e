"""Orthogonal bases that are not Fourier: random ones, and the completion of a partial one."""

from typing import Annotated

import torch
from torch import Tensor

from biascope.data.dataset import Seed, generator
from biascope.support.errors import InputError
from biascope.support.limits import Count, FloatDtype, shaped
from biascope.support.signatures import checked


@checked
def random_orthogonal(dim: Count, *, seed: Seed = 0, dtype: FloatDtype = torch.float64) -> Tensor:
    """A uniformly random rotation U in SO(dim), [dim, dim]; its columns (or rows) are a random basis.

    QR of a Gaussian matrix with the signs of diag(R) moved into Q, which makes Q Haar distributed; one column is
    flipped if det = -1.

    Example:
        >>> u = random_orthogonal(5, seed=0)
        >>> bool(torch.allclose(u @ u.T, torch.eye(5, dtype=u.dtype))), round(float(torch.det(u)))
        (True, 1)
    """
    gaussian = torch.randn(dim, dim, generator=generator(seed), dtype=torch.float64)
    q: Tensor
    q, r = torch.linalg.qr(gaussian)
    q = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    if torch.linalg.slogdet(q).sign < 0:
        q[:, -1] = -q[:, -1]
    return q.to(dtype)


@checked
def complete_basis(rows: Annotated[Tensor, shaped(2, floating=True)]) -> Tensor:
    """Orthonormal rows [k, D] completed to a full basis [D, D]; the given rows come first, unchanged.

    The sign of an added vector is fixed by making its largest entry positive.
    """
    check_orthonormal(rows, "the rows")
    k, dim = rows.shape
    if k == dim:
        return rows
    q = torch.linalg.qr(rows.double().T, mode="complete").Q[:, k:].T
    largest = q.gather(1, q.abs().argmax(1, keepdim=True))
    q = q * torch.where(largest < 0, -1.0, 1.0) + 0.0  # + 0.0 turns -0 into 0
    return torch.cat([rows, q.to(rows.dtype)])


def check_orthonormal(rows: Tensor, what: str, tol: float = 1e-3) -> None:
    """Refuse rows [k, D] that are not orthonormal."""
    wide = rows.double()
    gram = wide @ wide.T - torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    error = float(gram.abs().max()) if len(wide) else 0.0
    if not error <= tol:
        raise InputError(f"{what} are not orthonormal (largest error of their Gram matrix {error:.3g} > {tol})")
