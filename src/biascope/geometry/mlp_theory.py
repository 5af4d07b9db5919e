"""Average geometry and its evolution for the one-hidden-layer ReLU network (GIH paper, Thm 3.1 and Lemmas A.5 to A.7).

f(x) = sum_{i <= n} w_i relu(phi_i . x), w ~ N(0, sw^2), phi ~ N(0, sp^2 I), squared error, probes x ~ N(0, I). The
paper's constants are wrong (a missing factor 2 in a fourth moment, E w^4 = 3 sw^4 dropped, Lemma A.6); these are exact.

The angle al between a probe and a data point b has density ~ sin(al)^(D-2). Put p = (pi - al) / 2 pi and write the
probe as cos(al) b/|b| + sin(al) u with u uniform in the complement: all expectations become integrals over al.
"""

import math
from collections.abc import Callable

import torch
from scipy.integrate import quad
from torch import Tensor

from biascope.geometry.measures import symmetric
from biascope.support.errors import InputError
from biascope.support.limits import Count, FiniteTensor, NonNegative, check_shapes
from biascope.support.signatures import checked


def expect_angle(function: Callable[[float], float], D: int) -> float:
    """E function(al), al the angle between a fixed direction and a uniformly random one in D >= 2 dimensions.

    Example:
        >>> round(expect_angle(lambda al: al, 5) / math.pi, 6)
        0.5
    """
    if D < 2:
        raise InputError(f"angles need D >= 2 dimensions, not {D}")
    # log of the normalising constant of sin^(D-2): sqrt(pi) Gamma((D-1)/2) / Gamma(D/2)
    log_norm = 0.5 * math.log(math.pi) + math.lgamma((D - 1) / 2) - math.lgamma(D / 2)
    width = min(math.pi / 2, 12 / math.sqrt(D))  # beyond it the density is below 1e-30

    def weighted(al: float) -> float:
        sine = math.sin(al)
        return function(al) * math.exp((D - 2) * math.log(sine) - log_norm) if sine > 0 else 0.0

    value, _ = quad(weighted, math.pi / 2 - width, math.pi / 2 + width, epsabs=1e-14, epsrel=1e-12, limit=400)
    return float(value)


def both_active(al: float) -> float:
    """p = (pi - al) / 2 pi: probability that a random neuron is active for two inputs at angle al (Lemma A.6).

    Example:
        >>> both_active(0.0)
        0.5
    """
    return (math.pi - al) / (2 * math.pi)


@checked
def both_active_moments(D: int) -> tuple[float, float]:
    """E p and E p^2 over random angles: 1/4 always; 1/12 at D = 2, tending to 1/16 (Lemma A.6; printed 1/2 and 1/3).

    Example:
        >>> [round(moment, 4) for moment in both_active_moments(3)]
        [0.25, 0.0743]
    """
    return expect_angle(both_active, D), expect_angle(lambda al: both_active(al) ** 2, D)


