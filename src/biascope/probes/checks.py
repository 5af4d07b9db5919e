"""What a probe refuses, and what it says about the mode it measures in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from biascope.arguments import as_number
from biascope.errors import InputError, UnsupportedError
from biascope.inputs import Inputs, batch_size, check_inputs, take
from biascope.probes.groups import check_labels
from biascope.probes.metrics import Metric
from biascope.probes.view import View


def check_model(model: nn.Module) -> torch.device:
    """The device of a network's parameters; a network that cannot be probed is refused."""
    named = dict(model.named_parameters())
    if not named:
        raise InputError(f"{type(model).__name__} has no parameters: there is nothing to follow")
    for name, p in named.items():
        if is_lazy(p):
            raise InputError(f"parameter '{name}' is not initialised yet: run one batch through the model first")
    devices = {p.device for p in named.values()}
    if len(devices) > 1:
        raise UnsupportedError(f"parameters live on several devices ({sorted(map(str, devices))}): move them to one")
    return devices.pop()


def check_setup(
    x: Any, y: Tensor | None, groups: Mapping[str, Any] | None, metrics: Sequence[Metric], device: torch.device
) -> tuple[Inputs, int]:
    """The probe batch and its size, if it is where the network is and has the labels that metrics need."""
    places = [("x_probe", x), ("y_probe", y)]
    if groups is not None and not isinstance(groups, Mapping):
        raise InputError(f"groups: expected {{name: indices}}, got {type(groups).__name__}")
    for name, group in (groups or {}).items():
        if isinstance(group, tuple):
            places += [(f"groups[{name!r}]", t) for t in group]
    for name, given in places:
        for t in given.values() if isinstance(given, Mapping) else [given]:
            if isinstance(t, Tensor) and t.device != device:
                raise InputError(f"{name} is on {t.device}, the model on {device}: move it with .to('{device}')")
    inputs = check_inputs(x, "x_probe")
    n = batch_size(inputs)
    if y is not None:
        check_labels(y, n, "y_probe")
    own = bool(groups) and all(isinstance(g, tuple) for g in (groups or {}).values())
    lacking = [m.name for m in metrics if "labels" in m.needs or ("group labels" in m.needs and not own)]
    if y is None and lacking:
        raise InputError(f"metrics {', '.join(lacking)} need labels: pass y_probe")
    return inputs, n


def eval_notes(model: nn.Module) -> tuple[str, ...]:
    """Sentences on layers that behave otherwise in the probe than in training.

    Example:
        >>> eval_notes(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
        ("Dropout '1' (p=0.5): probes evaluate without dropout",)
    """
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
    """A loss as a finite number.

    Example:
        >>> read_loss(torch.tensor([0.5]), 1)
        0.5
    """
    if loss is None:
        return None
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise InputError(f"loss has shape {list(loss.shape)}: one number is needed (its mean?)")
    value = as_number(loss.detach() if isinstance(loss, Tensor) else loss, "loss")
    if not math.isfinite(value):
        raise InputError(f"the loss is {value} at step {step}: training has diverged")
    return value


def refuse_chance(view: View) -> None:
    """Raise if the network is random even in eval mode: its change could not be told from chance."""
    few = take(view.x, slice(0, 8))
    one, two = view.evaluate(few), view.evaluate(few)
    if not torch.allclose(one, two, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise UnsupportedError(
            f"{type(view.network).__name__} gives different outputs for the same inputs in eval mode (dropout called "
            "with training=True?): probes cannot tell its change from chance. Let it depend on self.training"
        )
