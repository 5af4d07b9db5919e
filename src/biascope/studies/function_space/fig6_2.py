"""Fig. 6.2, 6.7 and D.1: single tasks, by the fine-tuned network and its linearisations. On a stand-in, not CLIP.

Test accuracy of f(theta_0 + tau) (fine-tuned), f_lin(theta_0 + tau) (linearised after the fact) and f_lin(theta_0 +
tau_lin) (tangent fine-tuning), one task at a time; `task_networks` says what theta_0 is.

Verdict rules, each by two standard errors over seeds:
6.2  "Confirmed" if on every task f_lin(theta_0 + tau) is less accurate than f(theta_0 + tau).
6.7  "Confirmed" if, averaged over tasks, the gap that tangent fine-tuning leaves to f is less than half of the gap that
     linearisation after the fact leaves.
D.1  "Confirmed" if, averaged over tasks and at every size, fine-tuned is above tangent, and tangent above after the
     fact; and both gaps to fine-tuned are smaller for the largest network than for the smallest.
"""

from typing import Annotated

from biascope.studies.estimates import above, decide, over_seeds, through
from biascope.studies.function_space.editing_charts import about, by_task, spoken
from biascope.studies.function_space.task_measures import Accuracies, accuracies
from biascope.studies.function_space.task_networks import LABELS, LAPTOP, METHODS, PAPER, SMOKE, Setting
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM_2 = (
    "The linearisation of a fine-tuned network, taken after the fact, is clearly worse than the network on all tasks."
)
CLAIM_7 = "Fine-tuning in the tangent space closes most of the gap between network and linearisation."
CLAIM_D1 = (
    "On single tasks fine-tuning is at least as good as tangent fine-tuning, and that as the linearisation after the "
    "fact; gaps shrink with size."
)


@study(
    "editing/fig6.2",
    paper="function-space",
    figure="6.2",
    claim=CLAIM_2,
    sizes={"smoke": SMOKE | {"width": 4}, "laptop": {}, "paper": PAPER | {"width": 192}},
)
def fig6_2(run: Run, *, width: Annotated[int, "of the encoder"] = 8, setting: Setting = LAPTOP) -> StudyResult:
    """Accuracy of fine-tuned networks and of their linearisations after the fact."""
    found = accuracies(run, setting, width)
    gaps = {
        spoken(task): Estimate.of((found.of("non-linear").single - found.of("post-hoc").single)[:, t])
        for t, task in enumerate(setting.tasks)
    }
    sure = [task for task, gap in gaps.items() if above(gap)]
    return StudyResult(
        decide(len(sure) == len(gaps), gaps.values()),
        CLAIM_2,
        f"On {len(sure)} of {len(gaps)} tasks surely less accurate after the fact; accuracy lost: "
        f"{', '.join(f'{task} {gap}' for task, gap in gaps.items())}. {about(setting, width)}",
        {**{f"fine-tuned minus linearised after the fact, {task}": gap for task, gap in gaps.items()},
         **_means(found)},
        (_chart(setting, found, ("non-linear", "post-hoc")),),
    )  # fmt: skip


@study(
    "editing/fig6.7",
    paper="function-space",
    figure="6.7",
    claim=CLAIM_7,
    sizes={"smoke": SMOKE | {"width": 4}, "laptop": {}, "paper": PAPER | {"width": 192}},
)
def fig6_7(run: Run, *, width: Annotated[int, "of the encoder"] = 8, setting: Setting = LAPTOP) -> StudyResult:
    """The gap to the fine-tuned network that tangent fine-tuning leaves, against linearisation after the fact."""
    found = accuracies(run, setting, width)
    best = found.of("non-linear").single
    late, tangent = (best - found.of(method).single for method in ("post-hoc", "linear"))
    closed = over_seeds(late / 2 - tangent)
    gaps = {"after the fact": over_seeds(late), "tangent": over_seeds(tangent)}
    return StudyResult(
        decide(above(closed), [closed]),
        CLAIM_7,
        f"Accuracy lost to fine-tuning, averaged over {len(setting.tasks)} tasks: {gaps['after the fact']} by "
        f"linearisation after the fact, {gaps['tangent']} by tangent fine-tuning; half of the first minus the second "
        f"is {closed}. {about(setting, width)}",
        {**{f"fine-tuned minus {name}": gap for name, gap in gaps.items()}, "half the one minus the other": closed,
         **_means(found)},
        (_chart(setting, found, METHODS),),
    )  # fmt: skip


@study(
    "editing/figD.1",
    paper="function-space",
    figure="D.1",
    claim=CLAIM_D1,
    sizes={"smoke": SMOKE | {"widths": "2,4"}, "laptop": {}, "paper": PAPER | {"widths": "96,192,384"}},
)
def figD_1(
    run: Run,
    *,
    widths: Annotated[tuple[int, ...], "of encoders of several sizes"] = (4, 8),
    setting: Setting = LAPTOP,
) -> StudyResult:
    """Single tasks by all methods, at several sizes."""
    widths = tuple(sorted(widths))
    found = {width: accuracies(run, setting, width) for width in widths}
    steps, numbers, judged = [], dict[str, Estimate](), list[Estimate]()
    gaps = {}
    for width, each in found.items():
        rows = {method: each.of(method).single for method in METHODS}
        for one, two in (("non-linear", "linear"), ("linear", "post-hoc")):
            step = over_seeds(rows[one] - rows[two])
            numbers[f"{LABELS[one]} minus {LABELS[two]}, width {width}"] = step
            steps.append(above(step))
            judged.append(step)
        gaps[width] = [rows["non-linear"] - rows[method] for method in ("linear", "post-hoc")]
        numbers |= {f"{name}, width {width}": value for name, value in _means(each).items()}
    shrinks = [over_seeds(small - large) for small, large in zip(gaps[widths[0]], gaps[widths[-1]])]
    for method, shrink in zip(("linear", "post-hoc"), shrinks):
        numbers[f"gap of {LABELS[method]}, smallest minus largest network"] = shrink
    series = [through(LABELS[m], widths, [over_seeds(found[w].of(m).single) for w in widths]) for m in METHODS]
    return StudyResult(
        decide(all(steps) and all(map(above, shrinks)), [*judged, *shrinks]),
        CLAIM_D1,
        f"The order of the three holds surely in {sum(steps)} of {len(steps)} comparisons. From the smallest network "
        f"to the largest the gap to fine-tuning shrinks by {shrinks[0]} for tangent fine-tuning and by {shrinks[1]} "
        f"for the linearisation after the fact. {about(setting, widths)}",
        numbers,
        (
            Chart("sizes", "Single tasks, by size", "width of the encoder", "test accuracy, mean over tasks",
                  tuple(series), alt="Accuracy of three methods against the width.",
                  caption="Mean and standard error over seeds."),
            _chart(setting, found[widths[-1]], METHODS, f"Single tasks, width {widths[-1]}"),
        ),
    )  # fmt: skip


def _means(found: Accuracies) -> dict[str, Estimate]:
    made = {"accuracy, pre-trained": over_seeds(found.before)}
    return made | {f"accuracy, {LABELS[method]}": over_seeds(found.of(method).single) for method in METHODS}


def _chart(setting: Setting, found: Accuracies, methods: tuple[str, ...], title: str = "Single tasks") -> Chart:
    rows = {LABELS[method]: found.of(method).single for method in methods} | {"pre-trained": found.before}
    return by_task("single", title, setting.tasks, rows, "Accuracy of every method on every task.")
