"""Fig. 6.9: eigenfunctions of the tangent kernel live on the data of their task. On a stand-in, not CLIP.

E(x) = sum phi(x)^2 over right singular vectors of K(task, task and control) at theta_0, one logit at a time. Localised:
1 on the task and 0 on the control; not at all, at full rank: one half on both.
"""

from typing import Annotated

from torch import Tensor

from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope_papers.editing.measures import about, contrast, controlled, energies, spoken
from biascope_papers.editing.stand_in import PAPER, Setting, Stages, sizes


@study(
    "editing/fig6.9",
    sizes=sizes({"stages": 2, "points": 20, "outputs": 1}, {"points": 40, "outputs": 1}),
)
def fig6_9(
    run: Run,
    *,
    stages: Stages = 7,
    points: Annotated[int, "images of the task, and as many of the control set"] = 100,
    outputs: Annotated[int, "classes of a task whose kernels are taken, at most"] = 3,
    setting: Setting = PAPER,
) -> StudyResult:
    """Local energy of the kernel's eigenfunctions on a task and on the control set."""
    found = {spoken(task): values for task, values in energies(run, setting, stages, points, outputs).items()}
    gaps = {task: contrast(values) for task, values in found.items()}
    numbers = {f"energy on {task} minus control": gap for task, gap in gaps.items()}
    for task, values in found.items():
        own, other = values.chunk(2, -1)
        numbers[f"energy on {task}"] = Estimate.of(own.mean((1, 2)))
        numbers[f"energy on the control set, {task}"] = Estimate.of(other.mean((1, 2)))
    control = spoken(setting.control)
    return StudyResult(
        measured="Energy on the task minus energy on the control set: "
        f"{', '.join(f'{t} {gap}' for t, gap in gaps.items())}. {about(setting, stages)}",
        numbers=numbers | controlled(run, setting, stages),
        figures=tuple(_chart(i + 1, task, values, control) for i, (task, values) in enumerate(found.items())),
    )


def _chart(number: int, task: str, values: Tensor, control: str) -> Chart:
    own, other = (part.sort(descending=True).values for part in values[0].mean(0).chunk(2))  # others have other images
    half = len(own)
    return Chart(
        f"energy-{number}", f"Local energy, {task}", "image, by its energy", "energy of the eigenfunctions (0 to 1)",
        (
            Series.of(task, range(1, half + 1), own, style="points"),
            Series.of("control", range(half + 1, 2 * half + 1), other, style="points"),
        ),
        alt=f"Energy on images of {task} and of the control set, sorted within each.",
        caption=f"Control: {control}. 1 on the task and 0 on the control: the eigenfunctions live on the task alone; "
        "0.5 everywhere: they do not tell the two apart. First seed, mean over logits.",
    )  # fmt: skip
