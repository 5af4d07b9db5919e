"""The tangent kernel: how many functions of the inputs are easy, and which layers learn them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

import biascope
from biascope.reports import figures
from biascope.reports.html import Html, figure, join, table, tag
from biascope.reports.panels.adapter import shown_output
from biascope.reports.panels.base import Panel, Subject, card_panel
from biascope.reports.panels.initialisations import COUNTS, Spread
from biascope.reports.panels.pace import largest_within
from biascope.reports.study_page import fact_list
from biascope.support.errors import InputError

TITLE = "Tangent kernel"
READ = (
    "Gradient descent learns fast along the first eigenvectors of this kernel and slowly along the last: "
    "a steep curve means that few functions of these inputs are easy. The kernel is a sum over layers; "
    "a layer's share of the trace says how much of the learning starts there."
)
SAMPLES = (8, 16, 32, 64)


@dataclass(frozen=True)
class KernelFacts:
    """Spectrum [n], effective rank and the layers' shares of the trace."""

    values: np.ndarray[Any, Any]
    rank: float
    layers: dict[str, float]

    @property
    def trace(self) -> float:
        """Sum of the eigenvalues."""
        return float(self.values.sum())

    @property
    def share(self) -> np.ndarray[Any, Any]:
        """Eigenvalues as shares of the trace."""
        return np.asarray(self.values / self.values.sum())


def kernel_facts(network: nn.Module, x: Tensor) -> KernelFacts:
    """The kernel of the first output on x."""
    kernel = biascope.ntk(network, x, outputs=shown_output(network), by_layer=True)
    values = kernel.eigh().values.clamp_min(0).cpu().double().numpy()
    if not values.sum() > 0:
        raise InputError("the tangent kernel is zero: the first output does not depend on any parameter")
    layers = {name: float(part.trace() / kernel.trace()) for name, part in kernel.by_layer().items()}
    return KernelFacts(values, kernel.effective_rank(), layers)


def samples(subject: Subject) -> int:
    """How many inputs half of the time allows: the kernel takes about as long as three steps of training on them.

    The other half is for other initialisations.
    """
    return largest_within(subject.seconds(TITLE) / 2, 3 * subject.pace().train, SAMPLES)


@card_panel(order=40)
def panel(subject: Subject) -> Panel:
    """Spectrum, effective rank and layers of the kernel of the first output, at initialisation and at the weights."""
    subject.check_memory()
    x = subject.examples(samples(subject))
    start = "given weights" if subject.single else "initialisation"
    found = {start: kernel_facts(subject.network, x)}
    others = [found[start]]
    if subject.trained is not None:
        found["given weights"] = kernel_facts(subject.trained, x)
        count = largest_within(subject.seconds(TITLE) / 2, 3 * len(x) * subject.pace().train, COUNTS)
        others += [kernel_facts(subject.build(i), x) for i in range(1, count)]
    facts: list[tuple[str, object]] = [("Inputs", f"{len(x)} {subject.inputs_name}")]
    for when, kernel in found.items():
        facts += [
            (f"Effective rank, {when}", f"{kernel.rank:.1f} of {len(kernel.values)}"),
            (f"First eigenvalue, {when}", f"{kernel.share[0]:.1%} of the trace"),
            (f"Trace / n, {when}", f"{kernel.values.sum() / len(kernel.values):.3g}"),
        ]
    spectrum = [
        (when, i + 1, float(value), float(part))
        for when, kernel in found.items()
        for i, (value, part) in enumerate(zip(kernel.values, kernel.share))
    ]
    numbers = table(["kernel at", "index", "eigenvalue", "share"], spectrum, "ntk-spectrum", fold=True)
    rows = [(when, name, part) for when, kernel in found.items() for name, part in kernel.layers.items()]
    layers = table(["kernel at", "layer", "share of the trace"], rows, "ntk-layers", limit=60, fold=True)
    left, right = join([_spectrum(found, subject), numbers]), join([_layers(found), layers])
    columns = tag("div", tag("div", left), tag("div", right), class_="columns")
    meaning = _meaning(start if start == "initialisation" else f"the {start}", found[start])
    meaning += _change(others, None if subject.single else found.get("given weights"))
    headline = (
        f"The function that its tangent kernel learns first holds {found[start].share[0]:.0%} of the trace "
        f"({1 / len(x):.1%} if all {len(x)} were learned equally fast)."
    )
    return Panel(TITLE, READ, meaning, [fact_list(facts), columns], headline=headline)


