"""Second moment of a convolution's patches, sum_t p_t p_t^T, without forming the patches.

Entry ((c, a), (c', a')) of the moment (channels c, kernel offsets a) is a sum over pixels u of x_c(u) x_c'(u + a' - a),
where u runs over the pixels that offset a visits: all but a few at the border. So the sum over *all* pixels, which
depends only on the shift a' - a, is computed once per shift (13 products instead of 45 for a 3 x 3 kernel), and what
the border contributes is taken away: rows that a never visits, columns, and, counted twice, their crossings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import product

import torch
from torch import Tensor

from biascope.curvature import contract
from biascope.layers.rules import Conv

Offset = tuple[int, int]
Pixels = tuple[tuple[int, ...], tuple[int, ...]]  # rows and columns
TERMS = {"cpu": 2048, "cuda": 1024}  # of a sum, in one matrix product
CHANNELS = 32  # fewer make products too thin to be fast


class Geometry:
    """Which products a kernel moved by single steps over zero-padded images [h, w] needs, and how they add up.

    A *border sum* is a set of pixels with a shift. The tables lie on a device: they are sent there once (`geometry`).
    """

    def __init__(self, kernel: Offset, padding: tuple[Offset, ...], size: Offset, device: torch.device) -> None:
        self.kernel, self.size, self.device = kernel, size, device
        self.offsets = list(product(range(kernel[0]), range(kernel[1])))
        self.pairs = [(a, b) for a in self.offsets for b in self.offsets if a <= b]  # the others by symmetry
        self.out = (size[0] + sum(padding[0]) - kernel[0] + 1, size[1] + sum(padding[1]) - kernel[1] + 1)
        self.unseen = [
            [tuple(u for u in range(s) if not 0 <= u + p[0] - a < o) for a in range(k)]
            for s, p, o, k in zip(size, padding, self.out, kernel)
        ]
        self.padded = (size[0] + kernel[0] - 1, size[1] + kernel[1] - 1)
        self.shifts = sorted({_shift(a, b) for a, b in self.pairs})
        found = {key for a, b in self.pairs for key, _ in self._borders(a, b)}
        self.borders = sorted(found, key=lambda key: (_count(key[0]), key))

    def _borders(self, a: Offset, b: Offset) -> list[tuple[tuple[Pixels, Offset], float]]:
        """The border sums, with signs, that offsets a <= b need; without those whose shifted pixels are all zero."""
        (h, w), shift = self.size, _shift(a, b)
        rows, columns = self.unseen[0][a[0]], self.unseen[1][a[1]]
        strips = [((rows, tuple(range(w))), -1.0), ((tuple(range(h)), columns), -1.0), ((rows, columns), 1.0)]
        inside = [
            any(0 <= u + shift[0] < h for u in us) and any(0 <= v + shift[1] < w for v in vs) for (us, vs), _ in strips
        ]
        return [((pixels, shift), sign) for (pixels, sign), there in zip(strips, inside) if there]

    @property
    def cost(self) -> int:
        """Multiplications per image, over channels squared."""
        return len(self.shifts) * self.padded[0] * self.padded[1] + sum(_count(pixels) for pixels, _ in self.borders)

    def step(self, shift: Offset) -> int:
        """A shift, in padded images read row by row."""
        return shift[0] * self.padded[1] + shift[1]

    @cached_property
    def strips(self) -> list[Tensor]:
        """Pixels and shifted pixels [2, m, q] of m border sums with q pixels each, in the order of `borders`."""
        found: dict[int, list[list[int]]] = {}
        for (rows, columns), shift in self.borders:
            at = [self.step(u) for u in product(rows, columns)]
            found.setdefault(len(at), []).append([*at, *(u + self.step(shift) for u in at)])
        return [self._send(both).view(-1, 2, q).transpose(0, 1) for q, both in found.items()]

    @cached_property
    def signs(self) -> Tensor:
        """How the sums (of shifts, then of borders) make the moments of the pairs of offsets: [pairs, sums]."""
        at = {key: len(self.shifts) + j for j, key in enumerate(self.borders)}
        signs = [[0.0] * (len(self.shifts) + len(at)) for _ in self.pairs]
        for row, (a, b) in zip(signs, self.pairs):
            row[self.shifts.index(_shift(a, b))] = 1.0
            for key, sign in self._borders(a, b):
                row[at[key]] += sign
        return self._send(signs)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Numbers of the offsets a, and of b, of all pairs."""
        first, second = self._send([[self.offsets.index(a), self.offsets.index(b)] for a, b in self.pairs]).unbind(1)
        return first, second

    @cached_property
    def visits(self) -> Tensor:
        """1 where a kernel offset visits a pixel: [h w, k]."""
        pixels = product(range(self.size[0]), range(self.size[1]))
        lost = self.unseen
        return self._send(
            [[float(u not in lost[0][i] and v not in lost[1][j]) for i, j in self.offsets] for u, v in pixels]
        )

    def _send(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, device=self.device)


