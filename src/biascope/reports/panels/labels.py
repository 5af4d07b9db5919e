"""Alignment of the tangent kernel with the labels of the data, layer by layer, between its chance level and 1.

The kernel is the trace kernel, summed over the outputs and centred, because 1 is within its reach: the labels' own
kernel Y Y^T has it. The full kernel over examples and outputs does not reach 1 while it treats all outputs alike: its
alignment with c balanced classes is then 1 / sqrt(c (c - 1)) at most, and it falls when training couples the outputs.
Labels that know nothing of the inputs do not give 0 either. Over permutations of the labels the mean is

    chance = tr(K_c) tr(L_c) / ((n - 1) ||K_c|| ||L_c||),    L = Y Y^T,

which is large for a kernel of small rank. A change is therefore judged on (alignment - chance) / (1 - chance).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import biascope
from biascope.reports import figures
from biascope.reports.html import Html, figure, table, tag
from biascope.reports.panels.base import Panel, Subject, card_panel, output_count, refuse_dense
from biascope.reports.panels.initialisations import COUNTS, Spread
from biascope.reports.study_page import fact_list
from biascope.support.errors import UnsupportedError
from biascope.support.seeds import generator

TITLE = "Alignment with the labels"
READ = (
    "How well the tangent kernel matches the labels: the centred alignment (CKA) of the trace kernel, summed over "
    "the outputs, with the kernel of the classes, in all and for each layer. 1 is the ceiling, whatever the number of "
    "classes; dashed lines are what the same kernels give for shuffled labels (chance). At initialisation the value "
    "is a mean over networks and its ± their standard deviation. Other examples would give slightly different values."
)
SIZES = (128, 64, 32, 16, 8)  # examples
MOST_OUTPUTS = 16  # of more, the trace is estimated by as many random combinations
MOST_ROWS = 2048  # of the full kernel, examples times outputs


@dataclass(frozen=True)
class Alignment:
    """Centred alignment of a trace kernel with labels, the mean over permutations of the labels, and the layers'."""

    value: float
    chance: float
    layers: dict[str, "Alignment"] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """0 at chance, 1 at the ceiling."""
        return (self.value - self.chance) / (1 - self.chance) if self.chance < 1 else math.nan


@dataclass(frozen=True)
class Start:
    """Over initialisations: alignment, chance and score of the whole kernel, and of every layer's."""

    whole: Spread
    chance: Spread
    score: Spread
    layers: dict[str, Spread]
    chances: dict[str, Spread]
    scores: dict[str, Spread]

    @classmethod
    def of(cls, found: Sequence[Alignment]) -> "Start":
        """From what was measured, one entry per initialisation."""

        def over(name: str) -> dict[str, Spread]:
            return {n: Spread.of([getattr(one.layers[n], name) for one in found]) for n in found[0].layers}

        value, chance, score = (
            Spread.of([getattr(one, name) for one in found]) for name in ("value", "chance", "score")
        )
        return cls(value, chance, score, over("value"), over("chance"), over("score"))


