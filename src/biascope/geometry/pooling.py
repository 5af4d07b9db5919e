"""What average pooling does to a signal, in the frequency domain (spec of the NAD paper, Sec. 2.1 and Theorem 1).

Pooling is a circular filter followed by keeping every S-th sample. Seen through unitary DFTs it adds up S frequencies
that are M = D/S apart (aliasing): `z^[t] = S^-1/2 sum_k m^[kM+t] x^[kM+t]` (Eq. 1). A direction whose frequency the
filter damps is therefore drowned in the noise of its aliases, and no classifier behind the pooling can undo it.

Everything here is float64 NumPy: the objects are small and the closed forms are tested to 1e-10.
"""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from biascope.errors import InputError

Array = npt.NDArray[np.float64]
Variant = Literal["exact", "real", "complex", "printed"]


def box_prefilter(S: int, D: int) -> Array:
    """Impulse response of the average over S neighbours, [D].

    Example:
        >>> box_prefilter(2, 4)
        array([0.5, 0.5, 0. , 0. ])
    """
    _check_factor(S, D)
    m = np.zeros(D)
    m[:S] = 1.0 / S
    return m


def transfer(prefilter: npt.ArrayLike) -> npt.NDArray[np.complex128]:
    """m^, the (non-unitary) DFT of the prefilter [D]: what the filter multiplies each frequency by, [D] complex.

    Example:
        >>> np.round(np.abs(transfer(box_prefilter(2, 4))), 3)
        array([1.   , 0.707, 0.   , 0.707])
    """
    return np.asarray(np.fft.fft(np.asarray(prefilter, dtype=np.float64)), dtype=np.complex128)


def pooling_matrix(prefilter: npt.ArrayLike, S: int) -> Array:
    """P [M, D]: circular filtering of a signal [D], then every S-th sample. M = D / S.

    Example:
        >>> pooling_matrix(box_prefilter(2, 4), 2).shape
        (2, 4)
    """
    m = np.asarray(prefilter, dtype=np.float64)
    _check_factor(S, m.size)
    rows = np.arange(0, m.size, S)[:, None]
    return np.asarray(m[(rows - np.arange(m.size)[None, :]) % m.size])


