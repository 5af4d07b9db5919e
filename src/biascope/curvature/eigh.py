"""Eigendecompositions of Kronecker factors, checked: solvers in single precision may fail without saying so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import sqrt

import torch
from torch import Tensor

from biascope.curvature.finite import all_finite
from biascope.errors import InputError

THREADS, ROOM = 8, 2**31  # eigendecompositions at a time on a GPU, and bytes for all of them
JACOBI = 512  # up to here torch's solver in float32 is slower on a GPU than that in float64, which does no rotations


def batched_eigh(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [g, d] descending, clipped at 0, and vectors [g, d, d] of S [g, d, d]."""
    return eigh_of([S])[0]


def eigh_of(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """`batched_eigh` of several stacks of matrices, which are all checked before a GPU is asked for an answer.

    In the precision of S, whose own rounding is no smaller than the solver's; again in float64 where the solver did not
    converge or its answer fails a check.
    """
    if not all_finite(matrices):
        raise InputError("a Kronecker factor holds NaN or infinity: the outputs or gradients overflowed")
    found = _side_by_side(matrices) if matrices[0].is_cuda and len(matrices) > 1 else [_eigh(S) for S in matrices]
    certain = torch.zeros((), dtype=torch.float64, device=matrices[0].device)
    doubts = [
        certain if pair is None or S.dtype == torch.float64 else eigen_error(S, *pair)
        for S, pair in zip(matrices, found)
    ]
    errors = torch.stack(doubts).tolist()
    out = []
    for S, pair, error in zip(matrices, found, errors):
        values, U = pair if pair is not None and error < 1 else torch.linalg.eigh(S.double())
        values, U = values.flip(-1).clamp_min(0.0), U.flip(-1)
        peak = U.gather(1, U.abs().argmax(1, keepdim=True))  # each vector's largest entry shall be positive
        U = (U * peak.sign()).contiguous()  # as it comes back from a file
        out.append((values.to(S.dtype), U.to(S.dtype)))
    return out


def _eigh(S: Tensor) -> tuple[Tensor, Tensor] | None:
    """Ascending eigenvalues and vectors of S [g, d, d]; None where the solver did not converge."""
    double = S.is_cuda and S.shape[-1] <= JACOBI
    try:
        values, U = torch.linalg.eigh(S.double() if double else S)  # reads one triangle
    except RuntimeError:  # the solver did not converge in single precision
        return None
    return values.to(S.dtype), U.to(S.dtype)


def _side_by_side(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor] | None]:
    """Every matrix by a thread and on a stream of its own: one eigendecomposition leaves most of a GPU idle."""
    device = matrices[0].device
    here = torch.cuda.current_stream(device)

    def work(S: Tensor) -> tuple[Tensor, Tensor] | None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            pair = _eigh(S)
        stream.synchronize()
        for tensor in pair or ():
            tensor.record_stream(here)  # made on one stream, used on another
        return pair

    single = [(j, S[i : i + 1]) for j, S in enumerate(matrices) for i in range(len(S))]
    largest_first = sorted(single, key=lambda item: -item[1].shape[-1])
    each = 4 * 8 * largest_first[0][1].numel()  # the matrix, its vectors and the solver's own two, in float64 at worst
    with ThreadPoolExecutor(max(1, min(THREADS, ROOM // each))) as pool:
        pending = [(j, pool.submit(work, S)) for j, S in largest_first]
        found = [[done.result() for i, done in pending if i == j] for j in range(len(matrices))]
    return [_joined([pair for pair in pairs if pair is not None], len(pairs)) for pairs in found]


def _joined(pairs: list[tuple[Tensor, Tensor]], wanted: int) -> tuple[Tensor, Tensor] | None:
    if len(pairs) < wanted:
        return None
    return torch.cat([values for values, _ in pairs]), torch.cat([U for _, U in pairs])


def eigen_error(S: Tensor, values: Tensor, U: Tensor) -> Tensor:
    """How far S U = U diag(values) and U^T U = 1 [g, d, d] fail, in units of what rounding allows: a number.

    Asked of two random vectors: d^2 work beside d^3. NaN if the answer has one.
    """
    g, d = values.shape
    z = _random_vectors(d, S.dtype, S.device).expand(g, d, 2)
    Uz = U @ z
    turned = torch.baddbmm(z, U.mT, Uz, beta=-1)
    residual = torch.baddbmm(U @ (values[..., None] * z), S, Uz, beta=-1)
    errors = torch.stack([turned, residual]).abs().amax((-2, -1))
    errors[1] /= values.abs().amax(-1).clamp_min(torch.finfo(S.dtype).tiny)
    return errors.max().double() / (30 * sqrt(d) * torch.finfo(S.dtype).eps)


@lru_cache(maxsize=64)
def _random_vectors(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    z = torch.randn(d, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    unit: Tensor = z / z.norm(dim=0)
    return unit.to(device, dtype)
