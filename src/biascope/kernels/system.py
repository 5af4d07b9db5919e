"""A kernel matrix made ready for solving: checked, decomposed in float64, with the shapes of its targets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.kernels.alignment import kernel_targets
from biascope.kernels.kernel import Kernel
from biascope.kernels.spectrum import refuse_indefinite
from biascope.linalg import psd_eigh
from biascope.support.arguments import check_finite, check_share
from biascope.support.errors import InputError


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
        t = kernel_targets(y, self.n, self.c, self.scalar).to(self.values)
        return t if self.c is None else t.reshape(-1, 1)

    def values_of(self, f: Tensor | None, n: int, like: Tensor, what: str) -> Tensor:
        """Model outputs f [n], [n, 1] or [n, c] as columns; zeros if None."""
        rows = n * (self.c or 1)
        if f is None:
            return like.new_zeros(rows, like.shape[1])
        if f.numel() != rows * like.shape[1] or f.shape[0] != n:
            raise InputError(f"{what} has shape {list(f.shape)}, expected [{n}, {self.c or like.shape[1]}]")
        return check_finite(f, what).detach().to(like).reshape(rows, like.shape[1])

    def shaped(self, columns: Tensor, y: Tensor) -> Tensor:
        """Columns [..., N', d] back in the shape of targets: [..., n', c], or [..., n'] where y was a plain vector."""
        if self.c is not None:
            return columns.reshape(*columns.shape[:-2], -1, self.c)
        return columns[..., 0] if y.dim() == 1 and columns.shape[-1] == 1 else columns

    def cross(self, K_test: Kernel | Tensor) -> Tensor:
        """K(x_test, x_train) as a matrix [N_test, N] in float64."""
        M = as_matrix(K_test, "K_test")[0]
        check_columns(M, len(self.values), "K_test")
        return M.to(self.values)


def check_columns(M: Tensor, size: int, what: str) -> None:
    """Refuse a kernel K(x_new, x) that does not have a column for every point, or holds no numbers."""
    if check_finite(M, what).shape[1] != size:
        hint = "; it looks transposed: rows are the new points" if M.shape[0] == size else ""
        raise InputError(f"{what} has {M.shape[1]} columns, expected {size}{hint}")


def as_matrix(K: Kernel | Tensor, what: str = "K") -> tuple[Tensor, int, int | None]:
    """(matrix [N1, N2], examples in the rows, outputs or None) of a Kernel or a tensor [n, m] or [n, c, m, c]."""
    if isinstance(K, Kernel):
        return K.matrix(), K.n[0], K.values.shape[0] if K.mode == "full" else None
    if K.dim() == 4 and K.shape[1] == K.shape[3]:
        return K.reshape(K.shape[0] * K.shape[1], -1), K.shape[0], K.shape[1]
    if K.dim() != 2:
        raise InputError(f"{what} must be a Kernel or a tensor [n, m] or [n, c, m, c], not shape {list(K.shape)}")
    return K, K.shape[0], None


def symmetric_matrix(K: Kernel | Tensor) -> tuple[Tensor, int, int | None]:
    """`as_matrix` of K(x, x), refused if it is not square, finite and symmetric up to rounding."""
    if isinstance(K, Kernel):
        K._square("this")
    M, n, c = as_matrix(K)
    S = check_finite(M, "the kernel").detach().double()
    square = M.shape[0] == M.shape[1]
    if not square or float((S - S.mT).norm()) > max(1e-4, 10 * _eps(M)) * float(S.norm()):
        raise InputError(f"a symmetric kernel K(x, x) is needed, not {list(M.shape)}; K(x, x2) goes into K_test")
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
    floor = top * (noise if cutoff is None else check_share(cutoff, "cutoff"))
    return System(values.clamp_min(0), vectors, n, c, floor, isinstance(K, Kernel) and K.model_outputs == 1)
