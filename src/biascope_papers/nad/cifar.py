"""Figs. 7 and 8, and Fig. 3.13 of the thesis: what anisotropy directions mean to networks that learn CIFAR-10.

Fig. 7: each training image's coefficient along the carrier of its class is replaced by +-eps (directions i and i + 1 of
the grey network, placed in one of three channels); tests are on clean images. Fig. 8: the flip moves the content along
the first directions to the last ones, a rotation by which nothing is lost; images are normalised first (see
`ImageSet.normalised`). Fig. 3.13: CIFAR2 images get a fourth channel from D(v), drawn for the same labels; networks are
tested on each feature alone, with the other channels set to zero.
"""

import functools
import math
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from biascope.data import info
from biascope.data.images import nad_flip, poison, zero_channels
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, rank_correlation
from biascope.support import generator, progress
from biascope_papers.nad import anisotropy as a
from biascope_papers.nad import directional as d
from biascope_papers.nad import images as im

BOTH, IMAGES, CHANNEL = "both", "images alone", "D(v) alone"
Labelled = tuple[Tensor, Tensor]

# Images and directions are fetched when something is trained; a finished run is judged without them.


@study(
    "nad/fig7",
    sizes={
        "smoke": {**im.SMOKE, "net": "lenet", "count": 8, "eps": 0.5},
        "laptop": {**im.LAPTOP, "net": "lenet", "count": 8},
        "paper": {},
    },
)
def fig7(
    run: Run,
    *,
    net: d.Net = "resnet18",
    setting: im.Setting = im.PAPER,
    reuse: Annotated[str, "run folder of another study of the same network, to take the directions from"] = "",
    count: a.Count = 12,
    eps: Annotated[float, "coefficient along the carrier, pixels in [0, 1]"] = 0.05,
    rule: Annotated[Literal["choice", "code"], "which carrier belongs to which class"] = "code",
    overwrite: Annotated[Literal["own", "all"], "replace the own carrier only, or set the others to 0 as well"] = "own",
) -> StudyResult:
    """Clean accuracy of a network trained on poisoned CIFAR-10, against the index of the carrier."""
    factory = d.architecture(net, setting.image_size, channels=3, outputs=10, width=setting.width)
    images = functools.cache(lambda: im.image_set(run, setting.dataset, setting.n))
    directions = functools.cache(lambda: setting.directions(run, net, reuse))

    def data(i: int | None = None) -> Labelled:
        own = images()
        if i is None:
            return own.normalised(own.x), own.y
        return own.normalised(poison(own.x, own.y, directions(), i, eps=eps, rule=rule, overwrite=overwrite)), own.y

    def test() -> dict[str, Labelled]:
        return {"test": (images().normalised(images().test_x), images().test_y)}

    indices = a.spread_indices(count, setting.image_size**2 - 1)
    places, names = [None, *indices], ["clean", *(f"carrier {i}" for i in indices)]
    plain, *found = im.train_on_images(run, names, factory, lambda k: data(places[k]), lambda _: test(), setting)
    clean = plain["test"]
    accuracy, train = (np.array([each[key] for each in found]) for key in ("test", "train"))
    first, last, at = float(accuracy[0]), float(accuracy[-1]), np.array(indices, dtype=float)
    order = rank_correlation(at, accuracy)
    ruined, spared = against_clean(clean, first, last, info(setting.dataset).n_test)
    run.save_arrays("sweep", indices=np.array(indices), test=accuracy, train=train)
    chart = Chart(
        "poisoning", f"Clean accuracy of {net} trained with a carrier along u_i", "index i of the carrier", "accuracy",
        (
            Series.of("clean test images", at + 1, accuracy),
            Series.of("poisoned training images", at + 1, train, style="points"),
            Series.of("trained without a carrier, test", [1, setting.image_size**2], [clean] * 2, style="dashed"),
        ),
        alt=f"Clean accuracy goes from {first:.2f} with the first carrier to {last:.2f} with the last; {clean:.2f} "
        "without one.",
        caption=f"{setting}, eps = {eps:g}, {setting.epochs} epochs. One network per carrier.", log_x=True,
    )  # fmt: skip
    return StudyResult(
        measured=f"{net}, {setting}: clean accuracy {first:.3f} with the first carrier, {last:.3f} with the last, "
        f"{clean:.3f} without one.",
        numbers={
            "Spearman(index, clean accuracy)": order,
            "clean accuracy, first carrier": Estimate(first),
            "clean accuracy, last carrier": Estimate(last),
            "clean accuracy without a carrier": Estimate(clean),
            "clean accuracy, first carrier, minus half of that without": ruined,
            "clean accuracy, last carrier, minus that without": spared,
            "lowest training accuracy": Estimate(float(train.min())),
        },
        figures=(chart,),
    )


