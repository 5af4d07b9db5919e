"""Theorem 3.3, equation 7, appendix A.4 and Fig. 3.6: exact spectra of random networks, and of a Gaussian kernel."""

import math
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from biascope.spectral import amplitude_spectrum, linear_regions_1d, linear_regions_2d, rbf_eigenbasis
from biascope.spectral.decay import decay_exponent, lipschitz_bounds
from biascope.spectral.perturb import high_frequency_volume
from biascope.studies import Chart, Estimate, HeatMap, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import derive, generator, progress
from biascope_papers.spectral.fitting import draw_mlps, stacked, tensors

LINES = ("one input", "two inputs, random direction", "two inputs, normal of a side")
BATCHES = 8
EPS, CUTOFFS = (0.03, 0.1, 0.3), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@study(
    "spectral/theorem3.3",
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
    """Exponents of exact spectra of random networks, and the chain of Lipschitz bounds.

    Networks are cut into their linear regions and transformed exactly: k^-2 with one input; with two k^-3 along almost
    every direction and k^-2 along the normals of the regions' sides. max |W_eps| <= product of norms <= max-norm bound.
    """
    decay = partial(decay_exponent, k_min=k_min, k_max=k_max, bins=bins, per_bin=per_bin)

    def one(i: int) -> dict[str, Tensor | int]:
        rng = generator(run.seed, "directions", i)
        line = draw_mlps(1, 1, depth, width, derive(run.seed, "line", i)).module(0)
        flat = draw_mlps(1, 2, depth, width, derive(run.seed, "plane", i)).module(0)
        regions = linear_regions_2d(flat, (-3.0, -3.0), (3.0, 3.0))
        angle = torch.rand(directions, generator=rng, dtype=torch.float64) * torch.pi
        generic = sorted((decay(regions, (float(a.cos()), float(a.sin()))) for a in angle), key=lambda d: d.exponent)
        found = (
            decay(linear_regions_1d(line, -3.0, 3.0)),
            generic[directions // 2],
            decay(regions, _longest_normal(regions.vertices)),
        )
        bounds = lipschitz_bounds(flat, torch.stack([v.mean(0) for v in regions.vertices]))
        return {
            "exponents": torch.tensor([d.exponent for d in found]),
            "bounds": torch.tensor([bounds.local_max, bounds.spectral_product, bounds.maxnorm_bound]).double(),
            "regions": len(regions),
            "k": torch.stack([d.k for d in found]),
            "envelope": torch.stack([d.envelope for d in found]),
        }

    parts = run.cached_each("network", progress(range(networks), "networks"), one)
    exponents, bounds = stacked(parts, "exponents"), stacked(parts, "bounds")
    violated = int((bounds[:, :-1] > bounds[:, 1:] * (1 + 1e-9)).any(1).sum())
    numbers = {f"exponent, {name}": Estimate.of(exponents[:, i]) for i, name in enumerate(LINES)}
    straight, generic, normal = numbers.values()
    numbers["normal minus random"] = Estimate.of(exponents[:, 2] - exponents[:, 1])
    numbers["linear regions"] = Estimate.of(stacked(parts, "regions"))
    numbers["networks that violate the chain of bounds"] = Estimate(violated)
    numbers["max |W_eps| over the product of norms"] = Estimate.of(bounds[:, 0] / bounds[:, 1])
    first = tensors(parts[0])
    lines = tuple(Series.of(name, first["k"][i], first["envelope"][i]) for i, name in enumerate(LINES))
    alt = "Three straight lines on logarithmic axes, the one of random directions the steepest."
    return StudyResult(
        measured=f"Exponents: {straight} with one input, {generic} with two along random directions, {normal} along "
        f"normals; {violated} of {networks} networks violate the bounds.",
        numbers=numbers,
        figures=(
            Chart("decay", "Envelope of |f~(k)|, first network", "k", "|f~|", lines, alt=alt, log_x=True, log_y=True),
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


@study(
    "spectral/volume",
    sizes={
        "smoke": {"samples": 1600, "depth": 3, "width": 8, "grid": 512, "cutoffs": (1, 2, 3, 4, 6, 8, 12, 16)},
        "laptop": {"samples": 8_000},
        "paper": {"samples": 800_000},
    },
)
def volume(
    run: Run,
    *,
    depth: Annotated[int, "Linear layers"] = 4,
    width: Annotated[int, "units in a hidden layer"] = 16,
    clip: Annotated[float, "half side of the cube of parameters"] = 1.0,
    eps: Annotated[tuple[float, ...], "thresholds, in units of the median over parameters of the largest |f~|"] = EPS,
    cutoffs: Annotated[tuple[int, ...], "k, cycles on [0, 1]"] = CUTOFFS,
    samples: Annotated[int, "parameter vectors for each threshold"] = 800_000,
    grid: Annotated[int, "pieces on which f is interpolated"] = 2048,
) -> StudyResult:
    """The share of parameter space that holds high frequencies.

    The share of parameters drawn uniformly from [-clip, clip]^P with |f~(k')| > eps for some k' > k estimates the
    relative volume of Xi_eps(k), O(k^{-2}) by the proposition. The slope is taken where the share is below one half.
    """
    share_of = partial(high_frequency_volume, (1, *[width] * (depth - 1), 1), clip)

    def scale() -> dict[str, float]:
        """A threshold that half of the parameters exceed at k > 0: the unit of eps, found by bisection."""
        low, high = -12.0, 12.0
        for _ in range(20):
            middle = (low + high) / 2
            found = share_of(10**middle, (0,), 400, grid, derive(run.seed, "scale"), run.device)
            low, high = (middle, high) if float(found.volume[0]) > 0.5 else (low, middle)
        return {"unit": 10**low}

    unit = float(tensors(run.cached("scale", scale))["unit"])

    def batch(threshold: float, i: int) -> dict[str, Tensor]:
        seed, size = derive(run.seed, "volume", threshold, i), max(1, samples // BATCHES)
        return {"share": share_of(threshold * unit, cutoffs, size, grid, seed, run.device).volume}

    numbers: dict[str, Estimate] = {"unit of eps": Estimate(unit)}
    series, slopes = [], list[Estimate]()
    for threshold in eps:
        share = stacked(run.cached_each(f"eps {threshold:g} batch", range(BATCHES), partial(batch, threshold)), "share")
        tail = (share.mean(0) < 0.5) & (share.amin(0) > 0)  # share: [batches, cut-offs]
        if int(tail.sum()) >= 2:
            x = torch.tensor([math.log(cut) for cut in cutoffs], dtype=torch.float64)[tail]
            x = x - x.mean()
            slopes.append(Estimate.of((share[:, tail].log() * x).sum(1) / x.square().sum()))
            numbers[f"log-log slope of the volume, eps = {threshold:g}"] = slopes[-1]
        for i, cut in enumerate(cutoffs):
            numbers[f"volume, eps = {threshold:g}, k = {cut}"] = Estimate.of(share[:, i])
        series.append(curve(f"eps = {threshold:g}", cutoffs, share))
    numbers["thresholds without a slope"] = Estimate(len(eps) - len(slopes))
    title = "Share of parameters that express frequencies above k"
    alt = "The share falls with the cut-off for every threshold."
    return StudyResult(
        measured=f"Log-log slopes of the share over k where it is below one half: "
        f"{', '.join(map(str, slopes)) or 'none measured'} for {len(slopes)} of {len(eps)} eps.",
        numbers=numbers,
        figures=(Chart("volume", title, "cut-off k, cycles", "share", tuple(series), alt=alt, log_x=True),),
    )


@study("spectral/fig3.6", sizes={"smoke": {}, "laptop": {}, "paper": {}})
def fig3_6(
    run: Run,
    *,
    samples: Annotated[int, "equally spaced points in [0, 1]"] = 50,
    width: Annotated[float, "sigma of exp(-r^2 / sigma^2)"] = 0.05,
) -> StudyResult:
    """Eigenvectors of a Gaussian kernel and their Fourier transforms.

    The width of the kernel is not given in the text; above 0.2 most eigenvectors of 50 points are lost in rounding.
    """
    z = torch.linspace(0, 1, samples, dtype=torch.float64)

    def eigenvectors() -> dict[str, Tensor]:
        basis = rbf_eigenbasis(z[:, None], width)
        return {"values": basis.values, "vectors": basis.vectors}

    values, vectors = (tensors(run.cached("eigenvectors", eigenvectors))[name] for name in ("values", "vectors"))
    real = int((values > 1e-13 * values[0]).sum())
    spectra = amplitude_spectrum(vectors.T)  # [n, bins]
    changes = (vectors[1:] * vectors[:-1] < 0).sum(0)[:real]
    peak = spectra[:real].argmax(1).double()
    correlation = float(torch.corrcoef(torch.stack([torch.arange(real, dtype=torch.float64), peak]))[0, 1])
    falls = int((changes.diff() <= 0).sum())
    return StudyResult(
        measured=f"{real} of {samples} eigenvectors are above rounding; the correlation of n with the strongest "
        f"frequency is {correlation:.4f}.",
        numbers={
            "correlation of n with the strongest frequency": Estimate(correlation),
            "eigenvectors above rounding": Estimate(real),
            "share of eigenvectors above rounding": Estimate(real / samples),
            "condition number": Estimate(float(values[0] / values[real - 1])),
            "sign changes of the last": Estimate(int(changes[-1])),
            "eigenvectors with no more sign changes than the one before": Estimate(falls),
        },
        figures=(
            HeatMap.of("spectra", "Fourier transform of each eigenvector", x=range(spectra.shape[1]),
                       y=range(1, samples + 1), z=spectra.tolist(), x_label="frequency", y_label="eigenvector n",
                       z_label="amplitude", alt="The strongest frequency rises along a line with the index."),
            Chart("eigenvectors", "The first and the last eigenvector", "x", "entry",
                  (Series.of("n = 1", z, vectors[:, 0]), Series.of(f"n = {samples}", z, vectors[:, -1])),
                  alt="The first eigenvector is one hump, the last alternates from point to point."),
        ),
    )  # fmt: skip
