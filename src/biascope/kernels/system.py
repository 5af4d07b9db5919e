"""A kernel matrix made ready for solving: checked, decomposed in float64, with the shapes of its targets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.arguments import check_tensor
from biascope.errors import InputError
from biascope.kernels.alignment import targets
from biascope.kernels.kernel import Kernel
from biascope.kernels.spectrum import refuse_indefinite
from biascope.linalg import psd_eigh


@dataclass(frozen=True)
class System:
    """Eigenpairs of K [N, N] in float64, descending; N = n * c for a full kernel, N = n (c None) for one per example.

    Eigenvalues up to `cutoff` are rounding: the matrix is taken to be singular there. `scalar` says that the model is
    known to have one output: integer targets are values then.
    """

    values: Tensor
    vectors: Tensor
    n: int
    c: int | None
    cutoff: float
    scalar: bool = False

    @property
    def kept(self) -> Tensor:
        """Mask [N] of the eigenvalues above the cutoff."""
        return self.values > self.cutoff

    @property
    def condition(self) -> float:
        """Largest over smallest kept eigenvalue."""
        kept = self.values[self.kept]
        return float(kept[0] / kept[-1])

    def columns(self, y: Tensor) -> Tensor:
        """Targets as columns [N, d] in float64."""
        if self.c is None:
            return targets(y, self.n, 1 if self.scalar else None).to(self.values)
        t = targets(y, self.n, self.c)
        if t.shape[1] != self.c:
            raise InputError(
                f"y has {t.shape[1]} columns, the kernel {self.c} outputs; give class indices [n] or [n, {self.c}]"
            )
        return t.to(self.values).reshape(-1, 1)

    def values_of(self, f: Tensor | None, n: int, like: Tensor, what: str) -> Tensor:
        """Model outputs f [n], [n, 1] or [n, c] as columns; zeros if None."""
        rows = n * (self.c or 1)
        if f is None:
            return like.new_zeros(rows, like.shape[1])
        if check_tensor(f, what).numel() != rows * like.shape[1] or f.shape[0] != n:
            want = f"[{n}, {self.c}]" if self.c else f"[{n}, {like.shape[1]}]"
            raise InputError(f"{what} has shape {list(f.shape)}, expected {want}")
        if not bool(torch.isfinite(f).all()):
            raise InputError(f"{what} has a NaN or infinity")
        return f.detach().to(like).reshape(rows, like.shape[1])

    def shaped(self, columns: Tensor, y: Tensor) -> Tensor:
        """Columns [..., N', d] back in the shape of targets: [..., n', c], or [..., n'] where y was a plain vector."""
        if self.c is not None:
            return columns.reshape(*columns.shape[:-2], -1, self.c)
        return columns[..., 0] if y.dim() == 1 and columns.shape[-1] == 1 else columns

    def cross(self, K_test: Kernel | Tensor) -> Tensor:
        """K(x_test, x_train) as a matrix [N_test, N] in float64."""
        M = as_matrix(K_test, "K_test")[0]
        N = len(self.values)
        if M.shape[1] != N:
            hint = "; it looks transposed: rows are test examples" if M.shape[0] == N else ""
            raise InputError(f"K_test has {M.shape[1]} columns, K_train has size {N}{hint}")
        if not bool(torch.isfinite(M).all()):
            raise InputError("K_test has NaN or infinite entries")
        return M.to(self.values)


def as_matrix(K: Kernel | Tensor, what: str = "K") -> tuple[Tensor, int, int | None]:
    """(matrix [N1, N2], examples in the rows, outputs or None) of a Kernel or a tensor [n, m] or [n, c, m, c]."""
    if isinstance(K, Kernel):
        return K.matrix(), K.n[0], K.values.shape[0] if K.mode == "full" else None
    if isinstance(K, Tensor) and (K.is_complex() or K.dtype == torch.bool):
        raise InputError(f"{what} is {K.dtype}: a kernel of real numbers is needed")
    if isinstance(K, Tensor) and K.dim() == 4 and K.shape[1] == K.shape[3]:
        return K.reshape(K.shape[0] * K.shape[1], -1), K.shape[0], K.shape[1]
    if isinstance(K, Tensor) and K.dim() == 2:
        return K, K.shape[0], None
    got = f"shape {list(K.shape)}" if isinstance(K, Tensor) else type(K).__name__
    raise InputError(f"{what} must be a Kernel or a tensor [n, m] or [n, c, m, c], not {got}")


def symmetric_matrix(K: Kernel | Tensor) -> tuple[Tensor, int, int | None]:
    """`as_matrix` of K(x, x), refused if it is not square, finite and symmetric up to rounding."""
    if isinstance(K, Kernel):
        K._square("this")
    M, n, c = as_matrix(K)
    if M.shape[0] != M.shape[1]:
        raise InputError(f"a symmetric kernel K(x, x) is needed, not a matrix {list(M.shape)}")
    if not bool(torch.isfinite(M).all()):
        raise InputError("the kernel has NaN or infinite entries")
    S = M.detach().double()
    if float((S - S.mT).norm()) > max(1e-4, 10 * _eps(M)) * float(S.norm()):
        raise InputError("the kernel is not symmetric; K(x, x2) goes into K_test")
    return M, n, c


def _eps(M: Tensor) -> float:
    return torch.finfo(M.dtype).eps if M.is_floating_point() else 0.0


def system(K: Kernel | Tensor, cutoff: float | None = None) -> System:
    """Decompose a symmetric positive semi-definite kernel.

    Args:
        K: Kernel K(x, x), or tensor [n, n] or [n, c, n, c].
        cutoff: eigenvalues up to cutoff times the largest count as zero; by default what rounding in the kernel's own
            precision (or its measured error) can make.
    """
    M, n, c = symmetric_matrix(K)
    S = M.detach().double()
    values, vectors = psd_eigh(S, clip=False)
    top = float(values[0])
    noise = len(S) * _eps(M)
    if isinstance(K, Kernel) and K.error and top > 0:
        noise = max(noise, K.error * float(S.norm()) / top)
    refuse_indefinite(values, max(10 * noise, 1e-12))
    if not top > 0:
        raise InputError("the kernel is zero: nothing can be learnt with it")
    if cutoff is not None and not 0 <= cutoff < 1:
        raise InputError(f"cutoff={cutoff}: a fraction of the largest eigenvalue between 0 and 1 is needed")
    scalar = isinstance(K, Kernel) and K.model_outputs == 1
    return System(values.clamp_min(0), vectors, n, c, top * (noise if cutoff is None else cutoff), scalar)
