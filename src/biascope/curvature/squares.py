"""Sums of squared per-example gradients, entry by entry: the diagonal of a metric, and EKFAC's scalings.

With G [k, b, g, o, T] and A [b, g, i, T] as in `contract`: total [g, o, i] += sum_k sum_b (sum_t G_t A_t^T)^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from biascope.curvature import contract
from biascope.layers import MatrixFactor


def add_squares(total: Tensor, G: Tensor, A: Tensor) -> Tensor | None:
    """total [g, o, i] += sum_k sum_b (sum_t G_t A_t^T)^2; with one position, gives sum_k G^2 [b, g, o] for the bias."""
    if G.shape[-1] > 1:
        total += squared_sums(G, A)
        return None
    GG = squares(G[..., 0])
    total.baddbmm_(GG.permute(1, 2, 0), A[..., 0].square().transpose(0, 1))
    return GG


def squared_sums(G: Tensor, A: Tensor) -> Tensor:
    """sum_k sum_b (sum_t G_t A_t^T)^2, entry by entry: [g, o, i].

    One position: (g * g)^T (a * a). Few positions: products of pairs of positions, summed over the cotangents before
    the one multiplication. Many: per-example gradients, squared.
    """
    k, _, _, _, T = G.shape
    if T == 1:
        return squares(G[..., 0]).permute(1, 2, 0) @ A[..., 0].square().transpose(0, 1)
    if by_pairs(k, T):
        return _sums_of_pairs(G, A)
    total = torch.zeros(*G.shape[2:4], A.shape[2], dtype=G.dtype, device=G.device)
    if G.device.type in contract.CACHED:  # one gradient at a time
        each = torch.empty_like(total)
        for g in G:
            for left, right in zip(g, A.mT):
                total.addcmul_(torch.matmul(left, right, out=each), each)
        return total
    for g in G:
        _add_norms(total, torch.matmul(g, A.mT))
    return total


def _add_norms(total: Tensor, D: Tensor) -> None:
    """total += sum_b D_b^2: squared and summed in one pass."""
    norms: Tensor = torch.linalg.vector_norm(D, dim=0)
    total.addcmul_(norms, norms)


def by_pairs(k: int, T: int) -> bool:
    """Are products of pairs of T positions less work than k gradients?"""
    pairs = T * (T + 1) // 2
    return pairs <= k * (T + contract.TRAFFIC)


def _sums_of_pairs(G: Tensor, A: Tensor) -> Tensor:
    """sum_{t, u} (sum_k G_t G_u) (A_t A_u) with t <= u, by the distance of t and u: slices, which need no copy."""
    k, b, g, o, T = G.shape
    left, right = G.permute(0, 2, 1, 4, 3).contiguous(), A.permute(1, 0, 3, 2).contiguous()  # [., g, b, T, o or i]
    count = T * (T + 1) // 2
    GG, AA = G.new_empty(g, b, count, o), A.new_empty(g, b, count, A.shape[2])
    start = 0
    for d in range(T):
        at, m = slice(start, start + T - d), T - d
        torch.mul(right[:, :, :m], right[:, :, d:], out=AA[:, :, at])
        if k == 1:
            torch.mul(left[0, :, :, :m], left[0, :, :, d:], out=GG[:, :, at])
        else:
            torch.sum(left[:, :, :, :m] * left[:, :, :, d:], 0, out=GG[:, :, at])
        start += m
    GG[:, :, T:] *= 2  # t < u stands for u < t too
    return GG.flatten(1, 2).mT @ AA.flatten(1, 2)


def add_turned_squares(total: Tensor, G: Tensor, A: Tensor, U: Tensor, bias: bool) -> None:
    """total [o, i] += sum_k sum_b ((sum_t G_t a_t^T) U)^2 for one group; with `bias`, a lacks its last entry, a one.

    The gradients are formed and then multiplied with U [i, i]. This is less work than to turn all a_t first where there
    are more positions than rows of gradients, k o < T.
    """
    b, i, o = len(A), A.shape[2], G.shape[3]
    rows = A[:, 0].mT
    if G.device.type in contract.CACHED:  # one gradient at a time
        D, turned = A.new_empty(o, len(U)), A.new_empty(o, len(U))
        own = torch.zeros_like(turned)
        for g in G[:, :, 0]:
            for left, right in zip(g, rows):
                torch.mm(left, right, out=D[:, :i])
                if bias:
                    torch.sum(left, 1, out=D[:, i])
                own.addcmul_(torch.mm(D, U, out=turned), turned)
        total += own
        return
    D = A.new_empty(b, o, len(U))
    for g in G[:, :, 0]:
        torch.bmm(g, rows, out=D[:, :, :i])
        if bias:
            torch.sum(g, 2, out=D[:, :, i])
        _add_norms(total, (D.view(b * o, -1) @ U).view(b, o, -1))


def squares(G: Tensor) -> Tensor:
    """sum_k G_k * G_k for G [k, ...], without a temporary of that size."""
    if len(G) == 1:
        g = G[0]
        return g * g
    if G.device.type not in contract.CACHED:
        norms: Tensor = torch.linalg.vector_norm(G, dim=0)
        return norms.square_()
    total = G[0].square()
    for g in G[1:]:
        total.addcmul_(g, g)
    return total


def squared_cost(factor: MatrixFactor, bias: bool) -> int:
    """Numbers per example that `squared_sums` and its operands need at once."""
    z = factor.block.sizes
    assert z is not None
    i, k, T = z.d_in + bias, factor.k, z.positions
    if T == 1:
        inner = z.d_out + i
    elif by_pairs(k, T):
        inner = (z.d_out + i) * T * (T + 1) // 2 + (i + 2 * k * z.d_out) * T
    else:
        inner = 0 if factor.grads[0].device.type in contract.CACHED else 2 * z.d_out * i  # one gradient at a time
    return z.groups * (inner + i * T + k * z.d_out * T)
