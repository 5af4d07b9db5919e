# mypy: ignore-errors
"""The kernel of `tensor_cores`, in a file of its own since it cannot be read without Triton."""

import triton
import triton.language as tl


@triton.jit
def products(
    x_at, y_at, out_at, m, n, p, x_row, y_row, out_piece, piece,
    SYMMETRIC: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[s] = X[:, s] Y[:, s]^T over the s-th `piece` of the columns; tiles below the diagonal are left out."""
    i, j, s = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    if SYMMETRIC:  # noqa: SIM102 (known when it is compiled)
        if j < i:
            return
    rows = i * SIDE + tl.arange(0, SIDE)
    columns = j * SIDE + tl.arange(0, SIDE)
    x_line = x_at + rows.to(tl.int64)[:, None] * x_row
    y_line = y_at + columns.to(tl.int64)[None, :] * y_row
    x_in, y_in = rows[:, None] < m, columns[None, :] < n
    start = s * piece
    stop = tl.minimum(start + piece, p)
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for k in range(start, stop, DEPTH):
        at = k + tl.arange(0, DEPTH)
        x = tl.load(x_line + at[None, :], mask=x_in & (at[None, :] < stop), other=0.0)
        y = tl.load(y_line + at[:, None], mask=y_in & (at[:, None] < stop), other=0.0)
        total = tl.dot(x, y, total, input_precision="tf32x3")
    out_line = out_at + s.to(tl.int64) * out_piece + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out_line, total, mask=x_in & y_in)
