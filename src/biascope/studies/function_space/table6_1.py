"""Table 6.1 and Fig. 6.3: task addition, plain and in the tangent space. On a stand-in, not CLIP.

theta_0 + a sum_t tau_t with one coefficient a in {0, 0.05, ..., 1}, the same for all tasks, found on held-out images of
the training split by the normalised accuracy (as the appendix says), for every method by itself.

Verdict rules, each by two standard errors over seeds:
6.1  "Confirmed" if the accuracy of the merged network, averaged over tasks, is higher with tangent fine-tuning than
     with plain fine-tuning. Normalised accuracies and the linearisation after the fact are numbers.
6.3  "Confirmed" if on more than half of the tasks tangent fine-tuning is above plain fine-tuning and above the
     linearisation after the fact.
"""

from typing import Annotated

from biascope.studies.estimates import above, decide, over_seeds
from biascope.studies.function_space.editing_charts import about, by_task, spoken
from biascope.studies.function_space.task_measures import Accuracies, accuracies
from biascope.studies.function_space.task_networks import LABELS, LAPTOP, METHODS, PAPER, SMOKE, Setting
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = "Tangent fine-tuning improves the accuracy of task addition. (The normalised accuracy is not judged.)"
CLAIM_3 = "Task by task, addition with tangent fine-tuning is highest on most tasks."


@study(
    "editing/table6.1",
    paper="function-space",
    figure="Table 6.1",
    claim=CLAIM,
    sizes={"smoke": SMOKE | {"width": 4}, "laptop": {}, "paper": PAPER | {"width": 192}},
)
def table6_1(run: Run, *, width: Annotated[int, "of the encoder"] = 8, setting: Setting = LAPTOP) -> StudyResult:
    """Accuracy of the sum of all task vectors, by three methods."""
    found = accuracies(run, setting, width)
    gain = over_seeds(found.of("linear").multi - found.of("non-linear").multi)
    numbers = {"tangent minus plain fine-tuning, merged": gain, "accuracy, pre-trained": over_seeds(found.before)}
    said = []
    for method in METHODS:
        mine = found.of(method)
        merged, kept = over_seeds(mine.multi), over_seeds(mine.multi / mine.single)
        numbers[f"accuracy, merged, {LABELS[method]}"] = merged
        numbers[f"normalised accuracy, {LABELS[method]}"] = kept
        numbers[f"coefficient, {LABELS[method]}"] = Estimate.of(mine.alpha)
        said.append(f"{LABELS[method]} {merged} (normalised {kept})")
    return StudyResult(
        decide(above(gain), [gain]),
        CLAIM,
        f"Merged: {', '.join(said)}; pre-trained {numbers['accuracy, pre-trained']}. Tangent minus plain: {gain}. "
        f"{about(setting, width)}",
        numbers,
        (_chart(setting, found),),
    )


@study(
    "editing/fig6.3",
    paper="function-space",
    figure="6.3",
    claim=CLAIM_3,
    sizes={"smoke": SMOKE | {"width": 4}, "laptop": {}, "paper": PAPER | {"width": 192}},
)
def fig6_3(run: Run, *, width: Annotated[int, "of the encoder"] = 8, setting: Setting = LAPTOP) -> StudyResult:
    """Accuracy of the sum of all task vectors, task by task."""
    found = accuracies(run, setting, width)
    leads: dict[str, list[Estimate]] = {
        spoken(task): [
            Estimate.of((found.of("linear").multi - found.of(other).multi)[:, t])
            for other in ("non-linear", "post-hoc")
        ]
        for t, task in enumerate(setting.tasks)
    }
    best = [task for task, lead in leads.items() if all(map(above, lead))]
    numbers = {}
    for task, (plain, late) in leads.items():
        numbers[f"tangent minus plain fine-tuning, merged, {task}"] = plain
        numbers[f"tangent minus linearised after the fact, merged, {task}"] = late
    return StudyResult(
        decide(len(best) > len(leads) / 2, [lead for pair in leads.values() for lead in pair]),
        CLAIM_3,
        f"Tangent fine-tuning is surely highest on {len(best)} of {len(leads)} tasks. Above plain fine-tuning by "
        f"{', '.join(f'{lead[0]} ({task})' for task, lead in leads.items())}. {about(setting, width)}",
        numbers,
        (_chart(setting, found),),
    )


def _chart(setting: Setting, found: Accuracies) -> Chart:
    rows = {LABELS[method]: found.of(method).multi for method in METHODS} | {"pre-trained": found.before}
    return by_task("merged", "All tasks added", setting.tasks, rows, "Accuracy of the merged networks on every task.")
