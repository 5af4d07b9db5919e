"""Meta-learned starts as dictionary learning (section 5.4.1): MAML, its first-order form and Reptile.

For a signal y, the inner loop takes a few steps of gradient descent on its mean squared error from theta to theta'(y).
The outer loop moves theta by Adam along

    maml         the gradient of E_y loss(theta'(y)), through the inner steps (second derivatives)
    first-order  the mean of grad loss at theta'(y), as if the inner gradients did not depend on theta
    reptile      theta - E_y theta'(y)

A step is hundreds of small operations: on a GPU it is captured once and replayed.

After it, the atoms of the network at theta (`dictionary`) hold more of the signals' energy: `dictionary_change`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

from biascope.ensembles.graphs import capture
from biascope.fields.atoms import Dictionary, Energy
from biascope.fields.fitting import Coordinates, finite_losses, on_grid, squared_error
from biascope.linalg import principal_angles, subspace_overlap
from biascope.network.derivatives import call
from biascope.network.functional import select_params
from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.limits import Count, FiniteTensor, Positive
from biascope.support.precision import without_autocast
from biascope.support.seeds import generator
from biascope.support.signatures import checked
from biascope.support.tables import facts, number
from biascope.tangent.anchored import copy_of

Params = dict[str, Tensor]
Algorithm = Literal["maml", "first-order", "reptile"]


@dataclass(frozen=True)
class MetaLearned:
    """A start for fast fitting: `model` with the learned weights; losses [steps] after the inner loop, batch means."""

    model: nn.Module = field(repr=False)
    losses: Tensor = field(repr=False)
    algorithm: str
    inner_steps: int
    inner_lr: float
    seed: int

    def _repr_html_(self) -> str:
        """What was learned, for notebooks."""
        rows: dict[str, object] = {"outer steps": len(self.losses), "inner steps": self.inner_steps}
        first, last = float(self.losses[0]), float(self.losses[-1])
        return facts(f"Meta-learning ({self.algorithm})", {**rows, "first loss": first, "last loss": last})


@checked
@without_autocast()
def meta_learn(
    model: nn.Module,
    r: Coordinates,
    signals: FiniteTensor,
    *,
    algorithm: Algorithm = "maml",
    steps: Count = 5000,
    lr: Positive = 1e-5,
    inner_steps: Count = 2,
    inner_lr: Positive = 1e-2,
    batch_size: Count = 3,
    seed: int = 0,
) -> MetaLearned:
    """Learn a start from which every signal of a set is fitted in few steps.

    Memory grows with inner_steps x batch_size for "maml", with batch_size for the others.

    Args:
        model: [..., d] -> [..., c]; not changed.
        r: coordinates [*grid, d].
        signals: [n, *grid], or [n, *grid, c]: the training set, of any size (the paper names 1,000 and 5,000 images).
        algorithm: "maml", "first-order" or "reptile".
        steps: of the outer loop, Adam.
        lr: of the outer loop.
        inner_steps: of gradient descent on all points.
        inner_lr: of the inner loop.
        batch_size: signals per outer step, drawn without replacement within a step.
        seed: of the choice of signals.

    Example:
        >>> from biascope.fields import coordinates
        >>> from biascope.nets import build
        >>> net, r = build("siren", seed=0, in_features=1, hidden=(16, 16)), coordinates(32)
        >>> tones = torch.stack([a * torch.sin(3 * r[:, 0]) for a in (0.5, 0.7, 1.0)])
        >>> found = meta_learn(net, r, tones, steps=50, lr=1e-3)
        >>> bool(found.losses[-1] < found.losses[0])
        True
    """
    net = copy_of(model)
    held = dict(net.named_parameters())
    names = select_params(held, None)
    frozen = {k: v for k, v in {**held, **dict(net.named_buffers())}.items() if k not in names}
    trained = [held[name] for name in names]
    x, y = on_grid(trained[0], r, signals, several=True)

    def loss(params: Params, target: Tensor) -> Tensor:
        return squared_error(call(net, {**frozen, **params}, (x,)), target)

    outer = _outer(loss, algorithm, inner_steps, inner_lr)
    rate = torch.full((), lr, device=y.device) if y.is_cuda else lr  # a captured step can read a tensor only
    update = torch.optim.Adam(trained, lr=rate, capturable=y.is_cuda)
    for p in trained:
        p.grad = torch.zeros_like(p)
    if y.is_cuda:
        _make_moments(update)

    def step(index: Tensor) -> Tensor:
        gradients, value = outer({name: held[name].detach() for name in names}, y[index])
        for name in names:
            held[name].grad.copy_(gradients[name])  # type: ignore[union-attr]
        update.step()
        return value.detach()

    rng, losses = generator(seed, "meta"), []
    moments = [v for entry in update.state.values() for v in entry.values()]
    first = torch.zeros(min(batch_size, len(y)), dtype=torch.long, device=y.device)
    advance = capture(step, first, device=y.device, state=[*trained, *moments], optional=True)
    for _ in progress(range(steps), f"meta-learning ({algorithm})", leave=False):
        index = torch.randperm(len(y), generator=rng, device="cpu")[:batch_size].to(y.device)
        losses.append(advance(index).clone())
    for p in trained:
        p.grad = None
    return MetaLearned(net, finite_losses(losses), algorithm, inner_steps, inner_lr, seed)


def _make_moments(update: torch.optim.Adam) -> None:
    """Adam makes its moments in its first step; of gradients that are zero, it moves nothing."""
    update.step()
    for entry in update.state.values():
        entry["step"].zero_()


def _outer(
    loss: Callable[[Params, Tensor], Tensor], algorithm: Algorithm, inner_steps: int, inner_lr: float
) -> Callable[[Params, Tensor], tuple[Params, Tensor]]:
    """(params, targets [b, n, c]) -> the outer gradient, and the mean loss after the inner loop."""

    def adapted(params: Params, target: Tensor) -> Params:
        for _ in range(inner_steps):
            gradient = grad(loss)(params, target)
            if algorithm != "maml":
                gradient = {name: g.detach() for name, g in gradient.items()}  # a constant for the outer derivative
            params = {name: p - inner_lr * gradient[name] for name, p in params.items()}
        return params

    def mean_loss(params: Params, targets: Tensor) -> Tensor:
        return vmap(lambda target: loss(adapted(params, target), target))(targets).mean()

    def reptile(params: Params, targets: Tensor) -> tuple[Params, Tensor]:
        after = vmap(lambda target: adapted(params, target))(targets)
        value = vmap(loss)(after, targets).mean()
        return {name: p - after[name].mean(0) for name, p in params.items()}, value

    return reptile if algorithm == "reptile" else grad_and_value(mean_loss)


@dataclass(frozen=True)
class DictionaryChange:
    """Two dictionaries on one grid and the same signals.

    before, after: `Energy` of the signals. gain: of the area under E, paired over signals, with its standard error.
    angles_before, angles_after: principal angles between the first k atoms and the span of the centred signals,
    radians, ascending. overlap: of the first k atoms of both, 1 for the same span.
    """

    before: Energy = field(repr=False)
    after: Energy = field(repr=False)
    gain: tuple[float, float]
    angles_before: Tensor = field(repr=False)
    angles_after: Tensor = field(repr=False)
    overlap: float

    def _repr_html_(self) -> str:
        """The areas and angles, for notebooks."""
        rows: dict[str, object] = {"area before": self.before.area, "after": self.after.area}
        rows |= {"gain": number(*self.gain), "overlap of the leading atoms": self.overlap}
        angles = " -> ".join(f"{float(a.mean()):.3f}" for a in (self.angles_before, self.angles_after))
        return facts("Change of a dictionary", {**rows, "mean angle to the signals": angles})


@checked
def dictionary_change(before: Dictionary, after: Dictionary, signals: Tensor, k: Count = 10) -> DictionaryChange:
    """How a dictionary changed for a set of signals [n, *grid]: more energy in leading atoms, smaller angles to them.

    Args:
        before: atoms of the network at its old weights.
        after: at the new ones, on the same grid.
        signals: those the energy is of; their means are taken out.
        k: how many leading atoms are compared with each other and with the span of the signals.

    Example:
        >>> basis = torch.eye(4, dtype=torch.float64)
        >>> one = Dictionary(torch.tensor([4.0, 1e-3, 1e-6, 1e-9]), basis, (4,))
        >>> two = Dictionary(one.values, basis.flip(1), (4,))
        >>> found = dictionary_change(one, two, torch.tensor([[0.0, 0.0, -1.0, 1.0], [0.0, 0.0, 1.0, 2.0]]), k=2)
        >>> found.gain[0] > 0, found.overlap < 1e-12
        (True, True)
    """
    if before.grid != after.grid or k > min(len(before.values), len(after.values)):
        raise InputError(f"k={k} atoms on one grid are needed, not {before} with {len(before.values)} and {after}")
    one, two = before.energy(signals), after.energy(signals)
    x = one.thresholds.log10()
    gains = torch.trapezoid(two.shares - one.shares, x, dim=1) / (x[-1] - x[0])
    n = len(gains)
    error = float(gains.std() / math.sqrt(n)) if n > 1 else math.nan
    rows = before.rows(signals)
    span = (rows - rows.mean(1, keepdim=True)).T
    old, new = (principal_angles(each.atoms[:, :k], span) for each in (before, after))
    overlap = subspace_overlap(before.atoms[:, :k], after.atoms[:, :k])
    return DictionaryChange(one, two, (float(gains.mean()), error), old, new, overlap)
