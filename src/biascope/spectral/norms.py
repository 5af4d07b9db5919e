"""Spectral norms of weight matrices, exact or by power iteration, one matrix or a stack of them."""

import torch
from torch import Tensor

from biascope.support.arguments import check_tensor
from biascope.support.limits import Count, FiniteTensor, check_shapes
from biascope.support.precision import arithmetic
from biascope.support.seeds import generator
from biascope.support.signatures import checked


@checked
@arithmetic("float32")  # products may be asked for in tf32, with three digits
def spectral_norm(w: FiniteTensor, iterations: Count | None = None, seed: int = 0) -> Tensor:
    """Largest singular value of w [..., m, n]: [...]. Exact, or by `iterations` steps of power iteration on W^T W.

    The iteration approaches from below, at any scale of w. (Iterating on W itself, as is sometimes done, does not give
    the spectral norm of a matrix that is not symmetric.)

    Example:
        >>> spectral_norm(torch.diag(torch.tensor([3.0, 1.0]))), round(float(spectral_norm(torch.eye(4), 10)), 4)
        (tensor(3.), 1.0)
    """
    check_shapes("w [..., m, n]", check_tensor(w, "w", floating=True))
    w = w.detach()
    if iterations is None:
        found: Tensor = torch.linalg.matrix_norm(w, 2)
        return found
    largest = w.abs().amax((-2, -1), keepdim=True)
    w = w / torch.where(largest > 0, largest, 1)  # so that no square over- or underflows, whatever the scale of w
    v = torch.randn(w.shape[-1], 1, generator=generator(seed, "power iteration"), dtype=torch.float64, device="cpu")
    v = v.to(w.device, w.dtype).expand(*w.shape[:-2], -1, -1)
    for _ in range(iterations):
        v = _unit(w.mT @ _unit(w @ _unit(v)))
    norm: Tensor = (w @ v).norm(dim=-2, keepdim=True) * largest
    return norm[..., 0, 0]


def _unit(v: Tensor) -> Tensor:
    """Columns v [..., n, 1] of length 1; those that are 0 stay 0."""
    size = v.norm(dim=-2, keepdim=True)
    return v / torch.where(size > 0, size, 1)
