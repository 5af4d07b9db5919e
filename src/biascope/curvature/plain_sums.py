"""Sums over the data without Kronecker factors, one class per kind of piece: `add` a chunk, `finish` to a piece."""

from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from biascope.curvature.contract import (
    add_second_moment,
    add_squares,
    gradient_rows,
    pieces_of,
    squared_cost,
    squared_sums,
    squares,
    symmetric,
    token_gradients,
)
from biascope.curvature.lowrank import LowRankPiece
from biascope.curvature.passes import Chunk, InputFactors
from biascope.curvature.pieces import DensePiece, DiagonalPiece, ParameterSpace, Piece
from biascope.curvature.plan import Unit
from biascope.curvature.quasidiagonal import ArrowPiece
from biascope.network.layers.blocks import MatrixFactor, RowsFactor


class Sum:
    """A running sum for one unit; `kinds` are the representations it is for."""

    kinds: ClassVar[tuple[str, ...]] = ()
    of_kind: ClassVar[dict[str, type["Sum"]]] = {}

    def __init_subclass__(cls) -> None:
        Sum.of_kind |= dict.fromkeys(cls.kinds, cls)

    def __init__(self, unit: Unit, space: ParameterSpace) -> None:
        self.unit, self.space = unit, space

    def zeros(self, *shape: int) -> Tensor:
        """A zero tensor in the metric's precision."""
        return torch.zeros(shape, dtype=self.space.dtype, device=self.space.device)

    def rows(self, chunk: Chunk, step: int | None = None) -> list[Tensor]:
        """Per-example gradients [k, b, p] of the unit, a few examples at a time."""
        size = self.space.numel(self.unit.names)
        step = step or max(1, 2**24 // max(1, size * len(chunk.ks)))
        out = []
        for s in range(0, chunk.n, step):
            parts: dict[str, Tensor] = {}
            for b in self.unit.blocks:
                parts |= gradient_rows(chunk.factors[b.names], self.unit.names, slice(s, min(s + step, chunk.n)))
            out.append(torch.cat([parts[name] for name in self.unit.names], -1))
        return out

    def add_inputs(self, factors: InputFactors) -> None:
        """Add what belongs to the inputs of some examples alone; `add` follows for the same examples."""

    def add(self, chunk: Chunk) -> None:
        """Add some examples."""
        raise AssertionError("a sum adds")

    def finish(self, n: int) -> Piece:
        """The piece, for n examples in all."""
        raise AssertionError("a sum finishes")

    def errors(self) -> dict[str, float | None]:
        """What is left out for lack of memory, over what there is."""
        return {}


class DenseSum(Sum):
    """sum g g^T."""

    kinds = ("dense",)

    def __init__(self, unit: Unit, space: ParameterSpace) -> None:
        super().__init__(unit, space)
        p = space.numel(unit.names)
        self.H = self.zeros(p, p)

    def add(self, chunk: Chunk) -> None:  # noqa: D102
        for rows in self.rows(chunk):
            add_second_moment(self.H[None], rows.flatten(0, 1).T[None])

    def finish(self, n: int) -> Piece:  # noqa: D102
        return DensePiece(self.unit.names, symmetric(self.H[None])[0].div_(n))


class LowRankSum(Sum):
    """The rows themselves."""

    kinds = ("lowrank",)

    def __init__(self, unit: Unit, space: ParameterSpace) -> None:
        super().__init__(unit, space)
        self.kept: list[Tensor] = []
        self.owner: list[Tensor] = []

    def add(self, chunk: Chunk) -> None:  # noqa: D102
        for rows in self.rows(chunk, chunk.n):
            self.kept.append(rows.flatten(0, 1))
            self.owner.append(torch.tensor(chunk.ks, device="cpu").repeat_interleave(rows.shape[1]))

    def finish(self, n: int) -> Piece:  # noqa: D102
        none = self.zeros(0, self.space.numel(self.unit.names))  # a process without examples
        owner = torch.cat([torch.empty(0, dtype=torch.long, device="cpu"), *self.owner]).to(self.space.device)
        return LowRankPiece(self.unit.names, torch.cat([none, *self.kept]) / n**0.5, owner)


class DiagonalSum(Sum):
    """sum g * g."""

    kinds = ("diagonal",)

    def __init__(self, unit: Unit, space: ParameterSpace) -> None:
        super().__init__(unit, space)
        self.d: Tensor | None = None

    def _begin(self, d: Tensor) -> None:
        self.d, size = d, prod(self.space.shapes[self.unit.names[0]])
        self.weight, self.bias = d[:size], d[size:]

    def add(self, chunk: Chunk) -> None:  # noqa: D102
        factor = chunk.factors[self.unit.blocks[0].names]
        if isinstance(factor, MatrixFactor) and factor.block.is_plain:
            self._add_plain(factor)
            return
        if self.d is None:
            self._begin(self.zeros(self.space.numel(self.unit.names)))
        if isinstance(factor, RowsFactor):
            self.weight += factor.rows.square().sum((0, 1))
            return
        z = factor.block.matrix
        if factor.block.is_embedding:
            for s in pieces_of(factor, 2 * factor.k * z.d_out * z.positions):
                tokens, g = token_gradients(factor, s)
                self.weight.view(z.d_in, z.d_out).index_add_(0, tokens, g.square().sum(0))
            return
        if factor.rules[0].input_major:
            total = self.weight.view(z.groups, z.d_in, z.d_out).mT
        else:
            total = self.weight.view(z.groups, z.d_out, z.d_in)
        for s in pieces_of(factor, squared_cost(factor, False)):
            G = factor.cotangents(s)
            GG = add_squares(total, G, factor.operand(s))
            if factor.has_bias:
                self.bias += (squares(G.sum(-1)) if GG is None else GG).sum(0).flatten()

    def _add_plain(self, factor: MatrixFactor) -> None:
        """(g * g)^T (a * a), the first time without zeros to add to."""
        for s in pieces_of(factor, 2 * squared_cost(factor, False)):
            gg, a = squares(factor.plain_gradients(s)), factor.plain_inputs(s)
            aa = a * a  # one operation; `square` takes several
            left, right = (aa, gg) if factor.rules[0].input_major else (gg, aa)
            shape = left.shape[1], right.shape[1]
            if self.d is None:
                self._begin(gg.new_empty(self.space.numel(self.unit.names)))
                torch.mm(left.transpose(0, 1), right, out=self.weight.view(shape))
                if factor.has_bias:
                    torch.sum(gg, 0, out=self.bias)
            else:
                self.weight.view(shape).addmm_(left.T, right)
                if factor.has_bias:
                    self.bias.add_(gg.sum(0))

    def finish(self, n: int) -> Piece:  # noqa: D102
        if self.d is None:  # a process without examples
            self.d = self.zeros(self.space.numel(self.unit.names))
        return DiagonalPiece(self.unit.names, self.d.div_(n))


class ArrowSum(Sum):
    """Diagonal, and the covariance of a unit's bias with its weights."""

    kinds = ("quasidiagonal",)

    def __init__(self, unit: Unit, space: ParameterSpace) -> None:
        super().__init__(unit, space)
        self.Db = self.zeros(space.numel(unit.names[1:]))
        shape = (len(self.Db), space.numel(unit.names[:1]) // len(self.Db))
        self.D, self.C = self.zeros(*shape), self.zeros(*shape)
        block = unit.blocks[0]
        major, size = getattr(block.rule, "input_major", False), block.sizes
        self.form = {"input_major": major, "groups": size.groups if len(unit.blocks) == 1 and size is not None else 1}

    def add(self, chunk: Chunk) -> None:  # noqa: D102
        if len(self.unit.blocks) == 2:  # scale and shift of a normalisation layer
            w, b = (chunk.factors[block.names] for block in self.unit.blocks)
            assert isinstance(w, RowsFactor)
            assert isinstance(b, RowsFactor)
            self.D += w.rows.square().sum((0, 1))[:, None]
            self.C += (w.rows * b.rows).sum((0, 1))[:, None]
            self.Db += b.rows.square().sum((0, 1))
            return
        factor = chunk.matrix(self.unit.blocks[0].names)
        for s in pieces_of(factor, squared_cost(factor, False)):
            A, G = factor.operand(s), factor.cotangents(s)
            self.D += squared_sums(G, A).flatten(0, 1)
            total = G.sum(-1)  # the bias's gradient [k, b, g, o]
            cross = (G * total[..., None]).sum(0)  # [b, g, o, T], cotangents summed
            self.C += (cross.permute(1, 2, 0, 3).flatten(2) @ A.permute(1, 0, 3, 2).flatten(1, 2)).flatten(0, 1)
            self.Db += total.square().sum((0, 1)).flatten()

    def finish(self, n: int) -> Piece:  # noqa: D102
        form = self.form
        return ArrowPiece(
            self.unit.names, self.D / n, self.C / n, self.Db / n, bool(form["input_major"]), int(form["groups"])
        )
