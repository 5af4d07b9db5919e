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
from biascope.inputs import check_inputs, is_finite
from biascope.linalg import psd_eigh, symmetrise
from biascope.signatures import checked
from biascope.tables import one_line

ASYMMETRY = 1e-3  # share of the norm: more than rounding leaves in float32 sums, less than any mistake


@checked
def correlation(A: Tensor, B: Tensor) -> float:
    """Corr(A, B) = <A, B>_F / (||A||_F ||B||_F), in [-1, 1]; for the baselines see `compare`.

    Example:
        >>> correlation(torch.eye(3), 2 * torch.eye(3))
        1.0
    """
    return _correlation(*_pair(A, B))


def _correlation(A: Tensor, B: Tensor) -> float:
    largest = A.abs().max(), B.abs().max()
    if min(largest) == 0:
        raise InputError("the correlation with a zero matrix is not defined")
    A, B = A / largest[0], B / largest[1]  # squares of very large or small entries would leave the range of float64
    return max(-1.0, min(1.0, float((A * B).sum() / (A.norm() * B.norm()))))  # rounding must not leave [-1, 1]


@dataclass(frozen=True)
class Comparison:
    """A correlation and what to hold it against.

    Attributes:
        value: Corr(A, B).
        identity: (Corr(A, I), Corr(B, I)).
        trace_removed: Corr of A - (tr A / D) I and B - (tr B / D) I; 0 when one of them is a multiple of I.
        null: expected Corr(A, Q B Q^T) over random rotations Q: the product of the two numbers in `identity`.
        null_std: standard deviation of the same: of how B happens to lie to A, not of how well they are known.
        error_bound: by how much the sampling errors of A and B move `value`, root mean square, at most (often a fifth
            of it); NaN if not known.
    """

    value: float
    identity: tuple[float, float]
    trace_removed: float
    null: float
    null_std: float
    error_bound: float = math.nan
    __repr__ = one_line

    @property
    def z(self) -> float:
        """How many standard deviations the value lies above the null."""
        return (self.value - self.null) / self.null_std if self.null_std > 0 else 0.0


@checked
def compare(A: Tensor, B: Tensor, relative_errors: tuple[float, float] | None = None) -> Comparison:
    """Correlation of two symmetric matrices [D, D] with its baselines.

    `relative_errors` are those of sampled matrices, ||A - truth||_F / ||A||_F and the same of B (0: exact, NaN: not
    known). An error that turns A by an angle t changes the correlation r by sqrt(1 - r^2) sin t to first order if it
    points straight at B or away, and by less if it does not, so the `error_bound` that follows from them is an upper
    bound.

    The spread over rotations is exact: traceless symmetric matrices are an irreducible representation of O(D) of
    dimension N = (D - 1)(D + 2) / 2, so <A0, Q B0 Q^T> has variance ||A0||^2 ||B0||^2 / N.

    Example:
        >>> round(compare(torch.diag(torch.tensor([1.0, 2.0])), torch.eye(2)).null, 4)
        0.9487
    """
    if relative_errors is not None and any(error < 0 for error in relative_errors):
        raise InputError(f"relative_errors={relative_errors}: two numbers >= 0 are needed, or NaN for one not known")
    A, B = (M / M.abs().max().clamp(min=torch.finfo(M.dtype).tiny) for M in _pair(A, B))  # nothing here has a scale
    D, eye = len(A), torch.eye(len(A), dtype=A.dtype, device="cpu")
    A0, B0 = (M - M.diagonal().mean() * eye for M in (A, B))
    identity = _correlation(A, eye), _correlation(B, eye)
    flat = A0.norm() < 1e-12 * A.norm() or B0.norm() < 1e-12 * B.norm()
    removed = 0.0 if flat else _correlation(A0, B0)
    dimension = (D - 1) * (D + 2) / 2
    spread = 0.0 if flat else float(A0.norm() * B0.norm() / (A.norm() * B.norm())) / math.sqrt(dimension)
    value, error = _correlation(A, B), math.nan
    if relative_errors is not None:
        size = sum(relative_errors)  # those of one sample of networks need not be independent
        if size >= 0:  # else one of them is not known
            error = min(1 + abs(value), size * math.sqrt(max(0.0, 1 - value**2)) + size**2 * abs(value) / 2)
    return Comparison(value, identity, removed, identity[0] * identity[1], spread, error)


