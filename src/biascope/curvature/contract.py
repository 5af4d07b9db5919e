"""Contractions of a matrix factor: rows and second moments of per-example gradients, mostly without forming them.

With G [k, b, g, o, T] (cotangents, examples, groups, outputs, positions) and A [b, g, i, T], the gradient of example b
under cotangent k is sum_t G_t A_t^T. Positions are summed before squaring; cotangents after.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from biascope.network.layers.blocks import Factor, MatrixFactor, some

CACHED = ("cpu",)  # devices on which many small products in the cache beat few large ones
WORKSPACE = {"cpu": 2**25, "cuda": 2**30}  # larger ones malloc takes fresh from the system, page by page
TERMS = 4096  # of a sum, in one matrix product
NARROW = 16  # columns up to which a sum of their products is in float64
TRIANGLE = {"cpu": 384, "cuda": 1024}  # size from which half of a symmetric product is left out
SPLIT, SHORT = 16, 512  # products into which a GPU splits a sum, and their least terms: one alone would leave it idle
BAND = {"cpu": 96, "cuda": 512}  # rows of the triangle that are computed at once
LONG = 256  # positions from which the matrices of single examples are multiplied as they are
PADDED = {"cpu": 2**15, "cuda": 2**23}  # inputs up to which a copy with ones costs less than more operations do
TRAFFIC = 30  # writing and squaring one number costs about as much as this many multiplications


def pieces_of(factor: MatrixFactor, per_example: int) -> Iterable[slice]:
    """Slices of examples whose temporaries (per_example numbers each) fit the workspace."""
    limit = WORKSPACE.get(factor.inputs[0].device.type, 2**26)
    step = max(1, limit // max(1, per_example * factor.inputs[0].element_size()))
    n = factor.n
    return (slice(0, n),) if step >= n else [slice(s, min(s + step, n)) for s in range(0, n, step)]


def operand(factor: MatrixFactor, s: slice, bias: bool) -> Tensor:
    """A [b, g, i, T], with a row of ones for the bias if asked: the homogeneous input."""
    A = factor.operand(s)
    return torch.cat([A, A.new_ones(*A.shape[:2], 1, A.shape[3])], 2) if bias else A


def rotate(U: Tensor, X: Tensor, bias: bool = False) -> Tensor:
    """U^T X for U [g, d, d] and X [..., g, d, T]; with `bias`, X lacks its last row, which is ones.

    One multiplication of all rows [..., T, d], or, where there are many positions, one per example, without a copy.
    """
    g, d, T = X.shape[-3:]
    weight, ones = (U[:, :d], U[:, d:]) if bias else (U, None)
    if g == 1 and T >= LONG:
        out = X.new_empty(*X.shape[:-2], U.shape[-1], T)
        for x, y in zip(X, out) if X.dim() == 5 else ((X, out),):
            _turn(weight[0].T, None if ones is None else ones[0].T, x[:, 0], y[:, 0])
        return out
    rows = X.movedim(-3, 0).mT  # [g, ..., T, d]
    flat = rows.reshape(g, -1, d)
    turned = flat @ weight if ones is None else torch.baddbmm(ones, flat, weight)
    return turned.reshape(*rows.shape[:-1], U.shape[-1]).mT.movedim(0, -3)


def _turn(W: Tensor, ones: Tensor | None, X: Tensor, out: Tensor) -> None:
    """out [b, e, T] = W X + ones for W [e, d], X [b, d, T], ones [e, 1]."""
    if X.device.type in CACHED:
        for x, y in zip(X, out):
            if ones is None:
                torch.mm(W, x, out=y)
            else:
                torch.addmm(ones, W, x, out=y)
    elif ones is None:
        torch.bmm(W.expand(len(X), -1, -1), X, out=out)
    else:
        torch.baddbmm(ones, W.expand(len(X), -1, -1), X, out=out)


def is_triangular(d: int, device: torch.device) -> bool:
    """Is only the upper triangle of a second moment [d, d] summed?"""
    return d >= TRIANGLE.get(device.type, 384)


def add_second_moment(total: Tensor, Z: Tensor) -> None:
    """total [g, d, d] += Z Z^T for Z [g, d, N]; of large matrices only the upper triangle counts (see `symmetric`).

    In blocks of terms, since one long float32 sum would lose three digits, and of rows, since the lower half of a
    symmetric product need not be computed.
    """
    d, N = Z.shape[1:]
    size = terms_of(N, Z.device)
    whole = N // size
    if is_triangular(d, Z.device):
        width = BAND.get(Z.device.type, 128)
        for T, X in zip(total, Z):
            if whole > 1 and X.device.type not in CACHED:
                H = X[:, : whole * size].view(d, whole, size).transpose(0, 1)
                for i in range(0, d, width):
                    T[i : i + width, i:] += torch.bmm(H[:, i : i + width], H[:, i:].mT).sum(0)
                X = X[:, whole * size :]
            for terms in torch.split(X, TERMS, dim=1) if X.shape[1] else ():
                for i in range(0, d, width):
                    T[i : i + width, i:].addmm_(terms[i : i + width], terms[i:].T)
        return
    if whole > 1:  # the blocks' products are smaller than Z
        H = Z[..., : whole * size].reshape(len(Z), d, whole, size).transpose(1, 2)
        total += (H @ H.mT).sum(1)
        Z = Z[..., whole * size :]
    if Z.shape[2]:
        total.baddbmm_(Z, Z.mT)


def terms_of(N: int, device: torch.device) -> int:
    """How many of N terms go into one product."""
    return TERMS if device.type in CACHED else min(TERMS, max(SHORT, N // SPLIT))


def add_rows(total: Tensor | None, X: Tensor) -> Tensor:
    """total [d, d] + X^T X for X [N, d], in place, with the triangle and the blocks of `add_second_moment`.

    Where there is no total yet, the first product is it.
    """
    dtype = X.dtype
    if is_triangular(X.shape[1], X.device):
        total = X.new_zeros(X.shape[1], X.shape[1]) if total is None else total
        add_second_moment(total[None], X.T[None])
        return total
    if X.shape[1] <= NARROW and X.device.type in CACHED:  # as fast there: BLAS has no kernel for it, and loses a digit
        X = X.double()
        product = torch.mm(X.T, X)
        return product.to(dtype) if total is None else total.add_(product)
    if total is None and X.shape[0] <= (TERMS if X.device.type in CACHED else 2 * TERMS):
        return torch.mm(X.T, X)  # cuBLAS splits a sum as well as we could
    size = terms_of(len(X), X.device)
    whole = len(X) // size
    if whole > 1 and X.device.type not in CACHED:  # one operation, and more work at once than one product gives a GPU
        blocks = some(X, slice(0, whole * size)).view(whole, size, -1)
        product = torch.bmm(blocks.transpose(1, 2), blocks).sum(0)
        total = product if total is None else total.add_(product)
        if len(X) == whole * size:
            return total
        X = X[whole * size :]
    for terms in torch.split(X, TERMS) if len(X) > TERMS else (X,):
        total = torch.mm(terms.T, terms) if total is None else total.addmm_(terms.T, terms)
    assert total is not None
    return total


def add_homogeneous(total: Tensor | None, X: Tensor) -> Tensor:
    """`add_rows` of X [N, d] beside a column of ones: [d + 1, d + 1]."""
    if X.numel() <= PADDED.get(X.device.type, 0):
        return add_rows(total, torch.cat([X, X.new_ones(X.shape[0], 1)], 1))
    if total is None:
        total = X.new_zeros(X.shape[1] + 1, X.shape[1] + 1)
    add_rows(total[:-1, :-1], X)
    _add_border(total, X.sum(0), len(X))
    return total


def _add_border(total: Tensor, sums: Tensor, count: int) -> None:
    """What a column of `count` ones adds to a second moment [..., d + 1, d + 1]: sums [..., d] and the count."""
    total[..., :-1, -1].add_(sums)
    total[..., -1, :-1].add_(sums)
    total[..., -1, -1].add_(count)


def add_gradients(total: Tensor, G: Tensor) -> None:
    """total [g, o, o] += sum of G_t G_t^T over cotangents, examples and positions of G [k, b, g, o, T]."""
    if by_example(G.shape[-2], G.shape[-1], G.device):
        for X in G:
            total += (X @ X.mT).sum(0)
    else:
        add_second_moment(total, G.permute(2, 3, 0, 1, 4).flatten(2))


def by_example(o: int, T: int, device: torch.device) -> bool:
    """Are gradients [o, T] multiplied example by example? Then they need no copy in another order."""
    return not is_triangular(o, device) and o <= T and LONG <= T


def add_inputs(total: Tensor, A: Tensor, bias: bool) -> None:
    """total [g, i, i] += sum of A_t A_t^T over examples and positions of A [b, g, i, T], with `bias` beside ones."""
    i = A.shape[2]
    add_second_moment(total[:, :i, :i], A.permute(1, 2, 0, 3).flatten(2))
    if bias:
        _add_border(total, A[..., 0].sum(0) if A.shape[3] == 1 else A.sum((0, 3)), A.shape[0] * A.shape[3])


def mean_moment(total: Tensor, count: int) -> Tensor:
    """A second moment's sum over `count`, made exactly symmetric."""
    if is_triangular(total.shape[-1], total.device):
        return symmetric(total).div_(count)
    return (total + total.transpose(-2, -1)).mul_(0.5 / count)


