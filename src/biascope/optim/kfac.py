"""KFAC and EKFAC, each as a preconditioner and as an optimiser.

KFAC inverts a Kronecker product of two small factors per layer; EKFAC keeps the factors' eigenbasis and takes the true
second moments of the gradient in it.
"""

import math
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from biascope.curvature.kronecker import EigenPiece
from biascope.optim.optimizer import Fallback, NaturalGradient, Params
from biascope.optim.preconditioner import Common, Handed, Preconditioner, Step
from biascope.optim.scalings import batch_scalings
from biascope.optim.stacks import Stack, both_sides, from_basis, rescaled, to_basis, together_again
from biascope.support.arguments import check_share
from biascope.support.errors import InputError
from biascope.support.signatures import checked


class KFACPreconditioner(Preconditioner):
    """KFAC: dW = (B + b)^-1 G (A + a)^-1, to be followed by any torch optimiser.

    A and B are of all positions that a layer sees. Where the loss ignores some (tokens with ignore_index), their inputs
    are in A all the same, and a warning says so: select the positions with labels before the last layer, or use EKFAC.

    Args:
        model: covered are its Linear, Conv1d/2d/3d and Embedding layers; examples lie along the first dimension
            (along the second where only that has as many entries as the model has examples).
        damping_mode: "factored" (b = sqrt(damping) / pi, a = pi sqrt(damping), pi^2 = the ratio of the mean
            eigenvalues of A and B), "exact" ((B (x) A + damping I)^-1) or "relative" (exact, with damping times the
            mean eigenvalue of B (x) A).
        refresh_every: steps between two decompositions of the factors.
        factors_every: steps between two updates of the factors.
        factor_decay: of the running average of the factors; 0 keeps only the last batch.

    Keyword Args:
        damping (float): above 0, 0.001 if not given.
        sharing (str): "expand" or "reduce", for layers with several positions (convolutions, tokens).
        sua (bool): for convolutions, one channel covariance for all kernel offsets.
        widest (int): where a layer has more inputs (of a convolution: times kernel offsets), it has SUA, or, without
            offsets, a diagonal A; None for no layer.
        loss_reduction (str): "mean" or "sum", of the loss over the examples.
        params (Collection): restrict to these parameters.
        grad_scaler (Any): the `torch.amp.GradScaler` in use, if any.
        group (Any): the `torch.distributed` process group that trains the model, whose gradients are its means; found
            by itself for DistributedDataParallel and `fully_shard`. A loss is a mean over a rank's own examples.
        gradient_workers (float): share of the ranks that keep a layer's inverses and compute its natural gradient,
            for the others too: 1 sends least in every step, less takes less memory.

    Example:
        >>> net, x = nn.Linear(3, 1), torch.eye(3)
        >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with KFACPreconditioner(net, damping=0.1) as kfac:
        ...     net(x).square().mean().backward()
        ...     kfac.precondition()
        ...     sgd.step()
    """

    kind = "kfac"

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        damping_mode: Literal["factored", "exact", "relative"] = "factored",
        refresh_every: int = 20,
        factors_every: int = 1,
        factor_decay: float = 0.95,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            model,
            damping_mode=damping_mode,
            refresh_every=refresh_every,
            factors_every=factors_every if factor_decay > 0 else refresh_every,
            factor_decay=factor_decay,
            **common,
        )

    def _natural(self, stack: Stack, steps: list[Step], G: Tensor) -> tuple[Tensor, EigenPiece]:
        E = stack.basis
        if self.damping_mode != "factored":
            added = relative(E.s, stack.damping) if self.damping_mode == "relative" else stack.damping
            return from_basis(E, to_basis(E, G).div_(E.s + added)), E
        B, A = self.stacks.follow(stack, inverses)
        if A is not None and A.dim() == 2:
            return torch.bmm(B, G).mul_(A[:, None]), E
        return together_again(both_sides(B, G, A, E.layout.offsets), E.layout.offsets), E


class KFACOptions(Handed, total=False):
    """Options of `KFACPreconditioner` that `KFAC` passes on."""

    damping_mode: Literal["factored", "exact", "relative"]
    refresh_every: int
    factors_every: int
    factor_decay: float


