"""The pass of a metric: chunks of examples and of a likelihood's cotangents, and per block what its sums need.

One forward pass per chunk of examples, then one backward pass per cotangent (`network.stream.Forward`). Memory is
bounded by the chunk; where everything fits in a part of the budget, the factors are kept, so that a second pass
(EKFAC's scalings) costs no network evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

import torch
from torch import Tensor

from biascope.curvature.families import IGNORE, Family
from biascope.curvature.tokens import token_labels
from biascope.network.layers.blocks import Anatomy, Block, Factor, MatrixFactor
from biascope.network.stream import Forward, Names, Part, Stream
from biascope.support.errors import InputError
from biascope.support.inputs import finite
from biascope.support.memory import budget

CHUNK_BYTES = {"cpu": 2**28, "cuda": 2**34}  # factors of one chunk; a CPU gains nothing from more
CACHE_BYTES = 2**24  # gradients of one chunk that a CPU likes to see again
FEW, ROWS = 256, 1024  # examples per pass, and their positions, below which a processor is not busy
SMALL = 2**28  # bytes for which free memory is not measured: measuring takes as long as a small layer
NARROW = 64  # outputs per example up to which they are kept to be looked at later
LATER = {"cpu": 1, "cuda": 32}  # chunks after which they are: a GPU that had to answer every time would stand still

# how the passes of this thread choose their sizes, for those who want to know of more data than they give
SIZES: ContextVar[list[Callable[[int], tuple[int, int]]] | None] = ContextVar("sizes", default=None)

InputFactors = dict[Names, MatrixFactor]


@dataclass(frozen=True)
class Chunk:
    """Some examples and some cotangents: factors by the names of their block."""

    factors: dict[Names, Factor]
    n: int
    ks: range
    with_inputs: bool  # is what belongs to the inputs alone to be added with this chunk?
    has_label: Tensor | None = None  # [n, positions of an output]; None where all have one, or need none
    whole: bool = True  # would a position without a gradient here have none from the other cotangents either?

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(f.nbytes for f in self.factors.values())

    def matrix(self, names: Names) -> MatrixFactor:
        """The factor of a matrix block."""
        factor = self.factors[names]
        assert isinstance(factor, MatrixFactor)
        return factor


@dataclass(frozen=True)
class Step:
    """One forward pass: what its inputs alone say, and the chunks that its backward passes give, to be used up.

    A GPU has work on the inputs while the backward passes are still being written down. `inputs` is None where they are
    added with a chunk: which of them count may be known only after the backward passes.
    """

    inputs: InputFactors | None
    chunks: Iterator[Chunk]


@dataclass(frozen=True)
class Labelled:
    """Examples prepared for the network, their checked labels, and what was drawn for them."""

    start: int
    part: Part
    y: Tensor | None
    draws: Tensor | None
    most: int = 0  # examples that any of the processes has of this batch
    idle: bool = False  # not to be counted: the process has none

    def take(self, some: slice) -> Labelled:
        """Some of the examples."""
        y = None if self.y is None else self.y[some]
        draws = None if self.draws is None else self.draws[:, some]
        return replace(self, start=self.start + some.start, part=self.part.take(some), y=y, draws=draws)


class Pass:
    """A stream of data, the anatomy of its network, and a family whose cotangents are pulled back."""

    def __init__(
        self, stream: Stream, found: Anatomy, family: Family, seed: int = 0, max_memory: int | None = None
    ) -> None:
        self.f, self.found, self.family = stream.f, found, family
        self.stream = stream.repeated() if family.random else stream
        self.team = stream.cut.team
        self.seed, self.max_memory = seed, max_memory
        self.reserved = 0  # bytes that the metric itself takes
        self.errors: dict[Names, dict[str, float | None]] = {}  # of factors that were reduced for lack of memory
        if stream.lockstep:
            self.limit  # noqa: B018  # asked by all processes at once
        self.copies = 1  # how much memory the caller takes per chunk, in units of the chunk's own
        self._unread: list[tuple[int, Tensor]] = []  # first example, and outputs of the examples from there
        self.kept: list[Chunk] | None = None  # of a finished pass, for the next; the caller frees them
        self._keeping: list[Chunk] | None = None  # of this one
        self._held = 0  # bytes
        self._ignoring = False  # has the batch at hand positions without a label?

    @cached_property
    def limit(self) -> int:
        """Bytes that may be used in all."""
        own = budget(self.max_memory, self.f.device)
        return min(self.team.gather(own)) if self.stream.lockstep else own

    @property
    def _room(self) -> int:
        """Bytes for one chunk."""
        return min((self.limit - self.reserved) // 2, CHUNK_BYTES.get(self.f.device.type, 2**28))

    def _fits(self, need: int) -> bool:
        """Are so many bytes there for sure?"""
        return need <= SMALL and (self.max_memory is None or need <= (self.max_memory - self.reserved) // 2)

    def batches(self) -> Iterator[Labelled]:
        """Every batch, or this process's share of it, with labels and draws; the draws are the same in every pass."""
        generator = torch.Generator().manual_seed(self.seed) if self.family.random else None
        labelled = idle = False
        for i, batch in enumerate(self.stream.batches()):
            b = batch.at.stop - batch.at.start
            labels = batch.labels if self.family.shape.positions == 1 else token_labels(batch, self.family)
            y = self.family.check_labels(labels, b)
            draws = None if generator is None else self.family.draw(generator, b)
            # asked where the labels are, as a rule not on a GPU
            self._ignoring = y is not None and self.family.ignores(y)
            labelled = labelled or y is None or not self._ignoring or bool(torch.any(y != IGNORE))
            if self.team.size > 1:  # labels are checked, and drawn, as one process does it
                some = self.stream.share(i, batch.at)
                idle = some.stop == some.start
                if idle and not self.stream.lockstep:
                    continue
                some = slice(0, 1) if idle else some
                batch = batch.take(some)
                y, draws = None if y is None else y[some], None if draws is None else draws[:, some]
            if draws is not None and draws.numel() < 2**20:  # now, while a GPU has nothing else to do
                draws = draws.to(self.f.device)
            part = replace(batch, inputs=self.f.prepare(batch.inputs))
            y = None if y is None else y.to(self.f.device)
            yield Labelled(batch.at.start, part, y, draws, ceil(b / self.team.size), idle)
        if not labelled and self.family.shape.positions > 1:
            raise InputError("no position of the data has a label: all are -100, or masked as padding")

    def count(self) -> int:
        """Number of examples, for which the data is read once, and its labels checked, if it never was."""
        if not self.stream.n:
            for _ in self.batches():
                pass
        return self.stream.n

    def parts(self, vectors: int = 1) -> Iterator[tuple[Labelled, int]]:
        """Batches in parts whose forward and backward passes fit the budget: for products with the Jacobian.

        The number says how many of the vectors to take at once.
        """
        room = self.limit // 2
        item, p = self.f.dtype.itemsize, self.f.num_params
        each = 4 * (self.found.activation_bytes + self.family.shape.total * item)
        for batch in self.batches():
            b = batch.part.at.stop - batch.part.at.start
            most = min(b, self.stream.cut.batch_size or b)
            # every vector needs tangents, cotangents and a gradient of its own; rather fewer vectors than few examples
            group = max(1, min(vectors, room // (4 * p * item + 2 * each * min(most, FEW))))
            step = max(1, min(most, (room - group * 4 * p * item) // (each * (2 * group if group > 1 else 1))))
            if group > 1 and self.f.device.type == "cpu":
                step = min(step, 2 * FEW)  # the tangents of more would leave the cache
            for s in range(0, b, step):
                yield batch.take(slice(s, min(s + step, b))), group

    def steps(self, blocks: Sequence[Block], keep: bool = False, check: bool = True) -> Iterator[Step]:
        """All forward passes, with factors for these blocks; without `check`, the caller asks `finite` at the end."""
        names = {b.names for b in blocks}
        if self.kept is not None and (not self.kept or names <= set(self.kept[0].factors)):
            yield Step(None, iter(self.kept))
            return
        self._keeping, self._held = [] if keep else None, 0
        for batch in self.batches():
            b = batch.part.at.stop - batch.part.at.start
            step, group = self._sizes(blocks, b if not self.stream.lockstep else batch.most)
            parts: Iterable[Labelled] = [batch]
            if self.stream.lockstep:
                parts = self._cut(batch, step)
            elif step < b:
                parts = (batch.take(slice(s, min(s + step, b))) for s in range(0, b, step))
            for part in parts:
                forward = Forward(self.f, self.found, blocks, part.part.inputs, part.start)
                self.look(part.start, forward.rows)
                has_label = part.y != IGNORE if self._ignoring and part.y is not None else None
                early = None if has_label is not None else forward.inputs
                if part.idle:
                    for _ in self._chunks(forward, part, has_label, group):
                        pass
                    continue
                yield Step(early, self._chunks(forward, part, has_label, group))
                del forward, early
        if check:
            self.finite()
        if keep and self.stream.lockstep and not all(self.team.gather(self._keeping is not None)):
            self._keeping = None
        self.kept, self._keeping = self._keeping, None

    @staticmethod
    def _cut(batch: Labelled, step: int) -> Iterator[Labelled]:
        """As many parts as those of the process with most examples, some of them idle."""
        b, count = batch.part.at.stop - batch.part.at.start, ceil(batch.most / step)
        for i in range(count):
            some = slice(i * b // count, (i + 1) * b // count)
            if batch.idle or some.stop == some.start:
                yield replace(batch.take(slice(0, 1)), idle=True)
            else:
                yield batch.take(some)

    def chunks(self, blocks: Sequence[Block]) -> Iterator[Chunk]:
        """All chunks, for sums that need no inputs by themselves."""
        for step in self.steps(blocks):
            yield from step.chunks

    def _chunks(self, forward: Forward, part: Labelled, has_label: Tensor | None, group: int) -> Iterator[Chunk]:
        width, n = self.family.width, len(forward.rows)
        for k0 in range(0, width, group):
            ks = range(k0, min(k0 + group, width))
            cotangents = self.family.cotangents(forward.rows, part.y, part.draws, ks)
            factors = forward.factors(cotangents, ks.stop == width)
            whole = len(ks) == width or self.family.random  # draws are at all positions, exact roots at one each
            chunk = Chunk(factors, n, ks, k0 == 0 and has_label is not None, has_label, whole)
            if self._keeping is not None and not part.idle:
                self._held += chunk.nbytes
                fits = self._fits(self._held) or self._held <= self.limit - self.reserved - self._room
                self._keeping = [*self._keeping, chunk] if fits else None
            yield chunk

    def look(self, start: int, z: Tensor) -> None:
        """Remember the outputs of some examples, and look at earlier ones now and then."""
        if len(self._unread) >= LATER.get(self.f.device.type, 1):
            self.finite()
        self._unread.append((start, z if z.shape[1] <= NARROW else z.mean(1)))
        if not self.family.tolerant:
            self.finite()

    def finite(self, tensors: Sequence[Tensor] = ()) -> list[bool]:
        """For each tensor, is every entry finite? But an error if an output since the last time was not.

        One question for all: a GPU that had to answer after every forward pass would stand still.
        """
        unread, self._unread = self._unread, []
        good = finite([*(z for _, z in unread), *tensors])
        if not all(good[: len(unread)]):
            start, z = unread[good.index(False)]
            bad = start + int((~torch.isfinite(z)).reshape(len(z), -1).any(1).nonzero()[0])
            raise InputError(f"{type(self.f.module).__name__} returned NaN or infinity for example {bad} of the data")
        return good[len(unread) :]

    def least(self, blocks: Sequence[Block]) -> int:
        """Bytes for the passes over one example: activations, and its outputs and cotangents with a copy of each."""
        item = self.f.dtype.itemsize * self.copies
        numbers = sum(x.input_numel + x.output_numel if x.kind == "matrix" else x.numel for x in blocks)
        return self.found.activation_bytes + item * (numbers + 4 * self.family.shape.total)

    def _sizes(self, blocks: Sequence[Block], b: int) -> tuple[int, int]:
        """Examples per forward pass and cotangents per group."""
        item = self.f.dtype.itemsize * self.copies
        inputs = sum(x.input_numel for x in blocks) * item + self.found.activation_bytes
        each = (
            sum(x.output_numel if x.kind == "matrix" else x.numel for x in blocks) * item
            + self.family.shape.total * item
        )
        group, step = self.family.width, min(b, self.stream.cut.batch_size or b)
        if not self._fits(step * (inputs + group * each)):
            group = max(1, min(group, (self._room - inputs) // max(1, each)))
            step = max(1, min(step, self._room // (inputs + group * each)))
        if self.f.device.type == "cpu":
            step = min(step, max(1, min(FEW, ROWS // self.family.shape.positions), CACHE_BYTES // (group * each)))
        if (seen := SIZES.get()) is not None:
            seen.append(partial(self._sizes, blocks))
        return ceil(b / ceil(b / step)), group  # parts of equal size