def spectral_pooling(x_hat: npt.ArrayLike, m_hat: npt.ArrayLike, S: int) -> npt.NDArray[np.complex128]:
    """Eq. 1: the unitary DFT [..., M] of the pooled signal from the unitary DFT `x_hat` [..., D] of the signal.

    Example:
        >>> x = np.arange(4.0); z = pooling_matrix(box_prefilter(2, 4), 2) @ x
        >>> z_hat = spectral_pooling(np.fft.fft(x, norm="ortho"), transfer(box_prefilter(2, 4)), 2)
        >>> bool(np.allclose(z_hat, np.fft.fft(z, norm="ortho")))
        True
    """
    product = np.asarray(m_hat) * np.asarray(x_hat)
    D = product.shape[-1]
    _check_factor(S, D)
    folded = product.reshape(*product.shape[:-1], S, D // S).sum(-2) / math.sqrt(S)
    return np.asarray(folded, dtype=np.complex128)


def cosine_direction(l: int, D: int) -> Array:  # noqa: E741  (the paper's letter)
    """v_l^Re [D], the unit cosine of frequency l; self-conjugate frequencies (0 and D/2) are normalised too (erratum
    of A.2.1).

    Example:
        >>> cosine_direction(0, 4)
        array([0.5, 0.5, 0.5, 0.5])
    """
    v = np.cos(2 * np.pi * l * np.arange(D) / D)
    return np.asarray(v / np.linalg.norm(v))


def alias_gain(prefilter: npt.ArrayLike, S: int, l: int) -> float:  # noqa: E741
    """g0(l) = |m^[l]| / sqrt(sum over the S - 1 aliases of |m^[l + kM]|^2); infinite when nothing aliases onto l.

    Example:
        >>> round(alias_gain(box_prefilter(4, 128), 4, 5), 3)
        3.56
    """
    power = np.abs(transfer(prefilter)) ** 2
    D = power.size
    _check_factor(S, D)
    signal = power[l % D]
    aliases = sum(power[(l + k * (D // S)) % D] for k in range(1, S))
    if aliases < 1e-28:
        return math.inf if signal > 1e-28 else 0.0
    return float(math.sqrt(signal / aliases))


def pooling_bayes_accuracy(
    prefilter: npt.ArrayLike,
    S: int,
    l: int,  # noqa: E741
    eps: float = 1.0,
    sigma: float = 3.0,
    variant: Variant = "exact",
    gap_convention: Literal["full", "half"] = "full",
) -> float:
    """Best accuracy any classifier can reach on D(v_l) after pooling (Theorem 1), v_l the cosine of frequency l.

    Args:
        prefilter: impulse response [D] of the filter before decimation, e.g. `box_prefilter(S, D)`.
        S: pooling factor; must divide D.
        l: frequency of the discriminative direction.
        eps: class means at +-eps v ("full") or, when eps is the gap between them, at +-(eps/2) v ("half").
        sigma: noise standard deviation in every direction but v.
        variant: "exact" is Gaussian discriminant analysis of the pooled signal, O(M^3), right for every l. "real" is
            its closed form Phi(a g0 / sigma), right unless 2l = 0 mod M. "complex" is the circular complex model of
            the paper's proof, Phi(sqrt2 a g0 / sigma). "printed" is the paper's Theorem 1 as printed; its gamma is
            sqrt(S) g0 and its factor sqrt2/2, so it agrees with none of the others in general (erratum; it equals
            "real" at S = 2 and "complex" at S = 4).
        gap_convention: see `eps`.

    Example:
        >>> round(pooling_bayes_accuracy(box_prefilter(4, 128), 4, l=5), 4)
        0.8823
    """
    m = np.asarray(prefilter, dtype=np.float64)
    _check_factor(S, m.size)
    if sigma <= 0 or eps <= 0:
        raise InputError(f"eps and sigma must be positive, got eps={eps}, sigma={sigma}")
    a = {"full": eps, "half": eps / 2}[gap_convention]
    if variant == "exact":
        return linear_map_bayes_accuracy(pooling_matrix(m, S), cosine_direction(l, m.size), a, sigma)
    scale = {"real": 1.0, "complex": math.sqrt(2), "printed": math.sqrt(2 * S) / 2}
    if variant not in scale:
        raise InputError(f"variant={variant!r} is not one of exact, real, complex, printed")
    return float(ndtr(scale[variant] * (a / sigma) * alias_gain(m, S, l)))


def linear_map_bayes_accuracy(P: npt.ArrayLike, v: npt.ArrayLike, eps: float = 1.0, sigma: float = 3.0) -> float:
    """Best accuracy on x = +-eps v + sigma (noise across v) seen through any linear map P [M, D], v [D] of length 1.

    Gaussian discriminant analysis, O(M^3): Phi(eps/sigma sqrt(mu^T Sigma^+ mu)) with mu = P v and
    Sigma = P (I - v v^T) P^T; 1 when mu leaves the range of Sigma. Pooling of images is P = kron(P1, P2).

    Example:
        >>> round(linear_map_bayes_accuracy(pooling_matrix(box_prefilter(4, 128), 4), cosine_direction(5, 128)), 4)
        0.8823
    """
    P, v = np.asarray(P, dtype=np.float64), np.asarray(v, dtype=np.float64).ravel()
    if P.ndim != 2 or P.shape[1] != v.size or abs(np.linalg.norm(v) - 1) > 1e-6:
        raise InputError(f"P {list(P.shape)} needs shape [M, D] and v {v.size} entries of length 1 (D the same)")
    if sigma <= 0 or eps <= 0:
        raise InputError(f"eps and sigma must be positive, got eps={eps}, sigma={sigma}")
    mu = P @ v
    Sigma = P @ P.T - np.outer(mu, mu)
    values, vectors = np.linalg.eigh(Sigma)
    coefficients = vectors.T @ mu
    noisy = values > 1e-12 * max(values[-1], 1e-300)
    if np.linalg.norm(coefficients[~noisy]) > 1e-9:  # a noise-free direction carries the class
        return 1.0
    return float(ndtr((eps / sigma) * math.sqrt(np.sum(coefficients[noisy] ** 2 / values[noisy]))))


def curvature_ratio(m_hat: npt.ArrayLike, eps: float, sigma: float) -> Array:
    """zeta(l) = eps^2 m^2[l] / (sigma^2 max m^2), [D]: how fast the deep linear pooling model learns frequency l
    (Sec. 2.2).

    Example:
        >>> curvature_ratio([1.0, 0.5], eps=2.0, sigma=1.0)
        array([4., 1.])
    """
    power = np.abs(np.asarray(m_hat)) ** 2
    return np.asarray(eps**2 * power / (sigma**2 * power.max()), dtype=np.float64)


def _check_factor(S: int, D: int) -> None:
    if S < 1 or D % S:
        raise InputError(f"the pooling factor S={S} must divide the signal length D={D}")
