"""Figs. 17 to 19: directions by Algorithm 2, the mixed derivative d2f/dtheta dx, held against Algorithm 1.

As printed, Algorithm 2 averages the mixed derivative over networks before it is squared (which goes to zero) and resets
its accumulator; what is meant, the eigenvectors of E[H^T H], is computed here at one Gaussian input. Its derivative by
x is a finite difference in the paper (of a width it does not give), exact here by default, and the kept run is of that
kind: with `derivative="finite-difference"` the directions are others, far closer to those of Algorithm 1.

Rule for the verdict, set before any run, over independent groups of networks: the Fourier energy of the first k
directions of Algorithm 2 correlates by more than 0.5 with that of Algorithm 1, even two standard errors down
("aligned"); and the spans of two groups overlap less for Algorithm 2 than for Algorithm 1 with as many networks, by two
standard errors ("noisier").
"""

from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from biascope.ensembles import record
from biascope.geometry import nads
from biascope.geometry.anisotropy import Method
from biascope.linalg import subspace_overlap
from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.studies.estimates import above, curve, difference
from biascope.studies.nad import anisotropy as a
from biascope.studies.nad import directional as d
from biascope.studies.nad.fig5 import energy
from biascope.studies.pictures import direction_picture
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = "The directions found by Algorithm 2 are aligned in the spectrum with those of Algorithm 1, but noisier."


@study(
    "nad/fig17",
    paper="nad",
    figure="17",
    claim=CLAIM,
    sizes={
        "smoke": {"image_size": 16, "networks": 16, "mixed": 8, "groups": 4, "k": 3},
        "laptop": {"networks": 128, "mixed": 64, "groups": 4, "k": 5},
        "paper": {},
    },
)
def fig17(
    run: Run,
    *,
    net: d.Net = "lenet",
    image_size: d.Side = 32,
    width: d.Width = 0,
    k: Annotated[int, "leading directions compared"] = 10,
    networks: a.Networks = 2000,
    mixed: Annotated[int, "networks for Algorithm 2, in all groups together"] = 2048,
    groups: Annotated[int, "independent groups of networks, for the error bars"] = 8,
    head: a.Head = "marginal",
    step: a.Step = 100.0,
    derivative: Annotated[
        Literal["exact", "finite-difference"], "by x, of Algorithm 2; the paper takes differences of width `step`"
    ] = "exact",
    reuse: a.Reuse = "",
    precision: d.Arithmetic = "auto",
) -> StudyResult:
    """Directions by Algorithm 2 and their overlap with those of Algorithm 1."""
    shape, size = (1, image_size, image_size), max(1, mixed // groups)
    factory = record(d.architecture(net, image_size, outputs=1, width=width))
    first, _ = a.directions_of(run, a.Source(net, image_size, width, networks, head, step, reuse), precision)
    x = torch.randn(shape, generator=generator(run.seed, "x"))  # one point for all groups: part of the question

    def group(method: Method, i: int) -> dict[str, Value]:
        seed = derive(run.seed, method, i)
        kind = derivative if method == "mixed-derivative" else "exact"
        h = 100.0 if method == "mixed-derivative" and kind == "exact" else step  # not used there
        found = nads(factory, shape, size, method, h, run.device, seed, top=k, x=x, derivative=kind)
        return {"directions": found.directions[:, 0].float(), "eigenvalues": found.eigenvalues}

    def all_groups(method: Method) -> list[Tensor]:
        made = run.cached_each(method, progress(range(groups), method), partial(group, method))
        return [torch.as_tensor(each["directions"]).double() for each in made]

    second, plain = all_groups("mixed-derivative"), all_groups("finite-difference")
    reference = first[:k].double()
    aligned = Estimate.of([spectral_correlation(each, reference) for each in second])
    overlap = Estimate.of([_overlap(each, reference) for each in second])
    numbers = {
        "correlation of the Fourier energies of Algorithms 1 and 2": aligned,
        f"overlap of the spans of the first {k}": overlap,
        "overlap of random spans": Estimate(k / image_size**2),
    }
    noise = None
    if groups >= 4:
        stable = {
            label: Estimate.of([_overlap(made[i], made[i + 1]) for i in range(0, groups - 1, 2)])
            for label, made in (("Algorithm 1", plain), ("Algorithm 2", second))
        }
        numbers |= {f"overlap between groups of {size} networks, {label}": value for label, value in stable.items()}
        noise = difference(stable["Algorithm 1"], stable["Algorithm 2"])
        numbers["overlap between groups, Algorithm 1 minus Algorithm 2"] = noise
    pictured = second[0][: min(k, 10)]
    direction_picture(
        run, "algorithm-2", "Directions by Algorithm 2", pictured, [f"$u_{{{i + 1}}}$" for i in range(len(pictured))]
    )
    mean, rows = radial(reference), np.stack([radial(each) for each in second])
    chart = Chart(
        name="energy",
        title=f"Where the first {k} directions of {net} live in Fourier space",
        x_label="distance from DC, cycles per image",
        y_label="share of energy",
        series=(
            Series.of("Algorithm 1", range(len(mean)), mean),
            curve("Algorithm 2", range(len(mean)), rows, "dashed"),
        ),
        alt=f"Both curves are highest at {mean.argmax()} and {rows.mean(0).argmax()} cycles per image.",
        caption=f"{groups} groups of {size} networks for Algorithm 2; band: one standard error.",
    )
    holds = above(aligned, 0.5) and noise is not None and above(noise)
    return StudyResult(
        "not tested" if noise is None else "confirmed" if holds else "not confirmed",
        CLAIM,
        f"{net}, {groups} groups of {size} networks: the Fourier energies of the first {k} directions correlate by "
        f"{aligned}, their spans overlap by {overlap} (random {k / image_size**2:.3f}); spans of two groups overlap by "
        f"{noise if noise else 'an unknown amount'} less for Algorithm 2 than for Algorithm 1.",
        numbers,
        (chart,),
    )


def spectral_correlation(one: Tensor, other: Tensor) -> float:
    """Correlation over frequencies of the mean energies of two sets of directions [k, side, side].

    Example:
        >>> u = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> round(spectral_correlation(u, u.roll(3, -1)), 6)  # a shift does not change the energy
        1.0
    """
    pair = torch.stack([energy(one).mean(0).flatten(), energy(other).mean(0).flatten()])
    return float(torch.corrcoef(pair)[0, 1])


def radial(directions: Tensor) -> d.Array:
    """Mean energy of directions by distance from DC in whole cycles."""
    side = directions.shape[-1]
    frequency = torch.fft.fftfreq(side, 1 / side)
    radius = (frequency[:, None] ** 2 + frequency[None, :] ** 2).sqrt().round().long()
    power = energy(directions).mean(0)
    found: d.Array = (
        torch.zeros(int(radius.max()) + 1, dtype=power.dtype).index_add_(0, radius.flatten(), power.flatten()).numpy()
    )
    return found


def _overlap(one: Tensor, other: Tensor) -> float:
    return subspace_overlap(one.flatten(1).T, other.flatten(1).T)