def symmetric(total: Tensor) -> Tensor:
    """The whole of a second moment of which the upper triangle was summed, in place."""
    d = total.shape[-1]
    width = BAND.get(total.device.type, 128)
    for i in range(0, d, width):
        j = i + width
        total[:, j:, i:j] = total[:, i:j, j:].mT
        square = total[:, i:j, i:j].triu()
        total[:, i:j, i:j] = square + square.triu(1).mT
    return total


def squared_norms(factor: MatrixFactor) -> Tensor:
    """sum_k sum_b of squared gradient norms, a number: through [T, T] Gram matrices or through the gradients."""
    z = factor.block.matrix
    bias, total = factor.has_bias, torch.zeros((), dtype=torch.float64, device=factor.grads[0].device)
    if factor.block.is_embedding:
        for s in pieces_of(factor, factor.k * z.d_out * z.positions * 2):
            total += token_gradients(factor, s)[1].square().sum(dtype=torch.float64)
        return total
    by_gram = z.positions * (z.d_in + z.d_out) < z.d_in * z.d_out or z.positions == 1
    cost = z.groups * (2 * z.positions**2 if by_gram else z.d_in * z.d_out)
    for s in pieces_of(factor, cost + z.groups * z.positions * (z.d_in + factor.k * z.d_out)):
        A, G = operand(factor, s, bias), factor.cotangents(s)
        if by_gram:
            AA = A.mT @ A
            for g in G:
                total += (AA * (g.mT @ g)).sum(dtype=torch.float64)
        else:
            for g in G:
                total += (g @ A.mT).square_().sum(dtype=torch.float64)
    return total


