"""A curve gamma that carries a latent variable into input space, and which frequencies it exchanges."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from biascope.support.errors import InputError
from biascope.support.limits import Count, FiniteTensor, check_shapes
from biascope.support.signatures import checked

Embedding = Callable[[Tensor], Tensor]  # z [n] -> points [n, d]


@checked
def flower(petals: int = 0) -> Embedding:
    """gamma_L(z) = (1 + 1/2 sin(2 pi L z)) (cos 2 pi z, sin 2 pi z): a closed curve of L petals, the circle for L = 0.

    Example:
        >>> flower(0)(torch.tensor([0.0, 0.25])).round().tolist()
        [[1.0, 0.0], [-0.0, 1.0]]
    """

    def gamma(z: Tensor) -> Tensor:
        radius = 1 + 0.5 * (2 * math.pi * petals * z).sin()
        return radius[..., None] * torch.stack([(2 * math.pi * z).cos(), (2 * math.pi * z).sin()], -1)

    return gamma


@checked
def composition_kernel(gamma: Embedding, latent: FiniteTensor, k: FiniteTensor, points: Count = 4096) -> Tensor:
    """P_gamma(l, k) = ∫_0^1 e^{i (k . gamma(z) - l z)} dz, the share of f~(k) in (f ∘ gamma)~(l).

    latent: l [m] in radians (2 pi times cycles); k [n, d]: complex128 [m, n]. The trapezoidal rule converges
    exponentially for closed curves and l = 2 pi times an integer; take `points` well above (|l| + |k| |gamma'|) / pi.
    Below that a higher l has the values of a lower one (aliasing), and is refused.

    Example:
        >>> P = composition_kernel(flower(0), 2 * torch.pi * torch.arange(3), torch.tensor([[1.5, 0.0]]))
        >>> P[:, 0].abs().numpy().round(4)  # Bessel functions J_0, J_1, J_2 at 1.5
        array([0.5118, 0.5579, 0.2321])
    """
    z = torch.arange(points + 1, dtype=torch.float64, device="cpu") / points
    weights = torch.full((points + 1,), 1 / points, dtype=torch.float64, device="cpu")
    weights[0] = weights[-1] = 0.5 / points
    k, where, latent = k.cpu().double(), gamma(z), latent.cpu().double().reshape(-1, 1)
    check_shapes("gamma(z) [m, d], k [n, d]", where, k)
    phase = where @ k.T
    turn = float(latent.abs().max()) / points + float(phase.diff(dim=0).abs().max())
    if not turn < math.pi:
        fix = f"take points > {turn * points / math.pi:.0f}, or smaller l and k"
        raise InputError(f"k . gamma(z) - l z turns by {turn:.4g} > pi radians between two of {points} points: {fix}")
    along = torch.exp(1j * phase) * weights[:, None]
    away = torch.exp(-1j * latent * z)
    return away @ along


@checked
def max_latent_frequency(gamma: Embedding, k: FiniteTensor, points: Count = 4096) -> Tensor:
    """max_z |J_gamma(z) k|, the highest latent frequency (radians) that input frequencies k [n, d] reach: [n].

    Stationary phase (equation 15): P_gamma(l, k) is not small only where l = J_gamma(z) k for some z.

    Example:
        >>> max_latent_frequency(flower(0), torch.tensor([[1.0, 0.0]])).div(2 * torch.pi).round(decimals=4)
        tensor([1.], dtype=torch.float64)
    """
    z = (torch.arange(points, dtype=torch.float64, device="cpu") / points).requires_grad_(True)
    with torch.enable_grad():
        where = gamma(z)
        check_shapes("gamma(z) [m, d], k [n, d]", where, k)
        along = where @ k.cpu().double().T  # [points, n]
        slopes = [torch.autograd.grad(along[:, i].sum(), z, retain_graph=True)[0] for i in range(along.shape[1])]
    return torch.stack(slopes).abs().amax(1)
