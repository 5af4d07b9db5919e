"""Frequency bins as directions: which to train on, replicates by symmetry, and the map in the paper's layout.

The bins (a, b) and (b, a) are two independent measurements of one quantity: bins are called good or bad by one member
of a pair, and measured by the other, which keeps the luck of a single training out of the comparison.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch

from biascope import InputError
from biascope.data.fourier import FourierBasis, dft_basis, frequency_map
from biascope.studies import Estimate, HeatMap
from biascope.support import derive
from biascope_papers.nad.directional import Array, Side

Part = Literal["re", "im"]
Stride = Annotated[int, "every how many-th frequency (the public maps: 2)"]


@dataclass(frozen=True)
class Grid:
    """Which Fourier directions are trained on."""

    image_size: Side = 32
    stride: Stride = 2
    window: Annotated[int, "only the window x window lowest frequencies; 0: all"] = 0
    sample: Annotated[int, "train only about this many bins, in transposed pairs spread over the map; 0: all"] = 0

    def basis(self, seed: int, part: Part = "re") -> FourierBasis:
        """The vectors of one part on the grid, or `sample` of them in transposed pairs (none on a diagonal).

        Systematic: pairs are put in order of how many of their two frequencies are odd multiples of the stride (strides
        and poolings by two treat those alike), then by distance from DC, and taken at equal steps from a random start.
        """
        side, stride, window, sample = self.image_size, self.stride, self.window, self.sample
        if stride < 1 or sample < 0 or not 0 <= window <= side:
            raise InputError(
                f"stride = {stride}, window = {window}, sample = {sample}: the stride counts from 1, the window from 1 "
                f"to the {side} frequencies of a side (0: all), the sample from 1 (0: all)"
            )
        basis = dft_basis((side, side)).part(part).stride(stride).lowest(window or side)
        if not len(basis):
            raise InputError(
                f'stride = {stride}, window = {window}: no bin of {side} x {side} pixels with an "{part}" vector is '
                "left; choose a smaller stride or a larger window"
            )
        rng = np.random.default_rng(derive(seed, "bins"))
        pairs = np.array([(i, j) for i, j in enumerate(partners(basis).tolist()) if j > i])
        if not 0 < sample < len(basis) or len(pairs) == 0:
            return basis
        steps = np.abs(basis.frequencies.numpy()[pairs[:, 0]]) // stride
        order = np.lexsort((rng.random(len(pairs)), (steps**2).sum(1), (steps % 2).sum(1)))
        count = min(len(pairs), max(1, sample // 2))
        chosen = pairs[order[((np.arange(count) + rng.random()) * len(pairs) / count).astype(int)]]
        return basis.select(torch.tensor(np.sort(chosen.ravel())))


GRID = Grid()


def partners(basis: FourierBasis) -> Array:
    """For each bin the position [k] of its transpose (or the transpose's conjugate); -1 for none or itself."""
    side = basis.shape[0]
    place = {tuple(pair): i for i, pair in enumerate(basis.bins.tolist())}
    found = [place.get((b, a), place.get((-b % side, -a % side), -1)) for a, b in basis.bins.tolist()]
    return np.array([-1 if partner == i else partner for i, partner in enumerate(found)])


def replicated_gap(values: Array, partner: Array, share: float = 0.25, by_twins: bool = False) -> Estimate | None:
    """Mean of the best minus mean of the worst bins, chosen by one of each transposed pair and measured by the other.

    Done in both orders and averaged; the standard error is the larger of the two (they are not independent). None with
    fewer than four pairs. Without any dependence on the frequency its expectation is zero. The error is of the spread
    of the bins that were chosen, or, `by_twins`, of repeated measurements alone, from how far the twins differ.
    """
    first = np.array([i for i, j in enumerate(partner) if j > i], dtype=int)
    if len(first) < 4:
        return None
    second, take = partner[first], max(2, round(share * len(first)))
    noise = (values[first] - values[second]) ** 2 / 2  # variance of one training, from each pair
    gaps, errors = [], []
    for choose, measure in ((values[first], values[second]), (values[second], values[first])):
        order = np.argsort(choose, kind="stable")
        ends = order[-take:], order[:take]
        high, low = (measure[end] for end in ends)
        gaps.append(high.mean() - low.mean())
        spread = sum(noise[end].mean() for end in ends) if by_twins else high.var(ddof=1) + low.var(ddof=1)
        errors.append(np.sqrt(spread / take))
    return Estimate(float(np.mean(gaps)), float(max(errors)), 2 * take if by_twins else len(first))


def extremes(values: Array, partner: Array) -> Estimate | None:
    """`replicated_gap` of the ends of the map: how unlike the best bins are among themselves is no error there."""
    return replicated_gap(values, partner, 0.1, by_twins=True)


def worst_by_partner(values: Array, partner: Array, share: float = 0.5) -> Array:
    """Positions of the bins whose transposed twin is among the worst: chosen without looking at the bin itself."""
    paired = np.array([i for i, j in enumerate(partner) if j >= 0], dtype=int)
    order = np.argsort(values[partner[paired]], kind="stable")
    return np.sort(paired[order[: round(share * len(paired))]])


def reliability(values: Array, partner: Array) -> float:
    """Correlation of the values of transposed bins: 1 when frequency decides, 0 when chance does."""
    first = np.array([i for i, j in enumerate(partner) if j > i], dtype=int)
    both = np.concatenate([first, partner[first]]), np.concatenate([partner[first], first])
    if len(first) < 3 or np.ptp(values[both[0]]) == 0:
        return float("nan")
    return float(np.corrcoef(values[both[0]], values[both[1]])[0, 1])


def heat_map(
    name: str,
    title: str,
    values: Array,
    basis: FourierBasis,
    part: Part = "re",
    *,
    z_label: str = "test accuracy",
    caption: str = "",
    low: float | None = 0.5,
    high: float | None = 1.0,
) -> HeatMap:
    """The map in the paper's layout: DC in the centre, each value also at its conjugate bin, unmeasured bins empty."""
    grid = frequency_map(torch.as_tensor(values), basis, part)
    k = torch.arange(basis.shape[0]) - basis.shape[0] // 2
    rows, columns = (~grid.isnan()).any(1), (~grid.isnan()).any(0)
    return HeatMap.of(
        name,
        title,
        x=k[columns].tolist(),
        y=k[rows].tolist(),
        z=grid[rows][:, columns].tolist(),
        x_label="horizontal frequency",
        y_label="vertical frequency",
        z_label=z_label,
        alt=f"Map over frequencies with DC in the centre: from {np.nanmin(values):.3g} to {np.nanmax(values):.3g}, "
        f"{values[(basis.bins == 0).all(1).numpy()].tolist() or 'not measured'} at DC.",
        caption=caption,
        low=low,
        high=high,
    )
