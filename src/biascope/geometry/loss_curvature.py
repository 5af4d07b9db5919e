"""The curvature of the loss in input space, how it moves under gradient flow, and G (GIH paper, App. A.3).

Hess_x loss = l'(f) Hess_x f + l''(f) g g^T, g = grad_x f. Where the first term is small the second dominates, and its
average over networks is l'' G. For the squared error l'' = 1; for ReLU networks Hess_x f = 0 almost everywhere, so the
second term is all there is. The derivative along theta-dot has three parts:

    l''(f) f-dot Hess_x f + l'(f) Hess_x f-dot     the function's own curvature; 0 for ReLU networks almost everywhere
    l'''(f) f-dot g g^T                            the loss's third derivative
    l''(f) (u g^T + g u^T),   u = d/dt grad_x f    the geometry: Delta, averaged over networks, where l'' is constant

The paper drops the first (l' ~ 0 late in training) and the second (l''' ~ 0). For the squared error l''' = 0. For the
logistic loss |l'''| = |s (1 - s) (1 - 2 s)| is at most 1 / (6 sqrt(3)) = 0.0962 (the paper's 1/8 holds, but is not
sharp), against at most 1/4 for l'': whether it can be dropped is for `geometry_share` to say, at every time.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jvp, vmap

from biascope.ensembles import Networks
from biascope.ensembles.evaluate import Scalarise, scalar_of
from biascope.ensembles.trust import refuse_mixing
from biascope.geometry.evolution import LOSSES, Loss, check_examples
from biascope.geometry.measures import Comparison, compare
from biascope.network.derivatives import ThirdDerivatives, call, differentiable_attention, second_derivatives
from biascope.network.door import refuse_batch_dependence
from biascope.network.functional import as_rows, explained
from biascope.support.errors import InputError
from biascope.support.limits import FiniteTensor, check_shapes
from biascope.support.memory import budget, readable
from biascope.support.precision import arithmetic
from biascope.support.signatures import checked

Params = dict[str, Tensor]
Examples = tuple[Tensor, Tensor]  # inputs [n, *input_shape] and labels [n]
BATCH = 1024  # training examples at a time


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
        return _share(self.gradient_term, self.function_term)

    @property
    def gradient_share(self) -> float:
        """Mean of `shares` over the examples."""
        return float(self.shares.mean())


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
        return _share(self.geometry_term, self.third_term)

    @property
    def geometry_share(self) -> float:
        """Mean of `shares` over the examples."""
        return float(self.shares.mean())


def _share(kept: Tensor, left: Tensor) -> Tensor:
    a, b = (term.double().flatten(-2).norm(dim=-1) for term in (left, kept))
    return torch.where(a + b > 0, b / (a + b), 0.0)


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def input_curvature(
    model: nn.Module,
    x: FiniteTensor,
    y: Tensor,
    loss: Loss = "sse",
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
    one = y.dim() == 0
    pieces = _Curvature(model, loss, scalarise, max_memory).pieces(
        *_split(model), (x[None], y[None]) if one else (x, y)
    )
    first, second, g, H = (piece[0] if one else piece for piece in pieces)
    return CurvatureTerms(first[..., None, None] * H, second[..., None, None] * _outer(g, g))


@checked
@arithmetic("float32")
def curvature_correlation(
    networks: Networks,
    x: FiniteTensor,
    y: FiniteTensor,
    loss: Loss = "sse",
    scalarise: Scalarise | None = None,
    max_memory: str | int | None = None,
) -> Comparison:
    """Is E Hess_x loss proportional to G^t? Their correlation, both averaged over the networks and the examples.

    `value` is 1 where it is: exactly for a linear or ReLU network with the squared error, and as l'(f) -> 0 with l''(f)
    constant for others. Positive matrices correlate by default: compare `value` with `null`. Arguments as of
    `input_curvature`, with stacked networks (for example trained ones) in place of one model.

    Example:
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=20)
        >>> round(curvature_correlation(drawn, torch.ones(2, 3), torch.zeros(2)).value, 6)
        1.0
    """
    found = _Curvature(networks.template, loss, scalarise, max_memory)
    curvature = geometry = torch.zeros((), dtype=torch.float64, device="cpu")
    for i in range(len(networks)):
        first, second, g, H = (piece.double().cpu() for piece in found.pieces(*_one(networks, i), (x, y)))
        curvature = curvature + torch.einsum("n,nij->ij", first, H) + torch.einsum("n,ni,nj->ij", second, g, g)
        geometry = geometry + g.T @ g
    return compare(curvature, geometry)  # sums do for means: the correlation has no scale


@checked
@arithmetic("float32")
def curvature_evolution(
    model: nn.Module,
    x: FiniteTensor,
    y: Tensor,
    x_train: FiniteTensor,
    y_train: FiniteTensor,
    loss: Loss = "sse",
    scalarise: Scalarise | None = None,
    max_memory: str | int | None = None,
) -> EvolutionTerms:
    """The three terms of d/dt Hess_x loss at every example, under theta-dot = -grad of the summed training loss.

    Arguments as of `input_curvature`, and what the network is trained on: x_train [m, *input_shape] with labels y_train
    [m]. Frozen parameters do not move. The Hessians, their derivatives and the result hold 5 n D^2 numbers.

    Example:
        >>> net, x = nn.Linear(2, 1), torch.ones(3, 2)
        >>> terms = curvature_evolution(net, x, torch.zeros(3), x, torch.zeros(3))
        >>> terms.total.shape, terms.geometry_share
        (torch.Size([3, 2, 2]), 1.0)
    """
    one = y.dim() == 0
    at = (x[None], y[None]) if one else (x, y)
    pieces = _Curvature(model, loss, scalarise, max_memory).pieces(*_split(model), at, (x_train, y_train))
    first, second, g, H, dfirst, dsecond, u, dH = (piece[0] if one else piece for piece in pieces)
    cross = _outer(u, g)
    return EvolutionTerms(
        dfirst[..., None, None] * H + first[..., None, None] * dH,
        dsecond[..., None, None] * _outer(g, g),
        second[..., None, None] * (cross + cross.mT),
    )


@checked
@arithmetic("float32")
def evolution_correlation(
    networks: Networks,
    x: FiniteTensor,
    y: FiniteTensor,
    x_train: FiniteTensor,
    y_train: FiniteTensor,
    loss: Loss = "sse",
    scalarise: Scalarise | None = None,
    max_memory: str | int | None = None,
) -> Comparison:
    """Is E d/dt Hess_x loss proportional to Delta^t? Their correlation, both averaged over networks and examples.

    Delta^t = E[u g^T + g u^T]. `value` is 1 where the paper's two approximations cost nothing: exactly for a linear or
    ReLU network with the squared error. Both matrices mostly have one sign, so compare `value` with `null`. Arguments
    as of `curvature_evolution`, with stacked networks (for example trained ones) in place of one model.

    Example:
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=20)
        >>> x = torch.eye(3)
        >>> round(evolution_correlation(drawn, x, torch.zeros(3), x, torch.zeros(3)).value, 6)
        1.0
    """
    found = _Curvature(networks.template, loss, scalarise, max_memory)
    curvature = geometry = torch.zeros((), dtype=torch.float64, device="cpu")
    for i in range(len(networks)):
        pieces = found.pieces(*_one(networks, i), (x, y), (x_train, y_train))
        first, second, g, H, dfirst, dsecond, u, dH = (piece.double().cpu() for piece in pieces)
        half = torch.einsum("n,ni,nj->ij", second, u, g)
        curvature = curvature + torch.einsum("n,nij->ij", dfirst, H) + torch.einsum("n,nij->ij", first, dH)
        curvature = curvature + torch.einsum("n,ni,nj->ij", dsecond, g, g) + half + half.T
        geometry = geometry + u.T @ g + g.T @ u
    return compare(curvature, geometry)


def _outer(u: Tensor, g: Tensor) -> Tensor:
    return u[..., :, None] * g[..., None, :]


def _split(model: nn.Module) -> tuple[Params, Params]:
    """What is trained, and all other parameters and buffers."""
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    others = (*model.named_parameters(), *model.named_buffers())
    return params, {name: v.detach() for name, v in others if name not in params}


def _one(networks: Networks, i: int) -> tuple[Params, Params]:
    params, frozen = ({k: v[i].detach() for k, v in part.items()} for part in (networks.params, networks.buffers))
    return params, frozen


class _Curvature:
    """A network, its loss, and their derivatives by the input and along gradient flow."""

    def __init__(self, model: nn.Module, loss: Loss, scalarise: Scalarise | None, max_memory: str | int | None) -> None:
        self.model, self.named, self.scalarise, self.max_memory = model, loss, scalarise, max_memory
        self.loss = LOSSES[loss] if isinstance(loss, str) else loss

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

    def pieces(self, params: Params, frozen: Params, at: Examples, train: Examples | None = None) -> tuple[Tensor, ...]:
        """l' [n], l'' [n], g [n, D], Hess_x f [n, D, D]; with data to train on, their derivatives along the flow."""
        values = {**params, **frozen}
        like = next((v for v in values.values() if v.is_floating_point()), at[0])
        check_examples(*at, self.named)
        x, y = (t.detach().to(like) for t in at)
        shape, D = x.shape[1:], x[0].numel()
        needed, room = (5 if train else 2) * len(x) * D**2 * x.element_size(), budget(self.max_memory, x.device)
        if needed > room:
            raise InputError(f"Hessians of {len(x)} inputs of {D} entries need {readable(needed)} of {readable(room)}")
        refuse_batch_dependence(self.model)
        if train:
            with torch.no_grad(), explained(self.model, x[:1].clone()):
                self.f(values, x[:1].clone())
        if values:
            refuse_mixing(Networks(self.model, {k: v[None] for k, v in values.items()}, {}), x)
        direction = self._direction(params, frozen, x, train) if train else {}

        def one(flat: Tensor, label: Tensor) -> tuple[Tensor, ...]:
            def now(p: Params) -> tuple[Tensor, ...]:
                def f(z: Tensor) -> Tensor:
                    return self.f({**frozen, **p}, z.view(1, *shape))[0]

                value = f(flat)
                slopes = grad(self.loss)(value, label), jacfwd(grad(self.loss))(value, label)
                return (*slopes, grad(f)(flat), hessian(f)(flat))

            if train is None:
                return now(params)
            found = jvp(now, (params,), (direction,))
            return (*found[0], *found[1])

        third = ThirdDerivatives() if train else nullcontext()
        with differentiable_attention(), second_derivatives(self.model), third:
            at_once = max(1, (2048 if train else 4096) // D)  # D directions are pushed forward for every example
            found: tuple[Tensor, ...] = vmap(one, chunk_size=at_once)(x.flatten(1), y)
        return tuple(piece.detach() for piece in found)

    def _direction(self, params: Params, frozen: Params, x: Tensor, train: Examples) -> Params:
        check_examples(*train, self.named, "x_train", "y_train")
        check_shapes("x [n, ...], x_train [m, ...]", x, train[0])
        if not params:
            raise InputError(f"{type(self.model).__name__} has no parameter that is trained: nothing moves")
        return self.flow(params, frozen, train[0].detach().to(x), train[1].detach().to(x))