def token_gradients(factor: MatrixFactor, s: slice) -> tuple[Tensor, Tensor]:
    """An embedding's gradient where it is not zero: tokens [m] and [k, m, d], one entry per (example, token) pair."""
    z = factor.block.matrix
    idx = factor.indices(s)
    example = torch.arange(len(idx), device=idx.device)[:, None].expand_as(idx)
    valid = idx >= 0
    pairs, inverse = torch.unique(example[valid] * z.d_in + idx[valid], return_inverse=True)
    G = factor.cotangents(s)[:, :, 0].mT[:, valid]  # [k, positions, d]
    sums = torch.zeros(G.shape[0], len(pairs), G.shape[2], dtype=G.dtype, device=G.device)
    return pairs % z.d_in, sums.index_add_(1, inverse, G)


def gradient_rows(factor: Factor, names: tuple[str, ...], s: slice) -> dict[str, Tensor]:
    """Per-example gradients {name: [k, b, numel]} of the block's parameters that are among `names`."""
    if not isinstance(factor, MatrixFactor):
        return {factor.block.names[0]: factor.rows[:, s]} if factor.block.names[0] in names else {}
    out = {}
    if factor.block.names[0] in names:
        out[factor.block.names[0]] = torch.stack([factor.weight_rows(j, s) for j in range(factor.k)])
    if factor.has_bias and factor.block.names[1] in names:
        out[factor.block.names[1]] = torch.stack([factor.bias_rows(j, s) for j in range(factor.k)])
    return out


def summed_rows(factor: Factor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Sum over the examples of their gradients {name: [k, numel]}, by one multiplication where a rule allows."""
    everything = slice(0, factor.n)
    if not isinstance(factor, MatrixFactor) or factor.block.is_embedding:
        return {name: rows.sum(1) for name, rows in gradient_rows(factor, names, everything).items()}
    out = {}
    weight = factor.block.names[0]
    if weight in names:
        z = factor.block.matrix
        parts = []
        for s in pieces_of(factor, z.groups * z.positions * (z.d_in + factor.k * z.d_out)):
            left = factor.cotangents(s).permute(0, 2, 3, 1, 4).flatten(3)  # [k, g, o, b T]
            parts.append(left @ factor.operand(s).permute(1, 0, 3, 2).flatten(1, 2))
        total = torch.stack(parts).sum(0)
        out[weight] = (total.mT if factor.rules[0].input_major else total).flatten(1)
    if factor.has_bias and factor.block.names[1] in names:
        out[factor.block.names[1]] = torch.stack([factor.bias_rows(j, everything).sum(0) for j in range(factor.k)])
    return out


# ---------------------------------------------- squared per-example gradients: diagonals of metrics, EKFAC's scalings


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
    if G.device.type in CACHED:  # one gradient at a time
        alone = G.shape[2] == 1
        multiply, sums = (torch.mm, total[0]) if alone else (torch.bmm, total)
        each, rights = torch.empty_like(sums), A[:, 0].mT if alone else A.mT
        for g in G[:, :, 0] if alone else G:
            for left, right in zip(g, rights):
                sums.addcmul_(multiply(left, right, out=each), each)
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
    return pairs <= k * (T + TRAFFIC)


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
    if G.device.type in CACHED:  # one gradient at a time
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
    if G.device.type not in CACHED:
        norms: Tensor = torch.linalg.vector_norm(G, dim=0)
        return norms.square_()
    total = G[0].square()
    for g in G[1:]:
        total.addcmul_(g, g)
    return total


def squared_cost(factor: MatrixFactor, bias: bool) -> int:
    """Numbers per example that `squared_sums` and its operands need at once."""
    z = factor.block.matrix
    i, k, T = z.d_in + bias, factor.k, z.positions
    if T == 1:
        inner = z.d_out + i
    elif by_pairs(k, T):
        inner = (z.d_out + i) * T * (T + 1) // 2 + (i + 2 * k * z.d_out) * T
    else:
        inner = 0 if factor.grads[0].device.type in CACHED else 2 * z.d_out * i  # one gradient at a time
    return z.groups * (inner + i * T + k * z.d_out * T)
