"""The harmonics of a SIREN with two layers of sines, in Bessel functions (Eqs 5.6 to 5.10).

exp(i b sin x) = sum_n J_n(b) exp(i n x), so with a bias a

    sin(a + sum_t b_t sin theta_t) = sum_s P_s [ sin a cos<s, theta>   for sum s_t even,
                                                 cos a sin<s, theta>   for sum s_t odd ],    P_s = prod_t J_{s_t}(b_t).

Biases only change phases. As in frequency modulation, the bandwidth grows with |b|.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from scipy.special import jv
from torch import nn

from biascope.errors import InputError, UnsupportedError
from biascope.fields.encoding import encoding
from biascope.fields.harmonics import MOST, Harmonics, compared, first_positive
from biascope.nets import SIREN
from biascope.nets.parts import Sine
from biascope.precision import without_autocast
from biascope.signatures import checked

LARGEST = 1e7  # argument of a Bessel function; 0.5 s for every 1e5 of it where the share is small


@checked
@without_autocast()
def bessel_harmonics(model: SIREN, order: int, seed: int = 0) -> Harmonics:
    """Harmonics of a SIREN with two hidden layers, truncated at |s_t| <= order; costs F (2 order + 1)^T.

    Args:
        model: SIREN(hidden=(T, F)): w2 sin(w_h (W1 sin(w0 (W0 r + b0)) + b1)) + b2.
        order: N. Nothing is folded, what lies beyond is cut off; `residual` says how much that is.
        seed: of the angles at which the series is compared with the network.

    Example:
        >>> net = SIREN(in_features=1, hidden=(2, 4), w_h=1.0)
        >>> bessel_harmonics(net, order=12).residual < 1e-6
        True
    """
    layers = [m for m in model.layers if isinstance(m, nn.Linear)]
    if len(layers) != 3:
        raise UnsupportedError(
            f"this SIREN has {len(layers) - 1} layers of sines; the expansion in Bessel functions is for two, "
            "fields.harmonics(model, order=...) for any number"
        )
    if order < 0:
        raise InputError(f"order={order} must not be negative")
    weights = [(layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu()) for layer in layers[1:]]
    (W1, b1), (W2, b2) = weights
    w_h = cast(Sine, model.layers[3]).frequency
    a, b = w_h * b1, (w_h * W1).numpy()  # [F], [F, T]
    T, side = b.shape[1], 2 * order + 1
    if side**T > MOST:
        raise InputError(f"{T} frequencies at order {order} need {side}^{T} terms, more than {MOST:,}")
    whole = np.arange(-order, order + 1)
    table = jv(whole[None, None], b[:, :, None])  # J_n(b_t): [F, T, 2N + 1]
    product = np.ones((len(b), 1))
    for t in range(T):
        product = (product[:, :, None] * table[:, t, None, :]).reshape(len(b), -1)
    s = torch.cartesian_prod(*[torch.from_numpy(whole)] * T).reshape(-1, T)
    keep = first_positive(s)
    s, P = s[keep], torch.from_numpy(product).T[keep]  # [m, F]
    even = (s.sum(1) % 2 == 0)[:, None]
    # Re(C e^{i x}) with C = 1 is the cosine, with C = -i the sine
    neuron = P * torch.where(even, a.sin().to(torch.complex128), -1j * a.cos())
    neuron = torch.where(s.any(1)[:, None], 2 * neuron, neuron)  # +s and -s
    series = neuron @ W2.T.to(neuron)
    series[~s.any(1)] += b2 + model.output_offset
    return compared(encoding(model), s, series, seed)


@checked
def bandwidth(b: float, share: float = 0.98) -> int:
    """How many harmonics n of exp(i b sin x) hold a share of its energy: the smallest with sum_{|k|<=n} J_k(b)^2 there.

    About |b| + 1 at 98 %, Carson's rule of frequency modulation; 0 is the carrier alone. All energy is 1 (Parseval), so
    what lies beyond n is added up from above, where it is small: shares near 1 are as exact as 1 - share is.

    Example:
        >>> [bandwidth(b) for b in (0.1, 1.0, 5.0, 20.0)], bandwidth(1e4, 0.9999999)
        ([0, 2, 6, 21], 10063)
    """
    if not 0 < share < 1:
        raise InputError(f"share={share:g} must lie between 0 and 1")
    b = abs(b)
    if not b <= LARGEST:
        raise InputError(f"b={b:g}: Bessel functions are computed up to {LARGEST:g}; beyond, n / |b| no longer changes")
    # J_n(b) ~ (2 / b)^(1/3) Ai((2 / b)^(1/3) (n - b)): below 1e-35 from here on, also for small b
    top = int(b + 60 + 20 * b ** (1 / 3))
    beyond, size = 0.0, 1024
    while top > 0:
        n = np.arange(top, max(0, top - size), -1)
        energy = beyond + np.cumsum(2 * jv(n, b) ** 2)  # of all |k| >= n
        outside = energy > 1 - share
        if outside.any():
            return int(n[np.argmax(outside)])
        beyond, top, size = float(energy[-1]), top - len(n), 2 * size
    return 0
