"""Contract one block's factors into a kernel, without forming the Jacobian of the whole network.

Kernel layout while it is being summed: "full" [k, n1, k, n2], "trace" [n1, n2], "diagonal" [k, n1, n2], where k counts
cotangents (the outputs asked for). Two ways, chosen per block by the planner:

- **gram**: never form a weight gradient. With input Gram AA = A_i^T A_j [T, T'] and gradients G,
      K[i, j] = sum_{t, t'} AA[t, t'] <G_i[:, t], G_j[:, t']>,
  for T = 1 the Hadamard product of two Gram matrices. Cost ~ n^2 T^2 (d_in + k d_out).
- **contract**: form per-example gradients of a slice of output channels and multiply: n k T p + n^2 k^2 p.

Where x2 is None only what is needed of the symmetric kernel is computed; `mirror` fills the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.layers import Factor, MatrixFactor, RowsFactor

LONG = 1 << 13  # float32 products longer than this are summed in pieces: one long sum loses digits


@dataclass(frozen=True)
class Multiply:
    """Matrix products in a given precision, accumulated in the kernel's."""

    def __call__(self, X: Tensor, Y: Tensor) -> Tensor:
        """X [m, p] @ Y [n, p]^T, in at least float32."""
        if X.dtype == torch.bfloat16:
            if X.is_cuda:
                return torch.mm(X, Y.mT, out_dtype=torch.float32)
            X, Y = X.float(), Y.float()  # same numbers, no bf16 units to use
        p, small = X.shape[1], min(len(X), len(Y))
        # thin products: in pieces, for digits; on a GPU also because one long product keeps few processors busy
        if X.dtype == torch.float32 and p > LONG and (small < 64 or (X.is_cuda and len(X) * len(Y) < 2**21)):
            return _pieces(X, Y)
        return X @ Y.mT


def _pieces(X: Tensor, Y: Tensor) -> Tensor:
    """X @ Y^T as a sum of products over LONG columns each."""
    p = X.shape[1]
    q = p // LONG
    head = q * LONG
    Xp = X[:, :head].reshape(len(X), q, LONG).transpose(0, 1)
    Yp = Y[:, :head].reshape(len(Y), q, LONG).transpose(0, 1)
    out = (Xp @ Yp.mT).sum(0, dtype=torch.float64)
    if head < p:
        out += X[:, head:] @ Y[:, head:].mT
    return out.to(X.dtype)


def _split(X: Tensor) -> tuple[Tensor, Tensor]:
    """X = high + low, high exact in tf32: products of the parts on tensor cores keep 21 of float32's 24 bits."""
    high = X.view(torch.int32).add(0x1000).bitwise_and_(-0x2000).view(torch.float32)
    return high, X - high


def _add_gram_split(K: Tensor, X: Tensor, Y: Tensor | None, mul: Multiply, workspace: int) -> None:
    """K += X X^T (or X Y^T) in float32 accuracy from tf32 products: HH + HL + LH."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        rows = len(X) + (0 if Y is None else len(Y))
        step = max(LONG, workspace // (8 * rows) // LONG * LONG)
        for c in range(0, X.shape[1], step):
            Xh, Xl = _split(X[:, c : c + step].contiguous())
            if Y is None:
                cross = mul(Xh, Xl)
                K += mul(Xh, Xh) + (cross + cross.mT)
            else:
                Yh, Yl = _split(Y[:, c : c + step].contiguous())
                K += mul(Xh, Yh) + (mul(Xh, Yl) + mul(Xl, Yh))
    finally:
        torch.set_float32_matmul_precision(before)


def add_block(
    K: Tensor, one: Factor, two: Factor | None, outputs: str, method: str, workspace: int, mul: Multiply
) -> None:
    """Add a block's share to K in place; `two` is None for the symmetric kernel."""
    assert isinstance(one, MatrixFactor)
    if method == "gram":
        other = one if two is None else _matrix(two)
        if one.block.sizes is not None and one.block.sizes.positions == 1:
            _add_hadamard(K, one, other, two is None, outputs, workspace, mul)
        else:
            _add_positions(K, one, other, two is None, outputs, workspace, mul)
    else:
        _add_contracted(K, one, None if two is None else _matrix(two), outputs, workspace, mul)


def _matrix(x: Factor) -> MatrixFactor:
    assert isinstance(x, MatrixFactor)
    return x


# ---------------------------------------------------------------------------------------------------- rows of J


def small_rows(x: Factor, method: str) -> Tensor | None:
    """Rows [k, n, p] that a block contributes directly: a small parameter, or the bias of a contracted weight."""
    if isinstance(x, RowsFactor):
        return x.rows
    return x.all_bias_rows() if method == "contract" and x.has_bias else None


