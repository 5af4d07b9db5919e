"""Second moments of many gradients, kept in a few blocks so that the answer knows its own error.

Network t goes to block t mod B. The blocks are independent estimates of the same matrix: their spread gives standard
errors (of eigenvalues, by the delta method: u^T M_b u at fixed u), and the even against the odd ones say how stable the
leading eigenvectors are. What the spread cannot show is the bias of sample eigenvalues (the largest come out too large,
the smallest too small; see `NADs.marchenko_pastur`).
"""

import math

import torch
from torch import Tensor

from biascope.linalg import eigsh, psd_eigh, subspace_overlap
from biascope.linalg.elementary import Dense
from biascope.linalg.resolved import settled
from biascope.linalg.stable import Eigh, fix_signs, symmetrise
from biascope.support.processes import Processes

HELD = 16  # rows of a block are kept beside its sum [D, D] up to D / HELD of them: a sixteenth of its memory


class BlockMoments:
    """Sums of r r^T over rows r [D], in float64, by block.

    A few rows are kept as they are: u^T M_b u of all D directions u costs D^3 by the sum and D^2 by a row, and the
    leading directions of a few rows are those of a small matrix.
    """

    def __init__(self, dimension: int, blocks: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(blocks, dimension, dimension, dtype=torch.float64, device=device)
        self.means = torch.zeros(blocks, dimension, dtype=torch.float64, device=device)
        self.counts = torch.zeros(blocks, dtype=torch.float64, device="cpu")
        self.few: list[Tensor | None] = [self.means.new_zeros(0, dimension) for _ in range(blocks)]  # None: too many

    def add(self, start: int, rows: Tensor, others: Tensor | None = None) -> None:
        """Rows [networks, r, D] of networks start, start + 1, ...; each network adds sum over r of row row^T.

        With `others` of the same shape: row other^T + other row^T.
        """
        blocks = len(self.sums)
        for first in range(min(blocks, len(rows))):
            b = (start + first) % blocks
            own = rows[first::blocks].reshape(-1, rows.shape[-1]).double()
            self._hold(b, own if others is None else None)
            if others is None:
                self.sums[b].addmm_(own.T, own)
            else:
                product = own.T @ others[first::blocks].reshape(-1, rows.shape[-1]).double()
                self.sums[b] += product + product.T
            self.means[b] += own.sum(0)
            self.counts[b] += len(rows[first::blocks])

    def add_matrix(self, network: int, moment: Tensor) -> None:
        """The second moment [D, D] of one network, its rows summed already; there is no mean row then."""
        b = network % len(self.sums)
        self._hold(b, None)
        self.sums[b] += moment
        self.counts[b] += 1

    def _hold(self, b: int, rows: Tensor | None) -> None:
        held = self.few[b]
        fits = held is not None and rows is not None and HELD * (len(held) + len(rows)) <= held.shape[1]
        self.few[b] = torch.cat([held, rows]) if fits and held is not None and rows is not None else None

    def merge(self, team: Processes) -> None:
        """Add up what all ranks have; afterwards each has all of it."""
        if team.size == 1:
            return
        lengths = team.gather([None if rows is None else len(rows) for rows in self.few])
        for b, rows in enumerate(self.few):
            several = [each[b] for each in lengths]
            known = [length for length in several if length is not None]
            if len(known) < len(several) or HELD * sum(known) > self.sums.shape[1]:
                self.few[b] = None
            elif sum(known):
                whole, first = self.means.new_zeros(sum(known), self.sums.shape[1]), sum(known[: team.rank])
                assert rows is not None
                whole[first : first + len(rows)] = rows
                self.few[b] = team.sum(whole)
        team.sum(self.sums, self.means, self.counts)

    def clear(self) -> None:
        """Forget everything."""
        self.sums.zero_(), self.means.zero_(), self.counts.zero_()
        self.few = [self.means.new_zeros(0, self.sums.shape[1]) for _ in self.few]

    @property
    def count(self) -> int:
        """Networks so far."""
        return int(self.counts.sum())

    @property
    def trace(self) -> float:
        """Of the mean over networks."""
        return float(self.sums.diagonal(dim1=1, dim2=2).sum()) / max(self.count, 1)

    def matrix(self, center: bool = False) -> Tensor:
        """Mean over networks [D, D], with the outer product of the mean row taken off if `center`."""
        mean = symmetrise(self.sums.sum(0)) / self.count
        if center:
            row = self.means.sum(0) / self.count
            mean -= torch.outer(row, row)
        return mean

    def spread(self, vectors: Tensor, center: bool = False) -> Tensor:
        """Standard errors [k] of u^T M u for the columns u of `vectors` [D, k]; NaN with fewer than two blocks.

        With `center`, M is about the mean row (whose own error is of higher order); NaN with fewer than three networks,
        since two are as far from their mean.
        """
        used = self.counts > 0
        n = int(used.sum())
        if n < 2 or (center and self.count < 3):
            return torch.full((vectors.shape[1],), float("nan"), dtype=torch.float64, device="cpu")
        blocks = [int(b) for b in used.nonzero()[:, 0]]
        values = torch.stack([self._along(b, vectors) / self.counts[b] for b in blocks])
        if center:
            along = torch.stack([self.means[b] / self.counts[b] for b in blocks]) @ vectors  # [blocks, k]
            mean = (self.means.sum(0) / self.count) @ vectors
            values = values - 2 * along * mean + mean.square()
        errors: Tensor = values.std(0) / n**0.5
        return errors.cpu()

    def _along(self, b: int, vectors: Tensor) -> Tensor:
        """u^T (sum of the block) u for the columns u of `vectors` [D, k]."""
        rows = self.few[b]
        return (self.sums[b] @ vectors * vectors).sum(0) if rows is None else (rows @ vectors).square().sum(0)

    def relative_error(self) -> float:
        """Expected ||estimate - truth||_F / ||estimate||_F, from the spread of the blocks.

        NaN with fewer than two blocks, and where everything is zero.
        """
        used = [int(b) for b in (self.counts > 0).nonzero()[:, 0]]
        mean = self.matrix()
        if len(used) < 2 or not mean.any():
            return float("nan")
        squares = sum(float((self.sums[b] / self.counts[b] - mean).square().sum()) for b in used)
        return math.sqrt(squares / (len(used) * (len(used) - 1))) / float(mean.norm())

    def eigh(self, center: bool = False) -> Eigh:
        """All eigenpairs of `matrix`, descending. Of a few rows by their singular values, in D^2 per row and not D^3.

        What no row reaches has the eigenvalue zero, and any basis for its eigenvectors.
        """
        rows = self._rows(0, 1)
        if center or rows is None or not 0 < 4 * len(rows) <= rows.shape[1]:
            return psd_eigh(self.matrix(center))
        _, s, Vh = torch.linalg.svd(rows / math.sqrt(self.count), full_matrices=False)
        rest = torch.linalg.qr(Vh.T, mode="complete").Q[:, len(rows) :]
        values = torch.cat([s.square(), s.new_zeros(rest.shape[1])])
        return Eigh(values, fix_signs(torch.cat([Vh.T, rest], 1)))

    def _rows(self, start: int, step: int) -> Tensor | None:
        """All rows of the blocks start, start + step, ..., if they were kept."""
        few = [rows for rows in self.few[start::step] if rows is not None]
        return torch.cat(few) if len(few) == len(self.few[start::step]) else None

    def split_half_overlap(self, k: int, center: bool = False, floor: float = 0.0) -> tuple[float, int]:
        """Overlap of the leading eigenvectors of the even blocks with those of the odd ones (1: the same span), and of
        how many: k, or as many as both halves have eigenvalues above `floor` and above rounding. Any basis would do for
        the rest, so it says nothing about stability.
        """
        halves = [self._leading_half(parity, k, center, floor) for parity in (0, 1)]
        k = min(k, *(vectors.shape[1] for vectors in halves))
        return (subspace_overlap(*(vectors[:, :k] for vectors in halves)) if k else 0.0), k

    def _leading_half(self, parity: int, k: int, center: bool, floor: float) -> Tensor:
        """The k leading eigenvectors of every other block, [D, k] on the CPU; none of those with eigenvalue zero."""
        count, rows = self.counts[parity::2].sum().clamp(min=1), self._rows(parity, 2)
        zero = self.means.shape[1] * torch.finfo(torch.float64).eps  # of the trace, before the mean row is taken off
        if not center and rows is not None and len(rows):
            _, s, Vh = torch.linalg.svd(rows, full_matrices=False)
            values, vectors = (s.square() / count).cpu(), Vh.T.cpu()
            trace = float(values.sum())
        else:
            half = symmetrise(self.sums[parity::2].sum(0)) / count
            trace = float(half.diagonal().sum())
            if center:
                row = self.means[parity::2].sum(0) / count
                half = half - torch.outer(row, row)
            scale = half.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
            vectors = leading(half / scale, k, dense=half.is_cuda)
            values = (half @ vectors.to(half) * vectors.to(half)).sum(0).cpu()
        found: Tensor = vectors[:, : min(k, int((values > max(floor, zero * trace)).sum()))]
        return found


def leading(matrix: Tensor, k: int, dense: bool) -> Tensor:
    """The k leading eigenvectors [D, k] of a symmetric matrix, on the CPU: out of all (faster on a GPU), or alone."""
    if dense:
        return psd_eigh(matrix).vectors[:, :k].cpu()
    matrix = matrix.cpu()
    pairs = eigsh(Dense(matrix, symmetric=True), k, tol=1e-6, verify=False)
    if bool(settled(pairs.values, pairs.residuals, len(matrix)).all()):
        return pairs.vectors
    return psd_eigh(matrix).vectors[:, :k]  # Lanczos measures against the largest: small ones are not found yet


def blocks_for(dimension: int, room: int) -> int:
    """Number of blocks (even) that a budget in bytes allows."""
    return next((blocks for blocks in (16, 8, 4) if blocks * dimension**2 * 8 <= room // 4), 2)
