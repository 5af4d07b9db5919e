"""Fig. 4.3 d: how the loss of the auto-encoder after some epochs depends on learning rate and damping.

Every pair of a grid of decades is trained from every seed on the same batches; nothing is selected but the best pair.

Verdict, fixed beforehand. The cost of a pair is the share of the best pair's descent that it misses, (L - L_best) /
(L_start - L_best), at most 1; a pair that diverges costs 1. "Sharp": for each of the two hyper-parameters, a tenth or
ten times of its best value, whichever is worse, with the other left at its best, costs more than 0.1 by two standard
errors over seeds. Not tested if the best pair did not learn. (Mended after the first run: a set smaller than a batch
had been given fewer epochs than stated.)
"""

from itertools import product
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.progress import progress
from biascope.studies.ekfac import contest
from biascope.studies.ekfac.autoencoder import ENCODER, Encoder
from biascope.studies.ekfac.contest import NAMES, Setting
from biascope.studies.registry import study
from biascope.studies.result import Estimate, HeatMap, StudyResult, Verdict
from biascope.studies.runs import Run

CLAIM = "The loss after 20 epochs depends sharply on learning rate and damping."
SHARP = 0.1  # share of the descent that one decade must cost
DECADES = (1e-4, 1e-3, 1e-2, 1e-1)


@study(
    "ekfac/fig4.3d",
    paper="linearization",
    figure="4.3 d",
    claim=CLAIM,
    sizes={
        "smoke": {"n": 200, "hidden": (20, 10), "epochs": 12.0, "seeds": 2, "refresh": 6, "lrs": (1e-3, 1e-2, 1e-1)}
        | {"dampings": (1e-3, 1e-2, 1e-1)},
        "laptop": {"dataset": "mnist", "n": 5000, "hidden": (200, 100, 50, 20), "seeds": 2, "epochs": 5.0},
        "paper": {"dataset": "mnist", "n": 60_000, "hidden": (1000, 500, 250, 30)},
    },
)
def fig4_3d(
    run: Run,
    *,
    options: Encoder = ENCODER,
    optimiser: Annotated[Literal["ekfac", "ekfac-ra", "kfac"], "whose hyper-parameters they are"] = "ekfac",
    lrs: Annotated[tuple[float, ...], "learning rates, ascending decades"] = DECADES,
    dampings: Annotated[tuple[float, ...], "dampings, ascending decades"] = DECADES,
    epochs: Annotated[float, "passes over the images"] = 20.0,
    refresh: Annotated[int, "iterations between refreshes"] = 50,
    seeds: Annotated[int, "initialisations"] = 3,
) -> StudyResult:
    """Final loss of the auto-encoder on a grid of learning rates and dampings."""
    if len(lrs) < 2 or len(dampings) < 2:
        raise InputError(f"lrs={lrs}, dampings={dampings}: give at least two of each")
    task = options.problem(run)
    n = len(task.x)
    size = min(options.size, n)
    steps = max(1, round(epochs * n / size))
    pairs = list(product(lrs, dampings))
    rows = {
        pair: [
            contest.cached(run, task, Setting(optimiser, *pair, size, steps, refresh, steps), seed)
            for seed in range(seeds)
        ]
        for pair in progress(pairs, "pairs")
    }
    losses = torch.tensor([[float(r["final"]) for r in rows[pair]] for pair in pairs], dtype=torch.float64)  # type: ignore[arg-type]
    starts = torch.tensor([float(torch.as_tensor(r["loss"])[0]) for r in rows[pairs[0]]], dtype=torch.float64)
    shape = (len(lrs), len(dampings))
    cost, best = costs(losses.view(*shape, seeds), starts)
    steep = {
        "learning rate": steepest(cost[:, best[1]], best[0]),
        "damping": steepest(cost[best[0]], best[1]),
    }
    numbers = {f"cost of a decade, {name}": value for name, value in steep.items()}
    numbers["training loss at the start"] = Estimate.of(starts)
    for pair, row in zip(pairs, losses):
        if float(row.max()) < float(starts.max()) * 1e3:
            numbers[f"loss, lr {pair[0]:g}, damping {pair[1]:g}"] = Estimate.of(row)
    lr, damping = lrs[best[0]], dampings[best[1]]
    reached = losses.view(*shape, seeds)[best]
    learnt = bool((reached < starts).all())
    diverged = int((losses >= starts).all(1).sum())
    verdict: Verdict = "not tested"
    if learnt and seeds > 1:
        sharp = all(value.value - 2 * (value.standard_error or 0.0) > SHARP for value in steep.values())
        verdict = "confirmed" if sharp else "not confirmed"
    return StudyResult(
        verdict,
        CLAIM,
        f"{NAMES[optimiser]} on {n} images of {options.dataset}, {steps} iterations "
        f"({steps * size / n:.3g} epochs), {seeds} seeds: best at learning rate {lr:g}, damping {damping:g} with "
        f"loss {Estimate.of(reached)} (start {float(starts.mean()):.4g}). A decade away from it costs "
        f"{steep['learning rate']} of the descent in learning rate and {steep['damping']} in damping; "
        f"{diverged} of {len(pairs)} pairs end above the start.",
        numbers,
        (_map(losses.view(*shape, seeds), starts, lrs, dampings, NAMES[optimiser]),),
    )


def costs(losses: Tensor, starts: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Share of the best pair's descent that each pair misses, [lrs, dampings, seeds] in [0, 1], and the best pair.

    The best pair has the lowest mean loss; with one seed it may beat another pair that is better on that seed, whose
    cost is then 0.

    Example:
        >>> cost, best = costs(torch.tensor([[[1.0], [3.0]], [[9.0], [1e30]]]), torch.tensor([5.0]))
        >>> best, cost[..., 0].tolist()
        ((0, 0), [[0.0, 0.5], [1.0, 1.0]])
    """
    place = int(losses.mean(-1).flatten().argmin())
    best = divmod(place, losses.shape[1])
    low = losses[best]
    descent = (starts - low).clamp_min(1e-12)
    return ((losses - low) / descent).clamp(0, 1), best


def steepest(line: Tensor, at: int) -> Estimate:
    """The worse neighbour of the best value on a line of costs [values, seeds].

    Example:
        >>> print(steepest(torch.tensor([[0.2, 0.4], [0.0, 0.0], [0.1, 0.1]]), 1))
        0.30 ± 0.10 (n = 2)
    """
    near = [i for i in (at - 1, at + 1) if 0 <= i < len(line)]
    return max((Estimate.of(line[i]) for i in near), key=lambda estimate: estimate.value)


def _map(losses: Tensor, starts: Tensor, lrs: tuple[float, ...], dampings: tuple[float, ...], name: str) -> HeatMap:
    mean = losses.mean(-1)
    shown = torch.where(mean < float(starts.mean()) * 1e3, mean, torch.nan)  # blown up: no number to show
    return HeatMap.of(
        "sensitivity",
        f"Training loss at the end, {name}",
        x=[round(float(torch.tensor(v).log10()), 3) for v in lrs],
        y=[round(float(torch.tensor(v).log10()), 3) for v in dampings],
        z=shown.T.tolist(),
        x_label="log10 learning rate",
        y_label="log10 damping",
        z_label="loss",
        alt="The loss is low in a small part of the grid.",
        caption="Mean over seeds. Empty: diverged.",
        log_z=True,
    )
