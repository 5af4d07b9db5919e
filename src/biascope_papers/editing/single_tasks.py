"""Fig. 6.2, 6.7, D.1 and D.3: single tasks, by the fine-tuned network and its linearisations. On a stand-in, not CLIP.

Test accuracy of f(theta_0 + tau) (fine-tuned), f_lin(theta_0 + tau) (linearised after the fact) and f_lin(theta_0 +
tau_lin) (tangent fine-tuning), one task at a time; `stand_in` says what theta_0 is.
"""

from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import over_seeds, through
from biascope_papers.editing.measures import STARTS, Accuracies, about, accuracies, by_task, controlled, spoken
from biascope_papers.editing.stand_in import LABELS, LAPTOP, METHODS, ONE_WIDTH, WIDTHS, Setting, Width, Widths


@study("editing/fig6.2", sizes=ONE_WIDTH)
def fig6_2(run: Run, *, width: Width = 8, setting: Setting = LAPTOP) -> StudyResult:
    """Accuracy of fine-tuned networks and of their linearisations after the fact."""
    found = accuracies(run, setting, width)
    lost = found.of("non-linear").single - found.of("post-hoc").single
    gaps = {spoken(task): Estimate.of(lost[:, t]) for t, task in enumerate(setting.tasks)}
    return StudyResult(
        measured="Accuracy lost after the fact: "
        f"{', '.join(f'{task} {gap}' for task, gap in gaps.items())}. {about(setting, width)}",
        numbers={f"fine-tuned minus linearised after the fact, {task}": gap for task, gap in gaps.items()}
        | _means(found)
        | controlled(run, setting, width),
        figures=(_by_task(setting, found, ("non-linear", "post-hoc")),),
    )


@study("editing/fig6.7", sizes=ONE_WIDTH)
def fig6_7(run: Run, *, width: Width = 8, setting: Setting = LAPTOP) -> StudyResult:
    """The gap to the fine-tuned network that tangent fine-tuning leaves, against linearisation after the fact."""
    found = accuracies(run, setting, width)
    late, tangent = (found.of("non-linear").single - found.of(method).single for method in ("post-hoc", "linear"))
    numbers = {"fine-tuned minus after the fact": over_seeds(late), "fine-tuned minus tangent": over_seeds(tangent)}
    more = {"tangent minus after the fact": over_seeds(late - tangent), **controlled(run, setting, width)}
    after, left = numbers.values()
    return StudyResult(
        measured=f"Accuracy lost to fine-tuning: {after} by linearisation after the fact, {left} by tangent "
        f"fine-tuning. {about(setting, width)}",
        numbers=numbers | more | _means(found),
        figures=(_by_task(setting, found, METHODS),),
    )


@study("editing/figD.1", sizes=WIDTHS)
def figD_1(run: Run, *, widths: Widths = (4, 8), setting: Setting = LAPTOP) -> StudyResult:
    """Single tasks by all methods, at several sizes."""
    widths = tuple(sorted(widths))
    found = {width: accuracies(run, setting, width) for width in widths}
    numbers, gaps = controlled(run, setting, widths[-1]), {}
    for width, each in found.items():
        rows = {method: each.of(method).single for method in METHODS}
        for one, two in (("non-linear", "linear"), ("linear", "post-hoc")):
            numbers[f"{LABELS[one]} minus {LABELS[two]}, width {width}"] = over_seeds(rows[one] - rows[two])
        gaps[width] = [rows["non-linear"] - rows[method] for method in ("linear", "post-hoc")]
        numbers |= {f"{name}, width {width}": value for name, value in _means(each).items()}
    shrinks = [over_seeds(small - large) for small, large in zip(gaps[widths[0]], gaps[widths[-1]])]
    for method, shrink in zip(("linear", "post-hoc"), shrinks):
        numbers[f"gap of {LABELS[method]}, smallest minus largest network"] = shrink
    means = {LABELS[m]: {w: over_seeds(found[w].of(m).single) for w in widths} for m in METHODS}
    chart = _by_width("sizes", "Single tasks, by size", means, "Accuracy of three methods against the width.")
    return StudyResult(
        measured=f"From the smallest network to the largest the gap to fine-tuning shrinks by {shrinks[0]} for tangent "
        f"fine-tuning and by {shrinks[1]} for the linearisation after the fact. {about(setting, widths)}",
        numbers=numbers,
        figures=(chart, _by_task(setting, found[widths[-1]], METHODS, f"Single tasks, width {widths[-1]}")),
    )


@study("editing/figD.3", sizes=WIDTHS)
def figD_3(run: Run, *, widths: Widths = (4, 8), setting: Setting = LAPTOP) -> StudyResult:
    """Single tasks from random initialisation, at several sizes."""
    widths = tuple(sorted(widths))
    found = {start: {w: accuracies(run, setting, w, start) for w in widths} for start in STARTS}
    random = {w: each.of("non-linear").single for w, each in found["random"].items()}
    worse = over_seeds(random[widths[0]] - random[widths[-1]])
    numbers = {"fine-tuned from random, smallest minus largest": worse, **controlled(run, setting, widths[-1])}
    rows = {
        f"{LABELS[method]}, {start}": {w: over_seeds(found[start][w].of(method).single) for w in widths}
        for start in STARTS
        for method in ("non-linear", "linear")
    }
    numbers |= {f"{label}, width {w}": value for label, row in rows.items() for w, value in row.items()}
    each = ", ".join(f"{value} at width {w}" for w, value in rows["fine-tuned, random"].items())
    return StudyResult(
        measured=f"Fine-tuned from random initialisation: {each}. {about(setting, widths)}",
        numbers=numbers,
        figures=(
            _by_width("random-sizes", "Single tasks from random initialisation", rows,
                      "Accuracy against the width, from random initialisation and from the pre-trained encoder."),
        ),
    )  # fmt: skip


def _means(found: Accuracies) -> dict[str, Estimate]:
    made = {"accuracy, pre-trained": over_seeds(found.before)}
    made["accuracy gained by fine-tuning"] = over_seeds(found.of("non-linear").single - found.before)
    return made | {f"accuracy, {LABELS[method]}": over_seeds(found.of(method).single) for method in METHODS}


def _by_task(setting: Setting, found: Accuracies, methods: tuple[str, ...], title: str = "Single tasks") -> Chart:
    rows = {LABELS[method]: found.of(method).single for method in methods} | {"pre-trained": found.before}
    return by_task("single", title, setting.tasks, rows, "Accuracy of every method on every task.")


def _by_width(name: str, title: str, rows: dict[str, dict[int, Estimate]], alt: str) -> Chart:
    """Accuracies {label: {width: estimate}}."""
    return Chart(
        name, title, "width of the encoder", "test accuracy, mean over tasks",
        tuple(through(label, row, row.values()) for label, row in rows.items()),
        alt=alt, caption="Mean and standard error over seeds.",
    )  # fmt: skip
