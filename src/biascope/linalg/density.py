"""Spectral density by stochastic Lanczos quadrature (Ubaru, Chen, Saad 2017); moments and log-determinant from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.arguments import as_number, as_whole, check_count, check_tensor
from biascope.errors import InputError
from biascope.linalg.lanczos import check_eigen_arguments
from biascope.linalg.operator import LinearOperator, need_operator
from biascope.linalg.random import Probes, blocks_of_probes
from biascope.linalg.stable import column_dots
from biascope.linalg.trace import Estimate, mean_estimate


@dataclass(frozen=True)
class Density:
    """The spectral density of an operator [n, n], as one Gauss quadrature per probe.

    Attributes:
        nodes: [probes, steps] Ritz values, float64.
        weights: [probes, steps], each row sums to 1.
        size: n.
        matvecs: products with one vector.
        seed: of the probes.
    """

    nodes: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    size: int
    matvecs: int
    seed: int

    def integrate(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """Mean of f over the spectrum, tr f(A) / n; exact in each probe for polynomials of degree < 2 steps."""
        values = torch.where(
            self.weights > 0, f(self.nodes), torch.zeros_like(self.nodes)
        )  # nodes of no weight: padding
        return mean_estimate((self.weights * values).sum(1), self.matvecs, self.seed)

    def moment(self, k: int) -> Estimate:
        """tr A^k / n."""
        if as_whole(k, "k") < 0:
            raise InputError(f"moment needs k >= 0, not {k}")
        return self.integrate(lambda x: x**k)

    def evaluate(self, grid: Tensor, sigma: float) -> Tensor:
        """Density on a grid [g], each node widened to a Gaussian of standard deviation sigma; integrates to 1."""
        sigma = as_number(sigma, "sigma")
        if not sigma > 0:
            raise InputError(f"sigma must be positive, not {sigma}")
        return self._mean_over_probes(
            grid, lambda d: torch.exp(-0.5 * (d / sigma).square()) / (sigma * math.sqrt(2 * math.pi))
        )

    def cumulative(self, grid: Tensor) -> Tensor:
        """Share of the eigenvalues <= each point of a grid [g]."""
        return self._mean_over_probes(grid, lambda d: (d >= 0).to(d.dtype))

    def _mean_over_probes(self, grid: Tensor, shape: Callable[[Tensor], Tensor]) -> Tensor:
        grid = check_tensor(grid, "grid").to(self.nodes)
        if grid.ndim != 1:
            raise InputError(f"grid must be a vector [g], not shape {list(grid.shape)}")
        total = torch.zeros_like(grid)
        for nodes, weights in zip(self.nodes, self.weights):
            total += shape(grid[:, None] - nodes) @ weights
        return total / len(self.nodes)


def spectral_density(
    A: LinearOperator,
    probes: int = 8,
    steps: int = 64,
    seed: int = 0,
    kind: Probes = "gaussian",
    reorthogonalise: bool = True,
    block: int = 1,
) -> Density:
    """Spectral density of a symmetric operator [n, n] from `probes * steps` products.

    Args:
        A: symmetric operator.
        probes: random vectors; the sampling error falls as 1 / sqrt(probes * n).
        steps: Lanczos steps, that is quadrature nodes per probe.
        seed: of the probes.
        kind: "gaussian" or "rademacher".
        reorthogonalise: keep all `steps * block` vectors, so that no eigenvalue is counted twice.
        block: probes run side by side, for operators that like blocks.

    Example:
        >>> import torch
        >>> from biascope.linalg import Diagonal
        >>> rho = spectral_density(Diagonal(torch.linspace(0, 1, 200).double()), probes=4, steps=20)
        >>> abs(float(rho.moment(1)) - 0.5) < 0.05
        True
    """
    check_eigen_arguments(A, 1, "LA", None)
    steps = min(check_count(steps, "steps"), A.shape[0])
    nodes, weights = [], []
    with torch.no_grad():
        for Z in blocks_of_probes(A, probes, seed, kind, block):
            alpha, beta = lanczos_tridiagonal(A, Z, steps, reorthogonalise)
            T = torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
            theta, S = torch.linalg.eigh(T)
            nodes.append(theta)
            weight = S[:, 0, :].square()
            weights.append(torch.where(weight > 1e-28, weight, 0.0))  # below is rounding of the padding
    return Density(torch.cat(nodes), torch.cat(weights), A.shape[0], probes * steps, seed)


def logdet(A: LinearOperator, probes: int = 16, steps: int = 64, seed: int = 0) -> Estimate:
    """log det A of a positive definite operator, as n times the mean of log over the spectrum.

    Example:
        >>> import torch
        >>> from biascope.linalg import Identity
        >>> round(float(logdet(2.0 * Identity(10), probes=2)), 4)
        6.9315
    """
    density = spectral_density(A, probes, steps, seed, kind="rademacher")
    if bool((density.nodes[density.weights > 0] <= 0).any()):
        raise InputError(
            f"logdet: {A!r} is not positive definite (a Ritz value is <= 0); add damping with damped(A, lam)"
        )
    mean = density.integrate(lambda x: x.clamp(min=torch.finfo(x.dtype).tiny).log())
    n = A.shape[0]
    return Estimate(n * mean.value, n * mean.standard_error, mean.samples, mean.matvecs, seed)


def lanczos_tridiagonal(
    A: LinearOperator, starts: Tensor, steps: int, reorthogonalise: bool = True
) -> tuple[Tensor, Tensor]:
    """Lanczos coefficients of every column of starts [n, b]: diagonals [b, steps] and off-diagonals [b, steps - 1].

    float64, on the CPU. A column whose Krylov space is exhausted goes on with zeros, which carry no quadrature weight.

    Example:
        >>> import torch
        >>> from biascope.linalg import Identity
        >>> lanczos_tridiagonal(3.0 * Identity(4), torch.ones(4, 1), steps=2)[0]
        tensor([[3., 0.]], dtype=torch.float64)
    """
    need_operator(A)._need_square("Lanczos")
    n = A.shape[0]
    if check_tensor(starts, "starts").shape[:1] != (n,) or starts.ndim != 2 or starts.dtype != A.dtype:
        raise InputError(f"starts must be [{n}, b] of {A.dtype}, not {list(starts.shape)} of {starts.dtype}")
    steps = check_count(steps, "steps")
    eps = torch.finfo(starts.dtype).eps
    v, before = starts / starts.norm(dim=0), torch.zeros_like(starts)
    basis = starts.new_zeros(steps if reorthogonalise else 0, *starts.shape)
    alphas, betas = [], []
    beta = torch.zeros(starts.shape[1], dtype=torch.float64, device=starts.device)
    scale = torch.zeros_like(beta)
    for step in range(steps):
        w = A._matmat(v)
        if not torch.isfinite(w).all():
            raise InputError(f"{A!r} gave NaN or infinity in Lanczos step {step + 1}")
        scale = torch.maximum(scale, w.norm(dim=0).double())
        alpha = column_dots(v, w)
        alphas.append(alpha)
        if step == steps - 1:
            break
        w = w - alpha.to(w) * v - beta.to(w) * before
        if reorthogonalise:
            basis[step] = v
            for _ in range(2):
                known = basis[: step + 1]
                w = w - torch.einsum("jnb,jb->nb", known, torch.einsum("jnb,nb->jb", known, w))
        beta = w.norm(dim=0).double()
        beta = torch.where(beta > 100 * eps * scale, beta, 0.0)
        betas.append(beta)
        before, v = v, torch.where(beta > 0, w / torch.where(beta > 0, beta, 1.0).to(w), 0.0)
    off = torch.stack(betas, 1) if betas else beta.new_zeros(starts.shape[1], 0)
    return torch.stack(alphas, 1).cpu(), off.cpu()
