"""A recorded forward pass at the parameters a network has: with its own tensors where nothing need be swapped.

`torch.func.functional_call` walks the whole module twice to hang other tensors into it. Where the differentiated
parameters are all there is, and are the module's own, calling the module does the same with less ado.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from biascope.functional import Functional, Inputs, as_rows, batch_size, modules_of, tensors_in
from biascope.layers.blocks import Anatomy, leaves
from biascope.layers.record import Recorder, Tape, record
from biascope.layers.rules import Linear


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
    own = own_parameters(f)
    if own is not None:
        if isinstance(inputs, Tensor) and is_chain(f.module):
            tape = _chained(f, own, inputs)
        else:
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
    out = f.module(**inputs) if isinstance(inputs, dict) else f.module(inputs)
    return out if f.output is None else f.output(out)


LINKS = (nn.Linear, nn.Identity, nn.Flatten, nn.Dropout, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh)
FORWARD: dict[type, Any] = {kind: kind.forward for kind in (*LINKS, nn.Sequential)}  # as torch wrote them


def is_chain(net: nn.Module) -> bool:
    """Is this an nn.Sequential of linear layers and of functions without parameters, as torch wrote them, unhooked?

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> handle = net[1].register_forward_hook(lambda m, args, out: out * net[0].bias)
        >>> is_chain(net), handle.remove(), is_chain(net)
        (False, None, True)
    """
    if type(net) is not nn.Sequential or _has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    return _is_untouched(net) and all(type(m) in LINKS and _is_untouched(m) for m in net._modules.values())


def _is_untouched(m: Any) -> bool:
    """Does calling the module do what torch's own `forward` does, and nothing else?"""
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return (
        FORWARD[type(m)] is type(m).forward and "forward" not in m.__dict__ and not hooks and not m._compiled_call_impl
    )


def _chained(f: Functional, own: dict[str, Tensor], x: Tensor) -> Tape:
    """What `record` finds in a chain, layer by layer: a mode that sees every call of torch takes twice as long.

    No layer of a chain changes what a linear one before it has read, so there is no second look with copies.
    """
    recorder, n = Recorder(own), x.shape[0]
    with torch.enable_grad():
        for m in f.module._modules.values():
            if isinstance(m, nn.Linear):
                w, b = m.weight, m.bias
                x = recorder.note(F.linear(x, w, b), Linear(), {"weight": w, "bias": b}, x)
            elif m is not None:
                x = m(x)
        rows = as_rows(x, n, f.output, f.module)
    for use in recorder.uses:
        use.source = None
    return Tape(rows, recorder.uses, recorder.raw)
