"""The one pass: data run through a network for derivatives, as batches, then parts, then factors.

`Stream` reads the data and cuts it; `Forward` is one recorded forward pass over a part, from which the factors of
blocks follow for any cotangents by backward passes to the outputs of the layers, never to the weights. Kernels
(`collect`), metrics, Jacobian products, sketches and label alignment all take their derivatives from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from biascope.network.derivatives import RightGradients, writes_into_inputs
from biascope.network.functional import Functional, Params, as_tensor, explained
from biascope.network.layers.blocks import (
    Anatomy,
    Block,
    Factor,
    MatrixFactor,
    RowsFactor,
    StaleError,
    add_derived,
    all_gradients,
    leaves,
    use_rows,
)
from biascope.network.layers.fallback import per_example_gradients
from biascope.network.layers.pilot import pilot, taped
from biascope.network.layers.record import Tape, record
from biascope.network.layers.rules import MatrixRule
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import (
    Inputs,
    batch_size,
    batches,
    is_single,
    map_inputs,
    mark,
    read,
    readable_again,
    refuse_samplers,
    shuffles,
    take,
    tensors_of,
)
from biascope.support.processes import ALONE, Processes
from biascope.support.readers import pair_of

Names = tuple[str, ...]
MANY = 8  # anatomies kept per network
FIRST = 3  # examples by which a network is looked at
EACH = 64  # examples per process from which a batch is worth cutting


# ------------------------------------------------------------------------------------------------------- reading data


@dataclass(frozen=True)
class Cut:
    """How a pass cuts the data.

    The processes of a `team` are given the same data, and each runs its share through the network: of every batch, or
    every other batch where these are small (`Stream.share`). Sums over the shares are then to be added, and rows belong
    to the positions that each part names.
    """

    batch_size: int | None = None  # examples per forward pass at most; a batch at a time if None
    ordered: bool = False  # rows of the result belong to examples: a loader that shuffles is refused
    same: bool = False  # every pass must give the same examples, in the same order
    what: str = "x"  # the data's name in errors
    team: Processes = ALONE


@dataclass(frozen=True)
class Part:
    """Some examples: their places in the data, inputs as the network takes them, labels.

    `whole` is the place of the part that one process would have made, of which these are a share.
    """

    at: slice
    inputs: Inputs
    labels: Tensor | None
    whole: slice | None = None
    idle: bool = False  # not to be counted: the process has no share, and takes part as others need it
    keywords: bool = False  # did the labels come among the keyword arguments?

    def take(self, some: slice) -> Part:
        """Some of its examples."""
        if some.start == 0 and some.stop >= self.at.stop - self.at.start:
            return self
        at = slice(self.at.start + some.start, self.at.start + some.stop)
        labels = None if self.labels is None else self.labels[some]
        return replace(self, at=at, inputs=take(self.inputs, some), labels=labels)


class Stream:
    """Data that is run through a network, once or several times."""

    def __init__(self, f: Functional, data: Any, cut: Cut | None = None) -> None:
        self.f, self.cut = f, cut or Cut()
        self.lockstep = f.shards is not None  # all processes run the network equally often: none holds all of it
        if not isinstance(data, Tensor):
            data = read(data, f.certificate.arguments, self.cut.what)
        self.single = is_single(data)
        same, ordered = self.cut.same, self.cut.ordered
        self.data = data if self.single else readable_again(data, self.cut.what, ordered, same)
        self.n = 0  # examples; known after the first pass
        self.keywords = isinstance(data, Mapping)  # of the batch read last: did it hold its labels?
        self._first: tuple[Inputs, Tensor | None] | None = None
        self._only: tuple[Inputs, Tensor | None] | None = None
        if self.cut.team.size > 1:
            refuse_samplers(self.data, self.cut.what)
            self.cut.team.agree(f.mark(), "the ranks have different networks (checksums of the parameters)")

    def through(self, f: Functional) -> Stream:
        """The same data, as far as it was read, through another function."""
        other = copy(self)
        other.f = f
        return other

    def repeated(self) -> Stream:
        """The same data, whose passes are compared with each other: for labels drawn by position."""
        other = copy(self)
        other.data = readable_again(self.data, self.cut.what, ordered=False)
        return other

    @property
    def shuffles(self) -> bool:
        """Does the loader give another order at every pass?"""
        return shuffles(self.data)

    @cached_property
    def outputs(self) -> int:
        """Number of outputs, c, seen on one example."""
        with torch.no_grad():
            return self.f(self.f.params, self.f.prepare(take(self.first[0], slice(0, 1)))).shape[1]

    @property
    def first(self) -> tuple[Inputs, Tensor | None]:
        """Inputs and labels of the first examples."""
        if self._first is None:
            next(iter(self.batches()))
        assert self._first is not None
        return self._first

    def count(self) -> int:
        """Number of examples, for which the data is read once, without the network, if it never was."""
        if not self.n:
            for _ in self.batches():
                pass
        return self.n

    def batches(self) -> Iterator[Part]:
        """The batches as they come, inputs and labels not yet prepared."""
        start, marks, team = 0, 0, self.cut.team
        several = not self.single and isinstance(self.data, Iterable)
        data = self._noted() if several else self.data
        for inputs, labels in (
            batches(data, self.cut.what, self.f.certificate.arguments) if self._only is None else [self._only]
        ):
            b = batch_size(inputs)
            if self._first is None and self.single:
                self._first = self._only = (inputs, labels)  # checked once
            elif self._first is None:  # a copy of a few examples: a view would keep the batch
                few = map_inputs(inputs, lambda t: t[:FIRST].clone())
                self._first = (few, None if labels is None else labels[:FIRST])
            if team.size > 1 and not self.n:
                marks = mark(labels, mark(inputs, marks))
            yield Part(slice(start, start + b), inputs, labels, keywords=self.keywords)
            start += b
        if self.n not in (0, start):
            raise InputError(
                f"{self.cut.what} gave {self.n} examples at the first pass and {start} at a later one; it must not "
                "change"
            )
        if team.size > 1 and not self.n:
            same = f"every rank must be given the same {self.cut.what}, all of it (number of examples, checksum)"
            team.agree((start, marks), same)
        self.n = start

    def _noted(self) -> Iterator[Any]:
        """The batches, with a note of what kind each is."""
        for item in self.data:
            self.keywords = isinstance(item, Mapping) and pair_of(item, self.f.certificate.arguments) is None
            yield item

    def share(self, i: int, at: slice) -> slice:
        """This process's share of the i-th of the batches or parts, which may be empty; counted from its first example.

        Whole batches are dealt out where they are small: half a batch takes longer than half of the time.
        """
        team, b = self.cut.team, at.stop - at.start
        if team.size == 1:
            return slice(0, b)
        team.check()
        if self.lockstep or b >= EACH * team.size or (self.single and self.cut.batch_size is None):
            return team.share(b)
        return slice(0, b if i % team.size == team.rank else 0)

    def pieces(self) -> Iterator[Part]:
        """Parts of at most `batch_size` examples, not yet prepared, those of all processes."""
        for batch in self.batches():
            b = batch.at.stop - batch.at.start
            step = self.cut.batch_size or b
            for s in range(0, b, step):
                if batch.labels is not None and len(batch.labels) != b:
                    given = len(batch.labels)
                    raise InputError(f"a batch of {b} examples from {self.cut.what} comes with {given} labels")
                yield batch.take(slice(s, min(s + step, b)))

    def parts(self) -> Iterator[Part]:
        """Parts of at most `batch_size` examples, prepared for the network; of each, this process's share."""
        for i, part in enumerate(self.pieces()):
            some = self.share(i, part.at)
            idle = some.stop == some.start
            if not idle or self.lockstep:
                mine = part.take(slice(0, 1) if idle else some)
                yield replace(mine, inputs=self.f.prepare(mine.inputs), whole=part.at, idle=idle)


