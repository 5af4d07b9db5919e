"""Anisotropy directions that can be written down, and the deep linear model of pooling (NAD paper, Sec. 2.2, App. C).

Every function gives the corrected form; where the paper prints another one, the docstring says so. float64 throughout.
f is the network, m the (real) transfer function of the pooling filter [D], A = S^-1/2 [I ... I] [M, D], M = D / S.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from biascope.support.arguments import check_tensor
from biascope.support.errors import InputError
from biascope.support.limits import Count, Finite, FiniteTensor, NonNegative
from biascope.support.signatures import checked


@checked
def aliasing_matrix(D: Count, S: Count) -> Tensor:
    """A = S^-1/2 [I_M ... I_M], [M, D]: adds up the frequencies that pooling by S makes equal.

    Example:
        >>> aliasing_matrix(4, 2).shape
        torch.Size([2, 4])
    """
    return torch.eye(D // _factor(S, D), dtype=torch.float64, device="cpu").repeat(1, S) / math.sqrt(S)


def _factor(S: int, D: int) -> int:
    if D % S:
        raise InputError(f"the pooling factor S={S} must divide D={D}")
    return S


def _list(vector: Tensor, name: str) -> Tensor:
    """A list of numbers [D] in float64."""
    return check_tensor(vector, name, dims=1).detach().double()


@checked
def linear_pooling_covariance(
    m: FiniteTensor, S: Count, s_theta: NonNegative = 1.0, s_phi: NonNegative = 1.0
) -> Tensor:
    """E[g g^T] of theta^T A (m . phi . x): (s_phi^2 s_theta^2 / S) diag(m^2), [D, D] (Eq. 4; printed without 1/S).

    Example:
        >>> linear_pooling_covariance(torch.tensor([2.0, 1.0]), S=2).diagonal()
        tensor([2.0000, 0.5000], dtype=torch.float64)
    """
    m = _list(m, "m")
    return (s_phi * s_theta) ** 2 / _factor(S, len(m)) * torch.diag(m.square())


@checked
def linear_pooling_mixed(m: FiniteTensor, S: Count, s_theta: NonNegative = 1.0, s_phi: NonNegative = 1.0) -> Tensor:
    """E[H^T H] of the same model: ((s_theta^2 + s_phi^2) / S) diag(m^2), [D, D] (Eq. 5; printed s_theta^2 + s_phi^2/S).

    Example:
        >>> linear_pooling_mixed(torch.tensor([2.0, 1.0]), S=2).diagonal()
        tensor([4., 1.], dtype=torch.float64)
    """
    m = _list(m, "m")
    return (s_theta**2 + s_phi**2) / _factor(S, len(m)) * torch.diag(m.square())


@checked
def xi_matrix(x: FiniteTensor, s_phi: NonNegative = 1.0, slope_at_zero: Finite = 1.0) -> Tensor:
    """Xi [D, D] of Ex. 4 at x [D]: E[phi_i relu'(phi_i x_i) phi_j relu'(phi_j x_j)], phi ~ N(0, s_phi^2 I).

    Xi_ij = (s_phi^2 / 2 pi) sgn(x_i) sgn(x_j) off the diagonal, s_phi^2 / 2 on it (printed: a factor (1 - 2/pi)/2).

    Where x_i = 0, the derivative of relu at 0 decides, a convention: `slope_at_zero` = 1 means relu'(t) = 1 for t >= 0;
    torch's autograd takes 0. With slope r, phi_i relu'(phi_i x_i) is r phi_i: of mean zero and independent of the
    others, so Xi_ii = r^2 s_phi^2 and the rest of its row and column is 0. Other entries do not depend on it.

    Example:
        >>> xi_matrix(torch.tensor([2.0, 0.0, -1.0]))
        tensor([[ 0.5000,  0.0000, -0.1592],
                [ 0.0000,  1.0000,  0.0000],
                [-0.1592,  0.0000,  0.5000]], dtype=torch.float64)
    """
    sign = _list(x, "x").sign()
    Xi = s_phi**2 / (2 * math.pi) * torch.outer(sign, sign)
    diagonal = torch.where(sign == 0, slope_at_zero**2, 0.5) * s_phi**2
    return Xi - torch.diag(Xi.diagonal()) + torch.diag(diagonal.to(Xi))


@checked
def xi_averaged_over_signs(D: Count, s_phi: NonNegative = 1.0) -> Tensor:
    """Xi averaged over x with independent, symmetric signs and no zeros: (s_phi^2 / 2) I, [D, D].

    The paper prints I; the rectifier costs half of the linear model.

    Example:
        >>> xi_averaged_over_signs(2)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
    """
    return s_phi**2 / 2 * torch.eye(D, dtype=torch.float64, device="cpu")


@checked
def nonlinear_pooling_covariance(
    m: FiniteTensor,
    S: Count,
    x: FiniteTensor | None,
    s_theta: NonNegative = 1.0,
    s_phi: NonNegative = 1.0,
    slope_at_zero: Finite = 1.0,
) -> Tensor:
    """E[g g^T] at x [D] of theta^T A (m . relu(phi . x)): s_theta^2 (A^T A . m m^T . Xi), [D, D] (Ex. 4).

    See `xi_matrix` for Xi and for what `slope_at_zero` says about zero entries of x. With x=None the average over x of
    independent symmetric signs (`xi_averaged_over_signs`): half of `linear_pooling_covariance`.

    Example:
        >>> nonlinear_pooling_covariance(torch.ones(2), 2, torch.ones(2)).diagonal()
        tensor([0.2500, 0.2500], dtype=torch.float64)
        >>> nonlinear_pooling_covariance(torch.ones(2), 2, torch.zeros(2)).diagonal()
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    m = _list(m, "m")
    A = aliasing_matrix(len(m), S)
    Xi = xi_averaged_over_signs(len(m), s_phi) if x is None else xi_matrix(x, s_phi, slope_at_zero)
    return s_theta**2 * (A.T @ A) * torch.outer(m, m) * Xi


