"""Propositions 6.1 and 6.2 on kernels with finitely many eigenfunctions, where everything is linear algebra.

Measured is the largest of |f_t| on the other domain relative to f_t: 0 means that the task arithmetic property holds.
Localised eigenfunctions: random orthonormal ones, each on one domain. Locally independent ones that are not localised:
Fourier atoms on a ring cut in two. Dependent ones can cancel on a domain (the remark after 6.2).
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import generator


@study("editing/propositions", sizes={"smoke": {"draws": 10}, "laptop": {}, "paper": {}})
def propositions(
    run: Run,
    *,
    points: Annotated[int, "on each of the two domains"] = 40,
    atoms: Annotated[int, "eigenfunctions that represent a task"] = 12,
    draws: Annotated[int, "pairs of tasks"] = 200,
) -> StudyResult:
    """Interference of two tasks by how their eigenfunctions are localised."""
    domain, rng = torch.arange(2 * points) < points, generator(run.seed, "tasks")
    local = torch.zeros(2 * points, 2 * atoms, dtype=torch.float64)
    for t, inside in enumerate((domain, ~domain)):
        own = torch.randn(points, atoms, generator=rng, dtype=torch.float64)
        local[inside, t * atoms : (t + 1) * atoms] = torch.linalg.qr(own).Q
    ring = _fourier(2 * points, atoms)
    halves = local[:, :atoms] + local[:, atoms:]  # on both domains, dependent on each with the next ones
    mixed = torch.cat([halves, local[:, :atoms] - local[:, atoms:]], 1) / 2**0.5  # orthonormal, none localised
    spans = {"localised": local[:, :atoms], "Fourier on a ring": ring, "dependent on a domain": mixed}

    def worst(phi: Tensor) -> float:
        """Smallest share of the energy outside the first domain, over all functions of the span."""
        return float(torch.linalg.svdvals(phi[~domain])[-1].square()) if len(phi.T) <= points else 0.0

    def drawn(phi: Tensor) -> Tensor:
        f = phi @ torch.randn(phi.shape[1], draws, generator=generator(run.seed, "draws"), dtype=torch.float64)
        return f[~domain].square().sum(0) / f.square().sum(0)

    shares = {name: drawn(phi) for name, phi in spans.items()}
    least = {name: worst(phi) for name, phi in spans.items()}
    rank = int((torch.linalg.svdvals(ring[domain]) > 1e-12).sum())
    numbers = {
        "interference of localised tasks, largest": Estimate(float(shares["localised"].max())),
        "interference of Fourier tasks, smallest of all functions": Estimate(least["Fourier on a ring"]),
        "Fourier atoms independent on a domain": Estimate(rank),
        "Fourier atoms": Estimate(ring.shape[1]),
        "dependent eigenfunctions: smallest interference of all functions": Estimate(least["dependent on a domain"]),
        "dependent eigenfunctions: smallest energy of one outside a domain": Estimate(
            float(mixed[~domain].square().sum(0).min())
        ),
    }
    return StudyResult(
        measured=f"Tasks of localised eigenfunctions have at most {float(shares['localised'].max()):.1e} of their "
        f"energy on the other domain; any function of the {ring.shape[1]} Fourier atoms, {rank} of which are "
        f"independent there, at least {least['Fourier on a ring']:.1e}. Eigenfunctions that are dependent on a domain "
        f"allow {least['dependent on a domain']:.1e}, though each has half of its energy there.",
        numbers=numbers,
        figures=(
            Chart(
                "interference", "Energy of a task on the other domain", "pair of tasks, sorted", "share of energy",
                tuple(Series.of(name, range(1, draws + 1), each.sort().values) for name, each in shares.items()),
                alt="Zero for localised eigenfunctions, about a half for the others.",
            ),
        ),
    )  # fmt: skip


def _fourier(n: int, atoms: int) -> Tensor:
    """The first orthonormal Fourier atoms on a ring of n points, [n, atoms]."""
    angle = 2 * torch.pi * torch.arange(n, dtype=torch.float64) / n
    rows = [torch.ones_like(angle) / 2**0.5]
    for k in range(1, atoms // 2 + 1):
        rows += [torch.cos(k * angle), torch.sin(k * angle)]
    return torch.stack(rows[:atoms], 1) * math.sqrt(2 / n)
