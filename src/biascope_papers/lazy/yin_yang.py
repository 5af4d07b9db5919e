"""Fig. 5.1: yin-yang. Where the non-linear regime is better than the linear one at equal training loss, point by point.

Delta loss(x) = loss of the non-linear minus loss of the linear network, for x on a grid, stopped at the same training
losses. The effect on the quadrants is small: 12 seeds could not tell it from 0 at loss 0.5.
"""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope import nets
from biascope.data import square_grid, yin_yang, yin_yang_labels
from biascope.data.planar import in_yin_yang_disks
from biascope.studies import Chart, Estimate, HeatMap, Run, Series, StudyResult, study
from biascope.support import derive
from biascope_papers.lazy.crowd import Crossings, cross

LOSSES = (0.6, 0.5, 0.4, 0.3)


@study(
    "lazy/fig5.1",
    sizes={
        "smoke": {"seeds": 6, "lr": 0.5, "steps": 400, "width": 30, "side": 25}
        | {"thresholds": (0.6, 0.5), "decide": (0.5,)},
        "laptop": {"seeds": 60, "lr": 0.1, "steps": 5000},
        "paper": {"seeds": 100, "lr": 0.01, "steps": 100_000},
    },
)
def fig5_1(
    run: Run,
    *,
    seeds: Annotated[int, "networks, each with its own points"] = 20,
    n: Annotated[int, "training points of each"] = 100,
    width: Annotated[int, "units of each of the three hidden layers"] = 60,
    lr: Annotated[float, "learning rate of the plain network (the paper: 0.01)"] = 0.1,
    steps: Annotated[int, "gradient steps at most; large alpha needs many"] = 5000,
    alphas: Annotated[tuple[float, ...], "the non-linear and the linear regime"] = (1.0, 100.0),
    thresholds: Annotated[tuple[float, ...], "training losses at which the regimes are compared, descending"] = LOSSES,
    decide: Annotated[tuple[float, ...], "thresholds that the text reports (0.5 and 0.4 are judged)"] = (0.5, 0.4),
    side: Annotated[int, "points of the grid along each axis"] = 50,
    capture: Annotated[bool, "replay a CUDA graph, on CUDA"] = True,
) -> StudyResult:
    """Difference of the loss of both regimes over the square, at equal training loss."""
    sets = [yin_yang(n, seed=derive(run.seed, "points", i)) for i in range(seeds)]
    x, y = (torch.stack([getattr(s, k) for s in sets]).float().to(run.device) for k in ("x", "y"))
    grid = square_grid(side)
    labels = yin_yang_labels(grid).float()

    def train(alpha: float) -> Crossings:
        return cross(
            lambda: nets.build("mlp", in_features=2, hidden=(width,) * 3), x, y, grid.to(run.device), alpha=alpha,
            lr=lr, steps=steps, thresholds=thresholds, seed=derive(run.seed, "networks"), capture=capture,
        )  # fmt: skip

    hasty, lazy = (Crossings.cached(run, f"alpha={alpha:g}", partial(train, alpha)) for alpha in alphas)
    delta = losses(hasty.outputs, labels) - losses(lazy.outputs, labels)  # [T, K, m]
    disks = in_yin_yang_disks(grid)
    parts = {"disks": disks, "quadrants": (grid.prod(1) > 0) & ~disks}
    numbers: dict[str, Estimate] = {}
    figures: list[Chart | HeatMap] = [_curves(hasty, lazy, alphas)]
    texts = []
    for k, threshold in enumerate(thresholds):
        both = (hasty.steps[:, k] >= 0) & (lazy.steps[:, k] >= 0)
        own = delta[both, k]
        numbers[f"seeds in which both regimes reached {threshold:g}"] = Estimate(float(both.sum()))
        if len(own) == 0:
            continue
        on = {name: Estimate.of(own[:, part].mean(1)) for name, part in parts.items()}
        speed = lazy.steps[both, k].double() / hasty.steps[both, k].clamp_min(1)
        numbers |= {f"Delta loss on the {name} at {threshold:g}": value for name, value in on.items()}
        numbers[f"steps, linear / non-linear, to {threshold:g}"] = Estimate.of(speed)
        figures.append(_map(own.mean(0), side, threshold, len(own)))
        if threshold in decide:
            texts.append(f"at {threshold:g}: {on['disks']} on the disks, {on['quadrants']} on the quadrants")
    return StudyResult(
        measured=f"Delta loss {'; '.join(texts) or f'not measured in {steps} steps'}. {seeds} seeds, learning rate "
        f"{lr:g} (the paper: 100 and 0.01).",
        numbers=numbers,
        figures=tuple(figures),
    )


def losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of logits [T, K, m] at every point [m]."""
    return F.binary_cross_entropy_with_logits(outputs, labels.expand_as(outputs), reduction="none").double()


def _map(delta: Tensor, side: int, threshold: float, count: int) -> HeatMap:
    line, most = torch.linspace(-1, 1, side), float(delta.abs().max())
    return HeatMap.of(
        f"delta-{threshold:g}", f"Delta loss at training loss {threshold:g}", x=line, y=line,
        z=delta.reshape(side, side), x_label="x1", y_label="x2", z_label="non-linear minus linear",
        alt="Positive (linear better) on and around the small disks, negative on the large areas of one class.",
        caption=f"Mean over {count} seeds.", low=-most, high=most, diverging=True,
    )  # fmt: skip


def _curves(hasty: Crossings, lazy: Crossings, alphas: tuple[float, ...]) -> Chart:
    series = [
        Series.of(f"alpha = {alpha:g}", found.times + 1, found.progress.median(1).values)
        for alpha, found in zip(alphas, (hasty, lazy))
    ]
    return Chart("speed", "Training loss", "step", "median training loss over seeds", tuple(series), log_x=True,
                 alt="The non-linear regime's training loss falls earlier.")  # fmt: skip
