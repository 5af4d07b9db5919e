"""The anatomy of a model: which rule handles which parameter (`biascope.network.layers.pilot` finds out).

A *block* is the unit that kernels and metrics are assembled from:

- a **matrix** block: a weight (and, where it sees the same positions, its bias) whose uses all share one matrix rule;
  several uses (a reused module, a tied weight) are joined along the positions;
- a **rows** block: a small parameter, or one with uses of different kinds, whose per-example gradients are added up;
- a **fallback** block: a parameter used by something without a rule; its rows come from autograd, example by example.

A *factor* is what a pass over the data leaves behind for a block: the pieces from which J J^T and J^T J are contracted.
A matrix block keeps its inputs `a` and output gradients `g`, never the outer products; the others keep rows of J. The k
leading slices belong to k cotangents: the network's outputs, or the square root of a likelihood's Fisher information.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from biascope.network.functional import Functional
from biascope.network.layers.derived import is_label, root_rows
from biascope.network.layers.record import EVERYTHING, Scope, Tape
from biascope.network.layers.rules import Embedding, Linear, MatrixRule, Sizes, matrix_rows
from biascope.support.errors import UnsupportedError

ALL = slice(None)


@dataclass(frozen=True)
class Layout:
    """The examples lie along `dim`, which has n * m entries, example-major."""

    dim: int
    m: int
    plain: bool = field(default=False, repr=False)  # rows of a linear layer, whose rule takes them as they are

    def example_major(self, t: Tensor, n: int) -> Tensor:
        """[n, m, ...rest], a view where possible."""
        if self.dim:
            t = t.movedim(self.dim, 0)
        return t.unsqueeze(1) if self.m == 1 and t.shape[0] == n else t.reshape(n, self.m, *t.shape[1:])

    def example_major_each(self, t: Tensor, n: int) -> Tensor:
        """[k, n, m, ...rest] of k stacked tensors."""
        if self.dim:
            t = t.movedim(self.dim + 1, 1)
        return t.unsqueeze(2) if self.m == 1 and t.shape[1] == n else t.reshape(t.shape[0], n, self.m, *t.shape[2:])


@dataclass(frozen=True)
class Slot:
    """What the pilot learnt about one use: where the batch lies in its input and output."""

    rule: str
    roles: tuple[tuple[str, str], ...]
    input: Layout | None
    output: Layout
    live: tuple[int, int] | None = None  # positions of a linear layer outside of which no gradient arrived


@dataclass(frozen=True)
class Block:
    """Parameters assembled together, and the uses (indices into the tape) that make their gradient."""

    kind: str  # "matrix" | "rows" | "fallback"
    names: tuple[str, ...]  # matrix: (weight,) or (weight, bias)
    uses: tuple[int, ...]
    reason: str
    sizes: Sizes | None = None  # matrix: positions summed over the uses
    numel: int = 0
    input_numel: int = 0  # matrix: numbers kept per example, inputs and (for one cotangent) output gradients
    output_numel: int = 0
    rule: MatrixRule | None = None  # matrix: that of the first use; all have its signature
    live: tuple[int, int] | None = None  # the positions looked at, where not all are: see `Anatomy.narrowed`

    @property
    def matrix(self) -> Sizes:
        """The sizes of a block that is a matrix."""
        assert self.sizes is not None
        return self.sizes

    @cached_property
    def is_plain(self) -> bool:
        """One use by a linear layer, one position: no more than a matrix of inputs and one of gradients."""
        one = len(self.uses) == 1 and self.sizes is not None and self.sizes.positions == 1
        return one and isinstance(self.rule, Linear)

    @cached_property
    def is_embedding(self) -> bool:
        """Are the operands token indices?"""
        return isinstance(self.rule, Embedding)

    @property
    def layer(self) -> str:
        """The module the first parameter belongs to."""
        return self.names[0].rpartition(".")[0] or self.names[0]


@dataclass(frozen=True)
class Watch:
    """Reads a model's output as `Functional` does, and refuses another shape than the pilot saw."""

    output: Callable[[Any], Tensor] | None
    shape: tuple[int, ...]  # of one example's output, before it is flattened

    def __call__(self, out: Any) -> Any:
        """The tensor; what is none is refused by the caller, with advice."""
        t = self.output(out) if self.output is not None else getattr(out, "logits", out)
        if isinstance(t, Tensor) and tuple(t.shape[1:]) != self.shape:
            raise StaleError(
                f"the model gives {list(t.shape[1:])} per example here, and gave {list(self.shape)} on the first ones"
            )
        return t


