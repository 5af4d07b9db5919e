"""Figs. 2 and 21: with little noise, how fast a network learns D(v) depends on v, a frequency or a direction u_i.

Speed is the number of steps until the loss, averaged over ten batches, is below a target; a network that never gets
there counts as needing all steps, which makes the differences look smaller than they are.
"""

from typing import Annotated

import numpy as np

from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import rank_correlation
from biascope_papers.nad import anisotropy as a
from biascope_papers.nad import directional as d
from biascope_papers.nad import frequencies as f

Target = Annotated[float, "loss (mean of ten batches) at which a direction counts as learnt"]
QUARTERS = (0, 0.25, 0.5, 0.75, 1)


@study(
    "nad/fig2",
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
    width: d.Width = 0,
    grid: f.Grid = f.GRID,
    target: Target = 0.1,
    protocol: d.Protocol = d.LITTLE_NOISE,
) -> StudyResult:
    """Training loss per batch for different Fourier directions, with little noise."""
    basis = grid.basis(run.seed)
    factory = d.architecture(net, grid.image_size, width=width)
    found = d.train_directions(run, net, factory, basis.vectors, protocol, keep_losses=True)
    steps = steps_to_loss(found.losses, target)
    never = steps >= found.losses.shape[1]
    # steps are counted downwards here, so that the "best" bins are the fast ones
    apart = f.replicated_gap(-np.log10(steps), f.partners(basis))
    numbers = {
        f"steps to loss {target:g}, fastest bin": Estimate(float(steps.min())),
        f"steps to loss {target:g}, slowest bin": Estimate(float(steps.max())),
        "mean test accuracy": Estimate.of(found.test),
        f"share of bins that get there, {net}": Estimate(float(1 - never.mean()), None, len(steps)),
    }
    if apart is not None:
        numbers["log10(steps), slowest minus fastest quarter"] = apart
    ends = f.extremes(-np.log10(steps), f.partners(basis))
    if ends is not None:
        numbers[f"log10(steps), slowest minus fastest tenth, chosen by their twins, {net}"] = ends
    run.save_arrays("speed", frequencies=basis.frequencies, steps=steps, test=found.test)
    order = np.argsort(steps, kind="stable")
    shown = [int(order[round(q * (len(order) - 1))]) for q in QUARTERS]
    labels = [f"frequency ({', '.join(str(int(k)) for k in basis.frequencies[i])})" for i in shown]
    title = f"Steps until the loss of {net} is below {target:g}"
    caption = f"{protocol}. {never.sum()} of {len(steps)} bins never get there."
    speed_map = f.heat_map(
        "speed", title, np.log10(steps), basis, z_label="log10(steps)", caption=caption, low=None, high=None
    )
    return StudyResult(
        measured=f"{net}, {len(basis)} bins ({protocol}): the fastest bin needs {steps.min():.0f} steps to a loss of "
        f"{target:g}, the slowest {steps.max():.0f}{' (all there are)' if never.any() else ''}.",
        numbers=numbers,
        figures=(loss_chart(f"Training loss of {net} on D(v)", found.losses[shown], labels, protocol), speed_map),
    )


@study(
    "nad/fig21",
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
    count: a.Count = 64,
    target: Target = 0.1,
    protocol: d.Protocol = d.LITTLE_NOISE,
) -> StudyResult:
    """Training loss per batch on D(u_i), with little noise."""
    net = source.net
    U, _ = a.directions_of(run, source, protocol.precision)
    indices = np.array(a.spread_indices(count, len(U)))
    factory = d.architecture(net, source.image_size, width=source.width)
    found = d.train_directions(run, net, factory, U[indices], protocol, keep_losses=True)
    steps = steps_to_loss(found.losses, target)
    never = steps >= found.losses.shape[1]
    order, worst = rank_correlation(indices.astype(float), steps), float(found.test.min())
    run.save_arrays("speed", indices=indices, steps=steps, test=found.test)
    shown = [round(q * (len(indices) - 1)) for q in QUARTERS]
    labels = [f"i = {indices[i] + 1}" for i in shown]
    chart = Chart(
        "steps",
        f"Steps until the loss of {net} is below {target:g}",
        "index i of the direction",
        "steps",
        (Series.of("one network each", indices + 1, steps, style="points"),),
        alt=f"From {steps[0]:.0f} steps at the first index to {steps[-1]:.0f} at the last.",
        caption=f"{never.sum()} of {len(steps)} networks never get there and stand at the last step.",
        log_x=True,
        log_y=True,
    )
    return StudyResult(
        measured=f"{net}, {len(indices)} directions ({protocol}): {steps[0]:.0f} steps at the first direction, "
        f"{steps[-1]:.0f} at the last, {never.sum()} never get there.",
        numbers={
            "mean test accuracy": Estimate.of(found.test),
            f"Spearman(index, steps to loss), {net}": order,
            f"lowest test accuracy, {net}": Estimate(worst),
            f"mean test accuracy, {net}": Estimate.of(found.test),
            "share of directions that never get there": Estimate(float(never.mean()), None, len(steps)),
        },
        figures=(loss_chart(f"Training loss of {net} on D(u_i)", found.losses[shown], labels, protocol), chart),
    )


def steps_to_loss(losses: d.Array, target: float, window: int = 10) -> d.Array:
    """First step [k] after which the loss, averaged over `window` batches, is below target; the last step if never."""
    window = min(window, losses.shape[1])
    sums = np.cumsum(np.pad(losses, ((0, 0), (1, 0))), axis=1)
    below = (sums[:, window:] - sums[:, :-window]) / window < target
    first: d.Array = np.where(below.any(1), below.argmax(1) + window, losses.shape[1]).astype(float)
    return first


def loss_chart(title: str, losses: d.Array, labels: list[str], protocol: d.Protocol) -> Chart:
    """Loss per batch of a few trainings, averaged over windows so that about 60 points are left."""
    window = max(1, losses.shape[1] // 60)
    smooth = losses[:, : losses.shape[1] // window * window].reshape(len(losses), -1, window).mean(2)
    ticks = (np.arange(smooth.shape[1]) + 0.5) * window
    return Chart(
        "training-loss",
        title,
        "batch",
        "training loss",
        tuple(Series.of(label, ticks, np.maximum(row, 1e-6)) for label, row in zip(labels, smooth)),
        alt="Curves of the training loss, from the direction learnt first to the one learnt last.",
        caption=str(protocol),
        log_y=True,
    )
