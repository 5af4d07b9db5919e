"""How weights are drawn: as torch does, or as the JAX libraries do with which the thesis was computed.

Weights of a JAX layer with k inputs come from a normal distribution cut off at two of its deviations, 1 / sqrt(k) in
haiku; in flax the weights' own deviation is 1 / sqrt(k). Kernels of networks drawn by torch (a third of the variance)
are one to two orders of magnitude smaller, and their linearisations learn as much slower.
"""

import math
from typing import Annotated, Literal

import torch
from torch import nn

from biascope import nets

Init = Annotated[Literal["torch", "lecun", "haiku"], "weights: torch's default, flax's (LeCun normal), haiku's"]
CUT = 0.87962566103423978  # deviation of a standard normal cut off at +-2


def redraw(net: nn.Module, init: Init, seed: int | None = None) -> nn.Module:
    """Draw the weights of a network again, in place; with a seed, the global random state is left as it was.

    A SIREN keeps its weights, which its own rule draws everywhere, and gets zero biases in the layers that are trained.
    The last BatchNorm of a residual block begins at scale 0, as in flax's ResNet.
    """
    if init == "torch":
        return net
    if seed is not None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return redraw(net, init)
    for name, module in net.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            if not isinstance(net, nets.SIREN):
                std = 1 / math.sqrt(module.weight[0].numel()) / (CUT if init == "lecun" else 1)
                nn.init.trunc_normal_(module.weight, 0.0, std, -2 * std, 2 * std)
            if module.bias is not None and module.bias.requires_grad:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d) and name.endswith("norm2"):
            nn.init.zeros_(module.weight)
    return net
