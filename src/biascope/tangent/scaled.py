"""The alpha-scaled (lazy) network f0 + alpha (f - f0): at large alpha it trains like its linearisation."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from biascope.network.derivatives import differentiable_attention
from biascope.network.door import refuse_batch_dependence
from biascope.network.functional import Params
from biascope.network.swapped import functional_call
from biascope.support.arguments import check_number
from biascope.support.errors import UnsupportedError
from biascope.support.signatures import checked
from biascope.tangent.anchored import Anchored, copies, deterministic, versions
from biascope.tangent.expansion import unpacked

# alpha times the rounding error of f: above the first the signal f - f0 is noisy, above the second it is lost
_NOISY, _LOST = 1e-4, 1e-3


@checked
def lazy(model: nn.Module, alpha: float, include_init_output: bool = True) -> Lazy:
    """Scale a network's change since its start: f(x; theta0) + alpha (f(x; theta) - f(x; theta0)).

    Train it with `lazy_lr(lr, alpha)`: parameters move by O(1 / alpha), the function by O(1), and as alpha grows the
    trajectory tends to that of `linearize(model)`. alpha = 1 is the plain network. The result has the parameter and
    buffer names and the state_dict of `model`, which must be in eval mode where that matters (BatchNorm, dropout).

    f - f0 is small and is multiplied by alpha, so half precision and autocast are refused, and in float32 an alpha
    above about 800 is warned about and one above about 8000 refused.

    Args:
        model: any nn.Module.
        alpha: the scale, positive.
        include_init_output: False leaves the first term out, so that the function starts at zero.

    Example:
        >>> net, x = nn.Linear(3, 2), torch.ones(1, 3)
        >>> slow = lazy(net, alpha=100.0)
        >>> torch.equal(slow(x), net(x))
        True
    """
    return Lazy(getattr(model, "_orig_mod", model), alpha, include_init_output)


@checked
def lazy_lr(lr: float, alpha: float) -> float:
    """Learning rate lr / alpha^2 that gives the scaled network the function-space speed lr gives the plain one.

    For plain and momentum SGD; Adam does not see the scale of gradients, there the rule is lr / alpha.

    Example:
        >>> lazy_lr(0.5, 10.0)
        0.005
    """
    return check_number(lr, "lr", least=0) / check_number(alpha, "alpha", above=0) ** 2


class Lazy(Anchored):
    """What `lazy` returns."""

    def __init__(self, model: nn.Module, alpha: float, include_init_output: bool) -> None:
        super().__init__(model)
        self.alpha = check_number(alpha, "alpha", above=0)
        self.include_init_output = include_init_output
        self._sure = False  # that no random numbers are drawn: f - f0 would be their noise
        for name, p in self.named_parameters():
            _refuse_rounding(self.alpha, p.dtype, f"parameter '{name}'")
        eps = max(torch.finfo(p.dtype).eps for p in self.parameters())
        if self.alpha != 1 and self.alpha * eps > _NOISY:
            warnings.warn(
                f"alpha={alpha:g} multiplies the rounding error of f by {alpha:g}: about {self.alpha * eps:.0e} in "
                "every output. Use model.double()",
                stacklevel=4,
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns for these inputs, with its change since the start scaled."""
        refuse_batch_dependence(self._skeleton)
        if self.alpha == 1 and self.include_init_output:
            return self._skeleton(*args, **kwargs)
        device, transformed = next(self.parameters()).device, torch._C._are_functorch_transforms_active()
        if self.alpha != 1 and torch.is_autocast_enabled(device.type):
            why = f"alpha={self.alpha:g} multiplies the rounding error of f; bs.linearize has no such error"
            raise UnsupportedError(f"a lazy network must not run under autocast: {why}")
        given, kept = (args, kwargs), copies((args, kwargs))
        before, who = versions(given), type(self._skeleton).__name__
        with differentiable_attention():
            with nullcontext() if self._sure or transformed else deterministic(self._skeleton, device):
                first = functional_call(self._skeleton, self._start(), args, kwargs)
            self._sure = self._sure or not transformed
            f0, _ = unpacked(first, who, "scaled")
            if versions(given) != before or (torch.is_inference_mode_enabled() and not _equal(given, kept)):
                args, kwargs = kept  # the network works in place on its inputs
            if not _differentiated(given):
                f0 = [t.detach() for t in f0]  # frees its graph: the parameters it has do not move
            f, rebuild = unpacked(self._skeleton(*args, **kwargs), who, "scaled")
        return rebuild([self._combine(after, start) for after, start in zip(f, f0)])

    def _start(self) -> Params:
        """The state at the start, flagged as the parameters are now.

        Both passes must take the same kernels, so that their rounding errors cancel; torch chooses them by grad mode
        and requires_grad too.
        """
        state = {k: t.detach() for k, t in self.origin.items()}
        if not torch._C._are_functorch_transforms_active():  # torch.func has no such flags
            for k, p in self.named_parameters():
                state[k].requires_grad_(p.requires_grad)
        return state

    def _combine(self, f: Tensor, f0: Tensor) -> Tensor:
        _refuse_rounding(self.alpha, f.dtype, "an output")
        change = self.alpha * (f - f0)
        return f0 + change if self.include_init_output else change


def _differentiated(given: Any) -> bool:
    """May a derivative in the inputs be asked for? Then f0, which depends on them, must keep its graph."""
    leaves = pytree.tree_leaves(given)
    wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in leaves)
    return wanted or torch._C._are_functorch_transforms_active()


def _equal(one: Any, two: Any) -> bool:
    """Are the tensors in two lists of arguments equal? In inference mode torch does not count changes."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(two))
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def _refuse_rounding(alpha: float, dtype: torch.dtype, what: str) -> None:
    if alpha != 1 and (torch.finfo(dtype).bits < 32 or alpha * torch.finfo(dtype).eps > _LOST):
        fix = "use model.double(), or bs.linearize, which has no such error"
        raise UnsupportedError(f"{what} is {dtype}: its rounding error times alpha={alpha:g} would drown f - f0; {fix}")
