"""Conjugate gradients for positive definite operators, many right-hand sides at once, with preconditioner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.arguments import as_number, check_count, check_tensor
from biascope.errors import InputError
from biascope.linalg.eigenbasis import check_damping
from biascope.linalg.elementary import Identity
from biascope.linalg.operator import LinearOperator, need_operator
from biascope.linalg.stable import column_dots
from biascope.tables import one_line


@dataclass(frozen=True)
class SolveResult:
    """A solution with the evidence.

    Attributes:
        x: [n] or [n, k], as b was.
        residual_norms: ||b - A x||, computed, not recurred; a number (0-dimensional) or [k].
        converged: bool, residual_norm <= tol * ||b||; alike.
        negative_curvature: bool, p^T A p <= 0 was met: A is not positive definite, x is the last iterate before; alike.
        iterations: products with the block.
        matvecs: products with one vector.
    """

    x: Tensor = field(repr=False)
    residual_norms: Tensor
    converged: Tensor
    negative_curvature: Tensor
    iterations: int
    matvecs: int
    __repr__ = one_line

    @property
    def message(self) -> str:
        """One sentence on how it ended."""
        k, good = self.converged.numel(), int(self.converged.sum())
        if good == k:
            return f"converged in {self.iterations} iterations"
        text = f"{k - good} of {k} right-hand sides did not converge in {self.iterations} iterations"
        bad = int(self.negative_curvature.sum())
        if bad:
            text += f"; {bad} met non-positive curvature: the operator is not positive definite, add damping"
        return text


def damped(A: LinearOperator, damping: float) -> LinearOperator:
    """A + damping * I, lazily.

    Example:
        >>> import torch
        >>> from biascope.linalg import Dense
        >>> damped(Dense(torch.eye(2)), 0.1)
        <Sum 2x2 float32: Dense + 0.1 * Identity>
    """
    damping = check_damping(damping)
    need_operator(A)._need_square("damping")
    return A if damping == 0 else A + damping * Identity(A.shape[0], A.dtype, A.device)


def cg(
    A: LinearOperator,
    b: Tensor,
    preconditioner: LinearOperator | None = None,
    x0: Tensor | None = None,
    tol: float | None = None,
    max_iterations: int | None = None,
) -> SolveResult:
    """Solve A x = b for a positive definite operator; columns that have converged cost nothing more.

    When the recurred residual says converged, the true one is computed; if it disagrees (rounding), the iteration goes
    on from it, until it no longer improves.

    Args:
        A: symmetric positive definite operator [n, n].
        b: [n] or [n, k].
        preconditioner: an approximation of A^-1, positive definite: `jacobi(...)`, `Nystrom(...).preconditioner(...)`.
        x0: first guess, shaped as b; zero by default.
        tol: ||b - A x|| <= tol ||b||; by default 1e-10 in float64, 1e-5 in float32.
        max_iterations: 10 n by default.

    Example:
        >>> import torch
        >>> from biascope.linalg import Diagonal
        >>> cg(Diagonal(torch.tensor([1.0, 2.0, 4.0])), torch.ones(3)).x.round(decimals=3).tolist()
        [1.0, 0.5, 0.25]
    """
    tol, max_iterations = _check(A, b, preconditioner, x0, tol, max_iterations)
    with torch.no_grad():
        B = b.reshape(len(b), -1)
        X = torch.zeros_like(B) if x0 is None else x0.reshape(B.shape).clone()
        target = tol * B.norm(dim=0)
        matvecs = iterations = 0
        R = B.clone()
        if x0 is not None:
            R -= A._matmat(X)
            matvecs += B.shape[1]
        norms = R.norm(dim=0)
        indefinite = torch.zeros_like(norms, dtype=torch.bool)
        previous = torch.full_like(norms, math.inf)
        while True:
            open_ = (norms > target) & (norms < 0.5 * previous) & ~indefinite
            if not bool(open_.any()) or iterations >= max_iterations:
                break
            columns = open_.nonzero().squeeze(1)
            steps, products, bad = _sweep(
                A, X, R[:, columns], columns, target, preconditioner, max_iterations - iterations
            )
            indefinite[bad] = True
            iterations += steps
            matvecs += products + len(columns)
            previous[columns] = norms[columns]
            R[:, columns] = B[:, columns] - A._matmat(X[:, columns])
            norms[columns] = R[:, columns].norm(dim=0)
        per_column = () if b.ndim == 1 else (len(norms),)
        return SolveResult(
            x=X.reshape(b.shape),
            residual_norms=norms.reshape(per_column),
            converged=(norms <= target).reshape(per_column),
            negative_curvature=indefinite.reshape(per_column),
            iterations=iterations,
            matvecs=matvecs,
        )


def _sweep(
    A: LinearOperator,
    X: Tensor,
    R: Tensor,
    columns: Tensor,
    target: Tensor,
    preconditioner: LinearOperator | None,
    max_iterations: int,
) -> tuple[int, int, Tensor]:
    """CG from the residuals R of X[:, columns], in place in X; gives iterations, products, columns that went bad."""
    bad: list[Tensor] = []
    products = 0
    Z = R if preconditioner is None else preconditioner._matmat(R)
    P, rz = Z.clone(), column_dots(R, Z)
    for iteration in range(1, max_iterations + 1):
        AP = A._matmat(P)
        products += len(columns)
        curvature = column_dots(P, AP)
        if not torch.isfinite(curvature).all():
            raise InputError(f"cg: {A!r} gave NaN or infinity in iteration {iteration}")
        good = (curvature > 0) & (rz > 0)
        bad.append(columns[~good])
        columns, P, AP, R, rz, curvature = _keep(good, columns, P, AP, R, rz, curvature)
        step = (rz / curvature).to(P.dtype)
        X[:, columns] += step * P
        R = R - step * AP
        columns, P, R, rz = _keep(R.norm(dim=0) > target[columns], columns, P, R, rz)
        if len(columns) == 0:
            break
        Z = R if preconditioner is None else preconditioner._matmat(R)
        rz, before = column_dots(R, Z), rz
        P = Z + (rz / before).to(P.dtype) * P
    return iteration, products, torch.cat(bad)


def _keep(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The columns (last dimension) where the mask is true; no copy when all are."""
    return tensors if bool(mask.all()) else tuple(t[..., mask] for t in tensors)


