"""Diagonal in a Kronecker eigenbasis: (U_B (x) U_A) diag(s) (U_B (x) U_A)^T, the form of EKFAC.

With s = outer(s_B, s_A) it is the Kronecker product itself; with s the second moments of gradients there, EKFAC.
A third dimension of s (kernel offsets of a convolution under SUA) is left unrotated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from biascope.arguments import as_number, as_whole, check_number, check_tensor
from biascope.errors import InputError
from biascope.linalg.operator import LinearOperator
from biascope.linalg.random import draw, generator_from


class KroneckerEigen(LinearOperator):
    """(U_B (x) U_A) diag(vec s) (U_B (x) U_A)^T on row-major vectors.

    Args:
        U_B: orthogonal [p, p], in columns.
        U_A: orthogonal [r, r], in columns.
        s: eigenvalues [p, r], or [p, r, e] with e positions that are not rotated.

    Example:
        >>> import torch
        >>> E = KroneckerEigen(torch.eye(2), torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> E @ torch.ones(4)
        tensor([1., 2., 3., 4.])
    """

    def __init__(self, U_B: Tensor, U_A: Tensor, s: Tensor) -> None:
        check_tensor(s, "s")
        p, r = check_tensor(U_B, "U_B").shape[0], check_tensor(U_A, "U_A").shape[0]
        if U_B.shape != (p, p) or U_A.shape != (r, r) or s.ndim not in (2, 3) or s.shape[:2] != (p, r):
            raise InputError(
                f"KroneckerEigen needs U_B [p, p], U_A [r, r] and s [p, r] or [p, r, e], "
                f"not {list(U_B.shape)}, {list(U_A.shape)}, {list(s.shape)}"
            )
        if len({U_B.dtype, U_A.dtype, s.dtype}) > 1 or len({U_B.device, U_A.device, s.device}) > 1:
            raise InputError(
                f"KroneckerEigen: U_B {U_B.dtype} {U_B.device}, U_A {U_A.dtype} {U_A.device}, s {s.dtype} {s.device} "
                "must agree"
            )
        super().__init__((s.numel(), s.numel()), s.dtype, s.device, symmetric=True)
        self.U_B, self.U_A, self.s = U_B, U_A, s
        self.known: Tensor | None = None  # False where an eigenvalue is rounding alone, whatever its size

    def _matmat(self, X: Tensor) -> Tensor:
        return self._rotate(self.U_B, self.U_A, self.s.reshape(-1, 1) * self._rotate(self.U_B.T, self.U_A.T, X))

    def to_eigenbasis(self, v: Tensor) -> Tensor:
        """Coordinates of v [n] or [n, k] in the eigenbasis, same shape: vec(U_B^T V U_A)."""
        return self._both(self.U_B.T, self.U_A.T, v)

    def from_eigenbasis(self, v: Tensor) -> Tensor:
        """Back from coordinates [n] or [n, k]: vec(U_B V U_A^T)."""
        return self._both(self.U_B, self.U_A, v)

    def eigenvalues(self) -> Tensor:
        """All eigenvalues, descending [n]."""
        return self.s.reshape(-1).sort(descending=True).values

    def diagonal(self, chunk: int = 256) -> Tensor:
        """(U_B^2) s (U_A^2)^T, [n]."""
        return self._rotate(self.U_B.square(), self.U_A.square(), self.s.reshape(-1, 1)).squeeze(1)

    def trace(self) -> Tensor:
        """Sum of s."""
        return self.s.sum()

    def frobenius_norm(self) -> Tensor:
        """Norm of s."""
        return self.s.square().sum().sqrt()

    def spectral_norm(self) -> Tensor:
        """Largest |s|."""
        return self.s.abs().max()

    def quadratic_form(self, v: Tensor) -> Tensor:
        """v^T F v for v [n] (0-dimensional) or each column of [n, k]."""
        squares = self.to_eigenbasis(v).square()
        return (self.s.reshape(-1, *[1] * (v.ndim - 1)) * squares).sum(0)

    # functions of the eigenvalues stay in the basis -----------------------------------------------------------------

    def with_scalings(self, s: Tensor) -> KroneckerEigen:
        """The same basis with other eigenvalues [p, r] or [p, r, e]."""
        return KroneckerEigen(self.U_B, self.U_A, s)

    def inverse(self, damping: float | Tensor = 0.0) -> KroneckerEigen:
        """Eigenvalues 1 / (s + damping); damping is a number or shaped as s (see `deep_net_damping`)."""
        return self.with_scalings(1.0 / self._damped(damping))

    def solve(self, v: Tensor, damping: float | Tensor = 0.0) -> Tensor:
        """(F + damping I)^-1 v for v [n] or [n, k]."""
        return self.inverse(damping) @ check_tensor(v, "v")

    def power(self, exponent: float, cutoff: float = 0.0) -> KroneckerEigen:
        """Eigenvalues s^e; for e < 0 those at or below `cutoff` times the largest are left out (pseudo-inverse).

        So are those below the product of the two bases' own rounding, (p eps) (r eps) times the largest.
        """
        exponent, cutoff = check_number(exponent, "exponent"), check_number(cutoff, "cutoff")
        if exponent != int(exponent) and bool((self.s < 0).any()):
            raise InputError(f"{self!r}: power {exponent} of negative eigenvalues")
        keep = torch.ones_like(self.s, dtype=torch.bool)
        if exponent < 0:
            rounding = len(self.U_B) * len(self.U_A) * torch.finfo(self.dtype).eps ** 2
            floor = (max(cutoff, rounding) * self.s.abs().max()).clamp_min(torch.finfo(self.dtype).tiny)
            keep = self.s.abs() > floor if self.known is None else (self.s.abs() > floor) & self.known
        return self.with_scalings(torch.where(keep, torch.where(keep, self.s, 1.0) ** exponent, 0.0))

    def sample(self, n: int, damping: float | Tensor = 0.0, seed: int = 0) -> Tensor:
        """n draws of N(0, (F + damping I)^-1), [n, size]: U_B (Z / sqrt(s + damping)) U_A^T."""
        if as_whole(n, "n") < 1:
            raise InputError(f"sample needs n >= 1, not {n}")
        Z = draw(self.shape[0], n, self, generator_from(seed))
        return self.from_eigenbasis(Z / self._damped(damping).sqrt().reshape(-1, 1)).T

    def __add__(self, other: LinearOperator) -> LinearOperator:
        """In the same basis (the same tensors) the eigenvalues add; else a lazy sum."""
        if isinstance(other, KroneckerEigen) and other.U_B is self.U_B and other.U_A is self.U_A:
            return self.with_scalings(self.s + other.s)
        return super().__add__(other)

    def __mul__(self, scalar: float) -> LinearOperator:
        super().__mul__(scalar)  # checks the number
        return self.with_scalings(float(scalar) * self.s)

    def _expression(self) -> str:
        return f"U_B {len(self.U_B)}x{len(self.U_B)} (x) U_A {len(self.U_A)}x{len(self.U_A)}"

    def _damped(self, damping: float | Tensor) -> Tensor:
        if isinstance(damping, Tensor) and damping.ndim > 0:
            if damping.shape != self.s.shape:
                raise InputError(
                    f"damping must be a number or shaped as s {list(self.s.shape)}, not {list(damping.shape)}"
                )
        else:
            damping = check_damping(damping)
        values = self.s + damping
        if not bool((values > self.s.numel() * torch.finfo(self.dtype).tiny).all()):
            raise InputError(f"{self!r}: singular, {int((values <= 0).sum())} eigenvalues are <= 0; give damping > 0")
        return values

    def _both(self, P: Tensor, Q: Tensor, v: Tensor) -> Tensor:
        if check_tensor(v, "v").ndim not in (1, 2) or v.shape[0] != self.shape[0] or v.dtype != self.dtype:
            need = f"[{self.shape[0]}] or [{self.shape[0]}, k] of {self.dtype}"
            raise InputError(f"{self!r} takes {need}, not {list(v.shape)} of {v.dtype}")
        return self._rotate(P, Q, v.reshape(len(v), -1)).reshape(v.shape)

    def _rotate(self, P: Tensor, Q: Tensor, X: Tensor) -> Tensor:
        """vec(P V Q^T) over the first two dimensions of every column of X [n, k]."""
        p, r = len(P), len(Q)
        left = P @ X.reshape(p, -1)
        width = left.numel() // (p * r)
        if width == 1:
            return (left @ Q.T).reshape(X.shape)
        return torch.matmul(Q, left.reshape(p, r, width)).reshape(X.shape)


def deep_net_damping(s_B: Tensor, s_A: Tensor, eps: float) -> Tensor:
    """Damping [p, r] of EKFAC in deep nets: (s_B + sqrt eps)(s_A + sqrt eps) - s_B s_A, for s_B [p] and s_A [r].

    Example:
        >>> import torch
        >>> deep_net_damping(torch.ones(1), torch.ones(1), 0.25)
        tensor([[1.2500]])
    """
    if check_tensor(s_B, "s_B").ndim != 1 or check_tensor(s_A, "s_A").ndim != 1:
        raise InputError(f"deep_net_damping needs eigenvalues [p] and [r], not {list(s_B.shape)} and {list(s_A.shape)}")
    eps = check_damping(eps)
    root = math.sqrt(eps)
    return eps + root * (s_B[:, None] + s_A[None, :])


def check_damping(damping: Any) -> float:
    """Refuse what is no number, is negative or not finite.

    Example:
        >>> check_damping("0.1")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: damping='0.1': one number is needed
    """
    found = as_number(damping, "damping")
    if not (found >= 0 and math.isfinite(found)):
        raise InputError(f"damping must be a number >= 0, not {found}")
    return found
