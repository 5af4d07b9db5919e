"""Sums for Kronecker factors that are held as less than a matrix (`ladder`), and how much that leaves out.

A factor in blocks, a diagonal or a multiple of the identity is the projection of the full one, the nearest of its kind
in Frobenius norm. How far the nearest is follows from inner products of single rows, without the full factor.
"""

import torch
from torch import Tensor

from biascope.curvature.contract import (
    add_gradients,
    add_inputs,
    add_squares,
    mean_moment,
    pieces_of,
    rotate,
    token_gradients,
)
from biascope.curvature.kronecker import EigenPiece, eigh_of
from biascope.curvature.passes import Chunk
from biascope.curvature.pieces import ParameterSpace, Piece
from biascope.curvature.plain_sums import Sum
from biascope.curvature.plan import Side, Unit
from biascope.curvature.sums import SCALINGS, KroneckerSum
from biascope.curvature.thin import LowRankEigenPiece, ReducedEigenPiece
from biascope.network.layers.blocks import MatrixFactor

SAMPLE = 256  # rows from which the error of a side is estimated
ROOM = 2**24  # numbers in them
FEW = {"cpu": 2**20}  # numbers in temporaries; as many as in samples elsewhere, where launches count


class Half:
    """One side's running sum over rows [b, g, d, T]: what the side keeps of sum_t x_t x_t^T."""

    def __init__(self, side: Side, g: int, d: int, space: ParameterSpace) -> None:
        self.side, self.g, self.d = side, g, d
        h = max(1, side.count)
        shape = {
            "full": (g, d, d),
            "blocks": (g * h, d // h, d // h),
            "diagonal": (g, d),
            "shared": (g, 1),
            "low rank": (0,),
        }[side.kind]
        self.S = torch.zeros(shape, dtype=space.dtype, device=space.device)
        self.rows: list[Tensor] = []  # [g, N, d] of low rank
        self.sample: Tensor | None = None  # [m, d] of the first group

    def add(self, X: Tensor) -> None:
        """Add rows [b, g, d, T]."""
        self._look(X)
        kind = self.side.kind
        if kind in ("full", "blocks"):
            b, g, d, T = X.shape
            h = self.side.count if kind == "blocks" else 1
            add_gradients(self.S, X.reshape(1, b, g * h, d // h, T))
        elif kind == "low rank":
            rows = X.permute(1, 0, 3, 2).flatten(1, 2)
            self.rows.append(rows[:, (rows != 0).any(-1).any(0)])
        else:
            squares = X.square().sum((0, 3))
            self.S += squares if kind == "diagonal" else squares.sum(1, keepdim=True)

    def _look(self, X: Tensor) -> None:
        """Keep some rows that are not zero, spread over the first examples and positions."""
        most = max(2, min(SAMPLE, ROOM // self.d))
        if self.side.kind in ("full", "low rank") or (self.sample is not None and len(self.sample) >= most):
            return
        held = 0 if self.sample is None else len(self.sample)
        live = X[:, 0].any(1).nonzero()  # examples and positions
        some = torch.linspace(0, len(live) - 1, min(len(live), most - held), device="cpu")
        live = live[some.long().to(live.device)]
        rows = X[live[:, 0], 0, :, live[:, 1]]
        self.sample = rows if self.sample is None else torch.cat([self.sample, rows])

    def spectrum(self, count: int) -> tuple[Tensor, Tensor]:
        """Eigenvalues [g, d] (or [g, r]) and the basis, as `turns` says, of the sum over `count`."""
        kind = self.side.kind
        if kind in ("full", "blocks"):
            values, U = eigh_of([mean_moment(self.S, count)])[0]
            self.S = self.S[:0]
            if kind == "full":
                return values, U
            return values.view(self.g, -1), U.view(self.g, -1, *U.shape[1:])
        if kind == "low rank":
            rows = torch.cat(self.rows, 1)
            self.rows = []
            Q, R = torch.linalg.qr(rows.mT)  # rows^T rows = Q R R^T Q^T
            del rows
            values, W = torch.linalg.eigh(R.double() @ R.double().mT)
            return values.flip(-1).clamp_min(0).to(R.dtype) / count, Q @ W.flip(-1).to(R.dtype)
        return (self.S / count).expand(-1, self.d) / (self.d if kind == "shared" else 1), self.S[:, :0]

    def error(self) -> float | None:
        """||S - kept|| / ||S|| in Frobenius norm, from pairs of different rows, so that their number adds no bias."""
        if self.side.kind in ("full", "low rank"):
            return 0.0
        if self.sample is None or len(self.sample) < 2:
            return None
        X = self.sample.double() if self.sample.numel() <= ROOM // 16 else self.sample
        self.sample = None
        X /= X.norm(dim=1).square().mean().sqrt()
        whole = _pairs(X @ X.T)
        if self.side.kind == "blocks":
            kept = sum([_pairs(x @ x.T) for x in torch.split(X, self.d // self.side.count, 1)])
        elif self.side.kind == "diagonal":
            squared = X.square()
            kept = _off_diagonal(squared @ squared.T)
        else:
            norms = X.square().sum(1)
            kept = _off_diagonal(norms[:, None] * norms) / self.d
        if not whole > 0:
            return None
        return float(max(0.0, 1 - kept / whole) ** 0.5)


def _off_diagonal(G: Tensor) -> float:
    return float((G.sum() - G.diagonal().sum()).double())


def _pairs(G: Tensor) -> float:
    return _off_diagonal(G.square())


class ReducedSum(KroneckerSum):
    """A `KroneckerSum` whose sides keep what the unit says."""

    kinds = ("reduced",)  # type: ignore[assignment]

    def __init__(self, unit: Unit, space: ParameterSpace) -> None:
        super().__init__(unit, space)
        L = self.layout
        table = unit.blocks[0].is_embedding
        self.A = self.zeros(L.groups, L.d_in) if table else None
        self.input = Half(unit.input, L.groups, L.columns, space) if not table else None
        self.output = Half(unit.output, L.groups, L.d_out, space)

    def add_inputs(self, factors: dict[tuple[str, ...], MatrixFactor]) -> None:  # noqa: D102
        self._add_inputs(factors[self.unit.blocks[0].names], self.layout)

    def _begin(self, factor: MatrixFactor, patches: bool = False) -> None:
        """The sides are there from the start."""

    def _add_gradients(self, factor: MatrixFactor) -> None:
        z = factor.block.matrix
        for s in pieces_of(factor, 2 * z.groups * z.d_out * factor.k * z.positions):
            G = factor.cotangents(s)
            if factor.block.is_embedding:
                G = G * (factor.indices(s) >= 0)[None, :, None, None]
            for g in G:
                self.output.add(g.sum(-1, keepdim=True) if self.unit.sharing == "reduce" else g)

    def _add_rows(self, A: Tensor) -> None:
        assert self.input is not None
        A = A.mean(-1, keepdim=True) if self.unit.sharing == "reduce" else A
        if self.unit.input.kind == "full":
            add_inputs(self.input.S, A, self.layout.bias)
            return
        ones = A.new_ones(*A.shape[:2], 1, A.shape[3])
        self.input.add(torch.cat([A, ones], 2) if self.layout.bias else A)

    def finish(self, n: int) -> EigenPiece:  # type: ignore[override]
        """The factors in their eigenbases, with the products of their eigenvalues."""
        s_B, U_B = self.output.spectrum(n if self.unit.sharing == "reduce" else max(1, self.positions))
        if self.input is None:
            assert self.A is not None
            s_A, U_A = self.A / n, self.A[:, :0]
        else:
            s_A, U_A = self.input.spectrum(n)
        shared = self.unit.output.kind == "shared"
        s = (s_B[:, : 1 if shared else None, None] * s_A[:, None, :])[:, None].expand(-1, -1, s_B.shape[1], -1)
        kind = LowRankEigenPiece if self.unit.output.kind == "low rank" else ReducedEigenPiece
        return kind(self.unit.names, U_B, None if U_A.dim() == 2 else U_A, s, s_B, s_A, self.layout)

    def errors(self) -> dict[str, float | None]:
        """Of the sides that are not full."""
        halves = {"output": self.output, "input": self.input}
        return {k: h.error() for k, h in halves.items() if h is not None and h.side.kind != "full"}


class ReducedScalings(Sum):
    """EKFAC's scalings in such bases: mean of squared per-example gradients, over the outputs too if they share."""

    kinds = ()

    def __init__(self, unit: Unit, space: ParameterSpace, basis: EigenPiece) -> None:
        super().__init__(unit, space)
        self.basis = basis
        self.shared = unit.output.kind == "shared"
        g, _, _, i = basis.s.shape
        own = basis.s[:, 0]  # its memory: the products of the eigenvalues are not needed any more
        self.s = own.new_zeros(g, 1, i) if self.shared else own.zero_()

    def add(self, chunk: Chunk) -> None:  # noqa: D102
        factor, E = chunk.matrix(self.unit.blocks[0].names), self.basis
        z = factor.block.matrix
        if factor.block.is_embedding:
            for s in pieces_of(factor, 4 * factor.k * z.d_out * z.positions):
                tokens, g = token_gradients(factor, s)
                g = _turned(E.U_B, g.mT[:, None, None])[:, 0, 0].mT.square().sum(0)  # [m, d]
                self.s[0].index_add_(1, tokens, (g.mean(1, keepdim=True) if self.shared else g).T)
            return
        o, i, T = self.s.shape[1], self.s.shape[2], z.positions
        for s in pieces_of(factor, z.groups * T * (i + factor.k * (o + z.d_out)) + z.groups * z.d_out * i):
            A, G = factor.operand(s), _turned(E.U_B, factor.cotangents(s))
            if self.basis.layout.bias:
                A = torch.cat([A, A.new_ones(*A.shape[:2], 1, T)], 2)
            A = _turned(E.U_A, A[None])[0]
            if not self.shared:
                add_squares(self.s, G, A)
                continue
            step = max(1, FEW.get(G.device.type, ROOM) // (i * z.groups))
            for g in torch.split(G, step, dim=3):
                own = self.s.new_zeros(z.groups, g.shape[3], i)
                add_squares(own, g, A)
                self.s += own.sum(1, keepdim=True) / z.d_out

    def finish(self, n: int) -> Piece:  # noqa: D102
        E = self.basis
        s = self.s.div_(n)[:, None].expand(E.s.shape)
        return type(E)(E.names, E.U_B, E.U_A, s, E.s_B, E.s_A, E.layout)


SCALINGS["reduced"] = ReducedScalings


def _turned(U: Tensor | None, X: Tensor) -> Tensor:
    """U^T X for X [k, b, g, d, T]."""
    if U is None or U.dim() == 2:
        return X
    if U.dim() == 3:
        return rotate(U, X)
    k, b, g, d, T = X.shape
    apart = X.reshape(k, b, g * U.shape[1], -1, T)
    return rotate(U.flatten(0, 1), apart).reshape(k, b, g, d, T)
