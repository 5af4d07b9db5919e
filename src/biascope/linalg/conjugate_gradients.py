"""Conjugate gradients for positive definite operators, many right-hand sides at once, with preconditioner."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.linalg.elementary import Identity
from biascope.linalg.operator import LinearOperator, Operator, SquareOperator
from biascope.linalg.spread import Spread, dots, norms
from biascope.support.arguments import check_damping
from biascope.support.errors import InputError
from biascope.support.limits import Count, FiniteTensor, Positive
from biascope.support.signatures import checked
from biascope.support.tables import one_line


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


class OnParts(LinearOperator):
    """An operator on whole vectors, for vectors in parts: they are put together for it."""

    def __init__(self, base: LinearOperator, spread: Spread) -> None:
        super().__init__(base.shape, base.dtype, base.device, base.symmetric)
        self.base, self.spread = base, spread

    def _matmat(self, X: Tensor) -> Tensor:
        assert self.spread is not None
        return self.spread.own(self.base._matmat(self.spread.join(X))).contiguous()


@checked
def damped(A: SquareOperator, damping: float) -> LinearOperator:
    """A + damping * I, lazily."""
    damping = check_damping(damping)
    return A if damping == 0 else A + damping * Identity(A.shape[0], A.dtype, A.device)


@checked
def cg(
    A: SquareOperator,
    b: FiniteTensor,
    preconditioner: Operator | None = None,
    x0: FiniteTensor | None = None,
    tol: Positive | None = None,
    max_iterations: Count | None = None,
) -> SolveResult:
    """Solve A x = b for a positive definite operator; columns that have converged cost nothing more.

    When the recurred residual says converged, the true one is computed; if it disagrees (rounding), the iteration goes
    on from it, until it no longer improves.

    Args:
        A: symmetric positive definite operator [n, n].
        b: [n] or [n, k].
        preconditioner: an approximation of A^-1, positive definite.
        x0: first guess, shaped as b; zero by default.
        tol: ||b - A x|| <= tol ||b||; by default 1e-10 in float64, 1e-5 in float32.
        max_iterations: 10 n by default.

    Example:
        >>> import torch
        >>> from biascope.linalg import aslinearoperator
        >>> A = aslinearoperator(torch.diag(torch.tensor([1.0, 2.0, 4.0])))
        >>> cg(A, torch.ones(3)).x.round(decimals=3).tolist()
        [1.0, 0.5, 0.25]
    """
    A.check_fits(b)
    if A.spread is not None and preconditioner is not None and preconditioner.spread is None:
        preconditioner = OnParts(preconditioner, A.spread)
    if x0 is not None and x0.shape != b.shape:
        raise InputError(f"cg: x0 {list(x0.shape)} must be shaped as b {list(b.shape)}")
    tol = tol or (1e-10 if A.dtype == torch.float64 else 1e-5)
    max_iterations = max_iterations or 10 * A.shape[0]
    with torch.no_grad():
        B = b.reshape(len(b), -1)
        X = torch.zeros_like(B) if x0 is None else x0.reshape(B.shape).clone()
        target = tol * norms(A, B)
        matvecs = iterations = 0
        R = B.clone()
        if x0 is not None:
            R -= A._matmat(X)
            matvecs += B.shape[1]
        sizes = norms(A, R)
        indefinite = torch.zeros_like(sizes, dtype=torch.bool)
        previous = torch.full_like(sizes, math.inf)
        while True:
            open_ = (sizes > target) & (sizes < 0.5 * previous) & ~indefinite
            if not bool(open_.any()) or iterations >= max_iterations:
                break
            columns = open_.nonzero().squeeze(1)
            steps, products, bad = _sweep(
                A, X, R[:, columns], columns, target, preconditioner, max_iterations - iterations
            )
            indefinite[bad] = True
            iterations += steps
            matvecs += products + len(columns)
            previous[columns] = sizes[columns]
            R[:, columns] = B[:, columns] - A._matmat(X[:, columns])
            sizes[columns] = norms(A, R[:, columns])
        per_column = () if b.ndim == 1 else (len(sizes),)
        return SolveResult(
            x=X.reshape(b.shape),
            residual_norms=sizes.reshape(per_column),
            converged=(sizes <= target).reshape(per_column),
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
    P, rz = Z.clone(), dots(A, R, Z)
    for iteration in range(1, max_iterations + 1):
        AP = A._matmat(P)
        products += len(columns)
        curvature = dots(A, P, AP)
        if not torch.isfinite(curvature).all():
            raise InputError(f"cg: {A!r} gave NaN or infinity in iteration {iteration}")
        good = (curvature > 0) & (rz > 0)
        bad.append(columns[~good])
        columns, P, AP, R, rz, curvature = _keep(good, columns, P, AP, R, rz, curvature)
        step = (rz / curvature).to(P.dtype)
        X[:, columns] += step * P
        R = R - step * AP
        columns, P, R, rz = _keep(norms(A, R) > target[columns], columns, P, R, rz)
        if len(columns) == 0:
            break
        Z = R if preconditioner is None else preconditioner._matmat(R)
        rz, before = dots(A, R, Z), rz
        P = Z + (rz / before).to(P.dtype) * P
    return iteration, products, torch.cat(bad)


def _keep(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The columns (last dimension) where the mask is true; no copy when all are."""
    return tensors if bool(mask.all()) else tuple(t[..., mask] for t in tensors)