class StaleError(UnsupportedError):
    """The model is not what its anatomy says: changed since, or on another path with these examples."""


class WiderError(Exception):
    """A gradient arrived at positions that were left out; nothing was lost but time."""


@dataclass(frozen=True)
class Anatomy:
    """The blocks of a model, the layout of every recorded use, and the number of outputs."""

    blocks: tuple[Block, ...]
    slots: tuple[Slot | None, ...]
    outputs: int
    activation_bytes: int  # saved for backward, per example
    batched: bool = False  # one vmapped backward pass for all cotangents works (fewer, larger operations)
    reasons: dict[str, str] = field(default_factory=dict)
    shape: tuple[int, ...] = ()  # of one example's output, before it is flattened
    unreached: frozenset[int] = frozenset()  # uses that the outputs do not depend on
    scope: Scope = EVERYTHING  # what the recorder looks for
    together: tuple[Scope, int] | None = None  # how else one vmapped pass works, and the activation bytes then
    plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # what users made of it

    def watched(self, f: Functional) -> Functional:
        """The same function, which raises `StaleError` when an output has another shape than the pilot's."""
        return replace(f, output=Watch(f.output, self.shape))

    def batching(self) -> "Anatomy":
        """The same, in the way in which one vmapped backward pass has the fewest launches."""
        if self.together is None:
            return self
        scope, size = self.together
        return replace(self, batched=True, scope=scope, activation_bytes=size)

    def narrowed(self, block: Block) -> Block:
        """A block without the positions at which no gradient arrived when the network was looked at.

        Behind the last layer that mixes positions only those matter that are read: the class token, the last word.
        Whether the others have no gradient is to be seen again on all examples (`MatrixFactor.narrowed`).
        """
        live = self.slots[block.uses[0]].live if block.kind == "matrix" and len(block.uses) == 1 else None  # type: ignore[union-attr]
        if live is None or block.sizes is None:
            return block
        sizes = replace(block.sizes, positions=live[1] - live[0])
        a, g = sizes.d_in * sizes.positions, sizes.d_out * sizes.positions
        return replace(block, live=live, sizes=sizes, input_numel=a, output_numel=g)

    def pruned(self) -> "Anatomy":
        """The same, whose way back leaves those positions out."""
        live = tuple(
            slot.live if slot is not None and slot.input == slot.output and slot.output.plain else None
            for slot in self.slots
        )
        return replace(self, scope=replace(self.scope, live=live)) if any(live) else self

    def widened(self) -> "Anatomy":
        """The same, with gradients at all positions."""
        return replace(self, slots=tuple([slot and replace(slot, live=None) for slot in self.slots]))

    def matches(self, tape: Tape) -> bool:
        """Does a new forward pass use the parameters in the same order as the pilot did?"""
        return len(tape.uses) == len(self.slots) and all(
            slot is None or (slot.rule, slot.roles) == (type(use.rule).__name__, tuple(use.roles.items()))
            for slot, use in zip(self.slots, tape.uses)
        )


def leaves(f: Functional) -> dict[str, Tensor]:
    """Fresh leaf tensors that require grad and share memory with the parameters."""
    if f.shards is not None:  # this process's parts
        return {k: f.shards.part(p).requires_grad_() for k, p in f.params.items()}
    return {k: p.detach().requires_grad_() for k, p in f.params.items()}


def some(t: Tensor, s: slice, dim: int = 0) -> Tensor:
    """t[s] along dimension 0 or 1; t itself where that is everything."""
    if s.start == 0 and s.stop == t.shape[dim]:
        return t
    return t[s] if dim == 0 else t[:, s]


