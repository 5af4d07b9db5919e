"""Implicit: nothing is stored. F v is a Jacobian-vector product, the outputs' Hessian, a vector-Jacobian product."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from biascope.curvature.centring import COPIES, warn_of_rounding, wide, widened
from biascope.curvature.contract import squared_norms
from biascope.curvature.families import Family
from biascope.curvature.metric import ProductMetric, Vector
from biascope.curvature.passes import Chunk, Pass
from biascope.curvature.pieces import ParameterSpace
from biascope.curvature.plain_sums import DiagonalSum
from biascope.curvature.plan import Plan, Unit
from biascope.curvature.products import Linearised, together, ways
from biascope.curvature.sums import build_pieces, mean_gradients
from biascope.linalg.elementary import Diagonal
from biascope.linalg.operator import LinearOperator
from biascope.network.layers.blocks import MatrixFactor
from biascope.support.precision import arithmetic
from biascope.support.signatures import checked

GRAM_BYTES = 2**30  # rows that are formed to get an exact Frobenius norm
COTANGENTS = 2**24  # entries of cotangents at a time in the products of a centred metric


class ImplicitMetric(ProductMetric):
    """(1/n) sum_i J_i^T H_i J_i by products over the data; sampled labels stay the same, so that it is linear.

    Trace and diagonal are exact: one pass with the layer rules. So is the Frobenius norm while the
    rows of J fit in memory; `estimate_frobenius_norm` gives an estimate with its standard error.

    Centred, F v = (1/n) sum_ik (g_ik - m_k) (g_ik - m_k)^T v with g_ik = J_i^T s_ik: the means m_k are taken off before
    the sum, where the mean of F v off F v would leave no digit of a small covariance.
    """

    def __init__(
        self, space: ParameterSpace, stream: Pass, units: list[Unit], plan: Plan, info: dict[str, Any], centred: bool
    ) -> None:
        super().__init__(space, plan, info)
        self.stream, self.units = stream, units
        stream.count()
        self.means: Tensor | None = None  # [p, width], in float64
        if centred:
            stream.copies = COPIES
            means = torch.empty(space.size, stream.family.width, dtype=torch.float64, device=space.device)
            for unit, M in mean_gradients(stream, units, wide(space)).items():
                space.put(unit.names, M, means)
            self.means = means

    @arithmetic("float32")
    def _matmat(self, X: Tensor) -> Tensor:
        with self.stream.team:
            return self._products(X)

    def _products(self, X: Tensor) -> Tensor:
        n, k, team = self.stream.stream.n, X.shape[1], self.stream.team
        out = X.new_zeros(k, len(X)) if team.size > 1 else X.new_empty(0, len(X))  # [k, p]
        centre = None if self.means is None else Centre(self.stream.family, self.means, X)
        for some, at, y, draws in self._linearised(X):
            if centre is None:
                part = at.pull(self.stream.family.apply(at.outputs, y, draws, at.tangent) / n)
            else:
                part = at.pull(centre.apply(some, at, y, draws) / n)
            if not len(out):
                out = part.reshape(k, -1) if part.numel() == X.numel() else X.new_zeros(k, len(X))
                if part.numel() == X.numel():
                    continue
            out[some] += part
        team.sum(out)
        if centre is not None:
            team.sum(centre.sums)
        return out.T if centre is None else out.T - (centre.means @ (centre.sums.T / n)).to(X.dtype)

    @checked
    @arithmetic("float32")
    def quadratic_form(self, v: Vector) -> Tensor:
        """v^T F v from J v alone: a number, or [k] for a block."""
        X, _ = self._columns(v, "quadratic_form")
        family, n = self.stream.family, self.stream.stream.n
        centre = None if self.means is None else Centre(family, self.means, X)
        total = torch.zeros(X.shape[1], dtype=self.dtype, device=self.device)
        with self.stream.team:
            for some, at, y, draws in self._linearised(X):
                if centre is None:
                    total[some] += (at.tangent * family.apply(at.outputs, y, draws, at.tangent)).sum((-2, -1))
                else:
                    centre.apply(some, at, y, draws)
            self.stream.team.sum(total, *(() if centre is None else (centre.sums, centre.squares)))
        total /= n
        if centre is not None:
            total = (centre.squares / n - (centre.sums / n).square().sum(1)).clamp_min(0.0).to(self.dtype)
        return total if isinstance(v, Tensor) and v.dim() == 2 else total[0]

    def _linearised(self, X: Tensor) -> Iterator[tuple[int | slice, Linearised, Tensor | None, Tensor | None]]:
        """The network linearised at all data in the directions X [p, k]: one column, or a slice of them, at a time."""
        f, k = self.stream.f, X.shape[1]
        for batch, group in self.stream.parts(k):
            inputs, y, draws = batch.part.inputs, batch.y, batch.draws
            how = ways(f, inputs)
            if k > 1:
                self.info["block products"] = "together" if how.block else f"one by one ({how.why})"
            if group > 1 and how.block:
                for j in range(0, k, group):
                    some = slice(j, min(j + group, k))
                    yield some, together(f, inputs, X[:, some].T), y, draws
            else:
                for j, v in enumerate(X.T.contiguous()):
                    yield j, how.single(f, inputs, v), y, draws

    @arithmetic("float32")
    def trace(self) -> Tensor:
        """Exact, by one pass: sum of squared gradient norms, without forming gradients where a rule allows."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self.stream.team:
            for chunk in self._chunks():
                for factor in chunk.factors.values():
                    if isinstance(factor, MatrixFactor):
                        total += squared_norms(factor)
                    else:
                        total += factor.rows.square().sum(dtype=torch.float64)
            self.stream.team.sum(total)
        total /= self.stream.stream.n
        if self.means is not None:
            whole, total = total, (total - self.means.square().sum()).clamp_min(0.0)
            warn_of_rounding(next(iter(self.space.shapes)), float(whole), float(total), self.dtype)
        return total.to(self.dtype)

    def _chunks(self) -> Iterator[Chunk]:
        """All chunks; for differences of sums in float64."""
        chunks = self.stream.chunks([b for u in self.units for b in u.blocks])
        return chunks if self.means is None else widened(chunks)

    @checked
    @arithmetic("float32")
    def diagonal(self, chunk: int = 256) -> Tensor:
        """Exact, by one pass with the layer rules."""
        space = self.space if self.means is None else wide(self.space)
        sums = [DiagonalSum(u, space) for u in self.units]
        out = torch.empty(self.shape[0], 1, dtype=space.dtype, device=self.device)
        with self.stream.team:
            for part in self._chunks():
                for s in sums:
                    s.add(part)
            for s in sums:
                space.put(s.unit.names, s.finish(self.stream.stream.n).diagonal()[:, None], out)
            self.stream.team.sum(out)
        if self.means is not None:
            out = (out - self.means.square().sum(1, keepdim=True)).clamp_min(0.0)
        return out[:, 0].to(self.dtype)

    @arithmetic("float32")
    def frobenius_norm(self) -> Tensor:
        """Through the Gram matrix of the rows where these fit in memory, else estimated: a warning says how well."""
        rows = self.stream.stream.n * self.stream.family.width
        if self.stream.team.size > 1 or rows * (self.shape[0] + rows) * self.dtype.itemsize > min(
            GRAM_BYTES, self.stream.limit // 2
        ):
            return super().frobenius_norm()
        blocks = tuple(b for u in self.units for b in u.blocks)
        unit = Unit(tuple(self.space.shapes), blocks, "lowrank", "")
        ((piece,), _) = build_pieces(self.stream, [unit], self.space, self.means is not None)
        self.stream.finite()
        return piece.frobenius_squared().sqrt()

    @checked
    def jacobi(self, damping: float) -> LinearOperator:
        """1 / (diag F + damping), a preconditioner for `solve`."""
        return Diagonal(1.0 / (self.diagonal() + damping))


