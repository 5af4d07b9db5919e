"""Fig. 4.3: the deep sigmoid auto-encoder trained by EKFAC, EKFAC-ra, KFAC, SGD with momentum, and Adam.

Every optimiser gets a grid of the same size (learning rate times damping; times momentum for SGD; times epsilon for
Adam), the same initial networks and the same batches, and is judged by the training loss after the same number of
steps. The best setting of the first seed is trained again from the other seeds. KFAC's factors and both eigenbases are
computed every `refresh` steps (amortised, as in the paper). The seconds include everything an optimiser does. Unlike
the paper's, the baselines have no batch normalisation: every optimiser trains the same network.
"""

import math
import time
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import backward

from biascope import nets
from biascope.errors import InputError
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.ekfac.common import NAMES, batch, images, mean_curve, optimiser, reconstruction
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "On the deep auto-encoder, EKFAC and EKFAC-ra reach a lower training loss than amortised KFAC and SGD with "
    "momentum after the same number of iterations."
)
RIVALS = ("kfac", "sgd")


@study(
    "ekfac/fig4.3",
    paper="linearization",
    figure="4.3",
    claim=CLAIM,
    sizes={
        "smoke": {"steps": 200, "points": 2, "seeds": 2},
        "laptop": {"dataset": "mnist", "n": 5000, "hidden": (200, 100, 50, 20), "steps": 500, "points": 3},
        "paper": {
            "dataset": "mnist",
            "n": 60000,
            "hidden": (1000, 500, 250, 30),
            "steps": 6000,
            "points": 4,
            "every": 50,
        },
    },
)
def fig4_3(
    run: Run,
    *,
    dataset: Annotated[Literal["digits", "mnist"], "images to encode"] = "digits",
    n: Annotated[int, "training images"] = 1437,
    hidden: Annotated[tuple[int, ...], "widths of the encoder"] = (60, 30, 15),
    steps: Annotated[int, "iterations of every training"] = 500,
    size: Annotated[int, "examples per batch"] = 200,
    refresh: Annotated[int, "iterations between refreshes, for KFAC and EKFAC"] = 50,
    every: Annotated[int, "iterations between evaluations"] = 10,
    points: Annotated[int, "values of each of the two hyper-parameters"] = 4,
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3,
    optimisers: Annotated[tuple[str, ...], "who takes part"] = tuple(NAMES),
) -> StudyResult:
    """Loss of a deep auto-encoder against iterations and against time, for five optimisers."""
    if unknown := [name for name in optimisers if name not in NAMES]:
        raise InputError(f"unknown optimiser {unknown[0]!r}; there is {', '.join(NAMES)}")
    x, _ = images(dataset, n, run)

    def train(name: str, lr: float, second: float, seed: int) -> dict[str, Value]:
        key = f"{name} lr={lr:g} second={second:g} seed={seed}"
        return run.cached(key, lambda: _train(run, name, x, hidden, steps, size, refresh, every, lr, second, seed))

    best: dict[str, tuple[float, float]] = {}
    edge: list[str] = []
    for name in progress(optimisers, "optimisers"):
        lrs, seconds = grid(name, points)
        losses = {(lr, s): float(train(name, lr, s, 0)["final"]) for lr, s in product(lrs, seconds)}  # type: ignore[arg-type]
        best[name] = min(losses, key=losses.__getitem__)
        run.log(optimiser=name, lr=best[name][0], second=best[name][1], loss=losses[best[name]])
        if points > 2 and best[name][0] in (min(lrs), max(lrs)):
            edge.append(NAMES[name])
    rows = {name: [train(name, *best[name], seed) for seed in range(seeds)] for name in optimisers}
    final = {name: Estimate.of([float(r["final"]) for r in found]) for name, found in rows.items()}  # type: ignore[arg-type]
    numbers = {f"final training loss, {NAMES[name]}": value for name, value in final.items()}
    numbers |= {
        f"milliseconds per iteration, {NAMES[name]}": Estimate.of(
            [1e3 * float(torch.as_tensor(r["seconds"])[-1]) / steps for r in found]
        )
        for name, found in rows.items()
    }
    won, lost = _compare(rows, numbers)
    reached = _iterations(rows, numbers, every)
    ticks = [*range(0, steps, every), steps]
    curves = {name: mean_curve([r["loss"] for r in found]) for name, found in rows.items()}
    times = {name: mean_curve([r["seconds"] for r in found])[0] for name, found in rows.items()}
    settings = "; ".join(f"{NAMES[name]} lr {lr:g}, {SECOND[name]} {s:g}" for name, (lr, s) in best.items())
    charts = (
        Chart(
            "iterations",
            "Training loss against iterations",
            "iteration",
            "cross-entropy per image",
            tuple(Series.of(NAMES[name], ticks, *curve) for name, curve in curves.items()),
            alt="One falling curve per optimiser over iterations.",
            caption=f"Best of {points**2} settings each: {settings}. Mean over {seeds} seeds, band: standard error.",
            log_y=True,
        ),
        Chart(
            "time",
            "Training loss against time",
            "seconds of training on this machine",
            "cross-entropy per image",
            tuple(Series.of(NAMES[name], times[name], curve[0]) for name, curve in curves.items()),
            alt="One falling curve per optimiser over seconds.",
            log_y=True,
        ),
    )
    notes = f" The best learning rate of {', '.join(edge)} is at the edge of its grid." if edge else ""
    tested = bool(won or lost)
    return StudyResult(
        ("confirmed" if not lost else "not confirmed") if tested else "not tested",
        CLAIM,
        "Final losses: "
        + ", ".join(f"{NAMES[name]} {value}" for name, value in final.items())
        + f". {reached}"
        + (
            f" Not lower by two standard errors, or against a rival that did not learn: {'; '.join(lost)}."
            if lost
            else ""
        )
        + notes,
        numbers,
        charts,
    )


