"""Spectral bias: every eigenfunction of the kernel is learnt at its own rate, its eigenvalue."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.arguments import check_number
from biascope.errors import InputError
from biascope.kernels.kernel import Kernel
from biascope.kernels.system import system
from biascope.signatures import checked
from biascope.tables import one_line


@dataclass(frozen=True)
class ModeStep:
    """One gradient step in function space, mode by mode: df = sum_j coefficients[j] * vectors[:, j].

    rates [N]: lr * lambda_j, descending; vectors [N, N] in columns; coefficients [N]; change: df.
    """

    rates: Tensor
    vectors: Tensor
    coefficients: Tensor
    change: Tensor
    __repr__ = one_line


@checked
def gradient_step_modes(K: Kernel | Tensor, grad: Tensor, lr: float) -> ModeStep:
    """What one gradient-descent step does to the linearised model: df_j = -lr lambda_j (u_j^T grad).

    Args:
        K: kernel K(x, x), [n, n] or full.
        grad: derivative of the loss with respect to the outputs, [n], or [n, c] for a full kernel.
        lr: learning rate.

    Example:
        >>> gradient_step_modes(torch.diag(torch.tensor([2.0, 1.0])), torch.ones(2), lr=0.1).change
        tensor([-0.2000, -0.1000], dtype=torch.float64)
    """
    sys, lr = system(K), check_number(lr, "lr", above=0)
    if grad.numel() != len(sys.values) or grad.shape[0] != sys.n:
        want = f"[{sys.n}, {sys.c}]" if sys.c else f"[{sys.n}]"
        raise InputError(f"grad has shape {list(grad.shape)}, expected {want}")
    if not bool(torch.isfinite(grad).all()):
        raise InputError("grad has a NaN or infinity")
    rates = lr * sys.values
    coefficients = -rates * (sys.vectors.mT @ grad.detach().to(sys.values).reshape(-1))
    return ModeStep(rates, sys.vectors, coefficients, (sys.vectors @ coefficients).reshape(grad.shape))


@checked
def time_constants(values: Tensor, lr: float | None = None) -> Tensor:
    """Steps [N] for the residual of every mode to fall by e: tau_j = -1 / log |1 - lr lambda_j|.

    With lr None, lr = 1 / lambda_1 and tau_j = -1 / log(1 - lambda_j / lambda_1); in print the inverse is missing.
    A mode learnt in one step has tau 0, one that is never learnt (lambda 0) infinity.

    Example:
        >>> time_constants(torch.tensor([1.0, 0.5, 0.0]))
        tensor([0.0000, 1.4427,    inf], dtype=torch.float64)
    """
    lam = values.detach().double()
    top = float(lam.max()) if lam.numel() else 0.0
    if lam.dim() != 1 or not top > 0 or float(lam.min()) < 0:
        raise InputError("time_constants needs eigenvalues [N] >= 0, not all zero")
    lr = 1 / top if lr is None else lr
    if not 0 < lr <= 2 / top * (1 + 1e-12):
        raise InputError(f"lr={lr:.4g} must lie between 0 and 2 / lambda_1 = {2 / top:.4g}")
    z = lr * lam
    log = torch.where(z < 1, torch.log1p(-z.clamp_max(1)), (z - 1).abs().log())
    return 1 / log.abs()