@checked
def velocity(now: Tensor, before: Tensor) -> float:
    """1 - Corr(G^t, G^{t-1}), in [0, 1] for positive semi-definite matrices.

    Use the same probes at both times: with fresh ones the sampling noise alone gives a velocity. An average over few
    networks also turns where single networks wander and their mean stands still; study `gih/fig3` shows both.

    Example:
        >>> round(velocity(torch.eye(2), torch.eye(2)), 9)
        0.0
    """
    return 1.0 - _correlation(*_pair(now, before, "now", "before"))


@dataclass(frozen=True)
class Containment:
    """Share of a matrix that lies in a subspace, for each k, and what random subspaces hold (root mean square)."""

    k: tuple[int, ...]
    share: tuple[float, ...]
    random: tuple[float, ...]


@checked
def subspace_size(G: Tensor, *, threshold: float | None = None, share: float | None = None) -> int:
    """Dimension of the span of the leading eigenvectors of a positive semi-definite G [D, D] (the subspace S_F).

    The paper gives no cut-off; say one of the two:

    Args:
        G: for example the average geometry at initialisation.
        threshold: how many eigenvalues are above this fraction of the largest; 0: above rounding.
        share: the smallest k whose k largest eigenvalues add up to at least this share of the trace, in (0, 1].

    Example:
        >>> G = torch.diag(torch.tensor([6.0, 3.0, 1.0]))
        >>> subspace_size(G, threshold=0.2), subspace_size(G, share=0.9)
        (2, 2)
    """
    return size_of(_positive(psd_eigh(symmetric(G, "G"), clip=False).values, "G"), threshold, share)


def size_of(values: Tensor, threshold: float | None, share: float | None) -> int:
    """`subspace_size` of eigenvalues >= 0 at hand, in descending order and all there are for a share of their sum.

    Example:
        >>> size_of(torch.tensor([6.0, 3.0, 1.0]), None, 0.5)
        1
    """
    if (threshold is None) == (share is None):
        raise InputError(f"give one of threshold and share, not threshold={threshold}, share={share}")
    if not values[0] > 0:
        raise InputError("a zero matrix has no leading eigenvectors")
    if threshold is not None:
        if not 0 <= threshold < 1:
            raise InputError(f"threshold must be in [0, 1), got {threshold}")
        rounding = len(values) * torch.finfo(values.dtype).eps
        return int((values > max(threshold, rounding) * values[0]).sum())
    if share is None or not 0 < share <= 1:
        raise InputError(f"share must be in (0, 1], got {share}")
    reached = values.double().cumsum(0)
    # all of the trace is reached at the last eigenvalue that still adds to it
    return int((reached < share * reached[-1] * (1 - 1e-12)).sum()) + 1


