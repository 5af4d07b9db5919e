"""Stream the data through the network: chunks of examples and cotangents, and per block what its sums need.

One forward pass per chunk, then one backward pass per cotangent to the outputs of the layers (never to the weights).
Memory is bounded by the chunk; where everything fits in a part of the budget, the factors are kept, so that a second
pass (EKFAC's scalings) costs no network evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from biascope.curvature.families import Family
from biascope.errors import InputError, UnsupportedError
from biascope.functional import Functional, Inputs, batch_size, batches, take, tensors_of
from biascope.layers import (
    Anatomy,
    Block,
    Factor,
    MatrixFactor,
    RowsFactor,
    Tape,
    leaves,
    per_example_gradients,
    record,
)
from biascope.layers.rows import all_gradients, use_rows
from biascope.layers.rules import MatrixRule

CHUNK_BYTES = {"cpu": 2**28, "cuda": 2**34}  # factors of one chunk; a CPU gains nothing from more


@dataclass(frozen=True)
class Chunk:
    """Some examples and some cotangents: factors by the names of their block."""

    factors: dict[tuple[str, ...], Factor]
    n: int
    ks: range
    first: bool  # the first group of cotangents of these examples: what belongs to the inputs is counted here

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(f.nbytes for f in self.factors.values())


class Stream:
    """A network, its anatomy, data that can be read again, and a family."""

    def __init__(
        self,
        f: Functional,
        found: Anatomy,
        data: Any,
        family: Family,
        seed: int,
        limit: int,
        batch: int | None = None,
        first: tuple[Inputs, Tensor | None] | None = None,
    ) -> None:
        if isinstance(data, Iterable) and not isinstance(data, Tensor) and iter(data) is data:
            raise InputError(
                "data is a one-shot iterator; pass a list of batches or a DataLoader, which can be re-read"
            )
        self.f, self.found, self.data, self.family = f, found, data, family
        self.seed, self.limit, self.batch = seed, limit, batch
        self.n = 0
        self._only: tuple[Inputs, Tensor | None] | None = None  # data that is one batch: checked once
        pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor | Mapping)
        if pair or isinstance(data, Tensor | Mapping):
            self._only = first
        self._room = min(limit // 2, CHUNK_BYTES.get(f.device.type, 2**28))  # for one chunk
        self._seen: list[float] = []
        self._kept: list[Chunk] | None = None

    def batches(self) -> Iterator[tuple[Inputs, Tensor | None, Tensor | None]]:
        """(prepared inputs, checked labels, draws) for every batch; the draws are the same in every pass."""
        generator = torch.Generator().manual_seed(self.seed)
        n = 0
        for i, (inputs, labels) in enumerate([self._only] if self._only else batches(self.data, "data")):
            b = batch_size(inputs)
            n += b
            self._same_order(i, inputs)
            y = self.family.check_labels(labels, b)
            draws = self.family.draw(generator, b)
            yield self.f.prepare(inputs), None if y is None else y.to(self.f.device), draws
        if self.n not in (0, n):
            raise InputError(f"data gave {self.n} examples in the first pass and {n} in this one")
        self.n = n

    def _same_order(self, i: int, inputs: Inputs) -> None:
        """Sampled labels belong to their examples: a loader that shuffles would give them to others."""
        if not self.family.random or self._only:
            return
        mark = float(sum(t.flatten()[:: max(1, t.numel() // 4096)].double().sum() for t in tensors_of(inputs)))
        if i >= len(self._seen):
            self._seen.append(mark)
        elif self._seen[i] != mark:
            raise InputError(f"batch {i} of the data changed between passes: sampled labels need shuffle=False")

    def parts(self) -> Iterator[tuple[Inputs, Tensor | None, Tensor | None]]:
        """`batches`, in parts whose forward and backward passes fit the budget: for products with the Jacobian."""
        each = 4 * (self.found.activation_bytes + self.family.shape.total * self.f.dtype.itemsize)
        for inputs, y, draws in self.batches():
            b = batch_size(inputs)
            step = max(1, min(b, self.batch or b, self.limit // (2 * each)))
            for s in range(0, b, step):
                some = slice(s, min(s + step, b))
                labels = None if y is None else y[some]
                yield take(inputs, some), labels, None if draws is None else draws[:, some]

    def count(self) -> int:
        """Number of examples."""
        if not self.n:
            for _ in self.batches():
                pass
        return self.n

    def chunks(self, blocks: Sequence[Block], keep: bool = False) -> Iterator[Chunk]:
        """All chunks, with factors for these blocks."""
        names = {b.names for b in blocks}
        if self._kept is not None and (not self._kept or names <= set(self._kept[0].factors)):
            yield from self._kept
            return
        kept: list[Chunk] | None = [] if keep else None
        held = 0
        start = 0
        for inputs, y, draws in self.batches():
            b = batch_size(inputs)
            step, group = self._sizes(blocks, b)
            for s in range(0, b, step):
                piece = slice(s, min(s + step, b))
                some = None if draws is None else draws[:, piece]
                labels = None if y is None else y[piece]
                for chunk in self._examples(blocks, take(inputs, piece), labels, some, group, start + s):
                    held += chunk.nbytes
                    if kept is not None:
                        kept = None if held > self.limit - self._room else [*kept, chunk]
                    yield chunk
            start += b
        self._kept = kept

    def forget(self) -> None:
        """Free what was kept for a second pass."""
        self._kept = None

    def _sizes(self, blocks: Sequence[Block], b: int) -> tuple[int, int]:
        """Examples per forward pass and cotangents per group."""
        item = self.f.dtype.itemsize
        inputs = sum(x.input_numel for x in blocks) * item + self.found.activation_bytes
        each = (
            sum(x.output_numel if x.kind == "matrix" else x.numel for x in blocks) * item
            + self.family.shape.total * item
        )
        group = max(1, min(self.family.width, (self._room - inputs) // max(1, each)))
        step = max(1, min(b, self.batch or b, self._room // (inputs + group * each)))
        return step, group

    def _examples(
        self, blocks: Sequence[Block], inputs: Inputs, y: Tensor | None, draws: Tensor | None, group: int, start: int
    ) -> Iterator[Chunk]:
        f, found = self.f, self.found
        tape = record(f, leaves(f), inputs)
        who = type(f.module).__name__
        if not found.matches(tape):
            raise UnsupportedError(
                f"{who} takes another path on the examples from {start} on than on the first ones (control flow that "
                "depends on the data); evaluate such examples in separate calls"
            )
        z = tape.rows.detach()
        if not bool(torch.isfinite(z).all()):
            bad = start + int((~torch.isfinite(z).all(1)).nonzero()[0])
            raise InputError(f"{who} returned NaN or infinity for example {bad} of the data")
        width = self.family.width
        for k0 in range(0, width, group):
            ks = range(k0, min(k0 + group, width))
            cot = self.family.cotangents(z, y, draws, ks)
            yield Chunk(factors_of(f, found, tape, blocks, inputs, cot, ks.stop == width), len(z), ks, k0 == 0)


def factors_of(
    f: Functional, found: Anatomy, tape: Tape, blocks: Sequence[Block], inputs: Inputs, cot: Tensor, last: bool
) -> dict[tuple[str, ...], Factor]:
    """Factors of a recorded pass for cotangents [k, n, c]; the graph is freed after the `last` ones."""
    k, n = cot.shape[:2]
    matrix = {i for b in blocks if b.kind == "matrix" for i in b.uses}
    small = [b for b in blocks if b.kind == "rows"]
    grads: dict[int, list[Tensor]] = {i: [] for i in matrix}
    rows = {b.names: torch.zeros(k, n, b.numel, dtype=f.dtype, device=f.device) for b in small}
    j = 0
    for flow in all_gradients(tape, found, cot, last) if matrix or any(b.uses for b in small) else []:
        size = next((len(g) for g in flow if g is not None), 1)
        for i in matrix:
            slot, g = found.slots[i], flow[i]
            assert slot is not None
            if g is None:
                g = torch.zeros(size, *tape.uses[i].out_shape, dtype=f.dtype, device=f.device)
            grads[i].append(slot.output.example_major_each(g, n))
        for b in small:
            for i in b.uses:
                g = flow[i]
                for role, owner in tape.uses[i].roles.items():
                    if owner == b.names[0] and g is not None:
                        rows[b.names][j : j + size] += use_rows(tape, found, i, role, g)
        j += size
    stacked = {i: torch.cat(g) if len(g) > 1 else g[0] for i, g in grads.items()}
    out: dict[tuple[str, ...], Factor] = {}
    fallback = [b.names[0] for b in blocks if b.kind == "fallback"]
    raw = per_example_gradients(f, fallback, inputs, cot) if fallback else {}
    for b in blocks:
        if b.kind == "matrix":
            uses = [tape.uses[i] for i in b.uses]
            slots = [found.slots[i] for i in b.uses]
            rules = [u.rule for u in uses if isinstance(u.rule, MatrixRule)]
            saved = [
                s.input.example_major(u.input, n)
                for u, s in zip(uses, slots)
                if s is not None and s.input is not None and u.input is not None
            ]
            out[b.names] = MatrixFactor(b, rules, saved, [stacked[i] for i in b.uses])
        else:
            out[b.names] = RowsFactor(b, raw[b.names[0]] if b.kind == "fallback" else rows[b.names])
    return out
