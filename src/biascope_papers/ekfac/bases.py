"""Eigenbases and damped inverses of many Kronecker factors at once, from the rows of one batch.

A factor S = Z^T Z [d, d] of n < d rows has the eigenvalues of the small Z Z^T [n, n], and Z^T maps the eigenvectors of
that to those of S. What is left of the space has the eigenvalue 0, and any orthonormal basis of it consists of
eigenvectors: LAPACK's is made of rounding errors, ours is the one that a Householder QR decomposition adds. KFAC does
not depend on it. EKFAC and EKFAC-ra do between two refreshes, when other batches reach out of the span of the old one.

Eigenvectors are found on the cores of the CPU, side by side: torch's solver takes the matrices of a batch on a GPU one
by one, about as long for each. Everything else is products of matrices. All in float64.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import functional as F

NULL = 1e-11  # of the largest eigenvalue; below it Z^T times a vector has lost its direction


def small(Z: Tensor) -> Tensor:
    """The smaller one of Z Z^T and Z^T Z for rows Z [k, n, d]."""
    return Z @ Z.mT if Z.shape[1] < Z.shape[2] else Z.mT @ Z


def eigenbases(rows: Sequence[Tensor], complete: bool) -> list[tuple[Tensor, Tensor]]:
    """Eigenvectors [k, d, .] and eigenvalues [k, .] of Z^T Z for every Z [k, n, d]: d of them, or without `complete`
    only those of the rows' span."""
    pairs = list(zip(rows, eigenvectors([small(Z) for Z in rows])))
    bases = [spanned(Z, *pair) if Z.shape[1] < Z.shape[2] else pair[::-1] for Z, pair in pairs]
    wide = [i for i, Z in enumerate(rows) if complete and Z.shape[1] < Z.shape[2]]
    for i, pair in zip(wide, completed([rows[i] for i in wide], [bases[i] for i in wide]) if wide else ()):
        bases[i] = pair
    return bases


def spanned(Z: Tensor, values: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors of Z^T Z from those of Z Z^T, and their eigenvalues; both 0 where the direction is lost."""
    good = values > NULL * values[:, :1]
    X = Z.mT @ (W * torch.where(good, values, 1.0).rsqrt().mul(good)[:, None])
    return X @ (1.5 * torch.eye(X.shape[2], dtype=X.dtype, device=X.device) - 0.5 * X.mT @ X), values * good


def completed(rows: Sequence[Tensor], thin: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Orthogonal [k, d, d] whose first columns are the eigenvectors X [k, d, n], up to signs; equal n in all.

    Q = I - Y M Y^T with Y = X - E and 1 / M = 1 - X^T E maps the first axes E to X. It is that of a Householder QR:
    signs of the columns of X keep 1 / M away from 0. First are the axes that have most of the rows: a pixel that is
    black throughout the batch remains an axis of its own, as in LAPACK.
    """
    parts = []
    for Z, (X, values) in zip(rows, thin):
        order = Z.square().sum(1).argsort(dim=1, descending=True, stable=True)[:, :, None]
        good = (values > 0).to(X.dtype)
        X = X.gather(1, order.expand_as(X))
        parts.append((X, good, order, values, X[:, : X.shape[2]] * good[:, :, None]))
    signs = torch.split(householder_signs(torch.cat([part[4] for part in parts])), [len(part[0]) for part in parts])
    out = []
    for (X, good, order, values, T), s in zip(parts, signs):
        d, n = X.shape[1:]
        one = torch.eye(d, dtype=X.dtype, device=X.device)
        Y = X * s[:, None] - F.pad(torch.diag_embed(good), (0, 0, 0, d - n))
        Q = one - Y @ torch.linalg.solve_ex(one[:n, :n] - (T * s[:, None]).mT, Y.mT)[0]
        out.append((torch.empty_like(Q).scatter_(1, order.expand_as(Q), Q), F.pad(values, (0, d - n))))
    return out


def householder_signs(T: Tensor) -> Tensor:
    """Signs s [k, n] with which an elimination of T - diag(s) never divides by less than 1 (Ballard et al. 2014)."""
    T = T.clone()
    s = T.new_empty(T.shape[:2])
    for j in range(T.shape[1]):
        s[:, j] = 1.0 - 2.0 * (T[:, j, j] > 0)
        column = T[:, j + 1 :, j] / (T[:, j, j] - s[:, j])[:, None]
        T[:, j + 1 :, j + 1 :].baddbmm_(column[:, :, None], T[:, None, j, j + 1 :], alpha=-1)
    return s


def eigenvectors(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues [k, n], descending and not below 0, and eigenvectors [k, n, n] of every S [k, n, n].

    One with NaN or infinity, of a training that has diverged, counts as the identity.
    """
    threads, sizes = torch.get_num_threads(), dict[int, list[int]]()
    for i in sorted(range(len(matrices)), key=lambda i: -matrices[i].shape[-1]):
        sizes.setdefault(matrices[i].shape[-1], []).append(i)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    torch.set_num_threads(1)  # of each solver: the matrices are many, and small
    try:
        with ThreadPoolExecutor(threads) as pool:
            joined = {n: torch.cat([matrices[i] for i in own]).chunk(2 * threads) for n, own in sizes.items()}
            pending = {n: [pool.submit(solved, part) for part in parts] for n, parts in joined.items()}
            for n, own in sizes.items():
                values, W = (torch.cat(parts) for parts in zip(*(part.result() for part in pending[n])))
                found |= zip(own, zip(values.chunk(len(own)), W.chunk(len(own))))
    finally:
        torch.set_num_threads(threads)
    return [found[i] for i in range(len(matrices))]


def solved(S: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a few, by the CPU."""
    host = S.cpu()
    sound = host.isfinite().all(-1).all(-1)[:, None, None]
    values, W = torch.linalg.eigh(torch.where(sound, host, torch.eye(host.shape[-1]).to(host)))
    return values.flip(-1).clamp_min(0.0).to(S.device), W.flip(-1).to(S.device)


def inverse(Z: Tensor, added: Tensor) -> Tensor:
    """(Z^T Z + added)^-1 [k, d, d] for rows Z [k, n, d] and numbers added [k] above 0."""
    S = small(Z)
    S.diagonal(dim1=1, dim2=2).add_(added[:, None])
    L = torch.linalg.cholesky_ex(S)[0]
    one = torch.eye(max(Z.shape[1:]), dtype=Z.dtype, device=Z.device)
    R: Tensor = torch.linalg.solve_triangular(L, one[: S.shape[1], : S.shape[1]].expand_as(S), upper=False)
    if Z.shape[1] >= Z.shape[2]:
        return R.mT @ R
    RZ = R @ Z
    return (one - RZ.mT @ RZ) / added[:, None, None]