def _shift(a: Offset, b: Offset) -> Offset:
    return b[0] - a[0], b[1] - a[1]


def _count(pixels: Pixels) -> int:
    return len(pixels[0]) * len(pixels[1])


@lru_cache(maxsize=256)
def geometry(kernel: Offset, padding: tuple[Offset, ...], size: Offset, device: torch.device) -> Geometry:
    """The `Geometry` of a convolution, made once: a GPU would have to be waited for whenever its tables are sent."""
    return Geometry(kernel, padding, size, device)


class PatchMoment:
    """Running sum over images [n, c, h, w] for a kernel moved by single steps over zero-padded images."""

    def __init__(self, conv: Conv, channels: int, size: Offset, dtype: torch.dtype, device: torch.device):
        self.form = geometry((conv.kernel[0], conv.kernel[1]), conv.padding, size, device)
        self.channels, self.dtype, self.device = channels, dtype, device
        count = len(self.form.shifts) + len(self.form.borders)
        self.sums = torch.zeros(count, channels, channels, dtype=dtype, device=device)
        self.total = torch.zeros(channels, *size, dtype=dtype, device=device)
        self.n = 0

    @property
    def columns(self) -> int:
        """Numbers per image that `add` needs at once."""
        hp, wp = self.form.padded
        return self.channels * (hp * wp + max((t.numel() for t in self.form.strips), default=0))

    def add(self, x: Tensor) -> None:
        """Add images [n, c, h, w]."""
        n, c = x.shape[:2]
        (h, w), (hp, wp) = self.form.size, self.form.padded
        # images end to end, channels last, with gaps of zeros: a shift is then a shift of the one long index
        margin, length = self.form.step((self.form.kernel[0] - 1, self.form.kernel[1] - 1)), n * hp * wp
        terms = min(TERMS.get(self.device.type, 2048), length)
        blocks = -(-length // terms)
        X = torch.zeros(margin + blocks * terms + margin, c, dtype=self.dtype, device=self.device)
        X[margin : margin + length].view(n, hp, wp, c)[:, :h, :w] = x.permute(0, 2, 3, 1)
        steps = [self.form.step(shift) for shift in self.form.shifts]
        sums = self.sums.unbind()
        if self.device.type in contract.CACHED:
            for p in range(margin, margin + length, terms):
                q = min(p + terms, margin + length)
                left = X[p:q].T
                for moment, step in zip(sums, steps):
                    moment.addmm_(left, X[p + step : q + step])
        else:  # many products at once
            view = (blocks, terms, c), (terms * c, c, 1)
            left = X.as_strided(*view, margin * c).mT
            parts = [torch.bmm(left, X.as_strided(*view, (margin + step) * c)).sum(0) for step in steps]
            torch._foreach_add_(sums[: len(parts)], parts)
        if self.form.strips:
            first = torch.arange(margin, margin + length, hp * wp, device=self.device)[:, None]
            done = len(steps)
            for strip in self.form.strips:
                at = (strip[:, :, None] + first).flatten(2)  # [2, m, n q]
                left, right = X[at].unbind()
                self.sums[done : done + len(left)].baddbmm_(left.mT, right)
                done += len(left)
        self.total += x.sum(0)
        self.n += n

    def finish(self, bias: bool) -> Tensor:
        """[d, d] with d = c kh kw, in the weight's order; with a row and column for an input of ones if `bias`."""
        c, k = self.channels, len(self.form.offsets)
        d = c * k
        A = torch.empty(d + bias, d + bias, dtype=self.dtype, device=self.device)
        blocks = (self.form.signs.to(self.dtype) @ self.sums.flatten(1)).view(-1, c, c)
        each = A[:d, :d].view(c, k, c, k).permute(1, 3, 0, 2)
        first, second = self.form.places
        each[first, second] = blocks
        each[second, first] = blocks.mT
        if bias:
            A[d, :d] = A[:d, d] = (self.total.flatten(1) @ self.form.visits.to(self.dtype)).flatten()
            A[d, d].fill_(self.n * self.form.out[0] * self.form.out[1])
        return A


def patch_moment(conv: object, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> PatchMoment | None:
    """A `PatchMoment` for inputs [..., c, h, w] of a convolution where it needs less work than the patches do."""
    if not isinstance(conv, Conv) or len(conv.kernel) != 2 or conv.groups > 1 or shape[-3] < CHANNELS:
        return None
    if any(v != 1 for v in (*conv.stride, *conv.dilation)):
        return None
    size = shape[-2], shape[-1]
    found = geometry((conv.kernel[0], conv.kernel[1]), conv.padding, size, device)
    by_patches = len(found.pairs) * found.out[0] * found.out[1]
    return PatchMoment(conv, shape[-3], size, dtype, device) if found.cost < by_patches else None
