"""Stream the data through the network: chunks of examples and cotangents, and per block what its sums need.

One forward pass per chunk, then one backward pass per cotangent to the outputs of the layers (never to the weights).
Memory is bounded by the chunk; where everything fits in a part of the budget, the factors are kept, so that a second
pass (EKFAC's scalings) costs no network evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor

from biascope.curvature.families import Family
from biascope.curvature.finite import finite
from biascope.curvature.outputs import IGNORE
from biascope.errors import InputError
from biascope.functional import Functional
from biascope.inputs import Inputs, batch_size, batches, take, tensors_of
from biascope.layers import (
    Anatomy,
    Block,
    Factor,
    MatrixFactor,
    RowsFactor,
    StaleError,
    Tape,
    per_example_gradients,
    recorded,
)
from biascope.layers.blocks import Layout
from biascope.layers.record import Use
from biascope.layers.rows import all_gradients, use_rows
from biascope.layers.rules import Linear, MatrixRule
from biascope.memory import budget, parse_bytes

CHUNK_BYTES = {"cpu": 2**28, "cuda": 2**34}  # factors of one chunk; a CPU gains nothing from more
CACHE_BYTES = 2**24  # gradients of one chunk that a CPU likes to see again
FEW = 256  # examples per pass below which a processor is not busy
SMALL = 2**28  # bytes for which nobody asks how much memory is free: the question costs as much as a small layer
NARROW = 64  # outputs per example up to which they are kept to be looked at later
LATER = {"cpu": 1, "cuda": 32}  # chunks after which they are: a GPU that had to answer every time would stand still


InputFactors = dict[tuple[str, ...], MatrixFactor]
Early = Callable[[InputFactors], None]


@dataclass(frozen=True)
class Chunk:
    """Some examples and some cotangents: factors by the names of their block."""

    factors: dict[tuple[str, ...], Factor]
    n: int
    ks: range
    first: bool  # is what belongs to the inputs alone counted here? Once, whatever the cotangents
    heard: Tensor | None = None  # [n, positions of an output]: has it a label? None where all have one, or need none
    whole: bool = True  # would a position without a gradient here have none from the other cotangents either?

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
        max_memory: str | int | None = None,
        batch: int | None = None,
        first: tuple[Inputs, Tensor | None] | None = None,
    ) -> None:
        if isinstance(data, Iterable) and not isinstance(data, Tensor) and iter(data) is data:
            raise InputError(
                "data is a one-shot iterator; pass a list of batches or a DataLoader, which can be re-read"
            )
        self.f, self.found, self.data, self.family = f, found, data, family
        self.seed, self.batch = seed, batch
        self.max_memory = None if max_memory is None else parse_bytes(max_memory)
        self.n = 0
        self.copies = 1  # how much memory the caller takes per chunk, in units of the chunk's own
        self._only: tuple[Inputs, Tensor | None] | None = None  # data that is one batch: checked once
        pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor | Mapping)
        if pair or isinstance(data, Tensor | Mapping):
            self._only = first
        self._ignoring = False  # has the batch at hand positions without a label?
        self._seen: list[float] = []
        self._unread: list[tuple[int, Tensor]] = []  # first example, and outputs of the examples from there
        self._kept: list[Chunk] | None = None

    @cached_property
    def limit(self) -> int:
        """Bytes that may be used in all."""
        return budget(self.max_memory, self.f.device)

    @property
    def _room(self) -> int:
        """Bytes for one chunk."""
        return min(self.limit // 2, CHUNK_BYTES.get(self.f.device.type, 2**28))

    def _fits(self, need: int) -> bool:
        """Are so many bytes there for sure?"""
        return need <= SMALL and (self.max_memory is None or need <= self.max_memory // 2)

    def batches(self) -> Iterator[tuple[Inputs, Tensor | None, Tensor | None]]:
        """(prepared inputs, checked labels, draws) for every batch; the draws are the same in every pass."""
        generator = torch.Generator().manual_seed(self.seed) if self.family.random else None
        n = 0
        for i, (inputs, labels) in enumerate([self._only] if self._only else batches(self.data, "data")):
            b = batch_size(inputs)
            n += b
            self._same_order(i, inputs)
            y = self.family.check_labels(labels, b)
            self._ignoring = self.family.ignores(y)  # asked where the labels are, as a rule not on a GPU
            draws = None if generator is None else self.family.draw(generator, b)
            if draws is not None and draws.numel() < 2**20:  # now, while a GPU has nothing else to do
                draws = draws.to(self.f.device)
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

    def parts(self, vectors: int = 1) -> Iterator[tuple[Inputs, Tensor | None, Tensor | None, int]]:
        """`batches`, in parts whose forward and backward passes fit the budget: for products with the Jacobian.

        The last number says how many of the vectors to take at once.
        """
        room = self.limit // 2
        item, p = self.f.dtype.itemsize, self.f.num_params
        each = 4 * (self.found.activation_bytes + self.family.shape.total * item)
        for inputs, y, draws in self.batches():
            b = batch_size(inputs)
            most = min(b, self.batch or b)
            # every vector needs tangents, cotangents and a gradient of its own; rather fewer vectors than few examples
            group = max(1, min(vectors, room // (4 * p * item + 2 * each * min(most, FEW))))
            step = max(1, min(most, (room - group * 4 * p * item) // (each * (2 * group if group > 1 else 1))))
            if group > 1 and self.f.device.type == "cpu":
                step = min(step, 2 * FEW)  # the tangents of more would leave the cache
            for s in range(0, b, step):
                some = slice(s, min(s + step, b))
                labels = None if y is None else y[some]
                part = inputs if step >= b else take(inputs, some)
                yield part, labels, None if draws is None else draws[:, some], group

    def count(self) -> int:
        """Number of examples."""
        if not self.n:
            for _ in self.batches():
                pass
        return self.n

    def chunks(
        self, blocks: Sequence[Block], keep: bool = False, trust: bool = False, early: Early | None = None
    ) -> Iterator[Chunk]:
        """All chunks, with factors for these blocks; with `trust`, the caller asks `finite` at the end.

        `early` is called with the inputs of every chunk before its backward passes: a GPU has work while these are
        still being written down.
        """
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
                part = inputs if step >= b else take(inputs, piece)
                for chunk in self._examples(blocks, part, labels, some, group, start + s, early):
                    if kept is not None:
                        held += chunk.nbytes
                        kept = [*kept, chunk] if self._fits(held) or held <= self.limit - self._room else None
                    yield chunk
            start += b
        if not trust:
            self.refuse_nonfinite()
        self._kept = kept

    def finite(self, tensors: Sequence[Tensor]) -> list[bool]:
        """For each tensor, is every entry a number? But an error if an output since the last time was none.

        One question for all: a GPU that had to answer after every forward pass would stand still.
        """
        unread, self._unread = self._unread, []
        good = finite([*(z for _, z in unread), *tensors])
        if not all(good[: len(unread)]):
            start, z = unread[good.index(False)]
            bad = start + int((~torch.isfinite(z)).reshape(len(z), -1).any(1).nonzero()[0])
            raise InputError(f"{type(self.f.module).__name__} returned NaN or infinity for example {bad} of the data")
        return good[len(unread) :]

    def refuse_nonfinite(self) -> None:
        """Raise if an output since the last time was NaN or infinity."""
        if self._unread:
            self.finite([])

    def forget(self) -> None:
        """Free what was kept for a second pass."""
        self._kept = None

    def _sizes(self, blocks: Sequence[Block], b: int) -> tuple[int, int]:
        """Examples per forward pass and cotangents per group."""
        item = self.f.dtype.itemsize * self.copies
        inputs = sum(x.input_numel for x in blocks) * item + self.found.activation_bytes
        each = (
            sum(x.output_numel if x.kind == "matrix" else x.numel for x in blocks) * item
            + self.family.shape.total * item
        )
        group, step = self.family.width, min(b, self.batch or b)
        if not self._fits(step * (inputs + group * each)):
            group = max(1, min(group, (self._room - inputs) // max(1, each)))
            step = max(1, min(step, self._room // (inputs + group * each)))
        if self.f.device.type == "cpu":
            step = min(step, max(FEW, CACHE_BYTES // (group * each)))
        return ceil(b / ceil(b / step)), group  # parts of equal size

    def _examples(
        self,
        blocks: Sequence[Block],
        inputs: Inputs,
        y: Tensor | None,
        draws: Tensor | None,
        group: int,
        start: int,
        early: Early | None,
    ) -> Iterator[Chunk]:
        f, found = self.f, self.found
        tape = recorded(f, found, inputs)
        if not found.matches(tape):
            raise StaleError(
                f"{type(f.module).__name__} takes another path on the examples from {start} on than on the first ones "
                "(control flow that depends on the data or on their number); evaluate such examples in separate calls, "
                'or use representation="implicit", which needs no layers'
            )
        z = tape.rows.detach()
        if len(self._unread) >= LATER.get(f.device.type, 1):
            self.refuse_nonfinite()  # of the examples before
        self._unread.append((start, z if z.shape[1] <= NARROW else largest_magnitude(z)))
        if not self.family.tolerant:
            self.refuse_nonfinite()
        before = input_factors(found, tape, blocks)
        heard = y != IGNORE if self._ignoring and y is not None else None
        if heard is not None:
            early = None  # which inputs count is known after the backward pass
        if early is not None:
            early(before)
        width = self.family.width
        for k0 in range(0, width, group):
            ks = range(k0, min(k0 + group, width))
            cot = self.family.cotangents(z, y, draws, ks)
            factors = factors_of(f, found, tape, blocks, before, inputs, cot, ks.stop == width)
            whole = len(ks) == width or self.family.random  # draws are at all positions, exact roots at one each
            yield Chunk(factors, len(z), ks, k0 == 0 and early is None, heard, whole)


def largest_magnitude(z: Tensor) -> Tensor:
    """Of each row of z [n, c]: [n]; NaN and infinity stay what they are."""
    return z.abs().amax(1)


def is_plain(layout: Layout, use: Use) -> bool:
    """Are these the rows of a linear layer, examples first? Its rule takes them as they are."""
    return isinstance(use.rule, Linear) and layout.dim == 0 and layout.m == 1


def input_factors(found: Anatomy, tape: Tape, blocks: Sequence[Block]) -> InputFactors:
    """What a forward pass alone says about the matrix blocks: factors without gradients."""
    out, n = {}, tape.rows.shape[0]
    for b in blocks:
        if b.kind == "matrix":
            uses = [tape.uses[i] for i in b.uses]
            slots = [found.slots[i] for i in b.uses]
            rules = [u.rule for u in uses if isinstance(u.rule, MatrixRule)]
            saved = [
                u.input if is_plain(s.input, u) else s.input.example_major(u.input, n)
                for u, s in zip(uses, slots)
                if s is not None and s.input is not None and u.input is not None
            ]
            out[b.names] = MatrixFactor(b, rules, saved, [])
    return out


def factors_of(
    f: Functional,
    found: Anatomy,
    tape: Tape,
    blocks: Sequence[Block],
    before: InputFactors,
    inputs: Inputs,
    cot: Tensor,
    last: bool,
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
            plain = is_plain(slot.output, tape.uses[i])
            grads[i].append(g if plain else slot.output.example_major_each(g, n))
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
            out[b.names] = replace(before[b.names], grads=[stacked[i] for i in b.uses])
        else:
            out[b.names] = RowsFactor(b, raw[b.names[0]] if b.kind == "fallback" else rows[b.names])
    return out
