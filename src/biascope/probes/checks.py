"""What a probe asks of its network and its losses, and what it says about the mode it measures in."""

import math

import torch
from torch import Tensor, nn

from biascope.probes.view import View
from biascope.support.arguments import as_number
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import take


def eval_notes(model: nn.Module) -> tuple[str, ...]:
    """Sentences on layers that behave otherwise in the probe than in training."""
    notes = []
    for name, m in model.named_modules():
        where = f"{type(m).__name__} '{name}'" if name else type(m).__name__
        p = m.p if isinstance(m, nn.modules.dropout._DropoutNd) else getattr(m, "dropout", 0.0)
        if isinstance(p, int | float) and not isinstance(p, bool) and p > 0:
            notes.append(f"{where} (p={p:g}): probes evaluate without dropout")
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            notes.append(f"{where}: probes evaluate with its running statistics (eval mode)")
    return tuple(notes)


def read_loss(loss: Tensor | float | None, step: int) -> float | None:
    """A loss as a finite number."""
    value = None if loss is None else as_number(loss, "loss")
    if value is not None and not math.isfinite(value):
        raise InputError(f"the loss is {value} at step {step}: training has diverged")
    return value


def refuse_random(view: View) -> None:
    """Raise if the network is random even in eval mode: its change would be lost in the noise."""
    few = take(view.x, slice(0, 8))
    one, two = view.evaluate(few), view.evaluate(few)
    if not torch.allclose(one, two, rtol=1e-3, atol=1e-6, equal_nan=True):
        who = f"{type(view.network).__name__} gives different outputs for the same inputs in eval mode"
        raise UnsupportedError(f"{who} (dropout called with training=True?): let it depend on self.training")