def _check(
    A: LinearOperator,
    b: Tensor,
    preconditioner: LinearOperator | None,
    x0: Tensor | None,
    tol: float | None,
    max_iterations: int | None,
) -> tuple[float, int]:
    need_operator(A)._need_square("cg")
    n = A.shape[0]
    if A.dtype not in (torch.float32, torch.float64):
        raise InputError(f"{A!r}: cg works in float32 or float64")
    for name, t in (("b", b), ("x0", x0)):
        if t is None and name == "x0":
            continue
        t = check_tensor(t, name)
        if t.ndim not in (1, 2) or t.shape[0] != n or t.dtype != A.dtype or t.device != A.device:
            raise InputError(
                f"cg: {name} is {t.dtype} {list(t.shape)} on {t.device}, "
                f"but {A!r} on {A.device} needs [{n}] or [{n}, k]"
            )
        if not torch.isfinite(t).all():
            raise InputError(f"cg: {name} holds NaN or infinity")
    if x0 is not None and x0.shape != b.shape:
        raise InputError(f"cg: x0 {list(x0.shape)} must be shaped as b {list(b.shape)}")
    if preconditioner is not None and (
        need_operator(preconditioner).shape != A.shape
        or preconditioner.dtype != A.dtype
        or preconditioner.device != A.device
    ):
        raise InputError(f"cg: the preconditioner {preconditioner!r} does not fit {A!r} on {A.device}")
    if tol is not None and not as_number(tol, "tol") > 0:
        raise InputError(f"tol must be positive, not {tol}")
    if max_iterations is not None:
        check_count(max_iterations, "max_iterations")
    return tol or (1e-10 if A.dtype == torch.float64 else 1e-5), max_iterations or 10 * n