SECOND = {"ekfac": "damping", "ekfac-ra": "damping", "kfac": "damping", "sgd": "momentum", "adam": "epsilon"}


def grid(name: str, points: int) -> tuple[list[float], list[float]]:
    """The first `points` learning rates and second hyper-parameters of an optimiser, the middle of the range first."""
    lrs = {
        "sgd": [0.3, 0.1, 1.0, 0.03, 0.01],
        "adam": [0.03, 0.01, 0.1, 0.003, 0.001],
        "kfac": [0.1, 0.3, 0.03, 1.0, 0.01],
    }
    seconds = {
        "sgd": [0.9, 0.95, 0.5, 0.99, 0.0],
        "adam": [1e-8, 1e-4, 1e-2, 1e-6, 1.0],
        "kfac": [1e-1, 1.0, 1e-2, 1e-3, 1e-4],  # amortised KFAC diverges where EKFAC is at its best
    }
    ekfac = [0.1, 0.03, 0.3, 0.01, 0.003], [1e-3, 1e-2, 1e-4, 1e-1, 1.0]
    return lrs.get(name, ekfac[0])[:points], seconds.get(name, ekfac[1])[:points]


def _train(
    run: Run,
    name: str,
    x: Tensor,
    hidden: tuple[int, ...],
    steps: int,
    size: int,
    refresh: int,
    every: int,
    lr: float,
    second: float,
    seed: int,
) -> dict[str, Value]:
    """Losses on (at most 5000 of) the training images and seconds of training, every few steps; inf once diverged."""
    shape: dict[str, Any] = {"in_features": x.shape[1], "hidden": hidden}
    net = nets.build("autoencoder", seed=derive(run.seed, "init", seed), **shape).to(run.device)
    opt = optimiser(name, net, lr, second, refresh)
    losses, seconds, clock = [_evaluate(net, x)], [0.0], 0.0
    for chunk in _chunks(steps, every):
        begin = time.perf_counter()
        if math.isfinite(losses[-1]):
            try:
                for step in chunk:
                    opt.zero_grad()
                    backward(reconstruction(net, x[batch(run, seed, step, len(x), size)]))
                    opt.step()
                if x.is_cuda:
                    torch.cuda.synchronize()
            except InputError:  # the gradient overflowed: this setting diverged
                losses.append(math.inf)
        clock += time.perf_counter() - begin
        seconds.append(clock)
        if len(losses) < len(seconds):
            losses.append(_evaluate(net, x) if math.isfinite(losses[-1]) else math.inf)
    return {"loss": torch.tensor(losses), "seconds": torch.tensor(seconds), "final": min(losses[-1], 1e30)}


def _chunks(steps: int, every: int) -> Iterator[range]:
    for start in range(0, steps, every):
        yield range(start, min(start + every, steps))


@torch.no_grad()
def _evaluate(net: nn.Module, x: Tensor) -> float:
    loss = float(reconstruction(net, x[:5000]))
    return loss if math.isfinite(loss) else math.inf


def _compare(rows: dict[str, list[dict[str, Value]]], numbers: dict[str, Estimate]) -> tuple[list[str], list[str]]:
    """Which of the claimed inequalities hold by two standard errors of the paired difference, and which do not."""
    won: list[str] = []
    lost: list[str] = []
    for mine, rival in product(("ekfac", "ekfac-ra"), RIVALS):
        if mine not in rows or rival not in rows:
            continue
        gaps = [float(r["final"]) - float(m["final"]) for m, r in zip(rows[mine], rows[rival])]  # type: ignore[arg-type]
        gap = Estimate.of(gaps)
        numbers[f"loss of {NAMES[rival]} minus {NAMES[mine]}"] = gap
        # a rival that never learnt anything was given a bad grid: beating it shows nothing
        learnt = all(float(r["final"]) < float(torch.as_tensor(r["loss"])[0]) for r in rows[rival])  # type: ignore[arg-type]
        holds = learnt and gap.value > 2 * (gap.standard_error or 0.0)
        (won if holds else lost).append(f"{NAMES[mine]} against {NAMES[rival]}")
    return won, lost


def _iterations(rows: dict[str, list[dict[str, Value]]], numbers: dict[str, Estimate], every: int) -> str:
    """Iterations and seconds until the best final loss of SGD with momentum is reached."""
    if "sgd" not in rows:
        return ""
    parts = []
    for name, found in rows.items():
        steps, seconds = [], []
        for mine, sgd in zip(found, rows["sgd"]):
            below = torch.as_tensor(mine["loss"]) <= float(sgd["final"])  # type: ignore[arg-type]
            first = int(below.float().argmax()) if bool(below.any()) else -1
            steps.append(float(first * every) if first >= 0 else math.inf)
            seconds.append(float(torch.as_tensor(mine["seconds"])[first]) if first >= 0 else math.inf)
        if all(map(math.isfinite, steps)):
            numbers[f"iterations to SGD's final loss, {NAMES[name]}"] = Estimate.of(steps)
            numbers[f"seconds to SGD's final loss, {NAMES[name]}"] = Estimate.of(seconds)
            parts.append(f"{NAMES[name]} {Estimate.of(steps)}")
        else:
            parts.append(f"{NAMES[name]} never in {sum(map(math.isinf, steps))} of {len(steps)} seeds")
    return f"Iterations to the final loss of SGD with momentum: {', '.join(parts)}."
