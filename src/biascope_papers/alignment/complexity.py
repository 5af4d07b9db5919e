"""Fig. 4.6 (also 6.6): the path complexity C(f) = sum_t ||dw_t|| ||Phi_t||_F against the generalisation gap.

Networks train until the cross-entropy on all training images is 0.01, for at most `epochs`. The complexity is summed at
every epoch and at log-spaced iterations, with the displacement in between and ||Phi||_F on a fixed batch: sums are
comparable only within a sweep. The gap is test error minus training error.
"""

import copy
import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from biascope.curvature import complexity
from biascope.data import Dataset
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import curve, mean_of_ranks, spearman
from biascope.support import derive, progress
from biascope_papers.alignment.tracking import build, randomise, stand_in, train_and_test
from biascope_papers.ntk.training import (
    Recipe,
    displacement,
    evaluate,
    fit,
    per_epoch,
    spread_out,
    steps_of,
)

Sweep = Literal["width", "corruption", "channels"]
AXES: dict[Sweep, str] = {
    "width": "hidden units",
    "corruption": "fraction of random labels",
    "channels": "channels of the first stage",
}
MEASURES = {
    "path": "C(f)",
    "parameters": "number of parameters",
    "distance": "distance from the initial weights",
    "frobenius": "product of Frobenius norms",
    "spectral": "product of spectral norms",
    "neyshabur": "two-layer measure of Neyshabur et al.",
}


@dataclass(frozen=True)
class Training:
    """Options of the trainings."""

    lr: Annotated[float, "learning rate; momentum is 0.9"] = 0.01
    batch: Annotated[int, "images per step"] = 100
    epochs: Annotated[float, "most passes over the training images"] = 200
    stop: Annotated[float, "training cross-entropy at which to stop"] = 0.01
    updates: Annotated[int, "log-spaced iterations at which the complexity is summed, besides every epoch"] = 30
    probe_size: Annotated[int, "images for the norm of the tangent features"] = 50
    seeds: Annotated[int, "initialisations"] = 3
    precision: Annotated[str, "float32, tf32 or bf16 while training on a GPU"] = "tf32"


TRAINING = Training()


@study(
    "alignment/fig4.6",
    sizes={
        "smoke": {
            "dataset": "digits", "sweeps": "corruption", "n_train": 200, "n_test": 300, "hidden": 64,
            "corruptions": "0,0.3,0.6", "epochs": 120, "batch": 50, "lr": 0.1, "updates": 12, "probe_size": 40,
            "seeds": 2,
        },
        "laptop": {},
        "paper": {
            "sweeps": "width,corruption,channels", "n_train": 50_000, "n_test": 10_000,
            "widths": "8,16,32,64,128,256,512,1024,2048,4096",
            "corruptions": "0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1", "channels": "4,8,16,24,32", "epochs": 150,
            "updates": 60, "probe_size": 100,
        },
    },
)  # fmt: skip
def fig4_6(
    run: Run,
    *,
    dataset: Annotated[str, "images of the first two sweeps: mnist, or digits as a stand-in"] = "mnist",
    sweeps: Annotated[tuple[Sweep, ...], "what is varied"] = ("width", "corruption"),
    n_train: Annotated[int, "training images"] = 1000,
    n_test: Annotated[int, "test images"] = 2000,
    widths: Annotated[tuple[int, ...], "hidden units of the first sweep"] = (8, 32, 128, 512),
    hidden: Annotated[int, "hidden units of the second sweep"] = 256,
    corruptions: Annotated[tuple[float, ...], "fractions of random labels"] = (0.0, 0.25, 0.5, 0.75),
    channels: Annotated[tuple[int, ...], "channels of the first stage of VGG-19"] = (4, 8, 16),
    training: Training = TRAINING,
) -> StudyResult:
    """Complexity of the path and other measures against the generalisation gap, over three sweeps."""
    points: dict[Sweep, tuple[float, ...]] = {"width": widths, "corruption": corruptions, "channels": channels}
    numbers: dict[str, Estimate] = {}
    charts, parts = [], []

    @cache
    def sets(name: str) -> tuple[Dataset, Dataset]:  # not needed to judge a run again
        return train_and_test(run, name, n_train, n_test)

    def measure(sweep: Sweep, value: float, seed: int) -> dict[str, Any]:
        net, name = ("vgg19", "cifar10") if sweep == "channels" else ("mlp", dataset)
        width, noise = (hidden, value) if sweep == "corruption" else (int(value), 0.0)
        key = f"{net} depth=1 width={width} noise={noise:g} seed={seed}"
        return run.cached(key, lambda: _train(run, training, net, width, noise, *sets(name), seed))

    for sweep in progress(sweeps, "sweeps"):
        at = points[sweep]
        jobs = [[partial(measure, sweep, value, seed) for value in at] for seed in range(training.seeds)]
        rows = [[job() for job in progress(row, sweep, leave=False)] for row in jobs]

        def table(name: str, rows: list[list[dict[str, Any]]] = rows) -> Tensor:  # [seeds, points of the sweep]
            return torch.tensor([[float(each[name]) for each in row] for row in rows], dtype=torch.float64)

        gap, path, late = table("gap"), table("path"), table("loss") > training.stop
        curves = {"generalisation gap": gap}
        for name, label in MEASURES.items():
            values = table(name)
            if bool(values.isfinite().all()):
                follows = mean_of_ranks(map(spearman, values.tolist(), gap.tolist()), len(at))
                numbers[f"rank correlation of {label} and the gap, {sweep}"] = follows
                curves[label] = values
        numbers[f"rank correlation of {sweep} and C(f)"] = mean_of_ranks(
            [spearman(list(at), row) for row in path.tolist()], len(at)
        )
        numbers[f"gap at the ends of the sweep, first, {sweep}"] = Estimate.of(gap[:, 0])
        numbers[f"gap at the ends of the sweep, last, {sweep}"] = Estimate.of(gap[:, -1])
        numbers[f"share of trainings that reached the loss, {sweep}"] = Estimate(1 - float(late.double().mean()))
        known = numbers[f"rank correlation of C(f) and the gap, {sweep}"]
        short = f" ({int(late.sum())} of {late.numel()} trainings did not reach the loss)" if late.any() else ""
        parts.append(f"{sweep} {known}{short}")
        scaled = {label: t / t.abs().amax(1, keepdim=True).clamp_min(1e-12) for label, t in curves.items()}
        charts.append(
            Chart(
                f"complexity-{sweep}", f"Complexity and generalisation gap over {sweep}", AXES[sweep],
                "relative to the largest", tuple(curve(label, at, t) for label, t in scaled.items()),
                alt="The gap, C(f) and other measures over the sweep, each relative to its largest value.",
                caption="Mean and standard error over seeds.", log_x=sweep != "corruption",
            )
        )  # fmt: skip
    missing = ", ".join(sweep for sweep in AXES if sweep not in sweeps)
    return StudyResult(
        measured=f"Rank correlations of C(f) and the gap: {'; '.join(parts)}. {n_train} training images."
        f"{stand_in(dataset)}{f' Not tested: sweeps {missing}.' if missing else ''}",
        numbers=numbers,
        figures=tuple(charts),
    )


