"""Fig. 5.2: the Bessel functions J_n(b) that weigh the harmonics of a SIREN.

sin(b sin x) has the harmonics 2 J_n(b), n odd; a SIREN with two layers of sines is a sum of products of them (see
`fields.bessel_harmonics`). So at small weights b high harmonics are as good as absent, and at large ones they are not.

Verdict: confirmed if |J_n(b)| falls with the order n = 0, ..., `orders` at every b up to 1 (computed, no error), and in
drawn SIRENs the share of energy beyond order 3 at weights of size 1 is below 0.05 and below that at weights of size
`largest`, both by two standard errors over seeds. Not tested if a series misses its network by more than 1e-3 (root
mean square, relative): its order of truncation is too low then.
"""

from typing import Annotated

import numpy as np
import torch
from scipy.special import jv
from torch import nn

from biascope.errors import InputError
from biascope.fields import bandwidth, bessel_harmonics
from biascope.fields.networks import seeded
from biascope.nets import SIREN
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.estimates import above, below, curve, decide
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = "The Bessel functions that weigh the harmonics of a SIREN decay with their order at small argument."
SMALL, FEW = 1.0, 3  # what a small argument is, and a low order
CLOSE = 1e-3


@study(
    "fields/fig5.2",
    paper="function-space",
    figure="5.2",
    claim=CLAIM,
    sizes={"smoke": {"seeds": 3, "units": 8, "truncation": 16}, "laptop": {}, "paper": {}},
)
def fig5_2(
    run: Run,
    *,
    orders: Annotated[int, "n of J_n, from 0"] = 3,
    largest: Annotated[float, "b, the largest weight"] = 8.0,
    points: Annotated[int, "b at which J_n is drawn"] = 81,
    units: Annotated[int, "in the second layer of the drawn SIRENs; the first has two sines"] = 64,
    truncation: Annotated[int, "order of each sine at which their series are cut"] = 24,
    seeds: Annotated[int, "drawn SIRENs"] = 10,
) -> StudyResult:
    """Bessel functions, and what they do to the harmonics of drawn networks."""
    if largest <= SMALL:
        raise InputError(f"largest={largest:g} is no large weight: the rule compares it with {SMALL:g}")
    b = np.linspace(0, largest, points)
    weights = {n: jv(n, b) for n in range(orders + 1)}
    small = (b > 0) & (b <= SMALL)
    falls = bool((np.diff(np.abs([weights[n][small] for n in weights]), axis=0) < 0).all())

    sizes = [size for size in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0) if size < largest] + [largest]
    seen = progress(range(seeds), "drawn networks")
    found = run.cached_each("series", seen, lambda seed: _shares(run.seed, seed, sizes, units, truncation))
    beyond = torch.stack([torch.as_tensor(each["beyond"]) for each in found])  # [seeds, sizes]
    missed = max(float(each["missed"]) for each in found)  # type: ignore[arg-type]
    at_small = Estimate.of(beyond[:, sizes.index(SMALL)])
    more = Estimate.of(beyond[:, -1] - beyond[:, sizes.index(SMALL)])
    numbers = {
        "share of energy beyond order 3, weights of size 1": at_small,
        f"the same at weights of size {largest:g}, minus that": more,
        "largest error of a series": Estimate(missed),
    }
    numbers |= {f"harmonics with 98 % of the energy, b = {size:g}": Estimate(bandwidth(size)) for size in sizes}
    holds = falls and below(at_small, 0.05) and above(more)
    return StudyResult(
        decide(holds, [at_small, more]) if missed < CLOSE else "not tested",
        CLAIM,
        f"|J_0| to |J_{orders}| {'fall' if falls else 'do not fall'} with the order at every b up to 1. In SIRENs "
        f"with two sines and {units} units, harmonics beyond order {FEW} hold {at_small} of the energy at weights of "
        f"size 1 and {more} more at {largest:g}. Their series agree with the networks to {missed:.1e}; errors over "
        f"{seeds} seeds.",
        numbers,
        (
            Chart(
                "bessel",
                "Weights of the harmonics",
                "weight b",
                "J_n(b)",
                tuple(Series.of(f"n = {n}", b, values) for n, values in weights.items()),
                alt="Bessel functions of order 0 to 3: at small b only order 0 is large, then each rises in turn.",
                caption="Harmonics of sin(b sin t) have odd orders n, those of cos(b sin t) even ones; their "
                "amplitudes are 2 J_n(b), at order 0 J_0(b).",
            ),
            Chart(
                "beyond",
                f"Energy beyond order {FEW} in drawn SIRENs",
                "size of the weights of the second layer",
                "share of energy",
                (curve("beyond order 3", sizes, beyond),),
                alt="The share of energy in high harmonics over the size of the weights.",
                caption="Mean over seeds; band: one standard error.",
                log_x=True,
            ),
        ),
    )


def _shares(seed: int, i: int, sizes: list[float], units: int, truncation: int) -> dict[str, Value]:
    """Share of energy beyond order 3 of one network, its second layer uniform in +- each size, and the worst error."""
    net = seeded(SIREN, derive(seed, "siren", i), in_features=1, hidden=(2, units), w_h=1.0)
    second = net.layers.fc2
    assert isinstance(second, nn.Linear)
    bound, beyond, missed = (6 / 2) ** 0.5, [], 0.0
    drawn = second.weight.detach().clone() / bound  # uniform in +-1
    for size in sizes:
        with torch.no_grad():
            second.weight.copy_(size * drawn)
        series = bessel_harmonics(net, truncation)
        beyond.append(1 - series.share(FEW))
        missed = max(missed, series.residual)
    return {"beyond": torch.tensor(beyond, dtype=torch.float64), "missed": missed}
