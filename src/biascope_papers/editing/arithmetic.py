"""Tables 6.1 to 6.3 and Fig. 6.3: task addition and negation, plain and in the tangent space. On a stand-in, not CLIP.

Addition: theta_0 + a sum_t tau_t with one a for all tasks, found on held-out images by the normalised accuracy, for
every method by itself. Negation: theta_0 - a tau_t; of the coefficients that leave 95 % of the accuracy on the control
set, the one with the lowest accuracy on the task. The control set is one of the pre-training (the paper's: ImageNet).
"""

from dataclasses import replace
from typing import Annotated

from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import over_seeds
from biascope_papers.editing.measures import (
    STARTS,
    Accuracies,
    about,
    accuracies,
    by_task,
    controlled,
    negations,
    spoken,
)
from biascope_papers.editing.stand_in import LABELS, LAPTOP, METHODS, ONE_WIDTH, Setting, Width

COMPARED = ("non-linear", "linear")


@study("editing/table6.1", sizes=ONE_WIDTH)
def table6_1(run: Run, *, width: Width = 8, setting: Setting = LAPTOP) -> StudyResult:
    """Accuracy of the sum of all task vectors, by three methods."""
    found = accuracies(run, setting, width)
    plain, late, tangent = (found.of(method) for method in METHODS)
    gain, before = over_seeds(found.of("linear").multi - found.of("non-linear").multi), over_seeds(found.before)
    numbers = {"tangent minus plain fine-tuning, merged": gain, "accuracy, pre-trained": before}
    numbers |= controlled(run, setting, width)
    numbers["linearised after the fact minus fine-tuned, merged"] = over_seeds(late.multi - plain.multi)
    for name, one in (("tangent", tangent), ("linearised after the fact", late)):
        more = one.multi / one.single - plain.multi / plain.single
        numbers[f"{name} minus plain fine-tuning, normalised"] = over_seeds(more)
    rows = []
    for method, label in LABELS.items():
        mine = found.of(method)
        merged, kept = over_seeds(mine.multi), over_seeds(mine.multi / mine.single)
        numbers |= {f"accuracy, merged, {label}": merged, f"normalised accuracy, {label}": kept}
        numbers[f"coefficient, {label}"] = Estimate.of(mine.alpha)
        numbers[f"merged minus pre-trained, {label}"] = over_seeds(mine.multi - found.before)
        rows.append(f"{label} {merged} (normalised {kept})")
    return StudyResult(
        measured=f"Merged: {', '.join(rows)}; pre-trained {before}. {about(setting, width)}",
        numbers=numbers,
        figures=(_merged(setting, found),),
    )


@study("editing/fig6.3", sizes=ONE_WIDTH)
def fig6_3(run: Run, *, width: Width = 8, setting: Setting = LAPTOP) -> StudyResult:
    """Accuracy of the sum of all task vectors, task by task."""
    found = accuracies(run, setting, width)
    over_plain, over_late = (found.of("linear").multi - found.of(other).multi for other in ("non-linear", "post-hoc"))
    leads = {
        spoken(task): (Estimate.of(over_plain[:, t]), Estimate.of(over_late[:, t]))
        for t, task in enumerate(setting.tasks)
    }
    numbers = controlled(run, setting, width)
    numbers["merged minus pre-trained, fine-tuned"] = over_seeds(found.of("non-linear").multi - found.before)
    for task, (plain, late) in leads.items():
        numbers[f"tangent minus plain fine-tuning, merged, {task}"] = plain
        numbers[f"tangent minus linearised after the fact, merged, {task}"] = late
    return StudyResult(
        measured="Tangent fine-tuning is above plain fine-tuning by "
        f"{', '.join(f'{lead[0]} ({task})' for task, lead in leads.items())}. {about(setting, width)}",
        numbers=numbers,
        figures=(_merged(setting, found),),
    )


