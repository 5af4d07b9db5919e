"""The affine maps of all BatchNorm layers of a network in eval mode, and their tangents, from a few operations.

A layer by itself would need seven operations on small vectors, which cost a GPU as much time as the layer's own work.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from biascope.network.functional import Params


class NormMap(NamedTuple):
    """y = scale x + shift[0], dy = scale dx + scale_tangent x + shift[1]: [c, 1, 1], [c, 1, 1] and [2, 1, c, 1, 1]."""

    scale: Tensor
    scale_tangent: Tensor
    shift: Tensor
    moves: bool  # else scale_tangent is zero


Key = tuple[int, int, int, int, float]


def norm_key(mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Key:
    """What the arguments of BatchNorm are recognised by: where they are stored."""
    weight_at, bias_at = (0 if t is None else t.data_ptr() for t in (weight, bias))
    return mean.data_ptr(), var.data_ptr(), weight_at, bias_at, eps


class Norms:
    """The BatchNorm layers of a network that keep statistics, at a fixed state {name: tensor} of it.

    Left out are layers whose tensors are computed (parametrised), and layers on another device or in another precision
    than the first one.
    """

    def __init__(self, module: nn.Module, state: Params) -> None:
        names: dict[int, str | None] = {id(t): k for k, t in [*module.named_parameters(), *module.named_buffers()]}
        names[id(None)] = None
        self.weights: list[str | None] = []
        self.biases: list[str | None] = []
        self.keys: list[Key] = []
        found: list[tuple[Tensor, ...]] = []
        for m in module.modules():
            if not isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                continue
            own = [names.get(id(t), "computed") for t in (m.running_mean, m.running_var, m.weight, m.bias)]
            if own[0] is None or own[1] is None or "computed" in own:
                continue
            mean, var = state[own[0]], state[own[1]]
            weight, bias = (None if k is None else state[k] for k in own[2:])
            if found and (mean.device, mean.dtype) != (found[0][0].device, found[0][0].dtype):
                continue
            unit = (var + m.eps).rsqrt()
            scale = unit if weight is None else weight * unit
            shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
            found.append((mean, unit, scale, shift))
            self.keys.append(norm_key(mean, var, weight, bias, m.eps))
            self.weights.append(own[2])
            self.biases.append(own[3])
        self.widths = [len(row[0]) for row in found]
        if found:
            self.mean, self.unit, scale, self.shift = (torch.cat(column).detach() for column in zip(*found))
            self.scales = self._split(scale.view(-1, 1, 1))
            self.zeros = torch.zeros_like(scale)

    def maps(self, v: Mapping[str, Tensor]) -> dict[Key, NormMap]:
        """The maps along a tangent `v` {name: tensor}, by `norm_key`."""
        if not self.keys:
            return {}
        dscale = self._gathered(self.weights, v) * self.unit
        dshift = torch.addcmul(self._gathered(self.biases, v), self.mean, dscale, value=-1)
        shifts = self._split(torch.stack([self.shift, dshift]).view(2, 1, -1, 1, 1), 2)
        rows = zip(self.scales, self._split(dscale.view(-1, 1, 1)), shifts, [k in v for k in self.weights])
        return {key: NormMap(*row) for key, row in zip(self.keys, rows)}

    def _gathered(self, names: Iterable[str | None], v: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([self.zeros[:c] if k is None or k not in v else v[k] for k, c in zip(names, self.widths)])

    def _split(self, t: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        return tuple(t.split_with_sizes(self.widths, dim))
