"""Fig. 6.9: eigenfunctions of the tangent kernel live on the data of their task. On a stand-in, not CLIP.

Right singular vectors phi of the kernel K(task, task and control) at theta_0, for one logit at a time, on equally many
test images of a task and of the control set; E(x) = sum phi(x)^2. Localised: 1 on the task and 0 on the control; not at
all, at full rank: one half on both.

Verdict rule: "confirmed" if on every task E on the task minus E on the control, averaged over logits and images, is
above one half by two standard errors over seeds: nearer to perfect localisation than to none.
"""

from typing import Annotated

from biascope.studies.estimates import above, decide
from biascope.studies.function_space.editing_charts import about, contrasts, spoken
from biascope.studies.function_space.task_measures import energies
from biascope.studies.function_space.task_networks import LAPTOP, PAPER, SMOKE, Setting
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = "Kernel eigenfunctions that carry a task are localised on its data: high energy there, low on control data."


@study(
    "editing/fig6.9",
    paper="function-space",
    figure="6.9",
    claim=CLAIM,
    sizes={
        "smoke": SMOKE | {"width": 4, "points": 40, "outputs": 2},
        "laptop": {},
        "paper": PAPER | {"width": 192, "points": 200, "outputs": 10},
    },
)
def fig6_9(
    run: Run,
    *,
    width: Annotated[int, "of the encoder"] = 8,
    points: Annotated[int, "images of the task, and as many of the control set"] = 100,
    outputs: Annotated[int, "classes of a task whose kernels are taken, at most"] = 3,
    setting: Setting = LAPTOP,
) -> StudyResult:
    """Local energy of the kernel's eigenfunctions on a task and on the control set."""
    found = {spoken(task): values for task, values in energies(run, setting, width, points, outputs).items()}
    gaps = {task: Estimate.of(contrasts(values)) for task, values in found.items()}
    numbers = {f"energy on {task} minus control": gap for task, gap in gaps.items()}
    for task, values in found.items():
        half = values.shape[-1] // 2
        numbers[f"energy on {task}"] = Estimate.of(values[..., :half].mean((1, 2)))
        numbers[f"energy on the control set, {task}"] = Estimate.of(values[..., half:].mean((1, 2)))
    local = [task for task, gap in gaps.items() if above(gap, 0.5)]
    charts: list[Chart] = []
    for task, values in found.items():
        mean = values[0].mean(0)  # other seeds have other images
        half = len(mean) // 2
        charts.append(
            Chart(
                f"energy-{len(charts) + 1}", f"Local energy, {task}", "image, by its energy",
                "energy of the eigenfunctions (0 to 1)",
                (
                    Series.of(task, range(1, half + 1), mean[:half].sort(descending=True).values, style="points"),
                    Series.of("control", range(half + 1, 2 * half + 1), mean[half:].sort(descending=True).values,
                              style="points"),
                ),
                alt=f"Energy on images of {task} and of the control set, sorted within each.",
                caption=f"Control: {spoken(setting.control)}. 1 on the task and 0 on the control: the eigenfunctions "
                "live on the task alone; 0.5 everywhere: they do not tell the two apart. First seed, mean over logits.",
            )
        )  # fmt: skip
    return StudyResult(
        decide(len(local) == len(gaps), gaps.values()),
        CLAIM,
        f"Energy on the task minus energy on the control set: {', '.join(f'{t} {gap}' for t, gap in gaps.items())}; "
        f"surely above one half on {len(local)} of {len(gaps)}. {points} test images each, control "
        f"{spoken(setting.control)}. {about(setting, width)}",
        numbers,
        tuple(charts),
    )
