"""Contract one block's factors into a kernel, without forming the Jacobian of the whole network.

Kernel layout while it is being summed: "full" [k, n1, k, n2], "trace" [n1, n2], "diagonal" [k, n1, n2], where k counts
cotangents (the outputs asked for). Two ways, chosen per block by the planner:

- **gram**: never form a weight gradient. With input Gram AA = A_i^T A_j [T, T'] and gradients G,
      K[i, j] = sum_{t, t'} AA[t, t'] <G_i[:, t], G_j[:, t']>,
  for T = 1 the Hadamard product of two Gram matrices. Cost ~ n^2 T^2 (d_in + k d_out).
- **contract**: form per-example gradients of a slice of output channels and multiply: n k T p + n^2 k^2 p.

Where x2 is None only pairs of examples i <= j are needed (whole blocks of them are computed); `mirror` fills the rest.
"""

import math

import torch
from torch import Tensor

from biascope.linalg.tensor_cores import is_worth, product
from biascope.network.layers.blocks import Factor, MatrixFactor, RowsFactor

LARGE = 2**24  # entries of a product up to which it is made in one piece


def mul(X: Tensor, Y: Tensor) -> Tensor:
    """X [m, p] @ Y [n, p]^T, accumulated in at least float32 and without losing digits."""
    if X.dtype == torch.bfloat16:
        if X.is_cuda:
            return torch.mm(X, Y.mT, out_dtype=torch.float32)
        X, Y = X.float(), Y.float()  # same numbers, no bf16 units to use
    if X.is_cuda and is_worth(X, Y):
        return product(X, Y)
    p, piece = X.shape[1], 1024 if X.is_cuda else 8192
    # One long float32 sum loses digits, and on a GPU keeps few processors busy; large kernels have neither problem
    thin = (X.is_cuda or min(len(X), len(Y)) < 64) and len(X) * len(Y) <= 2**20
    return _pieces(X, Y, piece) if X.dtype == torch.float32 and p > piece and thin else X @ Y.mT


def _pieces(X: Tensor, Y: Tensor, piece: int) -> Tensor:
    """X @ Y^T as a sum of products over `piece` columns each."""
    p = X.shape[1]
    q = p // piece
    head = q * piece
    Xp = X[:, :head].reshape(len(X), q, piece).transpose(0, 1)
    Yp = Y[:, :head].reshape(len(Y), q, piece).transpose(0, 1)
    out = (Xp @ Yp.mT).sum(0)
    return out.add_(X[:, head:] @ Y[:, head:].mT) if head < p else out


