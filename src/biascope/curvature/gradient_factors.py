"""Kronecker factors from whole gradients, for matrices that no layer rule sees: fused experts, projections of tables.

Where the inputs and output gradients of a matrix are not to be had, its per-example gradients M are. Their one-sided
second moments, E M M^T and E M^T M, are the factors of Shampoo; in their eigenbases EKFAC's scalings are exact as in
any other. A tensor [e, o, i] of e experts has a pair of factors per expert.
"""

import torch

from biascope.curvature.kronecker import EigenPiece, Homogeneous, KroneckerPiece
from biascope.curvature.passes import Chunk
from biascope.curvature.pieces import ParameterSpace, Piece
from biascope.curvature.plain_sums import Sum
from biascope.curvature.plan import Unit, matrix_shape
from biascope.curvature.sums import SCALINGS


class GradientSum(Sum):
    """A = E M^T M and B = E M M^T of every group, over examples, with the cotangents summed."""

    kinds = ("gradients",)

    def __init__(self, unit: Unit, space: ParameterSpace) -> None:
        super().__init__(unit, space)
        shape = matrix_shape(space.shapes[unit.names[0]])
        assert shape is not None
        self.layout = Homogeneous(*shape)
        g, o, i = shape
        self.B, self.A = self.zeros(g, o, o), self.zeros(g, i, i)

    def add(self, chunk: Chunk) -> None:  # noqa: D102
        L = self.layout
        for rows in self.rows(chunk):
            M = rows.view(-1, L.groups, L.d_out, L.d_in).transpose(0, 1)  # [g, k b, o, i]
            wide, tall = M.transpose(1, 2).flatten(2), M.flatten(1, 2)
            self.B.baddbmm_(wide, wide.mT)
            self.A.baddbmm_(tall.mT, tall)

    def finish(self, n: int) -> Piece:  # noqa: D102
        return KroneckerPiece(self.unit.names, self.B.div_(n), self.A.div_(n), self.layout)


class GradientScalings(Sum):
    """Mean of squared per-example gradients in the eigenbases of a `GradientSum`."""

    kinds = ()

    def __init__(self, unit: Unit, space: ParameterSpace, basis: EigenPiece) -> None:
        super().__init__(unit, space)
        self.basis = basis
        self.s = torch.zeros_like(basis.s)

    def add(self, chunk: Chunk) -> None:  # noqa: D102
        L, E = self.basis.layout, self.basis
        for rows in self.rows(chunk):
            M = rows.view(-1, L.groups, 1, L.d_out, L.d_in)
            self.s += E.rotate(M).square_().sum(0)

    def finish(self, n: int) -> Piece:
        """The factors' eigenvalues are scaled so that their product has the trace of the metric, E ||M||^2."""
        E = self.basis
        root = E.s_B.sum(-1, keepdim=True).clamp_min(torch.finfo(E.s_B.dtype).tiny).sqrt()
        return EigenPiece(E.names, E.U_B, E.U_A, self.s.div_(n), E.s_B / root, E.s_A / root, E.layout)


SCALINGS["gradients"] = GradientScalings
