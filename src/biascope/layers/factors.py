"""What a pass over the data leaves behind for each block: the pieces from which J J^T and J^T J are contracted.

A matrix block keeps its inputs `a` and output gradients `g` (never the outer products); a rows or fallback block keeps
its rows of J. The k leading slices belong to k cotangents: the network's outputs, or the square root of a likelihood's
Fisher information.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.errors import UnsupportedError
from biascope.functional import Functional
from biascope.inputs import Inputs, batch_size, take
from biascope.layers.blocks import Anatomy, Block
from biascope.layers.fallback import per_example_gradients
from biascope.layers.passes import recorded
from biascope.layers.record import Tape
from biascope.layers.rows import all_gradients, use_rows
from biascope.layers.rules import Embedding, Linear, MatrixRule, matrix_rows


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

    @property
    def is_plain(self) -> bool:
        """One use by a linear layer, one position: no more than a matrix of inputs and one of gradients."""
        sizes = self.block.sizes
        return len(self.rules) == 1 and isinstance(self.rules[0], Linear) and sizes is not None and sizes.positions == 1

    def plain_inputs(self, s: slice) -> Tensor:
        """[b, d_in] of some examples, where `is_plain`."""
        a = some(self.inputs[0], s)
        return a if a.dim() == 2 else a.reshape(a.shape[0], a.shape[-1])

    def plain_gradients(self, s: slice) -> Tensor:
        """[k, b, d_out] of some examples, where `is_plain`."""
        g = some(self.grads[0], s, 1)
        return g if g.dim() == 3 else g.reshape(g.shape[0], g.shape[1], g.shape[-1])

    @property
    def is_embedding(self) -> bool:
        """Are the operands token indices?"""
        return isinstance(self.rules[0], Embedding)

    def indices(self, s: slice) -> Tensor:
        """Token indices [b, T] of an embedding; -1 where no gradient flows."""
        return torch.cat([r.indices(a[s]) for r, a in zip(self.rules, self.inputs) if isinstance(r, Embedding)], -1)

    def weight_rows(self, j: int, s: slice) -> Tensor:
        """Per-example gradient of the weight [b, p], in the parameter's own order."""
        if self.is_embedding:
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


def collect(
    f: Functional,
    found: Anatomy,
    blocks: Sequence[Block],
    inputs: Inputs,
    cotangents: Tensor,
    chunk: int | None = None,
    store: torch.dtype | None = None,
) -> list[Factor]:
    """One pass over the examples: forward, k backward passes to the outputs of the layers, factors kept.

    Args:
        f: the network.
        found: its anatomy.
        blocks: the blocks to collect; backward stops at the earliest of their layers.
        inputs: n examples.
        cotangents: [k, c], the same for every example, or [k, n, c].
        chunk: examples per forward pass (all at once if None).
        store: precision in which factors are kept (that of f if None).

    Returns:
        One factor per block, in order.

    Example:
        >>> from torch import nn
        >>> from biascope.functional import functional
        >>> from biascope.layers import anatomy
        >>> f, x = functional(nn.Linear(3, 2)), torch.randn(5, 3)
        >>> found = anatomy(f, x)
        >>> (factor,) = collect(f, found, found.blocks, x, torch.eye(2))  # weight and bias are one block
        >>> factor.k, factor.n, torch.equal(factor.plain_inputs(slice(0, 5)), x)
        (2, 5, True)
    """
    n = batch_size(inputs)
    chunk = n if chunk is None else max(1, min(chunk, n))
    store = store or f.dtype
    k = cotangents.shape[0]
    pieces = _Pieces(f, found, blocks, k, n, store)
    fallback = [b.names[0] for b in blocks if b.kind == "fallback"]
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        batch = f.prepare(take(inputs, slice(start, stop)))
        cot = cotangents[:, None] if cotangents.dim() == 2 else cotangents[:, start:stop]
        cot = cot.to(f.device, f.dtype).expand(k, stop - start, -1)
        if pieces.wanted:
            tape = recorded(f, found, batch)
            _check_path(f, found, tape, start, stop)
            pieces.keep_inputs(tape, start, stop)
            j = 0
            for grads in all_gradients(tape, found, cot, last=True):
                size = next((len(g) for g in grads if g is not None), 1)
                pieces.keep_gradients(tape, grads, slice(j, j + size), slice(start, stop))
                j += size
            del tape, grads
        if fallback:
            rows = per_example_gradients(f, fallback, batch, cot)
            for name, r in rows.items():
                pieces.rows[name][:, start:stop] = r
    return pieces.factors()


