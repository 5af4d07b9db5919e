"""Appendix D: what Algorithm 2 finds (Figs. 17 to 19), and why finite differences are as wide as h = 100 (D.1).

As printed, Algorithm 2 averages the mixed derivative d2f/dtheta dx over networks before it is squared (which goes to
zero); what is meant, the eigenvectors of E[H^T H], is computed here at one Gaussian input, by finite differences in x
as in the paper (the exact derivative leaves out the kinks). Which algorithm is noisier is asked of groups of networks
with sampled last layers, as both are printed.

For D.1 the same networks are measured at the same points with several steps h; the smallest is back-propagation but for
rounding. Measured is how far the directions are concentrated in Fourier space, and how far those found at one point, or
from the moment averaged over all points, are those found at another.
"""

from functools import partial
from itertools import combinations
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from biascope import InputError, nads
from biascope.ensembles import record
from biascope.linalg import psd_eigh, subspace_overlap
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, difference, through
from biascope.studies.pictures import direction_picture
from biascope.support import derive, generator, progress
from biascope_papers.nad import anisotropy as a
from biascope_papers.nad import directional as d

Method = Literal["mixed-derivative", "finite-difference"]
PRINTED = {"derivative": "finite-difference", "marginal": True}  # of Algorithm 2, and what stands beside the rest
K = 10  # leading directions whose spans are compared between steps


