"""What a geometry says of data: which examples it sees best, and which directions may be taken out of them unseen.

G [D, D] is an average geometry, S [D, D] the second moment of the data (`data_second_moment`).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.geometry.measures import positive, rows_of, symmetric
from biascope.linalg import psd_eigh
from biascope.linalg.stable import symmetrise
from biascope.support.errors import InputError
from biascope.support.limits import Count, NonNegative, check_shapes
from biascope.support.signatures import checked
from biascope.support.tables import one_line


def flip_spectrum(G: Tensor) -> Tensor:
    """V diag(reversed eigenvalues) V^T: the same eigenvectors, the order of the eigenvalues reversed.

    Example:
        >>> flip_spectrum(torch.diag(torch.tensor([3.0, 1.0]))).diagonal()
        tensor([1., 3.])
    """
    values, V = psd_eigh(symmetric(G, "G").double(), clip=False)
    return ((V * values.flip(0)) @ V.T).to(G.dtype if G.is_floating_point() else torch.float64)


@checked
def alignment_score(x: Tensor, G: Tensor) -> Tensor:
    """(x/|x|)^T G (x/|x|) per example, [n], between the extreme eigenvalues of G; equal scores keep the data's order.

    Example:
        >>> alignment_score(torch.tensor([[0.0, 2.0]]), torch.diag(torch.tensor([1.0, 5.0])))
        tensor([5.], dtype=torch.float64)
    """
    flat, G = rows_of(x, "x"), symmetric(G, "G").double()
    check_shapes("x [n, D], G [D, D]", flat, G)
    largest = flat.abs().amax(1, keepdim=True)
    if bool((largest == 0).any()):
        raise InputError(f"example {int((largest == 0).nonzero()[0, 0])} is zero: it has no direction to score")
    flat = flat / largest  # squares of very large or small entries would leave the range of float64
    mean = G.diagonal().mean()  # of all directions; taken out, so that a multiple of I gives one score and not rounding
    uneven = G - mean * torch.eye(len(G), dtype=G.dtype, device=G.device)
    return mean + ((flat @ uneven) * flat).sum(1) / flat.square().sum(1)


@dataclass(frozen=True)
class Directions:
    """Orthonormal directions [k, D] in order of importance, and the generalised eigenvalues [k] that ordered them."""

    directions: Tensor = field(repr=False)
    values: Tensor
    __repr__ = one_line


@checked
def generalised_directions(S: Tensor, G: Tensor, k: Count | None = None, ridge: NonNegative = 1e-6) -> Directions:
    """Directions of much data and little geometry: S v = l (G + ridge ||G||_2 I) v, l descending, then orthogonalised.

    The paper says "generalised eigenvectors of G and S"; which side is meant follows from its use (what may be removed
    first is what the network cannot see anyway). A G that is singular in its own precision (smallest eigenvalue at most
    D eps of the largest) needs a ridge: without one, rounding decides the order.

    Example:
        >>> found = generalised_directions(torch.eye(2), torch.diag(torch.tensor([1.0, 0.1])), k=1)
        >>> found.directions.abs().round().tolist()
        [[0.0, 1.0]]
    """
    rounded = ridge == 0 and G.is_floating_point()  # what a ridge lifts is as exact as float64
    eps = torch.finfo(G.dtype if rounded else torch.float64).eps
    check_shapes("S [D, D], G [D, D]", S, G)
    S, G = (symmetric(M, name).double().cpu() for M, name in ((S, "S"), (G, "G")))
    positive(torch.linalg.eigvalsh(S).flip(0), "S")
    values, V = psd_eigh(G, clip=False)
    values = positive(values, "G")
    scale = values + ridge * values[0]
    if scale[-1] <= len(G) * eps * scale[0]:
        ends = f"its eigenvalues go from {float(values[0]):.3g} to {float(values[-1]):.3g}"
        raise InputError(f"G is singular: {ends}; give a ridge larger than {ridge:g}, for example 1e-6")
    half = V / scale.sqrt()
    found = psd_eigh(half.T @ symmetrise(S) @ half)
    Q, R = torch.linalg.qr(half @ found.vectors)
    Q = Q * R.diagonal().sign()
    return Directions(Q.T[:k].contiguous(), found.values[:k])


@checked
def removed_variance(S: Tensor, directions: Tensor) -> Tensor:
    """ev(k) = sum_{i <= k} v_i^T S v_i / tr S, [k]: how much of the data goes with the first k directions.

    Example:
        >>> removed_variance(torch.eye(2), torch.eye(2))
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    S = symmetric(S, "S").double()
    V = _orthonormal(directions, len(S))
    removed: Tensor = torch.einsum("kd,de,ke->k", V, S, V).cumsum(0)
    return removed / torch.trace(S)


@checked
def matched_count(S: Tensor, directions: Tensor, others: Tensor, k: int) -> int:
    """Smallest k' for which the first k' of `others` remove at least as much variance as the first k `directions`.

    Example:
        >>> matched_count(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2), torch.eye(2).flip(0), 1)
        2
    """
    if not 0 <= k <= len(directions):
        raise InputError(f"k must be between 0 and the {len(directions)} directions given, not {k}")
    if k == 0:
        return 0
    wanted = removed_variance(S, directions[:k])[-1] - 1e-12
    reached = (removed_variance(S, others) >= wanted).nonzero()
    if len(reached) == 0:
        raise InputError(f"even all {len(others)} other directions remove less variance than the first {k}")
    return int(reached[0]) + 1


def _orthonormal(directions: Tensor, D: int) -> Tensor:
    """Directions [k, ...] as orthonormal rows [k, D] in float64."""
    if len(directions) and math.prod(directions.shape[1:]) != D:
        raise InputError(f"directions must be [k, ...] with {D} entries each, got {list(directions.shape)}")
    V = directions.detach().reshape(-1, D).double()
    if not torch.allclose(V @ V.T, torch.eye(len(V), dtype=V.dtype, device=V.device), atol=1e-4):
        raise InputError("directions must be orthonormal rows; orthogonalise them first")
    return V