def _check_path(f: Functional, found: Anatomy, tape: Tape, start: int, stop: int) -> None:
    who, rows = type(f.module).__name__, tape.rows
    if not found.matches(tape):
        raise UnsupportedError(
            f"{who} takes another path on examples {start} to {stop - 1} than on the first ones (control flow that "
            "depends on the data); evaluate such examples in separate calls"
        )
    if not bool(torch.isfinite(rows).all()):
        bad = start + int((~torch.isfinite(rows).all(1)).nonzero()[0])
        raise UnsupportedError(f"{who} returned NaN or infinity for example {bad}")


class _Pieces:
    """Storage of the factors while they are filled chunk by chunk."""

    def __init__(
        self, f: Functional, found: Anatomy, blocks: Sequence[Block], k: int, n: int, store: torch.dtype
    ) -> None:
        self.f, self.found, self.blocks, self.k, self.n, self.store = f, found, blocks, k, n, store
        self.wanted = sorted({i for b in blocks for i in b.uses})
        self.inputs: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}
        self.rules: dict[int, MatrixRule] = {}
        self.matrix = {i for b in blocks if b.kind == "matrix" for i in b.uses}
        self.rows = {
            b.names[0]: torch.zeros(k, n, b.numel, dtype=store, device=f.device) for b in blocks if b.kind != "matrix"
        }

    def keep_inputs(self, tape: Tape, start: int, stop: int) -> None:
        for i in self.matrix:
            use, slot = tape.uses[i], self.found.slots[i]
            assert slot is not None
            assert slot.input is not None
            assert use.input is not None
            assert isinstance(use.rule, MatrixRule)
            a = slot.input.example_major(use.input, stop - start)
            dtype = self.store if a.is_floating_point() else a.dtype
            if stop - start == self.n:
                self.inputs[i] = a.to(dtype)
            else:
                if i not in self.inputs:
                    self.inputs[i] = torch.empty(self.n, *a.shape[1:], dtype=dtype, device=a.device)
                self.inputs[i][start:stop] = a
            self.rules[i] = use.rule

    def keep_gradients(self, tape: Tape, grads: list[Tensor | None], j: slice, s: slice) -> None:
        count, size = s.stop - s.start, j.stop - j.start
        for i in self.matrix:
            slot, g = self.found.slots[i], grads[i]
            assert slot is not None
            if g is None:
                g = torch.zeros(size, *tape.uses[i].out_shape, dtype=self.f.dtype, device=self.f.device)
            g = slot.output.example_major_each(g, count)
            if size == self.k and count == self.n and g.dtype == self.store:
                self.grads[i] = g  # everything came at once
                continue
            if i not in self.grads:
                self.grads[i] = torch.empty(self.k, self.n, *g.shape[2:], dtype=self.store, device=g.device)
            self.grads[i][j, s] = g
        for b in self.blocks:
            if b.kind != "rows":
                continue
            name = b.names[0]
            for i in b.uses:
                g = grads[i]
                if g is not None:
                    for role, owner in tape.uses[i].roles.items():
                        if owner == name:
                            self.rows[name][j, s] += use_rows(tape, self.found, i, role, g)

    def factors(self) -> list[Factor]:
        out: list[Factor] = []
        for b in self.blocks:
            if b.kind == "matrix":
                out.append(
                    MatrixFactor(
                        b,
                        [self.rules[i] for i in b.uses],
                        [self.inputs[i] for i in b.uses],
                        [self.grads[i] for i in b.uses],
                    )
                )
            else:
                out.append(RowsFactor(b, self.rows[b.names[0]]))
        return out