@checked
def containment(
    delta: Tensor,
    reference: Tensor,
    k: int | Iterable[int] | None = None,
    *,
    threshold: float | None = None,
    share: float | None = None,
) -> Containment:
    """||Q_k^T Delta Q_k||_F / ||Delta||_F with Q_k the top k eigenvectors of `reference` (for example G S G).

    Top by magnitude: of a negative `reference`, such as Delta at initialisation, they are the most negative ones.
    Instead of k, `threshold` or `share` cut the eigenvectors off as `subspace_size` does; the k found is in the result.

    The random baseline is exact: with P a random projector of rank k, E ||P Delta P||^2 = (tr Delta / D)^2 k +
    c ||Delta_0||^2, c = E[P11 P22] + E[P12^2].

    Example:
        >>> containment(torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([2.0, 1.0])), 1).share
        (1.0,)
    """
    delta, reference = _pair(delta, reference, "delta", "reference")
    if k is not None and (threshold is not None or share is not None):
        raise InputError(f"give k or a cut-off, not both: k={k}, threshold={threshold}, share={share}")
    delta, D = symmetrise(delta), len(delta)
    norm = delta.norm()
    if norm == 0:
        raise InputError("nothing is contained in a subspace: Delta is zero")
    values, V = psd_eigh(reference, clip=False)
    order = values.abs().argsort(descending=True, stable=True)
    values, V = values[order].abs(), V[:, order]
    if k is None:
        k = size_of(values, threshold, share)
    rotated = V.T @ delta @ V
    mean = delta.diagonal().mean()
    rest = float((delta - mean * torch.eye(D, dtype=delta.dtype, device="cpu")).square().sum())
    ks = (k,) if isinstance(k, int) else tuple(k)
    shares, random = list[float](), list[float]()
    for size in ks:
        if not 1 <= size <= D:
            raise InputError(f"k must be between 1 and {D}, not {size}")
        shares.append(float(rotated[:size, :size].norm() / norm))
        off = size * (D - size) / (D * (D - 1) * (D + 2)) if D > 1 else 0.0
        pair = (size**2 - size * (size + 2) / (D + 2)) / (D * (D - 1)) if D > 1 else 0.0
        inside = float(mean) ** 2 * size + (pair + off) * rest
        random.append(math.sqrt(max(inside, 0.0)) / float(norm))
    return Containment(ks, tuple(shares), tuple(random))


@checked
def data_second_moment(x: Tensor | Iterable[Tensor], normalise: bool = False) -> Tensor:
    """S = sum_mu x_mu x_mu^T [D, D] in float64 (uncentred); divided by the number of examples if `normalise`.

    `x` is [m, ...], one labelled batch (x, y), or an iterable of batches, each [b, ...] or (inputs, labels).

    Example:
        >>> data_second_moment(torch.eye(2)).diagonal()
        tensor([1., 1.], dtype=torch.float64)
    """
    total, count = None, 0
    pair = isinstance(x, tuple) and len(x) == 2 and all(isinstance(part, Tensor) for part in x)
    whole = isinstance(x, Tensor) or pair
    for number, batch in enumerate((x,) if whole else x):
        name = "x" if whole else f"batch {number} of x"
        rows = _rows(batch[0] if isinstance(batch, tuple | list) else batch, name)
        if total is not None and rows.shape[1] != len(total):
            raise InputError(f"{name} has {rows.shape[1]} entries per example, the batches before it {len(total)}")
        part = rows.T @ rows
        total, count = part if total is None else total + part, count + len(rows)
    if total is None:
        raise InputError("there is no data")
    return total / count if normalise else total


@checked
def gsg(G: Tensor, S: Tensor) -> Tensor:
    """G S G [D, D], the conjectured direction of the evolution of G (Conj. 1).

    Example:
        >>> gsg(2 * torch.eye(2), torch.eye(2)).diagonal()
        tensor([4., 4.], dtype=torch.float64)
    """
    G, S = _pair(G, S, "G", "S")
    return symmetrise(G @ S @ G)


@checked
def flip_spectrum(G: Tensor) -> Tensor:
    """V diag(reversed eigenvalues) V^T: the same eigenvectors, the order of the eigenvalues reversed.

    Example:
        >>> flip_spectrum(torch.diag(torch.tensor([3.0, 1.0]))).diagonal()
        tensor([1., 3.])
    """
    values, V = psd_eigh(symmetric(G, "G").double(), clip=False)
    return ((V * values.flip(0)) @ V.T).to(G.dtype if G.is_floating_point() else torch.float64)


