"""Fig. 3.13 of the thesis on weight and function space: two features that are both enough, which one is learnt?

CIFAR2 images (first five classes against the rest) get a fourth channel from D(v), drawn for the same labels. A network
is trained on all four channels and tested on each feature alone, with the other channels set to zero (their mean).

Rule for the verdict, set before any run: for every convolutional network, over the indices of v (mean of the seeds),
the accuracy by the images alone rises and the accuracy by D(v) alone falls with the index (rank correlations beyond
+-0.5 by two standard errors, from leaving out one index at a time); the MLP reaches 0.9 by D(v) alone at every index.
"""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from biascope.data.images import zero_channels
from biascope.progress import progress
from biascope.seeds import generator
from biascope.studies.estimates import above, curve, decide, rank_correlation
from biascope.studies.nad import anisotropy as a
from biascope.studies.nad import directional as d
from biascope.studies.nad import images as im
from biascope.studies.nad.fig1 import ISOTROPIC
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "Given images and a channel of D(v) that both tell the label, the MLP always uses D(v); convolutional networks use "
    "D(v) for early anisotropy directions v and only the images for late ones."
)
BOTH, IMAGES, CHANNEL = "both", "images alone", "D(v) alone"


@study(
    "nad/underspecification",
    paper="nad",
    figure="3.13",
    claim=CLAIM,
    sizes={
        "smoke": {**im.SMOKE, "nets": ("lenet",), "count": 8, "seeds": 1, "eps": 4.0, "sigma": 0.5, "epochs": 6},
        "laptop": {**im.LAPTOP, "nets": ("mlp", "lenet"), "count": 6, "seeds": 1, "n": 6000},
        "paper": {},
    },
)
def underspecification(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures"] = ("mlp", "lenet", "resnet18"),
    dataset: im.Set = "cifar10",
    image_size: Annotated[int, "side of the images: 32 for cifar10, 16 for digits"] = 32,
    width: d.Width = 0,
    n: im.Images = 0,
    epochs: im.Epochs = 50,
    seeds: Annotated[int, "networks per architecture and direction"] = 3,
    networks: a.Networks = 1000,
    head: a.Head = "marginal",
    step: a.Step = 100.0,
    count: Annotated[int, "how many indices of v, half evenly and half logarithmically spaced"] = 10,
    sigma: Annotated[float, "noise of D(v) (not in the paper)"] = 3.0,
    eps: Annotated[float, "signal of D(v) (not in the paper)"] = 1.0,
    gap: d.Offset = "full",
    precision: d.Arithmetic = "auto",
) -> StudyResult:
    """Which of two sufficient features a network learns, against the index of the direction that carries one."""
    images, protocol = im.image_set(run, dataset, n), im.ImageProtocol(epochs, precision=precision)
    y, test_y = (images.y < 5).long(), (images.test_y < 5).long()
    x, test_x = images.normalised(images.x), images.normalised(images.test_x)
    task = d.Protocol(sigma=sigma, eps=eps, gap=gap)

    def with_channel(x: Tensor, y: Tensor, v: Tensor, *name: object) -> Tensor:
        rng = generator(run.seed, *name, device=run.device)
        extra = d.draw_inputs(y, v.to(x).flatten() / v.norm().to(x), task, rng)
        return torch.cat([x, extra.view(-1, 1, image_size, image_size)], 1)

    numbers: dict[str, Estimate] = {}
    charts, holds, said = list[Chart](), list[bool](), list[str]()
    for net in nets:
        U, _ = a.directions_of(run, a.Source(net, image_size, width, networks, head, step), precision)
        factory = d.architecture(net, image_size, channels=4, outputs=2, width=width)

        def train(i: int, seed: int) -> dict[str, float]:
            def tests() -> dict[str, tuple[Tensor, Tensor]]:
                whole = with_channel(test_x, test_y, U[i], net, i, seed, "test")  # noqa: B023
                alone = zero_channels(whole, [3]), zero_channels(whole, [0, 1, 2])
                return {BOTH: (whole, test_y), IMAGES: (alone[0], test_y), CHANNEL: (alone[1], test_y)}

            return im.train_on_images(
                run,
                f"{net} {i} {seed}",  # noqa: B023
                factory,  # noqa: B023
                lambda: (with_channel(x, y, U[i], net, i, seed, "train"), y),  # noqa: B023
                tests,
                protocol,
            )

        indices = a.spread_indices(count, len(U))
        found = [[train(i, seed) for seed in range(seeds)] for i in progress(indices, net)]
        means = {key: np.array([[row[key] for row in rows] for rows in found]) for key in (BOTH, IMAGES, CHANNEL)}
        holds.append(_judge(net, np.array(indices, dtype=float), means, numbers, said))
        charts.append(_chart(net, indices, means, f"{images.note}, two classes; {task}; {epochs} epochs."))
    return StudyResult(
        decide(all(holds), (numbers[f"Spearman(index, accuracy by images alone), {net}"] for net in nets)),
        CLAIM,
        f"{images.note}, two classes, sigma = {sigma:g}, eps = {eps:g}, {epochs} epochs, {seeds} seed(s): "
        f"{'; '.join(said)}.",
        numbers,
        tuple(charts),
    )


def _judge(net: str, at: d.Array, means: dict[str, d.Array], numbers: dict[str, Estimate], said: list[str]) -> bool:
    """Note the numbers of one network (accuracies [indices, seeds] by test set) and say whether the claim holds."""
    by_images, by_channel = means[IMAGES].mean(1), means[CHANNEL].mean(1)
    rises, falls = rank_correlation(at, by_images), rank_correlation(at, -by_channel)
    numbers |= {
        f"Spearman(index, accuracy by images alone), {net}": rises,
        f"Spearman(index, loss of accuracy by D(v) alone), {net}": falls,
        f"accuracy by D(v) alone, first index, {net}": Estimate.of(means[CHANNEL][0]),
        f"accuracy by D(v) alone, last index, {net}": Estimate.of(means[CHANNEL][-1]),
        f"accuracy by images alone, first index, {net}": Estimate.of(means[IMAGES][0]),
        f"accuracy by images alone, last index, {net}": Estimate.of(means[IMAGES][-1]),
    }
    said.append(
        f"{net} by D(v) alone {by_channel[0]:.3f} at the first and {by_channel[-1]:.3f} at the last index, by images "
        f"alone {by_images[0]:.3f} and {by_images[-1]:.3f}"
    )
    if net in ISOTROPIC:
        return bool(by_channel.min() >= 0.9)
    return above(rises, 0.5) and above(falls, 0.5)


def _chart(net: str, indices: list[int], means: dict[str, d.Array], caption: str) -> Chart:
    at = np.array(indices) + 1
    return Chart(
        name=f"features-{net}",
        title=f"Which feature {net} has learnt",
        x_label="index of the direction v",
        y_label="test accuracy",
        series=tuple(curve(key, at, rows.T) for key, rows in means.items()),
        alt="; ".join(f"{key}: from {rows[0].mean():.2f} to {rows[-1].mean():.2f}" for key, rows in means.items())
        + ".",
        caption=caption,
        log_x=True,
    )
