"""Numbers about matrices of the input space: how alike two geometries are, what one contains, what it says of data.

Two positive semi-definite matrices are alike by default: the identity alone correlates with any of them. So
`compare` gives, next to the correlation, what a random rotation of the second matrix would give, in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.linalg import psd_eigh, symmetrise


def correlation(A: Tensor, B: Tensor) -> float:
    """Corr(A, B) = <A, B>_F / (||A||_F ||B||_F), in [-1, 1]; for the baselines see `compare`.

    Example:
        >>> correlation(torch.eye(3), 2 * torch.eye(3))
        1.0
    """
    A, B = _pair(A, B)
    norms = A.norm() * B.norm()
    if norms == 0:
        raise InputError("the correlation with a zero matrix is not defined")
    return max(-1.0, min(1.0, float((A * B).sum() / norms)))  # rounding must not leave [-1, 1]


@dataclass(frozen=True)
class Comparison:
    """A correlation and what to hold it against.

    Attributes:
        value: Corr(A, B).
        identity: (Corr(A, I), Corr(B, I)).
        trace_removed: Corr of A - (tr A / D) I and B - (tr B / D) I; 0 when one of them is a multiple of I.
        null: expected Corr(A, Q B Q^T) over random rotations Q: the product of the two numbers in `identity`.
        null_std: standard deviation of the same.
    """

    value: float
    identity: tuple[float, float]
    trace_removed: float
    null: float
    null_std: float

    @property
    def z(self) -> float:
        """How many standard deviations the value lies above the null."""
        return (self.value - self.null) / self.null_std if self.null_std > 0 else 0.0


def compare(A: Tensor, B: Tensor) -> Comparison:
    """Correlation of two symmetric matrices [D, D] with its baselines.

    The spread over rotations is exact: traceless symmetric matrices are an irreducible representation of O(D) of
    dimension N = (D - 1)(D + 2) / 2, so <A0, Q B0 Q^T> has variance ||A0||^2 ||B0||^2 / N.

    Example:
        >>> round(compare(torch.diag(torch.tensor([1.0, 2.0])), torch.eye(2)).null, 4)
        0.9487
    """
    A, B = _pair(A, B)
    D, eye = len(A), torch.eye(len(A), dtype=A.dtype, device="cpu")
    A0, B0 = (M - M.diagonal().mean() * eye for M in (A, B))
    identity = correlation(A, eye), correlation(B, eye)
    flat = A0.norm() < 1e-12 * A.norm() or B0.norm() < 1e-12 * B.norm()
    removed = 0.0 if flat else correlation(A0, B0)
    dimension = (D - 1) * (D + 2) / 2
    spread = float(A0.norm() * B0.norm() / (A.norm() * B.norm())) / math.sqrt(dimension) if D > 1 else 0.0
    return Comparison(correlation(A, B), identity, removed, identity[0] * identity[1], spread)


def velocity(now: Tensor, before: Tensor) -> float:
    """1 - Corr(G^t, G^{t-1}), in [0, 1] for positive semi-definite matrices.

    Use the same probes at both times: with fresh ones the sampling noise alone gives a velocity.

    Example:
        >>> round(velocity(torch.eye(2), torch.eye(2)), 9)
        0.0
    """
    return 1.0 - correlation(now, before)


@dataclass(frozen=True)
class Containment:
    """Share of a matrix that lies in a subspace, for each k, and what random subspaces hold (root mean square)."""

    k: tuple[int, ...]
    share: tuple[float, ...]
    random: tuple[float, ...]


def containment(delta: Tensor, reference: Tensor, k: int | Iterable[int]) -> Containment:
    """||Q_k^T Delta Q_k||_F / ||Delta||_F with Q_k the top k eigenvectors of `reference` (for example G S G).

    The random baseline is exact: with P a random projector of rank k, E ||P Delta P||^2 = (tr Delta / D)^2 k +
    c ||Delta_0||^2, c = E[P11 P22] + E[P12^2].

    Example:
        >>> containment(torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([2.0, 1.0])), 1).share
        (1.0,)
    """
    delta, reference = _pair(delta, reference)
    delta, D = symmetrise(delta), len(delta)
    norm = delta.norm()
    if norm == 0:
        raise InputError("nothing is contained in a subspace: Delta is zero")
    rotated = (V := psd_eigh(reference, clip=False).vectors).T @ delta @ V
    mean = delta.diagonal().mean()
    rest = float((delta - mean * torch.eye(D, dtype=delta.dtype, device="cpu")).square().sum())
    ks = (k,) if isinstance(k, int) else tuple(k)
    share, random = [], []
    for size in ks:
        if not 1 <= size <= D:
            raise InputError(f"k must be between 1 and {D}, not {size}")
        share.append(float(rotated[:size, :size].norm() / norm))
        off = size * (D - size) / (D * (D - 1) * (D + 2)) if D > 1 else 0.0
        pair = (size**2 - size * (size + 2) / (D + 2)) / (D * (D - 1)) if D > 1 else 0.0
        inside = float(mean) ** 2 * size + (pair + off) * rest
        random.append(math.sqrt(max(inside, 0.0)) / float(norm))
    return Containment(ks, tuple(share), tuple(random))


def data_second_moment(x: Tensor | Iterable[Tensor], normalise: bool = False) -> Tensor:
    """S = sum_mu x_mu x_mu^T [D, D] in float64 (uncentred); divided by the number of examples if `normalise`.

    `x` is [m, ...] or an iterable of batches, each [b, ...] or (inputs, labels).

    Example:
        >>> data_second_moment(torch.eye(2)).diagonal()
        tensor([1., 1.], dtype=torch.float64)
    """
    total, count = None, 0
    for batch in (x,) if isinstance(x, Tensor) else x:
        rows = (batch[0] if isinstance(batch, tuple | list) else batch).flatten(1).double()
        part = rows.T @ rows
        total, count = part if total is None else total + part, count + len(rows)
    if total is None:
        raise InputError("there is no data")
    return total / count if normalise else total


def gsg(G: Tensor, S: Tensor) -> Tensor:
    """G S G [D, D], the conjectured direction of the evolution of G (Conj. 1).

    Example:
        >>> gsg(2 * torch.eye(2), torch.eye(2)).diagonal()
        tensor([4., 4.], dtype=torch.float64)
    """
    G, S = _pair(G, S)
    return symmetrise(G @ S @ G)


def flip_spectrum(G: Tensor) -> Tensor:
    """V diag(reversed eigenvalues) V^T: the same eigenvectors, the order of the eigenvalues reversed.

    Example:
        >>> flip_spectrum(torch.diag(torch.tensor([3.0, 1.0]))).diagonal()
        tensor([1., 3.])
    """
    values, V = psd_eigh(G.double(), clip=False)
    return ((V * values.flip(0)) @ V.T).to(G.dtype)


@dataclass(frozen=True)
class Directions:
    """Orthonormal directions [k, D] in order of importance, and the generalised eigenvalues [k] that ordered them."""

    directions: Tensor = field(repr=False)
    values: Tensor


def generalised_directions(S: Tensor, G: Tensor, k: int | None = None, ridge: float = 1e-6) -> Directions:
    """Directions of much data and little geometry: S v = l (G + ridge ||G||_2 I) v, l descending, then orthogonalised.

    The paper says "generalised eigenvectors of G and S"; which side is meant follows from its use (what may be removed
    first is what the network cannot see anyway).

    Example:
        >>> found = generalised_directions(torch.eye(2), torch.diag(torch.tensor([1.0, 0.1])), k=1)
        >>> found.directions.abs().round().tolist()
        [[0.0, 1.0]]
    """
    S, G = _pair(S, G)
    if ridge < 0:
        raise InputError(f"ridge must not be negative, got {ridge}")
    values, V = psd_eigh(G)
    scale = values + ridge * values[0]
    if scale[-1] <= 0:
        raise InputError("G is singular: give a positive ridge")
    half = V / scale.sqrt()
    found = psd_eigh(half.T @ symmetrise(S) @ half)
    Q, R = torch.linalg.qr(half @ found.vectors)
    Q = Q * R.diagonal().sign()
    return Directions(Q.T[:k].contiguous(), found.values[:k])


def project_out(x: Tensor, directions: Tensor) -> Tensor:
    """x [n, ...] without its components along orthonormal rows `directions` [k, ...].

    Example:
        >>> project_out(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([[0., 4.]])
    """
    V = directions.flatten(1).to(x) if len(directions) else directions.reshape(0, x[0].numel()).to(x)
    if V.shape[1] != x[0].numel():
        raise InputError(f"directions have {V.shape[1]} entries, inputs {x[0].numel()}")
    if not torch.allclose(V @ V.T, torch.eye(len(V), device="cpu").to(V), atol=1e-4):
        raise InputError("directions must be orthonormal rows; orthogonalise them first")
    flat = x.flatten(1)
    return (flat - (flat @ V.T) @ V).view_as(x)


def removed_variance(S: Tensor, directions: Tensor) -> Tensor:
    """ev(k) = sum_{i <= k} v_i^T S v_i / tr S, [k]: how much of the data goes with the first k directions.

    Example:
        >>> removed_variance(torch.eye(2), torch.eye(2))
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    V, S = directions.flatten(1).double(), S.double()
    removed: Tensor = torch.einsum("kd,de,ke->k", V, S, V).cumsum(0)
    return removed / torch.trace(S)


def matched_count(S: Tensor, directions: Tensor, others: Tensor, k: int) -> int:
    """Smallest k' for which the first k' of `others` remove at least as much variance as the first k `directions`.

    Example:
        >>> matched_count(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2), torch.eye(2).flip(0), 1)
        2
    """
    if k == 0:
        return 0
    wanted = removed_variance(S, directions[:k])[-1] - 1e-12
    reached = (removed_variance(S, others) >= wanted).nonzero()
    if len(reached) == 0:
        raise InputError(f"even all {len(others)} other directions remove less variance than the first {k}")
    return int(reached[0]) + 1


def alignment_score(x: Tensor, G: Tensor) -> Tensor:
    """(x/|x|)^T G (x/|x|) per example, [n], between the extreme eigenvalues of G; equal scores keep the data's order.

    Example:
        >>> alignment_score(torch.tensor([[0.0, 2.0]]), torch.diag(torch.tensor([1.0, 5.0])))
        tensor([5.], dtype=torch.float64)
    """
    flat = x.flatten(1).double()
    norms = flat.norm(dim=1)
    if bool((norms == 0).any()):
        raise InputError(f"example {int((norms == 0).nonzero()[0])} is zero: it has no direction to score")
    scores: Tensor = ((flat @ G.double()) * flat).sum(1) / norms.square()
    return scores


def _pair(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    if A.dim() != 2 or A.shape != B.shape or A.shape[0] != A.shape[1]:
        raise InputError(f"need two square matrices of one size, got {list(A.shape)} and {list(B.shape)}")
    return A.detach().double().cpu(), B.detach().double().cpu()
