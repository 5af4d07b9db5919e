"""EKFAC's scalings from the examples of one step: squares of their gradients in the eigenbasis, for a stack of units.

Convolutions under SUA turn their input once, before the patches are cut out of it (turning every patch would be nine
times the work for a 3 x 3 kernel); everything else goes through the curvature's own sums.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from biascope.curvature import contract
from biascope.curvature.kronecker import EigenPiece
from biascope.curvature.sums import EigenSum
from biascope.layers.rules import Conv
from biascope.optim.hooks import Call
from biascope.optim.stacks import Stack
from biascope.optim.units import LayerUnit, Offset

Batches = list[list[Call]]


def batch_scalings(stack: Stack, seen: list[Batches], scale: float) -> Tensor:
    """s [m g, e, o, i]: sum over the examples of the squared gradients in the basis, times scale^2.

    `seen` holds, for every unit, its calls, those of the same examples together.
    """
    E = stack.basis
    if isinstance(stack.units[0].rule, Offset):
        rows = [_bias_rows(unit, batches) for unit, batches in zip(stack.units, seen)]
        turned = torch.bmm(rows[0] if len(rows) == 1 else torch.cat(rows), E.U_B)
        norms: Tensor = torch.linalg.vector_norm(turned, dim=1)
        return norms.mul_(scale).square_().view(E.s.shape)
    totals = [_squares(*each) for each in zip(stack.units, stack.parts, seen)]
    if E.layout.offsets == 1:
        return (totals[0] if len(totals) == 1 else torch.cat(totals)).mul_(scale**2).view(E.s.shape)
    s = torch.empty_like(E.s, memory_format=torch.contiguous_format)
    for total, own in zip(totals, torch.split(s, len(totals[0]))):
        torch.mul(total.view(*total.shape[:2], E.layout.offsets, -1).transpose(1, 2), scale**2, out=own)
    return s


def _bias_rows(unit: LayerUnit, batches: Batches) -> Tensor:
    """Gradients of a bias by itself [g, n, o], example by example."""
    found = []
    for calls in batches:
        rows = [unit.rule.cotangent(_examples(unit.tensors(call)[1], call)) for call in calls]
        found.append((rows[0] if len(rows) == 1 else torch.stack(rows).sum(0))[..., 0])
    return (found[0] if len(found) == 1 else torch.cat(found)).transpose(0, 1)


def _examples(t: Tensor, call: Call) -> Tensor:
    return t.reshape(call.examples, -1, *t.shape[1:])


def _squares(unit: LayerUnit, piece: EigenPiece, batches: Batches) -> Tensor:
    """Sum of squared gradients [g, o, e i]."""
    calls = [call for batch in batches for call in batch]
    rule, single = unit.rule, all(len(batch) == 1 for batch in batches)
    if unit.sua and isinstance(rule, Conv) and rule.groups == 1 and piece.layout.offsets > 1 and single:
        pairs = [unit.tensors(call) for call in calls]
        if all(len(x) == call.examples for (x, _), call in zip(pairs, calls)):
            total: Tensor | None = None
            for x, g in pairs:
                total = conv_squares(total, x, g, piece, rule)
            assert total is not None
            return total[None]
    sums: EigenSum | None = None
    for batch in batches:
        described, chunk = unit.chunk(batch)
        sums = sums or EigenSum(described, unit.space, piece)
        sums.add(chunk)
    assert sums is not None
    return sums.s


def conv_squares(total: Tensor | None, x: Tensor, g: Tensor, E: EigenPiece, rule: Conv) -> Tensor | None:
    """total [o, e c] + sum_b (U_B^T (sum_t g_t p_t^T) U_A)^2 for inputs x [b, c, ...], output gradients g [b, o, ...].

    Patches p and the squares are formed for as many examples at a time as the workspace holds.
    """
    assert E.U_A is not None
    if g.device.type in contract.CACHED or prod(g.shape[2:]) < contract.LONG // 4:
        G = contract.rotate(E.U_B, g.flatten(2)[:, None])[:, 0].mT  # [b, T, o]
    else:  # a GPU is busy with the matrices of single examples: no copy in another order
        G = torch.bmm(E.U_B.mT.expand(len(g), -1, -1), g.flatten(2)).mT
    X = _padded(x, rule)
    X = (X.reshape(-1, X.shape[-1]) @ E.U_A[0]).view(X.shape)
    n, T, o = G.shape
    wide = E.layout.offsets * E.layout.d_in
    limit = contract.WORKSPACE.get(g.device.type, 2**26)
    step = max(1, limit // (g.element_size() * wide * (T + o)))
    for i in range(0, n, step):
        total = _add_squares(total, G[i : i + step], _patches(X[i : i + step], rule, T))
    return total


def _padded(x: Tensor, rule: Conv) -> Tensor:
    """[b, c, ...] with zeros around, channels last."""
    X = x.movedim(1, -1)
    if not any(map(sum, rule.padding)):
        return X
    size = [d + sum(pad) for d, pad in zip(x.shape[2:], rule.padding)]
    out = x.new_zeros(len(x), *size, x.shape[1])
    out[(slice(None), *(slice(pad[0], pad[0] + d) for d, pad in zip(x.shape[2:], rule.padding)))] = X
    return out


def _patches(X: Tensor, rule: Conv, positions: int) -> Tensor:
    """[b, T, e c] of [b, ..., c]."""
    b, nd = len(X), len(rule.kernel)
    for d, (k, stride, dilation) in enumerate(zip(rule.kernel, rule.stride, rule.dilation)):
        X = X.unfold(1 + d, (k - 1) * dilation + 1, stride)[..., ::dilation]  # appends the window
    return X.movedim(1 + nd, -1).reshape(b, positions, -1)


def _add_squares(total: Tensor | None, G: Tensor, A: Tensor) -> Tensor:
    """total [o, i] + sum_b (sum_t G_t A_t^T)^2 for G [b, T, o], A [b, T, i]."""
    T = G.shape[1]
    if T * (T + 1) // 2 <= T + contract.TRAFFIC:  # products of pairs of positions: no gradient is formed
        t, u, twice = _pairs(T, G.dtype, G.device)
        GG, AA = G[:, t] * G[:, u] * twice, A[:, t] * A[:, u]
        left, rows = GG.flatten(0, 1).T, AA.flatten(0, 1)
        return left @ rows if total is None else total.addmm_(left, rows)
    if G.device.type in contract.CACHED:  # one gradient at a time
        total = G.new_zeros(G.shape[2], A.shape[2]) if total is None else total
        each = torch.empty_like(total)
        for left, right in zip(G.mT, A):
            total.addcmul_(torch.mm(left, right, out=each), each)
        return total
    norms: Tensor = torch.linalg.vector_norm(torch.bmm(G.mT, A), dim=0)  # squares and sums in one pass
    return norms.square_() if total is None else total.addcmul_(norms, norms)


@lru_cache(maxsize=64)
def _pairs(T: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of positions, and how often each counts [., 1]; made once, since a GPU is waited for when sent them."""
    t, u = torch.triu_indices(T, T, device="cpu")
    return t.to(device), u.to(device), torch.where(t == u, 1.0, 2.0)[:, None].to(device, dtype)
