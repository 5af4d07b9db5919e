"""Data of the quadratic model (f = theta^T x, theta = 1/2 sum w_l^2 v_l): the three worked examples, by mode.

X = sum_l sqrt(mu_l) u_l v_l^T, y_l = u_l^T y >= 0. Modes are learnt in the order of y~_l = sqrt(mu_l) y_l by the
non-linear model, and of mu_l by the linearised one. Where several mu_l are equal, the SVD basis is arbitrary and so is
the model itself: `basis` says which one is meant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.data.bases import random_orthogonal
from biascope.data.dataset import Dataset, generator
from biascope.support.errors import InputError
from biascope.support.limits import Finite, shaped
from biascope.support.signatures import checked
from biascope.support.tables import one_line

Basis = Literal["lapack", "aligned"] | int


@dataclass(frozen=True, eq=False)
class QuadraticTask:
    """Float64 data and modes. x [n, d], y [n], mu [n] descending, u [n, n], v [d, n] (columns), y_mode, y_tilde [n].

    `group` is 1 for the noisy (example 2) or minority (example 3) examples.
    """

    x: Tensor
    y: Tensor
    mu: Tensor
    u: Tensor
    v: Tensor
    y_mode: Tensor
    y_tilde: Tensor
    group: Tensor
    name: str
    basis: Basis
    __repr__ = one_line

    @property
    def theta_star(self) -> Tensor:
        """The solution by mode, theta*_l = y_l / sqrt(mu_l), [n]."""
        return self.y_mode / self.mu.sqrt()

    @property
    def dataset(self) -> Dataset:
        """The same data as a plain `Dataset` (for other networks)."""
        info = {"mu": self.mu, "y_tilde": self.y_tilde, "basis": self.basis}
        return Dataset(self.x, self.y, self.name, None, info, self.group)


@checked
def quadratic_task(
    x: Annotated[Tensor, shaped(2, finite=True)],
    y: Annotated[Tensor, shaped(1, finite=True)],
    name: str,
    group: Tensor,
    basis: Basis = "lapack",
) -> QuadraticTask:
    """The modes of any full-row-rank data x [n, d], y [n].

    `basis` fixes the vectors inside each eigenspace of equal mu: "lapack" takes what the SVD returns, "aligned" turns
    the first vector of the eigenspace onto the part of y that lies in it, an int turns them by a seeded random
    rotation.
    """
    x, y = x.double(), y.double()
    n = len(x)
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    if len(s) < n or float(s[-1]) <= 1e-10 * float(s[0]):
        raise InputError(f"x {list(x.shape)} must have full row rank (d >= n, independent rows)")
    mu = s**2
    if basis != "lapack":
        left = _turn_degenerate(left, mu, y, basis)
    coefficients = left.T @ y
    left = left * torch.where(coefficients < 0, -1.0, 1.0)
    right = x.T @ left / s  # the right vectors that belong to the turned and flipped left ones
    y_mode = (left.T @ y).clamp_min(0)
    return QuadraticTask(x, y, mu, left, right, y_mode, s * y_mode, group.long(), name, basis)


def _turn_degenerate(u: Tensor, mu: Tensor, y: Tensor, basis: Literal["aligned"] | int) -> Tensor:
    rng = None if basis == "aligned" else generator(basis)
    u, start = u.clone(), 0
    for end in range(1, len(mu) + 1):
        if end < len(mu) and float(mu[end - 1] - mu[end]) <= 1e-9 * float(mu[0]):
            continue
        if end - start > 1:
            block = u[:, start:end]
            if rng is not None:
                turn = random_orthogonal(end - start, seed=rng)
            else:
                inside = block.T @ y
                eye = torch.eye(end - start, dtype=u.dtype)
                # QR of [direction, identity] keeps the direction first; a zero direction leaves the block as it is
                turn = torch.linalg.qr(torch.cat([inside[:, None], eye], 1)).Q if float(inside.norm()) > 0 else eye
            u[:, start:end] = block @ turn
        start = end
    return u


def _examples(n: int, q: int, d: int, features: int, eta: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, d] (kappa y, and behind `features` an entry of its own each), y = +-1 [n], kappa = -1 for the last q."""
    if not 0 <= q <= n or d < n + features:
        raise InputError(f"need q in 0..{n} and d >= n + {features}, got q={q} and d={d}")
    y = 2.0 * torch.randint(2, (n,), generator=generator(seed)) - 1
    kappa = torch.ones(n)
    kappa[n - q :] = -1
    x = torch.zeros(n, d, dtype=torch.float64)
    x[:, 0] = kappa * y
    x[torch.arange(n), torch.arange(n) + features] = eta
    return x, y.double(), kappa


@checked
def quadratic_example1(mu: Sequence[Finite] = (9, 8, 7, 6, 5)) -> QuadraticTask:
    """x_i = sqrt(mu_i) e_i, y_i = mu_{n-i+1}/sqrt(mu_i): linear learns low indices first, non-linear high.

    Example:
        >>> quadratic_example1().y_tilde.round(decimals=6).tolist()
        [5.0, 6.0, 7.0, 8.0, 9.0]
    """
    values = torch.tensor(mu, dtype=torch.float64)
    if len(values) < 1 or float(values.min()) <= 0 or bool((values.diff() > 0).any()):
        raise InputError(f"mu must be positive and in descending order, got {list(mu)}")
    y = values.flip(0) / values.sqrt()
    return quadratic_task(torch.diag(values.sqrt()), y, "quadratic-1", torch.zeros(len(values)))


@checked
def quadratic_example2(
    n: int = 20, q: int = 5, eta: float = 5.0, d: int = 200, *, basis: Basis = "lapack", seed: int = 0
) -> QuadraticTask:
    """Label noise: x_i = kappa_i y_i e_1 + eta e_{i+1}, kappa = -1 for the q noisy examples (`group` 1).

    mu_1 = n + eta^2, all others eta^2. Noisy labels are learnt last whatever the basis iff
    (n - 2q) sqrt(n + eta^2) > 2 eta sqrt(q (n - q)); with the defaults that fails, and "aligned" shows the opposite
    order.

    Example:
        >>> quadratic_example2(basis="aligned").y_tilde[:2].round(decimals=3).tolist()
        [15.0, 19.365]
    """
    x, y, kappa = _examples(n, q, d, 1, eta, seed)
    return quadratic_task(x, y, "quadratic-2", kappa < 0, basis)


@checked
def quadratic_example3(
    n: int = 20,
    q: int = 5,
    eta: float = 10.0,
    lam: float = 1.0,
    d: int = 200,
    *,
    basis: Basis = "lapack",
    seed: int = 0,
) -> QuadraticTask:
    """A spurious feature: x_i = kappa_i y_i e_1 + lam y_i e_2 + eta e_{i+2}; `group` 1 is the minority (kappa = -1).

    The spurious feature is e_1 and the core feature e_2 (the thesis's text has them swapped).

    Example:
        >>> quadratic_example3().y_tilde[:2].round(decimals=3).tolist()
        [44.159, 23.452]
    """
    x, y, kappa = _examples(n, q, d, 2, eta, seed)
    x[:, 1] = lam * y
    return quadratic_task(x, y, "quadratic-3", kappa < 0, basis)
