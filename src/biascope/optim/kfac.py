"""KFAC: the inverse of a Kronecker product of two small factors per layer; preconditioner and optimiser."""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from biascope.curvature.kronecker import EigenPiece
from biascope.optim.optimizer import NaturalGradient, Params
from biascope.optim.preconditioner import Common, Curvature, Preconditioner, Shared
from biascope.optim.units import LayerUnit


class KFACPreconditioner(Preconditioner):
    """KFAC: dW = (B + b)^-1 G (A + a)^-1, to be followed by any torch optimiser.

    Args:
        model: covered are its Linear, Conv1d/2d/3d and Embedding layers; examples lie along the first dimension.
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
        self._inverses: dict[str, tuple[EigenPiece, float, Tensor, Tensor]] = {}
        super().__init__(
            model,
            damping_mode=damping_mode,
            refresh_every=refresh_every,
            factors_every=factors_every if factor_decay > 0 else refresh_every,
            factor_decay=factor_decay,
            **common,
        )

    def _solve(self, unit: LayerUnit, c: Curvature, G: Tensor, damping: float) -> Tensor:
        E = c.basis
        assert E is not None
        V = E.layout.pack(G)
        if self.damping_mode == "exact":
            return E.layout.unpack(E.rotate(E.rotate(V) / (E.s + damping), back=True))
        B, A = self._inverse(unit.name, E, damping)
        V = B[:, None] @ V
        return E.layout.unpack(V * A[:, None, None] if E.U_A is None else V @ A[:, None])

    def _inverse(self, name: str, E: EigenPiece, damping: float) -> tuple[Tensor, Tensor]:
        """Inverses of the damped factors, kept until the basis or the damping changes."""
        kept = self._inverses.get(name)
        if kept is None or kept[0] is not E or kept[1] != damping:
            a, b = E.s_A.mean(-1), E.s_B.mean(-1)
            pi = torch.where((a > 0) & (b > 0), (a / b).sqrt(), 1.0)
            root = math.sqrt(damping)
            s_B, s_A = E.s_B + (root / pi)[:, None], E.s_A + (root * pi)[:, None]
            B = (E.U_B / s_B[:, None]) @ E.U_B.mT
            A = 1.0 / s_A if E.U_A is None else (E.U_A / s_A[:, None]) @ E.U_A.mT
            kept = self._inverses[name] = (E, damping, B, A)
        return kept[2], kept[3]


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
