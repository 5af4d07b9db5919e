"""Fig. 4.3, B.5 and B.6 (also 6.3): alignment of the tangent kernel with the labels during training.

With noisy labels, training batches are compared with the labels they are trained on, test batches with the true ones.
Errors are over seeds, or with one seed over its probe batches, which the text says.
"""

from typing import Annotated, Any, Literal

import torch

from biascope import InputError
from biascope.studies import Chart, Estimate, HeatMap, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import progress
from biascope_papers.alignment.spectrum import SIZES
from biascope_papers.alignment.tracking import (
    PROBING,
    VGG,
    Probing,
    Setting,
    Task,
    by_repeat,
    column,
    iterations,
    mean_curve,
    repeats,
)

THREE_SETS = Probing(probes=7, probe_sets=3)
NETS = {"mlp": ("mnist", 80, 0.02), "vgg19": ("cifar10", 64, 0.01), "resnet18": ("cifar10", 64, 0.01)}


@study("alignment/fig4.3", sizes=SIZES)
def fig4_3(
    run: Run,
    *,
    task: Task = VGG,
    lr: Annotated[float, "learning rate"] = 0.01,
    epochs: Annotated[float, "passes over the training images"] = 40,
    probing: Probing = PROBING,
    reuse: Annotated[str, "run folder of alignment/fig4.2 with the same settings, to read its trainings from"] = "",
) -> StudyResult:
    """Alignment of the tangent kernel with the labels during the trainings of Fig. 4.2, whole and by layer.

    Of the layers between the first and the last, the best one and its probe are picked on the training batches and
    judged on the test batches.
    """
    numbers: dict[str, Estimate] = {}
    figures, parts = list[Chart | HeatMap](), []
    for noise in progress(task.noises, "label noise"):
        found = probing.trainings(run, task.setting(noise, lr, epochs), reuse)
        name, test = f"{noise:.0%} random labels", repeats(found, "test", "cka")
        layers = found[0]["layers"].split(",")
        # CKA of the layers with the labels [repeats, probes, layers], from [probe sets, probes, layers] of every seed
        train_profiles, profiles = (
            by_repeat([f[f"{which}_layers"].nan_to_num(0.0).transpose(0, 1) for f in found])
            for which in ("train", "test")
        )
        probe, layer = highest(train_profiles.mean(0))
        profile = profiles.mean(0)  # [probes, layers]
        rise = Estimate.of(test[:, -1] - test[:, 0])
        ahead = Estimate.of(profiles[:, probe, layer] - profiles[:, probe, -1])
        numbers[f"rise of the CKA with test labels, {name}"] = rise
        numbers[f"largest CKA with test labels, {name}"] = Estimate.of(test.max(1).values)
        numbers[f"the same minus the last layer, {name}"] = ahead
        both = torch.maximum(train_profiles, profiles).amax(1)[:, 1:-1]  # [repeats, inner layers]
        numbers[f"inner layers that reach a CKA of 0.5, {name}"] = Estimate.of((both > 0.5).sum(1).double())
        numbers[f"training accuracy, {name}"] = Estimate.of([float(f["train_accuracy"][-1]) for f in found])
        numbers[f"decades between the best CKA and test accuracy, {name}"] = Estimate.of(_apart(found))
        if noise:
            early = Estimate.of(_advantage(found))
            numbers[f"test minus training CKA until the best test accuracy, {name}"] = early
        parts.append(f"{name}: CKA rises by {rise}, inner layer {layers[layer]} ahead of the last by {ahead}")
        figures += _figures(found, profile, layers, name, round(100 * noise))
    stand_in = f" ({task.stand_in})" if task.stand_in else ""
    return StudyResult(
        measured=f"{probing.n_train} images{stand_in}, {probing}. {'; '.join(parts)}.",
        numbers=numbers,
        figures=tuple(figures),
    )


def highest(profile: torch.Tensor) -> tuple[int, int]:
    """Probe and layer with the largest CKA, of the layers that are neither first nor last; profile [probes, layers]."""
    inner = profile[:, 1:-1] if profile.shape[1] > 2 else profile[:, :1]
    probe, layer = divmod(int(inner.argmax()), inner.shape[1])
    return probe, layer + int(profile.shape[1] > 2)


def _advantage(found: list[dict[str, Any]]) -> list[float]:
    """Mean of test CKA minus training CKA from the second probe to the one with the best test accuracy, by repeat."""
    values = []
    for each in found:
        end = max(2, int(each["test_accuracy"].argmax()) + 1)
        values.append((column(each, "test", "cka") - column(each, "train", "cka"))[:, 1:end].mean(1))
    return list(by_repeat(values).tolist())


