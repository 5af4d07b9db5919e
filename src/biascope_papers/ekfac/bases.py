"""Eigenbases and damped inverses of many Kronecker factors at once, from the rows of one batch.

A factor S = Z^T Z [d, d] of n < d rows has the eigenvalues of the small Z Z^T [n, n], and Z^T maps the eigenvectors of
that to those of S. What is left of the space has the eigenvalue 0, and any orthonormal basis of it consists of
eigenvectors: LAPACK's is made of rounding errors, ours is drawn at random. KFAC does not depend on it. EKFAC and
EKFAC-ra do between two refreshes, when other batches reach out of the span of the old one.

Eigenvectors are found on the cores of the CPU, side by side: torch's solver takes the matrices of a batch on a GPU one
by one, about as long for each. Everything else is products of matrices. All in float64.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

NULL = 1e-11  # of the largest eigenvalue; below it Z^T times a vector has lost its direction


def small(Z: Tensor) -> Tensor:
    """The smaller one of Z Z^T and Z^T Z for rows Z [k, n, d]."""
    return Z @ Z.mT if Z.shape[1] < Z.shape[2] else Z.mT @ Z


def each(matrices: Sequence[Tensor], f: Callable[[Tensor], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """f(S) for every S [k, n, n], those of one size in one call."""
    out: dict[int, tuple[Tensor, ...]] = {}
    for n in {S.shape[-1] for S in matrices}:
        own = [i for i, S in enumerate(matrices) if S.shape[-1] == n]
        found = f(torch.cat([matrices[i] for i in own]))
        out |= zip(own, zip(*(part.chunk(len(own)) for part in found)))
    return [out[i] for i in range(len(matrices))]


def eigenbases(rows: Sequence[Tensor], complete: bool) -> list[tuple[Tensor, Tensor]]:
    """Eigenvectors [k, d, .] and eigenvalues [k, .] of Z^T Z for every Z [k, n, d]: d of them, or without `complete`
    only those of the rows' span."""
    bases = []
    for Z, (values, W) in zip(rows, each([small(Z) for Z in rows], eigenvectors)):
        bases.append(spanned(Z, values, W) if Z.shape[1] < Z.shape[2] else (W, values))
    wide = [i for i, Z in enumerate(rows) if complete and Z.shape[1] < Z.shape[2]]
    for i, pair in zip(wide, completed([bases[i] for i in wide]) if wide else ()):
        bases[i] = pair
    return bases


def spanned(Z: Tensor, values: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors of Z^T Z from those of Z Z^T, and their eigenvalues; both 0 where the direction is lost."""
    good = values > NULL * values[:, :1]
    X = Z.mT @ (W * torch.where(good, values, 1.0).rsqrt().mul(good)[:, None])
    return X @ (1.5 * torch.eye(X.shape[2], dtype=X.dtype, device=X.device) - 0.5 * X.mT @ X), values * good


def completed(thin: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Orthogonal [k, d, d] whose first columns are the eigenvectors X [k, d, n], up to signs; equal n in all.

    Q = I - Y M Y^T with Y = X - E and 1 / M = 1 - X^T E maps the first axes E to X. It is that of a Householder QR:
    signs of the columns of X keep 1 / M away from 0. The axes are turned at random, the same way every time. With axes
    of pixels the null space was nearly along pixels, LAPACK's is not, and EKFAC-ra's loss was lower than with LAPACK
    (10.4 +- 4.0 of 173 in eight seeds of the small MNIST auto-encoder); turned, it is the same (6.0 +- 6.9 higher).
    """
    turns = [random_axes(X.shape[1], X.device) for X, _ in thin]
    turned = [F.mT @ X for F, (X, _) in zip(turns, thin)]
    good = torch.cat([values > 0 for _, values in thin]).to(turned[0].dtype)
    k, n = len(thin), good.shape[1]
    T = torch.cat([X[:, :n] for X in turned]) * good[:, :, None]
    signs = householder_signs(T)
    M = torch.linalg.inv_ex(torch.eye(n, dtype=T.dtype, device=T.device) - (T * signs[:, None]).mT)[0]
    out = []
    for X, F, (_, values), s, m, e in zip(turned, turns, thin, signs.chunk(k), M.chunk(k), good.chunk(k)):
        Y = X * s[:, None]
        Y[:, :n] -= torch.diag_embed(e)
        out.append((F - (F @ Y) @ m @ Y.mT, pad(values, (0, len(F) - n))))
    return out


@lru_cache(maxsize=64)
def random_axes(d: int, device: torch.device) -> Tensor:
    """An orthogonal matrix [d, d]."""
    g = torch.Generator().manual_seed(d)
    F: Tensor = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))[0]
    return F.to(device)


def householder_signs(T: Tensor) -> Tensor:
    """Signs s [k, n] with which an elimination of T - diag(s) never divides by less than 1 (Ballard et al. 2014)."""
    T = T.clone()
    s = T.new_empty(T.shape[:2])
    for j in range(T.shape[1]):
        s[:, j] = 1.0 - 2.0 * (T[:, j, j] > 0)
        column = T[:, j + 1 :, j] / (T[:, j, j] - s[:, j])[:, None]
        T[:, j + 1 :, j + 1 :].baddbmm_(column[:, :, None], T[:, None, j, j + 1 :], alpha=-1)
    return s


def eigenvectors(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [k, n] of S [k, n, n], descending and not below 0, and eigenvectors [k, n, n], side by side on a CPU.

    A matrix with NaN or infinity, of a training that has diverged, counts as the identity.
    """
    threads = torch.get_num_threads()

    def solve(part: Tensor) -> tuple[Tensor, Tensor]:
        host = part.cpu()
        sound = host.isfinite().all(-1).all(-1)[:, None, None]
        values, W = torch.linalg.eigh(torch.where(sound, host, torch.eye(host.shape[-1]).to(host)))
        return values.flip(-1).clamp_min(0.0).to(S.device), W.flip(-1).to(S.device)

    torch.set_num_threads(1)  # of each solver: the matrices are many, and small
    try:
        with ThreadPoolExecutor(threads) as pool:
            values, W = zip(*pool.map(solve, S.chunk(2 * threads)))
    finally:
        torch.set_num_threads(threads)
    return torch.cat(values), torch.cat(W)


def inverses(rows: Sequence[Tensor], added: Sequence[Tensor]) -> list[Tensor]:
    """(Z^T Z + added)^-1 [k, d, d] for rows Z [k, n, d] and numbers added [k] above 0."""
    damped = [small(Z) for Z in rows]
    for S, number in zip(damped, added):
        S.diagonal(dim1=1, dim2=2).add_(number[:, None])
    out = []
    for Z, number, (R,) in zip(rows, added, each(damped, root)):
        if Z.shape[1] < Z.shape[2]:
            RZ = R @ Z
            out.append((torch.eye(Z.shape[2], dtype=Z.dtype, device=Z.device) - RZ.mT @ RZ) / number[:, None, None])
        else:
            out.append(R.mT @ R)
    return out


def root(S: Tensor) -> tuple[Tensor]:
    """R with R^T R = S^-1."""
    one = torch.eye(S.shape[1], dtype=S.dtype, device=S.device).expand_as(S)
    return (torch.linalg.solve_triangular(torch.linalg.cholesky_ex(S)[0], one, upper=False),)
