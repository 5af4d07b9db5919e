"""Second moment of a convolution's patches, sum_t p_t p_t^T, without forming the patches.

Entry ((c, a), (c', a')) of the moment (channels c, kernel offsets a) is a sum over pixels u of x_c(u) x_c'(u + a' - a),
where u runs over the pixels that offset a visits: all but a few at the border. So the sum over *all* pixels, which
depends only on the shift a' - a, is computed once per shift (13 products instead of 45 for a 3 x 3 kernel), and what
the border contributes is taken away: rows that a never visits, columns, and, counted twice, their crossings.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from biascope.curvature import contract
from biascope.layers.rules import Conv

Offset = tuple[int, int]
TERMS = {"cpu": 2048, "cuda": 1024}  # of a sum, in one matrix product
CHANNELS = 32  # fewer make products too thin to be fast


@dataclass(frozen=True)
class Strip:
    """Pixels that some kernel offsets never visit, and the shifts those offsets need."""

    sign: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    shifts: tuple[Offset, ...]


class PatchMoment:
    """Running sum over images [n, c, h, w] for a kernel moved by single steps over zero-padded images."""

    def __init__(self, conv: Conv, channels: int, size: tuple[int, int], dtype: torch.dtype, device: torch.device):
        self.kernel, self.channels, self.size = (conv.kernel[0], conv.kernel[1]), channels, size
        self.dtype, self.device = dtype, device
        (kh, kw), (h, w) = self.kernel, size
        self.offsets = list(product(range(kh), range(kw)))
        pads = conv.padding
        self.out = (h + sum(pads[0]) - kh + 1, w + sum(pads[1]) - kw + 1)
        self.unseen = [
            [tuple(u for u in range(s) if not 0 <= u + p[0] - a < o) for a in range(k)]
            for s, p, o, k in zip(size, pads, self.out, self.kernel)
        ]
        self.shifts = self._shifts(self.offsets)
        self.strips = self._strips()
        c = channels
        self.moments = torch.zeros(len(self.shifts), c, c, dtype=dtype, device=device)
        self.borders = {
            key: torch.zeros(c, len(strip.shifts) * c, dtype=dtype, device=device) for key, strip in self.strips.items()
        }
        self.total = torch.zeros(c, h, w, dtype=dtype, device=device)
        self.n = 0

    def _shifts(self, starts: list[Offset]) -> tuple[Offset, ...]:
        """The shifts a' - a >= 0 (in reading order) of these offsets a to any a'; the others follow by symmetry."""
        found = {(b[0] - a[0], b[1] - a[1]) for a in starts for b in self.offsets if b >= a}
        return tuple(sorted(found))

    def _strips(self) -> dict[tuple[int | None, int | None], Strip]:
        (kh, kw), (h, w) = self.kernel, self.size
        strips: dict[tuple[int | None, int | None], Strip] = {}
        for i, rows in enumerate(self.unseen[0]):
            if rows:
                shifts = self._shifts([(i, j) for j in range(kw)])
                strips[i, None] = Strip(-1, rows, tuple(range(w)), shifts)
        for j, columns in enumerate(self.unseen[1]):
            if columns:
                shifts = self._shifts([(i, j) for i in range(kh)])
                strips[None, j] = Strip(-1, tuple(range(h)), columns, shifts)
        for (i, rows), (j, columns) in product(enumerate(self.unseen[0]), enumerate(self.unseen[1])):
            if rows and columns:
                strips[i, j] = Strip(1, rows, columns, self._shifts([(i, j)]))
        return strips

    @property
    def cost(self) -> int:
        """Multiplications per image, over channels squared."""
        (kh, kw), (h, w) = self.kernel, self.size
        whole = len(self.shifts) * (h + kh - 1) * (w + kw - 1)
        return whole + sum(len(s.rows) * len(s.columns) * len(s.shifts) for s in self.strips.values())

    @property
    def columns(self) -> int:
        """Numbers per image that `add` needs at once."""
        (kh, kw), (h, w) = self.kernel, self.size
        widest = max((len(s.rows) * len(s.columns) * (len(s.shifts) + 1) for s in self.strips.values()), default=0)
        return self.channels * ((h + kh - 1) * (w + kw - 1) + widest)

    def add(self, x: Tensor) -> None:
        """Add images [n, c, h, w]."""
        n, c = x.shape[:2]
        (kh, kw), (h, w) = self.kernel, self.size
        # images end to end, channels last, with gaps of zeros: a shift is then a shift of the one long index
        hp, wp = h + kh - 1, w + kw - 1
        margin = (kh - 1) * wp + kw - 1
        length = n * hp * wp
        X = torch.zeros(margin + length + margin, c, dtype=self.dtype, device=self.device)
        X[margin : margin + length].view(n, hp, wp, c)[:, :h, :w] = x.permute(0, 2, 3, 1)
        steps = [di * wp + dj for di, dj in self.shifts]
        terms = TERMS.get(self.device.type, 2048)
        whole = 0 if self.device.type in contract.CACHED else length // terms
        if whole:  # many products at once
            left = X[margin : margin + whole * terms].view(whole, terms, c).mT
            for moment, step in zip(self.moments, steps):
                start = margin + step
                moment += (left @ X[start : start + whole * terms].view(whole, terms, c)).sum(0)
        for p in range(margin + whole * terms, margin + length, terms):
            q = min(p + terms, margin + length)
            for moment, step in zip(self.moments, steps):
                moment.addmm_(X[p:q].T, X[p + step : q + step])
        first = margin + hp * wp * torch.arange(n, device=self.device)
        for key, strip in self.strips.items():
            rows, columns = (torch.tensor(t, device=self.device) for t in (strip.rows, strip.columns))
            at = (first[:, None, None] + wp * rows[:, None] + columns).flatten()
            away = torch.tensor([di * wp + dj for di, dj in strip.shifts], device=self.device)
            self.borders[key].addmm_(X[at].T, X[at[:, None] + away].flatten(1))
        self.total += x.sum(0)
        self.n += n

    def finish(self, bias: bool) -> Tensor:
        """[d, d] with d = c kh kw, in the weight's order; with a row and column for an input of ones if `bias`."""
        c, k = self.channels, len(self.offsets)
        d = c * k
        A = torch.empty(d + bias, d + bias, dtype=self.dtype, device=self.device)
        rows = A[:d, :d].view(c, k, c, k)
        for i, a in enumerate(self.offsets):
            rows[:, i] = torch.stack([self._block(a, b) if b >= a else self._block(b, a).T for b in self.offsets], -1)
        if bias:
            seen = torch.stack([self._visited(a) for a in self.offsets], 1).flatten()
            A[d, :d] = A[:d, d] = seen
            A[d, d] = self.n * self.out[0] * self.out[1]
        return A

    def _block(self, a: Offset, b: Offset) -> Tensor:
        """[c, c]: the moment of two kernel offsets a <= b."""
        c, shift = self.channels, (b[0] - a[0], b[1] - a[1])
        block = self.moments[self.shifts.index(shift)]
        for key in ((a[0], None), (None, a[1]), a):
            if key in self.strips:
                at = self.strips[key].shifts.index(shift) * c
                block = block.add(self.borders[key][:, at : at + c], alpha=self.strips[key].sign)
        return block

    def _visited(self, a: Offset) -> Tensor:
        """Sum [c] of the pixels that a kernel offset visits."""
        kept = self.total
        for axis, (s, lost) in enumerate(zip(self.size, (self.unseen[0][a[0]], self.unseen[1][a[1]]))):
            keep = [u for u in range(s) if u not in lost]
            kept = kept.index_select(axis + 1, torch.tensor(keep, dtype=torch.long, device=self.device))
        return kept.sum((1, 2))


def patch_moment(conv: object, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> PatchMoment | None:
    """A `PatchMoment` for inputs [..., c, h, w] of a convolution where it needs less work than the patches do."""
    if not isinstance(conv, Conv) or len(conv.kernel) != 2 or conv.groups > 1 or shape[-3] < CHANNELS:
        return None
    if any(v != 1 for v in (*conv.stride, *conv.dilation)):
        return None
    moment = PatchMoment(conv, shape[-3], (shape[-2], shape[-1]), dtype, device)
    k = len(moment.offsets)
    by_patches = (k * k + k) // 2 * moment.out[0] * moment.out[1]
    return moment if moment.cost < by_patches else None
