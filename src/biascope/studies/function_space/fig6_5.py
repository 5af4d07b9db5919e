"""Fig. 6.5: the region of low disentanglement error at several sizes. On a stand-in, not CLIP.

As Fig. 6.4 (same error, same region), for the fine-tuned network and its linearisation after the fact, one pair of
tasks, and encoders of several widths, each with its own pre-training. Beside it how far a weight moves in fine-tuning,
||tau|| / sqrt(m): the reason the paper gives for the growth.

Verdict rule, by two standard errors over seeds: "confirmed" if the region of the largest network is larger than that of
the smallest, for the fine-tuned network and for its linearisation.
"""

from typing import Annotated

from biascope.studies.estimates import above, curve, decide, over_seeds
from biascope.studies.function_space.editing_charts import about, heat_maps, spoken
from biascope.studies.function_space.task_measures import LOW, maps
from biascope.studies.function_space.task_networks import LABELS, LAPTOP, PAPER, SMOKE, Setting
from biascope.studies.registry import study
from biascope.studies.result import Chart, StudyResult
from biascope.studies.runs import Run

CLAIM = "The region of low disentanglement error grows with the size of the model."
COMPARED = ("non-linear", "post-hoc")


@study(
    "editing/fig6.5",
    paper="function-space",
    figure="6.5",
    claim=CLAIM,
    sizes={
        "smoke": SMOKE | {"widths": "2,4", "points": 60, "grid": 7},
        "laptop": {},
        "paper": PAPER | {"widths": "96,192,384", "points": 2048, "grid": 25},
    },
)
def fig6_5(
    run: Run,
    *,
    widths: Annotated[tuple[int, ...], "of encoders of several sizes"] = (4, 8),
    points: Annotated[int, "test images per task"] = 128,
    grid: Annotated[int, "coefficients per task between -3 and 3; 19 and 25 contain 0 and 1"] = 19,
    setting: Setting = LAPTOP,
) -> StudyResult:
    """Disentanglement error of one pair of tasks, for networks of several sizes."""
    widths = tuple(sorted(widths))
    found = {w: maps(run, setting, w, methods=COMPARED, pairs=1, points=points, grid=grid) for w in widths}
    small, large = found[widths[0]], found[widths[-1]]
    grows = {method: over_seeds(large.region(method) - small.region(method)) for method in COMPARED}
    numbers = {f"low region, largest minus smallest, {LABELS[method]}": grow for method, grow in grows.items()}
    for w, each in found.items():
        numbers[f"||tau|| / sqrt(m), width {w}"] = over_seeds(each.rms["non-linear"])
        for method in COMPARED:
            numbers[f"low region, {LABELS[method]}, width {w}"] = over_seeds(each.region(method))
            numbers[f"xi on [0, 1]^2, {LABELS[method]}, width {w}"] = over_seeds(each.box(method))
    sizes = Chart(
        "sizes", "Region of low disentanglement error", "width of the encoder", "share of the map with low error",
        tuple(
            curve(LABELS[method], widths, [[float(found[w].region(method)[s, 0]) for w in widths]
                                           for s in range(setting.seeds)])
            for method in COMPARED
        ),
        alt="The share of the map where the error is low, against the width.",
        caption=f"Share of the coefficients on [-3, 3]^2 with an error up to {LOW:g}. Mean and standard error over "
        "seeds.",
    )  # fmt: skip
    ends = (
        heat_maps(found[w], ("non-linear",), f"width {w}")
        for w in (widths if len(widths) < 3 else (widths[0], widths[-1]))
    )
    moved = [numbers[f"||tau|| / sqrt(m), width {w}"] for w in (widths[0], widths[-1])]
    return StudyResult(
        decide(all(map(above, grows.values())), grows.values()),
        CLAIM,
        f"From width {widths[0]} to {widths[-1]} the low region of {' and '.join(map(spoken, large.pairs[0]))} grows "
        f"by {grows['non-linear']} of the map for the network and by {grows['post-hoc']} for its linearisation; a "
        f"weight moves {moved[0]} in the smallest and {moved[1]} in the largest network. {about(setting, widths)}",
        numbers,
        (sizes, *(shown for maps_ in ends for shown in maps_)),
    )
