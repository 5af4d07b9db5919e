"""Weights as layers use them: under weight norm, spectral norm and the like the parameters are something else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from biascope.functional import Functional
from biascope.refusals import modules_of


def effective_weights(f: Functional) -> dict[str, Tensor]:
    """{"layer.weight": [out, ...]} in float64: all weights of more than one dimension, made of chosen parameters.

    Kernels of transposed convolutions, which torch stores as [in, out, ...], are turned.

    Example:
        >>> from biascope.functional import functional
        >>> net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
        >>> {name: list(W.shape) for name, W in effective_weights(functional(net)).items()}
        {'weight': [3, 2]}
    """
    layers = {name: layer for layer, name in modules_of(f.module).items()}
    found = {}
    for name, parameter in f.params.items():
        head, parametrised, tail = f".{name}".partition(".parametrizations.")
        where, _, own = name.rpartition(".")
        if parametrised:
            where, own = head[1:], tail.partition(".")[0]
        layer = layers.get(where)  # a module may name its parameters as it likes
        with torch.no_grad():
            own, weight = (own, getattr(layer, own)) if parametrised else _before_a_call(layer, own, parameter)
        if weight.dim() > 1:
            found[f"{where}.{own}" if where else own] = _rows_first(weight.detach().double(), layer)
    return found


def _before_a_call(layer: nn.Module | None, own: str, parameter: Tensor) -> tuple[str, Tensor]:
    """What the hook of torch.nn.utils.spectral_norm puts in a parameter's place; networks with others have no copy."""
    if layer is None:
        return own, parameter
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm) and own == f"{hook.name}_orig":
            return hook.name, hook.compute_weight(layer, do_power_iteration=False)
    return own, parameter


def _rows_first(p: Tensor, layer: nn.Module | None) -> Tensor:
    """A weight as [out, ...]; `layer` is the module that it belongs to."""
    if isinstance(layer, nn.modules.conv._ConvTransposeNd) and p.shape == layer.weight.shape:
        p = p.reshape(layer.groups, -1, *p.shape[1:]).transpose(1, 2).flatten(0, 1)  # now [out, in / groups, ...]
    return p
