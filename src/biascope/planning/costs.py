"""Cost models: what n examples on W processes take, from pilots of one process on a few examples.

Peaks of memory are sums of tensors, so they follow their laws exactly where the regime is the same: a kernel takes n^2
numbers beside what is held per example, a metric so much per example of a pass, and what it keeps. Times follow
theirs roughly.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from biascope.curvature.kronecker import EigenPiece, KroneckerPiece
from biascope.curvature.passes import SIZES
from biascope.kernels.plan import Plan, make_plan
from biascope.kernels.shared import exchanged, rectangles
from biascope.network.layers.blocks import Anatomy
from biascope.planning.pilots import Pilot, measure
from biascope.support.errors import InputError
from biascope.support.processes import Processes

HALF = 0.55  # of a symmetric kernel, what is computed


class Costs(Protocol):
    """What the planner asks."""

    @property
    def pilots(self) -> list[Pilot]:
        """Small runs."""

    def memory(self, n: int, size: int) -> float:
        """Bytes per process, beside the network and the data."""

    def seconds(self, n: int, size: int) -> float:
        """Of computation, on the slowest process."""

    def sent(self, n: int, size: int) -> float:
        """Bytes that a process hands to collectives."""

    def flops(self, n: int) -> float:
        """Of all processes together."""


class Rank(Processes):
    """One of several ranks, of which none is there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@dataclass