class KFAC(NaturalGradient):
    """Natural gradient with Kronecker factors: W -= lr (B + b)^-1 G (A + a)^-1.

    Args:
        model: any nn.Module; Linear, Conv1d/2d/3d and Embedding layers are preconditioned.
        lr: learning rate. Without a damping it means what it means for Adam, 0.001 if not given, and more than 0.003
            (1.0, say) means as far as can be trusted; with one it is that of the formula, 0.1 if not given.
        damping: above 0: the formula above, with this damping; it may differ between parameter groups and change during
            training (`group["damping"]`). None: damping, step length and refreshes adapt (`biascope.optim.adaptive`):
            see "Without a damping" in docs/howto/natural-gradient.md.
        momentum: on the natural gradient; 0.9 without a damping, 0 with one.
        weight_decay: times the parameter, added to the natural gradient; without a damping apart from it, as in AdamW.
        params: parameters or parameter groups, as torch optimisers take them; None for all.
        fallback: "sgd" (same lr and momentum) or "adam", for parameters that no factor covers; "adam" without a
            damping, else "sgd".

    Keyword Args:
        options (Any): all others of `KFACPreconditioner`, such as `refresh_every`; without a damping those that
            `biascope.optim.adaptive.ADAPTS` names.

    Example:
        >>> net, x = nn.Linear(3, 1), torch.eye(3)
        >>> opt = KFAC(net, lr=0.1, damping=0.1)
        >>> net(x).square().mean().backward()
        >>> opt.step()
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        damping: float | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        params: Params = None,
        fallback: Fallback | None = None,
        **options: Unpack[KFACOptions],
    ) -> None:
        super().__init__(
            model, KFACPreconditioner, params, lr, momentum, weight_decay, fallback, damping, "kfac",
            **options,
        )  # fmt: skip


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


class EKFACPreconditioner(Preconditioner):
    """EKFAC: the gradient in KFAC's eigenbasis divided by its second moment there, to be followed by any optimiser.

    Args:
        model: covered are its Linear, Conv1d/2d/3d and Embedding layers; examples lie along the first dimension
            (along the second where only that has as many entries as the model has examples).
        damping_mode: "plain" (s + damping), "deep" (s + (S_B + r)(S_A + r) - S_B S_A with r = sqrt(damping)) or
            "relative" (s + damping times the mean of s, for each layer).
        refresh_every: steps between two computations of the eigenbasis.
        scalings: "batch" (second moments over the examples of this step) or "running" (EKFAC-ra: s <- decay s +
            (1 - decay) m G^2 of the mean gradient G in the eigenbasis, for a batch of m: cheaper).
        decay: of the running scalings.
        rescale_by_batch: keep the factor m, which restores the scale of single examples.
        on_refresh: what running scalings become in a new basis: "reset" (S_B S_A) or "project".
        factor_decay: of the running average of the factors behind the basis; 0 keeps only the batch of the refresh.

    Keyword Args:
        damping (float): above 0, 0.001 if not given.
        options (Any): `sharing`, `sua`, `widest`, `loss_reduction`, `params`, `grad_scaler`, `group` and
            `gradient_workers` as in `KFACPreconditioner`.

    Example:
        >>> net, x = nn.Linear(3, 1), torch.eye(3)
        >>> adam = torch.optim.Adam(net.parameters())
        >>> with EKFACPreconditioner(net, damping=0.1) as ekfac:
        ...     net(x).square().mean().backward()
        ...     ekfac.precondition()
        ...     adam.step()
    """

    kind = "ekfac"

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        damping_mode: Literal["plain", "deep", "relative"] = "plain",
        refresh_every: int = 50,
        scalings: Literal["batch", "running"] = "batch",
        decay: float = 0.75,
        rescale_by_batch: bool = True,
        on_refresh: Literal["reset", "project"] = "reset",
        factor_decay: float = 0.0,
        **common: Unpack[Common],
    ) -> None:
        self.scalings, self.decay = scalings, check_share(decay, "decay")
        self.rescale_by_batch, self.on_refresh = rescale_by_batch, on_refresh
        if scalings == "batch" and common.get("gradient_workers", 1.0) < 1:
            raise InputError(
                "gradient_workers below 1 leaves layers without a basis on some ranks, whose examples the scalings of "
                "the batch need: use scalings='running', or KFAC"
            )
        super().__init__(
            model,
            damping_mode=damping_mode,
            refresh_every=refresh_every,
            factors_every=refresh_every,
            factor_decay=factor_decay,
            **common,
        )

    def _needs_factors(self) -> bool:
        return self.scalings == "batch" or super()._needs_factors()

    def _renewed(self, old: EigenPiece | None, new: EigenPiece) -> EigenPiece:
        if self.scalings == "running" and self.on_refresh == "project" and old is not None:
            return rescaled(new, projected(old, new))
        return new

    def _ready(self, step: Step) -> bool:
        return step.examples > 0 if self.scalings == "running" else bool(step.batches)

    def _natural(self, stack: Stack, steps: list[Step], G: Tensor) -> tuple[Tensor, EigenPiece]:
        E, n = stack.basis, stack.examples
        V = to_basis(E, G)
        if self.scalings == "running":
            times = (n if self.rescale_by_batch else 1) / (1 if self.loss_reduction == "mean" else n**2)
            s = (self.decay * E.s).addcmul_(V, V, value=(1 - self.decay) * times)
        else:
            s = batch_scalings(stack, [step.batches for step in steps], steps[0].scale / math.sqrt(n))
            self.team.sum(s)
        added: Tensor | float = stack.damping
        if self.damping_mode == "deep":
            added = self.stacks.follow(stack, deep_damping)
        elif self.damping_mode == "relative":
            added = relative(s, stack.damping)
        return from_basis(E, V.div_(s + added)), rescaled(E, s)


class EKFACOptions(Handed, total=False):
    """Options of `EKFACPreconditioner` that `EKFAC` passes on."""

    damping_mode: Literal["plain", "deep", "relative"]
    refresh_every: int
    scalings: Literal["batch", "running"]
    decay: float
    rescale_by_batch: bool
    on_refresh: Literal["reset", "project"]
    factor_decay: float


class EKFAC(NaturalGradient):
    """Natural gradient in KFAC's eigenbasis with true second moments: W -= lr U_B ((U_B^T G U_A) / (s + eps)) U_A^T.

    Args:
        model: any nn.Module; Linear, Conv1d/2d/3d and Embedding layers are preconditioned.
        lr: learning rate. Without a damping it means what it means for Adam, 0.001 if not given, and more than 0.003
            (1.0, say) means as far as can be trusted; with one it is that of the formula, 0.1 if not given.
        damping: above 0: the formula above, with this damping; it may differ between parameter groups and change during
            training (`group["damping"]`). None: damping, step length and refreshes adapt (`biascope.optim.adaptive`):
            see "Without a damping" in docs/howto/natural-gradient.md.
        momentum: on the natural gradient; 0.9 without a damping, 0 with one.
        weight_decay: times the parameter, added to the natural gradient; without a damping apart from it, as in AdamW.
        params: parameters or parameter groups, as torch optimisers take them; None for all.
        fallback: "sgd" (same lr and momentum) or "adam", for parameters that no factor covers; "adam" without a
            damping, else "sgd".

    Keyword Args:
        options (Any): all others of `EKFACPreconditioner`, such as `refresh_every`.

    Example:
        >>> net, x = nn.Linear(3, 1), torch.eye(3)
        >>> opt = EKFAC(net, lr=0.1, damping=0.1, refresh_every=20)
        >>> net(x).square().mean().backward()
        >>> opt.step()
        >>> opt.coverage()["weight"]
        'ekfac'
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        damping: float | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        params: Params = None,
        fallback: Fallback | None = None,
        **options: Unpack[EKFACOptions],
    ) -> None:
        super().__init__(
            model, EKFACPreconditioner, params, lr, momentum, weight_decay, fallback, damping, "ekfac",
            **options,
        )  # fmt: skip


def relative(s: Tensor, damping: float) -> Tensor:
    """Damping times the mean of the scalings [g, e, o, i] of every group [g, 1, 1, 1]; above 0 where they are 0."""
    return (damping * s.mean((1, 2, 3), keepdim=True)).clamp_min(torch.finfo(s.dtype).tiny)


def deep_damping(E: EigenPiece, damping: float) -> Tensor:
    """(S_B + r)(S_A + r) - S_B S_A with r = sqrt(damping) [g, 1, o, i]."""
    return math.sqrt(damping) * (E.s_B[:, None, :, None] + E.s_A[:, None, None, :]) + damping


def projected(old: EigenPiece, new: EigenPiece) -> Tensor:
    """Diagonal of the old metric in the new basis [g, e, o, i]."""
    s = (new.U_B.mT @ old.U_B).square()[:, None] @ old.s
    if old.U_A is None or new.U_A is None:
        return s
    return s @ (old.U_A.mT @ new.U_A).square()[:, None]
