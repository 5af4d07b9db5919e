"""What the network is: layers, shapes, parameters, and how its derivatives are covered."""

from typing import Any

import torch
from torch import Tensor, nn

import biascope
from biascope.reports.html import Html, table, tag
from biascope.reports.panels.base import Panel, Subject, card_panel
from biascope.reports.study_page import fact_list
from biascope.support.errors import UnsupportedError

TITLE = "Anatomy"


@card_panel(order=10)
def panel(subject: Subject) -> Panel:
    """Parameters and layers in the order they are called."""
    network = subject.network
    rows = layers(network, subject.examples(2))
    total = sum(parameter.numel() for parameter in network.parameters())
    heaviest = max(rows, key=lambda row: row[3], default=None)
    facts: list[tuple[str, object]] = [
        ("Parameters", f"{total:,}"),
        ("Layers", len(rows)),
        ("Input", " × ".join(str(size) for size in subject.input_shape)),
        ("Output", rows[-1][2] if rows else "same as input"),
    ]
    meaning = "It has no parameters: nothing can be learned."
    if total and heaviest is not None:
        share, where = heaviest[3] / total, f"{heaviest[0] or 'one layer'} ({heaviest[1]})"
        meaning = f"{share:.0%} of the parameters sit in {where}."
        if share < 0.2:
            meaning = f"No layer dominates: the largest, {where}, has {share:.0%} of the parameters."
        idle = unused(network, subject.examples(2))
        if idle:
            meaning += f" {idle / total:.0%} of the parameters play no part for these inputs."
    blocks = [fact_list(facts), table(["layer", "kind", "output", "parameters"], rows, "layers", limit=60, fold=True)]
    blocks = [tag("p", note, class_="note") for note in subject.notes] + blocks
    blocks.append(coverage(subject, network))
    return Panel(
        TITLE, "What the network is made of, layer by layer, in the order of the forward pass.", meaning, blocks
    )


def layers(network: nn.Module, x: Tensor) -> list[tuple[str, str, str, int]]:
    """(name, kind, output shape without the batch, own parameters) of every leaf called by a forward pass at x."""
    rows: list[tuple[str, str, str, int]] = []
    handles = []
    for name, module in network.named_modules():
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own or not any(True for _ in module.children()):

            def note(module: nn.Module, _: Any, output: Any, name: str = name, own: int = own) -> None:
                shape = " × ".join(map(str, output.shape[1:])) if isinstance(output, Tensor) else type(output).__name__
                rows.append((name, type(module).__name__, shape, own))

            handles.append(module.register_forward_hook(note))
    try:
        network(x)  # with gradients: without them torch's transformers skip their layers
    finally:
        for handle in handles:
            handle.remove()
    return rows


def unused(network: nn.Module, x: Tensor) -> int:
    """How many parameters the outputs at x do not depend on, e.g. token embeddings of a model given embedded tokens."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    if not parameters:
        return 0
    found = torch.autograd.grad(network(x).sum(), parameters, allow_unused=True)
    return sum(p.numel() for p, gradient in zip(parameters, found) if gradient is None)


def coverage(subject: Subject, network: nn.Module) -> Html:
    """The table of `Jacobian.coverage()`: which rule handles each parameter."""
    try:
        subject.check_memory()
    except UnsupportedError as error:
        return tag("p", f"No table of layer rules: {error}.", class_="note")
    report = biascope.Jacobian(network, subject.examples(2)).coverage()
    rows = [(row.parameter, row.handled_by, row.why) for row in report.rows]
    return table(["parameter", "rule", "why"], rows, "coverage", limit=60, fold=True)
