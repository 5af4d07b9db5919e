"""The dipole metric and its bounds (NAD paper, Sec. 3): which directions a network can tell apart, and learn to.

A dipole is a pair x, x + v with opposite labels; q(v) = g(|f(x) - f(x + v)|) says how well the network separates it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from biascope.errors import InputError


def learning_bound(directional: Tensor, mixed: Tensor, alpha: float, beta: float = 0.0) -> float:
    """Lemma 2: a bound on E ||grad_theta q(v)|| when |g'(t)| <= alpha |t| + beta.

    alpha sqrt(E (v^T grad_x f)^2) sqrt(E ||H v||^2) + beta E ||H v||. The paper prints alpha^2; that is not a bound.

    Args:
        directional: v^T grad_x f of each sampled network, [T].
        mixed: ||H v|| of each, H = d2f/dtheta dx, [T].
        alpha: slope of the bound on g'.
        beta: offset of it.

    Example:
        >>> import torch
        >>> learning_bound(torch.ones(3), torch.full((3,), 2.0), alpha=0.5)
        1.0
    """
    return general_learning_bound(directional, mixed, lambda t: alpha * t) + beta * float(mixed.double().mean())


def general_learning_bound(directional: Tensor, mixed: Tensor, w: Callable[[Tensor], Tensor]) -> float:
    """sqrt(E w(|v^T grad f|)^2) sqrt(E ||H v||^2) for any w with |g'| <= w (the paper's general version).

    Example:
        >>> import torch
        >>> general_learning_bound(torch.ones(2), torch.ones(2), lambda t: 3 * t)
        3.0
    """
    if directional.shape != mixed.shape or directional.dim() != 1:
        raise InputError(f"need two lists of T numbers, got {list(directional.shape)} and {list(mixed.shape)}")
    slopes = w(directional.double().abs())
    return float(slopes.square().mean().sqrt() * mixed.double().square().mean().sqrt())


def markov_bound(v: Tensor, covariance: Tensor, eta: float) -> float:
    """Eq. 6: P((v^T grad f)^2 >= eta) <= v^T Sigma v / eta, with Sigma = E grad grad^T [D, D]; at most 1.

    It holds exactly for the gradients of any sample, with their own second moment.

    Example:
        >>> import torch
        >>> markov_bound(torch.tensor([1.0, 0.0]), torch.eye(2), eta=4.0)
        0.25
    """
    if eta <= 0:
        raise InputError(f"eta must be positive, not {eta}")
    flat = v.double().flatten()
    return min(1.0, float(flat @ covariance.double() @ flat) / eta)
