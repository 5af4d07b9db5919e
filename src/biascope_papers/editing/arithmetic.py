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
    paired,
    share,
    share_kept,
    spoken,
)
from biascope_papers.editing.stand_in import LABELS, ONE_SIZE, PAPER, Setting, Stages

COMPARED = ("non-linear", "linear")


@study("editing/table6.1", sizes=ONE_SIZE)
def table6_1(run: Run, *, stages: Stages = 7, setting: Setting = PAPER) -> StudyResult:
    """Accuracy of the sum of all task vectors, by three methods."""
    found = accuracies(run, setting, stages)
    plain, late, tangent = found.values()
    gain, before = over_seeds(tangent.multi - plain.multi), over_seeds(plain.before)
    numbers = {"tangent minus plain fine-tuning, merged": gain, "accuracy, pre-trained": before}
    numbers |= controlled(run, setting, stages)
    numbers["linearised after the fact minus fine-tuned, merged"] = over_seeds(late.multi - plain.multi)
    for name, one in (("tangent", tangent), ("linearised after the fact", late)):
        more = one.multi / one.single - plain.multi / plain.single
        numbers[f"{name} minus plain fine-tuning, normalised"] = over_seeds(more)
    rows = []
    for method, label in LABELS.items():
        mine = found[method]
        merged, kept = over_seeds(mine.multi), over_seeds(mine.multi / mine.single)
        numbers |= {f"accuracy, merged, {label}": merged, f"normalised accuracy, {label}": kept}
        numbers[f"coefficient, {label}"] = Estimate.of(mine.alpha)
        numbers[f"merged minus pre-trained, {label}"] = over_seeds(mine.multi - mine.before)
        rows.append(f"{label} {merged} (normalised {kept})")
    return StudyResult(
        measured=f"Merged: {', '.join(rows)}; pre-trained {before}. {about(setting, stages)}",
        numbers=numbers,
        figures=(_merged(setting, found),),
    )


@study("editing/fig6.3", sizes=ONE_SIZE)
def fig6_3(run: Run, *, stages: Stages = 7, setting: Setting = PAPER) -> StudyResult:
    """Accuracy of the sum of all task vectors, task by task."""
    found = accuracies(run, setting, stages)
    over_plain, over_late = (
        paired(found["linear"].each_multi, found[m].each_multi) for m in ("non-linear", "post-hoc")
    )
    leads = {spoken(task): pair for task, *pair in zip(setting.tasks, over_plain, over_late)}
    numbers = controlled(run, setting, stages)
    numbers["merged minus pre-trained, fine-tuned"] = over_seeds(found["non-linear"].multi - found["non-linear"].before)
    for task, (plain, late) in leads.items():
        numbers[f"tangent minus plain fine-tuning, merged, {task}"] = plain
        numbers[f"tangent minus linearised after the fact, merged, {task}"] = late
    return StudyResult(
        measured="Tangent fine-tuning is above plain fine-tuning by "
        f"{', '.join(f'{lead[0]} ({task})' for task, lead in leads.items())}. {about(setting, stages)}",
        numbers=numbers,
        figures=(_merged(setting, found),),
    )


@study("editing/table6.2", sizes=ONE_SIZE)
def table6_2(
    run: Run,
    *,
    stages: Stages = 7,
    keep: Annotated[float, "share of the control accuracy that must be left on held-out images"] = 0.95,
    setting: Setting = PAPER,
) -> StudyResult:
    """Accuracy on what was subtracted and on the control set, by three methods."""
    found = negations(run, setting, stages, keep)
    numbers, rows = controlled(run, setting, stages), []
    plain, late, tangent = found.values()
    for method, label in LABELS.items():
        target, control, alpha = (over_seeds(found[method][what]) for what in ("target", "control", "alpha"))
        numbers |= {f"target accuracy, {label}": target, f"control accuracy, {label}": control}
        numbers[f"coefficient, {label}"] = alpha
        rows.append(f"{label} {target} / {control}")
    for what in ("target", "control"):
        numbers[f"{what} accuracy, pre-trained"] = over_seeds(plain[f"{what}_before"])
        numbers[f"{what}, tangent minus plain fine-tuning"] = over_seeds(tangent[what] - plain[what])
        numbers[f"{what}, plain fine-tuning minus pre-trained"] = over_seeds(plain[what] - plain[f"{what}_before"])
        numbers[f"{what}, linearised after the fact minus plain fine-tuning"] = over_seeds(late[what] - plain[what])
    before, control = (numbers[f"{what} accuracy, pre-trained"] for what in ("target", "control"))
    targets = {LABELS[method]: each["target"] for method, each in found.items()}
    targets["pre-trained"] = plain["target_before"]
    alt = "Accuracy on every task after its subtraction."
    return StudyResult(
        measured=f"Target / control accuracy: {', '.join(rows)}; pre-trained {before} / {control}. "
        f"{about(setting, stages)}",
        numbers=numbers,
        figures=(by_task("target", "Task subtracted", setting.tasks, targets, alt),),
    )


@study("editing/table6.3", sizes=ONE_SIZE)
def table6_3(run: Run, *, stages: Stages = 7, setting: Setting = PAPER) -> StudyResult:
    """Single and merged accuracies from random initialisation, behind the heads of the pre-trained encoder.

    Share of the gain: (merged - before) / (single - before), all averaged over tasks.
    """
    numbers: dict[str, Estimate] = {}
    found, compared = {s: accuracies(run, setting, stages, s, COMPARED) for s in STARTS}, [LABELS[m] for m in COMPARED]
    rows = {"random, before": found["random"]["non-linear"].before}
    for start, (method, mine) in ((s, each) for s in STARTS for each in found[s].items()):
        which = f"{LABELS[method]}, {start}"
        numbers[f"accuracy before, {start}"] = over_seeds(mine.before)
        numbers[f"single, {which}"], numbers[f"merged, {which}"] = over_seeds(mine.single), over_seeds(mine.multi)
        numbers[f"gain of fine-tuning, {which}"] = over_seeds(mine.single - mine.before)
        numbers[f"share of the gain kept, {which}"] = share(share_kept(mine), setting.seeds)
        if start == "random":
            rows |= {f"single, {LABELS[method]}": mine.single, f"merged, {LABELS[method]}": mine.multi}
    numbers |= controlled(run, replace(setting, check=True), stages, COMPARED)
    kept = ", ".join(f"{label} {numbers[f'share of the gain kept, {label}, random']}" for label in compared)
    alt = "Single and merged accuracies by task."
    return StudyResult(
        measured=f"Share of the gain that a random encoder keeps: {kept}. {about(setting, stages)}",
        numbers=numbers,
        figures=(by_task("random", "From random initialisation", setting.tasks, rows, alt),),
    )


def _merged(setting: Setting, found: dict[str, Accuracies]) -> Chart:
    rows = {LABELS[method]: each.multi for method, each in found.items()}
    rows["pre-trained"] = found["non-linear"].before
    return by_task("merged", "All tasks added", setting.tasks, rows, "Accuracy of the merged networks on every task.")