def _meaning(start: str, first: KernelFacts) -> str:
    share = first.share
    if share[0] > 0.5:
        kind = "one function, close to a common shift of all outputs, is learned long before anything else"
    elif share[0] > 0.1:
        kind = "a few functions are learned well before the others"
    else:
        kind = "no single function of these inputs is much easier than the others"
    largest = max(first.layers, key=lambda name: first.layers[name])
    return (
        f"At {start} the first eigenvector holds {share[0]:.0%} of the trace, effective rank {first.rank:.1f} "
        f"of {len(share)}: {kind}. The layer that moves the outputs most is {largest} "
        f"({first.layers[largest]:.0%} of the trace)."
    )


def _change(starts: list[KernelFacts], after: KernelFacts | None) -> str:
    """What differs at the given weights by more than initialisations do; "" without weights."""
    if after is None:
        return ""
    rank, trace = Spread.of([one.rank for one in starts]), Spread.of([math.log(one.trace) for one in starts])
    grown = after.trace / math.exp(trace.mean)
    text = f" At the given weights its effective rank is {after.rank:.1f} ({rank}) and its trace {grown:.3g} times "
    if rank.count == 1:
        return f"{text}that one; how much initialisations differ was not measured, so no change is claimed."
    wide = {1: "broader", -1: "narrower", 0: ""}[rank.side(after.rank)]
    large = {1: "larger", -1: "smaller", 0: ""}[trace.side(math.log(after.trace))]
    words = " and ".join(word for word in (wide, large) if word)
    text += "theirs: "
    if not words:
        return f"{text}both within the spread of initialisations."
    rest = "" if wide and large else f"; its {'trace' if wide else 'rank'} is within their spread"
    return f"{text}the kernel is {words}, beyond the spread of initialisations{rest}."


def _spectrum(found: dict[str, KernelFacts], subject: Subject) -> Html:
    lines = []
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        for i, (when, kernel) in enumerate(found.items()):
            keep = kernel.values[kernel.values > kernel.values[0] * 1e-9]
            axes.plot(np.arange(1, len(keep) + 1), keep, "os"[i] + "-", color=f"C{i}", label=when)
            lines.append((when, range(1, len(keep) + 1), keep))
        axes.set(xlabel="index", ylabel="eigenvalue")
        figures.log_scale(axes, "y")
        if len(found) > 1:
            axes.legend()
    first = lines[0][2]
    alt = f"Kernel eigenvalues fall from {first[0]:.3g} to {first[-1]:.3g} on a logarithmic axis."
    one = "second output (the first is padding)" if shown_output(subject.network) else "first output"
    caption = f"{len(next(iter(found.values())).values)} {subject.inputs_name} inputs, {one}, one seed."
    svg = figures.inline_svg(drawing, "ntk")
    return figure(svg, alt, caption, figures.hover(axes, lines))


def _layers(found: dict[str, KernelFacts], limit: int = 12) -> Html:
    layers = next(iter(found.values())).layers
    top = sorted(layers, key=lambda name: layers[name], reverse=True)[:limit]
    shown = [name for name in layers if name in top]  # in the order of the network
    height = 0.8 / len(found)
    bars = []
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        for i, (when, kernel) in enumerate(found.items()):
            places = [row + i * height for row in range(len(shown))]
            axes.barh(places, [kernel.layers.get(n, 0.0) for n in shown], height, color=f"C{2 * i + 2}", label=when)
            bars += [
                (f"{name}, {when}" if len(found) > 1 else name, [kernel.layers.get(name, 0.0)], [place])
                for name, place in zip(shown, places)
            ]
        middle = [row + (len(found) - 1) * height / 2 for row in range(len(shown))]
        axes.set_yticks(middle, [name if len(name) < 28 else f"…{name[-27:]}" for name in shown])
        axes.invert_yaxis()
        axes.set(xlabel="share of the trace")
        if len(found) > 1:
            axes.legend()
    words = ", ".join(f"{name} {layers[name]:.0%}" for name in shown)
    caption = f"The {len(shown)} largest of {len(layers)} layers." if len(layers) > limit else "Every layer."
    svg, alt = figures.inline_svg(drawing, "layers"), f"Share of the kernel's trace by layer: {words}."
    return figure(svg, alt, caption, figures.hover(axes, bars, by="y"))
