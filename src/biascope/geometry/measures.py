"""Numbers about matrices of the input space: how alike two geometries are, and how much of one a subspace contains.

Two positive semi-definite matrices are alike by default: the identity alone correlates with any of them. So
`compare` gives, next to the correlation, what a random rotation of the second matrix would give, in closed form.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.linalg import psd_eigh
from biascope.linalg.stable import symmetrise
from biascope.support.errors import InputError
from biascope.support.inputs import check_inputs
from biascope.support.limits import FiniteTensor, check_shapes
from biascope.support.memory import budget
from biascope.support.signatures import checked
from biascope.support.tables import one_line

LARGEST_BLOCK = 4096  # rows of a product of gradients: more are not faster
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
    """A correlation and what to compare it with.

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


@checked
def velocity_floor(gradients: FiniteTensor, max_memory: str | int | None = None) -> float:
    """1 - Corr(G, G') of the same networks at two independent sets of as many probes, expected from one set.

    G is a mean of M_p, the mean over networks of g g^T at probe p, over n probes. Noise along G only scales it, which a
    correlation does not see; noise of variance V / n across it gives Corr = 1 / (1 + V / (n ||E G||^2)) to leading
    order. V is the variance of M_p less that of its part along G, and ||E G||^2 the mean of <M_p, M_q> over p != q.
    Leading order: in simulations with ten probes right within 3 % up to a floor of 0.18, 15 % too low at 0.29.
    `velocity` with common probes has no such floor.

    Args:
        gradients: [T, n, ...] of T networks at n >= 2 independent probes, as `ensembles.input_gradients` gives them.
        max_memory: of what is held beside them, for example "4GB": they become float64 and are multiplied in blocks.

    Example:
        >>> velocity_floor(torch.eye(2)[None]), velocity_floor(torch.ones(1, 2, 3))  # nothing, all in common
        (1.0, 0.0)
    """
    check_shapes("gradients [T, n, D, ...]", gradients)
    g, n = gradients.detach().flatten(2), gradients.shape[1]
    size = _block(g, budget(max_memory, g.device))
    starts = range(0, g.shape[0] * n, size)
    largest = torch.cat([_some(g, start, size).abs().amax(1) for start in starts]).view(-1, n).amax(0)
    if int((largest > 0).sum()) < 2:
        raise InputError(f"gradients are zero at all, or all but one, of {n} probes: two are needed to see their noise")
    scale = float(largest.max())  # the result has no scale; fourth powers would leave the range of float64
    pairs = _inner_products(g, scale, size)
    apart = (pairs.sum() - pairs.trace()) / (n * (n - 1))
    spread = pairs.diagonal().mean() - apart  # of M_p, over the probes
    across = (spread - pairs.mean(1).var() / pairs.mean()).clamp_min(0.0)
    return float(across / (n * apart + across))


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
    return size_of(positive(psd_eigh(symmetric(G, "G"), clip=False).values, "G"), threshold, share)


def size_of(values: Tensor, threshold: float | None, share: float | None) -> int:
    """`subspace_size` of eigenvalues >= 0 at hand, in descending order and all there are for a share of their sum."""
    right = (share is None or 0 < share <= 1) and (threshold is None or 0 <= threshold < 1)
    if (threshold is None) == (share is None) or not right:
        raise InputError(f"give a threshold in [0, 1) or a share in (0, 1], not threshold={threshold}, share={share}")
    if not values[0] > 0:
        raise InputError("a zero matrix has no leading eigenvectors")
    if share is None:
        rounding = len(values) * torch.finfo(values.dtype).eps
        return int((values > max(threshold or 0.0, rounding) * values[0]).sum())
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
    if k is not None and (threshold, share) != (None, None):
        raise InputError(f"give k or a cut-off, not both: k={k}, threshold={threshold}, share={share}")
    delta, D = symmetrise(delta), len(delta)
    norm = delta.norm()
    values, V = psd_eigh(reference, clip=False)
    order = values.abs().argsort(descending=True, stable=True)
    values, V = values[order].abs(), V[:, order]
    if k is None:
        k = size_of(values, threshold, share)
    rotated = V.T @ delta @ V
    mean = delta.diagonal().mean()
    rest = float((delta - mean * torch.eye(D, dtype=delta.dtype, device="cpu")).square().sum())
    ks = (k,) if isinstance(k, int) else tuple(k)
    if not all(1 <= size <= D for size in ks):
        raise InputError(f"k must be between 1 and {D}, not {k}")
    shares, random = list[float](), list[float]()
    for size in ks:
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
        rows = rows_of(batch[0] if isinstance(batch, tuple | list) else batch, name)
        total = rows.new_zeros(rows.shape[1], rows.shape[1]) if total is None else total
        total.addmm_(rows.T, rows)
        count += len(rows)
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


