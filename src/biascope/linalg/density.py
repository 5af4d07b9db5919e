"""Spectral density by stochastic Lanczos quadrature (Ubaru, Chen and Saad, 2017)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from biascope.linalg.operator import LinearOperator, SymmetricOperator
from biascope.linalg.random import blocks_of_probes
from biascope.linalg.spread import combined, coordinates, dots, norms
from biascope.linalg.trace import SampledEstimate, mean_estimate
from biascope.support.errors import InputError
from biascope.support.figures import BLUE, axes_or_new, log_scale, once
from biascope.support.limits import Count, Positive, Vector
from biascope.support.signatures import checked
from biascope.support.tables import one_line

WIDTH = 0.01  # of the spectrum, by which a picture widens every node


@dataclass(frozen=True)
class SpectralDensity:
    """The spectrum of an operator [n, n] as one Gauss quadrature per probe.

    A probe that has fewer different eigenvalues than steps ends early; the nodes that are left have weight 0.

    Attributes:
        nodes: [probes, steps] Ritz values, float64.
        weights: [probes, steps], the share of the eigenvalues that each stands for; every row sums to 1.
        size: n.
        matvecs: products with one vector.
        seed: of the probes.
    """

    nodes: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    size: int
    matvecs: int
    seed: int
    __repr__ = one_line

    def integrate(self, f: Callable[[Tensor], Tensor]) -> SampledEstimate:
        """tr f(A) / n, the mean of f over the spectrum; exact in each probe for polynomials of degree < 2 steps."""
        values = torch.where(self.weights > 0, f(self.nodes), 0.0)
        return mean_estimate((self.weights * values).sum(1), self.matvecs, self.seed)

    @checked
    def evaluate(self, grid: Vector, sigma: Positive) -> SampledEstimate:
        """Density at the points of a grid [g], each node widened to a Gaussian of standard deviation sigma."""
        grid, scale = grid.to(self.nodes), sigma * math.sqrt(2 * math.pi)
        each = [
            torch.exp(-0.5 * ((grid[:, None] - x) / sigma).square()) @ w / scale
            for x, w in zip(self.nodes, self.weights)
        ]
        return mean_estimate(torch.stack(each), self.matvecs, self.seed)

    def plot(self, ax: Any = None) -> Any:
        """Density on a logarithmic axis, with a band of its standard error; returns the matplotlib figure."""
        ax = axes_or_new(ax)
        seen = self.nodes[self.weights > 0]
        low, high = float(seen.min()), float(seen.max())
        sigma = WIDTH * (high - low) or WIDTH * (abs(high) or 1.0)
        grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, 800, dtype=torch.float64, device="cpu")
        found = self.evaluate(grid, sigma)
        mean, error = found.value, found.standard_error.nan_to_num()
        ax.plot(grid, mean, color=BLUE, lw=1.2)
        ax.fill_between(grid, mean - error, mean + error, color=BLUE, alpha=0.25, lw=0)
        log_scale(ax, "y")
        one = 1 / (self.size * sigma * math.sqrt(2 * math.pi))  # the peak of a single eigenvalue
        ax.set_ylim(0.3 * min(one, float(mean.max())), 3 * float(mean.max()))
        ax.set_xlabel(r"eigenvalue $\lambda$")
        ax.set_ylabel("density")
        ax.set_title(f"{len(self.nodes)} probes, {self.nodes.shape[1]} steps")
        return once(ax.figure)


@checked
def spectral_density(
    A: SymmetricOperator,
    probes: Count = 8,
    steps: Count = 64,
    seed: int = 0,
    reorthogonalise: bool = True,
    block: Count = 1,
) -> SpectralDensity:
    """Behind `LinearOperator.spectral_density`."""
    steps = min(steps, A.shape[0])
    nodes, weights = [], []
    with torch.no_grad():
        for Z in blocks_of_probes(A, probes, seed, "gaussian", block):
            diagonal, off = tridiagonal(A, Z, steps, reorthogonalise)
            T = torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
            theta, S = torch.linalg.eigh(T)
            weight = S[:, 0].square()
            nodes.append(theta)
            weights.append(torch.where(weight > 1e-28, weight, 0.0))  # below is rounding, of nodes that stand for none
    return SpectralDensity(torch.cat(nodes), torch.cat(weights), A.shape[0], probes * steps, seed)


def tridiagonal(A: LinearOperator, starts: Tensor, steps: int, reorthogonalise: bool) -> tuple[Tensor, Tensor]:
    """Lanczos coefficients of every column of starts [n, b]: diagonals [b, steps] and off-diagonals [b, steps - 1].

    In float64, on the CPU. A column whose Krylov space is exhausted goes on with zeros, which carry no weight.
    """
    v, before = starts / norms(A, starts), torch.zeros_like(starts)
    basis = starts.new_empty(starts.shape[1], steps if reorthogonalise else 0, len(starts))
    tiny = 100 * torch.finfo(starts.dtype).eps
    beta = torch.zeros(starts.shape[1], dtype=torch.float64, device=starts.device)
    scale = torch.zeros_like(beta)
    alphas, betas = [], []
    for step in range(steps):
        w = A._matmat(v)
        alpha, length = dots(A, v, w), norms(A, w).double()
        if not bool(torch.isfinite(length).all()):
            raise InputError(f"{A!r} gave NaN or infinity in Lanczos step {step + 1}")
        scale = torch.maximum(scale, length)
        alphas.append(alpha)
        if step == steps - 1:
            break
        w = w - alpha.to(w) * v - beta.to(w) * before
        if reorthogonalise:
            basis[:, step] = v.T
            for known, column in zip(basis[:, : step + 1], w.unbind(1), strict=True):
                for _ in range(2):  # the second time removes what the first left by cancellation
                    column -= combined(coordinates(A, known, column), known)
        beta = norms(A, w).double()
        beta = torch.where(beta > tiny * scale, beta, 0.0)
        betas.append(beta)
        before, v = v, torch.where(beta > 0, w / torch.where(beta > 0, beta, 1.0).to(w), 0.0)
    off = torch.stack(betas, 1) if betas else beta.new_zeros(len(beta), 0)
    return torch.stack(alphas, 1).cpu(), off.cpu()
