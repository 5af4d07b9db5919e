"""Fig. A.1 to A.3: does EKFAC's lead depend on the batch size?

Every batch size is a contest of its own (see `contest`), for the same number of epochs. The rule, fixed beforehand. For
VGG-11 the claim is that the gain over KFAC shrinks with small batches: the gap of final losses (KFAC minus EKFAC-ra) at
the smallest batch is below that at the largest, by two standard errors of the paired difference over seeds. For
ResNet-34 it is that the gain is consistent: the gap is above zero by two standard errors at every size.
"""

from typing import Annotated, Literal

from biascope.errors import InputError
from biascope.studies.ekfac import cifar, contest
from biascope.studies.ekfac.common import mean_curve
from biascope.studies.ekfac.contest import NAMES, Outcome
from biascope.studies.ekfac.fig4_5 import LAPTOP, PAPER, SMOKE
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIMS = {
    "vgg11": "On VGG-11 the gain of EKFAC over KFAC per epoch shrinks with smaller batches.",
    "resnet34": "On ResNet-34 EKFAC-ra gains over KFAC per epoch at every batch size.",
}


@study(
    "ekfac/figA.1",
    paper="linearization",
    figure="A.1",
    claim=CLAIMS["vgg11"],
    sizes={
        "smoke": {k: v for k, v in SMOKE.items() if k not in ("size", "plain")} | {"batches": (25, 50)},
        "laptop": {k: v for k, v in LAPTOP.items() if k != "size"} | {"batches": (50, 200), "epochs": 4.0},
        "paper": {k: v for k, v in PAPER.items() if k != "size"}
        | {"epochs": 10.0, "points": 2, "batches": (100, 200, 500)},
    },
)
def figA_1(
    run: Run,
    *,
    network: Annotated[Literal["vgg11", "resnet34"], "A.1 and A.2 are vgg11, A.3 resnet34"] = "vgg11",
    dataset: Annotated[Literal["digits", "cifar10"], "images to classify"] = "cifar10",
    n: Annotated[int, "training images"] = 5000,
    width: Annotated[int, "channels of the first stage; 64 in the paper"] = 16,
    epochs: Annotated[float, "epochs of every training"] = 10.0,
    batches: Annotated[tuple[int, ...], "batch sizes (the paper's are only in plots)"] = (100, 200, 500),
    refresh: Annotated[int, "iterations between refreshes"] = 500,
    points: Annotated[int, "values of each of the two hyper-parameters"] = 2,
    trial: Annotated[float, "share of the epochs with which the grid is searched"] = 0.5,
    looks: Annotated[int, "evaluations along a training"] = 10,
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3,
    momentum: Annotated[float, "of KFAC and EKFAC (the paper does not say)"] = 0.0,
    optimisers: Annotated[tuple[str, ...], "who takes part; ekfac-ra and kfac must"] = ("ekfac-ra", "kfac", "sgd-bn"),
    tf32: Annotated[bool, "let the GPU use tf32"] = True,
) -> StudyResult:
    """Final training losses against the batch size; with network=resnet34, Fig. A.3."""
    if len(set(batches)) < 2 or not {"ekfac-ra", "kfac"} <= set(optimisers):
        raise InputError("at least two batch sizes, and ekfac-ra and kfac among the optimisers, are needed")
    task = cifar.problem(run, network, dataset, n, width, momentum)
    numbers: dict[str, Estimate] = {}
    out: dict[int, Outcome] = {}
    with contest.tf32(tf32):
        for batch in sorted(batches):
            frames = cifar.frames(optimisers, len(task.x), epochs, batch, batch, refresh, looks)
            out[batch] = contest.hold(run, task, frames, points, seeds, cifar.grid, trial)
            contest.timing(out[batch], numbers, f", batch {batch}")
            for name in optimisers:
                numbers[f"final loss, {NAMES[name]}, batch {batch}"] = Estimate.of(out[batch].final(name))
    gaps = {b: [k - e for e, k in zip(o.final("ekfac-ra"), o.final("kfac"))] for b, o in out.items()}
    said = {b: Estimate.of(gap) for b, gap in gaps.items()}
    numbers |= {f"loss of KFAC minus EKFAC-ra, batch {b}": gap for b, gap in said.items()}
    learnt = all(o.learnt("kfac") for o in out.values())
    if network == "vgg11":
        shrink = Estimate.of([big - small for small, big in zip(gaps[min(gaps)], gaps[max(gaps)])])
        numbers["gain at the largest batch minus gain at the smallest"] = shrink
        holds = shrink.value > 2 * (shrink.standard_error or 0.0)
    else:
        holds = all(gap.value > 2 * (gap.standard_error or 0.0) for gap in said.values())
    curves = {
        name: mean_curve([[out[b].final(name)[seed] for b in out] for seed in range(seeds)]) for name in optimisers
    }
    sweep = Chart(
        "batches",
        "Training loss at the end against the batch size",
        "examples per batch",
        "cross-entropy",
        tuple(Series.of(NAMES[name], list(out), *curve) for name, curve in curves.items()),
        alt="One curve per optimiser over batch sizes.",
        caption=f"{network} of width {width}, {n} images of {dataset}, {epochs:g} epochs; band: standard error.",
        log_x=True,
        log_y=True,
    )
    each = [
        chart
        for b, o in out.items()
        for chart in contest.charts(o, "cross-entropy", f"Batch {b}.", f"batch-{b}-", f", batch {b}")
    ]
    tail = "" if dataset == "cifar10" and width == 64 else f" Width {width}, {n} images of {dataset}."
    return StudyResult(
        "not tested" if seeds < 2 else "confirmed" if holds and learnt else "not confirmed",
        CLAIMS[network],
        "Loss of KFAC minus that of EKFAC-ra: "
        + ", ".join(f"{gap} with batches of {b}" for b, gap in said.items())
        + "."
        + tail
        + ("" if learnt else " KFAC did not learn at every size: nothing is shown."),
        numbers,
        (sweep, *each),
    )
