"""What it learns: small trainings on D(v), tasks whose only useful feature is one direction v of the input.

v runs from the first anisotropy direction of the panel above to directions the network hardly responds to. Small on
purpose (512 examples, 16 epochs, noise 0.5): the card shows the order, the study nad/fig6 the published setting.
"""

import math

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from biascope import data
from biascope.ensembles import train_ensemble
from biascope.errors import UnsupportedError
from biascope.reports import figures
from biascope.reports.html import Html, figure, table
from biascope.reports.panels import input_geometry
from biascope.reports.panels.base import Panel, Subject, all_outputs
from biascope.reports.study_page import fact_list
from biascope.seeds import derive, generator
from biascope.studies import Estimate

TITLE = "What it learns"
READ = (
    "Fresh networks are trained to tell two classes that differ along one direction of the input only, for directions "
    "from the most to the least preferred; a falling curve means that the preference above decides what is learned "
    "from few examples."
)
EXAMPLES, TESTED, EPOCHS, BATCH, LR, SIGMA, SEEDS = 512, 512, 16, 128, 0.5, 0.5, 3
CPU_BUDGET, GPU_BUDGET = 8 * 10**11, 10**15  # floating-point operations of all trainings


def panel(subject: Subject) -> Panel:
    """Test accuracy on D(v) against the index of v among the anisotropy directions."""
    _affordable(subject)
    sample, _ = subject.once("gradients", lambda: input_geometry.gradients(subject))
    spectrum = subject.once("input spectrum", lambda: input_geometry.input_spectrum(sample))
    chosen = directions(spectrum, subject)
    accuracy = train(subject, [v for _, _, v in chosen])
    estimates = [Estimate.of([float(value) for value in row]) for row in accuracy]
    rows = [
        (name, index, estimate.value, estimate.standard_error or 0.0, SEEDS)
        for (name, index, _), estimate in zip(chosen, estimates)
    ]
    facts: list[tuple[str, object]] = [
        ("Trainings", f"{len(chosen)} directions × {SEEDS} seeds"),
        ("Examples", f"{EXAMPLES}, noise {SIGMA}"),
        ("First direction", _percent(estimates[0])),
        (chosen[-1][0].capitalize(), _percent(estimates[-1])),
    ]
    header = ["direction", "index", "test accuracy", "standard error", "networks"]
    numbers = table(header, rows, "directional-accuracy", fold=True)
    return Panel(TITLE, READ, _meaning(rows, accuracy), [fact_list(facts), _figure(rows), numbers])


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


def train(subject: Subject, chosen: list[Tensor]) -> Tensor:
    """Test accuracy [directions, seeds] of fresh networks."""
    assert subject.factory is not None
    tasks: list[tuple[Tensor, Tensor]] = []
    test: list[tuple[Tensor, Tensor]] = []
    for i, v in enumerate(chosen):
        for k in range(SEEDS):
            for into, n, what in ((tasks, EXAMPLES, "train"), (test, TESTED, "test")):
                made = data.directional(v, n, sigma=SIGMA, seed=derive(subject.seed, "D(v)", what, i, k))
                into.append((made.x, made.y))
    one = all_outputs(subject, subject.build(0), subject.inputs(1)).shape[1] == 1
    done = train_ensemble(
        subject.factory,
        tasks,
        test=test,
        epochs=EPOCHS,
        batch_size=BATCH,
        lr=LR,
        loss="bce" if one else "cross-entropy",
        seed=derive(subject.seed, "card trainings") % 2**31,
        device=subject.device,
        engine="auto" if subject.on_gpu else "loop",
        keep=False,
    )
    return done.test_accuracy.reshape(len(chosen), SEEDS)


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.0%} ± {estimate.standard_error or 0:.1%}"


def _affordable(subject: Subject) -> None:
    if subject.factory is None:
        raise UnsupportedError("this panel needs a factory that can be called again")
    about = 8 * SEEDS * EPOCHS * EXAMPLES * 3 * subject.forward_cost()
    budget = GPU_BUDGET if subject.on_gpu else CPU_BUDGET
    if about > budget:
        where = "even on this GPU" if subject.on_gpu else "on a CPU; add --device cuda"
        raise UnsupportedError(
            f"{8 * SEEDS} small trainings would take about {about / 1e12:.3g} Tflop, too long {where}"
        )


def _meaning(rows: list[tuple[str, int, float, float, int]], accuracy: Tensor) -> str:
    first, last = accuracy[0], accuracy[-1]
    gap = float(first.mean() - last.mean())
    error = math.sqrt(float(first.var() + last.var()) / SEEDS)
    text = f"From the first direction to the last the accuracy goes from {rows[0][2]:.0%} to {rows[-1][2]:.0%}"
    if gap > 2 * error and gap > 0.05:
        text += ": what the network prefers at initialisation is what it learns from few examples"
    elif max(row[2] for row in rows) < 0.6:
        text += ": it learned none of them in so short a training, so nothing can be said"
    elif gap < -2 * error and gap < -0.05:
        text += ": the less preferred direction is learned better, so the preference does not decide here"
    else:
        text += ": the direction makes no difference that these trainings can show"
    if len(rows) < 4 or len({row[2] for row in rows}) == 1:  # too few to order, or nothing to order
        return f"{text}."
    order = float(stats.spearmanr([-row[1] for row in rows], [row[2] for row in rows]).statistic)
    return f"{text} (rank correlation of preference and accuracy {order:.2f} over {len(rows)} directions)."


def _figure(rows: list[tuple[str, int, float, float, int]]) -> Html:
    x, y, error = ([row[i] for row in rows] for i in (1, 2, 3))
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        axes.errorbar(x, y, yerr=error, fmt="o-", color="C0", elinewidth=0.8, label="test accuracy")
        axes.axhline(0.5, linestyle="--", color="C6", label="chance")
        axes.set(xlabel="index of the direction", ylabel="test accuracy", xscale="log", ylim=(0.4, 1.02))
        axes.legend()
    svg = figures.inline_svg(drawing, "directional")
    words = ", ".join(f"{row[0]} {row[2]:.0%}" for row in rows)
    hover = figures.hover(axes, [(row[0], [row[1]], [row[2]]) for row in rows])
    return figure(svg, f"Test accuracy by direction: {words}.", f"Mean and standard error over {SEEDS} seeds.", hover)