@study(
    "nad/fig17",
    sizes={
        "smoke": {"image_size": 16, "networks": 16, "mixed": 8, "groups": 4, "k": 3, **PRINTED},
        "laptop": {"networks": 128, "mixed": 64, "groups": 4, "k": 5, **PRINTED},
        "paper": PRINTED,
    },
)
def fig17(
    run: Run,
    *,
    source: a.Source = a.SOURCE,
    k: Annotated[int, "leading directions compared"] = 10,
    mixed: Annotated[int, "networks for Algorithm 2, in all groups together"] = 2048,
    groups: Annotated[int, "independent groups of networks, for the error bars"] = 8,
    derivative: Annotated[Literal["exact", "finite-difference"], "by x, of Algorithm 2 (paper: the latter)"] = "exact",
    marginal: Annotated[bool, "also groups of Algorithm 1 with the last layer averaged out"] = False,
    precision: d.Arithmetic = "auto",
) -> StudyResult:
    """Directions by Algorithm 2 and their overlap with those of Algorithm 1."""
    net, side = source.net, source.image_size
    shape, size = (1, side, side), max(1, mixed // groups)
    factory = record(d.architecture(net, side, outputs=1, width=source.width))
    reference = a.directions_of(run, source, precision)[0][:k].double()
    x = torch.randn(shape, generator=generator(run.seed, "x"))  # one point for all groups: part of the question

    def group(method: Method, head: a.Head, i: int) -> dict[str, Any]:
        seed = derive(run.seed, method, i)
        kind = derivative if method == "mixed-derivative" else "exact"
        h = 100.0 if method == "mixed-derivative" and kind == "exact" else source.step  # not used there
        found = nads(factory, shape, size, method, h, run.device, seed, top=k, x=x, derivative=kind, head=head)
        return {"directions": found.directions[:, 0].float(), "eigenvalues": found.eigenvalues}

    def all_groups(method: Method, head: a.Head = "sampled") -> list[Tensor]:
        name = method if head == "sampled" else f"{method} {head}"
        made = run.cached_each(name, progress(range(groups), name), partial(group, method, head))
        return [torch.as_tensor(each["directions"]).double() for each in made]

    second, plain = all_groups("mixed-derivative"), all_groups("finite-difference")
    aligned = Estimate.of([spectral_correlation(each, reference) for each in second])
    overlap = Estimate.of([_overlap(each, reference) for each in second])
    numbers = {
        "correlation of the Fourier energies of Algorithms 1 and 2": aligned,
        f"overlap of the spans of the first {k}": overlap,
    }
    stable = " With so few groups it is not known how far two of them overlap."
    if groups >= 4:
        one, two = (
            Estimate.of([_overlap(made[i], made[i + 1]) for i in range(0, groups - 1, 2)]) for made in (plain, second)
        )
        numbers |= {
            f"overlap between groups of {size} networks, Algorithm 1": one,
            f"overlap between groups of {size} networks, Algorithm 2": two,
            "overlap between groups, Algorithm 1 minus Algorithm 2": difference(one, two),
        }
        if marginal:
            better = all_groups("finite-difference", "marginal")
            pairs = [_overlap(better[i], better[i + 1]) for i in range(0, groups - 1, 2)]
            numbers[f"overlap between groups of {size} networks, Algorithm 1, last layer averaged out"] = Estimate.of(
                pairs
            )
        stable = f" Spans of two groups overlap by {one} (Algorithm 1) and {two} (Algorithm 2)."
    pictured = second[0][: min(k, 10)]
    titles = [f"$u_{{{i + 1}}}$" for i in range(len(pictured))]
    direction_picture(run, "algorithm-2", "Directions by Algorithm 2", pictured, titles)
    mean, rows = a.radial(reference).mean(0), np.stack([a.radial(each).mean(0) for each in second])
    chart = Chart(
        "energy",
        f"Where the first {k} directions of {net} live in Fourier space",
        "distance from DC, cycles per image",
        "share of energy",
        (
            Series.of("Algorithm 1", range(len(mean)), mean),
            curve("Algorithm 2", range(len(mean)), rows, "dashed"),
        ),
        alt=f"Both curves are highest at {mean.argmax()} and {rows.mean(0).argmax()} cycles per image.",
        caption=f"{groups} groups of {size} networks for Algorithm 2; band: one standard error.",
    )
    return StudyResult(
        measured=f"{net}, {groups} groups of {size} networks: the Fourier energies of the first {k} directions "
        f"correlate by {aligned}, their spans overlap by {overlap} (random {k / side**2:.3f}).{stable}",
        numbers=numbers,
        figures=(chart,),
    )


def spectral_correlation(one: Tensor, other: Tensor) -> float:
    """Correlation over frequencies of the mean energies of two sets of directions [k, side, side]."""
    pair = torch.stack([a.energy(one).mean(0).flatten(), a.energy(other).mean(0).flatten()])
    return float(torch.corrcoef(pair)[0, 1])


def _overlap(one: Tensor, other: Tensor) -> float:
    return subspace_overlap(one.flatten(1).T, other.flatten(1).T)


@study(
    "nad/steps",
    sizes={
        "smoke": {"image_size": 16, "networks": 8, "groups": 2, "steps": (1e-4, 100.0), "points": 2},
        "laptop": {},
        "paper": {"networks": 1000, "groups": 10, "points": 4},
    },
)
def steps(
    run: Run,
    *,
    net: d.Net = "lenet",
    image_size: d.Side = 32,
    networks: Annotated[int, "networks in all"] = 96,
    groups: Annotated[int, "independent groups of them, for the error bars"] = 4,
    steps: Annotated[tuple[float, ...], "finite-difference steps h"] = (1e-4, 1.0, 10.0, 100.0),
    points: Annotated[int, "evaluation points x, draws of N(0, I)"] = 2,
    reference: a.Reference = "",
) -> StudyResult:
    """Directions by small and large finite differences, at several points."""
    if len(steps) < 2 or points < 2 or groups < 2:
        raise InputError(f"{len(steps)} steps, {points} points, {groups} groups: at least two of each are compared")
    shape, size = (1, image_size, image_size), max(1, networks // groups)
    factory = record(d.architecture(net, image_size, outputs=1))
    x = torch.randn(points, *shape, generator=generator(run.seed, "points"))

    def group(h: float, i: int) -> dict[str, Any]:
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

    published = a.published_directions(net, reference, image_size**2)
    numbers: dict[str, Estimate] = {}
    energies = list[list[float]]()  # by step and group
    sharp, alike, averaged = list[Estimate](), list[Estimate](), list[Estimate]()
    for h in progress(sorted(steps), "steps"):
        made = [run.cached(f"step {h:g} {i}", partial(group, h, i)) for i in range(groups)]
        own, joint = ([torch.as_tensor(each[key]).double() for each in made] for key in ("points", "averaged"))
        energies.append([sharpness(U[:, :3], image_size) for U in own])
        sharp.append(Estimate.of(energies[-1]))
        averaged.append(Estimate.of([sharpness(U[None, :3], image_size) for U in joint]))
        alike.append(Estimate.of([across_points(U) for U in own]))
        numbers |= {
            f"h = {h:g}: energy of u_1 to u_3 in their strongest 5 % of frequencies": sharp[-1],
            f"h = {h:g}: the same, moment averaged over points": averaged[-1],
            f"h = {h:g}: overlap of the first {K} at two points": alike[-1],
        }
        if published is not None:
            numbers[f"h = {h:g}: overlap with the published first {K}"] = Estimate.of(
                [sum(subspace_overlap(one.T, published[:K].T) for one in U) / points for U in own]
            )
    # the same networks at both ends, so the difference is taken group by group
    gain = Estimate.of([large - small for small, large in zip(energies[0], energies[-1])])
    numbers["energy, largest step minus smallest"] = gain
    chart = Chart(
        "steps",
        f"Directions of {net} by finite differences of several widths",
        "step h",
        "share",
        (
            through("energy in the strongest 5 % of frequencies", sorted(steps), sharp),
            through("the same, averaged over points", sorted(steps), averaged, "dashed"),
            through(f"overlap of the first {K} at two points", sorted(steps), alike),
        ),
        alt="Shares against the step; at the largest step directions no longer depend on the point.",
        log_x=True,
    )
    return StudyResult(
        measured=f"{net}, {size * groups} networks: the strongest 5 % of frequencies hold {sharp[0]} of the energy of "
        f"u_1 to u_3 with h = {min(steps):g} and {sharp[-1]} with h = {max(steps):g} (about 0.2 at random).",
        numbers=numbers,
        figures=(chart,),
    )


def leading(moment: Tensor) -> Tensor:
    """The first directions [K, D] of a second moment [D, D]."""
    return psd_eigh(moment).vectors[:, :K].T.contiguous()


def sharpness(directions: Tensor, side: int) -> float:
    """Concentration of directions [points, k, D] in Fourier space, mean over points."""
    return sum(a.concentration(U.reshape(-1, side, side)) for U in directions) / len(directions)


def across_points(directions: Tensor) -> float:
    """Mean overlap of the spans of directions [points, k, D] at two different points."""
    pairs = list(combinations(directions, 2))
    return sum(subspace_overlap(one.T, other.T) for one, other in pairs) / len(pairs)