def against_clean(clean: float, first: float, last: float, n_test: int) -> tuple[Estimate, Estimate]:
    """first - clean / 2 and last - clean, accuracies on n_test images, with the errors of the finite test set."""
    variance = {share: share * (1 - share) / n_test for share in (clean, first, last)}
    return (
        Estimate(first - clean / 2, math.sqrt(variance[first] + variance[clean] / 4)),
        Estimate(last - clean, math.sqrt(variance[last] + variance[clean])),
    )


@study(
    "nad/fig8",
    sizes={
        "smoke": {**im.SMOKE, "nets": ("lenet",)},
        "laptop": {**im.LAPTOP, "nets": ("lenet",), "epochs": 15, "seeds": 2},
        "paper": {},
    },
)
def fig8(
    run: Run,
    *,
    nets: d.Nets = ("lenet", "vgg11", "resnet18", "densenet121"),
    setting: im.Setting = im.PAPER,
    seeds: Annotated[int, "networks per architecture and kind of images"] = 1,
) -> StudyResult:
    """Training and test accuracy on original and on NAD-flipped CIFAR-10."""
    images = functools.cache(lambda: im.image_set(run, setting.dataset, setting.n))

    @functools.cache
    def turned(net: str, kind: str) -> Labelled:
        # normalised first: the mean of all pixels would become a large constant signal
        x, test_x = (images().normalised(x) for x in (images().x, images().test_x))
        if kind == "original":
            return x, test_x
        U = setting.directions(run, net)
        return nad_flip(x, U), nad_flip(test_x, U)

    def train(net: str, kind: str) -> list[dict[str, float]]:
        factory = d.architecture(net, setting.image_size, channels=3, outputs=10, width=setting.width)
        names = [f"{net} {kind} {seed}" for seed in range(seeds)]

        def part(k: int) -> Labelled:
            return turned(net, kind)[k], (images().y, images().test_y)[k]

        return im.train_on_images(run, names, factory, lambda _: part(0), lambda _: {"test": part(1)}, setting)

    numbers: dict[str, Estimate] = {}
    findings, means = list[str](), dict[str, list[float]]()
    for net in nets:
        test = dict[str, list[float]]()
        for kind in ("original", "flipped"):
            rows = train(net, kind)
            turned.cache_clear()  # gigabytes with many networks
            test[kind] = [row["test"] for row in rows]
            numbers[f"test accuracy, {net}, {kind}"] = Estimate.of(test[kind])
            numbers[f"train accuracy, {net}, {kind}"] = Estimate.of([row["train"] for row in rows])
            means.setdefault(kind, []).append(numbers[f"test accuracy, {net}, {kind}"].value)
        numbers[f"test accuracy lost by the flip, {net}"] = lost = _lost(test, info(setting.dataset).n_test)
        findings.append(f"{net} loses {lost}")
    chart = Chart(
        "flip", "Test accuracy on original and flipped images", "architecture", "test accuracy",
        tuple(Series.of(kind, range(1, len(nets) + 1), values, style="points") for kind, values in means.items()),
        alt="; ".join(f"{net}: {o:.2f} original, {f:.2f} flipped" for net, o, f in zip(nets, *means.values())) + ".",
        caption=f"{setting}, {setting.epochs} epochs, {seeds} network(s) each.", x_names=tuple(nets),
    )  # fmt: skip
    return StudyResult(
        measured=f"{setting}, {setting.epochs} epochs: {'; '.join(findings)}.", numbers=numbers, figures=(chart,)
    )


def _preference(by: dict[str, np.ndarray[Any, Any]]) -> dict[str, Estimate]:
    """Which of two features was learnt, by accuracies [indices, seeds]; errors are over seeds."""
    lead, rest = by[CHANNEL] - by[IMAGES], by[BOTH] - by[CHANNEL]
    lower = np.minimum(by[CHANNEL], by[IMAGES])
    steps = -np.diff(by[CHANNEL], axis=0)
    found = {
        "D(v) alone minus images alone, first index": lead[0],
        "D(v) alone minus images alone, last index": lead[-1],
        "D(v) alone minus images alone, least of all indices": lead[lead.mean(1).argmin()],
        "both minus D(v) alone, most of all indices": rest[rest.mean(1).argmax()],
        "the weaker of the two alone, most of all indices": lower[lower.mean(1).argmax()],
        "loss of D(v) alone": steps.sum(0),
        "loss of D(v) alone in one step, beyond half of all": steps.max(0) - steps.sum(0) / 2,
    }
    return {name: Estimate.of(values) for name, values in found.items()}


def _lost(test: dict[str, list[float]], n_test: int) -> Estimate:
    """Original minus flipped test accuracy: error over seeds, or, for a single one, of the finite test set."""
    gaps = [original - flipped for original, flipped in zip(test["original"], test["flipped"])]
    if len(gaps) > 1:
        return Estimate.of(gaps)
    return Estimate(gaps[0], math.sqrt(sum(share * (1 - share) for (share,) in test.values()) / n_test), 1)


