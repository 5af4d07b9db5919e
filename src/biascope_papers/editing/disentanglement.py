"""Fig. 6.4, 6.5, 6.8, 6.10 and 6.11: the weight disentanglement error of two tasks. On a stand-in, not CLIP.

xi(a1, a2) = sum over both tasks of the share of its test images whose predicted class differs between theta_0 + a_t
tau_t and theta_0 + a1 tau1 + a2 tau2. Compared is the mean of xi over [0, 1]^2, where coefficients are searched: at
negative ones some networks predict one class for all images, which counts as low error. Means are over pairs of tasks.
"""

from typing import Annotated

import torch

from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import over_seeds, through
from biascope_papers.editing.measures import (
    STARTS,
    Maps,
    about,
    contrasts,
    controlled,
    energies,
    heat_maps,
    maps,
)
from biascope_papers.editing.stand_in import LABELS, METHODS, PAPER, Setting, Several, Stages, sizes

Pairs = Annotated[int, "pairs of neighbours in the list of tasks"]
Points = Annotated[int, "test images per task in the maps"]
Grid = Annotated[int, "coefficients per task between -3 and 3; 19 and 25 contain 0 and 1"]
SMALL, MEDIUM = {"points": 60, "grid": 7}, {"points": 100, "grid": 7}
TRIAL = {"stages": 2, "pairs": 1}
SIZES = sizes(SMALL | TRIAL, MEDIUM | {"pairs": 3})


@study("editing/fig6.4", sizes=SIZES)
def fig6_4(
    run: Run, *, stages: Stages = 7, pairs: Pairs = 7, points: Points = 256, grid: Grid = 19, setting: Setting = PAPER
) -> StudyResult:
    """Disentanglement error of fine-tuned networks and of their linearisations."""
    methods = ("non-linear", "post-hoc")
    found = maps(run, setting, stages, methods=methods, pairs=pairs, points=points, grid=grid)
    numbers = _numbers(found, methods)
    less = found.box("post-hoc") - found.box("non-linear")
    numbers["xi on [0, 1]^2, after the fact minus fine-tuned"] = over_seeds(less)
    for what, other in (("both coefficients above 1", found.beyond), ("whole map", found.everywhere)):
        for m in methods:
            numbers[f"xi, {what} minus [0, 1]^2, {LABELS[m]}"] = over_seeds(other(m) - found.box(m))
    return StudyResult(
        measured=f"Mean error on [0, 1]^2: {_said(numbers, methods)}. {about(setting, stages)}",
        numbers=numbers | controlled(run, setting, stages),
        figures=heat_maps(found, methods),
    )


@study("editing/fig6.8", sizes=SIZES)
def fig6_8(
    run: Run, *, stages: Stages = 7, pairs: Pairs = 7, points: Points = 256, grid: Grid = 19, setting: Setting = PAPER
) -> StudyResult:
    """Disentanglement error after tangent fine-tuning, against the linearisation after the fact."""
    found = maps(run, setting, stages, pairs=pairs, points=points, grid=grid)
    apart = {m: over_seeds(found.box("linear") - found.box(m)) for m in ("post-hoc", "non-linear")}
    numbers = {
        "xi on [0, 1]^2, tangent minus after the fact": apart["post-hoc"],
        "xi on [0, 1]^2, tangent minus fine-tuned": apart["non-linear"],
        **_numbers(found, METHODS),
    }
    return StudyResult(
        measured=f"Mean error on [0, 1]^2: {_said(numbers, METHODS)}. {about(setting, stages)}",
        numbers=numbers | controlled(run, setting, stages),
        figures=heat_maps(found, ("post-hoc", "linear")),
    )


