"""What average pooling does to a signal, in the frequency domain (spec of the NAD paper, Sec. 2.1 and Theorem 1).

Pooling is a circular filter followed by keeping every S-th sample. Seen through unitary DFTs it adds up S frequencies
that are M = D/S apart (aliasing): `z^[t] = S^-1/2 sum_k m^[kM+t] x^[kM+t]` (Eq. 1). A direction whose frequency the
filter damps is therefore drowned in the noise of its aliases, and no classifier behind the pooling can undo it.
Where S does not divide D nothing folds so neatly; M = ceil(D/S) samples are still kept, and what they tell is still
known exactly (`linear_map_bayes_accuracy`).

Everything here is float64 NumPy: the objects are small and the closed forms are tested to 1e-10.
"""

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from biascope.support.arguments import shown
from biascope.support.errors import InputError
from biascope.support.limits import Count, Finite, Positive, check_shapes
from biascope.support.signatures import checked

Array = npt.NDArray[np.float64]
Variant = Literal["exact", "real", "complex", "printed", "appendix"]
GapConvention = Literal["full", "half"]
ROUNDING = 1e-12  # what is smaller than this times the largest number of its kind is taken for zero


@checked
def box_prefilter(S: Count, D: Count) -> Array:
    """Impulse response of the average over S neighbours, [D].

    Example:
        >>> box_prefilter(2, 4)
        array([0.5, 0.5, 0. , 0. ])
    """
    if S > D:
        raise InputError(f"the pooling factor S={S} is larger than the signal length D={D}")
    m = np.zeros(D)
    m[:S] = 1.0 / S
    return m


def transfer(prefilter: npt.ArrayLike) -> npt.NDArray[np.complex128]:
    """m^, the (non-unitary) DFT of the prefilter [D]: what the filter multiplies each frequency by, [D] complex.

    Example:
        >>> np.round(np.abs(transfer(box_prefilter(2, 4))), 3)
        array([1.   , 0.707, 0.   , 0.707])
    """
    return np.asarray(np.fft.fft(_filter(prefilter)), dtype=np.complex128)


@checked
def pooling_matrix(prefilter: npt.ArrayLike, S: Count) -> Array:
    """P [M, D]: circular filtering of a signal [D], then every S-th sample, from the first on. M = ceil(D / S).

    Where S does not divide D, the window of the first sample reaches back over the end of the signal into that of the
    last one.

    Example:
        >>> pooling_matrix(box_prefilter(2, 5), 2)
        array([[0.5, 0. , 0. , 0. , 0.5],
               [0. , 0.5, 0.5, 0. , 0. ],
               [0. , 0. , 0. , 0.5, 0.5]])
    """
    m = _filter(prefilter)
    rows = np.arange(0, m.size, S)[:, None]
    return np.asarray(m[(rows - np.arange(m.size)[None, :]) % m.size])


@checked
def spectral_pooling(x_hat: npt.ArrayLike, m_hat: npt.ArrayLike, S: Count) -> npt.NDArray[np.complex128]:
    """Eq. 1: the unitary DFT [..., M] of the pooled signal from that of the signal, `x_hat` [..., D], and `m_hat` [D].

    Example:
        >>> x = np.arange(4.0); z = pooling_matrix(box_prefilter(2, 4), 2) @ x
        >>> z_hat = spectral_pooling(np.fft.fft(x, norm="ortho"), transfer(box_prefilter(2, 4)), 2)
        >>> bool(np.allclose(z_hat, np.fft.fft(z, norm="ortho")))
        True
    """
    x, m = _numbers(x_hat, "x_hat", complex), _numbers(m_hat, "m_hat", complex)
    check_shapes("x_hat [..., D], m_hat [D]", x, m)
    product = m * x
    folded = product.reshape(*product.shape[:-1], S, _kept(S, m.size)).sum(-2) / math.sqrt(S)
    return np.asarray(folded, dtype=np.complex128)


@checked
def cosine_direction(l: int, D: Count) -> Array:  # noqa: E741  (the paper's letter)
    """v_l^Re [D], the unit cosine of frequency l; self-conjugate frequencies (0 and D/2) are normalised too (erratum
    of A.2.1).

    Example:
        >>> cosine_direction(0, 4)
        array([0.5, 0.5, 0.5, 0.5])
    """
    v = np.cos(2 * np.pi * l * np.arange(D) / D)
    return np.asarray(v / np.linalg.norm(v))


@checked
def alias_gain(prefilter: npt.ArrayLike, S: Count, l: int) -> float:  # noqa: E741
    """g0(l) = |m^[l]| / sqrt(sum over the S - 1 aliases of |m^[l + kM]|^2); infinite when nothing aliases onto l.

    It does not depend on the filter's scale. S must divide D.

    Example:
        >>> round(alias_gain(box_prefilter(4, 128), 4, 5), 3)
        3.56
    """
    m_hat = np.abs(transfer(prefilter))
    D, M, largest = m_hat.size, _kept(S, m_hat.size), m_hat.max()
    if largest == 0:
        return 0.0
    relative = np.where(m_hat > ROUNDING * largest, m_hat / largest, 0.0)  # rounding is no alias
    signal = float(relative[l % D])
    aliases = float(np.linalg.norm([relative[(l + k * M) % D] for k in range(1, S)]))
    if aliases == 0:
        return math.inf if signal else 0.0
    return signal / aliases