class Scratch:
    """Buffers used again from block to block: fresh memory costs more in page faults than the work done in it."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor; it is overwritten by the next request under the same name."""
        size = math.prod(shape)
        old = self.buffers.get(name)
        if old is None or old.numel() < size or old.dtype != like.dtype:
            self.buffers.pop(name, None)
            del old
            self.buffers[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self.buffers[name][:size].view(shape)


def add_block(
    K: Tensor,
    one: MatrixFactor,
    two: MatrixFactor | None,
    outputs: str,
    method: str,
    workspace: int,
    scratch: Scratch,
) -> None:
    """Add a matrix block's share to K in place; `two` is None for the symmetric kernel."""
    if method == "contract":
        _add_contracted(K, one, two, outputs, workspace, scratch)
    elif one.block.matrix.positions == 1:
        _add_hadamard(K, one, two or one, two is None, outputs, workspace)
    else:
        _add_positions(K, one, two or one, two is None, outputs, workspace)


# ---------------------------------------------------------------------------------------------------- rows of J


def small_rows(x: Factor, method: str) -> Tensor | None:
    """Rows [k, n, p] that a block contributes directly: a small parameter, or the bias of a contracted weight."""
    if isinstance(x, RowsFactor):
        return x.rows
    return x.all_bias_rows() if method == "contract" and x.has_bias else None


def add_rows(K: Tensor, J1: Tensor, J2: Tensor | None, outputs: str, workspace: int) -> None:
    """K += J J^T from rows J [n, k, p]."""
    symmetric, other = J2 is None, J1 if J2 is None else J2
    (n1, k, _), n2 = J1.shape, len(other)
    if outputs == "diagonal":
        for j in range(k):
            add_rows(K[j], J1[:, j : j + 1], None if J2 is None else J2[:, j : j + 1], "trace", workspace)
        return
    per = k if outputs == "full" else 1  # rows of the matrix per example
    X = J1.flatten(0, 1) if outputs == "full" else J1.flatten(1)
    Y = X if symmetric else other.flatten(0, 1) if outputs == "full" else other.flatten(1)
    target = K.permute(1, 0, 3, 2) if outputs == "full" else K
    if X.is_cuda and len(X) * len(Y) <= LARGE and is_worth(X, Y):  # of a symmetric one, half is multiplied
        target += product(X, Y).view(target.shape)
        return
    step = max(1, min(_step(n1, per, symmetric), workspace // (4 * K.element_size() * len(Y) * per)))
    for i in range(0, n1, step):
        r = slice(i, min(i + step, n1))
        first = i if symmetric else 0
        block = mul(X[r.start * per : r.stop * per], Y[first * per :])
        if outputs == "full":
            target[r, :, first:] += block.view(r.stop - i, k, n2 - first, k)
        else:
            target[r, first:] += block


def _step(n: int, per: int, symmetric: bool) -> int:
    """Examples per block of rows: a symmetric kernel skips what lies left of the block, about half of the work."""
    return max(-(-64 // per), -(-n // 8)) if symmetric else n


def _add_contracted(
    K: Tensor,
    one: MatrixFactor,
    two: MatrixFactor | None,
    outputs: str,
    workspace: int,
    scratch: Scratch,
) -> None:
    sizes = one.block.matrix
    width = sizes.groups * sizes.d_in  # columns per output channel of each group
    rows = one.k * (one.n + (two.n if two is not None else 0))
    step = max(1, min(sizes.d_out, workspace // max(1, 2 * rows * width * one.grads[0].element_size())))
    for o in range(0, sizes.d_out, step):
        out = slice(o, min(o + step, sizes.d_out))
        J1 = weight_slice(one, out, workspace, scratch, "J1")
        J2 = None if two is None else weight_slice(two, out, workspace, scratch, "J2")
        add_rows(K, J1, J2, outputs, workspace)


def weight_slice(x: MatrixFactor, out: slice, workspace: int, scratch: Scratch, name: str) -> Tensor:
    """Per-example weight gradients of some output channels [n, k, columns]; columns in no special order."""
    s = x.block.matrix
    width = out.stop - out.start
    J = scratch.take(name, (x.n, x.k, s.groups, width, s.d_in), x.grads[0])
    per_example = s.groups * (s.d_in + x.k * width) * s.positions * J.element_size()
    step = max(1, min(x.n, workspace // max(1, 4 * per_example)))  # a quarter of the workspace for the patches
    for start in range(0, x.n, step):
        ex = slice(start, min(start + step, x.n))
        G = x.cotangents(ex)[:, :, :, out]  # [k, b, groups, width, T]
        A = x.operand(ex).mT  # [b, groups, T, d_in]
        if s.groups > 1:
            J[ex] = (
                (G.permute(1, 2, 0, 3, 4).flatten(2, 3) @ A).view(len(A), s.groups, x.k, width, s.d_in).transpose(1, 2)
            )
        elif width >= 64 and not J.is_cuda:  # nothing is copied
            for j in range(x.k):
                torch.bmm(G[j, :, 0], A[:, 0], out=J[ex][:, j, 0])
        elif J.is_cuda and G.stride(-1) != 1:  # features lie side by side: they stay so
            G = G[:, :, 0].transpose(0, 1).mT.contiguous().flatten(0, 1).mT  # [b * k, width, T]
            torch.bmm(G, A.expand(-1, x.k, -1, -1).flatten(0, 1), out=J[ex].view(len(G), width, s.d_in))
        else:
            G = G[:, :, 0].transpose(0, 1).flatten(1, 2)  # [b, k * width, T]
            torch.bmm(G, A[:, 0], out=J[ex].view(len(A), x.k * width, s.d_in))
    return J.flatten(2)


# ------------------------------------------------------------------------------------------- Gram, one position


def _input_gram(one: MatrixFactor, two: MatrixFactor, r: slice, c: slice) -> Tensor:
    """AA [rows * T, cols * T'] of two ranges of examples, with the bias's constant 1 added."""
    if one.block.is_embedding:
        i, j = one.indices(r).flatten(), two.indices(c).flatten()
        return ((i[:, None] == j) & (i >= 0)[:, None]).to(_wide(one.grads[0].dtype))
    A = one.operand(r)[:, 0].mT.flatten(0, 1)
    B = A if one is two and r == c else two.operand(c)[:, 0].mT.flatten(0, 1)
    AA = mul(A, B)
    return AA.add_(1.0) if one.has_bias else AA


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _add_hadamard(
    K: Tensor, one: MatrixFactor, two: MatrixFactor, symmetric: bool, outputs: str, workspace: int
) -> None:
    """T = 1: K += AA o GG."""
    k, n1, n2 = one.k, one.n, two.n
    G1 = one.cotangents(slice(0, n1))[:, :, 0, :, 0]  # [k, n, d_out]
    G2 = G1 if one is two else two.cotangents(slice(0, n2))[:, :, 0, :, 0]
    per = k * k if outputs == "full" else 1
    step = max(1, min(n1, workspace // (2 * _wide(G1.dtype).itemsize * per * n2)))
    # a symmetric kernel skips what lies left of a block of rows, which are not to be fewer than fill a product
    step = min(step, max(min(32, -(-128 // k)) if outputs == "full" else 32, -(-n1 // 8))) if symmetric else step
    if outputs == "trace":
        F1 = G1.transpose(0, 1).flatten(1)  # [n, k d_out], copied once
        F2 = F1 if one is two else G2.transpose(0, 1).flatten(1)
    for s in range(0, n1, step):
        r, c = slice(s, min(s + step, n1)), slice(s if symmetric else 0, n2)
        AA = _input_gram(one, two, r, c)
        X, Y = G1[:, r], G2[:, c]
        if outputs == "full":
            GG = mul(X.flatten(0, 1), Y.flatten(0, 1)).view(k, X.shape[1], k, Y.shape[1])
            K[:, r, :, c].addcmul_(GG, AA[None, :, None])
        elif outputs == "trace":
            K[r, c].addcmul_(mul(F1[r], F2[c]), AA)
        else:
            for j in range(k):
                K[j, r, c].addcmul_(mul(X[j], Y[j]), AA)


# -------------------------------------------------------------------------------------- Gram, several positions


def _add_positions(
    K: Tensor, one: MatrixFactor, two: MatrixFactor, symmetric: bool, outputs: str, workspace: int
) -> None:
    """T > 1: K[i, j] = sum_{t, t'} AA[it, jt'] <G_i[:, t], G_j[:, t']>."""
    s = one.block.matrix
    k, n1, n2, T, item = one.k, one.n, two.n, s.positions, _wide(one.grads[0].dtype).itemsize
    each = k * s.d_out if outputs == "full" else T
    pairs = max(1, workspace // (item * T * (T + 2 * each)))  # pairs of examples at a time
    cols = max(1, min(n2, pairs))
    rows = max(1, min(n1, pairs // cols))
    if symmetric:
        rows = min(rows, max(1, n1 // 4))
    for i in range(0, n1, rows):
        r = slice(i, min(i + rows, n1))
        for j in range(i if symmetric else 0, n2, cols):
            _add_pair(K, one, two, r, slice(j, min(j + cols, n2)), outputs)


def _add_pair(K: Tensor, one: MatrixFactor, two: MatrixFactor, r: slice, c: slice, outputs: str) -> None:
    k = one.k
    AA = _input_gram(one, two, r, c)
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
            target += mul(X, Y).view(b, T1, d, T2).mul_(AA).sum((1, 3))
        return
    # H[i, j, (k, o), t'] = sum_t G_i[k, o, t] AA[it, jt'];  K[i, k, j, l] = sum_{o, t'} H[i, j, k, o, t'] G_j[l, o, t']
    if not K.is_cuda:
        _add_pair_by_example(K, AA.view(b, T1, d * T2), G1.to(wide), G2.to(wide), r, c)
        return
    X = G1.transpose(0, 1).flatten(1, 2).to(wide)  # [b, k * d_out, T]
    H = X @ AA.view(b, T1, d * T2)  # [b, k * d_out, d * T']
    H = H.view(b, k, -1, d, T2).permute(3, 0, 1, 2, 4).reshape(d, b * k, -1)
    Y = G2.transpose(0, 1).to(wide).flatten(2)  # [d, k, d_out * T']
    K[:, r, :, c] += (H @ Y.mT).view(d, b, k, k).permute(2, 1, 3, 0)


def _add_pair_by_example(K: Tensor, AA: Tensor, G1: Tensor, G2: Tensor, r: slice, c: slice) -> None:
    """The same, one example i at a time: H stays in the cache and is never transposed (a GPU wants larger steps).

    AA [b, T, d T'], G1 [k, b, o, T], G2 [k, d, o, T'].
    """
    k, b, o, _ = G1.shape
    d, T2 = G2.shape[1], G2.shape[3]
    X = G1.mT.contiguous()  # [k, b, T, o]
    Y = G2.mT.contiguous().transpose(0, 1).reshape(d, k, T2 * o)
    for i in range(b):
        H = torch.bmm(AA[i].mT.expand(k, d * T2, -1), X[:, i]).view(k, d, T2 * o)
        K[:, r.start + i, :, c] += torch.bmm(H.transpose(0, 1), Y.mT).permute(1, 2, 0)


# ------------------------------------------------------------------------------------------------------ symmetry


def mirror(K: Tensor, outputs: str, step: int = 1024) -> None:
    """Fill the pairs i > j of a symmetric kernel from the pairs i < j, in place."""
    if outputs == "diagonal":
        for Kj in K:
            mirror(Kj, "trace", step)
        return
    full = outputs == "full"
    V = K if full else K[None, :, None, :]  # [k, n, k, n]
    n = V.shape[1]
    for i in range(0, n, step):
        r = slice(i, min(i + step, n))
        corner = V[:, r, :, r]
        upper = torch.ones(r.stop - i, r.stop - i, dtype=torch.bool, device=K.device).triu()
        corner.copy_(torch.where(upper[None, :, None, :], corner, corner.permute(2, 3, 0, 1)))
        for j in range(r.stop, n, step):
            c = slice(j, min(j + step, n))
            V[:, c, :, r] = V[:, r, :, c].permute(2, 3, 0, 1)
