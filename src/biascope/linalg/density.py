"""Spectral density by stochastic Lanczos quadrature (Ubaru, Chen, Saad 2017), and moments from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.linalg.operator import LinearOperator, SymmetricOperator
from biascope.linalg.random import Probes, blocks_of_probes
from biascope.linalg.stable import column_dots
from biascope.linalg.trace import SampledEstimate, mean_estimate
from biascope.support.errors import InputError
from biascope.support.limits import Count, CountOrZero, Positive, Vector
from biascope.support.signatures import checked


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

    def integrate(self, f: Callable[[Tensor], Tensor]) -> SampledEstimate:
        """Mean of f over the spectrum, tr f(A) / n; exact in each probe for polynomials of degree < 2 steps."""
        values = torch.where(self.weights > 0, f(self.nodes), 0.0)  # nodes of no weight are padding
        return mean_estimate((self.weights * values).sum(1), self.matvecs, self.seed)

    @checked
    def moment(self, k: CountOrZero) -> SampledEstimate:
        """tr A^k / n."""
        return self.integrate(lambda x: x**k)

    @checked
    def evaluate(self, grid: Vector, sigma: Positive) -> Tensor:
        """Density on a grid [g], each node widened to a Gaussian of standard deviation sigma; integrates to 1."""
        return self._mean_over_probes(
            grid, lambda d: torch.exp(-0.5 * (d / sigma).square()) / (sigma * math.sqrt(2 * math.pi))
        )

    @checked
    def cumulative(self, grid: Vector) -> Tensor:
        """Share of the eigenvalues <= each point of a grid [g]."""
        return self._mean_over_probes(grid, lambda d: (d >= 0).to(d.dtype))

    def _mean_over_probes(self, grid: Tensor, shape: Callable[[Tensor], Tensor]) -> Tensor:
        grid = grid.to(self.nodes)
        total = torch.zeros_like(grid)
        for nodes, weights in zip(self.nodes, self.weights):
            total += shape(grid[:, None] - nodes) @ weights
        return total / len(self.nodes)


@checked
def spectral_density(
    A: SymmetricOperator,
    probes: Count = 8,
    steps: Count = 64,
    seed: int = 0,
    kind: Probes = "gaussian",
    reorthogonalise: bool = True,
    block: Count = 1,
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
        >>> from biascope.linalg import aslinearoperator
        >>> A = aslinearoperator(torch.diag(torch.linspace(0, 1, 200).double()))
        >>> abs(float(spectral_density(A, probes=4, steps=20).moment(1)) - 0.5) < 0.05
        True
    """
    steps = min(steps, A.shape[0])
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


def lanczos_tridiagonal(
    A: LinearOperator, starts: Tensor, steps: int, reorthogonalise: bool = True
) -> tuple[Tensor, Tensor]:
    """Lanczos coefficients of every column of starts [n, b]: diagonals [b, steps] and off-diagonals [b, steps - 1].

    float64, on the CPU. A column whose Krylov space is exhausted goes on with zeros, which carry no quadrature weight.
    """
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
