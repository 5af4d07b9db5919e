"""A recorded forward pass at the parameters a network has: with its own tensors where nothing need be swapped.

`torch.func.functional_call` walks the whole module twice to hang other tensors into it. Where the differentiated
parameters are all there is, and are the module's own, calling the module does the same with less ado.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from biascope.derivatives import RightGradients, writes_into_inputs
from biascope.functional import Functional, as_rows, tensors_in
from biascope.inputs import Inputs, batch_size
from biascope.layers.blocks import Anatomy, leaves
from biascope.layers.record import Tape, record
from biascope.refusals import modules_of


def recorded(f: Functional, found: Anatomy, inputs: Inputs) -> Tape:
    """The tape of f at its parameters over prepared inputs; whether it `matches` is for the caller to ask.

    Example:
        >>> from biascope.functional import functional
        >>> from biascope.layers import anatomy
        >>> f, x = functional(torch.nn.Linear(3, 2)), torch.randn(5, 3)
        >>> tape = recorded(f, anatomy(f, x), x)
        >>> tape.rows.shape, [use.roles for use in tape.uses]
        (torch.Size([5, 2]), [{'weight': 'weight', 'bias': 'bias'}])
    """
    own = own_parameters(f) if writes_into_inputs(f.module) is False else None
    if own is not None:
        n = batch_size(inputs)
        tape = record(lambda _, x: _call(f, x), own, inputs, lambda out: as_rows(out, n, None, f.module))
        if found.matches(tape):
            return tape
    return record(f, leaves(f), inputs)


def own_parameters(f: Functional) -> dict[str, Tensor] | None:
    """The module's own parameters where they are f's, in the same memory and precision, and all that it has.

    Not for modules with buffers, which a forward pass may replace (`functional_call` puts the old ones back).

    Example:
        >>> from torch import nn
        >>> from biascope.functional import functional
        >>> net = nn.Linear(3, 2)
        >>> own_parameters(functional(net))["bias"] is net.bias
        True
        >>> own_parameters(functional(net, precision="float64")) is None
        True
    """
    if f.frozen:
        return None
    own = tensors_in(modules_of(f.module), "_parameters")
    if len(own) != len(f.params):
        return None
    for name, p in own.items():
        mine = f.params.get(name)
        if mine is None or not p.requires_grad or p.layout != torch.strided or p.dtype != mine.dtype:
            return None
        if p.data_ptr() != mine.data_ptr():
            return None
    return own


def _call(f: Functional, inputs: Inputs) -> Any:
    with RightGradients(pure=True):
        out = f.module(**inputs) if isinstance(inputs, dict) else f.module(inputs)
    return out if f.output is None else f.output(out)
