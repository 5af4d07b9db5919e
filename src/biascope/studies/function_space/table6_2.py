"""Table 6.2: task negation, plain and in the tangent space. On a stand-in, not CLIP.

theta_0 - a tau_t with a in {0, 0.05, ..., 1}: among the coefficients that leave 95 % of the accuracy on the control
set, the one with the lowest accuracy on the task, on held-out images; reported on test images. The control set of the
paper is ImageNet, here a set of the pre-training on which nothing was fine-tuned.

Verdict rule, by two standard errors over seeds. "Confirmed" if, averaged over tasks, the target accuracy after negation
is lower with tangent fine-tuning than with plain fine-tuning, and the control accuracy is not lower by more than two
points (0.02).
"""

from typing import Annotated

from biascope.studies.estimates import above, below, decide, over_seeds
from biascope.studies.function_space.editing_charts import about, by_task, spoken
from biascope.studies.function_space.task_measures import negations
from biascope.studies.function_space.task_networks import LABELS, LAPTOP, METHODS, PAPER, SMOKE, Setting
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = "Tangent fine-tuning improves task negation: a lower target accuracy at equal control accuracy."
EQUAL = 0.02


@study(
    "editing/table6.2",
    paper="function-space",
    figure="Table 6.2",
    claim=CLAIM,
    sizes={"smoke": SMOKE | {"width": 4}, "laptop": {}, "paper": PAPER | {"width": 192}},
)
def table6_2(
    run: Run,
    *,
    width: Annotated[int, "of the encoder"] = 8,
    keep: Annotated[float, "share of the control accuracy that must be left on held-out images"] = 0.95,
    setting: Setting = LAPTOP,
) -> StudyResult:
    """Accuracy on what was subtracted and on the control set, by three methods."""
    found = negations(run, setting, width, keep)
    at = {method: i for i, method in enumerate(METHODS)}
    numbers: dict[str, Estimate] = {}
    said = []
    for method, i in at.items():
        for what in ("target", "control", "alpha"):
            name = "coefficient" if what == "alpha" else f"{what} accuracy"
            numbers[f"{name}, {LABELS[method]}"] = over_seeds(found[what][:, i])
        target, control = (numbers[f"{what} accuracy, {LABELS[method]}"] for what in ("target", "control"))
        said.append(f"{LABELS[method]} {target} / {control}")
    for what in ("target", "control"):
        numbers[f"{what} accuracy, pre-trained"] = over_seeds(found[f"{what}_before"][:, 0])
    less, kept = (over_seeds(found[what][:, at["linear"]] - found[what][:, at["non-linear"]])
                  for what in ("target", "control"))  # fmt: skip
    numbers |= {"target, tangent minus plain fine-tuning": less, "control, tangent minus plain fine-tuning": kept}
    rows = {LABELS[method]: found["target"][:, i] for method, i in at.items()}
    rows["pre-trained"] = found["target_before"][:, 0]
    return StudyResult(
        decide(below(less) and above(kept, -EQUAL), [less, kept]),
        CLAIM,
        f"Target / control accuracy: {', '.join(said)}; pre-trained {numbers['target accuracy, pre-trained']} / "
        f"{numbers['control accuracy, pre-trained']}. Tangent minus plain: {less} / {kept}. Control set: "
        f"{spoken(setting.control)}. {about(setting, width)}",
        numbers,
        (by_task("target", "Task subtracted", setting.tasks, rows, "Accuracy on every task after its subtraction."),),
    )
