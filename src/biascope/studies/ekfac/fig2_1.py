"""Fig. 2.1: two pairs of Gaussians at the same distance in parameters, at very different distances as distributions.

N(mu, s2) has the coordinates (mu, s2). The pairs are A = (0, 1), B = (0, 2) and C, D = (-1/2, 1 - sqrt(3/4)), (1/2,
1 - sqrt(3/4)). Divergences are integrals of the densities; the Fisher-Rao distance (the length of the shortest path in
the Fisher metric diag(1 / s2, 1 / (2 s2^2))) is the one that tells the pairs apart.

Verdict: confirmed if both parameter distances are 1 to 1e-9 and the divergences are the printed ones, 0.097 and 3.73,
to their last digit. Nothing is sampled, so there are no error bars.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = "Two pairs of Gaussians at parameter distance 1 have the divergences 0.097 and 3.73."
NARROW = 1 - math.sqrt(0.75)
GAUSSIANS = {"A": (0.0, 1.0), "B": (0.0, 2.0), "C": (-0.5, NARROW), "D": (0.5, NARROW)}  # mu, s2
PRINTED = {"AB": (0.097, 0.0005), "CD": (3.73, 0.005)}


@study(
    "ekfac/fig2.1",
    paper="linearization",
    figure="2.1",
    claim=CLAIM,
    sizes={"smoke": {}, "laptop": {}, "paper": {}},
)
def fig2_1(run: Run, *, points: Annotated[int, "points of the integral over [-12, 12]"] = 100_001) -> StudyResult:
    """Parameter distance, divergence and Fisher-Rao distance of two pairs of Gaussians."""
    numbers: dict[str, Estimate] = {}
    met = []
    for pair, (printed, digit) in PRINTED.items():
        p, q = (GAUSSIANS[name] for name in pair)
        distance, divergence = math.dist(p, q), kl(p, q, points)
        numbers[f"parameter distance {pair}"] = Estimate(distance)
        numbers[f"KL({pair[0]} || {pair[1]})"] = Estimate(divergence)
        numbers[f"KL({pair[1]} || {pair[0]})"] = Estimate(kl(q, p, points))
        numbers[f"Fisher-Rao distance {pair}"] = Estimate(fisher_rao(p, q))
        met.append(abs(distance - 1) < 1e-9 and abs(divergence - printed) < digit)
    ab, cd = numbers["KL(A || B)"].value, numbers["KL(C || D)"].value
    return StudyResult(
        "confirmed" if all(met) else "not confirmed",
        CLAIM,
        f"Both pairs are at parameter distance 1; KL(A || B) = {ab:.4f}, KL(C || D) = {cd:.4f}. Their Fisher-Rao "
        f"distances are {numbers['Fisher-Rao distance AB'].value:.3f} and "
        f"{numbers['Fisher-Rao distance CD'].value:.3f}.",
        numbers,
        (_densities(),),
    )


def log_density(gaussian: tuple[float, float], x: Tensor) -> Tensor:
    """log N(x | mu, s2)."""
    mu, s2 = gaussian
    return -((x - mu) ** 2) / (2 * s2) - 0.5 * math.log(2 * math.pi * s2)


def kl(p: tuple[float, float], q: tuple[float, float], points: int = 100_001) -> float:
    """KL(p || q) as an integral over [-12, 12].

    Example:
        >>> round(kl((0.0, 1.0), (1.0, 1.0)), 6)
        0.5
    """
    x = torch.linspace(-12, 12, points, dtype=torch.float64)
    a, b = log_density(p, x), log_density(q, x)
    return float(torch.trapezoid(a.exp() * (a - b), x))


def fisher_rao(p: tuple[float, float], q: tuple[float, float]) -> float:
    """Geodesic distance of two Gaussians: the half-plane (mu / sqrt 2, s) is hyperbolic with curvature -1/2.

    Example:
        >>> round(fisher_rao((0.0, 1.0), (0.0, 4.0)) / (2**0.5 * math.log(2)), 6)
        1.0
    """
    (m, v), (n, w) = p, q
    gap = (m - n) ** 2 / 2 + (math.sqrt(v) - math.sqrt(w)) ** 2
    return math.sqrt(2) * math.acosh(1 + gap / (2 * math.sqrt(v * w)))


def _densities() -> Chart:
    x = torch.linspace(-4, 4, 321, dtype=torch.float64)
    return Chart(
        "densities",
        "Four Gaussians",
        "x",
        "density",
        tuple(
            Series.of(f"{name}: mean {mu:g}, variance {s2:.3g}", x, log_density((mu, s2), x).exp())
            for name, (mu, s2) in GAUSSIANS.items()
        ),
        alt="A and B are wide and overlap; C and D are narrow and far apart.",
        caption="A and B are as far from each other in (mean, variance) as C and D.",
    )
