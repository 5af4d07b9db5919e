"""Fig 5.3: a GAN on a spiral, without and with a term for the information between samples and code.

The generator maximises log D(G(e, c)) + beta I(G(e, c); c), the gradient of MINE's estimate clipped to the norm of the
other (Eq. 17, C.1; the value function printed as Eq. 16 lacks the log of D). Both arms have the same initial networks,
data and latent draws. The text shows pictures and no number. Covered: of 25 pieces of the spiral the share that has at
least half as many of the samples within three standard deviations of the noise as the data would.

Verdict rule. "Confirmed" if the share covered with MINE less that without, at the last iteration and on the same seeds,
is above 0 by two standard errors over seeds. How many samples lie on the spiral is a number, not part of the rule.
"""

from biascope.seeds import derive
from biascope.studies.estimates import above, decide
from biascope.studies.mine.gan import PUBLISHED, SIZES, Setting, both_arms, chart, gain, last, scatter
from biascope.studies.mine.toys import RADIUS, coverage, spiral
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = "A GAN with a mutual-information term covers the spiral better."


@study(
    "mine/fig5.3",
    paper="alignment",
    figure="5.3",
    claim=CLAIM,
    sizes=SIZES,
)
def fig5_3(run: Run, *, setting: Setting = PUBLISHED) -> StudyResult:
    """Coverage of the spiral over training, without and with MINE."""
    data = spiral(setting.points, derive(run.seed, "points"))
    found = both_arms(run, data, setting, coverage)
    ceiling = float(coverage(spiral(setting.samples, derive(run.seed, "ceiling"))[None])[0])
    more = gain(found)
    numbers = {"covered with MINE - without": more, "covered by as many true points": Estimate(ceiling)}
    for arm, made in found.items():
        numbers |= {f"covered, {arm}": last(made, "first"), f"samples on the spiral, {arm}": last(made, "second")}
    numbers["estimate of the information (nats)"] = last(found["GAN + MINE"], "nats")
    scatter(run, "samples", data, found, 1.25 * RADIUS)
    return StudyResult(
        verdict=decide(above(more), [more]),
        claim=CLAIM,
        measured=f"Covered: {numbers['covered, GAN']} without and {numbers['covered, GAN + MINE']} with MINE, "
        f"difference {more}; as many true points cover {ceiling:.2f}. On the spiral lie "
        f"{numbers['samples on the spiral, GAN']} and {numbers['samples on the spiral, GAN + MINE']} of the samples. "
        + setting.about("the spiral's equation"),
        numbers=numbers,
        figures=(
            chart(found, "coverage", "Spiral: share covered by samples", "share of pieces covered",
                  "The share of the spiral covered over training, one curve for each arm."),
        ),
    )  # fmt: skip
