"""Trainings until the cross-entropy is low, with the path complexity C(f) and the norms it is compared with."""

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from biascope.curvature import complexity
from biascope.data import Dataset
from biascope.seeds import derive
from biascope.studies.alignment.tracking import build, randomise
from biascope.studies.function_space.training import (
    Recipe,
    displacement,
    evaluate,
    fit,
    per_epoch,
    spread_out,
    steps_of,
)
from biascope.studies.runs import Run, Value

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
    """One point of a sweep."""

    net: str
    depth: int
    width: int
    noise: float
    lr: float
    batch: int
    epochs: float
    stop: float
    updates: int
    probe_size: int
    precision: str = "tf32"


def measure(run: Run, job: Training, train: Dataset, test: Dataset, seed: int) -> dict[str, Any]:
    """Gap (test error minus training error), accuracies, final loss, iterations, and `MEASURES` of a training."""
    key = f"{job.net} depth={job.depth} width={job.width} noise={job.noise:g} seed={seed}"
    return run.cached(key, partial(_train, run, job, train, test, seed))


def _train(run: Run, job: Training, train: Dataset, test: Dataset, seed: int) -> dict[str, Value]:
    y, _ = randomise(train.y, job.noise, derive(run.seed, "noise", seed))
    net = build(job.net, train.x.shape[1:], derive(run.seed, "init", seed), width=job.width, depth=job.depth)
    net = net.to(run.device)
    start = copy.deepcopy(net)
    recipe = Recipe(
        steps_of(job.epochs, len(train), job.batch), job.batch, job.lr, 0.9, "constant", precision=job.precision
    )
    path = complexity.PathComplexity(train.x[: job.probe_size])
    when, checks = set(spread_out(recipe.steps, job.updates)), per_epoch(len(train), job.batch)
    ended = [recipe.steps]

    def look(step: int) -> bool:
        path.update(net)
        if step % checks == 0 and step and evaluate(net, train.x, y)[0] <= job.stop:
            ended[0] = step
            return True
        return False

    at = when | set(range(0, recipe.steps + 1, checks))
    fit(net, train.x, y, recipe, derive(run.seed, "order", seed), at=at, look=look)
    loss, right = evaluate(net, train.x, y)
    good = evaluate(net, test.x, test.y)[1]
    found = {"gap": right - good, "train": right, "test": good, "loss": loss, "iterations": float(ended[0])}
    found |= {"path": path.value, "distance": displacement(net, start)[0], **norms(net, start)}
    run.log(net=job.net, width=job.width, noise=job.noise, seed=seed, **found)
    return dict(found)


def norms(net: nn.Module, start: nn.Module) -> dict[str, float]:
    """Number of parameters, products of Frobenius and of spectral norms, and the measure of two-layer networks.

    The last is ||V||_F (||U - U_0||_F + ||U_0||_2) for hidden weights U and output weights V, up to constants; NaN for
    deeper networks.

    Example:
        >>> net = build("mlp", (1, 2, 2), 0, width=3, depth=1)
        >>> found = norms(net, net)
        >>> found["parameters"], found["spectral"] <= found["frobenius"]
        (55.0, True)
    """
    weights, before = (
        [p.detach().double().flatten(1).cpu() for p in m.parameters() if p.dim() > 1] for m in (net, start)
    )
    spectral = [float(torch.linalg.matrix_norm(W, 2)) for W in weights]
    two_layers = math.nan
    if len(weights) == 2:
        U, V, U0 = weights[0], weights[1], before[0]
        two_layers = float(V.norm() * ((U - U0).norm() + torch.linalg.matrix_norm(U0, 2)))
    return {
        "parameters": float(sum(p.numel() for p in net.parameters())),
        "frobenius": math.prod(float(W.norm()) for W in weights),
        "spectral": math.prod(spectral),
        "neyshabur": two_layers,
    }


def table(rows: list[list[dict[str, Any]]], name: str) -> Tensor:
    """One number of every training, [seeds, points of the sweep]."""
    return torch.tensor([[float(r[name]) for r in row] for row in rows], dtype=torch.float64)
