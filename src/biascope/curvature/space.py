"""The parameter space a metric lives on: names and shapes in the model's order, flat vectors and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from biascope.arguments import check_tensor
from biascope.errors import InputError
from biascope.functional import Functional, Params


@dataclass(frozen=True)
class ParameterSpace:
    """Ordered parameters; a flat vector [p] is their row-major entries, one parameter after the other.

    Example:
        >>> space = ParameterSpace({"w": (2, 3), "b": (2,)}, torch.float32, torch.device("cpu"))
        >>> space.size, space.unflatten(torch.arange(8.0))["b"]
        (8, tensor([6., 7.]))
    """

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(f: Functional) -> ParameterSpace:
        """The differentiated parameters of a network."""
        return ParameterSpace({k: tuple(p.shape) for k, p in f.params.items()}, f.dtype, f.device)

    @cached_property
    def size(self) -> int:
        """Number of parameters, p."""
        return sum(prod(s) for s in self.shapes.values())

    @cached_property
    def ranges(self) -> dict[str, slice]:
        """Where each parameter lies in a flat vector."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            out[name] = slice(start, start + prod(shape))
            start += prod(shape)
        return out

    def numel(self, names: tuple[str, ...]) -> int:
        """Entries of some parameters."""
        return sum(prod(self.shapes[name]) for name in names)

    def flatten(self, v: Params) -> Tensor:
        """{name: tensor} to [p]; parameters left out count as zero."""
        if not isinstance(v, Mapping):
            raise InputError(f"expected {{name: tensor}}, got {type(v).__name__}")
        unknown = set(v) - set(self.shapes)
        if unknown:
            raise InputError(f"{sorted(unknown)[0]!r} is not a parameter of this metric; it has {list(self.shapes)}")
        out = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for name, t in v.items():
            if tuple(check_tensor(t, name).shape) != self.shapes[name]:
                raise InputError(f"'{name}' has shape {list(t.shape)}, the parameter {list(self.shapes[name])}")
            if t.device != self.device:
                raise InputError(f"'{name}' is on {t.device}, the metric on {self.device}: move it there first")
            out[self.ranges[name]] = t.detach().reshape(-1).to(self.dtype)
        return out

    def unflatten(self, v: Tensor) -> Params:
        """[p] to {name: tensor}, or [m, p] to {name: [m, *shape]}."""
        if check_tensor(v, "v").shape[-1:] != (self.size,):
            raise InputError(f"a vector [{self.size}] or rows [m, {self.size}] are needed, not shape {list(v.shape)}")
        lead = v.shape[:-1]
        return {name: v[..., self.ranges[name]].reshape((*lead, *shape)) for name, shape in self.shapes.items()}

    def take(self, names: tuple[str, ...], X: Tensor) -> Tensor:
        """Rows of X [p, k] that belong to some parameters, in the order of `names`."""
        parts = [X[self.ranges[name]] for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, names: tuple[str, ...], part: Tensor, X: Tensor) -> None:
        """Write what `take` reads."""
        start = 0
        for name in names:
            r = self.ranges[name]
            X[r] = part[start : start + r.stop - r.start]
            start += r.stop - r.start
