"""Preconditioners: the diagonal (Jacobi), and the randomised Nystrom approximation (Frangella, Tropp, Udell 2023)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from biascope.arguments import as_number, check_tensor
from biascope.errors import InputError
from biascope.linalg.eigenbasis import check_damping
from biascope.linalg.elementary import Diagonal, Identity, LowRank
from biascope.linalg.lanczos import check_eigen_arguments
from biascope.linalg.operator import LinearOperator
from biascope.linalg.random import draw, generator_from
from biascope.linalg.stable import symmetrise, thin_svd


def jacobi(A: LinearOperator | Tensor, damping: float = 0.0) -> Diagonal:
    """The preconditioner 1 / (diag A + damping), from an operator (exact diagonal) or from a diagonal [n].

    Example:
        >>> import torch
        >>> jacobi(torch.tensor([1.0, 3.0]), damping=1.0) @ torch.ones(2)
        tensor([0.5000, 0.2500])
    """
    damping = check_damping(damping)
    values = (A.diagonal() if isinstance(A, LinearOperator) else check_tensor(A, "A", dims=1)) + damping
    if not bool((values > 0).all()):
        raise InputError(f"jacobi: {int((values <= 0).sum())} diagonal entries are not positive; raise damping")
    return Diagonal(1.0 / values)


class Nystrom(LowRank):
    """A ~ U diag(s) U^T of rank at most `rank`, from one product of A with `rank` random vectors.

    U [n, r] is orthonormal, s [r] descending and positive. Exact when rank A <= rank. A must be positive semi-definite.

    Args:
        A: symmetric positive semi-definite operator [n, n].
        rank: of the sketch.
        seed: of the Gaussian test vectors.

    Example:
        >>> import torch
        >>> A = LowRank(torch.eye(30)[:, :2])
        >>> Nystrom(A, rank=5).s.round(decimals=3).tolist()
        [1.0, 1.0]
    """

    def __init__(self, A: LinearOperator, rank: int, seed: int = 0) -> None:
        check_eigen_arguments(A, rank, "LM", None)
        with torch.no_grad():
            n, eps = A.shape[0], torch.finfo(A.dtype).eps
            omega = torch.linalg.qr(draw(n, rank, A, generator_from(seed)))[0]
            Y = A._matmat(omega)
            if not torch.isfinite(Y).all():
                raise InputError(f"Nystrom: {A!r} gave NaN or infinity")
            # A ~ Y (omega^T Y)^+ Y^T; directions of the core below rounding carry no information and are cut
            core, W = torch.linalg.eigh(symmetrise((omega.T @ Y).double()))
            cut = 10 * rank * eps * core.abs().max()
            if core.min() < -cut * math.sqrt(n):
                raise InputError(f"Nystrom: {A!r} is not positive semi-definite (Ritz value {core.min().item():.3g})")
            keep = core > cut
            B = Y @ (W[:, keep] / core[keep].sqrt()).to(Y)
            U, root, _ = thin_svd(B)
        if U.shape[1] == 0:  # the zero operator: one direction with weight zero keeps every formula valid
            U, root = omega[:, :1], omega.new_zeros(1)
        super().__init__(U, root.square())

    def solve(self, b: Tensor, damping: float) -> Tensor:
        """(U diag(s) U^T + damping I)^-1 b for b [n] or [n, k]."""
        damping = as_number(damping, "damping")
        if not damping > 0:
            raise InputError(f"Nystrom.solve: a low-rank operator needs damping > 0, not {damping}")
        check_tensor(b, "b")
        return LowRank(self.U, 1 / (self.s + damping) - 1 / damping) @ b + b / damping

    def preconditioner(self, damping: float = 0.0) -> LinearOperator:
        """P^-1 = (s_r + damping) U diag(1 / (s + damping)) U^T + (I - U U^T), for solving with A + damping I."""
        damping = check_damping(damping)
        last = self.s[-1] + damping
        if not last > 0:
            raise InputError("Nystrom.preconditioner: the operator is zero; damping > 0 is needed")
        return Identity(self.shape[0], self.dtype, self.device) + LowRank(self.U, last / (self.s + damping) - 1)
