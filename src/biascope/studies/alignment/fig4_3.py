"""Fig. 4.3 (also 6.3): centred alignment of the tangent kernel with the labels during training, whole and by layer.

The trainings are those of Fig. 4.2 (give its run folder as `reuse` to read them instead of training again). With noisy
labels, training batches are compared with the labels they are trained on, test batches with the true ones.

Verdict (fixed before running), on clean labels: (a) the largest CKA with the test labels exceeds the first by two
standard errors over seeds and probe batches; (b) some layer between the first and the last reaches a CKA of 0.5; (c)
the last layer stays below that layer. With noisy labels, if asked for: (d) the test CKA exceeds the training CKA on
average until the best test accuracy.
"""

from typing import Annotated, Any

import torch

from biascope.progress import progress
from biascope.studies.alignment.fig4_2 import SIZES
from biascope.studies.alignment.tracking import PROBING, VGG, Probing, Task, column
from biascope.studies.function_space.setting import above, mean_and_error
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, HeatMap, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "The tangent kernel of VGG-19 aligns with the labels of CIFAR-10 while it trains; several intermediate layers "
    "reach an alignment above 0.5, the last ones stay low, and with random labels the alignment is larger on test "
    "images while the network still generalises."
)


@study("alignment/fig4.3", paper="alignment", figure="4.3", claim=CLAIM, sizes=SIZES)
def fig4_3(
    run: Run,
    *,
    task: Task = VGG,
    lr: Annotated[float, "learning rate"] = 0.01,
    epochs: Annotated[float, "passes over the training images"] = 40,
    probing: Probing = PROBING,
    reuse: Annotated[str, "run folder of alignment/fig4.2 with the same settings, to read its trainings from"] = "",
) -> StudyResult:
    """Alignment of the tangent kernel with the labels during training, whole and by layer."""
    numbers: dict[str, Estimate] = {}
    figures: list[Chart | HeatMap] = []
    holds: list[bool] = []
    said: list[str] = []
    for noise in progress(task.noises, "label noise"):
        found = probing.trainings(run, task.setting(noise, lr, epochs), reuse)
        name = f"{noise:.0%} random labels"
        test = torch.cat([column(f, "test", "cka") for f in found])
        rise = Estimate.of((test.max(1).values - test[:, 0]).tolist())
        numbers[f"rise of the CKA with test labels, {name}"] = rise
        numbers[f"largest CKA with test labels, {name}"] = Estimate.of(test.max(1).values.tolist())
        layers = found[0]["layers"].split(",")
        profile = torch.stack([f["test_layers"].nan_to_num(0.0).mean(1) for f in found]).mean(0)  # [probes, layers]
        inner, best = highest(profile, layers)
        numbers[f"largest CKA of an inner layer ({inner}), {name}"] = Estimate(best)
        last = float(profile[:, -1].max())
        numbers[f"largest CKA of the last layer, {name}"] = Estimate(last)
        if noise == 0:
            holds += [above(rise), best > 0.5, last < best]
        else:
            early = torch.cat([_advantage(f) for f in found])
            numbers[f"test minus training CKA until the best test accuracy, {name}"] = Estimate.of(early.tolist())
            holds.append(above(numbers[f"test minus training CKA until the best test accuracy, {name}"]))
        said.append(f"{name}: CKA rises by {rise}, best inner layer {inner} {best:.3f}, last layer {last:.3f}")
        figures += _figures(found, profile, layers, name, round(100 * noise))
    stand_in = f" ({task.stand_in})" if task.stand_in else ""
    return StudyResult(
        "confirmed" if all(holds) else "not confirmed",
        CLAIM,
        f"{probing.n_train} images{stand_in}, {probing}. " + "; ".join(said) + ".",
        numbers,
        tuple(figures),
    )


def highest(profile: torch.Tensor, layers: list[str]) -> tuple[str, float]:
    """Name and largest CKA over the probes of the best layer that is neither first nor last, profile [probes, layers].

    Example:
        >>> highest(torch.tensor([[0.9, 0.2, 0.3, 0.1]]), ["a", "b", "c", "d"])
        ('c', 0.30000001192092896)
    """
    if len(layers) < 3:
        return layers[0], float(profile[:, 0].max())
    inner = profile[:, 1:-1].amax(0)
    return layers[1 + int(inner.argmax())], float(inner.max())


def _advantage(found: dict[str, Any]) -> torch.Tensor:
    """Mean of test CKA minus training CKA from the second probe to the one with the best test accuracy, by batch."""
    end = max(2, int(found["test_accuracy"].argmax()) + 1)
    return (column(found, "test", "cka") - column(found, "train", "cka"))[:, 1:end].mean(1)


def _figures(
    found: list[dict[str, Any]], profile: torch.Tensor, layers: list[str], name: str, tag: int
) -> list[Chart | HeatMap]:
    steps = [max(1, int(step)) for step in found[0]["steps"]]
    series = []
    for which in ("train", "test"):
        mean, error = mean_and_error(torch.cat([column(f, which, "cka") for f in found]))
        series.append(Series.of(f"CKA, {which}", steps, mean, error, "line" if which == "train" else "dashed"))
        accuracy = mean_and_error(torch.stack([f[f"{which}_accuracy"] for f in found]))[0]
        series.append(Series.of(f"accuracy, {which}", steps, accuracy, style="points"))
    return [
        Chart(
            f"alignment-{tag}",
            f"Alignment with the labels, {name}",
            "iteration",
            "CKA, accuracy",
            tuple(series),
            alt="CKA with the labels on training and test images over iterations, and accuracies as points.",
            caption="The first probe (iteration 0) is drawn at iteration 1.",
            log_x=True,
        ),
        HeatMap.of(
            f"layers-{tag}",
            f"Alignment of each layer with the test labels, {name}",
            x=range(len(layers)),
            y=range(len(steps)),
            z=profile.tolist(),
            x_label="layer, from the input",
            y_label=f"probe (iterations {', '.join(map(str, steps))})",
            z_label="CKA",
            alt="CKA of every layer over the probes; rows are later in training.",
            low=0.0,
        ),
    ]