@study("editing/fig6.5", sizes=sizes({"several": "1,2", "pairs": 2, **SMALL}, {"several": "5,7", "pairs": 2, **MEDIUM}))
def fig6_5(
    run: Run,
    *,
    several: Several = (5, 6, 7),
    pairs: Pairs = 7,
    points: Points = 256,
    grid: Grid = 19,
    setting: Setting = PAPER,
) -> StudyResult:
    """Disentanglement error of pairs of tasks, for networks of several sizes, each with its own pre-training.

    Beside it how far a weight moves in fine-tuning, ||tau|| / sqrt(m): the reason the paper gives for the growth.
    """
    several, compared = tuple(sorted(several)), ("non-linear", "post-hoc")
    found = {w: maps(run, setting, w, methods=compared, pairs=pairs, points=points, grid=grid) for w in several}
    small, large = found[several[0]], found[several[-1]]
    grows = {m: over_seeds(large.box(m) - small.box(m)) for m in compared}
    numbers = {f"xi on [0, 1]^2, largest minus smallest, {LABELS[m]}": grow for m, grow in grows.items()}
    moved = over_seeds(large.rms["non-linear"] - small.rms["non-linear"])
    numbers["||tau|| / sqrt(m), largest minus smallest"] = moved
    for w, each in found.items():
        numbers[f"||tau|| / sqrt(m), {w} stages"] = over_seeds(each.rms["non-linear"])
        numbers |= {f"{name}, {w} stages": value for name, value in _numbers(each, compared).items()}
    chart = Chart(
        "sizes", "Disentanglement error by size", "stages of the encoder", "mean error on [0, 1]^2",
        tuple(through(LABELS[m], several, [over_seeds(found[w].box(m)) for w in several]) for m in compared),
        alt="The mean disentanglement error on [0, 1]^2 against the number of stages.",
        caption="Mean and standard error; the text says over what.",
    )  # fmt: skip
    ends = dict.fromkeys((several[0], several[-1]))
    shown = [figure for w in ends for figure in heat_maps(found[w], ("non-linear",), f"{w} stages")]
    return StudyResult(
        measured=f"From {several[0]} stages to {several[-1]} the mean error on [0, 1]^2 changes by "
        f"{grows['non-linear']} for the network and by {grows['post-hoc']} for its linearisation. "
        f"{about(setting, several)}",
        numbers=numbers | controlled(run, setting, several[-1]),
        figures=(chart, *shown),
    )


@study(
    "editing/fig6.10",
    sizes=sizes(
        SMALL | TRIAL | {"kernel_points": 20, "outputs": 1}, MEDIUM | {"pairs": 3, "kernel_points": 40, "outputs": 1}
    ),
)
def fig6_10(
    run: Run,
    *,
    stages: Stages = 7,
    pairs: Pairs = 7,
    points: Points = 256,
    grid: Grid = 19,
    kernel_points: Annotated[int, "images of the task in the kernel, and as many of the control set"] = 100,
    outputs: Annotated[int, "classes of a task whose kernels are taken, at most"] = 3,
    setting: Setting = PAPER,
) -> StudyResult:
    """Disentanglement error (6.10) and localised eigenfunctions (6.11) behind the heads of the pre-trained encoder, for
    an encoder that was never trained.
    """
    methods = ("non-linear", "linear")
    shown = {
        start: maps(run, setting, stages, methods=methods, start=start, pairs=pairs, points=points, grid=grid)
        for start in STARTS
    }
    numbers: dict[str, Estimate] = {}
    for method in methods:
        boxes = [shown[start].box(method) for start in STARTS]
        numbers[f"xi on [0, 1]^2, random minus pre-trained, {LABELS[method]}"] = over_seeds(boxes[0] - boxes[1])
    for start, each in shown.items():
        numbers |= {f"{name}, {start}": value for name, value in _numbers(each, methods).items()}
    local = {}
    for start in STARTS:
        found = energies(run, setting, stages, kernel_points, outputs, start)
        local[start] = torch.stack([contrasts(values) for values in found.values()], 1)  # [seeds, tasks]
        numbers[f"energy on the task minus control, {start}"] = over_seeds(local[start])
    numbers["energy contrast, random minus pre-trained"] = over_seeds(local["random"] - local["pre-trained"])
    return StudyResult(
        measured=f"Mean error on [0, 1]^2: {_said(numbers, methods, ', random')}; pre-trained "
        f"{_said(numbers, methods, ', pre-trained')}. {about(setting, stages)}",
        numbers=numbers | controlled(run, setting, stages),
        figures=heat_maps(shown["random"], methods, "random start"),
    )


def _numbers(found: Maps, methods: tuple[str, ...]) -> dict[str, Estimate]:
    return {f"xi on [0, 1]^2, {LABELS[method]}": over_seeds(found.box(method)) for method in methods}


def _said(numbers: dict[str, Estimate], methods: tuple[str, ...], more: str = "") -> str:
    return ", ".join(f"{LABELS[m]} {numbers[f'xi on [0, 1]^2, {LABELS[m]}{more}']}" for m in methods)
