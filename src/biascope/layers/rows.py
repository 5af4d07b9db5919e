"""Rows of the Jacobian from a recorded pass: per-example gradients by the rules, no example loop."""

from __future__ import annotations

import torch
from torch import Tensor

from biascope.functional import Functional
from biascope.layers.blocks import Anatomy
from biascope.layers.record import Tape
from biascope.layers.rules import MatrixRule


def use_rows(tape: Tape, found: Anatomy, index: int, role: str, g: Tensor) -> Tensor:
    """Per-example gradient [n, p] of the parameter in `role` from one use; g in the model's layout."""
    use, slot = tape.uses[index], found.slots[index]
    assert slot is not None
    n = tape.rows.shape[0]
    g = slot.output.example_major(g, n)
    a = None
    if use.input is not None and slot.input is not None and role == "weight":
        a = slot.input.example_major(use.input, n)
    if isinstance(use.rule, MatrixRule):
        if role == "bias":
            return use.rule.bias_rows(g)
        assert a is not None
        return use.rule.weight_rows(a, g)
    return use.rule.rows(role, a, g, slot.output.dim)


def rows_of_tape(f: Functional, found: Anatomy, tape: Tape, cotangents: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Per-example gradients {name: [k, n, numel]} for parameters that have rules (fallback ones are not included).

    Args:
        f: the network.
        found: its anatomy.
        tape: a recorded pass over n examples.
        cotangents: [k, n, c].
        names: the parameters wanted.
    """
    k, n = cotangents.shape[:2]
    wanted = set(names)
    places = [
        (i, role, name)
        for i, (use, slot) in enumerate(zip(tape.uses, found.slots))
        if slot is not None
        for role, name in use.roles.items()
        if name in wanted
    ]
    out = {name: torch.zeros(k, n, f.params[name].numel(), dtype=f.dtype, device=f.device) for name in names}
    for j in range(k):
        grads = tape.gradients(cotangents[j])
        for i, role, name in places:
            g = grads[i]
            if g is not None:
                out[name][j] += use_rows(tape, found, i, role, g)
    return out