def _apart(found: list[dict[str, Any]]) -> list[float]:
    """How far the peak of the test CKA lies from that of the test accuracy, in decades of iterations, by repeat."""
    values = []
    for each in found:
        at = each["steps"].double().clamp_min(1).log10()
        values.append((at[column(each, "test", "cka").argmax(1)] - at[each["test_accuracy"].argmax()]).abs())
    return list(by_repeat(values).tolist())


def _figures(
    found: list[dict[str, Any]], profile: torch.Tensor, layers: list[str], name: str, tag: int
) -> list[Chart | HeatMap]:
    steps = iterations(found)
    series = []
    for which in ("train", "test"):
        cka = repeats(found, which, "cka")
        series.append(curve(f"CKA, {which}", steps, cka, "line" if which == "train" else "dashed"))
        accuracy = mean_curve(found, f"{which}_accuracy")
        series.append(Series.of(f"accuracy, {which}", steps, accuracy, style="points"))
    return [
        Chart(
            f"alignment-{tag}", f"Alignment with the labels, {name}", "iteration", "CKA, accuracy", tuple(series),
            alt="CKA with the labels on training and test images over iterations, and accuracies as points.",
            caption="The first probe (iteration 0) is drawn at iteration 1.", log_x=True,
        ),
        HeatMap.of(
            f"layers-{tag}", f"Alignment of each layer with the test labels, {name}",
            x=range(len(layers)), y=range(len(steps)), z=profile.tolist(), x_label="layer, from the input",
            y_label=f"probe (iterations {', '.join(map(str, steps))})", z_label="CKA",
            alt="CKA of every layer over the probes; rows are later in training.", low=0.0,
        ),
    ]  # fmt: skip


@study(
    "alignment/figB.5",
    sizes={
        "smoke": {"nets": "mlp", "digits": True, "n_train": 300, "n_test": 100, "batch": 50, "epochs": 20, "probes": 5,
                  "probe_size": 20},
        "laptop": {},
        "paper": {"narrow": 1, "n_train": 50_000, "n_test": 10_000, "epochs": 40, "probes": 25, "probe_size": 100,
                  "seeds": 5},
    },
)  # fmt: skip
def fig_b5(
    run: Run,
    *,
    nets: Annotated[tuple[Literal["mlp", "vgg19", "resnet18"], ...], "networks"] = ("mlp", "vgg19", "resnet18"),
    digits: Annotated[bool, "use the 8 x 8 digits instead of MNIST and CIFAR-10 (mlp only)"] = False,
    narrow: Annotated[int, "divide the channels of the convolutional networks by this"] = 8,
    epochs: Annotated[float, "passes over the training images"] = 20,
    probing: Probing = THREE_SETS,
    reuse: Annotated[str, "run folder of alignment/fig4.2 with the same settings, to read its VGG-19 from"] = "",
) -> StudyResult:
    """Alignment with test labels during training, centred (B.5) and uncentred (B.6), for three networks; kernels are
    those of the network in eval mode.
    """
    if digits and set(nets) != {"mlp"}:
        raise InputError("digits=true is for nets=mlp: the convolutional networks need images of side 32")
    numbers: dict[str, Estimate] = {}
    curves: dict[str, list[Series]] = {"centred": [], "uncentred": []}
    parts = []
    for net in progress(nets, "networks"):
        dataset, width, lr = NETS[net]
        width = width if net == "mlp" else max(1, width // narrow)
        setting = Setting("digits" if digits else dataset, net, width, lr=lr, epochs=epochs)
        found = probing.trainings(run, setting, reuse)
        for name, series in curves.items():
            rows = repeats(found, "test", "cka" if name == "centred" else "uncentred")
            numbers[f"rise of the {name} alignment, {net}"] = Estimate.of(rows[:, -1] - rows[:, 0])
            series.append(curve(net, iterations(found), rows))
        numbers[f"test accuracy, {net}"] = Estimate.of([float(f["test_accuracy"][-1]) for f in found])
        rises = (f"{numbers[f'rise of the {name} alignment, {net}']} {name}" for name in curves)
        parts.append(f"{net}: rises by {', '.join(rises)}")
    charts = (
        Chart(
            name, f"Alignment with test labels, {name}", "iteration", "alignment", tuple(series),
            alt="Alignment with the labels of test images over iterations, one curve per network.",
            caption="Iteration 0 is drawn at 1. Mean and standard error, over seeds or over batches of one.",
            log_x=True,
        )
        for name, series in curves.items()
    )  # fmt: skip
    changed = f" Convolutional networks have 1/{narrow} of the published channels." if narrow > 1 else ""
    if digits:
        changed = " The images are the 8 x 8 digits, a stand-in."
    return StudyResult(
        measured=f"{'; '.join(parts)}. {probing.n_train} images, {epochs:g} epochs, {probing}.{changed}",
        numbers=numbers,
        figures=tuple(charts),
    )
