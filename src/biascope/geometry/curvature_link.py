"""How the curvature of the loss in input space relates to the average geometry (GIH paper, App. A.3).

Hess_x loss = l'(f) Hess_x f + l''(f) g g^T. Where the first term is small the second dominates, and its average over
networks is l'' G. For the squared error l'' = 1; for ReLU networks Hess_x f = 0 almost everywhere, so the second term
is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, vmap

from biascope.derivatives import call, differentiable_attention, second_derivatives
from biascope.ensembles import Networks, scalar_of
from biascope.ensembles.evaluate import Scalarise
from biascope.ensembles.trust import refuse_mixing
from biascope.errors import InputError
from biascope.functional import as_rows
from biascope.geometry.losses import check_labels, check_reals
from biascope.geometry.measures import Comparison, compare
from biascope.memory import budget, readable
from biascope.precision import arithmetic
from biascope.refusals import refuse_batch_dependence
from biascope.signatures import checked

ScalarLoss = Callable[[Tensor, Tensor], Tensor]  # f, y -> loss, all 0-dimensional
SCALAR_LOSSES: dict[str, ScalarLoss] = {
    "sse": lambda f, y: 0.5 * (f - y) ** 2,
    "logistic": lambda f, y: nn.functional.softplus(-y * f),  # y = +-1
}


@dataclass(frozen=True)
class CurvatureTerms:
    """The two terms of the input Hessian, [n, D, D] for a batch and [D, D] for one example, and the whole."""

    function_term: Tensor = field(repr=False)
    gradient_term: Tensor = field(repr=False)

    @property
    def hessian(self) -> Tensor:
        """Hess_x loss."""
        return self.function_term + self.gradient_term

    @property
    def shares(self) -> Tensor:
        """||gradient term|| / (||function term|| + ||gradient term||), Frobenius, of every example; 0 for 0 / 0."""
        a, b = (term.double().flatten(-2).norm(dim=-1) for term in (self.function_term, self.gradient_term))
        return torch.where(a + b > 0, b / (a + b), 0.0)

    @property
    def gradient_share(self) -> float:
        """Mean of `shares` over the examples."""
        return float(self.shares.mean())


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def input_curvature(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: str | ScalarLoss = "sse",
    scalarise: Scalarise | None = None,
    max_memory: str | int | None = None,
) -> CurvatureTerms:
    """The two terms of Hess_x loss = l'(f) Hess_x f + l''(f) g g^T at every example.

    Args:
        model: in eval mode, as far as batch normalisation and dropout are concerned.
        x: inputs [n, *input_shape] with labels y [n], or one input [*input_shape] with a label y of no dimension.
        y: labels; -1 and +1 for "logistic".
        loss: "sse" (half the square), "logistic", or a function (f, y) -> loss of numbers.
        scalarise: outputs [n, c] -> [n]; one output, or the difference of two logits, by default.
        max_memory: for example "4GB"; the result holds 2 n D^2 numbers.

    Example:
        >>> terms = input_curvature(nn.Linear(2, 1), torch.ones(3, 2), torch.zeros(3))
        >>> terms.hessian.shape, terms.gradient_share
        (torch.Size([3, 2, 2]), 1.0)
    """
    refuse_batch_dependence(model)
    values = {name: v.detach() for name, v in (*model.named_parameters(), *model.named_buffers())}
    one = y.dim() == 0
    pieces = _pieces(model, values, x[None] if one else x, y[None] if one else y, loss, scalarise, max_memory)
    first, second, g, H = (piece[0] if one else piece for piece in pieces)
    outer = g[..., :, None] * g[..., None, :]
    return CurvatureTerms(first[..., None, None] * H, second[..., None, None] * outer)


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def curvature_correlation(
    networks: Networks,
    x: Tensor,
    y: Tensor,
    loss: str | ScalarLoss = "sse",
    scalarise: Scalarise | None = None,
    max_memory: str | int | None = None,
) -> Comparison:
    """Is E Hess_x loss proportional to G^t? Their correlation, both averaged over the networks and the examples.

    `value` is 1 where it is: exactly for a linear or ReLU network with the squared error, and as l'(f) -> 0 with l''(f)
    constant for others. Positive matrices correlate by default: hold `value` against `null`. Arguments as of
    `input_curvature`, with stacked networks (for example trained ones) in place of one model.

    Example:
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=20)
        >>> round(curvature_correlation(drawn, torch.ones(2, 3), torch.zeros(2)).value, 6)
        1.0
    """
    refuse_batch_dependence(networks.template)
    curvature = geometry = torch.zeros((), dtype=torch.float64, device="cpu")
    for i in range(len(networks)):
        pieces = _pieces(networks.template, networks.one(i), x, y, loss, scalarise, max_memory)
        first, second, g, H = (piece.double().cpu() for piece in pieces)
        curvature = curvature + torch.einsum("n,nij->ij", first, H) + torch.einsum("n,ni,nj->ij", second, g, g)
        geometry = geometry + g.T @ g
    return compare(curvature, geometry)  # sums do for means: the correlation has no scale


def _pieces(
    model: nn.Module,
    values: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: str | ScalarLoss,
    scalarise: Scalarise | None,
    max_memory: str | int | None,
) -> tuple[Tensor, ...]:
    """l'(f) [n], l''(f) [n], grad_x f [n, D] and Hess_x f [n, D, D]."""
    if isinstance(loss, str) and loss not in SCALAR_LOSSES:
        raise InputError(f"loss={loss!r} is not one of {', '.join(SCALAR_LOSSES)}, and not a function")
    of = SCALAR_LOSSES[loss] if isinstance(loss, str) else loss
    if y.dim() != 1 or len(x) != len(y):
        raise InputError(f"x {list(x.shape)} and y {list(y.shape)} do not fit: need [n, *input_shape] and [n]")
    check_reals(x, "x")
    check_labels(y, loss)
    like = next((v for v in values.values() if v.is_floating_point()), x)
    x, y, shape, D = x.detach().to(like), y.detach().to(like), x.shape[1:], x[0].numel()
    if values:
        refuse_mixing(Networks(model, {name: value[None] for name, value in values.items()}, {}), x)
    needed, room = 2 * len(x) * D**2 * x.element_size(), budget(max_memory, x.device)
    if needed > room:
        raise InputError(
            f"the Hessians of {len(x)} inputs of {D} entries need {readable(needed)} of {readable(room)}; "
            "take fewer examples at a time, or raise max_memory"
        )

    def f(flat: Tensor) -> Tensor:
        out = as_rows(call(model, dict(values), (flat.view(1, *shape),)), 1, None, model)
        return scalar_of(out, scalarise)[0]

    def one(flat: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        value = f(flat)
        return grad(of)(value, label), jacfwd(grad(of))(value, label), grad(f)(flat), hessian(f)(flat)

    with differentiable_attention(), second_derivatives(model):
        together = vmap(one, chunk_size=max(1, 4096 // D))  # D directions are pushed forward for every example
        found: tuple[Tensor, ...] = together(x.flatten(1), y)
    return tuple(piece.detach() for piece in found)
