"""Real Fourier bases: orthonormal cosine- and sine-like vectors, and the book-keeping from vector to frequency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from biascope.support.errors import InputError
from biascope.support.limits import Count, FloatDtype
from biascope.support.signatures import checked

Part = Literal["re", "im"]


@dataclass(frozen=True, eq=False)
class FourierBasis:
    """Vectors [k, *shape] of the real DFT basis, each with its frequency bin and its part.

    `bins` [k, d] holds one bin of each conjugate pair {b, -b mod shape}; `parts` is "re" (cosine) or "im" (minus sine).
    """

    vectors: Tensor
    bins: Tensor
    parts: tuple[Part, ...]
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        n_re = sum(p == "re" for p in self.parts)
        return f"FourierBasis(shape={self.shape}, {n_re} re + {len(self) - n_re} im)"

    @property
    def frequencies(self) -> Tensor:
        """Signed frequencies [k, d], each in [-N/2, N/2)."""
        return _signed(self.bins, self.shape)

    @checked
    def select(self, index: Tensor) -> FourierBasis:
        """The vectors at `index`: positions [j], from the end where negative, or a boolean mask [k]."""
        chosen = torch.arange(len(self))[index.cpu()]
        parts = tuple(self.parts[i] for i in chosen.tolist())
        return FourierBasis(self.vectors[chosen], self.bins[chosen], parts, self.shape)

    @checked
    def part(self, part: Part) -> FourierBasis:
        """Only the "re" or only the "im" vectors (514 and 510 of them at 32 x 32)."""
        return self.select(torch.tensor([p == part for p in self.parts]))

    @checked
    def stride(self, step: Count) -> FourierBasis:
        """Only the bins whose every frequency is a multiple of `step` (step 2: the grid of the public maps)."""
        # signed: where `step` does not divide the side, bins b and side - b are not multiples together
        return self.select((self.frequencies % step == 0).all(1))

    @checked
    def lowest(self, size: Count) -> FourierBasis:
        """Only the `size` x ... x `size` window of lowest frequencies around DC (a bin or its conjugate lies in it)."""
        low, high = -(size // 2), (size - 1) // 2
        conjugate = _signed(_conjugate(self.bins, self.shape), self.shape)
        inside = [((f >= low) & (f <= high)).all(1) for f in (self.frequencies, conjugate)]
        return self.select(inside[0] | inside[1])


def _conjugate(bins: Tensor, shape: Sequence[int]) -> Tensor:
    return (-bins) % torch.tensor(shape)


def _signed(bins: Tensor, shape: Sequence[int]) -> Tensor:
    n = torch.tensor(shape)
    return (bins + n // 2) % n - n // 2


@checked
def fourier_vectors(shape: Sequence[Count], bins: Tensor, part: Part, dtype: FloatDtype = torch.float64) -> Tensor:
    """Unit vectors [k, *shape] of one part at the given bins [k, d], or signed frequencies: they count modulo shape.

    v_Re = F^-1(e_b + e_-b)/sqrt 2, v_Im = F^-1(j e_b - j e_-b)/sqrt 2 with F the unitary DFT. Erratum of the paper:
    where b = -b the Re vector is divided by 2 instead of sqrt 2, and there is no Im vector (asking for one is an
    error).
    """
    if bins.dim() != 2 or bins.shape[1] != len(shape) or bins.is_floating_point():
        raise InputError(f"bins {list(bins.shape)} of {bins.dtype}: whole numbers [k, {len(shape)}] are needed")
    size = math.prod(shape)
    bins = bins % torch.tensor(shape)  # -n / 2 is its own conjugate as n / 2 is
    self_conjugate = (bins == _conjugate(bins, shape)).all(1)
    if part == "im" and bool(self_conjugate.any()):
        raise InputError(f"bin {bins[self_conjugate][0].tolist()} is its own conjugate: it has no Im vector")
    phase = torch.zeros(len(bins), *shape, dtype=torch.float64)
    for axis, n in enumerate(shape):
        # integers are reduced mod n before dividing, so that no phase is ever large
        turns = (bins[:, axis, None] * torch.arange(n)) % n
        phase += (turns.double() / n).view(len(bins), *[n if a == axis else 1 for a in range(len(shape))])
    angle = 2 * math.pi * phase
    scale = ((2 - self_conjugate.double()) / size).sqrt().view(-1, *[1] * len(shape))
    return (scale * (angle.cos() if part == "re" else -angle.sin())).to(dtype)


@checked
def dft_basis(shape: Count | Sequence[Count], dtype: FloatDtype = torch.float64) -> FourierBasis:
    """The complete real DFT basis for signals [n] or images [h, w]: all Re vectors, then all Im vectors."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    bins = torch.cartesian_prod(*[torch.arange(n) for n in shape]).view(-1, len(shape))
    place = torch.tensor([math.prod(shape[a + 1 :]) for a in range(len(shape))])
    flat, partner = (bins * place).sum(1), (_conjugate(bins, shape) * place).sum(1)
    re, im = bins[flat <= partner], bins[flat < partner]  # one bin of each unordered pair {b, -b}
    vectors = torch.cat([fourier_vectors(shape, re, "re", dtype), fourier_vectors(shape, im, "im", dtype)])
    parts: list[Part] = ["re" if k < len(re) else "im" for k in range(len(vectors))]
    return FourierBasis(vectors, torch.cat([re, im]), tuple(parts), shape)


@checked
def frequency_map(values: Tensor, basis: FourierBasis, part: Part = "re") -> Tensor:
    """One value per vector spread over the frequencies [*shape]: fftshifted (DC central), copied to conjugates.

    Only vectors of `part` are drawn; bins without a vector are NaN (the four gaps of the "im" map).
    """
    out = torch.full(basis.shape, float("nan"), dtype=values.dtype if values.is_floating_point() else torch.float64)
    mask = torch.tensor([p == part for p in basis.parts], dtype=torch.bool)
    for bins in (basis.bins[mask], _conjugate(basis.bins[mask], basis.shape)):
        out[tuple(bins.T)] = values.detach().cpu()[mask].to(out.dtype)
    shifted: Tensor = torch.fft.fftshift(out)
    return shifted