def _train(
    run: Run, how: Training, kind: str, width: int, noise: float, train: Dataset, test: Dataset, seed: int
) -> dict[str, float]:
    """Gap (test error minus training error), accuracies, final loss, iterations, and `MEASURES` of a training."""
    y, _ = randomise(train.y, noise, derive(run.seed, "noise", seed))
    net = build(kind, train.x.shape[1:], derive(run.seed, "init", seed), width=width, depth=1).to(run.device)
    start = copy.deepcopy(net)
    steps = steps_of(how.epochs, len(train), how.batch)
    recipe = Recipe(steps, how.batch, how.lr, 0.9, "constant", precision=how.precision)
    path = complexity.PathComplexity(train.x[: how.probe_size])
    checks = per_epoch(len(train), how.batch)
    ended = [steps]

    def look(step: int) -> bool:
        path.update(net)
        if step % checks == 0 and step and evaluate(net, train.x, y)[0] <= how.stop:
            ended[0] = step
            return True
        return False

    at = {*spread_out(steps, how.updates), *range(0, steps + 1, checks)}
    fit(net, train.x, y, recipe, derive(run.seed, "order", seed), at=at, look=look)
    loss, right = evaluate(net, train.x, y)
    good = evaluate(net, test.x, test.y)[1]
    found = {"gap": right - good, "train": right, "test": good, "loss": loss, "iterations": float(ended[0])}
    found |= {"path": path.value, "distance": displacement(net, start)[0], **norms(net, start)}
    run.log(net=kind, width=width, noise=noise, seed=seed, **found)
    return found


def norms(net: nn.Module, start: nn.Module) -> dict[str, float]:
    """Number of parameters, products of Frobenius and of spectral norms, and the measure of two-layer networks, ||V||_F
    (||U - U_0||_F + ||U_0||_2) up to constants; NaN for deeper ones.
    """
    weights, before = (
        [p.detach().double().flatten(1).cpu() for p in m.parameters() if p.dim() > 1] for m in (net, start)
    )
    two_layers = math.nan
    if len(weights) == 2:
        U, V, U0 = weights[0], weights[1], before[0]
        two_layers = float(V.norm() * ((U - U0).norm() + torch.linalg.matrix_norm(U0, 2)))
    return {
        "parameters": float(sum(p.numel() for p in net.parameters())),
        "frobenius": math.prod(float(W.norm()) for W in weights),
        "spectral": math.prod(float(torch.linalg.matrix_norm(W, 2)) for W in weights),
        "neyshabur": two_layers,
    }
