"""Random features of preconditioned gradients: two vectors whose inner product is g_q^T (F + damping I)^-1 g_i.

The training side must be cheap: phi_i = R^T L g_i is contracted from a layer's inputs and output gradients without
forming g_i, for which L = (U_B b U_B^T) (x) (U_A a U_A^T) has to be a Kronecker product. The query side takes up the
rest, psi_q = R^T L^-1 (F + damping I)^-1 g_q, exactly: whatever L is, E phi_i . psi_q is the score. b_o a_i is chosen
near (s_oi + damping)^-1/2, in the least squares of logarithms, which makes the two sides alike and the scatter small.

R has independent groups of k^2 columns; those of one group are the products of k random vectors of outputs and k of
inputs, which costs k times less than `dim` pairs of vectors. A score is then the mean of tables [k, k] of unbiased
scores, m + r_a + s_b + e_ab with uncorrelated parts, and the scatter of rows and columns tells the error. What r and s
add to the variance is of order k / layers, and less where gradients are sums over many positions: see `Draws.side`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod, sqrt

import torch
from torch import Tensor

from biascope.curvature.blockwise import BlockMetric
from biascope.curvature.contract import gradient_rows, pieces_of
from biascope.curvature.kronecker import EigenPiece, Homogeneous, MatrixPiece
from biascope.curvature.metric import Metric
from biascope.curvature.pieces import DensePiece, DiagonalPiece, ParameterSpace, Piece
from biascope.curvature.plan import Unit
from biascope.curvature.sums import homogeneous
from biascope.curvature.thin import LowRankEigenPiece, turn_left, turn_right
from biascope.network.layers.blocks import Block, Factor, MatrixFactor
from biascope.support.seeds import generator

LARGE = 2**16  # entries above which a parameter's signs are outer products
COLUMNS = 2**24  # random numbers at a time, where a parameter's gradient is multiplied by as many as it has entries
FEW = 16  # groups that are multiplied one by one, without a copy
LEAST = 32  # vectors of either side, at least: their scatter is known to an eighth


@dataclass(frozen=True)
class Draws:
    """Random signs by name, the same whenever they are asked for."""

    seed: int
    dim: int
    layers: int = 0  # whose gradients are sums over positions

    @cached_property
    def side(self) -> int:
        """k: the largest power of 2, at most twice the layers, that fits and leaves vectors to tell their scatter."""
        fits = (k for k in (32, 16, 8, 4, 2) if k <= max(4, 2 * self.layers) and self.dim % k**2 == 0)
        return next((k for k in fits if self.dim // k >= LEAST), 1)

    def signs(self, rows: int, columns: int, like: Tensor, *name: object) -> Tensor:
        """[rows, columns], as bytes."""
        gen = generator(self.seed, "influence", *name)
        drawn = torch.randint(0, 2, (rows, columns), generator=gen, dtype=torch.int8, device="cpu")
        return (drawn * 2 - 1).to(like.device)

    def vectors(self, rows: int, like: Tensor, *name: object) -> Tensor:
        """k vectors of every group, as columns [rows, dim / k]."""
        return self.signs(rows, self.dim // self.side, like, *name).to(like)

    def products(self, X: Tensor, Y: Tensor) -> Tensor:
        """sum_t x_t y_t^T of every group, [b, dim], from the two sides' products with its vectors [b, t, dim / k]."""
        k = self.side
        if k == 1:
            return (X * Y).sum(1)
        if self.dim <= FEW * k**2:
            return torch.cat([(x.mT @ y).flatten(1) for x, y in zip(torch.split(X, k, 2), torch.split(Y, k, 2))], 1)
        X, Y = (Z.view(*Z.shape[:2], -1, k).transpose(1, 2) for Z in (X, Y))
        return (X.mT @ Y).flatten(1)

    def errors(self, products: Tensor) -> Tensor:
        """Standard errors of scores, from their terms [b, dim]: variances of a two-way table, mean over the groups."""
        k, t = self.side, products.double()
        variance: Tensor = t.var(1)
        if k > 1:
            t = t.view(len(t), -1, k, k)
            rows, columns = t.mean(3, keepdim=True), t.mean(2, keepdim=True)
            rest = (t - rows - columns + rows.mean(2, keepdim=True)).square().sum((2, 3)).mean(1) / (k - 1) ** 2
            r, c = ((k * side.flatten(2).var(2)).mean(1).clamp_min(rest) for side in (rows, columns))
            variance = r + c - rest
        return (variance * self.dim).sqrt().to(products)


