"""Centring and spectra of kernels."""

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.kernels import figures
from biascope.linalg import effective_rank, eigsh, psd_eigh
from biascope.linalg.elementary import Dense
from biascope.linalg.resolved import RESOLVED, resolved
from biascope.linalg.stable import symmetrise
from biascope.support.arguments import check_between, check_finite
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.memory import budget
from biascope.support.tables import facts, one_line, several

Centring = Literal["per-output", "global"]
DENSE_LIMIT = 3000  # below this size a dense eigendecomposition is as fast as Lanczos
DENSE_AFFORDABLE = 10_000  # up to this size it is done where Lanczos does not resolve what was asked: minutes


@dataclass(frozen=True)
class Spectrum:
    """Eigenpairs of a kernel, largest first.

    values [k]; vectors [N, k], orthonormal columns (mean square 1 if `normalized`); residuals ||K v - lambda v|| [k].
    `negative` is the most negative eigenvalue before it was clipped to 0 as rounding (0 if none, NaN if not computed).
    `n` examples were behind the matrix. Residuals belong to the matrix as it is given: that its entries are rounded is
    not in them.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    normalized: bool = False
    negative: float = 0.0
    n: int = 0
    __repr__ = one_line

    @property
    def whole(self) -> bool:
        """Whether all eigenvalues are here, not only the leading ones."""
        return len(self.values) == len(self.vectors)

    @property
    def resolved(self) -> Tensor:
        """Mask [k] of the pairs that are found: residual at most 1e-3 of their own eigenvalue.

        Against the largest eigenvalue any vector would pass for an eigenvector of a small one. Eigenvalues that are
        zero up to rounding are never resolved: any vector of the null space belongs to them.
        """
        return resolved(self.values, self.residuals)

    def refuse_unresolved(self, wanted: Collection[int] | None = None) -> None:
        """Raise an error if one of the pairs (all if None) is not resolved."""
        bad = [i for i in (~self.resolved).nonzero()[:, 0].tolist() if wanted is None or i in wanted]
        if bad:
            raise InputError(
                f"eigenpair {bad[0]} is not resolved (see `residuals`): its vector is rounding or was not found; "
                f"ask for indices below {bad[0]}, or decompose the whole kernel in float64 with K.eigh()"
            )

    def effective_rank(self, kind: Literal["entropy", "participation"] = "entropy") -> float:
        """Effective rank of the kernel; refused for a partial spectrum, whose tail counts too."""
        if not self.whole:
            raise UnsupportedError(f"effective_rank needs all {len(self.vectors)} eigenvalues: call eigh() without k")
        return effective_rank(self.values, kind)

    def _repr_html_(self) -> str:
        """The head of the spectrum and, of a whole one, its effective rank, for notebooks."""
        rows: dict[str, object] = {
            "eigenpairs": f"{len(self.values)} of {len(self.vectors)}",
            "leading eigenvalues": several(self.values),
        }
        rows |= {"effective rank": self.effective_rank()} if self.whole else {}
        rows["largest residual"] = float(self.residuals.max())
        return facts(f"Spectrum of a kernel on {self.n} examples", rows)

    def plot(self, ax: Any = None) -> Any:
        """Eigenvalues against their index on logarithmic axes; returns the matplotlib figure."""
        return figures.plot_spectrum(self, ax)


def spectrum(K: Tensor, k: int | None, n: int, normalize: bool) -> Spectrum:
    """Top k (or all) eigenpairs of a symmetric matrix, found in float64 and given back in the matrix's dtype.

    A small part of a large spectrum is sought by Lanczos. Where that does not resolve each eigenvalue relative to
    itself, all are computed if the matrix has at most 10,000 rows and memory is enough; a warning says if not.
    """
    N = len(K)
    k = None if k is None else check_between(k, "k", 1, N)
    check_finite(K, "the kernel")
    found = _dense(K, k) if k is None or N <= DENSE_LIMIT or k > N // 3 else _leading(K, k)
    values, vectors, residuals = (t.to(K.device, K.dtype) for t in found[:3])
    if normalize:
        return Spectrum(values / n, vectors * n**0.5, residuals / n, True, found[3] / n, n)
    return Spectrum(values, vectors, residuals, False, found[3], n)


Found = tuple[Tensor, Tensor, Tensor, float]  # values, vectors, residuals, the most negative eigenvalue


def _dense(K: Tensor, k: int | None) -> Found:
    """All eigenpairs in float64, of which k are kept."""
    S = _double(K)
    full = psd_eigh(S, clip=False)
    negative = refuse_indefinite(full.values, 1e-2)
    values, vectors = full.values[:k].clamp_min(0), full.vectors[:, :k]
    pieces = [slice(i, i + 1024) for i in range(0, len(values), 1024)]  # not another N x N matrix
    residuals = torch.cat([(S @ vectors[:, s] - vectors[:, s] * values[s]).norm(dim=0) for s in pieces])
    return values, vectors, residuals, negative


def _leading(K: Tensor, k: int) -> Found:
    """The k leading pairs by Lanczos, or by the dense decomposition where those are not resolved and it is affordable.

    Lanczos measures residuals against the largest eigenvalue, so it is asked for as much as the arithmetic gives.
    """
    N = len(K)
    room = budget(None, torch.device("cpu") if K.device.type == "mps" else K.device)
    if 3 * 8 * N * (N + k) <= room:
        S, tol = symmetrise(_double(K)), 1e-12
    else:
        S, tol = K.detach(), 1e-12 if K.dtype == torch.float64 else 1e-6
    pairs = eigsh(Dense(S, symmetric=True), k, tol=tol, seed=0)
    values = pairs.values.clamp_min(0)
    unsure = ~resolved(values, pairs.residuals)
    # of eigenvalues that are zero up to rounding in float64 a dense decomposition tells no more
    zero = pairs.converged & (pairs.values <= N * torch.finfo(torch.float64).eps * pairs.values[0])
    if bool((unsure & ~zero).any()) and N <= DENSE_AFFORDABLE and room >= 5 * 8 * N * N:
        return _dense(K, k)
    if bool(unsure.any()):
        first = int(unsure.nonzero()[0])
        warnings.warn(
            f"only the first {first} of {k} eigenpairs are resolved: the others are zero, or have residuals above "
            f"{RESOLVED:.0e} of their eigenvalue; ask for k={first}, give a float64 kernel, or decompose all with "
            "K.eigh()",
            stacklevel=5,
        )
    return values, pairs.vectors, pairs.residuals, float("nan")


def _double(K: Tensor) -> Tensor:
    return K.detach().to("cpu" if K.device.type == "mps" else K.device, torch.float64)


def refuse_indefinite(values: Tensor, tol: float) -> float:
    """The most negative eigenvalue (0 if none); an error if it is below -tol times the largest magnitude."""
    lowest = float(values.min())
    if lowest < -tol * float(values.abs().max()):
        raise InputError(
            f"the kernel is not positive semi-definite: its eigenvalues go from {lowest:.3g} to "
            f"{float(values.max()):.3g}, and rounding explains at most {tol:.1g} of the largest"
        )
    return min(lowest, 0.0)


def centre(K: Tensor, mode: str, kind: str) -> Tensor:
    """C K C over examples for every pair of outputs ("per-output"), or over all pairs (example, output) ("global")."""
    if mode == "diagonal" and kind == "global":
        raise UnsupportedError("a 'diagonal' kernel has no blocks between outputs, which global centring mixes in")
    if mode == "full" and kind == "per-output":
        K = K - K.mean(1, keepdim=True)
        return K - K.mean(3, keepdim=True)
    if mode == "full":
        k, n = K.shape[:2]
        M = K.reshape(k * n, k * n)
        M = M - M.mean(0)
        return (M - M.mean(1, keepdim=True)).view_as(K)
    K = K - K.mean(-2, keepdim=True)
    return K - K.mean(-1, keepdim=True)