@checked
def active_second_moment(a: FiniteTensor, b: FiniteTensor) -> Tensor:
    """E[1(d.a > 0) 1(d.b > 0) d d^T] for d ~ N(0, I), [D, D] (Lemma A.5, exact; the paper keeps the first term only).

    p I + (sin al / 2 pi) (e1 e1^T - e2 e2^T), e1 and e2 the unit vectors along a + b and a - b.

    Example:
        >>> active_second_moment(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])).diagonal()
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    check_shapes("a [D], b [D]", a, b)
    a, b = a.double() / a.double().norm(), b.double() / b.double().norm()
    al = 2 * math.atan2(float((a - b).norm()), float((a + b).norm()))
    moment = both_active(al) * torch.eye(len(a), dtype=torch.float64, device="cpu")
    for direction, sign in ((a + b, 1.0), (a - b, -1.0)):
        if direction.norm() > 1e-15:
            unit = direction / direction.norm()
            moment += sign * math.sin(al) / (2 * math.pi) * torch.outer(unit, unit)
    return moment


@checked
def mlp_evolution(x_train: FiniteTensor, n: Count, sw: NonNegative = 1.0, sp: NonNegative = 1.0) -> Tensor:
    """Delta at initialisation, exact for every width n and dimension, [D, D] (Thm 3.1 corrected).

    `x_train` [m, D]; labels do not matter (Prop. A.1).

    Example:
        >>> mlp_evolution(torch.eye(3), n=2).shape
        torch.Size([3, 3])
    """
    check_shapes("x_train [m, D, ...]", x_train)
    X = x_train.double().flatten(1)
    D = X.shape[1]
    two_pi = 2 * math.pi

    def along(al: float) -> float:  # component of c on b/|b|, per |b|
        return both_active(al) + math.sin(al) * math.cos(al) / two_pi

    parallel = expect_angle(lambda al: along(al) ** 2, D)
    across = expect_angle(lambda al: math.sin(al) ** 4, D) / (two_pi**2 * (D - 1))
    mixed = expect_angle(lambda al: both_active(al) * along(al), D)
    S, identity = X.T @ X, torch.eye(D, dtype=torch.float64, device="cpu")
    trace = torch.trace(S)
    cc = parallel * S + across * (trace * identity - S)  # sum over data of E c c^T
    B = sw**2 * sp**4 * (n / 4 * (2 * S + trace * identity) + n * (n - 1) * cc)
    B = B + sw**4 * sp**2 * (3 * n / 4 * S + n * (n - 1) * mixed * S)
    return -2 * B


@checked
def large_dimension_constants(n: Count, D: Count, sw: NonNegative = 1.0, sp: NonNegative = 1.0) -> tuple[float, float]:
    """(cS, cI) of Delta = -cS S - cI tr(S) I for large D and every width n.

    Example:
        >>> large_dimension_constants(n=1, D=100)
        (2.5, 0.5)
    """
    a, b, pairs = sp**4 * sw**2, sp**2 * sw**4, n * (n - 1)
    cS = 2 * (n * a / 2 + pairs * a / 16 + 3 * n * b / 4 + pairs * b / 16)
    cI = 2 * (n * a / 4 + pairs * a / (4 * math.pi**2 * D))
    return cS, cI


@checked
def mlp_evolution_large_dimension(S: Tensor, n: Count, sw: NonNegative = 1.0, sp: NonNegative = 1.0) -> Tensor:
    """The same for large D: -cS S - cI tr(S) I, from S = sum x x^T [D, D], see `large_dimension_constants`.

    Off by O(1/D), more for wider networks: at D = 8 by 1.6 % for n = 4, 3.7 % for n = 10, 9 % as n grows.

    Example:
        >>> mlp_evolution_large_dimension(torch.eye(3), n=2).shape
        torch.Size([3, 3])
    """
    S, D = symmetric(S, "S").double(), len(S)
    cS, cI = large_dimension_constants(n, D, sw, sp)
    return -cS * S - cI * torch.trace(S) * torch.eye(D, dtype=torch.float64, device="cpu")


@checked
def linear_regression_evolution(S: Tensor, s: NonNegative = 1.0) -> Tensor:
    """Delta of f = theta . x: -2 s^2 S (the paper prints -s^2 S, without the transpose of its own definition).

    Example:
        >>> linear_regression_evolution(torch.eye(2)).diagonal()
        tensor([-2., -2.], dtype=torch.float64)
    """
    return -2 * s**2 * symmetric(S, "S").double()


@checked
def linear_regression_geometry(
    x_train: FiniteTensor, y_train: FiniteTensor, time: float, s: NonNegative = 1.0
) -> Tensor:
    """G^t of f = theta . x under gradient flow: s^2 exp(-2 S t) + w_t w_t^T, w_t = (I - exp(-S t)) S^-1 X^T y, [D, D].

    Example:
        >>> linear_regression_geometry(torch.eye(2), torch.zeros(2), time=0.0)
        tensor([[1., 0.],
                [0., 1.]], dtype=torch.float64)
    """
    if not time >= 0:
        raise InputError(f"time={time}: the flow starts at 0")
    X, y = x_train.double().flatten(1), y_train.double().flatten()
    check_shapes("x_train [m, D, ...], y_train [m]", x_train, y)
    U, roots, Vh = torch.linalg.svd(X, full_matrices=False)
    held = roots > max(X.shape) * torch.finfo(X.dtype).eps * roots[0]  # nothing moves where the data are zero
    U, roots, Vh = U[:, held], roots[held], Vh[held]
    fitted = -torch.expm1(-(roots**2) * time) / roots * (U.T @ y)
    w = Vh.T @ fitted
    identity = torch.eye(X.shape[1], dtype=X.dtype, device=X.device)
    decay: Tensor = identity + (Vh.T * torch.expm1(-2 * roots**2 * time)) @ Vh
    return s**2 * decay + torch.outer(w, w)
