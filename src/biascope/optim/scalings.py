"""EKFAC's scalings from the examples of one step: squares of their gradients in the eigenbasis, for a stack of units.

Convolutions under SUA turn their input once, before the patches are cut out of it (turning every patch would be nine
times the work for a 3 x 3 kernel); everything else goes through the curvature's own sums.
"""

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from biascope.curvature import contract
from biascope.curvature.contract import squared_sums
from biascope.curvature.kronecker import EigenPiece
from biascope.curvature.sums import EigenSum
from biascope.network.layers.rules import Conv
from biascope.optim.checks import Batches
from biascope.optim.stacks import Stack
from biascope.optim.units import LayerUnit, Offset


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
        rows = [unit.rule.cotangent(unit.tensors(call)[1]) for call in calls]
        found.append((rows[0] if len(rows) == 1 else torch.stack(rows).sum(0))[..., 0])
    return (found[0] if len(found) == 1 else torch.cat(found)).transpose(0, 1)


def _squares(unit: LayerUnit, piece: EigenPiece, batches: Batches) -> Tensor:
    """Sum of squared gradients [g, o, e i]."""
    rule, U_A, single = unit.rule, piece.U_A, all(len(batch) == 1 for batch in batches)
    if unit.sua and isinstance(rule, Conv) and rule.groups == 1 and U_A is not None and single:
        pairs = [unit.tensors(batch[0]) for batch in batches]
        if piece.layout.offsets > 1 and all(x.shape[1] == 1 for x, _ in pairs):
            parts = [conv_squares(x[:, 0], g[:, 0], piece.U_B, U_A, rule) for x, g in pairs]
            return (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))[None]
    described, chunk = unit.chunk(batches[0])
    sums = EigenSum(described, unit.space, replace(piece, s=torch.empty_like(piece.s)))  # it takes that memory
    sums.add(chunk)
    for batch in batches[1:]:
        sums.add(unit.chunk(batch)[1])
    return sums.s


def conv_squares(x: Tensor, g: Tensor, U_B: Tensor, U_A: Tensor, rule: Conv) -> Tensor:
    """sum_b (U_B^T (sum_t g_t p_t^T) U_A)^2 [o, e c] for inputs x [b, c, ...], output gradients g [b, o, ...].

    Patches p and the squares are formed for as many examples at a time as the workspace holds.
    """
    if g.device.type in contract.CACHED or prod(g.shape[2:]) < contract.LONG // 4:
        G = contract.rotate(U_B, g.flatten(2)[:, None])[:, 0].mT  # [b, T, o]
    else:  # a GPU is busy with the matrices of single examples: no copy in another order
        G = torch.bmm(U_B.mT.expand(len(g), -1, -1), g.flatten(2)).mT
    X = _padded(x, rule)
    X = (X.reshape(-1, X.shape[-1]) @ U_A[0]).view(X.shape)
    n, T, o = G.shape
    wide = prod(rule.kernel) * U_A.shape[-1]
    limit = contract.WORKSPACE.get(g.device.type, 2**26)
    step = max(1, limit // (g.element_size() * wide * (T + o)))
    some = (slice(i, i + step) for i in range(0, n, step))
    parts = (squared_sums(G[s].mT[None, :, None], _patches(X[s], rule, T).mT[:, None])[0] for s in some)
    total = next(parts)
    for part in parts:
        total += part
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
