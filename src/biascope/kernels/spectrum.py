"""Centring and spectra of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.errors import InputError, UnsupportedError
from biascope.linalg import Dense, effective_rank, eigsh, psd_eigh
from biascope.tables import facts, several

DENSE_LIMIT = 3000  # below this size a dense eigendecomposition is as fast as Lanczos


@dataclass(frozen=True)
class Spectrum:
    """Eigenpairs of a kernel, largest first.

    values [k]; vectors [N, k], orthonormal columns (mean square 1 if `normalized`); residuals ||K v - lambda v|| [k].
    `negative` is the most negative eigenvalue before it was clipped to 0 as rounding (0 if none, NaN if not computed).
    `n` examples were behind the matrix.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    normalized: bool = False
    negative: float = 0.0
    n: int = 0

    @property
    def whole(self) -> bool:
        """Whether all eigenvalues are here, not only the leading ones."""
        return len(self.values) == len(self.vectors)

    def effective_rank(self, kind: Literal["entropy", "participation"] = "entropy") -> float:
        """Effective rank of the kernel; refused for a partial spectrum, whose tail counts too."""
        if not self.whole:
            raise UnsupportedError(
                f"effective_rank needs all {len(self.vectors)} eigenvalues and there are {len(self.values)}: "
                "call eigh() without k, or K.effective_rank()"
            )
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
        from biascope.kernels.figures import plot_spectrum

        return plot_spectrum(self, ax)


def spectrum(K: Tensor, k: int | None, n: int, normalize: bool) -> Spectrum:
    """Top k (or all) eigenpairs of a symmetric matrix; small ones and full ones in float64."""
    N = len(K)
    if k is not None and not 1 <= k <= N:
        raise InputError(f"k={k}: a kernel of size {N} has between 1 and {N} eigenpairs")
    if not bool(torch.isfinite(K).all()):
        raise InputError("the kernel has NaN or infinite entries: it has no spectrum")
    if k is None or N <= DENSE_LIMIT or k > N // 3:
        full = psd_eigh(K, clip=False)
        negative = refuse_indefinite(full.values, 1e-2)
        values, vectors = full.values[:k].clamp_min(0), full.vectors[:, :k]
        residuals = torch.linalg.vector_norm(K.to(vectors) @ vectors - vectors * values, dim=0)
    else:
        pairs = eigsh(Dense(K, symmetric=True), k, seed=0)
        values, vectors, residuals, negative = pairs.values, pairs.vectors, pairs.residuals, float("nan")
    if normalize:
        values, vectors, residuals = values / n, vectors * n**0.5, residuals / n
        negative /= n
    return Spectrum(values, vectors, residuals, normalize, negative, n)


def refuse_indefinite(values: Tensor, tol: float) -> float:
    """The most negative eigenvalue (0 if none); an error if it is below -tol times the largest magnitude."""
    lowest, largest = float(values.min()), float(values.abs().max())
    if lowest < -tol * largest:
        raise InputError(
            f"the kernel is not positive semi-definite: its most negative eigenvalue is {lowest:.3g}, its largest "
            f"{float(values.max()):.3g}; rounding explains at most {tol:.1g} of the largest"
        )
    return min(lowest, 0.0)


def centre(K: Tensor, mode: str, kind: str) -> Tensor:
    """C K C over examples for every pair of outputs ("per-output"), or over all pairs (example, output) ("global")."""
    if kind not in {"per-output", "global"}:
        raise InputError(f"centring {kind!r} is not known; choose 'per-output' or 'global'")
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
