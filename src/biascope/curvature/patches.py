"""Second moment of a convolution's patches, sum_t p_t p_t^T, without forming the patches.

Entry ((c, a), (c', a')) of the moment (channels c, kernel offsets a) is a sum over pixels u of x_c(u) x_c'(u + a' - a),
where u runs over the pixels that offset a visits: all but a few at the border. So the sum over *all* pixels, which
depends only on the shift a' - a, is computed once per shift (13 products instead of 45 for a 3 x 3 kernel), and what
the border contributes is taken away: rows that a never visits, columns, and, counted twice, their crossings.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import ceil

import torch
from torch import Tensor

from biascope.curvature import contract
from biascope.network.layers.rules import Conv

Offset = tuple[int, int]
Pixels = tuple[tuple[int, ...], tuple[int, ...]]  # rows and columns
TERMS = {"cpu": 2048, "cuda": 1024}  # of a sum, in one matrix product
CHANNELS = 32  # fewer make products too thin to be fast
LARGE = 256  # terms or channels from which a product is large enough for a cache


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
        shifts = {_shift(a, b) for a, b in self.pairs}
        self.shifts = sorted((i, j) for i, j in shifts if i < size[0] and abs(j) < size[1])  # others meet nothing
        found = {key for a, b in self.pairs for key, _ in self._borders(a, b)}
        self.borders = sorted(found, key=lambda key: (len(self._seen(*key)), key))

    def _seen(self, pixels: Pixels, shift: Offset) -> list[tuple[Offset, Offset]]:
        """The pixels, with the shifted ones, for which both lie in the image."""
        (h, w), (i, j) = self.size, shift
        both = [(u, (u[0] + i, u[1] + j)) for u in product(*pixels)]
        return [(u, v) for u, v in both if 0 <= v[0] < h and 0 <= v[1] < w]

    def _borders(self, a: Offset, b: Offset) -> list[tuple[tuple[Pixels, Offset], float]]:
        """The border sums, with signs, that offsets a <= b need; without those whose shifted pixels are all outside."""
        (h, w), shift = self.size, _shift(a, b)
        rows, columns = self.unseen[0][a[0]], self.unseen[1][a[1]]
        strips = [((rows, tuple(range(w))), -1.0), ((tuple(range(h)), columns), -1.0), ((rows, columns), 1.0)]
        return [((pixels, shift), sign) for pixels, sign in strips if self._seen(pixels, shift)]

    @property
    def cost(self) -> int:
        """Multiplications per image, over channels squared."""
        whole = sum((self.size[0] - i) * (self.size[1] - abs(j)) for i, j in self.shifts)
        return whole + sum(len(self._seen(*key)) for key in self.borders)

    @cached_property
    def strips(self) -> list[Tensor]:
        """Rows and columns [2, .] of pixels and of shifted pixels [., 2, m, q] of m border sums of q pixels each."""
        found: dict[int, list[list[tuple[Offset, Offset]]]] = {}
        for key in self.borders:
            seen = self._seen(*key)
            found.setdefault(len(seen), []).append(seen)
        return [self._send(each).permute(3, 2, 0, 1) for each in found.values()]  # [m, q, 2, row or column]

    @cached_property
    def signs(self) -> Tensor:
        """How the sums (of shifts, then of borders) make the moments of the pairs of offsets: [pairs, sums]."""
        at = {key: len(self.shifts) + j for j, key in enumerate(self.borders)}
        signs = [[0.0] * (len(self.shifts) + len(at)) for _ in self.pairs]
        for row, (a, b) in zip(signs, self.pairs):
            if _shift(a, b) in self.shifts:
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


@lru_cache(maxsize=256)
def geometry(kernel: Offset, padding: tuple[Offset, ...], size: Offset, device: torch.device) -> Geometry:
    """The `Geometry` of a convolution, made once: to send its tables means to wait for a GPU."""
    return Geometry(kernel, padding, size, device)


@lru_cache(maxsize=4)  # layers of one form follow each other
def _gathered(form: Geometry, groups: int, each: int) -> list[Tensor]:
    """Where the pixels of `form.strips` lie in [h, groups, w, each], image by image: [2, m, q groups each]."""
    if not form.strips:
        return []
    group, inside = (torch.arange(size, device=form.device) for size in (groups, each))
    image = (group[:, None] * (form.size[1] * each) + inside).flatten()
    places = [row * (groups * form.size[1]) + column for row, column in form.strips]
    return [(place[..., None] * each + image).flatten(2) for place in places]


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
        h, w = self.form.size
        return self.channels * (h * w + max((t[0].numel() for t in self.form.strips), default=0))

    def add(self, x: Tensor) -> None:
        """Add images [n, c, h, w]."""
        n, c, h, w = x.shape
        groups = ceil(n / max(1, TERMS.get(self.device.type, 2048) // w))
        each = ceil(n / groups)
        if groups * each > n:
            x = torch.cat([x, x.new_zeros(groups * each - n, c, h, w)])
        last = x.movedim(1, -1)  # channels
        if self.device.type in contract.CACHED:
            last = last.contiguous()  # one copy in two steps, of which each has neighbours on both sides
        # a row of pixels of some images, pixel by pixel: a shift by columns or rows gives matrices again, and no copy
        X = last.view(groups, each, h, w, c).permute(2, 0, 3, 1, 4).contiguous().to(self.dtype)
        sums, done, pixel = self.sums.unbind(), len(self.form.shifts), each * c
        sides, first = [], X.storage_offset()  # 1 x 1 images are not copied
        for i, j in self.form.shifts:
            count, terms = (h - i) * groups, (w - abs(j)) * each
            left = X.as_strided((count, c, terms), (w * pixel, 1, c), first + max(-j, 0) * pixel)
            at = first + (i * groups * w + max(j, 0)) * pixel
            right = X.as_strided((count, terms, c), (w * pixel, c, 1), at)
            sides.append((left, right))
        if self.device.type in contract.CACHED and max(w * each, c) >= LARGE:
            for p in range(h * groups):
                for moment, (left, right) in zip(sums, sides):
                    if p < len(left):
                        moment.addmm_(left[p], right[p])
        else:  # many products at once
            torch._foreach_add_(sums[:done], [torch.bmm(left, right).sum(0) for left, right in sides])
        for strip in _gathered(self.form, groups, each):
            left, right = X.view(-1, c)[strip].unbind()
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
