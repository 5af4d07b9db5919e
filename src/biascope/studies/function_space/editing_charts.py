"""Charts and sentences that the studies of task arithmetic share."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from biascope.studies.estimates import curve, errors_over, mean_error
from biascope.studies.function_space.task_measures import Maps
from biascope.studies.function_space.task_networks import HERE, LABELS, Setting
from biascope.studies.result import Chart, HeatMap

MAP = (
    "Share of the test images whose class changes where the other task's vector is added, summed over both tasks (0 to "
    "2); mean over seeds. Merging looks for its coefficient in [0, 1]."
)


def by_task(name: str, title: str, tasks: Sequence[str], rows: Mapping[str, Tensor], alt: str) -> Chart:
    """Accuracies of several networks, {label: [seeds, tasks]}, task by task."""
    places = range(1, len(tasks) + 1)
    return Chart(
        name, title, "task", "test accuracy",
        tuple(curve(label, places, table, "points") for label, table in rows.items()),
        alt=alt, caption=f"Mean and standard error over seeds.{_classes(tasks)}", x_names=tuple(map(spoken, tasks)),
    )  # fmt: skip


def heat_maps(found: Maps, methods: Sequence[str], where: str = "") -> tuple[HeatMap, ...]:
    """One map of xi, averaged over seeds, per pair of tasks and method."""
    made = list[HeatMap]()
    for p, pair in enumerate(found.pairs):
        one, two = map(spoken, pair)
        for method in methods:
            # the first task's coefficient goes right, as in the paper
            z = mean_error(found.xi[method][:, p].flatten(1))[0].reshape(len(found.alphas), -1).T
            made.append(
                HeatMap.of(
                    f"xi-{p + 1}-{method}{'-' + where.replace(' ', '-') if where else ''}",
                    f"{one} and {two}: {LABELS[method]}{', ' + where if where else ''}",
                    x=found.alphas, y=found.alphas, z=z.tolist(),
                    x_label=f"coefficient of {one}", y_label=f"coefficient of {two}",
                    z_label="disentanglement error", low=0.0, high=1.6,
                    alt="Disentanglement error over both coefficients, zero at the origin.",
                    caption=("As above." if made else MAP) + _classes(pair),
                )
            )  # fmt: skip
    return tuple(made)


def contrasts(energy: Tensor) -> Tensor:
    """Energy on the task minus that on the control set, [seeds], from [seeds, outputs, points of both].

    Example:
        >>> import torch
        >>> contrasts(torch.tensor([[[0.75, 1.0, 0.25, 0.0]]])).tolist()
        [0.75]
    """
    task, control = energy.chunk(2, -1)
    return (task - control).mean((1, 2))


def spoken(task: str) -> str:
    """A task in words: `quickdraw:0-30` are its classes 0 to 29.

    Example:
        >>> [spoken(task) for task in ("mnist", "quickdraw:0-30", "digits/inverted")]
        ['mnist', 'quickdraw 0-29', 'inverted digits']
    """
    name, _, turn = task.partition("/")
    name, _, span = name.partition(":")
    low, _, high = span.partition("-")
    return f"{turn} {name} {f'{low}-{int(high) - 1}' if span else ''}".strip()


def _classes(tasks: Sequence[str]) -> str:
    return " Numbers behind a name: classes of that set." if any(":" in task for task in tasks) else ""


def about(setting: Setting, width: int | Sequence[int]) -> str:
    """The deviation from the paper, in a sentence or two."""
    widths = str(width) if isinstance(width, int) else ", ".join(map(str, width))
    n = setting.seeds
    errors = f"errors over {n} pre-trainings" if n > 1 else errors_over(n, len(setting.tasks), "tasks")
    return (
        f"{HERE} Encoder: {setting.net} of width {widths}, pre-trained here on {setting.few} images per class of "
        f"{', '.join(map(spoken, setting.tasks))} and on {spoken(setting.control)}; {setting.steps} steps of "
        f"fine-tuning at {setting.lr:g}; {errors}."
    )
