"""Fig. A.1 to A.3: does EKFAC's lead depend on the batch size?

Every batch size is a contest of its own (see `contest`), for the same number of epochs. The rule, fixed beforehand. For
VGG-11 the claim is that the gain over KFAC shrinks with small batches: the gap of final losses (KFAC minus EKFAC-ra) at
the smallest batch is below that at the largest, by two standard errors of the paired difference over seeds. For
ResNet-34 it is that the gain is consistent: the gap is above zero by two standard errors at every size. Where KFAC or
EKFAC-ra did not learn (see `contest`), or with one seed, nothing is tested. (Changed after the first run: ending below
the start had been enough to have learnt, and the verdict was "not confirmed" otherwise.)
"""

from typing import Annotated

from biascope.errors import InputError
from biascope.studies.ekfac import contest, standing
from biascope.studies.ekfac.cifar import ON_CIFAR, Network, OnCifar
from biascope.studies.ekfac.contest import NAMES, Outcome
from biascope.studies.ekfac.fig4_5 import LAPTOP, PAPER, SMOKE
from biascope.studies.estimates import above, curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIMS = {
    "vgg11": "On VGG-11 the gain of EKFAC-ra over KFAC per epoch shrinks with smaller batches. (EKFAC without running "
    "averages, and that there is no gain in wall time, is not judged.)",
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
        "paper": {k: v for k, v in PAPER.items() if k != "size"} | {"epochs": 10.0, "batches": (100, 200, 500)},
    },
)
def figA_1(
    run: Run,
    *,
    network: Annotated[Network, "A.1 and A.2 are vgg11, A.3 resnet34"] = "vgg11",
    batches: Annotated[tuple[int, ...], "batch sizes (the paper's are only in plots)"] = (100, 200, 500),
    optimisers: Annotated[tuple[str, ...], "who takes part; ekfac-ra and kfac must"] = ("ekfac-ra", "kfac", "sgd-bn"),
    options: OnCifar = ON_CIFAR,
) -> StudyResult:
    """Final training losses against the batch size; with network=resnet34, Fig. A.3."""
    if len(set(batches)) < 2 or not {"ekfac-ra", "kfac"} <= set(optimisers):
        raise InputError("at least two batch sizes, and ekfac-ra and kfac among the optimisers, are needed")
    task, seeds = options.problem(run, network), options.seeds
    numbers: dict[str, Estimate] = {}
    out: dict[int, Outcome] = {}
    for batch in sorted(batches):
        out[batch] = options.hold(run, task, optimisers, batch, batch)
        contest.timing(out[batch], numbers, f", batch {batch}")
        for name in optimisers:
            numbers[f"final loss, {NAMES[name]}, batch {batch}"] = Estimate.of(out[batch].final(name))
    gaps = {b: [k - e for e, k in zip(o.final("ekfac-ra"), o.final("kfac"))] for b, o in out.items()}
    said = {b: Estimate.of(gap) for b, gap in gaps.items()}
    numbers |= {f"loss of KFAC minus EKFAC-ra, batch {b}": gap for b, gap in said.items()}
    learnt = all(o.learnt(name) for o in out.values() for name in ("kfac", "ekfac-ra"))
    if network == "vgg11":
        shrink = Estimate.of([big - small for small, big in zip(gaps[min(gaps)], gaps[max(gaps)])])
        numbers["gain at the largest batch minus gain at the smallest"] = shrink
        holds = above(shrink)
    else:
        holds = all(map(above, said.values()))
    shown = f"width {options.width}, {options.n} images of {options.dataset}"
    sweep = Chart(
        "batches",
        "Training loss at the end against the batch size",
        "examples per batch",
        "cross-entropy",
        tuple(curve(NAMES[name], out, list(zip(*(o.final(name) for o in out.values())))) for name in optimisers),
        alt="One curve per optimiser over batch sizes.",
        caption=f"{network} of {shown}, {options.epochs:g} epochs; band: standard error.",
        log_x=True,
        log_y=True,
    )
    each = [
        chart
        for b, o in out.items()
        for chart in contest.charts(o, "cross-entropy", f"Batch {b}.", f"batch-{b}-", f", batch {b}")
    ]
    searches = " ".join(standing.searched(o, f", batch {b}") for b, o in out.items())
    tail = "" if (options.dataset, options.width) == ("cifar10", 64) else f" {shown.capitalize()}."
    return StudyResult(
        "not tested" if seeds < 2 or not learnt else "confirmed" if holds else "not confirmed",
        CLAIMS[network],
        "Loss of KFAC minus that of EKFAC-ra: "
        + ", ".join(f"{gap} with batches of {b}" for b, gap in said.items())
        + f". {searches}"
        + tail
        + ("" if learnt else " Not both of them learnt at every size: nothing is tested."),
        numbers,
        (sweep, *each),
    )
