"""Table 6.3 and Fig. D.3: task addition and single tasks from random initialisation. On a stand-in, not CLIP.

The protocol of Table 6.1 from an encoder that was never trained, behind the heads of the pre-trained one (as the paper
keeps CLIP's). Share of the gain: (merged - before) / (single - before), all averaged over tasks; 1 if addition keeps
all that fine-tuning gave, 0 if nothing.

Verdict rules, each by two standard errors over seeds:
6.3  "Confirmed" if fine-tuning learns the tasks (single above before) and addition keeps less than a quarter of that
     gain, with plain and with tangent fine-tuning. What pre-trained encoders keep is a number beside it.
D.3  "Confirmed" if plain fine-tuning from random initialisation is less accurate than from the pre-trained encoder at
     every size, and the largest encoder is less accurate than the smallest.
"""

from typing import Annotated

from biascope.studies.estimates import above, below, curve, decide, over_seeds
from biascope.studies.function_space.editing_charts import about, by_task
from biascope.studies.function_space.task_measures import accuracies
from biascope.studies.function_space.task_networks import LABELS, LAPTOP, PAPER, SMOKE, Setting, Start
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = "From random initialisation task addition fails, whatever the fine-tuning."
CLAIM_D3 = "From random initialisation single-task accuracy is moderate, and worse for the largest model."
COMPARED = ("non-linear", "linear")
STARTS: tuple[Start, ...] = ("random", "pre-trained")


@study(
    "editing/table6.3",
    paper="function-space",
    figure="Table 6.3",
    claim=CLAIM,
    sizes={"smoke": SMOKE | {"width": 4}, "laptop": {}, "paper": PAPER | {"width": 192}},
)
def table6_3(run: Run, *, width: Annotated[int, "of the encoder"] = 8, setting: Setting = LAPTOP) -> StudyResult:
    """Single and merged accuracies from random initialisation."""
    numbers: dict[str, Estimate] = {}
    found = {start: accuracies(run, setting, width, start) for start in STARTS}
    for start, each in found.items():
        numbers[f"accuracy before, {start}"] = over_seeds(each.before)
        for method in COMPARED:
            mine = each.of(method)
            before, single, multi = (table.mean(1) for table in (mine.before, mine.single, mine.multi))
            numbers[f"single, {LABELS[method]}, {start}"] = over_seeds(mine.single)
            numbers[f"merged, {LABELS[method]}, {start}"] = over_seeds(mine.multi)
            numbers[f"gain of fine-tuning, {LABELS[method]}, {start}"] = Estimate.of(single - before)
            # not the mean of ratios: a gain near zero would blow one of them up
            numbers[f"merged gain minus a quarter of the single gain, {LABELS[method]}, {start}"] = Estimate.of(
                (multi - before) - 0.25 * (single - before)
            )
            numbers[f"share of the gain kept, {LABELS[method]}, {start}"] = Estimate.of(
                (multi - before) / (single - before)
            )
    gains = [numbers[f"gain of fine-tuning, {LABELS[method]}, random"] for method in COMPARED]
    lost = [numbers[f"merged gain minus a quarter of the single gain, {LABELS[method]}, random"] for method in COMPARED]
    said = "; ".join(
        f"{LABELS[m]}: single {numbers[f'single, {LABELS[m]}, random']}, merged "
        f"{numbers[f'merged, {LABELS[m]}, random']}, share of the gain kept "
        f"{numbers[f'share of the gain kept, {LABELS[m]}, random']} (pre-trained: "
        f"{numbers[f'share of the gain kept, {LABELS[m]}, pre-trained']})"
        for m in COMPARED
    )
    rows = {"random, before": found["random"].before}
    for method in COMPARED:
        rows[f"single, {LABELS[method]}"] = found["random"].of(method).single
        rows[f"merged, {LABELS[method]}"] = found["random"].of(method).multi
    return StudyResult(
        decide(all(map(above, gains)) and all(map(below, lost)), [*gains, *lost]),
        CLAIM,
        f"Random encoder {numbers['accuracy before, random']}. {said}. {about(setting, width)}",
        numbers,
        (
            by_task(
                "random", "From random initialisation", setting.tasks, rows, "Single and merged accuracies by task."
            ),
        ),
    )


@study(
    "editing/figD.3",
    paper="function-space",
    figure="D.3",
    claim=CLAIM_D3,
    sizes={"smoke": SMOKE | {"widths": "2,4"}, "laptop": {}, "paper": PAPER | {"widths": "96,192,384"}},
)
def figD_3(
    run: Run,
    *,
    widths: Annotated[tuple[int, ...], "of encoders of several sizes"] = (4, 8),
    setting: Setting = LAPTOP,
) -> StudyResult:
    """Single tasks from random initialisation, at several sizes."""
    widths = tuple(sorted(widths))
    found = {start: {w: accuracies(run, setting, w, start) for w in widths} for start in STARTS}
    plain = {start: {w: each.of("non-linear").single for w, each in of.items()} for start, of in found.items()}
    behind = {w: over_seeds(plain["pre-trained"][w] - plain["random"][w]) for w in widths}
    worse = over_seeds(plain["random"][widths[0]] - plain["random"][widths[-1]])
    numbers = {f"fine-tuned, pre-trained minus random, width {w}": gap for w, gap in behind.items()}
    numbers["fine-tuned from random, smallest minus largest"] = worse
    series = []
    for start in STARTS:
        for method in COMPARED:
            rows = [[float(found[start][w].of(method).single[s].mean()) for w in widths] for s in range(setting.seeds)]
            series.append(curve(f"{LABELS[method]}, {start}", widths, rows))
            for w in widths:
                numbers[f"{LABELS[method]}, {start}, width {w}"] = over_seeds(found[start][w].of(method).single)
    each = ", ".join(f"{numbers[f'fine-tuned, random, width {w}']} at width {w}" for w in widths)
    return StudyResult(
        decide(all(map(above, behind.values())) and above(worse), [*behind.values(), worse]),
        CLAIM_D3,
        f"Fine-tuned from random initialisation: {each} (smallest minus largest {worse}); below the pre-trained by "
        f"{', '.join(map(str, behind.values()))}. {about(setting, widths)}",
        numbers,
        (
            Chart("random-sizes", "Single tasks from random initialisation", "width of the encoder",
                  "test accuracy, mean over tasks", tuple(series),
                  alt="Accuracy against the width, from random initialisation and from the pre-trained encoder.",
                  caption="Mean and standard error over seeds."),
        ),
    )  # fmt: skip
