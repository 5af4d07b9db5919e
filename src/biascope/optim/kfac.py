"""KFAC: the inverse of a Kronecker product of two small factors per layer; preconditioner and optimiser."""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from biascope.curvature.kronecker import EigenPiece
from biascope.optim.checks import check_decay
from biascope.optim.optimizer import NaturalGradient, Params
from biascope.optim.preconditioner import Common, Preconditioner, Shared, Step
from biascope.optim.stacks import Stack, both_sides, from_basis, to_basis, together_again


class KFACPreconditioner(Preconditioner):
    """KFAC: dW = (B + b)^-1 G (A + a)^-1, to be followed by any torch optimiser.

    A and B are of all positions that a layer sees. Where the loss ignores some (tokens with ignore_index), their inputs
    are in A all the same, and a warning says so: select the positions with labels before the last layer, or use EKFAC.

    Args:
        model: covered are its Linear, Conv1d/2d/3d and Embedding layers; examples lie along the first dimension
            (along the second where only that has as many entries as the model has examples).
        damping_mode: "factored" (b = sqrt(damping) / pi, a = pi sqrt(damping), pi^2 = the ratio of the mean
            eigenvalues of A and B) or "exact" ((B (x) A + damping I)^-1).
        refresh_every: steps between two decompositions of the factors.
        factors_every: steps between two updates of the factors.
        factor_decay: of the running average of the factors; 0 keeps only the last batch.

    Keyword Args:
        damping (float): above 0, 0.001 if not given.
        sharing (str): "expand" or "reduce", for layers with several positions (convolutions, tokens).
        sua (bool): for convolutions, one channel covariance for all kernel offsets.
        loss_reduction (str): "mean" or "sum", of the loss over the examples.
        params (Collection): restrict to these parameters.
        grad_scaler (Any): the `torch.amp.GradScaler` in use, if any.

    Example:
        >>> net, x = nn.Linear(3, 1), torch.eye(3)
        >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with KFACPreconditioner(net, damping=0.1) as kfac:
        ...     net(x).square().mean().backward()
        ...     kfac.precondition()
        ...     sgd.step()
    """

    kind = "kfac"
    damping_modes = ("factored", "exact")

    def __init__(
        self,
        model: nn.Module,
        *,
        damping_mode: Literal["factored", "exact"] = "factored",
        refresh_every: int = 20,
        factors_every: int = 1,
        factor_decay: float = 0.95,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            model,
            damping_mode=damping_mode,
            refresh_every=refresh_every,
            factors_every=factors_every if check_decay("factor_decay", factor_decay) > 0 else refresh_every,
            factor_decay=factor_decay,
            **common,
        )

    def _natural(self, stack: Stack, steps: list[Step], G: Tensor) -> tuple[Tensor, EigenPiece]:
        E = stack.basis
        if self.damping_mode == "exact":
            return from_basis(E, to_basis(E, G).div_(E.s + stack.damping)), E
        B, A = self.stacks.follow(stack, inverses)
        if A is not None and A.dim() == 2:
            return torch.bmm(B, G).mul_(A[:, None]), E
        return together_again(both_sides(B, G, A, E.layout.offsets), E.layout.offsets), E


class KFACOptions(Shared, total=False):
    """Options of `KFACPreconditioner` that `KFAC` passes on."""

    damping_mode: Literal["factored", "exact"]
    refresh_every: int
    factors_every: int
    factor_decay: float


class KFAC(NaturalGradient):
    """Natural gradient with Kronecker factors: W -= lr (B + b)^-1 G (A + a)^-1.

    Args:
        model: any nn.Module; Linear, Conv1d/2d/3d and Embedding layers are preconditioned.
        lr: learning rate.
        momentum: on the natural gradient.
        weight_decay: times the parameter, added to the natural gradient.
        params: parameters or parameter groups, as torch optimisers take them; None for all.
        fallback: "sgd" (same lr and momentum) or "adam", for parameters that no factor covers.

    Keyword Args:
        damping (float): above 0, 0.01 if not given; may differ between parameter groups and change during training
            (`group["damping"]`).
        options (Any): all others of `KFACPreconditioner`, such as `refresh_every`.

    Example:
        >>> net, x = nn.Linear(3, 1), torch.eye(3)
        >>> opt = KFAC(net, lr=0.1, damping=0.1)
        >>> net(x).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        params: Params = None,
        fallback: Literal["sgd", "adam"] = "sgd",
        **options: Unpack[KFACOptions],
    ) -> None:
        chosen: dict[str, Any] = {"damping": 1e-2, **options}
        super().__init__(model, KFACPreconditioner, params, lr, momentum, weight_decay, fallback, **chosen)


def inverses(E: EigenPiece, damping: float) -> tuple[Tensor, Tensor | None]:
    """Inverses of the damped factors [g, o, o] and [g, i, i], or [g, i] where A is a diagonal.

    Where A is one number, B's inverse takes it, and there is no other.
    """
    a, b = E.s_A.mean(-1), E.s_B.mean(-1)
    pi = torch.where((a > 0) & (b > 0), (a / b).sqrt(), 1.0)
    root = math.sqrt(damping)
    s_B, s_A = E.s_B + (root / pi)[:, None], E.s_A + (root * pi)[:, None]
    if E.layout.columns == 1:
        return (E.U_B / (s_B * s_A)[:, None]) @ E.U_B.mT, None
    B = (E.U_B / s_B[:, None]) @ E.U_B.mT
    return B, 1.0 / s_A if E.U_A is None else (E.U_A / s_A[:, None]) @ E.U_A.mT
