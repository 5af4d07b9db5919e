"""Mutual information from distances to nearest neighbours (Kraskov, Stögbauer and Grassberger 2004)."""

import math
import warnings
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from biascope.information.pairs import checked_pairs, is_discrete
from biascope.information.result import EstimateWarning, MutualInformation
from biascope.support.arguments import check_count
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.signatures import checked

TREE_COLUMNS = 8  # up to so many columns in all a k-d tree beats looking at every distance
CELLS = 2**22  # distances held at a time
BLOCKS = 5  # of samples at least, for the standard error; twice as many where they have 200 samples each
MANY = 10  # columns in all beyond which neighbours are far and the estimate too low
ROWS = 500  # samples searched for ties
TIED = 0.05  # share of them whose k-th and next neighbours are equally far: beyond, the estimate moves (see `ksg`)
NARROW = 0.3  # of the middle half of a column, in standard deviations (a Gaussian's: 1.35): below, its tails are long


@checked
def ksg(x: Tensor, y: Tensor, k: int = 3, algorithm: Literal[1, 2] = 1, seed: int = 0) -> MutualInformation:
    """I(x; y) in nats from x [n, ...], y [n, ...] by k nearest neighbours in the maximum norm; no training, no bound.

    algorithm 1: psi(k) + psi(n) - <psi(n_x + 1) + psi(n_y + 1)>, with n_x the points whose x is strictly closer than
    the k-th neighbour. algorithm 2: psi(k) - 1/k + psi(n) - <psi(n_x) + psi(n_y)>, with one distance per variable.
    Samples are flattened and every column is divided by its standard deviation first, so that the unit of a column
    does not matter. Costs n log n in few columns, n^2 time (not memory) beyond 8. Nothing is drawn: `seed` is recorded.

    Exact ties: where k or more other samples equal a sample, algorithm 1 counts them in place of k (Gao et al. 2017);
    algorithm 2 refuses. Labels (integers) of one variable are exact: different labels are infinitely far apart, which
    gives the estimator of Ross (2014), algorithm 1 only; two label variables are refused. The standard error is the
    deviation of the estimate over 5 to 10 disjoint blocks of samples, divided by the root of their number (some 15 %
    low below 1000 samples). The bias is not in it, and notes say where it is to be feared: with more than about 10
    columns the estimate is far too low (20 + 20 columns at 2.88 nats, 5000 pairs: 0.74), so it is with long tails
    (Gaussians at 0.51 nats, 4000 pairs, one of them to the 7th power: 0.39), and it is too high for rounded numbers
    (the same to steps of 0.03 standard deviations: 0.83).

    Example:
        >>> rng = torch.Generator().manual_seed(0)
        >>> x = torch.randn(2000, generator=rng)
        >>> found = ksg(x, 0.8 * x + 0.6 * torch.randn(2000, generator=rng))  # the truth is 0.511
        >>> abs(found.nats - 0.511) < 3 * found.standard_error
        True
    """
    check_count(k, "k")
    x, y = checked_pairs(x, y, max(50, BLOCKS * (k + 2)), f"ksg with k={k} needs")
    labelled = is_discrete(x) + is_discrete(y)
    if labelled == 2:
        raise UnsupportedError("ksg: both x and y are labels, which have no neighbours; use mine or nwj")
    if labelled and algorithm == 2:
        raise UnsupportedError("ksg: algorithm 2 needs numbers on both sides, and one is labels; use algorithm=1")
    notes: list[str] = []
    a, b = _columns("x", x, k, notes), _columns("y", y, k, notes)
    order, smallest = torch.arange(len(x), device=x.device), len(x)
    if labelled:
        labels, numbers = (a, b) if is_discrete(x) else (b, a)
        smallest = int(torch.unique(labels, return_counts=True)[1].min())
        order = labels[:, 0].argsort(stable=True)  # blocks with equal shares of every label
        labels *= 2 * float((numbers.amax(0) - numbers.amin(0)).max()) + 1  # further than any two numbers are apart
    if a.shape[1] + b.shape[1] > MANY:
        notes.append(f"{a.shape[1]} + {b.shape[1]} columns: with more than about {MANY} the estimate is far too low")
    if (tied := _tied_share(a, b, k)) > TIED:
        equal = f"{tied:.0%} of the samples have a k-th and a next neighbour equally far (rounded numbers?)"
        notes.append(f"{equal}: the estimate may be too high; add uniform noise as wide as a step of rounding")
    nats = float(local_information(a, b, k, algorithm).mean())
    if nats > math.log(len(x)):
        notes.append(f"{nats:.3g} nats exceed log({len(x)}): more than neighbours of {len(x)} samples can show")
    for note in notes:
        warnings.warn(f"ksg: {note}", EstimateWarning, stacklevel=3)
    error = _standard_error(a[order], b[order], k, algorithm, smallest)
    return MutualInformation(nats, error, "ksg", False, n=len(x), n_held_out=len(x), seed=seed, notes=tuple(notes))


