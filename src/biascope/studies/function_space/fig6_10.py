"""Fig. 6.10 and 6.11: disentanglement and localisation from random initialisation. On a stand-in, not CLIP.

The maps of Fig. 6.4 and the energies of Fig. 6.9 for an encoder that was never trained, behind the heads of the
pre-trained one, against those of the pre-trained encoder.

Verdict rule, each part by two standard errors over seeds. "Confirmed" if
1. with plain and with tangent fine-tuning the region of low error (see Fig. 6.4) is less than half of that of the
   pre-trained encoder;
2. the energy of the kernel's eigenfunctions on the task minus that on the control set, averaged over tasks, is above 0,
   and below that of the pre-trained encoder.
Seen in the first runs: networks that predict one class for all images, as some do at negative coefficients, agree and
count as low error. The rule was left as it is; the mean error on [0, 1]^2 is beside it.
"""

from typing import Annotated

import torch

from biascope.studies.estimates import above, below, decide, over_seeds
from biascope.studies.function_space.editing_charts import about, contrasts, heat_maps
from biascope.studies.function_space.task_measures import energies, maps
from biascope.studies.function_space.task_networks import LABELS, LAPTOP, PAPER, SMOKE, Setting, Start
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "From random initialisation there is no region of low disentanglement error, and localisation is weaker but not "
    "absent."
)
COMPARED = ("non-linear", "linear")
STARTS: tuple[Start, ...] = ("random", "pre-trained")


@study(
    "editing/fig6.10",
    paper="function-space",
    figure="6.10, 6.11",
    claim=CLAIM,
    sizes={
        "smoke": SMOKE | {"width": 4, "pairs": 1, "points": 60, "grid": 7, "kernel_points": 40, "outputs": 2},
        "laptop": {},
        "paper": PAPER | {"width": 192, "points": 2048, "grid": 25, "kernel_points": 200, "outputs": 10},
    },
)
def fig6_10(
    run: Run,
    *,
    width: Annotated[int, "of the encoder"] = 8,
    pairs: Annotated[int, "pairs of neighbours in the list of tasks"] = 3,
    points: Annotated[int, "test images per task in the maps"] = 128,
    grid: Annotated[int, "coefficients per task between -3 and 3; 19 and 25 contain 0 and 1"] = 19,
    kernel_points: Annotated[int, "images of the task in the kernel, and as many of the control set"] = 100,
    outputs: Annotated[int, "classes of a task whose kernels are taken, at most"] = 3,
    setting: Setting = LAPTOP,
) -> StudyResult:
    """Disentanglement error and localised eigenfunctions of a network that was never trained."""
    shown = {
        start: maps(run, setting, width, methods=COMPARED, start=start, pairs=pairs, points=points, grid=grid)
        for start in STARTS
    }
    numbers: dict[str, Estimate] = {}
    shrunk = []
    for method in COMPARED:
        random, trained = (shown[start].region(method) for start in STARTS)
        shrunk.append(over_seeds(random - trained / 2))
        numbers[f"low region, random minus half of pre-trained, {LABELS[method]}"] = shrunk[-1]
        for start in STARTS:
            numbers[f"low region, {LABELS[method]}, {start}"] = over_seeds(shown[start].region(method))
            numbers[f"xi on [0, 1]^2, {LABELS[method]}, {start}"] = over_seeds(shown[start].box(method))
    local = {}
    for start in STARTS:
        found = energies(run, setting, width, kernel_points, outputs, start)
        local[start] = torch.stack([contrasts(values) for values in found.values()], 1)  # [seeds, tasks]
        numbers[f"energy on the task minus control, {start}"] = over_seeds(local[start])
    weaker = over_seeds(local["random"] - local["pre-trained"])
    numbers["energy contrast, random minus pre-trained"] = weaker
    left = numbers["energy on the task minus control, random"]

    def both(what: str) -> str:
        return "; ".join(
            f"{LABELS[m]} {numbers[f'{what}, {LABELS[m]}, random']} (pre-trained "
            f"{numbers[f'{what}, {LABELS[m]}, pre-trained']})"
            for m in COMPARED
        )

    return StudyResult(
        decide(all(map(below, shrunk)) and above(left) and below(weaker), [*shrunk, left, weaker]),
        CLAIM,
        f"Low region from random initialisation, share of the map: {both('low region')}. Mean error on "
        f"[0, 1]^2: {both('xi on [0, 1]^2')}. Energy on the task minus that on the "
        f"control set: {left} (pre-trained {numbers['energy on the task minus control, pre-trained']}; difference "
        f"{weaker}). {about(setting, width)}",
        numbers,
        heat_maps(shown["random"], COMPARED, "random start"),
    )
