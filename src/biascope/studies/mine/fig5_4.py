"""Fig 5.4: a GAN on 25 Gaussians, without and with a term for the information between samples and code.

Set-up and objective are those of Fig. 5.3. The text shows density plots and no number. A mode is found when at least a
fifth of its share of `samples` samples lies within three standard deviations of its centre.

Verdict rule. "Confirmed" if both hold at the last iteration:
1. Modes found with MINE less modes found without, on the same seeds, is above 0 by two standard errors over seeds.
2. The mean with MINE is above 22.5 of 25 by two standard errors: the modes are kept, and not only fewer of them lost.
The share of samples near a centre and the lenient count (one sample near a centre is enough) are numbers, not part of
the rule.
"""

from biascope.seeds import derive
from biascope.studies.estimates import above, decide
from biascope.studies.mine.gan import PUBLISHED, SIZES, Setting, both_arms, chart, gain, last, scatter
from biascope.studies.mine.toys import RADIUS, grid, modes, touched
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = "A GAN with a mutual-information term keeps the modes of 25 Gaussians."
KEPT = 22.5  # modes, nine tenths


@study(
    "mine/fig5.4",
    paper="alignment",
    figure="5.4",
    claim=CLAIM,
    sizes=SIZES,
)
def fig5_4(run: Run, *, setting: Setting = PUBLISHED) -> StudyResult:
    """Modes found over training, without and with MINE."""
    data = grid(setting.points, derive(run.seed, "points"))
    found = both_arms(run, data, setting, modes)
    more, kept = gain(found), last(found["GAN + MINE"], "first")
    numbers = {"modes with MINE - without": more}
    for arm, made in found.items():
        numbers |= {f"modes, {arm}": last(made, "first"), f"samples near a centre, {arm}": last(made, "second")}
        numbers[f"modes with a sample, {arm}"] = Estimate.of(touched(made.samples))
    numbers["estimate of the information (nats)"] = last(found["GAN + MINE"], "nats")
    scatter(run, "samples", data, found, 1.25 * RADIUS)
    return StudyResult(
        verdict=decide(above(more) and above(kept, KEPT), [more, kept]),
        claim=CLAIM,
        measured=f"Modes found of 25: {numbers['modes, GAN']} without and {kept} with MINE, difference {more}. "
        f"Near a centre lie {numbers['samples near a centre, GAN']} and "
        f"{numbers['samples near a centre, GAN + MINE']} of the samples. One sample at least have "
        f"{numbers['modes with a sample, GAN']} and {numbers['modes with a sample, GAN + MINE']} modes. "
        + setting.about("the grid's spacing"),
        numbers=numbers,
        figures=(
            chart(found, "modes", "25 Gaussians: modes found in samples", "modes found",
                  "Modes found over training, one curve for each arm."),
        ),
    )  # fmt: skip