# -------------------------------------------------------------------------------------------- one recorded forward pass


def anatomy(f: Functional, inputs: Inputs) -> Anatomy:
    """The blocks of a network, found by a pilot on the first examples, once per structure and input shape."""
    known = f.certificate.anatomies
    key = (
        tuple(inputs) if isinstance(inputs, dict) else (),  # other keywords may take another path, or do not exist
        tuple([(t.shape[1:], t.dtype) for t in tensors_of(inputs)]),
        f.dtype,
        f.output,
    )
    found: Anatomy | None = known.get(key)
    if found is None:
        if len(known) > MANY:
            known.clear()
        found = pilot(f, inputs)
        odd = [b for b in found.blocks if b.kind == "fallback"] if f.shards is not None else []
        if odd:
            raise UnsupportedError(
                f"parameter {odd[0].names[0]!r} is {odd[0].reason}: on a network that is spread over processes that "
                "is not possible; leave it out with params=, or pass a plain copy of the network"
            )
        known[key] = found
    return found


def forget(f: Functional) -> None:
    """Look at the network again next time: it is not what its anatomy says."""
    f.certificate.anatomies.clear()


def recorded(f: Functional, found: Anatomy, inputs: Inputs) -> Tape:
    """The tape of f at its parameters over prepared inputs; whether it `matches` is for the caller to ask.

    `torch.func.functional_call` walks the whole module twice to hang other tensors into it. Where the differentiated
    parameters are all there is, and are the module's own, calling the module does the same with less work.
    """
    own = own_parameters(f) if writes_into_inputs(f.module) is False else None
    if own is not None:
        n = batch_size(inputs)
        tape = record(lambda _, x: _call(f, x), own, inputs, lambda out: as_tensor(out, n, None, f.module), found.scope)
        if found.matches(tape):
            return tape
    if f.shards is not None:
        return taped(f, inputs, found.scope)
    return record(f.outputs, leaves(f), inputs, scope=found.scope)