@checked
def pooling_bayes_accuracy(
    prefilter: npt.ArrayLike,
    S: Count,
    l: int,  # noqa: E741
    eps: Positive = 1.0,
    sigma: Positive = 3.0,
    variant: Variant = "exact",
    gap_convention: GapConvention = "full",
) -> float:
    """Best accuracy any classifier can reach on D(v_l) after pooling (Theorem 1), v_l the cosine of frequency l.

    Args:
        prefilter: impulse response [D] of the filter before decimation, e.g. `box_prefilter(S, D)`.
        S: pooling factor, at most D; every variant but "exact" needs one that divides D.
        l: frequency of the discriminative direction.
        eps: class means at +-eps v ("full") or, when eps is the gap between them, at +-(eps/2) v ("half").
        sigma: noise standard deviation in every direction but v.
        variant: "exact" is Gaussian discriminant analysis of the pooled signal, O(M^2 D), right for every l and S.
            "real" is its closed form Phi(a g0 / sigma), right unless 2l = 0 mod M. "complex" is the circular complex
            model of the paper's proof, Phi(sqrt2 a g0 / sigma). "printed" is the paper's Theorem 1 as printed; its
            gamma is sqrt(S) g0 and its factor sqrt2/2, so it agrees with none of the others in general (erratum; it
            equals "real" at S = 2 and "complex" at S = 4). "appendix" is the theorem as the appendix repeats it, with
            the factor 1/2 (it equals "real" at S = 4, and "complex" at S = 8). In both, a stands for the paper's eps.
        gap_convention: see `eps`.

    Example:
        >>> round(pooling_bayes_accuracy(box_prefilter(4, 128), 4, l=5), 4)
        0.8823
    """
    m = _filter(prefilter)
    a = {"full": eps, "half": eps / 2}[gap_convention]
    if variant == "exact":
        return linear_map_bayes_accuracy(pooling_matrix(m, S), cosine_direction(l, m.size), a, sigma)
    scale = {"real": 1.0, "complex": math.sqrt(2), "printed": math.sqrt(2 * S) / 2, "appendix": math.sqrt(S) / 2}
    return float(ndtr(scale[variant] * (a / sigma) * alias_gain(m, S, l)))


@checked
def linear_map_bayes_accuracy(P: npt.ArrayLike, v: npt.ArrayLike, eps: Positive = 1.0, sigma: Positive = 3.0) -> float:
    """Best accuracy on x = +-eps v + sigma (noise across v) seen through any linear map P [M, D], v [D] of length 1.

    Gaussian discriminant analysis: Phi(eps/sigma sqrt(mu^T Sigma^+ mu)) with mu = P v and Sigma = P (I - v v^T) P^T;
    1 when mu leaves the range of Sigma. With t the squared length of the part of v in the row space of P,
    mu^T Sigma^+ mu = t / (1 - t) (Sherman and Morrison): only that space matters, not the scale of P, and 1 is the case
    t = 1. O(M^2 D). Pooling of images is P = kron(P1, P2).

    Example:
        >>> round(linear_map_bayes_accuracy(pooling_matrix(box_prefilter(4, 128), 4), cosine_direction(5, 128)), 4)
        0.8823
    """
    P, v = _numbers(P, "P"), _numbers(v, "v").ravel()
    check_shapes("P [M, D], v [D]", P, v)
    if not abs(np.linalg.norm(v) - 1) <= 1e-6:
        raise InputError("v must have length 1")
    _, sizes, rows = np.linalg.svd(P, full_matrices=False)
    seen = rows[sizes > ROUNDING * sizes.max(initial=0.0)]
    coefficients = seen @ v
    lost = float(np.linalg.norm(v - coefficients @ seen))  # sqrt(1 - t), without cancellation
    if lost < ROUNDING:  # all of v is seen, and no noise with it
        return 1.0
    return float(ndtr((eps / sigma) * float(np.linalg.norm(coefficients)) / lost))


@checked
def curvature_ratio(m_hat: npt.ArrayLike, eps: Finite, sigma: Positive) -> Array:
    """zeta(l) = eps^2 m^2[l] / (sigma^2 max m^2), [D]: how fast the deep linear pooling model learns frequency l
    (Sec. 2.2).

    Example:
        >>> curvature_ratio([1.0, 0.5], eps=2.0, sigma=1.0)
        array([4., 1.])
    """
    power = np.abs(_numbers(m_hat, "m_hat", complex)) ** 2
    return np.asarray(eps**2 * power / (sigma**2 * power.max()), dtype=np.float64)


def _filter(prefilter: npt.ArrayLike) -> Array:
    m = _numbers(prefilter, "prefilter")
    if m.ndim != 1 or not m.size or not np.isfinite(m).all():
        raise InputError(f"the prefilter must be a list [D] of finite numbers, got shape {list(m.shape)}")
    return m


def _numbers(values: npt.ArrayLike, name: str, kind: type = float) -> npt.NDArray[Any]:
    try:
        return np.asarray(values, dtype=kind)
    except (TypeError, ValueError, RuntimeError) as error:  # torch says RuntimeError for tensors with gradients
        raise InputError(
            f"{name}={shown(values)}: an array of numbers is needed, e.g. box_prefilter(4, 128)"
        ) from error


def _kept(S: int, D: int) -> int:
    """M = D / S samples that pooling keeps, whose frequencies S of the signal alias onto."""
    if D % S:
        raise InputError(f"S={S} does not divide D={D}: no frequencies alias, but variant='exact' takes any S")
    return D // S
