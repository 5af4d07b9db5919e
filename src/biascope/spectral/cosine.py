"""Frequencies of functions on a segment, by the discrete cosine transform: no period is assumed.

The discrete Fourier transform reads the values on [0, 1] as one period, so a function whose two ends differ has a jump,
and a half cosine, the slowest wave on a segment, is spread over all frequencies. The cosine transform continues the
function evenly beyond its ends. (For a periodic grid: `biascope.kernels.eigenfunctions.fourier_power`.)
"""

import math
from typing import Literal

import torch
from torch import Tensor

from biascope.support.errors import InputError
from biascope.support.limits import FiniteTensor
from biascope.support.signatures import checked

Ends = Literal["between", "included"]


@checked
def cosine_power(vectors: FiniteTensor, ends: Ends = "between") -> Tensor:
    """Share of every cosine in the energy of vectors [n, k] (or [n]) on a uniform grid of a segment: [n, k].

    Row m is cos(pi m z), z from 0 to 1: m half periods, so m / 2 periods over the segment. The n cosines are orthogonal
    on the grid, and the shares of a column add up to 1.

    Args:
        vectors: values on the grid, for example eigenvectors of a kernel.
        ends: where the grid points are. "between": z_j = (j + 1/2) / n, the middles of n equal parts (DCT-II).
            "included": z_j = j / (n - 1), as of torch.linspace (DCT-I, in which the two end points count half).

    Example:
        >>> z = (torch.arange(16) + 0.5) / 16
        >>> cosine_power(torch.cos(torch.pi * 3 * z)).argmax().item()  # one and a half periods
        3
    """
    if vectors.dim() not in (1, 2) or len(vectors) < 2 or not vectors.numel():
        raise InputError(f"vectors [n] or [n, k] with n >= 2 and k >= 1 are needed, not {list(vectors.shape)}")
    v = vectors.detach().double()
    v = v / v.abs().amax(0).clamp_min(torch.finfo(v.dtype).tiny)  # squares would leave the range of float64
    power = (_between(v) if ends == "between" else _included(v)).square()
    total = power.sum(0)
    if not bool((total > 0).all()):
        raise InputError("a zero vector has no frequency")
    return power / total


@checked
def dominant_cosine(vectors: FiniteTensor, ends: Ends = "between") -> Tensor:
    """The frequency with the largest share for each of the vectors [n, k] (or [n]): [k], in periods over the segment.

    Whole and half numbers of periods, in float64; arguments as of `cosine_power`.

    Example:
        >>> z = torch.linspace(0, 1, 20)
        >>> slope, wave = z - 0.5, torch.cos(2 * torch.pi * z)
        >>> dominant_cosine(torch.stack([slope, wave], 1), "included")  # a slope is most like half a period
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    return cosine_power(vectors, ends).argmax(0).double() / 2


def _between(v: Tensor) -> Tensor:
    """Orthonormal DCT-II of [n, k] along the grid, by the FFT of the even continuation of length 2 n."""
    n = len(v)
    spectrum = torch.fft.fft(torch.cat([v, v.flip(0)]), dim=0)[:n]
    m = torch.arange(n, dtype=v.dtype, device=v.device)
    turn = torch.polar(torch.ones_like(m), -math.pi * m / (2 * n))
    found: Tensor = (spectrum * turn.view(-1, *[1] * (v.dim() - 1))).real / math.sqrt(2 * n)
    found[0] /= math.sqrt(2)
    return found


def _included(v: Tensor) -> Tensor:
    """DCT-I of [n, k], orthonormal for the sum over the grid in which the end points count half."""
    n = len(v)
    spectrum: Tensor = torch.fft.fft(torch.cat([v, v[1:-1].flip(0)]), dim=0)[:n].real
    found = spectrum / math.sqrt(2 * (n - 1))
    found[0] /= math.sqrt(2)
    found[-1] /= math.sqrt(2)
    return found
