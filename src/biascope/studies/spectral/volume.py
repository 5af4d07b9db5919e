"""Appendix A.4: parameters that express high frequencies fill a small and shrinking share of parameter space.

Parameters are drawn uniformly from [-clip, clip]^P; the share of those with |f~(k')| > eps for some k' > k is an
unbiased estimate of the relative volume of Xi_eps(k). The proposition bounds it by O(k^{-2}) for one input.

Verdict rule: "confirmed" if for every eps the slope of log share over log k on the cut-offs where it has fallen below
one half (and every batch has samples left) is at most -2, two standard errors (of independent batches) included; "not
tested" if an eps has no such slope. Cut-offs: cycles on [0, 1]. (Changed after the first runs: a slope had passed
unless it was above -2 by two standard errors, and the share was asked not to rise with k, which it cannot.)
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import torch

from biascope.seeds import derive
from biascope.spectral import high_frequency_volume
from biascope.studies.estimates import curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult, Verdict
from biascope.studies.runs import Run, Value

CLAIM = "The relative volume of parameters that contribute to frequencies above k decays with k, as O(k^-2) or faster."
BATCHES = 8
EPS, CUTOFFS = (0.03, 0.1, 0.3), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@study(
    "spectral/volume",
    paper="alignment",
    figure="A.4",
    claim=CLAIM,
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
    """The share of parameter space that holds high frequencies."""
    widths = (1, *[width] * (depth - 1), 1)
    size = max(1, samples // BATCHES)

    def scale() -> dict[str, Value]:
        """A threshold that half of the parameters exceed at k > 0: the unit of eps, found by bisection."""
        low, high = -12.0, 12.0
        for _ in range(20):
            middle = (low + high) / 2
            found = high_frequency_volume(
                widths, clip, 10**middle, (0,), 400, grid, derive(run.seed, "scale"), run.device
            )
            low, high = (middle, high) if float(found.volume[0]) > 0.5 else (low, middle)
        return {"unit": 10**low}

    unit = float(torch.as_tensor(run.cached("scale", scale)["unit"]))

    def batch(threshold: float, i: int) -> dict[str, Value]:
        seed = derive(run.seed, "volume", threshold, i)
        found = high_frequency_volume(widths, clip, threshold * unit, cutoffs, size, grid, seed, run.device)
        return {"share": found.volume}

    numbers: dict[str, Estimate] = {"unit of eps": Estimate(unit)}
    series, slopes = [], list[Estimate]()
    for threshold in eps:
        parts = run.cached_each(f"eps {threshold:g} batch", range(BATCHES), partial(batch, threshold))
        share = torch.stack([torch.as_tensor(p["share"]) for p in parts])  # [batches, cut-offs]
        mean = share.mean(0)
        tail = [i for i in range(len(cutoffs)) if mean[i] < 0.5 and share[:, i].min() > 0]
        if len(tail) >= 2:
            x = torch.tensor([math.log(cutoffs[i]) for i in tail], dtype=torch.float64)
            y = share[:, tail].log()
            x = x - x.mean()
            slope = Estimate.of((y * x).sum(1) / x.square().sum())
            slopes.append(slope)
            numbers[f"log-log slope of the volume, eps = {threshold:g}"] = slope
        for i, cut in enumerate(cutoffs):
            numbers[f"volume, eps = {threshold:g}, k = {cut}"] = Estimate.of(share[:, i])
        series.append(curve(f"eps = {threshold:g}", cutoffs, share))
    return StudyResult(
        verdict=verdict_of(slopes, len(eps)),
        claim=CLAIM,
        measured=f"Log-log slopes of the share over k where it is below one half: "
        f"{', '.join(str(s) for s in slopes) or 'none measured'} for {len(slopes)} of {len(eps)} eps. {samples} "
        f"parameter vectors, {depth} Linear layers of {width} units, clip {clip:g}; eps in units of the median of the "
        "largest |f~|.",
        numbers=numbers,
        figures=(
            Chart(
                "volume",
                "Share of parameters that express frequencies above k",
                "cut-off k, cycles",
                "share",
                tuple(series),
                alt="The share falls with the cut-off for every threshold.",
                log_x=True,
            ),
        ),
    )


def verdict_of(slopes: Sequence[Estimate], wanted: int, bound: float = -2.0) -> Verdict:
    """The verdict on the slopes that could be measured, of the `wanted` ones: all must be surely at most the bound.

    Example:
        >>> steep, noisy = Estimate(-4.3, 0.1), Estimate(-1.5, 0.3)
        >>> verdict_of([steep], 1), verdict_of([noisy], 1), verdict_of([steep], 2)
        ('confirmed', 'not confirmed', 'not tested')
    """
    if not all(slope.value + 2 * (slope.standard_error or 0.0) <= bound for slope in slopes):
        return "not confirmed"
    return "confirmed" if len(slopes) == wanted else "not tested"
