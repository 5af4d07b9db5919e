"""How linear a training still is: three similarities with the start, all 1 for a network that has not moved.

sign similarity            share of ReLU units times examples that are on or off as at the start
tangent kernel alignment   Tr[K K0] / (||K|| ||K0||) of the uncentred tangent kernels, all outputs
representation alignment   the same of the Gram matrices r r^T of the input of the last linear layer
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from biascope.probes import View, ntk_alignment, representation_alignment, sign_similarity

NAMES = ("sign similarity", "tangent kernel alignment", "representation alignment")


class Linearity:
    """Compares networks with `net` as it is now, on the examples x [m, ...]: `Linearity(net, x)(trained)` is [3].

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> Linearity(net, torch.randn(5, 3))(net).round(decimals=6).tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.start = View.of(net, x)

    def __call__(self, net: nn.Module) -> Tensor:
        """[3]: signs, tangent kernel, representation; float64 on the CPU."""
        now = View(net, self.start.setup, init=self.start)
        found = (sign_similarity(now), ntk_alignment(now), representation_alignment(now)["init"])
        return torch.tensor(found, dtype=torch.float64)
