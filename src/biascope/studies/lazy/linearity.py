"""How linear a training still is: three similarities with the start, all 1 for a network that has not moved.

signs            share of ReLU units times examples that are on or off as at the start
tangent kernel   alignment Tr[K K0] / (||K|| ||K0||) of the uncentred tangent kernels, all outputs
representation   the same alignment of the Gram matrices r r^T of the input of the last linear layer (the public code
                 uses r^T r instead)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from biascope.errors import InputError
from biascope.kernels import ntk

NAMES = ("sign similarity", "tangent kernel alignment", "representation alignment")


class Linearity:
    """Compares networks with `net` as it is now, on the examples x [m, ...]: `Linearity(net, x)(trained)` is [3].

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> Linearity(net, torch.randn(5, 3))(net).round(decimals=6).tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.x = x
        self.signs, self.gram = self._activity(net)
        self.kernel = ntk(net, x)

    def __call__(self, net: nn.Module) -> Tensor:
        """[3]: signs, tangent kernel, representation; float64 on the CPU."""
        signs, gram = self._activity(net)
        same = sum(int((a == b).sum()) for a, b in zip(signs, self.signs))
        units = sum(a.numel() for a in signs)
        aligned = (gram * self.gram).sum() / (gram.norm() * self.gram.norm())
        kernel = ntk(net, self.x).alignment(self.kernel, centered=False)
        return torch.tensor([same / units, kernel, float(aligned)], dtype=torch.float64)

    @torch.no_grad()
    def _activity(self, net: nn.Module) -> tuple[list[Tensor], Tensor]:
        """Which units are on, per ReLU, and the Gram matrix [m, m] of the representation."""
        with watch(net) as seen:
            net(self.x)
        return seen.signs, seen.gram


class _Seen:
    def __init__(self) -> None:
        self.signs: list[Tensor] = []
        self.gram = torch.empty(0)


@contextmanager
def watch(net: nn.Module) -> Iterator[_Seen]:
    """See the ReLUs and the input of the last linear layer in the next forward pass; leaves the module as it was."""
    relus = [m for m in net.modules() if isinstance(m, nn.ReLU)]
    linear = [m for m in net.modules() if isinstance(m, nn.Linear)]
    if not relus or not linear:
        raise InputError(f"{type(net).__name__} needs a ReLU and a linear layer to be compared with its start")
    seen = _Seen()

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen.signs.append(out > 0)

    def represent(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        r = args[0].flatten(1).double()
        seen.gram = r @ r.T

    handles = [m.register_forward_hook(note) for m in relus] + [linear[-1].register_forward_hook(represent)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