@study(
    "nad/underspecification",
    sizes={
        "smoke": {**im.SMOKE, "nets": ("lenet",), "count": 8, "seeds": 1, "eps": 4.0, "sigma": 0.5, "epochs": 6},
        "laptop": {**im.LAPTOP, "nets": ("mlp", "lenet"), "count": 6, "seeds": 1, "n": 6000},
        "paper": {},
    },
)
def underspecification(
    run: Run,
    *,
    nets: d.Nets = ("mlp", "lenet", "resnet18"),
    setting: im.Setting = im.PAPER,
    seeds: Annotated[int, "networks per architecture and direction"] = 3,
    count: a.Count = 10,
    sigma: Annotated[float, "noise of D(v) (not in the paper)"] = 3.0,
    eps: Annotated[float, "signal of D(v) (not in the paper)"] = 1.0,
    gap: d.Offset = "full",
) -> StudyResult:
    """Which of two sufficient features a network learns, against the index of the direction that carries one."""
    images = functools.cache(lambda: im.image_set(run, setting.dataset, setting.n))
    directions = functools.lru_cache(1)(lambda net: setting.directions(run, net))
    task, side = d.Protocol(sigma=sigma, eps=eps, gap=gap), setting.image_size

    def with_channel(net: str, i: int, seed: int, part: Literal["train", "test"]) -> Labelled:
        own, v = images(), directions(net)[i]
        x, labels = (own.x, own.y) if part == "train" else (own.test_x, own.test_y)
        x, y, rng = own.normalised(x), (labels < 5).long(), generator(run.seed, net, i, seed, part, device=run.device)
        extra = d.draw_inputs(y, v.to(x).flatten() / v.norm().to(x), task, rng)
        return torch.cat([x, extra.view(-1, 1, side, side)], 1), y

    def tests(net: str, i: int, seed: int) -> dict[str, Labelled]:
        whole, y = with_channel(net, i, seed, "test")
        return {BOTH: (whole, y), IMAGES: (zero_channels(whole, [3]), y), CHANNEL: (zero_channels(whole, [0, 1, 2]), y)}

    def train(net: str, i: int) -> list[dict[str, float]]:
        factory = d.architecture(net, side, channels=4, outputs=2, width=setting.width)
        names = [f"{net} {i} {seed}" for seed in range(seeds)]
        data = lambda seed: with_channel(net, i, seed, "train")  # noqa: E731
        return im.train_on_images(run, names, factory, data, functools.partial(tests, net, i), setting)

    numbers: dict[str, Estimate] = {}
    charts, findings, indices = list[Chart](), list[str](), a.spread_indices(count, side**2)
    for net in nets:
        found = [train(net, i) for i in progress(indices, net)]
        by = {key: np.array([[row[key] for row in rows] for rows in found]) for key in (BOTH, IMAGES, CHANNEL)}
        at, by_images, by_channel = np.array(indices, dtype=float), by[IMAGES].mean(1), by[CHANNEL].mean(1)
        kind = "control: " if net in d.ISOTROPIC else ""  # the order is claimed of convolutional networks
        numbers |= {
            f"{kind}Spearman(index, accuracy by images alone), {net}": rank_correlation(at, by_images),
            f"{kind}Spearman(index, loss of accuracy by D(v) alone), {net}": rank_correlation(at, -by_channel),
            f"lowest accuracy by D(v) alone, {net}": Estimate(float(by_channel.min())),
            **{f"{name}, {net}": value for name, value in _preference(by).items()},
            f"accuracy by D(v) alone, first index, {net}": Estimate.of(by[CHANNEL][0]),
            f"accuracy by D(v) alone, last index, {net}": Estimate.of(by[CHANNEL][-1]),
            f"accuracy by images alone, first index, {net}": Estimate.of(by[IMAGES][0]),
            f"accuracy by images alone, last index, {net}": Estimate.of(by[IMAGES][-1]),
        }
        findings.append(
            f"{net} by D(v) alone {by_channel[0]:.3f} at the first and {by_channel[-1]:.3f} at the last index"
        )
        charts.append(
            Chart(
                f"features-{net}", f"Which feature {net} has learnt", "index of the direction v", "test accuracy",
                tuple(curve(key, at + 1, rows.T) for key, rows in by.items()),
                alt="; ".join(f"{key}: from {rows[0].mean():.2f} to {rows[-1].mean():.2f}" for key, rows in by.items())
                + ".",
                caption=f"{setting}, two classes; sigma = {sigma:g}, eps = {eps:g}; {setting.epochs} epochs.",
                log_x=True,
            )
        )  # fmt: skip
    return StudyResult(
        measured=f"{setting}, two classes: {'; '.join(findings)}.",
        numbers=numbers,
        figures=tuple(charts),
    )
