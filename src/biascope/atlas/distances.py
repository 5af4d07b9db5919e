"""How far apart two architectures are, and a plane on which these distances are kept as well as can be.

Every aspect of a fingerprint (kernel, learning, function, geometry, directions) is a short vector of logarithms; the
distance in one aspect is the root mean square difference, in units of its median over the atlas. The whole is the mean
over the aspects that two networks share: frequencies of the input for those that have them, directions for those with
inputs of one shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from biascope.atlas.measure import SMALLEST, Fingerprint

Aspect = Literal["kernel", "learning", "function", "geometry", "directions"]
ASPECTS: tuple[Aspect, ...] = get_args(Aspect)
RANKS = (1, 2, 4, 8, 16, 32, 56)  # of eigenvalues
OCTAVES = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16))  # of harmonics
ARRAY = NDArray[np.float64]


def vector(one: Fingerprint, aspect: Aspect, half: int | None = None) -> Tensor:
    """An aspect as a vector of logarithms, of one half or of the mean of both; empty where it has none."""

    def of(array: Tensor) -> Tensor:
        return array.double().nanmean(0) if half is None else array[half].double()

    if aspect == "kernel":
        return of(one.kernel)[[rank - 1 for rank in RANKS]].clamp_min(SMALLEST).log10()
    if aspect in ("learning", "function"):
        shares = of(one.learning if aspect == "learning" else one.function)
        bands = torch.stack([shares[low : high + 1].mean() for low, high in OCTAVES])
        return bands[1 if aspect == "function" else 0 :].clamp_min(SMALLEST).log10()
    if aspect == "geometry":
        return torch.cat([of(one.bands), 2 * of(one.spread[:, None]).clamp_min(SMALLEST).log10()])
    return torch.cat([of(one.modes).flatten(), of(one.places).flatten()])


def between(a: Fingerprint, b: Fingerprint, aspect: Aspect) -> float:
    """The distance of two fingerprints in one aspect, in its own units; nan where they cannot be compared."""
    u, v = vector(a, aspect), vector(b, aspect)
    if aspect == "geometry" and len(u) != len(v):  # frequencies on one side only: the spread remains
        u, v = u[-1:], v[-1:]
    if min(len(u), len(v)) == 0:
        return float("nan")
    return float((u - v).square().mean().sqrt())


def noise(one: Fingerprint, aspect: Aspect) -> float:
    """How far apart two measurements of the same architecture lie, from the two halves."""
    u, v = (vector(one, aspect, half) for half in range(2))
    return float((u - v).square().mean().sqrt()) / float(np.sqrt(2))


@dataclass(frozen=True)
class Distances:
    """Distances [n, n] in each aspect, in units of its median `scale`; `total` is their mean over what pairs share."""

    aspects: dict[Aspect, ARRAY]
    scale: dict[Aspect, float]
    total: ARRAY


def distances(found: Sequence[Fingerprint]) -> Distances:
    """All distances within an atlas."""
    n = len(found)
    aspects: dict[Aspect, ARRAY] = {}
    scale: dict[Aspect, float] = {}
    for aspect in ASPECTS:
        own = np.zeros((n, n))
        for i in range(n):
            for j in range(i):
                own[i, j] = own[j, i] = between(found[i], found[j], aspect)
        known = own[np.tril_indices(n, -1)]
        known = known[np.isfinite(known)]
        scale[aspect] = float(np.median(known)) if known.size and np.median(known) > 0 else 1.0
        aspects[aspect] = own / scale[aspect]
    total = np.nanmean(np.stack([*aspects.values()]), 0)
    return Distances(aspects, scale, total)


def distances_to(found: Sequence[Fingerprint], one: Fingerprint) -> ARRAY:
    """Distances [n] of a fingerprint from those of an atlas, in the atlas's units."""
    scale = distances(found).scale
    rows = [[between(one, other, aspect) / scale[aspect] for other in found] for aspect in ASPECTS]
    return np.asarray(np.nanmean(np.array(rows), 0))


def plane(D: ARRAY, steps: int = 500) -> tuple[ARRAY, float]:
    """Points [n, 2] whose distances are near D, and the share of D's squares that they miss (stress).

    Classical scaling, then majorisation (SMACOF), which lowers the stress in every step.
    """
    n = len(D)
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-centre @ D**2 @ centre / 2)
    points = vectors[:, -2:][:, ::-1] * np.sqrt(np.maximum(values[-2:][::-1], 1e-12))
    for _ in range(steps):
        own = apart(points, points)
        ratio = np.divide(D, own, out=np.zeros_like(D), where=own > 1e-12)
        B = -ratio
        B[np.diag_indices(n)] = ratio.sum(1)
        points = B @ points / n
    points -= points.mean(0)
    points *= np.where(points[np.abs(points).argmax(0), [0, 1]] < 0, -1, 1)
    missed = ((apart(points, points) - D) ** 2).sum() / (D**2).sum()
    return points, float(missed)


def apart(a: ARRAY, b: ARRAY) -> ARRAY:
    """Distances [n, m] of points [n, 2] and [m, 2]."""
    return np.asarray(np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1)))


def place(points: ARRAY, to: ARRAY) -> ARRAY:
    """Where a new point [2] lies whose distances to the points of a map are `to` [n]; the map stays as it is."""

    def stress(p: ARRAY) -> float:
        return float(((apart(p[None], points)[0] - to) ** 2 / np.maximum(to, 0.1)).sum())

    starts = points[np.argsort(to)[:5]] + 1e-3
    return np.asarray(min((minimize(stress, start) for start in starts), key=lambda r: float(r.fun)).x)
