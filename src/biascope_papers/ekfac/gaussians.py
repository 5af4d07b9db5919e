"""Fig. 2.1: two pairs of Gaussians at the same distance in parameters, at very different distances as distributions.

N(mu, s2) has the coordinates (mu, s2). The pairs are A = (0, 1), B = (0, 2) and C, D = (-1/2, 1 - sqrt(3/4)), (1/2,
1 - sqrt(3/4)). Divergences are integrals of the densities; the Fisher-Rao distance (the length of the shortest path in
the Fisher metric diag(1 / s2, 1 / (2 s2^2))) is the one that tells the pairs apart. Nothing is sampled, so there are no
error bars.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study

NARROW = 1 - math.sqrt(0.75)
GAUSSIANS = {"A": (0.0, 1.0), "B": (0.0, 2.0), "C": (-0.5, NARROW), "D": (0.5, NARROW)}  # mu, s2


@study("ekfac/fig2.1", sizes={"smoke": {}, "laptop": {}, "paper": {}})
def fig2_1(run: Run, *, points: Annotated[int, "points of the integral over [-12, 12]"] = 100_001) -> StudyResult:
    """Parameter distance, divergence and Fisher-Rao distance of two pairs of Gaussians."""
    numbers: dict[str, Estimate] = {}
    for a, b in ("AB", "CD"):
        p, q = GAUSSIANS[a], GAUSSIANS[b]
        numbers[f"parameter distance {a}{b}"] = Estimate(math.dist(p, q))
        numbers[f"KL({a} || {b})"] = Estimate(kl(p, q, points))
        numbers[f"KL({b} || {a})"] = Estimate(kl(q, p, points))
        numbers[f"Fisher-Rao distance {a}{b}"] = Estimate(fisher_rao(p, q))
    value = {name: number.value for name, number in numbers.items()}
    x = torch.linspace(-4, 4, 321, dtype=torch.float64)
    densities = tuple(
        Series.of(f"{name}: mean {mu:g}, variance {s2:.3g}", x, log_density((mu, s2), x).exp())
        for name, (mu, s2) in GAUSSIANS.items()
    )
    return StudyResult(
        measured=f"Both pairs are at parameter distance 1; KL(A || B) = {value['KL(A || B)']:.4f}, KL(C || D) = "
        f"{value['KL(C || D)']:.4f}. Their Fisher-Rao distances are {value['Fisher-Rao distance AB']:.3f} and "
        f"{value['Fisher-Rao distance CD']:.3f}.",
        numbers=numbers,
        figures=(
            Chart("densities", "Four Gaussians", "x", "density", densities,
                  alt="A and B are wide and overlap; C and D are narrow and far apart.",
                  caption="A and B are as far from each other in (mean, variance) as C and D."),
        ),
    )  # fmt: skip


def log_density(gaussian: tuple[float, float], x: Tensor) -> Tensor:
    """log N(x | mu, s2)."""
    mu, s2 = gaussian
    return -((x - mu) ** 2) / (2 * s2) - 0.5 * math.log(2 * math.pi * s2)


def kl(p: tuple[float, float], q: tuple[float, float], points: int = 100_001) -> float:
    """KL(p || q) as an integral over [-12, 12]."""
    x = torch.linspace(-12, 12, points, dtype=torch.float64)
    a, b = log_density(p, x), log_density(q, x)
    return float(torch.trapezoid(a.exp() * (a - b), x))


def fisher_rao(p: tuple[float, float], q: tuple[float, float]) -> float:
    """Geodesic distance of two Gaussians: the half-plane (mu / sqrt 2, s) is hyperbolic with curvature -1/2."""
    (m, v), (n, w) = p, q
    gap = (m - n) ** 2 / 2 + (math.sqrt(v) - math.sqrt(w)) ** 2
    return math.sqrt(2) * math.acosh(1 + gap / (2 * math.sqrt(v * w)))