def _columns(name: str, values: Tensor, k: int, notes: list[str]) -> Tensor:
    """Numbers as standardised columns [n, p] in float64, without constant ones; labels as 0, 1, 2, ... [n, 1]."""
    if is_discrete(values):
        classes, index, counts = torch.unique(values.flatten(), return_inverse=True, return_counts=True)
        least = BLOCKS * (k + 1)
        if len(classes) < 2 or int(counts.min()) < least:
            rare = int(counts.argmin())
            has = f"label {classes[rare].item()} of {name} has {int(counts[rare])} of {len(values)} samples"
            raise InputError(f"ksg: {has}; two labels or more are needed, each with at least {least} (k={k})")
        labels: Tensor = index.double()[:, None]
        return labels
    flat = _near_one(values.reshape(len(values), -1).double())
    flat = flat - flat.median(0).values  # the mean of long tails would swallow the digits of all the rest
    std = flat.std(0)
    varies = flat.amax(0) > flat.amin(0)
    if not bool(varies.any()):
        raise InputError(f"ksg: {name} is constant: it shares no information with anything, and has no neighbours")
    if not bool(varies.all()):
        constant = f"{int((~varies).sum())} of {flat.shape[1]} columns of {name} are constant"
        notes.append(f"{constant} (first: {int((~varies).nonzero()[0])}); left out")
    columns: Tensor = flat[:, varies] / std[varies]
    ranked = columns.sort(0).values
    middle = ranked[(3 * len(flat)) // 4] - ranked[len(flat) // 4]
    long = (middle > 0) & (middle < NARROW)  # where it is 0 one value is half of all: a tie, not a tail
    if bool(long.any()):
        heavy = f"{int(long.sum())} of {flat.shape[1]} columns of {name} have long tails"
        first = f"first: {int(varies.nonzero()[:, 0][long][0])}, half within {float(middle[long][0]):.2g} deviations"
        notes.append(f"{heavy} ({first}): the estimate may be far too low; pass logarithms or ranks")
    return columns


def _near_one(flat: Tensor) -> Tensor:
    """Columns times powers of 2 (exact) that bring them near 1: squares of 1e200 or 1e-200 leave float64."""
    e = torch.frexp(flat.abs().amax(0)).exponent
    half = e // 2
    two = torch.full_like(flat[0], 2.0)
    return flat * two.pow(-half) * two.pow(half - e)


def _tied_share(x: Tensor, y: Tensor, k: int) -> float:
    """Share of (some of) the samples whose k-th neighbour is at a distance > 0 and no nearer than the one after it."""
    n = len(x)
    found = []
    for rows in torch.split(torch.arange(0, n, max(1, n // ROWS), device=x.device), max(1, CELLS // n)):
        both = torch.maximum(_distances(x[rows], x), _distances(y[rows], y))
        both[torch.arange(len(rows), device=x.device), rows] = -1.0
        far = both.topk(k + 2, largest=False).values[:, -2:]
        found.append((far[:, 0] > 0) & (far[:, 1] <= far[:, 0] * (1 + 1e-9)))  # standardising rounds equal distances
    return float(torch.cat(found).double().mean())


def _standard_error(x: Tensor, y: Tensor, k: int, algorithm: int, smallest: int) -> float:
    """`smallest`: samples of the rarest label; a block needs k + 1 of them, or its neighbours have other labels."""
    blocks = max(BLOCKS, min(2 * BLOCKS, len(x) // 200, smallest // (k + 1)))
    values = [local_information(x[i::blocks], y[i::blocks], k, algorithm).mean() for i in range(blocks)]
    return float(torch.stack(values).std() / math.sqrt(blocks))


def local_information(x: Tensor, y: Tensor, k: int = 3, algorithm: int = 1) -> Tensor:
    """Terms [n] whose mean is the estimate, from x [n, p] and y [n, q] as they are (float64, no rescaling)."""
    in_tree = x.shape[1] + y.shape[1] <= TREE_COLUMNS and x.device.type == "cpu"
    counts = _tree_counts if in_tree else _direct_counts
    k_used, near_x, near_y = (c.double() for c in counts(x, y, k, algorithm))
    psi = torch.digamma
    start = psi(k_used) + psi(torch.tensor(len(x), dtype=torch.float64, device=x.device))
    return start - (1 / k if algorithm == 2 else 0) - psi(near_x) - psi(near_y)


def _direct_counts(x: Tensor, y: Tensor, k: int, algorithm: int) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbours used, and points near in x and in y [n each], from all distances, some rows at a time."""
    n = len(x)
    parts = []
    for rows in torch.split(torch.arange(n, device=x.device), max(1, CELLS // n)):
        dx, dy = _distances(x[rows], x), _distances(y[rows], y)
        both = torch.maximum(dx, dy)
        both[torch.arange(len(rows), device=x.device), rows] = -1.0  # oneself comes first, whatever the ties
        far, index = both.topk(k + 1, largest=False)
        if algorithm == 1:
            eps = far[:, -1:]
            tied = eps == 0
            counts = [torch.where(tied, d == 0, d < eps).sum(1) for d in (dx, dy)]
            parts.append((torch.where(tied[:, 0], (both <= 0).sum(1), k), *counts))  # with oneself
        else:
            widths = [d.gather(1, index[:, 1:]).amax(1, keepdim=True) for d in (dx, dy)]
            _refuse_ties(*widths)
            counts = [(d <= w).sum(1) - 1 for d, w in zip((dx, dy), widths)]
            parts.append((torch.full_like(counts[0], k), *counts))
    used, near_x, near_y = (torch.cat(column) for column in zip(*parts))
    return used, near_x, near_y


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Maximum-norm distances [n, m], column by column: never [n, m, p]."""
    out = (a[:, None, 0] - b[None, :, 0]).abs_()
    for column in range(1, a.shape[1]):
        torch.maximum(out, (a[:, None, column] - b[None, :, column]).abs_(), out=out)
    return out


def _tree_counts(x: Tensor, y: Tensor, k: int, algorithm: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same counts by k-d trees."""
    from scipy.spatial import cKDTree

    a, b = x.numpy(), y.numpy()
    both = np.concatenate([a, b], 1)
    trees = cKDTree(a), cKDTree(b)
    joint = cKDTree(both)
    far, index = joint.query(both, k + 1, p=np.inf)
    if algorithm == 1:
        eps = far[:, -1]
        radius = np.nextafter(eps, 0)  # strictly closer than eps; 0 stays 0, which is where ties are
        near = [_within(tree, points, radius) for tree, points in zip(trees, (a, b))]
        used = np.full(len(a), k)
        tied = eps == 0
        if tied.any():
            used[tied] = _within(joint, both[tied], np.zeros(int(tied.sum())))
    else:
        # the distance to oneself is 0 and changes no maximum, so it need not be found among the k + 1
        widths = [np.abs(v[index] - v[:, None]).max((1, 2)) for v in (a, b)]
        _refuse_ties(*(torch.from_numpy(w) for w in widths))
        near = [_within(tree, points, w) - 1 for tree, points, w in zip(trees, (a, b), widths)]
        used = np.full(len(a), k)
    return torch.from_numpy(used), torch.from_numpy(near[0]), torch.from_numpy(near[1])


def _within(tree: object, points: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Points of the tree at most `radius` away, oneself among them; only counts are held."""
    counts: np.ndarray = tree.query_ball_point(points, radius, p=np.inf, return_length=True)  # type: ignore[attr-defined]
    return counts.astype(np.int64)


def _refuse_ties(*widths: Tensor) -> None:
    ties = max(int((width == 0).sum()) for width in widths)
    if ties:
        raise InputError(f"ksg: {ties} samples equal all their neighbours; use algorithm=1, which counts such ties")
