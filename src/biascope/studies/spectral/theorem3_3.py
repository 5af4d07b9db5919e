"""Theorem 3.3 and equation 7: how the exact spectrum of a ReLU network decays, and what bounds it.

Random networks are cut into their linear regions and transformed exactly. With one input the spectrum falls like k^-2;
with two like k^-3 along almost every direction and k^-2 along the normals of the regions' sides.

Verdict rule, over networks: "confirmed" if the mean exponents are within 0.25 of -2, -3 and -2, the second is below the
third by two standard errors, and no network violates max |W_eps| <= product of spectral norms <= max-norm bound.
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.spectral import decay_exponent, linear_regions_1d, linear_regions_2d, lipschitz_bounds
from biascope.studies.estimates import above
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.fitting import draw_mlps

CLAIM = (
    "The spectrum of a ReLU network of d inputs decays like k^-(d+1) in almost every direction and as slowly as k^-2 "
    "along normals of the facets of its linear regions; its size is bounded by the Lipschitz constant."
)


@study(
    "spectral/theorem3.3",
    paper="alignment",
    figure="T3.3",
    claim=CLAIM,
    sizes={
        "smoke": {"networks": 3, "width": 6, "depth": 3, "directions": 3, "bins": 10, "per_bin": 60},
        "laptop": {"networks": 8},
        "paper": {"networks": 40},
    },
)
def theorem3_3(
    run: Run,
    *,
    networks: Annotated[int, "random networks"] = 8,
    depth: Annotated[int, "Linear layers"] = 3,
    width: Annotated[int, "units in a hidden layer"] = 10,
    directions: Annotated[int, "random directions of each network; their median counts"] = 7,
    k_min: Annotated[float, "lower end of the fit"] = 1e3,
    k_max: Annotated[float, "upper end of the fit"] = 1e5,
    bins: Annotated[int, "points of the envelope"] = 20,
    per_bin: Annotated[int, "wave numbers for each of them"] = 100,
) -> StudyResult:
    """Exponents of exact spectra of random networks, and the chain of Lipschitz bounds."""

    def one(i: int) -> dict[str, Value]:
        rng = generator(run.seed, "directions", i)
        line = draw_mlps(1, 1, depth, width, derive(run.seed, "line", i)).module(0)
        flat = draw_mlps(1, 2, depth, width, derive(run.seed, "plane", i)).module(0)
        segments = linear_regions_1d(line, -3.0, 3.0)
        regions = linear_regions_2d(flat, (-3.0, -3.0), (3.0, 3.0))
        angle = torch.rand(directions, generator=rng, dtype=torch.float64) * torch.pi
        range_of_k = {"k_min": k_min, "k_max": k_max, "bins": bins, "per_bin": per_bin}
        generic = [decay_exponent(regions, (float(a.cos()), float(a.sin())), **range_of_k) for a in angle]  # type: ignore[arg-type]
        across = decay_exponent(regions, _longest_normal(regions.vertices), **range_of_k)  # type: ignore[arg-type]
        straight = decay_exponent(segments, **range_of_k)  # type: ignore[arg-type]
        bounds = lipschitz_bounds(flat, torch.stack([v.mean(0) for v in regions.vertices]))
        middle = sorted(range(directions), key=lambda j: generic[j].exponent)[directions // 2]
        return {
            "exponents": torch.tensor([straight.exponent, generic[middle].exponent, across.exponent]),
            "bounds": torch.tensor([bounds.local_max, bounds.spectral_product, bounds.maxnorm_bound]).double(),
            "regions": len(regions),
            "k": torch.stack([straight.k, generic[middle].k, across.k]),
            "envelope": torch.stack([straight.envelope, generic[middle].envelope, across.envelope]),
        }

    parts = run.cached_each("network", progress(range(networks), "networks"), one)
    exponents = torch.stack([torch.as_tensor(p["exponents"]) for p in parts])
    bounds = torch.stack([torch.as_tensor(p["bounds"]) for p in parts])
    violated = int(((bounds[:, 0] > bounds[:, 1] * (1 + 1e-9)) | (bounds[:, 1] > bounds[:, 2] * (1 + 1e-9))).sum())
    names = ("one input", "two inputs, random direction", "two inputs, normal of a side")
    numbers = {f"exponent, {name}": Estimate.of(exponents[:, i]) for i, name in enumerate(names)}
    line, generic, normal = numbers.values()
    slower = Estimate.of(exponents[:, 2] - exponents[:, 1])
    numbers["normal minus random"] = slower
    numbers["linear regions"] = Estimate.of([float(torch.as_tensor(p["regions"])) for p in parts])
    numbers["networks that violate the chain of bounds"] = Estimate(violated)
    numbers["max |W_eps| over the product of norms"] = Estimate.of(bounds[:, 0] / bounds[:, 1])
    near = all(abs(e.value - v) < 0.25 for e, v in ((line, -2), (generic, -3), (normal, -2)))
    first = parts[0]
    return StudyResult(
        verdict="confirmed" if near and above(slower, 0.0) and not violated else "not confirmed",
        claim=CLAIM,
        measured=f"Exponents: {line} with one input, {generic} with two along random directions, {normal} along "
        f"normals; {violated} of {networks} networks violate the bounds.",
        numbers=numbers,
        figures=(
            Chart(
                "decay",
                "Envelope of |f~(k)|, first network",
                "k",
                "|f~|",
                tuple(
                    Series.of(name, torch.as_tensor(first["k"])[i], torch.as_tensor(first["envelope"])[i])
                    for i, name in enumerate(names)
                ),
                alt="Three straight lines on logarithmic axes, the one of random directions the steepest.",
                log_x=True,
                log_y=True,
            ),
        ),
    )


def _longest_normal(polygons: tuple[Tensor, ...]) -> tuple[float, float]:
    """Normal of the longest side that lies inside the box (sides of the box itself belong to no facet)."""
    best, found = 0.0, (1.0, 0.0)
    for v in polygons:
        for p, q in zip(v, v.roll(-1, 0)):
            on_box = bool(((p.abs() - 3).abs() < 1e-9).any() and ((q.abs() - 3).abs() < 1e-9).any())
            length = float((q - p).norm())
            if length > best and not on_box:
                best, found = length, (float(q[1] - p[1]), float(p[0] - q[0]))
    return found
