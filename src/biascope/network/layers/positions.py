"""Linear layers that pass gradients on at some positions only: those that a network reads behind its last attention."""

import torch
from torch import Tensor
from torch.nn import functional as F


def live_linear(x: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
    """F.linear of x [n, T, d]; the way back leaves out positions before `start` and from `stop` on.

    Nothing arrives there; that nothing did is for the caller to see (`MatrixFactor.narrowed`).
    """
    still, live = F.linear(x.detach(), weight, bias), F.linear(x[:, start:stop], weight, bias)
    return torch.cat([still[:, :start], live, still[:, stop:]], 1)
