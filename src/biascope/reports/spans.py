"""Which input directions networks share: overlaps of spans, corrected for how well each span is known, with errors.

The overlap of two networks is that of the spans of their first k anisotropy directions, ||U^T V||_F^2 / k: 1 for the
same span, k / D for unrelated ones. Each network's sample is cut in halves and every entry compares halves that share
no initialisation, so the diagonal is not 1 by construction: it says how well the span itself is known. Two networks
with one span would overlap by the geometric mean of their diagonals; the corrected overlap divides by that, after
taking off what chance gives, as one corrects a correlation for the reliability of what is correlated.

Errors come from leaving out groups of initialisations, one group at a time and from all networks at once: samples that
two networks have in common (the same name twice) then leave no error between them, as it should be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

GROUPS = 16  # of initialisations, left out one at a time
FEWEST = 4  # initialisations that two halves and an error need

Matrix = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Overlaps:
    """Overlaps of m networks with standard errors, and as shares of what two samples of one network share.

    Attributes:
        values: [m, m]; the diagonal compares two halves of one network's sample.
        errors: [m, m], NaN where there are too few initialisations to tell.
        shares: [m, m] corrected overlaps; NaN where one of the two spans is not known.
        share_errors: [m, m].
        k: directions in a span.
        chance: k / D, the overlap of unrelated spans.
    """

    values: Matrix
    errors: Matrix
    shares: Matrix
    share_errors: Matrix
    k: int
    chance: float

    @property
    def known(self) -> Matrix:
        """[m] whether a network's own halves overlap more than chance would give, by two standard errors."""
        return known(np.diag(self.values), np.diag(self.errors), self.chance)


def overlaps(samples: Sequence[Tensor], k: int) -> Overlaps:
    """Overlaps of the spans of the first k directions of samples [T_i, D], one per network."""
    chance = k / samples[0].shape[1]
    halves = [(span(sample[::2], k), span(sample[1::2], k)) for sample in samples]
    values = overlap_matrix(halves)
    least = min(len(sample) for sample in samples)
    if least < FEWEST:
        unknown = np.full_like(values, np.nan)
        return Overlaps(values, unknown, unknown, unknown, k, chance)
    groups = min(GROUPS, least - least % 2)  # even: a group then lies in one half
    left = []
    for group in range(groups):
        without = []
        for sample, (one, two) in zip(samples, halves):
            rest = torch.arange(len(sample))
            rest = rest[(rest % groups != group) & (rest % 2 == group % 2)]
            without.append((span(sample[rest], k), two) if group % 2 == 0 else (one, span(sample[rest], k)))
        left.append(overlap_matrix(without))
    errors = _jackknife(left)
    sure = known(np.diag(values), np.diag(errors), chance)
    with np.errstate(invalid="ignore", divide="ignore"):  # a group left out may leave no overlap at all
        shares, share_errors = corrected(values, chance), _jackknife([corrected(one, chance) for one in left])
    both = np.outer(sure, sure)
    return Overlaps(values, errors, np.where(both, shares, np.nan), np.where(both, share_errors, np.nan), k, chance)


def known(own: Matrix, errors: Matrix, chance: float) -> Matrix:
    """Whether overlaps of a network's own halves [m] are at least twice chance, and above it by two standard errors."""
    return np.asarray((own >= 2 * chance) & (own - chance > 2 * errors))


def span(rows: Tensor, k: int) -> Tensor:
    """Orthonormal rows [k, D]: the first k right singular vectors of rows [n, D], through the smaller Gram matrix."""
    n, D = rows.shape
    gram = rows.T @ rows if n >= D else rows @ rows.T
    leading: Tensor = torch.linalg.eigh(gram).eigenvectors[:, -k:]
    if n < D:  # weights of the rows; QR, since rows need not span k directions
        leading = torch.linalg.qr(rows.T @ leading).Q
    return leading.T


def overlap(U: Tensor, V: Tensor) -> float:
    """||U V^T||_F^2 / k of orthonormal rows U, V [k, D]."""
    return float((U @ V.T).square().sum()) / len(U)


def overlap_matrix(halves: Sequence[tuple[Tensor, Tensor]]) -> Matrix:
    """Overlaps [m, m] of m networks, each given by the spans of the two halves of its sample."""
    return np.array([[(overlap(a[0], b[1]) + overlap(a[1], b[0])) / 2 for b in halves] for a in halves])


def corrected(matrix: Matrix, chance: float) -> Matrix:
    """Overlaps [m, m] as shares of what two samples of one and the same span would show."""
    own = np.diag(matrix) - chance
    return np.asarray((matrix - chance) / np.sqrt(np.outer(own, own)))


def _jackknife(left: Sequence[Matrix]) -> Matrix:
    """Standard error from values with one group left out."""
    each = np.stack(left)
    return np.asarray(np.sqrt((len(each) - 1) * each.var(0)))