@checked
def mlp_geometry_constant(fan_in: Count, widths: Sequence[Count], stds: Sequence[NonNegative] | None = None) -> float:
    """c with E[g g^T] = c I for a ReLU network with hidden `widths`, at every x (Thm A.2).

    With Gaussian weights of standard deviations s_1, ..., s_{L+1} and no biases: c = s_1^2 prod_l n_l s_{l+1}^2 / 2;
    one hidden layer gives (n/2) s_w^2 s_phi^2 (the paper prints 1/2 and d/2 in places). With stds=None, torch's
    default initialisation (biases drawn too): c = 6^-L / (3 fan_in).

    Example:
        >>> mlp_geometry_constant(5, [7], [1.0, 2.0])
        14.0
        >>> round(mlp_geometry_constant(4, [10, 10]) * 4, 5)
        0.00926
    """
    if stds is None:
        return 6.0 ** -len(widths) / (3 * fan_in)
    return stds[0] ** 2 * math.prod(n * s**2 / 2 for n, s in zip(widths, stds[1:], strict=True))


@checked
def deep_linear_hessians(
    m: FiniteTensor,
    S: Count,
    l: int,  # noqa: E741
    eps: Finite,
    sigma: NonNegative,
    s_theta: NonNegative = 1.0,
    s_phi: NonNegative = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Expected Hessian blocks (H_theta [M, M], H_phi [D, D], H_theta,phi [M, D]) of the loss (y - f)^2 (Lemma 1).

    The data are x = eps y e_l + N(0, sigma^2 I), y = +-1.

    H_phi = (2 s_theta^2 / S) [eps^2 m^2[l] diag(e_l) + sigma^2 diag(m^2)] (printed without 1/S);
    H_theta = 2 s_phi^2 [(eps^2 m^2[l] / S) e_{l mod M} e_{l mod M}^T + sigma^2 A diag(m^2) A^T] (the printed
    shapes do not fit); H_theta,phi = -(2 eps m[l] / sqrt S) e_{l mod M} e_l^T (said to vanish in the paper; the label
    correlates with x_l, so this one entry does not).

    Example:
        >>> _, H_phi, _ = deep_linear_hessians(torch.ones(4), S=2, l=1, eps=1.0, sigma=1.0)
        >>> H_phi.diagonal()
        tensor([1., 2., 1., 1.], dtype=torch.float64)
    """
    m = _list(m, "m")
    D, A = len(m), aliasing_matrix(len(m), S)
    signal = torch.zeros(D, dtype=torch.float64, device="cpu")
    signal[l] = eps**2 * m[l] ** 2
    power = signal + sigma**2 * m.square()
    H_phi = 2 * s_theta**2 / S * torch.diag(power)
    H_theta = 2 * s_phi**2 * A @ torch.diag(power) @ A.T
    return H_theta, H_phi, -2 * eps * A @ torch.diag(m * (torch.arange(D, device="cpu") == l))