class Factored:
    """A layer whose gradients are sums of outer products."""

    def __init__(self, block: Block, piece: Piece | None, damping: float, draws: Draws, like: Tensor) -> None:
        self.names = block.names
        self.L: Homogeneous = homogeneous(Unit(block.names, (block,), "ekfac", ""))
        L, self.U_B, self.U_A, self.draws = self.L, like.new_empty(self.L.groups, 0), None, draws
        self.b, self.a = like.new_ones(L.groups, L.d_out), like.new_ones(L.groups, L.columns)
        if isinstance(piece, MatrixPiece) and piece.layout == L:
            E = piece if isinstance(piece, EigenPiece) else piece.eigen
            assert isinstance(E, EigenPiece)
            logs = (E.s[:, 0] + damping).clamp_min(torch.finfo(like.dtype).tiny).log() / -2  # [g, o, i]
            self.U_A, self.a = E.U_A, logs.mean(1).exp()
            if not isinstance(E, LowRankEigenPiece):  # whose basis is not all of the space
                self.U_B, self.b = E.U_B, (logs.mean(2) - logs.mean((1, 2))[:, None]).exp()
        self.R = draws.vectors(L.groups * L.d_out, like, block.names[0], "out").view(L.groups, L.d_out, -1)
        self.S = draws.vectors(L.groups * L.columns, like, block.names[0], "in").view(L.groups, L.columns, -1)
        self.left = turn_left(self.U_B, (self.R * self.b[..., None])[None, :, None], back=True)[0, :, 0]
        rows = (self.S * self.a[..., None]).mT[None, :, None]
        self.right = turn_right(self.U_A, rows, back=True)[0, :, 0].mT.contiguous()  # [g, i, dim / k]

    def sides(self, factors: dict[tuple[str, ...], Factor], s: slice) -> tuple[Tensor, Tensor]:
        """Output gradients and inputs of some examples times the vectors of their side, [b, t, dim / k] each."""
        x = factors[self.names]
        assert isinstance(x, MatrixFactor)
        G = _product(x.cotangents(s)[0], self.left)
        if not x.block.is_embedding:
            return G, _product(x.operand(s), self.right, x.has_bias)
        at = x.indices(s)
        return G, self.right[0, at.clamp_min(0)] * (at >= 0)[..., None]

    def query(self, P: Tensor) -> Tensor:
        """[q, dim] from P [p, q] = (F + damping I)^-1 g, the layer's share."""
        V = turn_right(self.U_A, turn_left(self.U_B, self.L.pack(P)))[:, :, 0]  # [q, g, o, i]
        V = V / self.b[..., None] / self.a[:, None]
        R = self.R.flatten(0, 1)[None]
        return torch.cat([self.draws.products(R, (v @ self.S).flatten(0, 1)[None]) for v in V])


def _product(X: Tensor, W: Tensor, bias: bool = False) -> Tensor:
    """X_t W of X [b, g, i, T] and W [g, i, c]: [b, g T, c]; with `bias`, X lacks its last row, which is ones."""
    rows = X.mT.movedim(1, 0).flatten(1, 2)  # one product for all examples
    found = torch.baddbmm(W[:, -1:], rows, W[:, :-1]) if bias else rows @ W
    return found.view(len(W), len(X), -1, W.shape[2]).movedim(0, 1).flatten(1, 2)


