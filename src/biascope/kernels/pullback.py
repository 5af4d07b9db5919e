"""J^T u for many u at once, streamed over the data: one forward pass per batch, one backward pass per u.

What alignments, sketches of norms and rotations need of the kernel without forming it: u^T K w = <J^T u, J^T w>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.functional import Functional
from biascope.inputs import Inputs, batch_size, batches, map_inputs, shuffles, take
from biascope.layers import leaves

HELD = 1 << 30  # bytes of pulled-back vectors held at a time


@dataclass
class Stream:
    """Data that can be read again and again, a batch at a time."""

    f: Functional
    data: Any
    batch: int | None = None  # split larger batches
    sizes: list[int] = field(default_factory=list)
    outputs: int = 0
    first: Inputs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.data, Iterable) and iter(self.data) is self.data:
            raise InputError(
                "x is a one-shot iterator; pass a list of batches or a DataLoader, which can be read again"
            )
        if self.batch is not None and self.batch < 1:
            raise InputError(f"batch_size={self.batch}: at least 1 is needed")

    @property
    def shuffles(self) -> bool:
        """Does the loader give another order at every pass?"""
        return shuffles(self.data)

    @property
    def n(self) -> int:
        """Number of examples, known after the first pass."""
        return sum(self.sizes)

    def survey(self, see: Callable[[slice, Tensor | None], None] | None = None) -> Stream:
        """First pass, without the model: count the examples and show the labels to `see`."""
        self.sizes = []
        for s, inputs, labels in self.pieces():
            if self.first is None:
                self.first = map_inputs(inputs, lambda t: t[:1].clone())  # a view would keep the batch
                with torch.no_grad():
                    self.outputs = self.f(self.f.params, self.f.prepare(self.first)).shape[1]
            self.sizes.append(s.stop - s.start)
            if see is not None:
                see(s, labels)
        return self

    def pieces(self) -> Iterator[tuple[slice, Inputs, Tensor | None]]:
        """(position in the data, inputs, labels) of every piece."""
        start = 0
        for inputs, labels in batches(self.data):
            b = batch_size(inputs)
            if labels is not None and len(labels) != b:
                raise InputError(f"a batch of {b} examples from x comes with {len(labels)} labels")
            for s in range(0, b, self.batch or b):
                at = slice(s, min(s + (self.batch or b), b))
                yield slice(start + s, start + at.stop), take(inputs, at), None if labels is None else labels[at]
            start += b


def pull_back(stream: Stream, k: int, cotangents: Callable[[slice, Tensor | None], Iterable[Tensor]]) -> Tensor:
    """J^T u_j [k, p] in float64; `cotangents` gives u_j [b, c], j = 1..k, for a piece of the data and its labels."""
    f = stream.f
    total = torch.zeros(k, f.num_params, dtype=torch.float64, device=f.device)
    seen = 0
    for s, inputs, labels in stream.pieces():
        params = leaves(f)
        with torch.enable_grad():
            rows = f(params, f.prepare(inputs))
        if not bool(torch.isfinite(rows).all()):
            bad = s.start + int((~torch.isfinite(rows).all(1)).nonzero()[0])
            raise InputError(f"{type(f.module).__name__} returned NaN or infinity for example {bad}")
        for j, u in enumerate(cotangents(s, labels)):
            grads = torch.autograd.grad(
                rows,
                list(params.values()),
                u.to(rows),
                retain_graph=j < k - 1,
                allow_unused=True,
                materialize_grads=True,
            )
            total[j] += torch.cat([g.reshape(-1) for g in grads])
        seen = s.stop
    if seen != stream.n:
        raise InputError(f"x gave {stream.n} examples at the first pass and {seen} at a later one; it must not change")
    return total


def group_size(f: Functional, k: int) -> int:
    """How many pulled-back vectors fit in the memory set aside for them, at least 2."""
    return max(2, min(k, HELD // (8 * f.num_params)))


def layer_columns(f: Functional, layer_of: dict[str, str]) -> dict[str, Tensor]:
    """For every layer, the positions of its parameters in a flat vector [p]."""
    found: dict[str, list[Tensor]] = {}
    start = 0
    for name, q in f.params.items():
        found.setdefault(layer_of[name], []).append(torch.arange(start, start + q.numel(), device=f.device))
        start += q.numel()
    return {layer: torch.cat(parts) for layer, parts in found.items()}
