"""Alignment of the tangent kernel with the labels of the data, layer by layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from biascope.kernels import LabelAlignment, label_alignment
from biascope.reports import figures
from biascope.reports.html import Html, figure, table, tag
from biascope.reports.panels.base import Panel, Subject, all_outputs, card_panel, refuse_dense
from biascope.reports.panels.initialisations import COUNTS, Spread
from biascope.reports.panels.pace import in_words
from biascope.reports.study_page import fact_list
from biascope.support.errors import UnsupportedError

TITLE = "Alignment with the labels"
READ = (
    "How much of the tangent kernel points at the labels (centred kernel alignment, 0 to 1), in all and for the "
    "kernel of each layer: an aligned layer moves the outputs where the labels want them. At initialisation the value "
    "is a mean over networks and its ± their standard deviation; at given weights the ± is the error of the random "
    "probes on these examples. Other examples would give somewhat other values."
)
SIZES = ((128, 64), (128, 32), (64, 32), (64, 16), (32, 16), (32, 8), (16, 8))  # examples and probes
SECONDS = 40.0  # for all networks


@dataclass(frozen=True)
class Start:
    """Alignment over initialisations: of the whole kernel and of every layer's."""

    whole: Spread
    layers: dict[str, Spread]

    @classmethod
    def of(cls, found: Sequence[LabelAlignment]) -> "Start":
        """From what was measured, one entry per initialisation."""
        layers = {name: Spread.of([one.layers[name].value for one in found]) for name in found[0].layers}
        return cls(Spread.of([one.value for one in found]), layers)


@card_panel(order=50)
def panel(subject: Subject) -> Panel:
    """Centred alignment of labels and kernel over initialisations and at the given weights, by layer."""
    if subject.data is None:
        raise UnsupportedError("there are no labels; add --data cifar10 (or mnist, digits, a file with x and y)")
    refuse_dense(subject)
    n, probes, count = sizes(subject)
    networks = (subject.network if i == 0 else subject.build(i) for i in range(count))
    start = Start.of([measure(subject, network, n, probes) for network in networks])
    given = None if subject.trained is None else measure(subject, subject.trained, n, probes)
    facts: list[tuple[str, object]] = [("Examples", f"{min(n, len(subject.data.x))} of {subject.data.name}")]
    facts.append(("Alignment, initialisation", start.whole))
    rows: list[tuple[object, ...]] = [
        (name, "initialisation", one.mean, one.deviation, one.count)
        for name, one in {"all": start.whole, **start.layers}.items()
    ]
    if given is not None:
        facts.append(("Alignment, given weights", f"{given.value:.3f} ± {given.standard_error:.3f}"))
        parts = {"all": given, **given.layers}
        rows += [(name, "given weights", part.value, part.standard_error, 1) for name, part in parts.items()]
    header = ["layer", "kernel at", "alignment", "deviation or error", "networks"]
    numbers = table(header, rows, "label-alignment", 60, fold=True)
    return Panel(TITLE, READ, _meaning(start, given), [fact_list(facts), tag("div", _figure(start, given)), numbers])


def sizes(subject: Subject) -> tuple[int, int, int]:
    """Examples, probes and initialisations that the time allows.

    A probe takes as long as 1.2 steps of training on the examples. Several initialisations come first: they differ by
    more than probes do.
    """
    given = int(subject.trained is not None)
    for count in COUNTS:
        for n, probes in SIZES:
            seconds = (count + given) * 1.2 * n * (probes + 1) * subject.pace().train
            if seconds <= SECONDS:
                return n, probes, count
    raise UnsupportedError(f"the alignment of {n} examples would take about {in_words(seconds)} {subject.place}")