@dataclass(frozen=True)
class Directions:
    """Orthonormal directions [k, D] in order of importance, and the generalised eigenvalues [k] that ordered them."""

    directions: Tensor = field(repr=False)
    values: Tensor
    __repr__ = one_line


@checked
def generalised_directions(S: Tensor, G: Tensor, k: int | None = None, ridge: float = 1e-6) -> Directions:
    """Directions of much data and little geometry: S v = l (G + ridge ||G||_2 I) v, l descending, then orthogonalised.

    The paper says "generalised eigenvectors of G and S"; which side is meant follows from its use (what may be removed
    first is what the network cannot see anyway). A G that is singular in its own precision (smallest eigenvalue at most
    D eps of the largest) needs a ridge: without one, rounding decides the order.

    Example:
        >>> found = generalised_directions(torch.eye(2), torch.diag(torch.tensor([1.0, 0.1])), k=1)
        >>> found.directions.abs().round().tolist()
        [[0.0, 1.0]]
    """
    if not 0 <= ridge < math.inf:
        raise InputError(f"ridge must be a number >= 0, got {ridge}")
    rounded = ridge == 0 and G.is_floating_point()  # what a ridge lifts is as exact as float64
    eps = torch.finfo(G.dtype if rounded else torch.float64).eps
    S, G = _pair(S, G, "S", "G")
    if k is not None and not 1 <= k <= len(G):
        raise InputError(f"k must be between 1 and {len(G)}, not {k}")
    _positive(torch.linalg.eigvalsh(S).flip(0), "S")
    values, V = psd_eigh(G, clip=False)
    values = _positive(values, "G")
    scale = values + ridge * values[0]
    if not values[0] > 0:
        raise InputError("G is zero: it orders no directions")
    if scale[-1] <= len(G) * eps * scale[0]:
        raise InputError(
            f"G is singular: its eigenvalues go from {float(values[0]):.3g} to {float(values[-1]):.3g}; "
            f"give a ridge larger than {ridge:g}, for example 1e-6"
        )
    half = V / scale.sqrt()
    found = psd_eigh(half.T @ symmetrise(S) @ half)
    Q, R = torch.linalg.qr(half @ found.vectors)
    Q = Q * R.diagonal().sign()
    return Directions(Q.T[:k].contiguous(), found.values[:k])


@checked
def project_out(x: Tensor, directions: Tensor) -> Tensor:
    """x [n, ...] without its components along orthonormal rows `directions` [k, ...].

    Example:
        >>> project_out(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([[0., 4.]])
    """
    V = _orthonormal(directions, math.prod(_inputs(x, "x").shape[1:]))
    if not x.is_floating_point():
        raise InputError(f"x is {x.dtype}: what is left of whole numbers is not whole; give x.float()")
    flat, V = x.flatten(1), V.to(x)
    return (flat - (flat @ V.T) @ V).view_as(x)


