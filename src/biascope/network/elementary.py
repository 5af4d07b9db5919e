"""Functions of torch by elementary operations, for derivatives that torch takes wrongly of them, or not at all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """F.prelu of input [n, c, ...] with weight [1] or [c], by elementary operations."""
    slope = weight if weight.numel() == 1 else weight.view(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, slope * input)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ||v||, the norms over all but one dimension (-1: over all), by elementary operations."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """F.glu, by elementary operations."""
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)


def gates_of(input: Tensor, hidden: Tensor, cell: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The shares of input and state in a recurrent step, each [..., gates], from the weights and biases of a cell."""
    of_input, of_hidden, bias, hidden_bias = cell
    return F.linear(input, of_input, bias), F.linear(hidden, of_hidden, hidden_bias)


def rnn_tanh_cell(input: Tensor, hidden: Tensor, *cell: Any) -> Tensor:
    """torch.rnn_tanh_cell, by elementary operations."""
    a, b = gates_of(input, hidden, cell)
    return torch.tanh(a + b)


def rnn_relu_cell(input: Tensor, hidden: Tensor, *cell: Any) -> Tensor:
    """torch.rnn_relu_cell, by elementary operations."""
    a, b = gates_of(input, hidden, cell)
    return torch.relu(a + b)


def gru_cell(input: Tensor, hidden: Tensor, *cell: Any) -> Tensor:
    """torch.gru_cell, by elementary operations."""
    a, b = (part.chunk(3, -1) for part in gates_of(input, hidden, cell))
    reset, update = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
    new = torch.tanh(a[2] + reset * b[2])
    return new + update * (hidden - new)


def lstm_cell(input: Tensor, state: Sequence[Tensor], *cell: Any) -> tuple[Tensor, Tensor]:
    """torch.lstm_cell, by elementary operations."""
    a, b = gates_of(input, state[0], cell)
    enter, forget, new, leave = (a + b).chunk(4, -1)
    kept = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(kept), kept


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *more: Any,
) -> Tensor:
    """F.layer_norm, by elementary operations."""
    made = standardised(input, tuple(range(-len(normalized_shape), 0)), eps)
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *more: Any,
) -> Tensor:
    """F.instance_norm of input [n, c, ...], by elementary operations where an example is normalised by itself."""
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    made = standardised(input, tuple(range(2, input.dim())), eps)
    places = (-1, *[1] * (input.dim() - 2))
    made = made if weight is None else made * weight.view(places)
    return made if bias is None else made + bias.view(places)


def standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """x less its mean over some dimensions, over the root of its variance there plus eps."""
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