class Centre:
    """Coordinates r_ik = (g_ik - m_k)^T v of the examples for directions X [p, k], and their sums over the examples.

    In float64: s_ik^T (J_i v) and m_k^T v are two large numbers that almost agree.
    """

    def __init__(self, family: Family, means: Tensor, X: Tensor) -> None:
        self.family, self.means = family, means
        self.offsets = X.T.double() @ means  # [k, width]
        self.sums = torch.zeros_like(self.offsets)
        self.squares = self.offsets.new_zeros(len(X.T))

    def apply(self, some: int | slice, at: Linearised, y: Tensor | None, draws: Tensor | None) -> Tensor:
        """sum_k s_ik r_ik, in the form of the tangents [..., n, c]; r and r^2 are added to the sums."""
        z, out = at.outputs, torch.zeros_like(at.tangent, dtype=torch.float64)
        step = max(1, COTANGENTS // z.numel())
        for start in range(0, self.family.width, step):
            ks = range(start, min(start + step, self.family.width))
            S = self.family.cotangents(z, y, draws, ks).double()
            own = slice(ks.start, ks.stop)
            r = torch.einsum("knc,...nc->...kn", S, at.tangent.double()) - self.offsets[some][..., own, None]
            self.sums[some][..., own] += r.sum(-1)
            self.squares[some] += r.square().sum((-2, -1))
            out += torch.einsum("...kn,knc->...nc", r, S)
        return out.to(at.tangent.dtype)
