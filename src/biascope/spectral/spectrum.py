"""Discrete spectra of sampled functions: amplitudes of sinusoids, and the radial spectrum of a map."""

from typing import Literal

import torch
from torch import Tensor

from biascope.support.errors import InputError
from biascope.support.limits import FiniteTensor, Positive, check_shapes
from biascope.support.signatures import checked


@checked
def amplitude_spectrum(y: Tensor, sided: Literal["single", "raw"] = "single") -> Tensor:
    """Magnitudes of the DFT of y [..., n], sampled at z = j/n (end point left out, else integer frequencies leak).

    "single": [..., n // 2 + 1], 2 |rfft| / n (once at 0 and n/2), so that A sin(2 pi k z + phi) gives A at bin k.
    "raw": [..., n], |fft| / n, so that a delta of height 1 gives 1/n everywhere, and sum |y|^2 = n sum |raw|^2.

    Example:
        >>> z = torch.arange(8) / 8
        >>> amplitude_spectrum(3 * torch.sin(2 * torch.pi * 2 * z)).round(decimals=4).tolist()
        [0.0, 0.0, 3.0, 0.0, 0.0]
    """
    n = y.shape[-1] if y.dim() else 0
    if n < 2:
        raise InputError(f"y has shape {list(y.shape)}; give at least two samples along the last axis")
    y = y.float() if y.dtype in (torch.float16, torch.bfloat16) else y  # torch has no FFT of these
    if sided == "raw":
        raw: Tensor = torch.fft.fft(y).abs() / n
        return raw
    found: Tensor = 2 * torch.fft.rfft(y).abs() / n
    found[..., 0] /= 2
    if n % 2 == 0:
        found[..., -1] /= 2
    return found


@checked
def radial_spectrum(values: FiniteTensor, extent: Positive = 1.0) -> tuple[Tensor, Tensor]:
    """Wave numbers [m] (cycles per unit length) and zeta [..., m], sums of |FFT| / n^2 over rings, of maps [..., n, n].

    `extent` is the side of the square that is sampled. zeta(k) = k ∫ dphi |f~(k, phi)| (equation A.39) up to the
    width of a ring, which is one bin; rings that the square of bins does not hold whole are left out.

    Example:
        >>> wave = torch.sin(2 * torch.pi * 3 * torch.arange(16) / 16).expand(16, 16)
        >>> radial_spectrum(wave)[1].round(decimals=3).tolist()
        [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    check_shapes("values [..., n, n]", values)
    n = values.shape[-1]
    size = torch.fft.fft2(values).abs() / n**2
    bins = torch.fft.fftfreq(n, 1 / n, device=values.device)
    ring = (bins[:, None] ** 2 + bins[None, :] ** 2).sqrt().round().long().flatten()
    sums = torch.zeros(*values.shape[:-2], int(ring.max()) + 1, dtype=size.dtype, device=values.device)
    sums.index_add_(-1, ring, size.flatten(-2))
    whole = (n + 1) // 2  # the last bin of even n has no partner at +n / 2
    return torch.arange(whole, device="cpu") / extent, sums[..., :whole]
