"""Linear layers that pass gradients on at some positions only: those that a network reads behind its last attention."""

import torch
from torch import Tensor
from torch.nn import functional as F


def live_linear(x: Tensor, weight: Tensor, bias: Tensor | None, span: tuple[int, int] | None) -> Tensor:
    """F.linear of x [n, T, d]; the way back leaves out positions before and behind `span`, at which nothing arrives.

    That nothing did is for the caller to see (`MatrixFactor.narrowed`).
    """
    if span is None:
        return F.linear(x, weight, bias)
    start, stop = span
    still, live = F.linear(x.detach(), weight, bias), F.linear(x[:, start:stop], weight, bias)
    return torch.cat([still[:, :start], live, still[:, stop:]], 1)
