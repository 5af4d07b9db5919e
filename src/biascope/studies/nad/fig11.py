"""Fig. 11: the maps of Fig. 1 at several noise levels.

Rule for the verdict, set before any run; every part that the chosen networks allow must hold:
- logistic regression reaches 0.99 on every bin at every noise level;
- each convolutional network is less accurate at the highest noise than at the lowest (paired over bins, by two errors);
- without noise, LeNet stays below 0.9 on some bin, every other network reaches 0.95 on all;
- ResNet-18 is more accurate than each other convolutional network at the middle noise level (paired, by two errors).
"""

from typing import Annotated

import numpy as np

from biascope.errors import InputError
from biascope.studies.estimates import above
from biascope.studies.nad import directional as d
from biascope.studies.nad import frequencies as f
from biascope.studies.nad.fig1 import ISOTROPIC
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "Logistic regression is perfect at every noise level; LeNet fails on some directions even without noise; the other "
    "networks are perfect without noise and lose accuracy as it grows, ResNet-18 the least."
)


@study(
    "nad/fig11",
    paper="nad",
    figure="11",
    claim=CLAIM,
    sizes={
        "smoke": {key: value for key, value in d.SMOKE.items() if key != "sigma"}
        | {"nets": ("logreg", "lenet"), "sigmas": (0.0, 2.0), "sample": 8},
        "laptop": {**d.LAPTOP, "nets": ("logreg", "lenet"), "stride": 4, "sample": 12, "n": 3000},
        "paper": {},
    },
)
def fig11(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures"] = ("logreg", "lenet", "resnet18"),
    sigmas: Annotated[tuple[float, ...], "noise levels, rising"] = (0.0, 1.0, 3.0),
    image_size: d.Side = 32,
    stride: f.Stride = 2,
    window: f.Window = 0,
    sample: f.Sample = 0,
    n: d.Samples = 10_000,
    n_test: d.TestSamples = 10_000,
    eps: d.Eps = 1.0,
    gap: d.Offset = "full",
    epochs: d.Epochs = 20,
    precision: d.Arithmetic = "auto",
    chunk: d.Chunk = 0,
) -> StudyResult:
    """Accuracy maps at several noise levels."""
    if list(sigmas) != sorted(set(sigmas)) or len(sigmas) < 2:
        raise InputError(f"sigmas must be at least two rising noise levels, got {sigmas}")
    basis = f.bins(image_size, "re", stride, window, sample, run.seed)
    accuracy: dict[tuple[str, float], d.Array] = {}
    maps, numbers = [], {}
    for net in nets:
        for sigma in sigmas:
            protocol = d.Protocol(n, n_test, sigma, eps, gap, epochs, precision=precision, chunk=chunk)
            factory = d.architecture(net, image_size)
            found = d.train_directions(run, f"{net} sigma={sigma:g}", factory, basis.vectors, protocol)
            accuracy[net, sigma] = found.test
            numbers[f"mean accuracy, {net}, sigma {sigma:g}"] = Estimate.of(found.test)
            numbers[f"worst bin, {net}, sigma {sigma:g}"] = Estimate(float(found.test.min()))
            title = f"{net}, sigma = {sigma:g}"
            maps.append(f.heat_map(f"{net}-{sigma:g}", title, found.test, basis, caption=str(protocol)))
    parts = checks(accuracy, nets, sigmas)
    failed = [what for what, holds in parts.items() if not holds]
    means = "; ".join(f"{net} {', '.join(f'{accuracy[net, s].mean():.3f}' for s in sigmas)}" for net in nets)
    return StudyResult(
        "not tested" if not parts else "not confirmed" if failed else "confirmed",
        CLAIM,
        f"{len(basis)} bins, {n} training samples, eps = {eps:g}; mean accuracy at sigma = "
        f"{', '.join(f'{s:g}' for s in sigmas)}: {means}. Does not hold: {'; '.join(failed) or 'nothing'}.",
        numbers,
        tuple(maps),
    )


def checks(
    accuracy: dict[tuple[str, float], d.Array], nets: tuple[str, ...], sigmas: tuple[float, ...]
) -> dict[str, bool]:
    """The parts of the claim that these networks and noise levels can show, and whether each holds."""
    parts: dict[str, bool] = {}
    low, middle, high = sigmas[0], sigmas[len(sigmas) // 2], sigmas[-1]
    for net in nets:
        if net == "logreg":
            worst = min(float(accuracy[net, s].min()) for s in sigmas)
            parts[f"logistic regression perfect everywhere (worst {worst:.3f})"] = worst >= 0.99
        if net in ISOTROPIC:
            continue
        drop = Estimate.of(accuracy[net, low] - accuracy[net, high])
        parts[f"{net} loses accuracy with noise ({drop})"] = above(drop)
        if low == 0:
            worst = float(np.min(accuracy[net, low]))
            text = "fails somewhere" if net == "lenet" else "is perfect"
            parts[f"{net} {text} without noise (worst {worst:.3f})"] = worst < 0.9 if net == "lenet" else worst >= 0.95
        if "resnet18" in nets and net != "resnet18" and len(sigmas) > 2:
            more = Estimate.of(accuracy["resnet18", middle] - accuracy[net, middle])
            parts[f"resnet18 more robust than {net} at sigma {middle:g} ({more})"] = above(more)
    return parts