@study("editing/table6.2", sizes=ONE_WIDTH)
def table6_2(
    run: Run,
    *,
    width: Width = 8,
    keep: Annotated[float, "share of the control accuracy that must be left on held-out images"] = 0.95,
    setting: Setting = LAPTOP,
) -> StudyResult:
    """Accuracy on what was subtracted and on the control set, by three methods."""
    found = negations(run, setting, width, keep)
    numbers, rows, at = controlled(run, setting, width), [], {method: i for i, method in enumerate(METHODS)}
    for method, label in LABELS.items():
        target, control, alpha = (over_seeds(found[what][:, at[method]]) for what in ("target", "control", "alpha"))
        numbers |= {f"target accuracy, {label}": target, f"control accuracy, {label}": control}
        numbers[f"coefficient, {label}"] = alpha
        rows.append(f"{label} {target} / {control}")
    for what in ("target", "control"):
        numbers[f"{what} accuracy, pre-trained"] = over_seeds(found[f"{what}_before"][:, 0])
        gap = found[what][:, at["linear"]] - found[what][:, at["non-linear"]]
        numbers[f"{what}, tangent minus plain fine-tuning"] = over_seeds(gap)
        lost = found[what][:, at["non-linear"]] - found[f"{what}_before"][:, at["non-linear"]]
        numbers[f"{what}, plain fine-tuning minus pre-trained"] = over_seeds(lost)
        late = found[what][:, at["post-hoc"]] - found[what][:, at["non-linear"]]
        numbers[f"{what}, linearised after the fact minus plain fine-tuning"] = over_seeds(late)
    before, control = (numbers[f"{what} accuracy, pre-trained"] for what in ("target", "control"))
    targets = {LABELS[method]: found["target"][:, i] for method, i in at.items()}
    targets["pre-trained"] = found["target_before"][:, 0]
    alt = "Accuracy on every task after its subtraction."
    return StudyResult(
        measured=f"Target / control accuracy: {', '.join(rows)}; pre-trained {before} / {control}. "
        f"{about(setting, width)}",
        numbers=numbers,
        figures=(by_task("target", "Task subtracted", setting.tasks, targets, alt),),
    )


@study("editing/table6.3", sizes=ONE_WIDTH)
def table6_3(run: Run, *, width: Width = 8, setting: Setting = LAPTOP) -> StudyResult:
    """Single and merged accuracies from random initialisation, behind the heads of the pre-trained encoder.

    Share of the gain: (merged - before) / (single - before), all averaged over tasks.
    """
    numbers: dict[str, Estimate] = {}
    found, compared = {s: accuracies(run, setting, width, s) for s in STARTS}, [LABELS[m] for m in COMPARED]
    for start, each in found.items():
        numbers[f"accuracy before, {start}"] = over_seeds(each.before)
        for method in COMPARED:
            mine, which = each.of(method), f"{LABELS[method]}, {start}"
            single, multi = (table.mean(1) - mine.before.mean(1) for table in (mine.single, mine.multi))
            numbers[f"single, {which}"] = over_seeds(mine.single)
            numbers[f"merged, {which}"] = over_seeds(mine.multi)
            numbers[f"gain of fine-tuning, {which}"] = Estimate.of(single)
            numbers[f"share of the gain kept, {which}"] = Estimate.of(multi / single)
    numbers |= controlled(run, replace(setting, check=True), width)
    rows = {"random, before": found["random"].before}
    for method in COMPARED:
        mine, label = found["random"].of(method), LABELS[method]
        rows |= {f"single, {label}": mine.single, f"merged, {label}": mine.multi}
    kept = ", ".join(f"{label} {numbers[f'share of the gain kept, {label}, random']}" for label in compared)
    alt = "Single and merged accuracies by task."
    return StudyResult(
        measured=f"Share of the gain that a random encoder keeps: {kept}. {about(setting, width)}",
        numbers=numbers,
        figures=(by_task("random", "From random initialisation", setting.tasks, rows, alt),),
    )


def _merged(setting: Setting, found: Accuracies) -> Chart:
    rows = {LABELS[method]: found.of(method).multi for method in METHODS} | {"pre-trained": found.before}
    return by_task("merged", "All tasks added", setting.tasks, rows, "Accuracy of the merged networks on every task.")
