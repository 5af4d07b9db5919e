"""Alignment of the tangent kernel with the labels of the data, layer by layer."""

from torch import nn

from biascope.errors import UnsupportedError
from biascope.kernels import LabelAlignment, label_alignment
from biascope.reports import figures
from biascope.reports.html import Html, figure, table, tag
from biascope.reports.panels.base import Panel, Subject, all_outputs
from biascope.reports.panels.pace import in_words
from biascope.reports.study_page import fact_list

TITLE = "Alignment with the labels"
READ = (
    "How much of the tangent kernel points at the labels (centred kernel alignment, 0 to 1), in all and for the "
    "kernel of each layer: an aligned layer moves the outputs where the labels want them. The errors are those of the "
    "random probes on these examples; other examples would give somewhat other values."
)
SIZES = ((128, 64), (128, 32), (64, 32), (64, 16), (32, 16), (32, 8), (16, 8))  # examples and probes
SECONDS = 20.0


def panel(subject: Subject) -> Panel:
    """Centred alignment of labels and kernel at initialisation and at the given weights, by layer."""
    if subject.data is None:
        raise UnsupportedError("there are no labels; add --data cifar10 (or mnist, digits, a file with x and y)")
    found = {"initialisation": measure(subject, subject.network)}
    if subject.trained is not None:
        found["given weights"] = measure(subject, subject.trained)
    facts: list[tuple[str, object]] = [("Examples", f"{next(iter(found.values())).samples} of {subject.data.name}")]
    facts += [(f"Alignment, {when}", f"{one.value:.3f} ± {one.standard_error:.3f}") for when, one in found.items()]
    rows = [("all", when, one.value, one.standard_error) for when, one in found.items()]
    rows += [
        (name, when, part.value, part.standard_error)
        for when, one in found.items()
        for name, part in one.layers.items()
    ]
    numbers = table(["layer", "kernel at", "alignment", "standard error"], rows, "label-alignment", 60, fold=True)
    return Panel(TITLE, READ, _meaning(found), [fact_list(facts), tag("div", _figure(found)), numbers])


def sizes(subject: Subject) -> tuple[int, int]:
    """Examples and probes that the time allows: a probe takes as long as 1.2 steps of training on the examples."""
    for n, probes in SIZES:
        seconds = 1.2 * n * (probes + 1) * subject.pace().train
        if seconds <= SECONDS:
            return n, probes
    raise UnsupportedError(f"the alignment of {n} examples would take about {in_words(seconds)} {subject.place}")


def measure(subject: Subject, network: nn.Module) -> LabelAlignment:
    """By layer, on the first examples of the data; classes become one column per output."""
    assert subject.data is not None
    n, probes = sizes(subject)
    x = subject.inputs(n)
    y = subject.data.y[: len(x)].to(x.device)
    outputs = all_outputs(subject, network, x[:2]).shape[1]
    if outputs == 1:
        if subject.data.classes > 2:
            raise UnsupportedError(f"{subject.name} has one output and the data {subject.data.classes} classes")
        target = (2.0 * y - 1.0).unsqueeze(1)
    elif outputs < subject.data.classes:
        raise UnsupportedError(f"{subject.name} has {outputs} outputs and the data {subject.data.classes} classes")
    else:
        target = nn.functional.one_hot(y, outputs).to(x.dtype)
    return label_alignment(network, x, target, sketch=probes, seed=subject.seed, by_layer=True)


def _meaning(found: dict[str, LabelAlignment]) -> str:
    first, *rest = found.values()
    best = max(first.layers, key=lambda name: first.layers[name].value)
    text = (
        f"At initialisation the kernel's alignment is {first.value:.3f} ± {first.standard_error:.3f}; "
        f"the best aligned layer is {best} ({first.layers[best].value:.3f})."
    )
    for after in rest:
        gain, error = after.value - first.value, (after.standard_error**2 + first.standard_error**2) ** 0.5
        change = {name: part.value - first.layers[name].value for name, part in after.layers.items()}
        top = max(change, key=lambda name: change[name] if gain > 0 else -change[name])
        if abs(gain) <= 2 * error:
            text += " At the given weights it is the same within the error."
        else:
            text += (
                f" At the given weights it is {after.value:.3f} ± {after.standard_error:.3f}: the kernel is turned "
                f"{'towards' if gain > 0 else 'away from'} the labels of these examples, most in {top} "
                f"({first.layers[top].value:.3f} to {after.layers[top].value:.3f})."
            )
    return text


def _figure(found: dict[str, LabelAlignment]) -> Html:
    lines = []
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        for i, (when, one) in enumerate(found.items()):
            names, values = list(one.layers), [part.value for part in one.layers.values()]
            errors = [part.standard_error for part in one.layers.values()]
            axes.errorbar(range(len(names)), values, yerr=errors, fmt="os"[i] + "-", color=f"C{i}", label=when)
            lines += [(f"{name}, {when}", [k], [value]) for k, (name, value) in enumerate(zip(names, values))]
        shown = range(0, len(names), max(1, -(-len(names) // 10)))
        axes.set_xticks(list(shown), [names[k][-18:] for k in shown], rotation=45, ha="right")
        axes.set(ylabel="alignment", ylim=(0, None))
        axes.legend()
    svg = figures.inline_svg(drawing, "labels")
    words = "; ".join(
        f"{when}: " + ", ".join(f"{name} {part.value:.2f}" for name, part in list(one.layers.items())[:12])
        for when, one in found.items()
    )
    return figure(
        svg, f"Alignment by layer. {words}.", "Layers in the order of the network.", figures.hover(axes, lines)
    )
