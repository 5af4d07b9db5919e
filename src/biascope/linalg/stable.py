"""Dense steps that survive rounding: symmetrising, eigenvalues of a covariance, singular values of tall blocks."""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from biascope.support.errors import InputError
from biascope.support.limits import shaped
from biascope.support.signatures import checked


class Eigh(NamedTuple):
    """Eigenvalues [n] descending and eigenvectors [n, n] in columns."""

    values: Tensor
    vectors: Tensor


def symmetrise(A: Tensor) -> Tensor:
    """(A + A^T) / 2 over the last two dimensions, exactly symmetric."""
    if A.shape[-2:] != A.mT.shape[-2:]:  # a row plus a column would be a matrix
        raise InputError(f"a square matrix is needed, not one of shape {list(A.shape)}")
    return (A + A.mT) / 2


def fix_signs(vectors: Tensor) -> Tensor:
    """Flip columns [n, k] so that each one's entry of largest magnitude is positive."""
    if not vectors.numel():
        return vectors.clone()
    peak = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(peak < 0, -1.0, 1.0).to(vectors.dtype)


@checked
def psd_eigh(A: Annotated[Tensor, shaped(2, floating=True)], clip: bool = True) -> Eigh:
    """Eigendecomposition of a positive semi-definite matrix [n, n], computed in float64, given back in A's dtype.

    A is symmetrised; negative eigenvalues (rounding) become 0 when `clip`; a failure of the solver is answered by a
    growing jitter on the diagonal, taken off the eigenvalues again. Signs follow `fix_signs`.

    Example:
        >>> import torch
        >>> psd_eigh(torch.diag(torch.tensor([1.0, 3.0]))).values
        tensor([3., 1.])
    """
    S = symmetrise(A.detach().double())
    if not torch.isfinite(S).all():
        raise InputError(f"psd_eigh: the {len(S)}x{len(S)} matrix holds NaN or infinity")
    values, vectors = _eigh_with_jitter(S)
    values, vectors = values.flip(0), fix_signs(vectors.flip(1))
    if clip:
        values = values.clamp(min=0.0)
    return Eigh(values.to(A.dtype), vectors.to(A.dtype))


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
    """
    Q, R = torch.linalg.qr(X)
    try:
        U, s, Vh = torch.linalg.svd(R.double(), full_matrices=False)
    except RuntimeError as error:  # torch.linalg.LinAlgError; not exported by its stubs
        raise InputError(f"a matrix {list(X.shape)} has no singular values: it holds NaN or infinity") from error
    return Q @ U.to(X.dtype), s.to(X.dtype), Vh.to(X.dtype)
