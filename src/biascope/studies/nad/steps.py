"""Appendix D.1: why the paper takes finite differences as wide as h = 100 instead of gradients.

The same networks answer to the same evaluation points with several steps h. The smallest is back-propagation but for
rounding (float64, last layer averaged out, which back-propagation cannot do cheaply). Two things are measured for each:
how far the directions are concentrated in Fourier space, which is what made them meaningful, and how far those found
at one point are those found at another. Directions of the moment averaged over all points are measured as well: if the
point were all that is wrong with gradients, they would be as good.

Rule for the verdict, set before any run: the energy of u_1 to u_3 in their strongest 5 % of frequencies is larger with
the largest step than with the smallest, by more than two standard errors of the difference (from groups of networks).
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope.ensembles import record
from biascope.errors import InputError
from biascope.geometry import nads
from biascope.linalg import psd_eigh, subspace_overlap
from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.studies.estimates import above, decide, through
from biascope.studies.nad.anisotropy import Reference, published_directions
from biascope.studies.nad.directional import Net, architecture
from biascope.studies.nad.fig5 import concentration
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "Finite differences with h = 100 instead of back-propagation are necessary to obtain meaningful directions: they "
    "see the function on a coarser scale and hide local fluctuations."
)
K = 10  # leading directions whose spans are compared


@study(
    "nad/steps",
    paper="nad",
    figure="D.1",
    claim=CLAIM,
    sizes={
        "smoke": {"image_size": 16, "networks": 8, "groups": 2, "steps": (1e-4, 100.0), "points": 2},
        "laptop": {},
        "paper": {"networks": 1000, "groups": 10, "points": 4},
    },
)
def steps(
    run: Run,
    *,
    net: Net = "lenet",
    image_size: Annotated[int, "side of the grey input image"] = 32,
    networks: Annotated[int, "networks in all"] = 96,
    groups: Annotated[int, "independent groups of them, for the error bars"] = 4,
    steps: Annotated[tuple[float, ...], "finite-difference steps h"] = (1e-4, 1.0, 10.0, 100.0),
    points: Annotated[int, "evaluation points x, draws of N(0, I)"] = 2,
    reference: Reference = "",
) -> StudyResult:
    """Directions by small and large finite differences, at several points."""
    if len(steps) < 2 or points < 2 or groups < 2:
        raise InputError(f"{len(steps)} steps, {points} points, {groups} groups: at least two of each are compared")
    shape, size = (1, image_size, image_size), max(1, networks // groups)
    factory = record(architecture(net, image_size, outputs=1))
    x = torch.randn(points, *shape, generator=generator(run.seed, "points"))

    def group(h: float, i: int) -> dict[str, Value]:
        """First directions at each point [points, K, D] and of the average over points [K, D]."""
        seed = derive(run.seed, "networks", i)  # the same networks for every step and point
        moments = []
        for point in x:
            found = nads(factory, shape, size, step=h, device=run.device, seed=seed, x=point, head="marginal",
                         dtype=torch.float64)  # fmt: skip
            U = found.directions.flatten(1)
            moments.append((U.T * found.eigenvalues) @ U)
        own = torch.stack([leading(moment) for moment in moments])
        return {"points": own.float(), "averaged": leading(torch.stack(moments).mean(0)).float()}

    published = published_directions(net, reference, image_size**2)
    numbers: dict[str, Estimate] = {}
    energies = list[list[float]]()  # by step and group
    sharp, alike, averaged = list[Estimate](), list[Estimate](), list[Estimate]()
    for h in progress(sorted(steps), "steps"):
        made = [run.cached(f"step {h:g} {i}", lambda h=h, i=i: group(h, i)) for i in range(groups)]  # type: ignore[misc]
        own = [torch.as_tensor(each["points"]).double() for each in made]
        joint = [torch.as_tensor(each["averaged"]).double() for each in made]
        energies.append([_sharpness(U[:, :3], image_size) for U in own])
        sharp.append(Estimate.of(energies[-1]))
        averaged.append(Estimate.of([_sharpness(U[None, :3], image_size) for U in joint]))
        alike.append(Estimate.of([_across_points(U) for U in own]))
        numbers |= {
            f"h = {h:g}: energy of u_1 to u_3 in their strongest 5 % of frequencies": sharp[-1],
            f"h = {h:g}: the same, moment averaged over points": averaged[-1],
            f"h = {h:g}: overlap of the first {K} at two points": alike[-1],
        }
        if published is not None:
            theirs = published[:K].T.double()
            numbers[f"h = {h:g}: overlap with the published first {K}"] = Estimate.of(
                [sum(subspace_overlap(one.T, theirs) for one in U) / points for U in own]
            )
    # the same networks at both ends, so the difference is taken group by group
    gain = Estimate.of([b - a for a, b in zip(energies[0], energies[-1])])
    numbers["energy, largest step minus smallest"] = gain
    return StudyResult(
        decide(above(gain), [gain]),
        CLAIM,
        f"{net}, {size * groups} networks: the strongest 5 % of frequencies hold {sharp[0]} of the energy of u_1 to "
        f"u_3 with h = {min(steps):g} and {sharp[-1]} with h = {max(steps):g} (about 0.2 for random directions); "
        f"directions at two points overlap by {alike[0]} and {alike[-1]}. Averaged over {points} points: {averaged[0]} "
        f"and {averaged[-1]}.",
        numbers,
        (_chart(net, sorted(steps), sharp, averaged, alike),),
    )


def leading(moment: Tensor) -> Tensor:
    """The first directions [K, D] of a second moment [D, D].

    Example:
        >>> leading(torch.diag(torch.arange(12.0).double()))[0].abs().argmax().item()
        11
    """
    return psd_eigh(moment).vectors[:, :K].T.contiguous()


def _sharpness(directions: Tensor, side: int) -> float:
    """Concentration of directions [points, k, D] in Fourier space, mean over points."""
    return sum(concentration(U.reshape(-1, side, side)) for U in directions) / len(directions)


def _across_points(directions: Tensor) -> float:
    """Mean overlap of the spans of directions [points, k, D] at two different points."""
    pairs = [(a, b) for a in range(len(directions)) for b in range(a)]
    return sum(subspace_overlap(directions[a].T, directions[b].T) for a, b in pairs) / len(pairs)


def _chart(
    net: str, steps: list[float], sharp: list[Estimate], averaged: list[Estimate], alike: list[Estimate]
) -> Chart:
    return Chart(
        name="steps",
        title=f"Directions of {net} by finite differences of several widths",
        x_label="step h",
        y_label="share",
        series=(
            through("energy in the strongest 5 % of frequencies", steps, sharp),
            through("the same, averaged over points", steps, averaged, "dashed"),
            through(f"overlap of the first {K} at two points", steps, alike),
        ),
        alt="Shares against the step; at the largest step directions no longer depend on the point.",
        log_x=True,
    )