@card_panel(order=50)
def panel(subject: Subject) -> Panel:
    """Centred alignment of labels and trace kernel over initialisations and at the given weights, by layer."""
    if subject.data is None:
        raise UnsupportedError("there are no labels; add --data cifar10 (or mnist, digits, a file with x and y)")
    refuse_dense(subject)
    n, count = sizes(subject)
    if subject.single:
        return _of_one(subject, n)
    networks = (subject.network if i == 0 else subject.build(i) for i in range(count))
    start = Start.of([measure(subject, network, n) for network in networks])
    given = None if subject.trained is None else measure(subject, subject.trained, n)
    facts: list[tuple[str, object]] = [
        ("Examples", f"{min(n, len(subject.data.x))} of {subject.data.name}"),
        ("Kernel", kernel_name(subject)),
        ("Alignment, initialisation", start.whole),
        ("Chance, initialisation", f"{start.chance.mean:.3f}"),
    ]
    if given is not None:
        facts += [("Alignment, given weights", f"{given.value:.3f}"), ("Chance, given weights", f"{given.chance:.3f}")]
    facts += full_facts(subject, n)
    rows: list[tuple[object, ...]] = [
        (name, "initialisation", one.mean, one.deviation, score.mean, one.count)
        for name, one, score in [
            ("all", start.whole, start.score),
            *((name, one, start.scores[name]) for name, one in start.layers.items()),
        ]
    ]
    if given is not None:
        parts = {"all": given, **given.layers}
        rows += [(name, "given weights", part.value, "", part.score, 1) for name, part in parts.items()]
    header = ["layer", "kernel at", "alignment", "deviation", "from chance (0) to ceiling (1)", "networks"]
    numbers = table(header, rows, "label-alignment", 60, fold=True)
    blocks = [fact_list(facts), tag("div", _figure(start, given)), numbers]
    return Panel(TITLE, READ, _meaning(start, given), blocks, headline=_headline(start, given))


def _of_one(subject: Subject, n: int) -> Panel:
    """The panel of a network that cannot be drawn again."""
    assert subject.data is not None
    found = measure(subject, subject.trained or subject.network, n)
    facts: list[tuple[str, object]] = [
        ("Examples", f"{min(n, len(subject.data.x))} of {subject.data.name}"),
        ("Kernel", kernel_name(subject)),
        ("Alignment, given weights", f"{found.value:.3f}"),
        ("Chance, given weights", f"{found.chance:.3f}"),
    ]
    rows = [(name, one.value, one.chance, one.score) for name, one in {"all": found, **found.layers}.items()]
    header = ["layer", "alignment", "chance", "from chance (0) to ceiling (1)"]
    numbers = table(header, rows, "label-alignment", 60, fold=True)
    headline = (
        f"The alignment of its tangent kernel with the labels is {found.value:.2f}, where chance gives "
        f"{found.chance:.2f} and 1 is the ceiling."
    )
    best = max(found.layers, key=lambda name: _known(found.layers[name].value))
    text = f"{headline} The best aligned layer is {best} ({found.layers[best].value:.3f})."
    text += " How much initialisations differ is not known of a network that cannot be drawn again."
    return Panel(TITLE, READ, text, [fact_list(facts), numbers], headline=headline)


def _known(value: float) -> float:
    return -1.0 if math.isnan(value) else value


def sizes(subject: Subject) -> tuple[int, int]:
    """Examples and initialisations that the time allows: a kernel takes 1.3 steps of training per output.

    Several initialisations come first: networks differ by more than examples do.
    """
    each = 1.3 * min(MOST_OUTPUTS, output_count(subject)) * subject.pace().train
    extra = 3 * int(subject.trained is not None) or 1  # the given weights, and the full kernels
    allowed = subject.seconds(TITLE)
    for count in (1,) if subject.single else COUNTS:
        for n in SIZES:
            seconds = (count + extra) * n * each
            if seconds <= allowed:
                return n, count
    raise subject.too_long(f"the alignment of {n} examples", seconds, TITLE)


def kernel_name(subject: Subject) -> str:
    """Which kernel is compared with the labels."""
    c = output_count(subject)
    if c == 1:
        return "of the only output, centred"
    how = "" if c <= MOST_OUTPUTS else f", from {MOST_OUTPUTS} random combinations"
    return f"trace over {c} outputs{how}, centred"


def targets(subject: Subject, n: int) -> Tensor:
    """The labels as columns [n, c], float64: numbers as they are, signs for one output, else one column per output."""
    assert subject.data is not None
    y, c = subject.data.y[:n], output_count(subject)
    if subject.data.kind == "places":
        raise UnsupportedError("the data have a label for every place, and this panel is about one row per input")
    if subject.data.kind == "numbers":
        if y.shape[1] != c:
            raise UnsupportedError(f"{subject.name} has {c} outputs and the data {y.shape[1]} targets")
        return y.double()
    if c == 1 and subject.data.classes > 2:
        raise UnsupportedError(f"{subject.name} has one output and the data {subject.data.classes} classes")
    if 1 < c < subject.data.classes:
        raise UnsupportedError(f"{subject.name} has {c} outputs and the data {subject.data.classes} classes")
    return (2.0 * y - 1.0).double().unsqueeze(1) if c == 1 else nn.functional.one_hot(y, c).double()


