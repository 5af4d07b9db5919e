"""Easy and difficult digits in one training set, and the alignment of the tangent kernel with each, over training."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from biascope.data import Dataset, easy_difficult
from biascope.errors import InputError
from biascope.kernels import ntk
from biascope.seeds import derive
from biascope.studies.alignment.tracking import build, cka
from biascope.studies.function_space.setting import images
from biascope.studies.function_space.training import Recipe, evaluate, fit, spread_out, steps_of
from biascope.studies.runs import Run, Value

KINDS = {"random": "digits with random labels", "fashion": "Fashion-MNIST (a stand-in for KMNIST)"}


@dataclass(frozen=True)
class Mixture:
    """How the set is mixed and how the network is trained on it."""

    dataset: str
    kind: str
    n_easy: int
    n_difficult: int
    depth: int
    width: int
    lr: float
    batch: int
    epochs: float
    probes: int
    probe_size: int
    precision: str = "tf32"


def mixture(run: Run, m: Mixture, seed: int) -> Dataset:
    """n_easy digits, then n_difficult others; `group` is 0 and 1."""
    if m.kind not in KINDS:
        raise InputError(f"difficult examples {m.kind!r} are not known; there is {', '.join(KINDS)}")
    needed = m.n_easy + (m.n_difficult if m.kind == "random" else 0)
    easy = images(m.dataset, "train", needed, derive(run.seed, "images", seed), run.device)
    other = None
    if m.kind == "fashion":
        other = images("fashion-mnist", "train", m.n_difficult, derive(run.seed, "images", seed), run.device, like=easy)
    return easy_difficult(easy, other, m.n_easy, m.n_difficult, seed=derive(run.seed, "mix", seed))


def follow(run: Run, m: Mixture, seed: int) -> dict[str, Any]:
    """Steps [p], CKA of equally many easy and difficult training images with their labels [p], their accuracies [p]."""
    key = f"{m.kind} depth={m.depth} width={m.width} lr={m.lr:g} seed={seed}"
    return run.cached(key, partial(_train, run, m, seed))


def _train(run: Run, m: Mixture, seed: int) -> dict[str, Value]:
    mixed = mixture(run, m, seed)
    net = build("mlp", mixed.x.shape[1:], derive(run.seed, "init", seed), width=m.width, depth=m.depth).to(run.device)
    parts = {
        "easy": mixed.subset(torch.arange(m.n_easy)),
        "difficult": mixed.subset(torch.arange(m.n_easy, len(mixed))),
    }
    recipe = Recipe(steps_of(m.epochs, len(mixed), m.batch), m.batch, m.lr, 0.9, "constant", precision=m.precision)
    at = spread_out(recipe.steps, m.probes, first=min(5, recipe.steps))
    rows: dict[str, list[float]] = {f"{name}{what}": [] for name in parts for what in ("", " accuracy")}

    def look(step: int) -> None:
        for name, part in parts.items():
            x, y = part.x[: m.probe_size], part.y[: m.probe_size]
            rows[name].append(cka(ntk(net, x), y))
            rows[f"{name} accuracy"].append(evaluate(net, part.x, part.y)[1])
        run.log(kind=m.kind, depth=m.depth, seed=seed, step=step, **{name: row[-1] for name, row in rows.items()})

    fit(net, mixed.x, mixed.y, recipe, derive(run.seed, "order", seed), at=at, look=look)
    return {"steps": torch.tensor(at), **{n: torch.tensor(row, dtype=torch.float64) for n, row in rows.items()}}


def half_rise(steps: Tensor, curve: Tensor) -> float:
    """log10 of the first iteration at which a curve has made half of its rise from the first to the largest value.

    Example:
        >>> half_rise(torch.tensor([0, 10, 100]), torch.tensor([0.1, 0.2, 0.5]))
        2.0
    """
    level = (curve[0] + curve.max()) / 2
    first = int((curve >= level).nonzero()[0]) if bool((curve >= level).any()) else len(curve) - 1
    return math.log10(max(1, int(steps[first])))


def mean_ratio(found: dict[str, Any]) -> float:
    """Mean CKA(easy) over mean CKA(difficult), over the probes after the first.

    Example:
        >>> mean_ratio({"easy": torch.tensor([9.0, 2.0, 4.0]), "difficult": torch.tensor([1.0, 1.0, 2.0])})
        2.0
    """
    return float(found["easy"][1:].mean() / found["difficult"][1:].mean().clamp_min(1e-12))


def largest_ratio(found: dict[str, Any]) -> float:
    """Largest CKA(easy) / CKA(difficult) after the first probe; above 1 even for two equal noisy curves.

    Example:
        >>> largest_ratio({"easy": torch.tensor([9.0, 2.0, 3.0]), "difficult": torch.tensor([1.0, 1.0, 2.0])})
        2.0
    """
    return float((found["easy"][1:] / found["difficult"][1:].clamp_min(1e-12)).max())
