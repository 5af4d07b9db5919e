"""Rows of the Jacobian from a recorded pass: per-example gradients by the rules, no example loop."""

from __future__ import annotations

import torch
from torch import Tensor

from biascope.functional import Functional
from biascope.layers.blocks import Anatomy, StaleError
from biascope.layers.record import Tape
from biascope.layers.rules import MatrixRule


def all_gradients(tape: Tape, found: Anatomy, cotangents: Tensor, last: bool = False) -> list[list[Tensor | None]]:
    """Gradients at every use for k cotangents [k, n, c]: a list of pieces, each a list over uses of [k', ...].

    One piece where a vmapped backward pass pays, else k pieces of one cotangent each.
    """
    if found.batched and len(cotangents) > 1:
        pieces = [tape.batched_gradients(cotangents)]
    else:
        k = len(cotangents)
        pieces = [
            [None if g is None else g.unsqueeze(0) for g in tape.gradients(cotangents[j], retain=not last or j < k - 1)]
            for j in range(k)
        ]
    for i, g in enumerate(pieces[0]):
        if g is None and i not in found.unreached:  # zeros would be a lie
            names = " and ".join(tape.uses[i].roles.values())
            raise StaleError(f"no gradient reached the layer of {names}, as it did on the first examples")
    return pieces


def use_rows(tape: Tape, found: Anatomy, index: int, role: str, g: Tensor) -> Tensor:
    """Per-example gradients [k, n, p] of the parameter in `role` from one use; g [k, ...] in the model's layout."""
    use, slot = tape.uses[index], found.slots[index]
    assert slot is not None
    n = tape.rows.shape[0]
    g = slot.output.example_major_each(g, n)
    a = None
    if use.input is not None and slot.input is not None and role == "weight":
        a = slot.input.example_major(use.input, n)
    if isinstance(use.rule, MatrixRule):
        if role == "bias":
            return use.rule.bias_rows(g.flatten(0, 1)).reshape(*g.shape[:2], -1)
        assert a is not None
        return torch.stack([use.rule.weight_rows(a, gj) for gj in g])
    return use.rule.rows(role, a, g, slot.output.dim)


def rows_of_tape(f: Functional, found: Anatomy, tape: Tape, cotangents: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Per-example gradients {name: [k, n, numel]} for parameters that have rules (fallback ones are not included).

    Args:
        f: the network.
        found: its anatomy.
        tape: a recorded pass over n examples.
        cotangents: [k, n, c].
        names: the parameters wanted.

    Example:
        >>> from torch import nn
        >>> from biascope.functional import functional
        >>> from biascope.layers import anatomy, leaves, record
        >>> f, x = functional(nn.Linear(3, 2)), torch.randn(5, 3)
        >>> tape = record(f, leaves(f), x)
        >>> cotangents = torch.eye(2)[:, None].expand(2, 5, 2)  # one pass per output
        >>> rows = rows_of_tape(f, anatomy(f, x), tape, cotangents, ["weight"])["weight"]
        >>> rows.shape, torch.equal(rows[0, :, :3], x)  # the gradient of the first output is the input
        (torch.Size([2, 5, 6]), True)
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
    start = 0
    for grads in all_gradients(tape, found, cotangents):
        size = next((len(g) for g in grads if g is not None), 1)
        for i, role, name in places:
            g = grads[i]
            if g is not None:
                out[name][start : start + size] += use_rows(tape, found, i, role, g)
        start += size
    return out
