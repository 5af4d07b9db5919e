"""Dense steps that survive rounding: symmetrising, eigendecomposition of a covariance, very long dot products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from biascope.arguments import check_count, check_tensor
from biascope.errors import InputError


class Eigh(NamedTuple):
    """Eigenvalues [n] descending and eigenvectors [n, n] in columns."""

    values: Tensor
    vectors: Tensor


def symmetrise(A: Tensor) -> Tensor:
    """(A + A^T) / 2 over the last two dimensions, exactly symmetric.

    Example:
        >>> import torch
        >>> symmetrise(torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
        tensor([[0., 1.],
                [1., 0.]])
    """
    if check_tensor(A, "A").ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise InputError(f"symmetrise needs a square matrix, not shape {list(A.shape)}")
    return (A + A.mT) / 2


def fix_signs(vectors: Tensor) -> Tensor:
    """Flip columns [n, k] so that each one's entry of largest magnitude is positive.

    Example:
        >>> import torch
        >>> fix_signs(torch.tensor([[-2.0], [1.0]])).T
        tensor([[ 2., -1.]])
    """
    if not check_tensor(vectors, "vectors", floating=True).numel():
        return vectors.clone()
    peak = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(peak < 0, -1.0, 1.0).to(vectors.dtype)


def psd_eigh(A: Tensor, clip: bool = True) -> Eigh:
    """Eigendecomposition of a positive semi-definite matrix [n, n], computed in float64, given back in A's dtype.

    A is symmetrised; negative eigenvalues (rounding) become 0 when `clip`; a failure of the solver is answered by a
    growing jitter on the diagonal, taken off the eigenvalues again. Signs follow `fix_signs`.

    Example:
        >>> import torch
        >>> psd_eigh(torch.diag(torch.tensor([1.0, 3.0]))).values
        tensor([3., 1.])
    """
    if check_tensor(A, "A").ndim != 2:
        raise InputError(f"psd_eigh needs a matrix [n, n], not shape {list(A.shape)}")
    if not A.dtype.is_floating_point:
        raise InputError(f"psd_eigh needs a real floating-point matrix, not {A.dtype}")
    S = symmetrise(A.detach().to(dtype=torch.float64, device="cpu" if A.device.type == "mps" else A.device))
    if not torch.isfinite(S).all():
        raise InputError(f"psd_eigh: the {len(S)}x{len(S)} matrix holds NaN or infinity")
    values, vectors = _eigh_with_jitter(S)
    values, vectors = values.flip(0), fix_signs(vectors.flip(1))
    if clip:
        values = values.clamp(min=0.0)
    return Eigh(values.to(A.device, A.dtype), vectors.to(A.device, A.dtype))


def _eigh_with_jitter(S: Tensor) -> tuple[Tensor, Tensor]:
    jitter, scale = 0.0, max(S.diagonal().abs().mean().item(), torch.finfo(S.dtype).tiny)
    identity = torch.eye(len(S), dtype=S.dtype, device=S.device)
    for attempt in range(4):
        try:
            values, vectors = torch.linalg.eigh(S + jitter * identity if jitter else S)
            return values - jitter, vectors
        except RuntimeError:  # torch.linalg.LinAlgError; not exported by its stubs
            jitter = scale * 10.0 ** (attempt - 14)
    # the singular value solver is another algorithm; a symmetric matrix shifted to be positive has equal ones
    shift = torch.linalg.matrix_norm(S).item()
    left, values, _ = torch.linalg.svd(S + shift * identity)
    return values.flip(0) - shift, left.flip(1)


def thin_svd(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U [n, r], s [r], Vh [r, k] of a tall block X [n, k], r = min(n, k): QR, then the small factor in float64.

    More accurate than a float32 SVD of X (the iterative solver on GPUs stops at 1e-5), and cheaper.

    Example:
        >>> import torch
        >>> thin_svd(torch.tensor([[3.0], [4.0]]))[1].round(decimals=3).tolist()
        [5.0]
    """
    if check_tensor(X, "X").dtype not in (torch.float32, torch.float64) or X.ndim < 2:
        raise InputError(f"thin_svd needs X [n, k] in float32 or float64, not {X.dtype} {list(X.shape)}")
    Q, R = torch.linalg.qr(X)
    try:
        U, s, Vh = torch.linalg.svd(R.double(), full_matrices=False)
    except RuntimeError as error:  # torch.linalg.LinAlgError; not exported by its stubs
        raise InputError(f"a matrix {list(X.shape)} has no singular values: it holds NaN or infinity") from error
    return Q @ U.to(X.dtype), s.to(X.dtype), Vh.to(X.dtype)


def long_dot(A: Tensor, B: Tensor, chunk: int = 4096, dtype: torch.dtype | None = None) -> Tensor:
    """A @ B.T [m, n] for A [m, p], B [n, p] with p huge: exact sums of short float32 products.

    A thin float32 GEMM adds millions of numbers one after another and loses three digits. Here p is cut into chunks,
    each contracted in float32 (float64 if the inputs are), and the chunks are added in float64. No copy of A or B is
    made; extra memory is about 32 MB.

    Args:
        A: [m, p].
        B: [n, p], same dtype and device.
        chunk: length of the pieces of p; shorter is more accurate and slower.
        dtype: of the result; A's by default (float64 keeps all digits of the sum).

    Example:
        >>> import torch
        >>> long_dot(torch.ones(1, 5000), torch.ones(2, 5000))
        tensor([[5000., 5000.]])
    """
    if check_tensor(A, "A").ndim != 2 or check_tensor(B, "B").ndim != 2 or A.shape[1] != B.shape[1]:
        raise InputError(f"long_dot needs A [m, p] and B [n, p], not {list(A.shape)} and {list(B.shape)}")
    if A.dtype != B.dtype or A.device != B.device:
        raise InputError(f"long_dot: A is {A.dtype} on {A.device}, B is {B.dtype} on {B.device}; they must agree")
    chunk = check_count(chunk, "chunk")
    (m, p), n = A.shape, B.shape[0]
    work = torch.float64 if A.dtype == torch.float64 else torch.float32
    total = torch.zeros(m, n, dtype=torch.float64, device=A.device)
    if p == 0 or m == 0 or n == 0:
        return total.to(dtype or A.dtype)
    chunk = min(chunk, p)
    group = chunk * max(1, 2**21 // (m * n))  # as many chunks at a time as keep the partial products small
    whole = p - p % chunk
    for start in range(0, whole, group):
        stop = min(start + group, whole)
        left = A[:, start:stop].to(work).view(m, -1, chunk).transpose(0, 1)
        right = B[:, start:stop].to(work).view(n, -1, chunk).permute(1, 2, 0)
        total += torch.bmm(left, right).sum(0, dtype=torch.float64)
    if whole < p:
        total += A[:, whole:].to(work) @ B[:, whole:].to(work).T
    return total.to(dtype or A.dtype)


def column_dots(X: Tensor, Y: Tensor) -> Tensor:
    """Dot products of the columns of X and Y [n, k], added in float64; gives [k] in float64.

    Example:
        >>> import torch
        >>> column_dots(torch.ones(3, 2), torch.ones(3, 2))
        tensor([3., 3.], dtype=torch.float64)
    """
    if check_tensor(X, "X").shape != check_tensor(Y, "Y").shape:
        raise InputError(f"column_dots needs X and Y [n, k] alike, not {list(X.shape)} and {list(Y.shape)}")
    return (X * Y).sum(0, dtype=torch.float64)
