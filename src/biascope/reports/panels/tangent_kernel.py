"""The tangent kernel at initialisation: how many functions of the data are easy, and which layers learn them."""

from typing import Any

import numpy as np

import biascope
from biascope.reports import figures
from biascope.reports.html import Html, figure, join, table, tag
from biascope.reports.panels.base import Panel, Subject
from biascope.reports.study_page import fact_list

TITLE = "Tangent kernel at initialisation"
READ = (
    "Gradient descent learns fast along the first eigenvectors of this kernel and slowly along the last: "
    "a steep curve means that few functions of these inputs are easy. The kernel is a sum over layers; "
    "a layer's share of the trace says how much of the learning starts there."
)
SAMPLES = 64


def panel(subject: Subject) -> Panel:
    """Spectrum, effective rank and layers of the kernel of the first output on Gaussian inputs."""
    kernel = biascope.ntk(subject.build(0), subject.inputs(SAMPLES), outputs=0)
    values = kernel.eigh().values.clamp_min(0).cpu().double().numpy()
    rank, share = kernel.effective_rank(), values / values.sum()
    layers = {name: part.trace() / kernel.trace() for name, part in kernel.by_layer().items()}
    facts: list[tuple[str, object]] = [
        ("Inputs", f"{SAMPLES} Gaussian"),
        ("Effective rank", f"{rank:.1f} of {len(values)}"),
        ("First eigenvalue", f"{share[0]:.1%} of the trace"),
        ("Trace / n", f"{values.sum() / len(values):.3g}"),
    ]
    spectrum = [(i + 1, float(value), float(part)) for i, (value, part) in enumerate(zip(values, share))]
    left = join([_spectrum(values), table(["index", "eigenvalue", "share"], spectrum, "ntk-spectrum", fold=True)])
    rows = [(name, float(part)) for name, part in layers.items()]
    right = join([_layers(layers), table(["layer", "share of the trace"], rows, "ntk-layers", limit=60, fold=True)])
    columns = tag("div", tag("div", left), tag("div", right), class_="columns")
    return Panel(TITLE, READ, _meaning(share, rank, layers), [fact_list(facts), columns])


def _meaning(share: np.ndarray[Any, Any], rank: float, layers: dict[str, float]) -> str:
    if share[0] > 0.5:
        kind = "one function, close to a common shift of all outputs, is learned long before anything else"
    elif share[0] > 0.1:
        kind = "a few functions are learned well before the others"
    else:
        kind = "no single function of these inputs is much easier than the others"
    largest = max(layers, key=lambda name: layers[name])
    return (
        f"The first eigenvector holds {share[0]:.0%} of the trace, effective rank {rank:.1f} of {len(share)}: "
        f"{kind}. The layer that moves the outputs most is {largest} ({layers[largest]:.0%} of the trace)."
    )


def _spectrum(values: np.ndarray[Any, Any]) -> Html:
    keep = values[values > values[0] * 1e-9]
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        axes.plot(np.arange(1, len(keep) + 1), keep, "o-", color="C0")
        axes.set(xlabel="index", ylabel="eigenvalue", yscale="log")
    alt = f"Kernel eigenvalues fall from {keep[0]:.3g} to {keep[-1]:.3g} on a logarithmic axis."
    return figure(figures.inline_svg(drawing, "ntk"), alt, f"{len(values)} Gaussian inputs, first output, one seed.")


def _layers(layers: dict[str, float], limit: int = 12) -> Html:
    top = sorted(layers, key=lambda name: layers[name], reverse=True)[:limit]
    shown = [name for name in layers if name in top]  # in the order of the network
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        axes.barh(range(len(shown)), [layers[name] for name in shown], color="C2")
        axes.set_yticks(range(len(shown)), [name if len(name) < 28 else f"…{name[-27:]}" for name in shown])
        axes.invert_yaxis()
        axes.set(xlabel="share of the trace")
    words = ", ".join(f"{name} {layers[name]:.0%}" for name in shown)
    caption = f"The {len(shown)} largest of {len(layers)} layers." if len(layers) > limit else "Every layer."
    return figure(figures.inline_svg(drawing, "layers"), f"Share of the kernel's trace by layer: {words}.", caption)