class Plain:
    """Parameters whose gradients are formed: normalisations, biases, what has no rule."""

    def __init__(
        self, names: tuple[str, ...], blocks: Sequence[Block], root: Piece | None, draws: Draws, space: ParameterSpace
    ) -> None:
        self.names, self.blocks, self.root, self.draws = names, tuple(blocks), root, draws
        self.parts: list[tuple[int, Tensor | tuple[Tensor, Tensor]]] = []  # entries, and their signs
        like = torch.zeros(0, dtype=space.dtype, device=space.device)
        for name in names:
            shape = space.shapes[name]
            size = prod(shape)
            if size > LARGE and len(shape) > 1:  # of a matrix, those of its rows and columns
                sides = (("out", size // shape[-1]), ("in", shape[-1]))
                R, S = (draws.vectors(d, like, name, side) for side, d in sides)
                self.parts.append((size, (R, S)))
            else:
                self.parts.append((size, draws.signs(size, draws.dim, like, name)))

    def add(self, phi: Tensor, factors: dict[tuple[str, ...], Factor]) -> None:
        """phi [n, dim] += R^T L g of these parameters."""
        size = sum(b.numel for b in self.blocks)
        step = max(1, COLUMNS // max(1, size))
        for start in range(0, len(phi), step):
            some = slice(start, min(start + step, len(phi)))
            parts: dict[str, Tensor] = {}
            for b in self.blocks:
                parts |= gradient_rows(factors[b.names], self.names, some)
            rows = torch.cat([parts[name][0] for name in self.names], 1)
            phi[some] += self._signed(rows if self.root is None else self.root.matmat(rows.T).T)

    def query(self, P: Tensor) -> Tensor:
        """[q, dim] from P [p, q] = (F + damping I)^-1 g; L^-2 is F + damping I, where there is a root."""
        if self.root is None:
            return self._signed(P.T)
        inverse: Piece = self.root.with_eigenvalues(1 / self.root.eigenvalues())
        return self._signed(inverse.matmat(P).T)

    def _signed(self, rows: Tensor) -> Tensor:
        """[b, dim] of gradients [b, p]."""
        out: Tensor = rows.new_zeros(len(rows), self.draws.dim)
        for own, (_, signs) in zip(torch.split(rows, [size for size, _ in self.parts], 1), self.parts):
            if isinstance(signs, tuple):
                R, S = signs
                for row, total in zip(own, out):
                    total += self.draws.products(R[None], (row.view(len(R), -1) @ S)[None])[0]
                continue
            step = max(1, COLUMNS // self.draws.dim)
            for start in range(0, own.shape[1], step):
                out += own[:, start : start + step] @ signs[start : start + step].to(rows)
        return out


class Features:
    """All layers together."""

    def __init__(
        self, metric: Metric | None, blocks: Sequence[Block], space: ParameterSpace, damping: float, draws: Draws
    ) -> None:
        matrix = [b for b in blocks if b.kind == "matrix"]
        sizes = [b.sizes for b in matrix if b.sizes is not None]
        draws = replace(draws, layers=sum(z.positions > 1 for z in sizes))
        self.space, self.draws = space, draws
        kept = 2 * draws.dim // draws.side * sum(z.groups * z.positions for z in sizes)
        self.workspace = kept + max((z.groups * z.positions * (z.d_in + z.d_out) for z in sizes), default=0)
        like = torch.zeros(0, dtype=space.dtype, device=space.device)
        pieces = {p.names: p for p in metric.pieces} if isinstance(metric, BlockMetric) else {}
        self.layers = [Factored(b, pieces.get(b.names), damping, draws, like) for b in matrix]
        done = {name for b in matrix for name in b.names}
        self.plain: list[Plain] = []
        rest = {name: b for b in blocks for name in b.names if name not in done}
        for names, piece in pieces.items():
            if all(name in rest for name in names):
                mine = list({rest[name].names: rest[name] for name in names}.values())
                self.plain.append(Plain(names, mine, _root(piece, damping), draws, space))
                for name in names:
                    del rest[name]
        self.plain += [Plain((name,), [b], None, draws, space) for name, b in rest.items()]

    def train(self, factors: dict[tuple[str, ...], Factor], n: int) -> Tensor:
        """[n, dim] / sqrt(dim) of some examples."""
        phi = torch.zeros(n, self.draws.dim, dtype=self.space.dtype, device=self.space.device)
        one = next((f for f in factors.values() if isinstance(f, MatrixFactor)), None)
        for s in pieces_of(one, self.workspace) if one is not None else ():
            X, Y = zip(*(layer.sides(factors, s) for layer in self.layers))
            phi[s] = self.draws.products(torch.cat(X, 1), torch.cat(Y, 1))  # one product with all layers' positions
        for part in self.plain:
            part.add(phi, factors)
        return phi / sqrt(self.draws.dim)

    def query(self, P: Tensor) -> Tensor:
        """[q, dim] / sqrt(dim) from P [p, q] = (F + damping I)^-1 g."""
        parts: list[Factored | Plain] = [*self.layers, *self.plain]
        psi = torch.stack([part.query(self.space.take(part.names, P)) for part in parts]).sum(0)
        return psi / sqrt(self.draws.dim)


def _root(piece: Piece, damping: float) -> Piece | None:
    """(piece + damping I)^-1/2, where that is cheap."""
    if isinstance(piece, DiagonalPiece):
        return DiagonalPiece(piece.names, (piece.d + damping).rsqrt())
    small = isinstance(piece, DensePiece) and piece.H.numel() <= COLUMNS
    if not (small or isinstance(piece, EigenPiece)) or isinstance(piece, LowRankEigenPiece) or not piece.symmetric:
        return None
    return piece.with_eigenvalues((piece.eigenvalues().clamp_min(0) + damping).rsqrt())
