"""How far a network is from linear in its parameters, between two points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from biascope.errors import InputError
from biascope.functional import Functional, Params, functional
from biascope.inputs import Inputs, batches, refuse_shuffling
from biascope.jacobian import jacobian_vector
from biascope.linearize.anchored import State, state_of, without_chance
from biascope.precision import arithmetic
from biascope.signatures import checked


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def linearized_prediction(
    model: nn.Module,
    params: State,
    x: Any,
    output: Callable[[Any], Tensor] | None = None,
    precision: str = "float32",
) -> Tensor:
    """f(x; theta0) + J(x) (theta - theta0), [n, c], for theta = `params` and theta0 the model's own parameters.

    Args:
        model: the network at theta0.
        params: a module, a state dict or {name: tensor}; parameters left out stay where they are.
        x: a tensor, a dict of keyword tensors or batches of those.
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64".

    Example:
        >>> net, moved = nn.Linear(3, 2), nn.Linear(3, 2)
        >>> torch.allclose(linearized_prediction(net, moved, torch.eye(3)), moved(torch.eye(3)), atol=1e-6)
        True
    """
    refuse_shuffling(x)
    f, new = _points(model, params, output, precision)
    v = {k: new[k] - f.params[k] for k in new}
    parts = []
    with torch.no_grad():
        for inputs, _ in batches(x):
            batch, f0 = evaluated(f, inputs)
            parts.append(f0 + jacobian_vector(f, batch, v))
    return torch.cat(parts)


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def taylor_residual(
    model: nn.Module,
    params: State,
    x: Any,
    output: Callable[[Any], Tensor] | None = None,
    precision: str = "float32",
) -> float:
    """||f(theta) - f(theta0) - J (theta - theta0)|| / ||J (theta - theta0)|| over all examples and outputs.

    0 for a network linear in its parameters; shrinks linearly with the displacement for smooth activations; above
    about 1 the tangent model says nothing about the move. Arguments as in `linearized_prediction`. NaN where the
    parameters do not differ.

    Example:
        >>> net, moved = nn.Linear(3, 2), nn.Linear(3, 2)
        >>> taylor_residual(net, moved, torch.eye(3)) < 1e-5
        True
    """
    f, new = _points(model, params, output, precision)
    v = {k: new[k] - f.params[k] for k in new}
    wrong = moved = 0.0
    for inputs, _ in batches(x):
        with torch.no_grad():
            batch, f0 = evaluated(f, inputs)  # first: an input that does not fit is explained here
            change = f(new, batch) - f0
            Jv = jacobian_vector(f, batch, v)
            wrong += float((change - Jv).double().square().sum())
        moved += float(Jv.double().square().sum())
    return (wrong / moved) ** 0.5 if moved else float("nan")


def evaluated(f: Functional, inputs: Inputs) -> tuple[Inputs, Tensor]:
    """A batch ready for more calls, and f at the network's own parameters there, [n, c].

    Networks that draw random numbers are refused: every call would be one of another function.
    """
    batch = f.prepare(inputs)
    with without_chance(f.module, f.device):
        return batch, f(f.params, batch)


def _points(
    model: nn.Module, params: State, output: Callable[[Any], Tensor] | None, precision: str
) -> tuple[Functional, Params]:
    f = functional(model, "all", output, precision)
    found = state_of(params, f.params, "params")
    if not found:
        raise InputError("params: no name in it is a parameter of the model")
    return f, {**f.params, **found}