def _pair(A: Tensor, B: Tensor, first: str = "A", second: str = "B") -> tuple[Tensor, Tensor]:
    check_shapes(f"{first} [D, D], {second} [D, D]", A, B)
    return symmetric(A, first).double().cpu(), symmetric(B, second).double().cpu()


def symmetric(M: Tensor, name: str) -> Tensor:
    """The matrix, detached; refused where it is not square, finite and symmetric."""
    check_shapes(f"{name} [D, D]", M)
    whole = M.detach().double()
    if not 1e-100 < float(largest := whole.abs().max()) < 1e100:  # squares would leave the range of float64
        whole = whole / largest.clamp(min=1e-300)
    skew = float((whole - whole.T).norm() / whole.norm().clamp(min=1e-300) / 2)
    if not skew <= ASYMMETRY:  # nor NaN; eigenvectors would be those of one half of it
        raise InputError(f"{name} is not symmetric ({skew:.2g} of its norm is not), or not finite: no second moment")
    return M.detach()


def positive(values: Tensor, name: str) -> Tensor:
    """Eigenvalues in descending order without what rounding left below zero; refused where it is more than that."""
    if values[-1] < -1e-6 * values[0].abs():  # lower than float32 rounding makes it
        raise InputError(f"{name} must be positive semi-definite: its smallest eigenvalue is {float(values[-1]):.3g}")
    return values.clamp(min=0)


def rows_of(x: Tensor, name: str) -> Tensor:
    """Inputs [n, ...] as rows [n, D] in float64."""
    check_shapes(f"{name} [n, D, ...]", check_inputs(x, name))
    return x.flatten(1).double()


def _inner_products(g: Tensor, scale: float, size: int) -> Tensor:
    """<M_p, M_q> [n, n], times T^2: sums over networks of squared inner products of gradients; `size` rows at once."""
    T, n, _ = g.shape
    probe = torch.arange(T * n, device=g.device) % n
    pairs = torch.zeros(n, n, dtype=torch.float64, device=g.device)
    for i in range(0, T * n, size):
        own = _some(g, i, size).div_(scale)
        for j in range(i, T * n, size):
            other = own if i == j else _some(g, j, size).div_(scale)
            squares = (own @ other.T).square_()
            found = squares.new_zeros(len(own), n).index_add_(1, probe[j : j + size], squares)
            both = torch.zeros_like(pairs).index_add_(0, probe[i : i + size], found)
            pairs += both if i == j else both + both.T
    return pairs


def _some(g: Tensor, start: int, size: int) -> Tensor:
    """A copy in float64 of rows `start` to `start + size` of the gradients [T n, D], network by network."""
    row = torch.arange(start, min(start + size, g.shape[0] * g.shape[1]), device=g.device)
    return g[row // g.shape[1], row % g.shape[1]].double()


def _block(g: Tensor, room: int) -> int:
    """Rows r at a time: three blocks [r, D] (one on its way to float64), products [r, r], their sums [r, n]."""
    linear = 3 * g.shape[2] + g.shape[1]
    return max(1, min(LARGEST_BLOCK, int((math.sqrt(linear**2 + room / 2) - linear) / 2)))