class KernelCosts:
    """Of `bs.ntk`: a n for the passes, b n^2 for the contractions; peak K(n) + held n."""

    run: Callable[[int, int | None], Any]  # on a square, or on a rectangle
    found: Anatomy
    mode: str
    k: int
    strategy: str
    precision: str
    dtype: torch.dtype
    device: torch.device
    budget: int
    patience: float

    def __post_init__(self) -> None:
        self.pilots: list[Pilot] = []

    def learn(self, n: int) -> None:
        """Pilots of doubling size, as long as they are quick."""
        size = min(n, 16)
        while True:
            self.pilots.append(measure(lambda size=size: self.run(size, None), size, self.device))  # type: ignore[misc]
            if size == n or 6 * self.pilots[-1].seconds > self.patience:
                break
            size = min(n, 2 * size)
        last = self.pilots[-4:]
        rest = [float(p.peak - self._kernel(p.n, p.n)) for p in last]
        self.fixed, self.held, self.scratch = _law(last, rest)  # of which the last is some rows of the kernel
        self.time = _law(last, [p.seconds for p in last])
        self._learn_rectangle(last[-1].n)
        self.work = _law(last, [p.flops for p in last])

    def _learn_rectangle(self, n: int) -> None:
        """Beside a square on the diagonal, a rectangle: both sides are held, and no half of it is saved."""
        rows = max(1, n // 2)
        pilot = measure(lambda: self.run(rows, n), n, self.device)
        factors = sum(b.factor_bytes for b in self._plan(rows, n, self.budget).blocks)
        self.beside = max(0.0, (pilot.peak - self._kernel(rows, n) - self.fixed - factors * (rows + n)) / n)
        left = pilot.seconds - self.time[0] - self.time[1] * (rows + n)
        self.product = left / (rows * n) if left > 0 else self.time[2] / HALF
        part = torch.zeros(2048, 2048, dtype=self.dtype, device=self.device)
        self.place = measure(lambda: torch.zeros_like(part).copy_(part.mT), n, self.device).seconds / part.nbytes

    def _plan(self, rows: int, columns: int | None, room: int) -> Plan:
        return make_plan(self.found, self.mode, rows, columns, self.k, self.strategy, self.precision, self.dtype,
                         self.device, room)  # fmt: skip

    def _kernel(self, rows: int, columns: int) -> float:
        return rows * columns * {"full": self.k**2, "trace": 1, "diagonal": self.k}[self.mode] * self.dtype.itemsize

    def _job(self, rows: int, columns: int | None, room: int) -> tuple[float, float]:
        """(bytes, seconds) of a square on the diagonal, or of a rectangle."""
        how = self._plan(rows, columns, room)
        factors = float(sum(b.factor_bytes for b in how.blocks))
        at_once = max(sum(how.blocks[i].factor_bytes for i in group) for group in how.groups)
        passing = max(0.0, self.held - factors) if columns is None else self.beside
        examples, tiles = rows + (columns or 0), ceil(rows / how.tile)
        in_memory = examples if tiles == 1 else 2 * how.tile
        tile = 0.0 if tiles == 1 else self._kernel(how.tile, how.tile)
        memory = self._kernel(rows, columns or rows) + tile + self.fixed
        memory += min(self.scratch * rows * rows, how.workspace) if columns is None else 0.0
        memory += at_once * in_memory + passing * min(how.chunk, max(rows, columns or 0))
        collected = len(how.groups) * (examples if tiles == 1 else examples * tiles)
        pairs, product = (rows * rows, self.time[2]) if columns is None else (rows * columns, self.product)
        seconds = self.time[0] + self.time[1] * collected + product * pairs
        return memory, seconds

    def _ranks(self, n: int, size: int) -> list[tuple[float, float]]:
        """(bytes, seconds) of all ranks, or of some of many: they differ little."""
        found, whole = [], self._kernel(n, n)
        for rank in range(size) if size <= 4 else (0, size // 2, size - 1):
            memory = seconds = before = 0.0
            for rows, columns in rectangles(rank, size, n, None):
                r, c = rows.stop - rows.start, None if columns is None else len(columns)
                one = self._job(r, c, self.budget - int(whole))
                memory, seconds = max(memory, before + one[0]), seconds + one[1]
                before = self._kernel(r, c or r)  # the last one is there until the next is done
            found.append((memory + whole, seconds + self.place * whole))  # parts are put into a kernel of zeros
        return found

    def memory(self, n: int, size: int) -> float:  # noqa: D102
        try:
            return self._job(n, None, self.budget)[0] if size == 1 else max(m for m, _ in self._ranks(n, size))
        except InputError:  # no plan fits the budget
            return inf

    def seconds(self, n: int, size: int) -> float:  # noqa: D102
        try:
            return self._job(n, None, self.budget)[1] if size == 1 else max(s for _, s in self._ranks(n, size))
        except InputError:
            return inf

    def sent(self, n: int, size: int) -> float:  # noqa: D102
        return 0.0 if size == 1 else self._kernel(1, exchanged(n, size))

    def flops(self, n: int) -> float:  # noqa: D102
        return self.work[0] + self.work[1] * n + self.work[2] * n * n


@dataclass
class MetricCosts:
    """Of `bs.fisher`: passes over a process's share of the data, and factors that are dealt out to be decomposed.

    The passes of the pilots are shorter than those of the whole where these would take too long.
    """

    run: Callable[[int, int | None], Any]  # on how many examples, and how many of them in a pass
    batch: int | None
    device: torch.device
    budget: int
    patience: float

    def __post_init__(self) -> None:
        self.pilots: list[Pilot] = []

    def learn(self, n: int) -> None:
        """Pilots of a few examples, and of one, two and three passes."""
        seen: list[Callable[[int], tuple[int, int]]] = []
        token = SIZES.set(seen)
        try:
            self.pieces = self.run(min(n, 2), self.batch).pieces
        finally:
            SIZES.reset(token)
        self.sizes, few = seen[0], sorted({min(n, 2), min(n, 16)})
        self.pilots = [self._measure(m, self.batch) for m in few]
        last, step = self.pilots[-1], self._step(n)
        each = (last.seconds - self.pilots[0].seconds) / max(1, last.n - self.pilots[0].n)
        while step > 16 and self.pilots[0].seconds + 3 * step * each > self.patience / 1.5:
            step = -(-step // 2)
        self.pilots += [self._measure(m, step) for m in (step, 2 * step, 3 * step) if last.n < m <= max(n, step)]
        self.step = step
        costs = [float(f.shape[-1]) ** 3 for f in _factors(self.pieces)]
        self.dealt = costs or [1.0]
        self.setting = min(p.seconds for p in self.pilots)  # what does not grow with the data

    def _measure(self, m: int, step: int | None) -> Pilot:
        return measure(lambda: self.run(m, step), m, self.device)

    def _step(self, n: int) -> int:
        """Examples of a pass over n of them."""
        return max(1, min(n, self.sizes(min(n, self.batch or n))[0]))

    def _line(self, values: Sequence[float], n: float) -> float:
        """Values between and beyond those of the pilots, on straight lines."""
        sizes = [float(p.n) for p in self.pilots]
        if len(sizes) == 1:
            return values[0] * n / sizes[0]
        if n <= sizes[-1]:
            return float(np.interp(n, sizes, values))
        slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
        return max(values[-1], values[-1] + slope * (n - sizes[-1]))

    def memory(self, n: int, size: int) -> float:  # noqa: D102
        m = -(-n // size)
        step, sizes, peaks = self._step(m), [p.n for p in self.pilots], [float(p.peak) for p in self.pilots]
        if len(peaks) < 3:
            found = self._line(peaks, m)
        else:  # one pass, and what is held of earlier ones during a second, and during later ones
            one = max(i for i, size in enumerate(sizes) if size <= self.step)
            slopes = [(b - a) / (q - p) for (p, a), (q, b) in itertools.pairwise(zip(sizes, peaks, strict=True))]
            found = float(np.interp(step, sizes[: one + 1], peaks[: one + 1]))
            found += max(0, step - sizes[one]) * slopes[max(0, one - 1)]
            found += (min(m, 2 * step) - step) * slopes[min(one, len(slopes) - 1)] + max(0, m - 2 * step) * slopes[-1]
        return min(found, max(float(self.budget), *peaks))

    def seconds(self, n: int, size: int) -> float:  # noqa: D102
        whole = self._line([p.seconds for p in self.pilots], ceil(n / size))
        if size == 1:
            return whole
        team = Rank(0, size)
        load = [0.0] * size
        for cost, owner in zip(self.dealt, team.deal(self.dealt), strict=True):
            load[owner] += cost
        setting = min(self.setting, whole)
        return whole - setting + setting * max(load) / sum(self.dealt)

    def sent(self, n: int, size: int) -> float:  # noqa: D102
        if size == 1:
            return 0.0
        total = 0
        for piece in self.pieces:
            if isinstance(piece, EigenPiece):  # sums to their owners; eigenvectors and eigenvalues back; the scalings
                for U, values in ((piece.U_B, piece.s_B), (piece.U_A, piece.s_A)):
                    total += values.nbytes + (2 * U.nbytes if U is not None else 0)
                total += piece.s.nbytes
            else:
                total += sum(t.nbytes for t in piece.arrays().values())
            total += 8 * isinstance(piece, EigenPiece | KroneckerPiece)  # how many positions were counted
        return float(total)

    def flops(self, n: int) -> float:  # noqa: D102
        return self._line([p.flops for p in self.pilots], n)


def _factors(pieces: Sequence[Any]) -> list[Tensor]:
    found = [t for piece in pieces if isinstance(piece, EigenPiece) for t in (piece.U_B, piece.U_A)]
    return [t for t in found if t is not None]


def _law(pilots: Sequence[Pilot], values: Sequence[float]) -> tuple[float, float, float]:
    """Non-negative (t0, a, b) with t0 + a n + b n^2 near the values, relatively."""
    from scipy.optimize import nnls

    n = np.array([p.n for p in pilots], dtype=float)
    y = np.maximum(np.array(values, dtype=float), 1e-12)
    columns = np.stack([np.ones_like(n), n, n * n], 1) / y[:, None]
    scale = columns.max(0)
    found = nnls(columns / scale, np.ones_like(n))[0] / scale
    return float(found[0]), float(found[1]), float(found[2])