@dataclass
class MatrixFactor:
    """Inputs [n, m, ...] and output gradients [k, n, m, ...] of every use of a weight (linear ones may lack m = 1).

    Before the way back there are no gradients yet.
    """

    block: Block
    rules: list[MatrixRule]
    inputs: list[Tensor]
    grads: list[Tensor]

    @property
    def k(self) -> int:
        """Number of cotangents."""
        return self.grads[0].shape[0]

    @property
    def n(self) -> int:
        """Number of examples."""
        return self.inputs[0].shape[0]

    @property
    def has_bias(self) -> bool:
        """Is a bias folded into the block?"""
        return len(self.block.names) == 2

    def narrowed(self) -> tuple["MatrixFactor", Tensor]:
        """The factor at the block's `live` positions, and whether a gradient arrived at others."""
        assert self.block.live is not None
        (start, stop), n, k = self.block.live, self.n, self.k
        a, g = self.inputs[0].reshape(n, -1, self.inputs[0].shape[-1]), self.grads[0]
        g = g.reshape(k, n, -1, g.shape[-1])
        wider = g[:, :, :start].any() | g[:, :, stop:].any()
        few = [a[:, start:stop].contiguous()], [g[:, :, start:stop].contiguous()]  # a view would hold all
        return replace(self, inputs=few[0], grads=few[1]), wider

    def operand(self, s: slice) -> Tensor:
        """A [b, groups, d_in, T] of some examples, all uses joined along T."""
        parts = [r.operand(some(a, s)) for r, a in zip(self.rules, self.inputs)]
        A = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return A.to(self.grads[0].dtype) if self.grads and A.dtype != self.grads[0].dtype else A

    def cotangent(self, j: int, s: slice) -> Tensor:
        """G [b, groups, d_out, T] of some examples for cotangent j."""
        parts = [r.cotangent(g[j, s]) for r, g in zip(self.rules, self.grads)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def cotangents(self, s: slice) -> Tensor:
        """G [k, b, groups, d_out, T] of some examples for all cotangents."""
        parts = [r.cotangents(some(g, s, 1)) for r, g in zip(self.rules, self.grads)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def bias_rows(self, j: int, s: slice) -> Tensor:
        """Per-example gradient of the folded bias [b, d_out * groups] for cotangent j."""
        rows = [r.bias_rows(g[j, s]) for r, g in zip(self.rules, self.grads)]
        return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)

    def all_bias_rows(self) -> Tensor:
        """Per-example gradients of the folded bias [k, n, d_out * groups]."""
        rows = [r.bias_rows(g.flatten(0, 1)) for r, g in zip(self.rules, self.grads)]
        total = rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)
        return total.reshape(self.k, self.n, -1)

    def plain_inputs(self, s: slice) -> Tensor:
        """[b, d_in] of some examples, where the block `is_plain`."""
        a = some(self.inputs[0], s)
        return a if a.dim() == 2 else a.reshape(a.shape[0], a.shape[-1])

    def plain_gradients(self, s: slice) -> Tensor:
        """[k, b, d_out] of some examples, where the block `is_plain`."""
        g = some(self.grads[0], s, 1)
        return g if g.dim() == 3 else g.reshape(g.shape[0], g.shape[1], g.shape[-1])

    def indices(self, s: slice) -> Tensor:
        """Token indices [b, T] of an embedding; -1 where no gradient flows."""
        return torch.cat([r.indices(a[s]) for r, a in zip(self.rules, self.inputs) if isinstance(r, Embedding)], -1)

    def weight_rows(self, j: int, s: slice) -> Tensor:
        """Per-example gradient of the weight [b, p], in the parameter's own order."""
        if self.block.is_embedding:
            parts = [r.weight_rows(a[s], g[j, s]) for r, a, g in zip(self.rules, self.inputs, self.grads)]
            return torch.stack(parts).sum(0)
        return matrix_rows(self.operand(s), self.cotangent(j, s), self.rules[0].input_major)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in (*self.inputs, *self.grads))


