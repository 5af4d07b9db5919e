"""Average geometry of a linear convolution whose patches are normalised one by one (GIH paper, Cor. A.4).

f(x) = (1/k) sum_j theta^T M_j^T x / sigma_j, theta ~ N(0, s^2 I), sigma_j^2 = theta^T S_j theta the variance of the
filter's response to patch j, S_j = M_j^T S M_j. The paper calls sigma_j a variance; its bounds hold for the standard
deviation, and with the 1/p of Lemma A.7 that it drops. Real batch normalisation shares its statistics over positions;
this is the analytic model only. The scale s cancels.

E[theta theta^T / (sigma_1 sigma_2)] needs no sampling. With q_j = theta^T S_j theta,
    1 / sqrt(q_1 q_2) = (2/pi) int_0^{pi/2} dphi / (sin^2 phi q_1 + cos^2 phi q_2),
    E[theta theta^T / theta^T A theta] = int_0^inf det(I + 2 t A)^(-1/2) (I + 2 t A)^(-1) dt,
two integrals of smooth functions, the second one in the eigenvectors of A.
"""

import math

import numpy as np
import torch
from torch import Tensor

from biascope.geometry.measures import ASYMMETRY, symmetric
from biascope.support.errors import InputError
from biascope.support.limits import check_shapes
from biascope.support.signatures import checked

ANGLES, NODES = 16, 64  # of the first try at the two integrals; both are doubled until nothing changes
ACCURACY, DOUBLINGS = 1e-11, 6


@checked
def patch_moments(taps: Tensor, S: Tensor) -> Tensor:
    """S_j = M_j^T S M_j of every patch j, [k, p, p], from the covariance S [D, D] of the data (see `tap_matrices`).

    Example:
        >>> from biascope.geometry.linear_cnn import tap_matrices
        >>> patch_moments(tap_matrices((3,), 2), torch.diag(torch.tensor([1.0, 2.0, 3.0])))[1]
        tensor([[2., 0.],
                [0., 3.]], dtype=torch.float64)
    """
    check_shapes("taps [taps, in, out], S [in, in]", taps, S)
    return torch.einsum("adk,de,bek->kab", taps.double(), symmetric(S, "S").double(), taps.double())


@checked
def normalised_moment(S1: Tensor, S2: Tensor) -> Tensor:
    """E[theta theta^T / (sigma_1 sigma_2)] for Gaussian theta, sigma_j^2 = theta^T S_j theta; [..., p, p], batched.

    S1 and S2 [..., p, p] must be positive definite.

    Example:
        >>> normalised_moment(4 * torch.eye(2), torch.eye(2))
        tensor([[0.2500, 0.0000],
                [0.0000, 0.2500]], dtype=torch.float64)
    """
    S1, S2 = _definite(S1, S2)
    found = _integral(S1, S2, ANGLES, NODES)
    for doubling in range(1, DOUBLINGS):
        before, found = found, _integral(S1, S2, ANGLES << doubling, NODES << doubling)
        if float(((found - before).norm(dim=(-2, -1)) / found.norm(dim=(-2, -1))).max()) < ACCURACY:
            return found
    condition = max(float(torch.linalg.cond(S).max()) for S in (S1, S2))
    raise InputError(f"the integrals do not converge at condition numbers up to {condition:.2g}; add a ridge to S1, S2")


def _integral(S1: Tensor, S2: Tensor, angles: int, nodes: int) -> Tensor:
    """The midpoint rule in phi (the integrand is periodic) of Gauss-Legendre in v, 1 + 2 t m = v^-2, m = tr A / p."""
    p = S1.shape[-1]
    at, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(nodes))
    v, weight = (at + 1) / 2, weight / 2
    total = torch.zeros_like(S1)
    for i in range(angles):
        phi = math.pi / 2 * (i + 0.5) / angles
        values, V = torch.linalg.eigh(math.sin(phi) ** 2 * S1 + math.cos(phi) ** 2 * S2)
        m = values.mean(-1)
        lifted = v[:, None] ** 2 + (1 - v[:, None] ** 2) * (values / m[..., None])[..., None, :]  # v^2 (1 + 2 t lambda)
        # dt = dv / (m v^3), det^(-1/2) = v^p / prod sqrt(lifted), the inverse v^2 / lifted
        inside = v ** (p - 1) / lifted.sqrt().prod(-1)
        diagonal = torch.einsum("n,...n,...na->...a", weight, inside, 1 / lifted) / m[..., None]
        total += (V * diagonal[..., None, :]) @ V.mT
    return total / angles


@checked
def normalised_moment_bounds(S1: Tensor, S2: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) with a I <= E[theta theta^T / (sigma_1 sigma_2)] <= b I: 1 / (p sqrt(l_1 l_2)), l the largest, smallest.

    The paper's bounds lack the 1/p.

    Example:
        >>> [float(bound) for bound in normalised_moment_bounds(torch.eye(2), torch.diag(torch.tensor([1.0, 4.0])))]
        [0.25, 0.5]
    """
    S1, S2 = _definite(S1, S2)
    first, second = torch.linalg.eigvalsh(S1), torch.linalg.eigvalsh(S2)
    p = S1.shape[-1]
    lower, upper = (1 / (p * (first[..., i] * second[..., i]).sqrt()) for i in (-1, 0))
    return lower, upper


@checked
def normalised_cnn_geometry(taps: Tensor, S: Tensor) -> Tensor:
    """G = (1/k^2) sum_ij M_i E[theta theta^T / (sigma_i sigma_j)] M_j^T, [D, D]: one integral for each pair of patches.

    `taps` as `tap_matrices` gives them, S [D, D] the covariance of the data.

    Example:
        >>> from biascope.geometry.linear_cnn import tap_matrices
        >>> G = normalised_cnn_geometry(tap_matrices((3,), 2), 4 * torch.eye(3))
        >>> (32 * G).round(decimals=6).abs()  # 1/p, 1/k^2 and 1/4
        tensor([[1., 1., 0.],
                [1., 2., 1.],
                [0., 1., 1.]], dtype=torch.float64)
    """
    moments, k = patch_moments(taps, S), taps.shape[2]
    G = torch.zeros(taps.shape[1], taps.shape[1], dtype=torch.float64, device="cpu")
    for i in range(k):
        row = normalised_moment(moments[i].expand(k - i, -1, -1), moments[i:])
        part = torch.einsum("ad,kab,bek->de", taps[:, :, i], row, taps[:, :, i:])
        own = torch.einsum("ad,ab,be->de", taps[:, :, i], row[0], taps[:, :, i])
        G += part + part.T - own
    return G / k**2


def _definite(*pair: Tensor) -> list[Tensor]:
    """S1 and S2 in float64, symmetric to the last bit."""
    check_shapes("S1 [..., p, p], S2 [..., p, p]", *pair)
    found = [S.detach().double().cpu() for S in pair]
    for S, name in zip(found, ("S1", "S2")):
        if not bool(((S - S.mT).norm(dim=(-2, -1)) <= 2 * ASYMMETRY * S.norm(dim=(-2, -1))).all()):  # NaN neither
            raise InputError(f"{name} {list(S.shape)} is not symmetric and finite: the covariance of a patch is needed")
        values = torch.linalg.eigvalsh((S + S.mT) / 2)
        if bool((values[..., 0] <= S.shape[-1] * torch.finfo(S.dtype).eps * values[..., -1]).any()):
            raise InputError(f"{name} must be positive definite, its smallest eigenvalue is {float(values.min()):.3g}")
    return [(S + S.mT) / 2 for S in found]
