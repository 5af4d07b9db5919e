"""Nystrom: eigenfunctions at new points, and a large kernel from some of its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.kernels.kernel import Kernel
from biascope.kernels.spectrum import Spectrum
from biascope.kernels.system import as_matrix, system
from biascope.signatures import checked


@checked
def nystrom_extension(K_new: Kernel | Tensor, spectrum: Spectrum) -> Tensor:
    """Eigenfunctions at new points: phi_j(x) = K(x, X) u_j / lambda_j, [N_new, k] in float64.

    On the points of the spectrum itself this gives the eigenvectors back, in their normalisation. A spectrum that was
    normalised gives eigenfunctions of mean square 1 under the empirical measure.

    Args:
        K_new: K(x_new, x): rows are the new points.
        spectrum: of K(x, x), from `K.eigh(k)`.

    Example:
        >>> K = torch.diag(torch.tensor([3.0, 2.0]))
        >>> spec = Spectrum(torch.tensor([3.0, 2.0]), torch.eye(2), torch.zeros(2))
        >>> nystrom_extension(K[:1], spec)
        tensor([[1., 0.]], dtype=torch.float64)
    """
    M = as_matrix(K_new, "K_new")[0].double()
    vectors, values = spectrum.vectors.to(M), spectrum.values.to(M)
    if M.shape[1] != len(vectors):
        hint = "; it looks transposed: rows are the new points" if M.shape[0] == len(vectors) else ""
        raise InputError(f"K_new has {M.shape[1]} columns, the spectrum {len(vectors)} points{hint}")
    if not bool(torch.isfinite(M).all()):
        raise InputError("K_new has NaN or infinite entries")
    floor = len(vectors) * torch.finfo(spectrum.values.dtype).eps * float(values.max())
    if not bool((values > floor).all()):
        bad = int((values <= floor).nonzero()[0])
        raise InputError(
            f"eigenvalue {bad} ({float(values[bad]):.3g}) is zero up to rounding: its eigenfunction cannot be "
            f"extended; ask for the top {bad} with K.eigh(k={bad})"
        )
    spectrum.refuse_unresolved()
    values = values * spectrum.n if spectrum.normalized else values
    return M @ vectors / values


@checked
def nystrom_kernel(K_cross: Kernel | Tensor, K_landmarks: Kernel | Tensor, cutoff: float | None = None) -> Tensor:
    """Features B [N, r] with K ~ B B^T, from the columns of some landmarks: B = K_cross U diag(lambda)^-1/2.

    K - B B^T is positive semi-definite, and zero where K has no more rank than the landmarks give.

    Args:
        K_cross: K(x, landmarks).
        K_landmarks: K(landmarks, landmarks).
        cutoff: eigenvalues of K_landmarks up to cutoff times the largest count as zero (default: rounding).

    Example:
        >>> x = torch.arange(4.0, dtype=torch.float64)[:, None]
        >>> B = nystrom_kernel(x @ x[3:].T, x[3:] @ x[3:].T)
        >>> torch.allclose(B @ B.T, x @ x.T)
        True
    """
    sys = system(K_landmarks, cutoff)
    kept = sys.kept
    features: Tensor = sys.cross(K_cross) @ (sys.vectors[:, kept] / sys.values[kept].sqrt())
    return features