def measure(subject: Subject, network: nn.Module, n: int = SIZES[0][0], probes: int = SIZES[0][1]) -> LabelAlignment:
    """By layer, on the first n examples of the data; classes become one column per output."""
    assert subject.data is not None
    x = subject.examples(n)
    y = subject.data.y[: len(x)].to(x.device)
    outputs = all_outputs(subject, network, x[:2]).shape[1]
    if subject.data.kind == "numbers":
        if y.shape[1] != outputs:
            raise UnsupportedError(f"{subject.name} has {outputs} outputs and the data {y.shape[1]} targets")
        target = y
    elif subject.data.kind == "places":
        raise UnsupportedError("the data have a label for every place, and this panel is about one row per input")
    elif outputs == 1:
        if subject.data.classes > 2:
            raise UnsupportedError(f"{subject.name} has one output and the data {subject.data.classes} classes")
        target = (2.0 * y - 1.0).unsqueeze(1)
    elif outputs < subject.data.classes:
        raise UnsupportedError(f"{subject.name} has {outputs} outputs and the data {subject.data.classes} classes")
    else:
        target = nn.functional.one_hot(y, outputs).to(x.dtype)
    return label_alignment(network, x, target, sketch=probes, seed=subject.seed, by_layer=True)


def _meaning(start: Start, given: LabelAlignment | None) -> str:
    whole, layers = start.whole, start.layers
    best = max(layers, key=lambda name: layers[name].mean)
    text = f"The kernel's alignment is {whole}; the best aligned layer is {best} ({layers[best].mean:.3f})."
    if given is None:
        return text
    side = whole.side(given.value, given.standard_error)
    text += f" At the given weights it is {given.value:.3f} ± {given.standard_error:.3f}"
    if whole.count == 1:
        return f"{text}; how much initialisations differ was not measured, so nothing is said about a change."
    if side == 0:
        text += ", within the spread of initialisations: no turn of the kernel is seen"
        moved = {
            name: abs(part.value - layers[name].mean)
            for name, part in given.layers.items()
            if layers[name].side(part.value, part.standard_error, among=len(layers))
        }
        if not moved:
            return f"{text}."
        top = max(moved, key=lambda name: moved[name])
        others = f", and {len(moved) - 1} more layers" if len(moved) > 1 else ""
        return (
            f"{text} as a whole; {top} by itself is beyond it ({layers[top].mean:.3f} to "
            f"{given.layers[top].value:.3f}){others}."
        )
    text += f": the kernel is turned {'towards' if side > 0 else 'away from'} the labels of these examples"
    change = {
        name: abs(part.value - layers[name].mean)
        for name, part in given.layers.items()
        if layers[name].side(part.value, part.standard_error) == side
    }
    if change:
        top = max(change, key=lambda name: change[name])
        text += f", most in {top} ({layers[top].mean:.3f} to {given.layers[top].value:.3f})"
    return f"{text}."


def _figure(start: Start, given: LabelAlignment | None) -> Html:
    names = list(start.layers)
    shown = {"initialisation": [(one.mean, one.deviation) for one in start.layers.values()]}
    if given is not None:
        shown["given weights"] = [(part.value, part.standard_error) for part in given.layers.values()]
    lines = []
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        for i, (when, both) in enumerate(shown.items()):
            values, errors = [value for value, _ in both], [0.0 if math.isnan(e) else e for _, e in both]
            axes.errorbar(range(len(names)), values, yerr=errors, fmt="os"[i] + "-", color=f"C{i}", label=when)
            lines += [(f"{name}, {when}", [k], [value]) for k, (name, value) in enumerate(zip(names, values))]
        ticks = range(0, len(names), max(1, -(-len(names) // 10)))
        axes.set_xticks(list(ticks), [names[k][-18:] for k in ticks], rotation=45, ha="right")
        axes.set(ylabel="alignment", ylim=(0, None))
        axes.legend()
    svg = figures.inline_svg(drawing, "labels")
    words = "; ".join(
        f"{when}: " + ", ".join(f"{name} {value:.2f}" for name, (value, _) in list(zip(names, both))[:12])
        for when, both in shown.items()
    )
    caption = "Layers in the order of the network."
    if start.whole.count > 1:
        caption += f" Bars at initialisation: standard deviation of {start.whole.count} networks."
    return figure(svg, f"Alignment by layer. {words}.", caption, figures.hover(axes, lines))
