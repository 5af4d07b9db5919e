"""Fig. 2: with little noise, how fast a network learns D(v) depends on the frequency of v.

Speed is the number of steps until the loss, averaged over ten batches, is below a target; a network that never gets
there counts as needing all steps, which makes the differences look smaller than they are.

Rule for the verdict, set before any run: the slowest quarter of bins needs more than twice the steps of the fastest,
even two standard errors down (on a logarithmic scale), where bins are called slow or fast by their transposed twin.
"""

from typing import Annotated

import numpy as np

from biascope.studies.estimates import above
from biascope.studies.nad import directional as d
from biascope.studies.nad import frequencies as f
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = "With little noise, the training loss on D(v) falls at very different speeds for different frequencies of v."
Target = Annotated[float, "loss (mean of ten batches) at which a direction counts as learnt"]


@study(
    "nad/fig2",
    paper="nad",
    figure="2",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "window": 10, "target": 0.5},
        "laptop": {**d.LAPTOP, "stride": 4, "epochs": 15},
        "paper": {},
    },
)
def fig2(
    run: Run,
    *,
    net: d.Net = "lenet",
    image_size: d.Side = 32,
    width: d.Width = 0,
    stride: f.Stride = 2,
    window: f.Window = 0,
    sample: f.Sample = 0,
    target: Target = 0.1,
    protocol: d.Protocol = d.LITTLE_NOISE,
) -> StudyResult:
    """Training loss per batch for different Fourier directions, with little noise."""
    basis = f.bins(image_size, "re", stride, window, sample, run.seed)
    factory = d.architecture(net, image_size, width=width)
    found = d.train_directions(run, net, factory, basis.vectors, protocol, keep_losses=True)
    steps = d.steps_to_loss(found.losses, target)
    never = steps >= found.losses.shape[1]
    # steps are counted downwards here, so that the "best" bins are the fast ones
    gap_in_steps = f.replicated_gap(-np.log10(steps), f.partners(basis))
    numbers = {
        f"steps to loss {target:g}, fastest bin": Estimate(float(steps.min())),
        f"steps to loss {target:g}, median bin": Estimate(float(np.median(steps))),
        f"steps to loss {target:g}, slowest bin": Estimate(float(steps.max())),
        "share of bins that never get there": Estimate(float(never.mean()), None, len(steps)),
        "mean test accuracy": Estimate.of(found.test),
    }
    if gap_in_steps is not None:
        numbers["log10(steps), slowest minus fastest quarter"] = gap_in_steps
    run.save_arrays("speed", frequencies=basis.frequencies, steps=steps, test=found.test)
    order = np.argsort(steps, kind="stable")
    shown = [int(order[round(q * (len(order) - 1))]) for q in (0, 0.25, 0.5, 0.75, 1)]
    labels = [f"frequency ({', '.join(str(int(k)) for k in basis.frequencies[i])})" for i in shown]
    maps = f.heat_map(
        "speed",
        f"Steps until the loss of {net} is below {target:g}",
        np.log10(steps),
        basis,
        z_label="log10(steps)",
        caption=f"{protocol}. {never.sum()} of {len(steps)} bins never get there.",
        low=None,
        high=None,
    )
    return StudyResult(
        "not tested"
        if gap_in_steps is None
        else "confirmed"
        if above(gap_in_steps, float(np.log10(2)))
        else "not confirmed",
        CLAIM,
        f"{net}, {len(basis)} bins ({protocol}): the fastest bin needs {steps.min():.0f} steps to a loss of "
        f"{target:g}, the slowest {steps.max():.0f}{' (all there are)' if never.any() else ''}; log10 of the steps "
        f"of the slowest minus the fastest quarter: {gap_in_steps if gap_in_steps else 'too few bins'}. Mean test "
        f"accuracy {numbers['mean test accuracy']}.",
        numbers,
        (loss_chart(f"Training loss of {net} on D(v)", found.losses[shown], labels, str(protocol)), maps),
    )


def loss_chart(title: str, losses: d.Array, labels: list[str], caption: str) -> Chart:
    """Loss per batch of a few trainings, averaged over windows so that about 60 points are left."""
    window = max(1, losses.shape[1] // 60)
    smooth = losses[:, : losses.shape[1] // window * window].reshape(len(losses), -1, window).mean(2)
    ticks = (np.arange(smooth.shape[1]) + 0.5) * window
    return Chart(
        name="training-loss",
        title=title,
        x_label="batch",
        y_label="training loss",
        series=tuple(Series.of(label, ticks, np.maximum(row, 1e-6)) for label, row in zip(labels, smooth)),
        alt="Curves of the training loss, from the direction learnt first to the one learnt last.",
        caption=caption,
        log_y=True,
    )
