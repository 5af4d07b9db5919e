"""Fig. 5.2: the Bessel functions J_n(b) that weigh the harmonics of a SIREN.

sin(b sin x) has the harmonics 2 J_n(b), n odd; a SIREN with two layers of sines is a sum of products of them (see
`fields.bessel_harmonics`). So at small weights b high harmonics are as good as absent, and at large ones they are not.
"""

from typing import Annotated, Any, cast

import numpy as np
import torch
from scipy.special import jv

from biascope import InputError, nets
from biascope.fields import bessel_harmonics
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import derive, progress
from biascope_papers.fields.setting import stacked

SMALL, FEW = 1.0, 3  # what a small argument is, and a low order


@study("fields/fig5.2", sizes={"smoke": {"seeds": 3, "units": 8, "truncation": 16}, "laptop": {}, "paper": {}})
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
    step = float(np.diff(np.abs([weights[n][small] for n in weights]), axis=0).max(initial=-1.0))

    sizes = [size for size in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0) if size < largest] + [largest]
    seen = progress(range(seeds), "drawn networks")
    found = run.cached_each("series", seen, lambda seed: _shares(run.seed, seed, sizes, units, truncation))
    beyond = stacked(found, "beyond")  # [seeds, sizes]
    missed = max(cast(float, each["missed"]) for each in found)
    at_small = Estimate.of(beyond[:, sizes.index(SMALL)])
    more = Estimate.of(beyond[:, -1] - beyond[:, sizes.index(SMALL)])
    numbers = {
        "share of energy beyond order 3, weights of size 1": at_small,
        f"the same at weights of size {largest:g}, minus that": more,
        "largest step of |J_n(b)| to the next order, b up to 1": Estimate(step),
        "largest error of a series": Estimate(missed),
    }
    for size in sizes:
        n = np.arange(int(2 * size) + 40)
        energy = np.cumsum(np.where(n, 2, 1) * jv(n, size) ** 2)  # of exp(i b sin x); 1 in all
        numbers[f"harmonics with 98 % of the energy, b = {size:g}"] = Estimate(int(np.argmax(energy >= 0.98)))
    charts = (
        Chart(
            "bessel", "Weights of the harmonics", "weight b", "J_n(b)",
            tuple(Series.of(f"n = {n}", b, values) for n, values in weights.items()),
            alt="Bessel functions of order 0 to 3: at small b only order 0 is large, then each rises in turn.",
            caption="Harmonics of sin(b sin t) have odd orders n, those of cos(b sin t) even ones; their amplitudes "
            "are 2 J_n(b), at order 0 J_0(b).",
        ),
        Chart(
            "beyond", f"Energy beyond order {FEW} in drawn SIRENs", "size of the weights of the second layer",
            "share of energy", (curve("beyond order 3", sizes, beyond),),
            alt="The share of energy in high harmonics over the size of the weights.",
            caption="Mean over seeds; band: one standard error.", log_x=True,
        ),
    )  # fmt: skip
    return StudyResult(
        measured=f"In SIRENs with two sines, harmonics beyond order {FEW} hold {at_small} of the energy at weights of "
        f"size 1 and {more} more at {largest:g}. Their series agree with the networks to {missed:.1e}.",
        numbers=numbers,
        figures=charts,
    )


def _shares(seed: int, i: int, sizes: list[float], units: int, truncation: int) -> dict[str, Any]:
    """Share of energy beyond order 3 of one network, its second layer uniform in +- each size, and the worst error."""
    drawn = nets.build(
        "siren", seed=derive(derive(seed, "siren", i), "field"), in_features=1, hidden=(2, units), w_h=1.0
    )
    weight = drawn.get_parameter("layers.fc2.weight")
    uniform = weight.detach().clone() / 3**0.5  # in +-1
    beyond, missed = [], 0.0
    for size in sizes:
        with torch.no_grad():
            weight.copy_(size * uniform)
        series = bessel_harmonics(cast(nets.SIREN, drawn), truncation)
        beyond.append(1 - series.share(FEW))
        missed = max(missed, series.residual)
    return {"beyond": torch.tensor(beyond, dtype=torch.float64), "missed": missed}
