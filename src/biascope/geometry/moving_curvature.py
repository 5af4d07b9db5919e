"""How the curvature of the loss in input space moves under gradient flow (GIH paper, App. A.3).

The derivative of Hess_x loss = l'(f) Hess_x f + l''(f) g g^T along theta-dot, with g = grad_x f, has three parts:

    l''(f) f-dot Hess_x f + l'(f) Hess_x f-dot     the function's own curvature; 0 for ReLU networks almost everywhere
    l'''(f) f-dot g g^T                            the loss's third derivative
    l''(f) (u g^T + g u^T),   u = d/dt grad_x f    the geometry: Delta, averaged over networks, where l'' is constant

The paper drops the first (l' ~ 0 late in training) and the second (l''' ~ 0). For the squared error l''' = 0. For the
logistic loss |l'''| = |s (1 - s) (1 - 2 s)| is at most 1 / (6 sqrt(3)) = 0.0962 (the paper's 1/8 holds, but is not
sharp), against at most 1/4 for l'': whether it can be dropped is for `geometry_share` to say, at every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jvp, vmap

from biascope.derivatives import ThirdDerivatives, call, differentiable_attention, second_derivatives
from biascope.ensembles import Networks, scalar_of
from biascope.ensembles.evaluate import Scalarise
from biascope.ensembles.trust import refuse_mixing
from biascope.errors import InputError
from biascope.functional import as_rows, explained
from biascope.geometry.curvature_link import SCALAR_LOSSES, ScalarLoss
from biascope.geometry.losses import check_labels, check_reals
from biascope.geometry.measures import Comparison, compare
from biascope.memory import budget, readable
from biascope.precision import arithmetic
from biascope.refusals import refuse_batch_dependence
from biascope.signatures import checked

Params = dict[str, Tensor]
BATCH = 1024  # training examples at a time


@dataclass(frozen=True)
class EvolutionTerms:
    """The three terms of d/dt Hess_x loss, [n, D, D] for a batch and [D, D] for one example, and the whole."""

    function_term: Tensor = field(repr=False)
    third_term: Tensor = field(repr=False)
    geometry_term: Tensor = field(repr=False)

    @property
    def total(self) -> Tensor:
        """d/dt Hess_x loss."""
        return self.function_term + self.third_term + self.geometry_term

    @property
    def shares(self) -> Tensor:
        """||geometry|| / (||third|| + ||geometry||), Frobenius, of every example: 1 where l''' can go; 0 for 0 / 0."""
        a, b = (term.double().flatten(-2).norm(dim=-1) for term in (self.third_term, self.geometry_term))
        return torch.where(a + b > 0, b / (a + b), 0.0)

    @property
    def geometry_share(self) -> float:
        """Mean of `shares` over the examples."""
        return float(self.shares.mean())


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def curvature_evolution(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    x_train: Tensor,
    y_train: Tensor,
    loss: str | ScalarLoss = "sse",
    scalarise: Scalarise | None = None,
    max_memory: str | int | None = None,
) -> EvolutionTerms:
    """The three terms of d/dt Hess_x loss at every example, under theta-dot = -grad of the summed training loss.

    Args:
        model: in eval mode, as far as batch normalisation and dropout are concerned; frozen parameters do not move.
        x: inputs [n, *input_shape] with labels y [n], or one input [*input_shape] with a label y of no dimension.
        y: labels; -1 and +1 for "logistic".
        x_train: [m, *input_shape], what the network is trained on.
        y_train: its labels [m].
        loss: "sse" (half the square), "logistic", or a function (f, y) -> loss of numbers.
        scalarise: outputs [n, c] -> [n]; one output, or the difference of two logits, by default.
        max_memory: for example "4GB"; the Hessians, their derivatives and the result hold 5 n D^2 numbers.

    Example:
        >>> net, x = nn.Linear(2, 1), torch.ones(3, 2)
        >>> terms = curvature_evolution(net, x, torch.zeros(3), x, torch.zeros(3))
        >>> terms.total.shape, terms.geometry_share
        (torch.Size([3, 2, 2]), 1.0)
    """
    refuse_batch_dependence(model)
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    others = (*model.named_parameters(), *model.named_buffers())
    frozen = {name: v.detach() for name, v in others if name not in params}
    one = y.dim() == 0
    x, y = (x[None], y[None]) if one else (x, y)
    found = _Moving(model, loss, scalarise).pieces(params, frozen, (x, y), (x_train, y_train), max_memory)
    first, second, g, H, dfirst, dsecond, u, dH = (piece[0] if one else piece for piece in found)
    cross = u[..., :, None] * g[..., None, :]
    return EvolutionTerms(
        dfirst[..., None, None] * H + first[..., None, None] * dH,
        dsecond[..., None, None] * (g[..., :, None] * g[..., None, :]),
        second[..., None, None] * (cross + cross.mT),
    )


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def evolution_correlation(
    networks: Networks,
    x: Tensor,
    y: Tensor,
    x_train: Tensor,
    y_train: Tensor,
    loss: str | ScalarLoss = "sse",
    scalarise: Scalarise | None = None,
    max_memory: str | int | None = None,
) -> Comparison:
    """Is E d/dt Hess_x loss proportional to Delta^t? Their correlation, both averaged over networks and examples.

    Delta^t = E[u g^T + g u^T]. `value` is 1 where the paper's two approximations cost nothing: exactly for a linear or
    ReLU network with the squared error. Both matrices mostly have one sign, so hold `value` against `null`. Arguments
    as of `curvature_evolution`, with stacked networks (for example trained ones) in place of one model.

    Example:
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=20)
        >>> x = torch.eye(3)
        >>> round(evolution_correlation(drawn, x, torch.zeros(3), x, torch.zeros(3)).value, 6)
        1.0
    """
    refuse_batch_dependence(networks.template)
    moving = _Moving(networks.template, loss, scalarise)
    curvature = geometry = torch.zeros((), dtype=torch.float64, device="cpu")
    for i in range(len(networks)):
        params, frozen = ({k: v[i].detach() for k, v in part.items()} for part in (networks.params, networks.buffers))
        pieces = moving.pieces(params, frozen, (x, y), (x_train, y_train), max_memory)
        first, second, g, H, dfirst, dsecond, u, dH = (piece.double().cpu() for piece in pieces)
        half = torch.einsum("n,ni,nj->ij", second, u, g)
        curvature = curvature + torch.einsum("n,nij->ij", dfirst, H) + torch.einsum("n,nij->ij", first, dH)
        curvature = curvature + torch.einsum("n,ni,nj->ij", dsecond, g, g) + half + half.T
        geometry = geometry + u.T @ g + g.T @ u
    return compare(curvature, geometry)  # sums do for means: the correlation has no scale


class _Moving:
    """A network, its loss and their derivatives along gradient flow."""

    def __init__(self, model: nn.Module, loss: str | ScalarLoss, scalarise: Scalarise | None) -> None:
        if isinstance(loss, str) and loss not in SCALAR_LOSSES:
            raise InputError(f"loss={loss!r} is not one of {', '.join(SCALAR_LOSSES)}, and not a function")
        self.model, self.named, self.scalarise = model, loss, scalarise
        self.loss = SCALAR_LOSSES[loss] if isinstance(loss, str) else loss

    def f(self, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Scalar outputs [n]."""
        out = as_rows(call(self.model, dict(values), (x,)), len(x), None, self.model)
        return scalar_of(out, self.scalarise)

    def flow(self, params: Params, frozen: Params, x: Tensor, y: Tensor) -> Params:
        """theta-dot: minus the gradient of the summed loss over x [m, ...]."""

        def total(p: Params, inputs: Tensor, labels: Tensor) -> Tensor:
            return vmap(self.loss)(self.f({**frozen, **p}, inputs), labels).sum()

        made = {name: torch.zeros_like(p) for name, p in params.items()}
        for start in range(0, len(x), BATCH):
            slope = grad(total)(params, x[start : start + BATCH], y[start : start + BATCH])
            made = {name: v - slope[name].detach() for name, v in made.items()}
        return made

    def pieces(
        self,
        params: Params,
        frozen: Params,
        at: tuple[Tensor, Tensor],
        train: tuple[Tensor, Tensor],
        max_memory: str | int | None,
    ) -> tuple[Tensor, ...]:
        """l' [n], l'' [n], g [n, D], Hess_x f [n, D, D], and the derivative of each along the flow."""
        if not params:
            raise InputError(f"{type(self.model).__name__} has no parameter that is trained: nothing moves")
        like = next(iter(params.values()))
        x, y = self._checked(at, like, "x", "y")
        x_train, y_train = self._checked(train, like, "x_train", "y_train")
        shape, D = x.shape[1:], x[0].numel()
        needed, room = 5 * len(x) * D**2 * x.element_size(), budget(max_memory, x.device)
        if needed > room:
            raise InputError(
                f"the Hessians of {len(x)} inputs of {D} entries and their derivatives need {readable(needed)} of "
                f"{readable(room)}; take fewer examples at a time, or raise max_memory"
            )
        if x_train.shape[1:] != shape:
            raise InputError(f"x {list(x.shape)} and x_train {list(x_train.shape)} must be of one input_shape")
        with torch.no_grad(), explained(self.model, x[:1].clone()):
            self.f({**frozen, **params}, x[:1].clone())
        refuse_mixing(Networks(self.model, *({k: v[None] for k, v in part.items()} for part in (params, frozen))), x)
        direction = self.flow(params, frozen, x_train, y_train)

        def one(flat: Tensor, label: Tensor) -> tuple[Tensor, ...]:
            def now(p: Params) -> tuple[Tensor, ...]:
                def f(z: Tensor) -> Tensor:
                    return self.f({**frozen, **p}, z.view(1, *shape))[0]

                value = f(flat)
                slopes = grad(self.loss)(value, label), jacfwd(grad(self.loss))(value, label)
                return (*slopes, grad(f)(flat), hessian(f)(flat))

            found = jvp(now, (params,), (direction,))
            return (*found[0], *found[1])

        with differentiable_attention(), second_derivatives(self.model), ThirdDerivatives():
            together = vmap(one, chunk_size=max(1, 2048 // D))  # D directions are pushed forward for every example
            found: tuple[Tensor, ...] = together(x.flatten(1), y)
        return tuple(piece.detach() for piece in found)

    def _checked(self, pair: tuple[Tensor, Tensor], like: Tensor, *names: str) -> tuple[Tensor, Tensor]:
        x, y = pair
        if y.dim() != 1 or len(x) != len(y):
            raise InputError(
                f"{names[0]} {list(x.shape)} and {names[1]} {list(y.shape)} do not fit: need [n, *input_shape] and [n]"
            )
        check_reals(x, names[0])
        check_labels(y, self.named, names[1])
        return x.detach().to(like), y.detach().to(like)
