"""What it learns: small trainings on D(v), tasks whose only useful feature is one direction v of the input.

v runs from the first anisotropy direction of the panel above to directions the network hardly responds to. Small on
purpose (512 examples, 16 epochs, noise 0.5): the card shows the order, the study nad/fig6 the published setting.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from biascope import data
from biascope.ensembles import train_ensemble
from biascope.reports import figures
from biascope.reports.html import Html, figure, table
from biascope.reports.panels import input_geometry
from biascope.reports.panels.base import Panel, Subject, card_panel, output_count, refuse_dense
from biascope.reports.panels.pace import Pace
from biascope.reports.study_page import fact_list
from biascope.studies import Estimate
from biascope.support.errors import UnsupportedError
from biascope.support.seeds import derive, generator

T = TypeVar("T")
TITLE = "What it learns"
READ = (
    "Freshly initialised networks are trained to separate two classes that differ along one direction of the input "
    "only, from the most to the least preferred direction. A falling curve means that the preference above determines "
    "what is learned from few examples."
)
EXAMPLES, TESTED, EPOCHS, BATCH, LR, SIGMA, SEEDS = 512, 512, 16, 128, 0.5, 0.5, 3
LEAST = 2  # directions, to be told apart
LEARNED = 0.6  # accuracy of the best direction below which the trainings were too short to say anything
GRAPHS = 3.0  # times faster than the pace of single steps is training with captured graphs, on a GPU


@dataclass(frozen=True)
class Effort:
    """How much is trained: seeds for each direction, examples, epochs, and examples of the test."""

    seeds: int = SEEDS
    examples: int = EXAMPLES
    epochs: int = EPOCHS
    tested: int = TESTED

    def seconds(self, pace: Pace) -> float:
        """For one direction."""
        evaluated = (self.examples + self.tested) * pace.evaluate
        return self.seeds * (self.epochs * self.examples * pace.train + evaluated)


# from the whole to the least; fewer directions come before shorter trainings, which may learn nothing
EFFORTS = (Effort(), Effort(2), Effort(2, epochs=8), Effort(2, 256, 8), Effort(2, 128, 8, 256), Effort(2, 128, 4, 128))


@card_panel(order=30)
def panel(subject: Subject) -> Panel:
    """Test accuracy on D(v) against the index of v among the anisotropy directions."""
    refuse_dense(subject)
    chosen, effort = affordable(subject, directions(input_geometry.shared(subject)[2], subject))
    _trainable(subject)
    accuracy = train(subject, [v for _, _, v in chosen], effort)
    estimates = [Estimate.of([float(value) for value in row]) for row in accuracy]
    rows = [
        (name, index, estimate.value, estimate.standard_error or 0.0, effort.seeds)
        for (name, index, _), estimate in zip(chosen, estimates)
    ]
    facts: list[tuple[str, object]] = [
        ("Trainings", f"{len(chosen)} directions × {effort.seeds} seeds"),
        ("Examples", f"{effort.examples}, {effort.epochs} epochs, noise {SIGMA}"),
        ("First direction", _percent(estimates[0])),
        (chosen[-1][0].capitalize(), _percent(estimates[-1])),
    ]
    header = ["direction", "index", "test accuracy", "standard error", "networks"]
    numbers = table(header, rows, "directional-accuracy", fold=True)
    headline = (
        f"Trained on {effort.examples} examples, it reaches {rows[0][2]:.0%} accuracy along the direction it prefers "
        f"and {rows[-1][2]:.0%} along "
        f"{'one it does not respond to' if 'outside' in rows[-1][0] else f'direction {rows[-1][1]}'} (chance: 50%)."
    )
    if max(row[2] for row in rows) < LEARNED:
        headline = ""  # nothing to quote
    blocks = [fact_list(facts), _figure(rows), numbers]
    return Panel(TITLE, READ, _meaning(rows, accuracy), blocks, headline=headline)


def directions(spectrum: input_geometry.InputSpectrum, subject: Subject) -> list[tuple[str, int, Tensor]]:
    """(name, index from 1, v [*input_shape]): directions 1, 4, 16, ... and one the sampled networks do not respond to.

    Where the sample has fewer networks than the input has dimensions, the last one is random in what is left over, and
    counts as index D.
    """
    count, dimension = len(spectrum.values), spectrum.dimension
    indices = sorted({4**k for k in range(8) if 4**k <= count} | ({dimension} if count >= dimension else set()))
    vectors = torch.from_numpy(np.ascontiguousarray(spectrum.vectors))
    chosen = [(f"direction {i}", i, vectors[i - 1]) for i in indices]
    if count < dimension:
        other = torch.randn(dimension, generator=generator(subject.seed, "card rest"), dtype=vectors.dtype)
        other = other - vectors.T @ (vectors @ other)
        chosen.append(("outside all sampled directions", dimension, other / other.norm()))
    return [(name, index, v.float().reshape(subject.input_shape)) for name, index, v in chosen]


def train(subject: Subject, chosen: list[Tensor], effort: Effort = EFFORTS[0]) -> Tensor:
    """Test accuracy [directions, seeds] of fresh networks."""
    done = train_ensemble(
        subject.initialiser(),
        Tasks(chosen, effort.examples, subject.seed, "train", effort.seeds),
        test=Tasks(chosen, effort.tested, subject.seed, "test", effort.seeds),
        epochs=effort.epochs,
        batch_size=BATCH,
        lr=LR,
        loss="bce" if output_count(subject) == 1 else "cross-entropy",
        seed=derive(subject.seed, "card trainings") % 2**31,
        device=subject.device,
        engine="auto" if subject.on_gpu else "loop",
        precision="tf32" if subject.on_gpu else "float32",
        keep=False,
    )
    return done.test_accuracy.reshape(len(chosen), effort.seeds)


class Tasks(Sequence[tuple[Tensor, Tensor]]):
    """D(v) for every direction and seed, drawn when asked for: for large images all at once would fill the memory."""

    def __init__(self, chosen: list[Tensor], n: int, seed: int, what: str, seeds: int = SEEDS) -> None:
        self.chosen, self.n, self.seed, self.what, self.seeds = chosen, n, seed, what, seeds

    def __len__(self) -> int:
        return len(self.chosen) * self.seeds

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        i, k = divmod(index, self.seeds)
        made = data.directional(self.chosen[i], self.n, sigma=SIGMA, seed=derive(self.seed, "D(v)", self.what, i, k))
        return made.x, made.y


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.0%} ± {estimate.standard_error or 0:.1%}"


def affordable(subject: Subject, chosen: list[T]) -> tuple[list[T], Effort]:
    """As many of the directions and as much training as the time allows: the first, the last and some between.

    Fewer directions come first, down to two with the whole training; then smaller trainings.
    """
    if len(chosen) < LEAST:
        raise UnsupportedError("an input of one number has one direction, so there is nothing to compare")
    allowed, pace = subject.seconds(TITLE) * (GRAPHS if subject.on_gpu else 1.0), subject.pace()
    for effort in EFFORTS:
        each = effort.seconds(pace)
        count = min(len(chosen), int(allowed / each) if each else len(chosen))
        if count >= LEAST:
            return [chosen[round(i * (len(chosen) - 1) / (count - 1))] for i in range(count)], effort
    raise subject.too_long(f"{LEAST * effort.seeds} trainings on {effort.examples} examples", LEAST * each, TITLE)


def _trainable(subject: Subject) -> None:
    """Some networks return more in training mode, e.g. the logits of auxiliary heads."""
    network = copy.deepcopy(subject.network).train()
    with torch.no_grad(), torch.random.fork_rng([subject.device] if subject.on_gpu else []):  # dropout draws
        found = network(subject.inputs(2))
    if not isinstance(found, Tensor):
        raise UnsupportedError(
            f"in training mode {subject.name} returns a {type(found).__name__}, not a tensor: switch off what it adds "
            "(for torchvision --set aux_logits=False), or wrap it so that it returns one tensor"
        )
    if found.ndim > 2:
        raise UnsupportedError(
            f"in training mode {subject.name} maps 2 inputs to {tuple(found.shape)}: let it end with .flatten(1), so "
            "that there is one row of classes per input"
        )


def _meaning(rows: list[tuple[str, int, float, float, int]], accuracy: Tensor) -> str:
    first, last = accuracy[0], accuracy[-1]
    gap = float(first.mean() - last.mean())
    error = math.sqrt(float(first.var() + last.var()) / len(first))
    text = f"From the first direction to the last the accuracy goes from {rows[0][2]:.0%} to {rows[-1][2]:.0%}"
    if max(row[2] for row in rows) < LEARNED:
        return f"{text}: training was too short to learn any of them, so there is no conclusion."
    if abs(gap) <= max(2 * error, 0.05):
        return f"{text}: these training runs show no influence of the direction."
    if gap > 0:
        text += ": what the network prefers at initialisation is what it learns from few examples"
    else:
        text += ": the less preferred direction is learned better, so the preference does not decide here"
    if len(rows) < 4:  # too few to order
        return f"{text}."
    order = float(stats.spearmanr([-row[1] for row in rows], [row[2] for row in rows]).statistic)
    return f"{text} (rank correlation of preference and accuracy {order:.2f} over {len(rows)} directions)."


def _figure(rows: list[tuple[str, int, float, float, int]]) -> Html:
    x, y, error = ([row[i] for row in rows] for i in (1, 2, 3))
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        axes.errorbar(x, y, yerr=error, fmt="o-", color="C0", elinewidth=0.8, label="test accuracy")
        axes.axhline(0.5, linestyle="--", color="C6", label="chance")
        axes.set(xlabel="index of the direction", ylabel="test accuracy", ylim=(0.4, 1.02))
        figures.log_scale(axes, "x")
        axes.legend()
    svg = figures.inline_svg(drawing, "directional")
    words = ", ".join(f"{row[0]} {row[2]:.0%}" for row in rows)
    hover = figures.hover(axes, [(row[0], [row[1]], [row[2]]) for row in rows])
    return figure(
        svg, f"Test accuracy by direction: {words}.", f"Mean and standard error over {rows[0][4]} seeds.", hover
    )
