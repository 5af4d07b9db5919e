"""Slips of the hand with tangent models: refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope import tangent as room
from biascope.support.errors import InputError

X = torch.linspace(-1, 1, 18).reshape(6, 3).sin()


def net() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda state: bs.linearize(net(), state),
        lambda state: room.posthoc(net(), state),
        lambda state: room.linearized_prediction(net(), state, X),
        lambda state: room.taylor_residual(net(), state, X),
    ],
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": np.zeros(2)}, "'bias': expected a tensor, got ndarray"),
        ({"bias": None}, "'bias': expected a tensor, got NoneType"),
        ({"bias": torch.zeros(1)}, r"'bias' has shape \[1\], the model has \[2\]"),
    ],
)
def test_states(call: Callable[[Any], Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(dict(net().state_dict()) | change)


@pytest.mark.parametrize("x", [X[:, :2], X.T, X[0]])
def test_inputs_that_do_not_fit_are_explained(x: torch.Tensor) -> None:
    for call in (room.linearized_prediction, room.taylor_residual):
        with pytest.raises(InputError, match=r"cannot take inputs|the first dimension must be 3"):
            call(net(), net(), x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.numpy(), 0.1), "directions"),
        ((torch.ones(8), "0.1"), "eps"),
        ((torch.ones(7), 0.1), "p = 8 parameters"),
    ],
)
def test_perturbations(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        room.perturbation_response(net(), X, *arguments)


@pytest.mark.parametrize("bad", [None, "1", -1.0, float("nan"), float("inf")])
def test_rates_and_scales(bad: Any) -> None:
    with pytest.raises(InputError, match="lr"):
        room.lazy_lr(bad, 10.0)
    with pytest.raises(InputError, match="alpha"):
        room.lazy_lr(0.1, bad)
    with pytest.raises(InputError, match="alpha"):
        bs.lazy(net(), bad)