@dataclass
class RowsFactor:
    """Rows of J [k, n, p] of one parameter."""

    block: Block
    rows: Tensor

    @property
    def k(self) -> int:
        """Number of cotangents."""
        return self.rows.shape[0]

    @property
    def n(self) -> int:
        """Number of examples."""
        return self.rows.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.rows.numel() * self.rows.element_size()


Factor = MatrixFactor | RowsFactor


def all_gradients(tape: Tape, found: Anatomy, cotangents: Tensor, last: bool = False) -> list[list[Tensor | None]]:
    """Gradients at every use for k cotangents [k, n, c]: a list of pieces, each a list over uses of [k', ...].

    One piece where a vmapped backward pass pays, else k pieces of one cotangent each.
    """
    if found.batched and len(cotangents) > 1:
        pieces = [tape.batched_gradients(cotangents)]
    else:
        k = len(cotangents)
        pieces = [
            [None if g is None else g.unsqueeze(0) for g in tape.gradients(cotangents[j], retain=not last or j < k - 1)]
            for j in range(k)
        ]
    for i, g in enumerate(pieces[0]):
        if g is None and i not in found.unreached:  # zeros would be wrong
            names = " and ".join(tape.uses[i].roles.values())
            raise StaleError(f"no gradient reached the layer of {names}, as it did on the first examples")
    return pieces


def use_rows(tape: Tape, found: Anatomy, index: int, role: str, g: Tensor, at: slice = ALL) -> Tensor:
    """Per-example gradients [k, n, p] of the parameter in `role` from one use; g [k, ...] in the model's layout.

    `at`: of these examples only.
    """
    use, slot = tape.uses[index], found.slots[index]
    assert slot is not None
    n = tape.rows.shape[0]
    g = slot.output.example_major_each(g, n)[:, at]
    a = None
    if use.input is not None and slot.input is not None and role == "weight":
        a = slot.input.example_major(use.input, n)[at]
    if isinstance(use.rule, MatrixRule):
        if role == "bias":
            return use.rule.bias_rows(g.flatten(0, 1)).reshape(*g.shape[:2], -1)
        assert a is not None
        rows = [use.rule.weight_rows(a, gj) for gj in g]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)  # no copy of what may be large
    return use.rule.rows(role, a, g, slot.output.dim)


def rows_of_tape(
    f: Functional,
    found: Anatomy,
    tape: Tape,
    pieces: list[list[Tensor | None]],
    k: int,
    names: list[str],
    examples: slice = ALL,
) -> dict[str, Tensor]:
    """Per-example gradients {name: [k, n, numel]} of parameters that have rules, from `all_gradients`."""
    n, wanted = len(range(len(tape.rows))[examples]), set(names)
    places = [
        (i, role, name)
        for i, (use, slot) in enumerate(zip(tape.uses, found.slots))
        if slot is not None
        for role, name in use.roles.items()
        if name in wanted
    ]
    out = {name: torch.zeros(k, n, f.params[name].numel(), dtype=f.dtype, device=f.device) for name in names}
    start = 0
    for grads in pieces:
        size = next((len(g) for g in grads if g is not None), 1)
        at = slice(start, start + size)
        for i, role, name in places:
            g = grads[i]
            if g is not None and name in wanted:
                out[name][at] += use_rows(tape, found, i, role, g, examples)
        if tape.derived:
            add_derived(tape, found, grads, out, at, examples)
        start += size
    return out


def add_derived(
    tape: Tape,
    found: Anatomy,
    grads: list[Tensor | None],
    out: dict[str, Tensor],
    at: slice,
    examples: slice = ALL,
) -> None:
    """Add to rows {name: [k, n, p]}, at some cotangents, what reaches the parameters through derived tensors."""
    rows: dict[str, Tensor] = {}
    for i, use in enumerate(tape.uses):
        for role, name in use.roles.items():
            g = grads[i]
            if is_label(name) and g is not None and found.slots[i] is not None:
                mine = use_rows(tape, found, i, role, g, examples)
                rows[name] = rows[name] + mine if name in rows else mine

    def add(name: str, t: Tensor) -> None:
        out[name][at] += t

    root_rows(tape, rows, out.__contains__, add)
