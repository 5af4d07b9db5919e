"""Fig 5.3: a GAN on a spiral, without and with a term for the information between samples and code.

The generator maximises log D(G(e, c)) + beta I(G(e, c); c), the gradient of MINE's estimate clipped to the norm of the
other (Eq. 17, C.1; the value function printed as Eq. 16 lacks the log of D). Both arms have the same initial networks,
data and latent draws. The text shows pictures and no number. Covered: of 25 pieces of the spiral the share that has at
least half as many of the samples within three standard deviations of the noise as the data would.

Verdict rule. "Confirmed" if the share covered with MINE less that without, at the last iteration and on the same seeds,
is above 0 by two standard errors over seeds. How many samples lie on the spiral is a number, not part of the rule.
"""

from typing import Annotated

from biascope.seeds import derive
from biascope.studies.estimates import above, decide
from biascope.studies.mine.gan import Setting, both_arms, chart, gain, last, scatter
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
    sizes={
        "smoke": {"points": 5000, "steps": 60, "generator_width": 32, "width": 32, "lr": 2e-3, "seeds": 2,
                  "samples": 500},
        "laptop": {"steps": 4000, "generator_width": 128, "width": 128, "lr": 5e-4, "seeds": 4},
        "paper": {},
    },
)  # fmt: skip
def fig5_3(
    run: Run,
    *,
    beta: Annotated[float, "weight of the information"] = 1.0,
    points: Annotated[int, "points to train on"] = 100_000,
    steps: Annotated[int, "iterations"] = 5000,
    batch: Annotated[int, "points in an iteration"] = 100,
    lr: Annotated[float, "of Adam, all networks"] = 1e-4,
    generator_width: Annotated[int, "units in the generator's two layers"] = 500,
    width: Annotated[int, "units in the three layers of discriminator and statistics network"] = 400,
    noise: Annotated[int, "Gaussian inputs of the generator without a meaning (not given in the text)"] = 8,
    code: Annotated[int, "Gaussian inputs whose information is raised (not given)"] = 8,
    samples: Annotated[int, "samples that are measured"] = 2500,
    seeds: Annotated[int, "networks of each arm"] = 10,
) -> StudyResult:
    """Coverage of the spiral over training, without and with MINE."""
    setting = Setting(steps, batch, lr, generator_width, width, noise, code)
    data = spiral(points, derive(run.seed, "points"))
    found = both_arms(run, data, beta, setting, seeds, coverage, samples)
    ceiling = float(coverage(spiral(samples, derive(run.seed, "ceiling"))[None])[0])
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
        f"{steps} iterations, lr {lr:g}, widths {generator_width} and {width} (paper: 5000, 0.0001, 500 and 400); "
        f"the spiral's equation and {noise} + {code} latent inputs are our choice; errors over {seeds} seeds.",
        numbers=numbers,
        figures=(
            chart(found, "coverage", "Spiral: share covered by samples", "share of pieces covered",
                  "The share of the spiral covered over training, one curve for each arm."),
        ),
    )  # fmt: skip