def own_parameters(f: Functional) -> Params | None:
    """The module's own parameters where they are f's, in the same memory and precision, and all that it has.

    Not for modules with buffers, which a forward pass may replace (`functional_call` puts the old ones back).
    """
    if f.frozen:
        return None
    own = f.own
    if own is None or len(own) != len(f.params):
        return None
    for name, p in own.items():
        mine = f.params.get(name)
        if mine is None or not p.requires_grad or p.layout != torch.strided or p.dtype != mine.dtype:
            return None
        if p.data_ptr() != mine.data_ptr():
            return None
    return own


def _call(f: Functional, inputs: Inputs) -> Any:
    with RightGradients(pure=True):
        out = (
            f.module(**{**f.certificate.quiet, **inputs})
            if isinstance(inputs, dict)
            else f.module(inputs, **f.certificate.quiet)
        )
    return out if f.output is None else f.output(out)


class Forward:
    """A recorded forward pass over some prepared examples; `start` is the place of the first one in the data."""

    def __init__(self, f: Functional, found: Anatomy, blocks: Sequence[Block], inputs: Inputs, start: int = 0) -> None:
        self.f, self.found, self.blocks, self.examples = f, found, blocks, inputs
        try:
            self.tape = recorded(f, found, inputs)
        except (RuntimeError, IndexError):
            with explained(f.module, inputs):
                raise
        self.rows = self.tape.rows.detach()  # [n, c]
        if self.tape.shape != found.shape:
            raise StaleError(
                f"{type(f.module).__name__} gives {list(self.tape.shape)} per example from {start} on, and gave "
                f"{list(found.shape)} on the first ones"
            )
        if not found.matches(self.tape):
            raise StaleError(
                f"{type(f.module).__name__} takes another path on the examples from {start} on than on the first ones "
                "(control flow that depends on the data or on their number); evaluate such examples in separate calls, "
                'or use a metric with representation="implicit", which needs no layers'
            )

    @cached_property
    def inputs(self) -> dict[Names, MatrixFactor]:
        """What the forward pass alone says about the matrix blocks: factors that have no gradients yet."""
        out, n = {}, len(self.rows)
        for b in self.blocks:
            if b.kind == "matrix":
                uses = [(self.tape.uses[i], self.found.slots[i]) for i in b.uses]
                saved = [
                    use.input if slot.input.plain else slot.input.example_major(use.input, n)
                    for use, slot in uses
                    if slot is not None and slot.input is not None and use.input is not None
                ]
                rules = [use.rule for use, _ in uses if isinstance(use.rule, MatrixRule)]
                if any(a.is_floating_point() and a.dtype != self.f.dtype for a in saved):  # computed in another one
                    saved = [a.to(self.f.dtype) if a.is_floating_point() else a for a in saved]
                out[b.names] = MatrixFactor(b, rules, saved, [])
        return out

    def factors(self, cotangents: Tensor, last: bool = True) -> dict[Names, Factor]:
        """Factors of all blocks for cotangents [k, n, c]; the graph is freed after the `last` ones."""
        k, n = cotangents.shape[:2]
        matrix = {i for b in self.blocks if b.kind == "matrix" for i in b.uses}
        small = [b for b in self.blocks if b.kind == "rows"]
        grads: dict[int, list[Tensor]] = {i: [] for i in matrix}
        rows = {b.names: torch.zeros(k, n, b.numel, dtype=self.f.dtype, device=self.f.device) for b in small}
        j = 0
        needed = matrix or any(b.uses for b in small)
        for flow in all_gradients(self.tape, self.found, cotangents, last) if needed else []:
            size = next((len(g) for g in flow if g is not None), 1)
            for i in matrix:
                g, slot = flow[i], self.found.slots[i]
                if g is None:  # the outputs do not depend on this use
                    g = torch.zeros(size, *self.tape.uses[i].out_shape, dtype=self.f.dtype, device=self.f.device)
                g = g if g.dtype == self.f.dtype else g.to(self.f.dtype)
                grads[i].append(g if slot is None or slot.output.plain else slot.output.example_major_each(g, n))
            for b in small:
                for i in b.uses:
                    g = flow[i]
                    for role, owner in self.tape.uses[i].roles.items():
                        if owner == b.names[0] and g is not None:
                            rows[b.names][j : j + size] += use_rows(self.tape, self.found, i, role, g)
            if self.tape.derived:
                own = {b.names[0]: rows[b.names] for b in small}
                add_derived(self.tape, self.found, flow, own, slice(j, j + size))
            j += size
        stacked = {i: torch.cat(g) if len(g) > 1 else g[0] for i, g in grads.items()}
        fallback = [b.names[0] for b in self.blocks if b.kind == "fallback"]
        raw = per_example_gradients(self.f, fallback, self.examples, cotangents) if fallback else {}
        return {
            b.names: replace(self.inputs[b.names], grads=[stacked[i] for i in b.uses])
            if b.kind == "matrix"
            else RowsFactor(b, raw[b.names[0]] if b.kind == "fallback" else rows[b.names])
            for b in self.blocks
        }
