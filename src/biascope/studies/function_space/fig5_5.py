"""Fig. 5.5: energy E(lambda) of images in the atoms of a network, against the first frequency w0 and meta-learning.

Atoms are the eigenfunctions of the tangent kernel on the grid, and E(lambda) the share of the images' energy in atoms
with at least lambda times the largest eigenvalue (see `fields.dictionary`, which also says what is corrected in Eq.
5.14). One number per network: the area under E over log10 lambda from 1 to 1e-10.

Verdict: confirmed if the SIREN with the largest area has neither the smallest nor the largest w0, its area is above
those at both ends, and that of the meta-learned SIREN is above that of every network with drawn weights; paired
differences, by two standard errors over seeds (over images, if there is one seed).
"""

from typing import Annotated

from torch import Tensor

from biascope.progress import progress
from biascope.studies.estimates import above, decide, errors_over, mean_error, over_seeds, through
from biascope.studies.function_space.fields_setting import (
    LAPTOP,
    LEGEND,
    META,
    META_LAPTOP,
    META_SMOKE,
    SETTING,
    SMOKE,
    THRESHOLDS,
    Field,
    Meta,
    Setting,
    areas,
    energies,
)
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "The energy of images in the leading atoms of a SIREN is largest at a w0 between the smallest and the largest, and "
    "recedes on both sides; meta-learning is best. (That the best w0 is about 40 is not judged.)"
)
W0S = (5.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0)


@study(
    "fields/fig5.5",
    paper="function-space",
    figure="5.5",
    claim=CLAIM,
    sizes={"smoke": SMOKE | META_SMOKE | {"w0s": (2.0, 15.0, 100.0)}, "laptop": LAPTOP | META_LAPTOP, "paper": {}},
)
def fig5_5(
    run: Run,
    *,
    setting: Setting = SETTING,
    meta: Meta = META,
    w0s: Annotated[tuple[float, ...], "first frequencies of the SIRENs"] = W0S,
    meta_w0: Annotated[float, "w0 of the SIREN whose start is meta-learned (MAML)"] = 30.0,
) -> StudyResult:
    """Energy of images in the atoms of a ReLU network, of SIRENs, and of a meta-learned SIREN."""
    w0s = tuple(sorted(w0s))
    learned = Field("siren", meta_w0, "maml")
    sirens = [Field("siren", w0) for w0 in w0s]
    drawn = [Field("relu"), *sirens]
    shares = {field: energies(run, field, setting, meta) for field in progress([*drawn, learned], "networks")}
    area = {field: areas(each) for field, each in shares.items()}  # [seeds, n]
    numbers = {f"area under E, {field.title}": over_seeds(each) for field, each in area.items()}
    peak = max(sirens, key=lambda field: float(area[field].mean()))
    gains = {field: over_seeds(area[learned] - area[field]) for field in drawn}
    best = min(gains, key=lambda field: gains[field].value)
    gaps = {
        f"{peak.title} over {sirens[0].title}": over_seeds(area[peak] - area[sirens[0]]),
        f"{peak.title} over {sirens[-1].title}": over_seeds(area[peak] - area[sirens[-1]]),
        f"{learned.title} over {best.title}": gains[best],
    }
    numbers |= {f"area, {name}": gap for name, gap in gaps.items()}
    rise, recede, gain = gaps.values()
    inside = peak not in (sirens[0], sirens[-1])
    return StudyResult(
        decide(inside and all(map(above, [rise, recede, *gains.values()])), [rise, recede, *gains.values()]),
        CLAIM,
        f"Of the SIRENs, w0 = {peak.scale:g} has the largest area under E, {numbers[f'area under E, {peak.title}']}: "
        f"{rise} above w0 = {w0s[0]:g} and {recede} above w0 = {w0s[-1]:g}. Meta-learning (w0 = {meta_w0:g}) has "
        f"{numbers[f'area under E, {learned.title}']}, {gain} above {best.title}, the best without. {setting.said} "
        f"MAML of {meta.meta_steps} steps on other images; {errors_over(setting.seeds, setting.n, 'images')}.",
        numbers,
        (energy_chart(shares), _areas(w0s, numbers, learned)),
    )


def energy_chart(shares: dict[Field, Tensor]) -> Chart:
    """E over lambda: {network: [seeds, n, q]}, mean over both."""
    return Chart(
        "energy",
        "Energy of images in the atoms of networks",
        "eigenvalue relative to the largest, at least",
        "share of energy E",
        tuple(Series.of(field.title, THRESHOLDS, *mean_error(each.mean(1))) for field, each in shares.items()),
        alt="E falls from 1 at small eigenvalues to 0 at the largest; the more slowly, the better the dictionary.",
        caption="E: share of the images' energy in atoms (eigenfunctions of the tangent kernel) with such eigenvalues. "
        f"{LEGEND}",
        log_x=True,
    )


def _areas(w0s: tuple[float, ...], numbers: dict[str, Estimate], learned: Field) -> Chart:
    levels = {"ReLU": numbers["area under E, ReLU"], learned.title: numbers[f"area under E, {learned.title}"]}
    ends = (w0s[0], w0s[-1])
    return Chart(
        "areas",
        "Area under the energy against w0",
        "w0",
        "area under E",
        (
            through("SIREN", w0s, [numbers[f"area under E, {Field('siren', w0).title}"] for w0 in w0s]),
            *(Series.of(name, ends, [level.value] * 2, style="dashed") for name, level in levels.items()),
        ),
        alt="The area under E against w0; dashed lines for ReLU and for the learned start.",
        caption="Area over log10 of the eigenvalue, as a share of the whole: 1 if the first atoms have all energy. "
        "Mean over seeds; band: one standard error.",
        log_x=True,
    )