def measure(subject: Subject, network: nn.Module, n: int = SIZES[0]) -> Alignment:
    """By layer, on the first n examples of the data."""
    x = subject.examples(n)
    Y = targets(subject, len(x)).to(x.device)
    seen: nn.Module = network
    if output_count(subject) > MOST_OUTPUTS:
        seen = Combined(network, output_count(subject), subject.seed).to(x.device)
    kernel = biascope.ntk(seen, x, outputs="trace", by_layer=True)
    inner = "" if seen is network else "network."  # the names their owner knows
    layers = {name.removeprefix(inner): aligned(part.tensor, Y) for name, part in kernel.by_layer().items()}
    return replace(aligned(kernel.tensor, Y), layers=layers)


class Combined(nn.Module):
    """Random signed sums of a network's outputs: their trace kernel has that of the network as its mean."""

    def __init__(self, network: nn.Module, outputs: int, seed: int) -> None:
        super().__init__()
        self.network = network
        signs = torch.randint(2, (outputs, MOST_OUTPUTS), generator=generator(seed, "card outputs"))
        self.register_buffer("signs", (2.0 * signs - 1) / math.sqrt(MOST_OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] to [n, MOST_OUTPUTS]."""
        out: Tensor = self.network(x)
        return out.reshape(len(x), -1) @ self.signs  # type: ignore[operator]


def aligned(k: Tensor, Y: Tensor) -> Alignment:
    """Of a kernel [n, n] with targets [n, c]; NaN where the kernel is constant over the examples."""
    n = len(k)
    H = torch.eye(n, dtype=torch.float64, device=k.device) - 1 / n
    K, Z = H @ k.double() @ H, H @ Y
    norm = float(K.norm() * (Z.mT @ Z).norm())
    if not norm > 1e-9 * float(k.double().norm() * (Y.mT @ Y).norm()):
        return Alignment(math.nan, math.nan)
    value, chance = float((Z * (K @ Z)).sum()) / norm, float(K.trace() * Z.square().sum()) / ((n - 1) * norm)
    return Alignment(value, chance)


def full_ceiling(Y: Tensor) -> float:
    """What the full kernel's alignment reaches while all outputs are alike (K = k x 1): 1 / sqrt(c (c - 1)) of c
    balanced classes.
    """
    Z = Y - Y.mean(0)
    return float((Z.mT @ Z).norm() / (math.sqrt(Y.shape[1]) * Z.square().sum()))


def full_facts(subject: Subject, n: int) -> list[tuple[str, object]]:
    """The alignment of the full kernel over examples and outputs, for comparison: with its own ceiling."""
    c, n = output_count(subject), min(n, len(subject.examples(n)))
    if c == 1 or c > MOST_OUTPUTS or n * c > MOST_ROWS:
        return []
    x = subject.examples(n)
    Y = targets(subject, n).to(x.device)
    found = {"one initialisation": subject.network} | ({"given weights": subject.trained} if subject.trained else {})
    facts = [(f"Full kernel, {name}", f"{biascope.ntk(one, x).alignment(Y):.3f}") for name, one in found.items()]
    return [*facts, ("Full kernel, outputs alike", f"≤ {full_ceiling(Y):.3f}")]


def _meaning(start: Start, given: Alignment | None) -> str:
    whole, layers = start.whole, start.layers
    best = max(layers, key=lambda name: _known(layers[name].mean))
    text = (
        f"The trace kernel's alignment with the labels is {whole}; shuffled labels would give {start.chance.mean:.2f}, "
        f"and 1 is the ceiling. The best aligned layer is {best} ({layers[best].mean:.3f})."
    )
    if given is None:
        return text
    side = start.score.side(given.score)
    text += f" At the given weights it is {given.value:.3f} (shuffled: {given.chance:.2f})"
    if whole.count == 1:
        return f"{text}; how much initialisations differ was not measured, so nothing is said about a change."
    if side == 0:
        text += ", within the spread of initialisations: no turn of the kernel is seen"
        moved = _moved(start, given, 0)
        if not moved:
            return f"{text}."
        top = max(moved, key=lambda name: moved[name])
        others = f", and {len(moved) - 1} more layers" if len(moved) > 1 else ""
        return (
            f"{text} as a whole; {top} by itself is beyond it ({layers[top].mean:.3f} to "
            f"{given.layers[top].value:.3f}){others}."
        )
    text += (
        f", {start.score.mean:.0%} against {given.score:.0%} of the way from chance to the ceiling: the kernel is "
        f"turned {'towards' if side > 0 else 'away from'} the labels of these examples"
    )
    change = _moved(start, given, side)
    if change:
        top = max(change, key=lambda name: change[name])
        text += f", most in {top} ({layers[top].mean:.3f} to {given.layers[top].value:.3f})"
    return f"{text}."


def _moved(start: Start, given: Alignment, side: int) -> dict[str, float]:
    """Layers beyond the spread of initialisations on that side (0: on any, among all layers), and by how much."""
    among = len(start.scores) if side == 0 else 1
    sides = {name: start.scores[name].side(part.score, among=among) for name, part in given.layers.items()}
    return {
        name: abs(given.layers[name].score - start.scores[name].mean)
        for name, found in sides.items()
        if found and found == (side or found)
    }


def _headline(start: Start, given: Alignment | None) -> str:
    kernel, at = "The alignment of its tangent kernel with the labels", f"{start.whole.mean:.2f} at initialisation"
    if given is None:
        return f"{kernel} is {at}, where chance gives {start.chance.mean:.2f} and 1 is the ceiling."
    chance = f"chance: {start.chance.mean:.2f} and {given.chance:.2f}, ceiling: 1"
    return f"{kernel} is {at} and {given.value:.2f} at the given weights ({chance})."


def _figure(start: Start, given: Alignment | None) -> Html:
    names = list(start.layers)
    shown = {"initialisation": [(one.mean, one.deviation) for one in start.layers.values()]}
    chance = {"initialisation": [one.mean for one in start.chances.values()]}
    if given is not None:
        shown["given weights"] = [(given.layers[name].value, math.nan) for name in names]
        chance["given weights"] = [given.layers[name].chance for name in names]
    lines = []
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        for i, (when, both) in enumerate(shown.items()):
            values, errors = [value for value, _ in both], [0.0 if math.isnan(e) else e for _, e in both]
            axes.errorbar(range(len(names)), values, yerr=errors, fmt="os"[i] + "-", color=f"C{i}", label=when)
            axes.plot(range(len(names)), chance[when], "--", color=f"C{i}", linewidth=0.8, label=f"{when}, chance")
            lines += [(f"{name}, {when}", [k], [value]) for k, (name, value) in enumerate(zip(names, values))]
        ticks = range(0, len(names), max(1, -(-len(names) // 10)))
        axes.set_xticks(list(ticks), [names[k][-18:] for k in ticks], rotation=45, ha="right")
        axes.set(ylabel="alignment", ylim=(0, 1.02))
        axes.legend()
    svg = figures.inline_svg(drawing, "labels")
    words = "; ".join(
        f"{when}: " + ", ".join(f"{name} {value:.2f}" for name, (value, _) in list(zip(names, both))[:12])
        for when, both in shown.items()
    )
    caption = "Layers in the order of the network; dashed: the same for shuffled labels. 1 is the ceiling."
    if start.whole.count > 1:
        caption += f" Bars at initialisation: standard deviation of {start.whole.count} networks."
    return figure(svg, f"Alignment by layer. {words}.", caption, figures.hover(axes, lines))