def add_rows(K: Tensor, J1: Tensor, J2: Tensor | None, outputs: str, workspace: int, mul: Multiply) -> None:
    """K += J J^T from rows J [k, n, p]."""
    k = J1.shape[0]
    symmetric = J2 is None
    if outputs == "full":
        X = J1.flatten(0, 1)
        Y = X if J2 is None else J2.flatten(0, 1)
        K2 = K.view(len(X), len(Y))
        if X.is_cuda and X.dtype == torch.float32 and X.shape[1] >= 2 * LONG and K2.numel() < 2**24:
            return _add_gram_split(K2, X, None if J2 is None else Y, mul, workspace)
        for r in _row_blocks(len(X), len(Y), symmetric, workspace, K.element_size()):
            first = r.start if symmetric else 0
            K2[r, first:] += mul(X[r], Y[first:])
        return
    for j in range(k):
        target = K if outputs == "trace" else K[j]
        X, Y = J1[j], (J1 if J2 is None else J2)[j]
        for r in _row_blocks(len(X), len(Y), symmetric, workspace, K.element_size()):
            first = r.start if symmetric else 0
            target[r, first:] += mul(X[r], Y[first:])


def _row_blocks(rows: int, cols: int, symmetric: bool, workspace: int, item: int) -> Iterator[slice]:
    """Blocks of rows: a symmetric kernel skips what lies left of the block, about half of the work."""
    step = max(512 if rows > 512 else 64, -(-rows // 8)) if symmetric else rows
    step = max(1, min(step, workspace // (4 * item * cols)))  # a quarter of the workspace for the product
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _add_contracted(
    K: Tensor, one: MatrixFactor, two: MatrixFactor | None, outputs: str, workspace: int, mul: Multiply
) -> None:
    sizes = one.block.sizes
    assert sizes is not None
    width = sizes.groups * sizes.d_in  # columns per output channel of each group
    rows = one.k * (one.n + (two.n if two is not None else 0))
    step = max(1, min(sizes.d_out, workspace // max(1, 2 * rows * width * one.grads[0].element_size())))
    for o in range(0, sizes.d_out, step):
        out = slice(o, min(o + step, sizes.d_out))
        J1 = weight_slice(one, out, workspace)
        add_rows(K, J1, None if two is None else weight_slice(two, out, workspace), outputs, workspace, mul)


def weight_slice(x: MatrixFactor, out: slice, workspace: int) -> Tensor:
    """Per-example weight gradients of some output channels [k, n, columns]; columns in no special order."""
    s = x.block.sizes
    assert s is not None
    width = out.stop - out.start
    J = torch.empty(x.k, x.n, s.groups, width, s.d_in, dtype=x.grads[0].dtype, device=x.grads[0].device)
    per_example = s.groups * s.d_in * s.positions * J.element_size()
    step = max(1, min(x.n, workspace // max(1, 4 * per_example)))  # a quarter of the workspace for the patches
    for start in range(0, x.n, step):
        ex = slice(start, min(start + step, x.n))
        A = x.operand(ex).mT  # [b, groups, T, d_in]
        for j in range(x.k):
            torch.matmul(x.cotangent(j, ex)[:, :, out], A, out=J[j, ex])
    return J.flatten(2)


# ------------------------------------------------------------------------------------------- Gram, one position


def _input_gram(one: MatrixFactor, two: MatrixFactor, r: slice, c: slice, mul: Multiply) -> Tensor:
    """AA [rows * T, cols * T'] of two ranges of examples, with the bias's constant 1 added."""
    if one.is_embedding:
        i, j = one.indices(r).flatten(), two.indices(c).flatten()
        return ((i[:, None] == j) & (i >= 0)[:, None]).to(_wide(one.grads[0].dtype))
    A = one.operand(r)[:, 0].mT.flatten(0, 1)
    B = A if one is two and r == c else two.operand(c)[:, 0].mT.flatten(0, 1)
    AA = mul(A, B)
    return AA.add_(1.0) if one.has_bias else AA


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _add_hadamard(
    K: Tensor, one: MatrixFactor, two: MatrixFactor, symmetric: bool, outputs: str, workspace: int, mul: Multiply
) -> None:
    """T = 1: K += AA o GG."""
    k, n1, n2 = one.k, one.n, two.n
    every1, every2 = slice(0, n1), slice(0, n2)
    G1 = one.cotangents(every1)[:, :, 0, :, 0]  # [k, n, d_out]
    G2 = G1 if one is two else two.cotangents(every2)[:, :, 0, :, 0]
    item = _wide(G1.dtype).itemsize
    if outputs == "full":
        step = max(1, min(n1, workspace // (item * k * n2)))
        for s in range(0, n1, step):
            r = slice(s, min(s + step, n1))
            AA = _input_gram(one, two, r, every2, mul)
            for j in range(k):
                first = j if symmetric else 0
                GG = mul(G1[j, r], G2[first:].flatten(0, 1)).view(len(AA), k - first, n2)
                K[j, r, first:].addcmul_(GG, AA[:, None])
        return
    if outputs == "trace":
        G1 = G1.transpose(0, 1).flatten(1)[None]
        G2 = G1 if one is two else G2.transpose(0, 1).flatten(1)[None]
    step = max(1, min(n1, workspace // (2 * item * n2)))
    step = min(step, max(64, -(-n1 // 4))) if symmetric else step
    for s in range(0, n1, step):
        r = slice(s, min(s + step, n1))
        c = slice(s if symmetric else 0, n2)
        AA = _input_gram(one, two, r, c, mul)
        for j in range(len(G1)):
            target = K[r, c] if outputs == "trace" else K[j, r, c]
            target.addcmul_(mul(G1[j, r], G2[j, c]), AA)


# -------------------------------------------------------------------------------------- Gram, several positions


def _add_positions(
    K: Tensor, one: MatrixFactor, two: MatrixFactor, symmetric: bool, outputs: str, workspace: int, mul: Multiply
) -> None:
    """T > 1: K[i, j] = sum_{t, t'} AA[it, jt'] <G_i[:, t], G_j[:, t']>."""
    s = one.block.sizes
    assert s is not None
    k, n1, n2, T, item = one.k, one.n, two.n, s.positions, _wide(one.grads[0].dtype).itemsize
    each = k * s.d_out if outputs == "full" else T
    budget = max(1, workspace // (item * T * (T + 2 * each)))  # pairs of examples at a time
    cols = max(1, min(n2, budget))
    rows = max(1, min(n1, budget // cols))
    if symmetric:
        rows = min(rows, max(1, n1 // 4))
    for i in range(0, n1, rows):
        r = slice(i, min(i + rows, n1))
        for j in range(i if symmetric else 0, n2, cols):
            c = slice(j, min(j + cols, n2))
            _add_pair(K, one, two, r, c, outputs, mul, both=symmetric)


def _add_pair(
    K: Tensor, one: MatrixFactor, two: MatrixFactor, r: slice, c: slice, outputs: str, mul: Multiply, both: bool
) -> None:
    k = one.k
    AA = _input_gram(one, two, r, c, mul)
    b, d = r.stop - r.start, c.stop - c.start
    G1, G2 = one.cotangents(r)[:, :, 0], two.cotangents(c)[:, :, 0]  # [k, b, d_out, T]
    T1, T2 = G1.shape[-1], G2.shape[-1]
    wide = _wide(G1.dtype)
    if outputs != "full":
        AA = AA.view(b, T1, d, T2)
        groups = [slice(0, k)] if outputs == "trace" else [slice(j, j + 1) for j in range(k)]
        for j, ks in enumerate(groups):
            X = G1[ks].permute(1, 3, 0, 2).reshape(b * T1, -1)
            Y = G2[ks].permute(1, 3, 0, 2).reshape(d * T2, -1)
            target = K[r, c] if outputs == "trace" else K[j, r, c]
            target += (mul(X, Y).view(b, T1, d, T2) * AA).sum((1, 3))
        return
    # H[i, j, (k, o), t'] = sum_t G_i[k, o, t] AA[it, jt'];  K[i, k, j, l] = sum_{o, t'} H[i, j, k, o, t'] G_j[l, o, t']
    X = G1.transpose(0, 1).flatten(1, 2).to(wide)  # [b, k * d_out, T]
    H = X @ AA.view(b, T1, d * T2)  # [b, k * d_out, d * T']
    H = H.view(b, k, -1, d, T2).permute(3, 0, 1, 2, 4).reshape(d, b * k, -1)
    Y = G2.transpose(0, 1).to(wide).flatten(2)  # [d, k, d_out * T']
    block = (H @ Y.mT).view(d, b, k, k)  # [j, i, k, l]
    K[:, r, :, c] += block.permute(2, 1, 3, 0)
    if both and c.stop > r.stop:  # the same pair seen from the other side; inside the row block both are computed
        lo = max(c.start, r.stop)
        K[:, lo : c.stop, :, r] += block[lo - c.start :].permute(3, 0, 2, 1)


def mirror(K: Tensor, outputs: str) -> None:
    """Fill the lower triangle of a symmetric kernel from the upper one, in place."""
    if outputs == "full":
        k, n = K.shape[:2]
        _mirror(K.view(k * n, k * n))
    elif outputs == "trace":
        _mirror(K)
    else:
        for Kj in K:
            _mirror(Kj)


def _mirror(K: Tensor, step: int = 1024) -> None:
    n = len(K)
    for start in range(0, n, step):
        stop = min(start + step, n)
        corner = K[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).mT)
        for other in range(stop, n, step):
            end = min(other + step, n)
            K[other:end, start:stop] = K[start:stop, other:end].mT
