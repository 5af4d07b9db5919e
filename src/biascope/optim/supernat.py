"""SuperNat: natural gradient for a linear model, whose metric adapts to the loss and freezes what it does not need.

f = Phi w with fixed features, Phi Phi^T = sum_j lam_j u_j u_j^T. Every step is gradient descent in reparametrised
features; the reparametrisation that minimises ||dw||_A ||A^-1 Phi^T||_F over rescalings nu_j of the modes is
nu_j = kappa / |u_j^T grad_f L|, so that the kernel's eigenvalues become

    lam_j(t+1) = lam_j(t) |u_j^T grad_f L| / scale,    scale = 1/kappa

(the paper's algorithm box is an image; this follows its text). Modes whose gradient is small stop moving. The paper
leaves kappa open, and it decides the outcome (noisy regression of Fig. 6.5, lr = 0.5 / lam_1, median test error;
gradient descent 0.024):

    "first"         scale = max_j |u_j^T grad_f L| at the first step, then constant; needs lr near 1 / lam_1, smaller
                    ones freeze the signal too (0.036)
    "max_residual"  the same maximum at every step: eigenvalues only shrink, noise freezes at any rate (0.004)
    "keep_top"      lam_1 stays: frozen modes are set free again, which ends where gradient descent ends
    "keep_trace"    the sum of the eigenvalues stays; likewise
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from biascope.linalg.stable import thin_svd
from biascope.optim.optimizer import Fallback, NaturalGradient, Params
from biascope.optim.preconditioner import Preconditioner
from biascope.support.arguments import check_choice, check_finite, check_number, check_tensor
from biascope.support.errors import InputError
from biascope.support.limits import OwnTensor
from biascope.support.signatures import checked

Scale = Literal["first", "max_residual", "keep_top", "keep_trace"]


class SuperNat(Optimizer):
    """SuperNat for f = features @ w; `SuperNat(net)` is for networks (`NetworkSuperNat`).

    Args:
        w: the weights, a parameter [p] or [p, 1]; or a network, with the options of `NetworkSuperNat`.
        features: Phi [n, p], of the training inputs.
        lr: learning rate; by default 1 / the largest eigenvalue of Phi Phi^T, which suits a summed squared loss (over
            2); n times that suits a mean over n. Much smaller ones freeze the modes before the signal is learnt.
        scale: 1 / kappa: a number, or a rule by name (see the module's docstring).

    The gradient of the loss with respect to the outputs f [n] goes into `step`; or leave it out, and it is recovered
    from `w.grad` = Phi^T grad_f L, on the modes that the features can move.

    Example:
        >>> Phi = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> opt = SuperNat(w, Phi, lr=0.5)
        >>> for _ in range(20):
        ...     opt.step(Phi @ w.detach() - torch.tensor([1.0, 0.0]))
        >>> bool((w[0] - 1).abs() < 0.2)
        True
    """

    def __new__(cls, w: Tensor | nn.Module, *args: Any, **options: Any) -> Any:
        """One for a network, or for w."""
        return NetworkSuperNat(w, *args, **options) if isinstance(w, nn.Module) else super().__new__(cls)

    @overload
    def __init__(self, w: nn.Module, lr: float | None = None, **options: Any) -> None: ...

    @overload
    def __init__(
        self, w: Tensor, features: Tensor, lr: float | None = None, scale: float | Scale = "first"
    ) -> None: ...

    @checked  # type: ignore[misc]
    def __init__(self, w: OwnTensor, features: Tensor, lr: float | None = None, scale: float | Scale = "first") -> None:
        check_tensor(w, "w", floating=True)
        check_finite(check_tensor(features, "features", dims=2, floating=True), "features")
        if features.numel() == 0 or w.numel() != features.shape[1] or features.device != w.device:
            both = f"{list(features.shape)} on {features.device} and {list(w.shape)} on {w.device}"
            raise InputError(f"features [n, p] and w [p] disagree: {both}")
        if not w.is_leaf:
            raise InputError("w is the result of a computation and cannot be trained: pass an nn.Parameter")
        if lr is not None:
            check_number(lr, "lr", above=0)
        if not isinstance(scale, str):
            check_number(scale, "scale", above=0)
        U, s, Vh = thin_svd(features.detach()) if features.shape[0] >= features.shape[1] else _wide(features.detach())
        if lr is None:
            if not bool(s.max() > 0):
                raise InputError("all features are 0, so there is nothing to learn and no lr to choose")
            lr = float(s.max()) ** -2
        super().__init__([w], {"lr": lr})
        keep = s > s.max() * max(features.shape) * torch.finfo(s.dtype).eps
        self.U, self.s, self.V = U[:, keep], s[keep], Vh[keep].T
        self.state[w] = {"ratio": torch.ones_like(self.s), "scale": scale}

    @property
    def eigenvalues(self) -> Tensor:
        """Of the kernel Phi_t Phi_t^T of the features as reparametrised now [r]: the learnt spectrum."""
        ratio: Tensor = self.state[self.param_groups[0]["params"][0]]["ratio"]
        return self.s.square() * ratio

    @torch.no_grad()
    def step(self, gradient: Tensor | Callable[[], Any] | None = None) -> Any:
        """One step; `gradient` is grad_f L [n], or a closure that runs backward, or None to read `w.grad`."""
        w: Tensor = self.param_groups[0]["params"][0]
        state, lr, loss = self.state[w], float(self.param_groups[0]["lr"]), None
        if callable(gradient):
            with torch.enable_grad():
                loss = gradient()
            gradient = None
        if gradient is not None:
            if check_tensor(gradient, "gradient", floating=True).numel() != len(self.U):
                raise InputError(f"the gradient by the outputs has {gradient.numel()} entries, not {len(self.U)}")
            c = self.U.T @ gradient.reshape(-1).to(self.U.dtype)
        elif w.grad is not None:
            c = (self.V.T @ w.grad.reshape(-1).to(self.V.dtype)) / self.s
        else:
            raise InputError("step() needs the gradient with respect to the outputs, or a w.grad from loss.backward()")
        check_finite(c, "the gradient")
        if not bool(c.abs().max() > 0):
            return loss  # at a stationary point: nothing to do, and nothing to fix the scale by
        scale = self._scale(state["scale"], c.abs())
        if state["scale"] == "first":
            state["scale"] = scale
        # in the original coordinates a mode's step carries the factor lam_j(t) / lam_j(0)
        w.add_((self.V @ (state["ratio"] * self.s * c)).reshape(w.shape), alpha=-lr)
        state["ratio"] = state["ratio"] * c.abs() / scale
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; one of other features is refused and changes nothing."""
        saved = state_dict.get("state", {}).get(0, {})
        ratio, scale = saved.get("ratio"), saved.get("scale")
        if not isinstance(ratio, Tensor) or ratio.shape != self.s.shape:
            raise InputError(
                f"the state's ratio is {list(getattr(ratio, 'shape', ()))}, these features have {len(self.s)} modes"
            )
        if isinstance(scale, str):
            check_choice(scale, "the state's scale", get_args(Scale))
        super().load_state_dict(dict(state_dict))
        # torch takes the name of a rule for a list of letters, and rounds the ratios to the precision of w
        kept = ratio.detach().to(self.s.device, self.s.dtype, copy=True)
        self.state[self.param_groups[0]["params"][0]] = {"ratio": kept, "scale": scale}

    def _scale(self, rule: float | Scale, c: Tensor) -> float:
        """1 / kappa of this step for c = |u_j^T grad_f L|."""
        if not isinstance(rule, str):
            return rule
        lam = self.eigenvalues
        if rule == "keep_top":
            return float((lam * c).max() / lam.max())
        if rule == "keep_trace":
            return float((lam * c).sum() / lam.sum())
        return float(c.max())


class NetworkSuperNat(NaturalGradient):
    """SuperNat for a network: what `SuperNat(model)` gives.

    The modes are those of EKFAC: entries of the gradient in a layer's Kronecker eigenbasis, with running mean M and
    mean square v. For f = Phi w the loss's gradient along mode j is M_j = s_j u_j^T grad_f L and v_j is s_j^2 up to a
    factor, so that |M_j| / sqrt(v_j), the ratio of signal to noise, takes the place of |u_j^T grad_f L| / scale. As the
    features of a network move and its gradients are of batches, the product over all steps becomes a running mean, from
    1 at every new basis. The natural gradient M / (v + damping) is multiplied by it: modes that carry noise freeze.

    Args:
        model: any nn.Module, as for `EKFAC`.
        lr: on Adam's scale, 0.001 if not given; 1.0 means as far as can be trusted.
        momentum: of M.
        weight_decay: apart from the gradient, as in AdamW.
        params: parameters or parameter groups; None for all.
        fallback: "sgd" or "adam", for parameters that no factor covers.
        options: those that `biascope.optim.adaptive.ADAPTS` names.

    Example:
        >>> net, x = nn.Linear(3, 1), torch.eye(3)
        >>> opt = SuperNat(net)
        >>> net(x).square().mean().backward()
        >>> opt.step()
        >>> opt.coverage()["weight"]
        'supernat'
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        params: Params = None,
        fallback: Fallback | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model, Preconditioner, params, lr, momentum, weight_decay, fallback, None, "supernat", **options
        )


def _wide(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    V, s, Uh = thin_svd(features.T)
    return Uh.T, s, V.T
