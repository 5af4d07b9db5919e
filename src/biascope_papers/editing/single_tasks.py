"""Fig. 6.2, 6.7, D.1 and D.3: single tasks, by the fine-tuned network and its linearisations. On a stand-in, not CLIP.

Test accuracy of f(theta_0 + tau) (fine-tuned), f_lin(theta_0 + tau) (linearised after the fact) and f_lin(theta_0 +
tau_lin) (tangent fine-tuning), one task at a time; `stand_in` says what theta_0 is.
"""

from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import over_seeds, through
from biascope_papers.editing.measures import STARTS, Accuracies, about, accuracies, by_task, controlled, paired, spoken
from biascope_papers.editing.stand_in import LABELS, METHODS, ONE_SIZE, PAPER, SIZES, Setting, Several, Stages


@study("editing/fig6.2", sizes=ONE_SIZE)
def fig6_2(run: Run, *, stages: Stages = 7, setting: Setting = PAPER) -> StudyResult:
    """Accuracy of fine-tuned networks and of their linearisations after the fact."""
    found = accuracies(run, setting, stages, methods=("non-linear", "post-hoc"))
    lost = paired(found["non-linear"].each_single, found["post-hoc"].each_single)
    gaps = dict(zip(map(spoken, setting.tasks), lost))
    return StudyResult(
        measured="Accuracy lost after the fact: "
        f"{', '.join(f'{task} {gap}' for task, gap in gaps.items())}. {about(setting, stages)}",
        numbers={f"fine-tuned minus linearised after the fact, {task}": gap for task, gap in gaps.items()}
        | _means(found)
        | controlled(run, setting, stages),
        figures=(_by_task(setting, found),),
    )


@study("editing/fig6.7", sizes=ONE_SIZE)
def fig6_7(run: Run, *, stages: Stages = 7, setting: Setting = PAPER) -> StudyResult:
    """The gap to the fine-tuned network that tangent fine-tuning leaves, against linearisation after the fact."""
    found = accuracies(run, setting, stages)
    late, tangent = (found["non-linear"].single - found[method].single for method in ("post-hoc", "linear"))
    numbers = {"fine-tuned minus after the fact": over_seeds(late), "fine-tuned minus tangent": over_seeds(tangent)}
    more = {"tangent minus after the fact": over_seeds(late - tangent), **controlled(run, setting, stages)}
    after, left = numbers.values()
    return StudyResult(
        measured=f"Accuracy lost to fine-tuning: {after} by linearisation after the fact, {left} by tangent "
        f"fine-tuning. {about(setting, stages)}",
        numbers=numbers | more | _means(found),
        figures=(_by_task(setting, found),),
    )


@study("editing/figD.1", sizes=SIZES)
def figD_1(run: Run, *, several: Several = (5, 6, 7), setting: Setting = PAPER) -> StudyResult:
    """Single tasks by all methods, at several sizes."""
    several = tuple(sorted(several))
    found = {stages: accuracies(run, setting, stages) for stages in several}
    numbers, gaps = controlled(run, setting, several[-1]), {}
    for stages, each in found.items():
        rows = {method: each[method].single for method in METHODS}
        for one, two in (("non-linear", "linear"), ("linear", "post-hoc")):
            numbers[f"{LABELS[one]} minus {LABELS[two]}, {stages} stages"] = over_seeds(rows[one] - rows[two])
        gaps[stages] = [rows["non-linear"] - rows[method] for method in ("linear", "post-hoc")]
        numbers |= {f"{name}, {stages} stages": value for name, value in _means(each).items()}
    shrinks = [over_seeds(small - large) for small, large in zip(gaps[several[0]], gaps[several[-1]])]
    for method, shrink in zip(("linear", "post-hoc"), shrinks):
        numbers[f"gap of {LABELS[method]}, smallest minus largest network"] = shrink
    means = {LABELS[m]: {w: over_seeds(found[w][m].single) for w in several} for m in METHODS}
    chart = _by_size("sizes", "Single tasks, by size", means, "Accuracy of three methods against the number of stages.")
    return StudyResult(
        measured=f"From the smallest network to the largest the gap to fine-tuning shrinks by {shrinks[0]} for tangent "
        f"fine-tuning and by {shrinks[1]} for the linearisation after the fact. {about(setting, several)}",
        numbers=numbers,
        figures=(chart, _by_task(setting, found[several[-1]], f"Single tasks, {several[-1]} stages")),
    )


@study("editing/figD.3", sizes=SIZES)
def figD_3(run: Run, *, several: Several = (5, 6, 7), setting: Setting = PAPER) -> StudyResult:
    """Single tasks from random initialisation, at several sizes."""
    several = tuple(sorted(several))
    found = {s: {w: accuracies(run, setting, w, s, ("non-linear", "linear")) for w in several} for s in STARTS}
    random = {w: each["non-linear"].single for w, each in found["random"].items()}
    worse = over_seeds(random[several[0]] - random[several[-1]])
    numbers = {"fine-tuned from random, smallest minus largest": worse, **controlled(run, setting, several[-1])}
    rows = {
        f"{LABELS[method]}, {start}": {w: over_seeds(found[start][w][method].single) for w in several}
        for start in STARTS
        for method in ("non-linear", "linear")
    }
    numbers |= {f"{label}, {w} stages": value for label, row in rows.items() for w, value in row.items()}
    each = ", ".join(f"{value} at {w} stages" for w, value in rows["fine-tuned, random"].items())
    return StudyResult(
        measured=f"Fine-tuned from random initialisation: {each}. {about(setting, several)}",
        numbers=numbers,
        figures=(
            _by_size("random-sizes", "Single tasks from random initialisation", rows,
                      "Accuracy against the number of stages, from both starts."),
        ),
    )  # fmt: skip


def _means(found: dict[str, Accuracies]) -> dict[str, Estimate]:
    plain = found["non-linear"]
    made = {"accuracy, pre-trained": over_seeds(plain.before)}
    made["accuracy gained by fine-tuning"] = over_seeds(plain.single - plain.before)
    return made | {f"accuracy, {LABELS[method]}": over_seeds(each.single) for method, each in found.items()}


def _by_task(setting: Setting, found: dict[str, Accuracies], title: str = "Single tasks") -> Chart:
    rows = {LABELS[method]: each.single for method, each in found.items()}
    rows["pre-trained"] = found["non-linear"].before
    return by_task("single", title, setting.tasks, rows, "Accuracy of every method on every task.")


def _by_size(name: str, title: str, rows: dict[str, dict[int, Estimate]], alt: str) -> Chart:
    """Accuracies {label: {stages: estimate}}."""
    return Chart(
        name, title, "stages of the encoder", "test accuracy, mean over tasks",
        tuple(through(label, row, row.values()) for label, row in rows.items()),
        alt=alt, caption="Mean and standard error; the text says over what.",
    )  # fmt: skip
