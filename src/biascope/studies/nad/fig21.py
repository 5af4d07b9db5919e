"""Fig. 21: with little noise every direction is learnt, but the later ones more slowly.

Rule for the verdict, set before any run: every network reaches a test accuracy of 0.95, and the rank correlation of the
index with the steps to a small loss exceeds 0.5 even two standard errors down.
"""

import numpy as np

from biascope.studies.estimates import above, decide, rank_correlation
from biascope.studies.nad import anisotropy as a
from biascope.studies.nad import directional as d
from biascope.studies.nad.fig2 import Target, loss_chart
from biascope.studies.nad.fig6 import Count
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "With little noise networks reach about 100 % test accuracy on every D(u_i), but the training loss falls much "
    "slower for later directions."
)


@study(
    "nad/fig21",
    paper="nad",
    figure="21",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "sigma": 0.1, "networks": 16, "count": 12, "target": 0.5},
        "laptop": {**d.LAPTOP, "networks": 128, "count": 16},
        "paper": {},
    },
)
def fig21(
    run: Run,
    *,
    source: a.Source = a.SOURCE,
    count: Count = 64,
    target: Target = 0.1,
    protocol: d.Protocol = d.LITTLE_NOISE,
) -> StudyResult:
    """Training loss per batch on D(u_i), with little noise."""
    net = source.net
    U, _ = a.directions_of(run, source, protocol.precision)
    indices = a.spread_indices(count, len(U))
    factory = d.architecture(net, source.image_size, width=source.width)
    found = d.train_directions(run, net, factory, U[indices], protocol, keep_losses=True)
    steps, at = d.steps_to_loss(found.losses, target), np.array(indices, dtype=float)
    never = steps >= found.losses.shape[1]
    order, worst = rank_correlation(at, steps), float(found.test.min())
    run.save_arrays("speed", indices=np.array(indices), steps=steps, test=found.test)
    shown = [round(q * (len(indices) - 1)) for q in (0, 0.25, 0.5, 0.75, 1)]
    charts = (
        loss_chart(
            f"Training loss of {net} on D(u_i)",
            found.losses[shown],
            [f"i = {indices[i] + 1}" for i in shown],
            str(protocol),
        ),
        Chart(
            name="steps",
            title=f"Steps until the loss of {net} is below {target:g}",
            x_label="index i of the direction",
            y_label="steps",
            series=(Series.of("one network each", at + 1, steps, style="points"),),
            alt=f"From {steps[0]:.0f} steps at the first index to {steps[-1]:.0f} at the last.",
            caption=f"{never.sum()} of {len(steps)} networks never get there and stand at the last step.",
            log_x=True,
            log_y=True,
        ),
    )
    return StudyResult(
        decide(worst >= 0.95 and above(order, 0.5), [order]),
        CLAIM,
        f"{net}, {len(indices)} directions ({protocol}): rank correlation of the index with the steps to a loss of "
        f"{target:g} is {order}; {steps[0]:.0f} steps at the first direction, {steps[-1]:.0f} at the last, "
        f"{never.sum()} never get there; lowest test accuracy {worst:.3f}.",
        {
            f"Spearman(index, steps to loss {target:g})": order,
            "lowest test accuracy": Estimate(worst),
            "mean test accuracy": Estimate.of(found.test),
            "share of directions that never get there": Estimate(float(never.mean()), None, len(steps)),
        },
        charts,
    )
