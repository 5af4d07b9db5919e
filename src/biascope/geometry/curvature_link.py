"""How the curvature of the loss in input space relates to the average geometry (GIH paper, App. A.3).

Hess_x loss = l'(f) Hess_x f + l''(f) g g^T. Where the first term is small the second dominates, and its average over
networks is l'' G. For the squared error l'' = 1; for ReLU networks Hess_x f = 0 almost everywhere, so the second term
is all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd

from biascope.derivatives import call
from biascope.ensembles import scalar_of
from biascope.errors import InputError
from biascope.functional import as_rows

ScalarLoss = Callable[[Tensor, Tensor], Tensor]  # f, y -> loss, all 0-dimensional
SCALAR_LOSSES: dict[str, ScalarLoss] = {
    "sse": lambda f, y: 0.5 * (f - y) ** 2,
    "logistic": lambda f, y: nn.functional.softplus(-y * f),  # y = +-1
}


@dataclass(frozen=True)
class CurvatureTerms:
    """The two terms of the input Hessian [D, D] at one example, and the whole."""

    function_term: Tensor = field(repr=False)
    gradient_term: Tensor = field(repr=False)

    @property
    def hessian(self) -> Tensor:
        """Hess_x loss."""
        return self.function_term + self.gradient_term

    @property
    def gradient_share(self) -> float:
        """||gradient term|| / (||function term|| + ||gradient term||), Frobenius."""
        a, b = self.function_term.norm(), self.gradient_term.norm()
        return float(b / (a + b)) if a + b > 0 else 0.0


def input_curvature(model: nn.Module, x: Tensor, y: Tensor, loss: str | ScalarLoss = "sse") -> CurvatureTerms:
    """The terms at one example x [*input_shape] with label y (a number; +-1 for "logistic").

    Example:
        >>> terms = input_curvature(nn.Linear(2, 1), torch.ones(2), torch.tensor(0.0))
        >>> terms.gradient_share
        1.0
    """
    if isinstance(loss, str) and loss not in SCALAR_LOSSES:
        raise InputError(f"loss={loss!r} is not one of {', '.join(SCALAR_LOSSES)}, and not a function")
    of = SCALAR_LOSSES[loss] if isinstance(loss, str) else loss
    values = {name: v.detach() for name, v in (*model.named_parameters(), *model.named_buffers())}

    def f(flat: Tensor) -> Tensor:
        out = as_rows(call(model, values, (flat.view(1, *x.shape),)), 1, None, model)
        return scalar_of(out)[0]

    flat = x.detach().flatten()
    value, g, H = f(flat), grad(f)(flat), hessian(f)(flat)
    first = grad(of)(value, y)
    second = jacfwd(grad(of))(value, y)
    return CurvatureTerms(first * H, second * torch.outer(g, g))
