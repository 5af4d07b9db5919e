"""Fig. 6.4 and 6.8: maps of the weight disentanglement error of two tasks. On a stand-in, not CLIP.

xi(a1, a2) = sum over both tasks of the share of its test images whose predicted class differs between theta_0 + a_t
tau_t and theta_0 + a1 tau1 + a2 tau2; between 0 and 2. For the fine-tuned network, its linearisation after the fact,
and tangent fine-tuning. The region of low error is the share of the map [-3, 3]^2 where xi is at most 0.2, a tenth of
its range, averaged over pairs of tasks. (The paper's 20 points contain neither 0 nor 1; the grids here contain both.)

Verdict rules, each by two standard errors over seeds:
6.4  "Confirmed" if for the fine-tuned network and its linearisation xi is lower on [0, 1]^2, where coefficients are
     searched, than over the whole map; and the region of the linearisation is larger than that of the network.
6.8  "Confirmed" if the region of tangent fine-tuning is above nine tenths of that of the linearisation after the fact.
Seen in the first runs: at laptop size the region is about one hundredth of the map, three to five cells of its 361. The
rules were left as they are; the mean error on [0, 1]^2 is the finer number beside it.
"""

from typing import Annotated

from biascope.studies.estimates import above, decide, over_seeds
from biascope.studies.function_space.editing_charts import about, heat_maps
from biascope.studies.function_space.task_measures import Maps, maps
from biascope.studies.function_space.task_networks import LABELS, LAPTOP, METHODS, PAPER, SMOKE, Setting
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM_4 = "The disentanglement error is low near the origin, and the low region is larger for the linearisation."
CLAIM_8 = (
    "After tangent fine-tuning the region of low disentanglement error is as large as that of the linearisation after "
    "the fact."
)
SIZES = {
    "smoke": SMOKE | {"width": 4, "pairs": 1, "points": 60, "grid": 7},
    "laptop": {},
    "paper": PAPER | {"width": 192, "points": 2048, "grid": 25},
}


@study("editing/fig6.4", paper="function-space", figure="6.4", claim=CLAIM_4, sizes=SIZES)
def fig6_4(
    run: Run,
    *,
    width: Annotated[int, "of the encoder"] = 8,
    pairs: Annotated[int, "pairs of neighbours in the list of tasks"] = 3,
    points: Annotated[int, "test images per task"] = 128,
    grid: Annotated[int, "coefficients per task between -3 and 3; 19 and 25 contain 0 and 1"] = 19,
    setting: Setting = LAPTOP,
) -> StudyResult:
    """Disentanglement error of fine-tuned networks and of their linearisations."""
    methods = ("non-linear", "post-hoc")
    found = maps(run, setting, width, methods=methods, pairs=pairs, points=points, grid=grid)
    dips = {method: over_seeds(found.everywhere(method) - found.box(method)) for method in methods}
    larger = over_seeds(found.region("post-hoc") - found.region("non-linear"))
    numbers = {"low region, after the fact minus fine-tuned": larger, **_numbers(found, methods)}
    numbers |= {f"xi, whole map minus [0, 1]^2, {LABELS[method]}": dip for method, dip in dips.items()}
    regions = [numbers[f"low region, {LABELS[method]}"] for method in methods]
    boxes = [numbers[f"xi on [0, 1]^2, {LABELS[method]}"] for method in methods]
    return StudyResult(
        decide(all(map(above, dips.values())) and above(larger), [*dips.values(), larger]),
        CLAIM_4,
        f"Low region: {regions[0]} of the map for the network, {regions[1]} for its linearisation (difference "
        f"{larger}). Mean error on [0, 1]^2: {boxes[0]} and {boxes[1]}; it is lower there than over the whole map by "
        f"{dips['non-linear']} and {dips['post-hoc']}. {len(found.pairs)} pairs of tasks. {about(setting, width)}",
        numbers,
        heat_maps(found, methods),
    )


@study("editing/fig6.8", paper="function-space", figure="6.8", claim=CLAIM_8, sizes=SIZES)
def fig6_8(
    run: Run,
    *,
    width: Annotated[int, "of the encoder"] = 8,
    pairs: Annotated[int, "pairs of neighbours in the list of tasks"] = 3,
    points: Annotated[int, "test images per task"] = 128,
    grid: Annotated[int, "coefficients per task between -3 and 3; 19 and 25 contain 0 and 1"] = 19,
    setting: Setting = LAPTOP,
) -> StudyResult:
    """Disentanglement error after tangent fine-tuning, against the linearisation after the fact."""
    found = maps(run, setting, width, pairs=pairs, points=points, grid=grid)
    regions = {method: found.region(method) for method in METHODS}
    enough = over_seeds(regions["linear"] - 0.9 * regions["post-hoc"])
    over_plain = over_seeds(regions["linear"] - regions["non-linear"])
    numbers = {
        "low region, tangent minus 0.9 of after the fact": enough,
        "low region, tangent minus fine-tuned": over_plain,
        **_numbers(found, METHODS),
    }
    said = ", ".join(f"{LABELS[method]} {numbers[f'low region, {LABELS[method]}']}" for method in METHODS)
    boxes = ", ".join(str(numbers[f"xi on [0, 1]^2, {LABELS[method]}"]) for method in METHODS)
    return StudyResult(
        decide(above(enough), [enough]),
        CLAIM_8,
        f"Low region, share of the map: {said}. Tangent minus nine tenths of after the fact: {enough}; tangent minus "
        f"fine-tuned: {over_plain}. Mean error on [0, 1]^2, in the same order: {boxes}. "
        f"{len(found.pairs)} pairs of tasks. {about(setting, width)}",
        numbers,
        heat_maps(found, ("post-hoc", "linear")),
    )


def _numbers(found: Maps, methods: tuple[str, ...]) -> dict[str, Estimate]:
    made = {}
    for method in methods:
        made[f"low region, {LABELS[method]}"] = over_seeds(found.region(method))
        made[f"xi on [0, 1]^2, {LABELS[method]}"] = over_seeds(found.box(method))
    return made