@checked
def removed_variance(S: Tensor, directions: Tensor) -> Tensor:
    """ev(k) = sum_{i <= k} v_i^T S v_i / tr S, [k]: how much of the data goes with the first k directions.

    Example:
        >>> removed_variance(torch.eye(2), torch.eye(2))
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    S = symmetric(S, "S").double()
    V = _orthonormal(directions, len(S))
    if not torch.trace(S) > 0:
        raise InputError(f"S has the trace {float(torch.trace(S)):.3g}: there is no variance to remove a share of")
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


@checked
def alignment_score(x: Tensor, G: Tensor) -> Tensor:
    """(x/|x|)^T G (x/|x|) per example, [n], between the extreme eigenvalues of G; equal scores keep the data's order.

    Example:
        >>> alignment_score(torch.tensor([[0.0, 2.0]]), torch.diag(torch.tensor([1.0, 5.0])))
        tensor([5.], dtype=torch.float64)
    """
    flat, G = _rows(x, "x"), symmetric(G, "G").double()
    if flat.shape[1] != len(G):
        raise InputError(f"examples of x {list(x.shape)} have {flat.shape[1]} entries, G is {list(G.shape)}")
    largest = flat.abs().amax(1, keepdim=True)
    if bool((largest == 0).any()):
        raise InputError(f"example {int((largest == 0).nonzero()[0, 0])} is zero: it has no direction to score")
    flat = flat / largest  # squares of very large or small entries would leave the range of float64
    mean = G.diagonal().mean()  # of all directions; taken out, so that a multiple of I gives one score and not rounding
    uneven = G - mean * torch.eye(len(G), dtype=G.dtype, device=G.device)
    scores: Tensor = mean + ((flat @ uneven) * flat).sum(1) / flat.square().sum(1)
    return scores


def _pair(A: Tensor, B: Tensor, first: str = "A", second: str = "B") -> tuple[Tensor, Tensor]:
    if A.dim() != 2 or A.shape != B.shape or A.shape[0] != A.shape[1]:
        raise InputError(
            f"need two square matrices of one size, got {first} {list(A.shape)} and {second} {list(B.shape)}"
        )
    return symmetric(A, first).double().cpu(), symmetric(B, second).double().cpu()


def symmetric(M: Tensor, name: str) -> Tensor:
    """The matrix, refused where it is not square, finite and symmetric.

    Example:
        >>> symmetric(torch.ones(2, 3), "S")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: S must be a square matrix [D, D], got [2, 3]
    """
    if M.dim() != 2 or M.shape[0] != M.shape[1] or len(M) == 0:
        raise InputError(f"{name} must be a square matrix [D, D], got {list(M.shape)}")
    if not is_finite(M.detach()):
        raise InputError(f"{name} {list(M.shape)} holds NaN or infinity")
    M = M.detach()
    whole = M.double()
    skew = float((whole - whole.T).norm() / whole.norm().clamp(min=1e-300) / 2)
    if skew > ASYMMETRY:  # eigenvectors would be those of one half of it
        raise InputError(
            f"{name} {list(M.shape)} is not symmetric ({skew:.2g} of its norm is not): a second moment of inputs or "
            "gradients is needed, e.g. data_second_moment(x)"
        )
    return M


def _positive(values: Tensor, name: str) -> Tensor:
    """Eigenvalues in descending order without what rounding left below zero; refused where it is more than that."""
    if values[-1] < -1e-6 * values[0].abs():  # lower than float32 rounding makes it
        raise InputError(f"{name} must be positive semi-definite: its smallest eigenvalue is {float(values[-1]):.3g}")
    return values.clamp(min=0)


def _inputs(x: Tensor, name: str) -> Tensor:
    checked = check_inputs(x, name)
    if not isinstance(checked, Tensor) or checked.dim() < 2:
        raise InputError(f"{name} must be a tensor of inputs [n, ...] with at least two dimensions")
    return checked


def _rows(x: Tensor, name: str) -> Tensor:
    """Inputs [n, ...] as rows [n, D] in float64."""
    return _inputs(x, name).flatten(1).double()


def _orthonormal(directions: Tensor, D: int) -> Tensor:
    """Directions [k, ...] as orthonormal rows [k, D] in float64."""
    shape = list(directions.shape)
    if shape[:1] == [0]:
        return directions.reshape(0, D).double()
    if directions.dim() < 2 or math.prod(shape[1:]) != D:
        raise InputError(f"directions must be [k, ...] with {D} entries each, got {shape}")
    if not is_finite(directions.detach()):
        raise InputError(f"directions {shape} hold NaN or infinity")
    V = directions.detach().reshape(-1, D).double()
    if not torch.allclose(V @ V.T, torch.eye(len(V), dtype=V.dtype, device=V.device), atol=1e-4):
        raise InputError("directions must be orthonormal rows; orthogonalise them first")
    return V
