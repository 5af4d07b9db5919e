"""Meta-learned starts as dictionary learning (section 5.4.1): MAML, its first-order form and Reptile.

For a signal y, the inner loop takes a few steps of gradient descent on its mean squared error from theta to theta'(y).
The outer loop moves theta by Adam along

    maml         the gradient of E_y loss(theta'(y)), through the inner steps (second derivatives)
    first-order  the mean of grad loss at theta'(y), as if the inner gradients did not depend on theta
    reptile      theta - E_y theta'(y)

After it, the atoms of the network at theta (`dictionary`) hold more of the signals' energy: `dictionary_change`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

from biascope.derivatives import call
from biascope.errors import InputError
from biascope.fields.dictionary import Dictionary, Energy
from biascope.functional import select_params
from biascope.linalg import principal_angles, subspace_overlap
from biascope.linearize.anchored import copy_of
from biascope.precision import without_autocast
from biascope.progress import progress
from biascope.seeds import generator
from biascope.signatures import checked
from biascope.tables import facts, number

Params = dict[str, Tensor]
ALGORITHMS = ("maml", "first-order", "reptile")


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
    r: Tensor,
    signals: Tensor,
    *,
    algorithm: str = "maml",
    steps: int = 5000,
    lr: float = 1e-5,
    inner_steps: int = 2,
    inner_lr: float = 1e-2,
    batch_size: int = 3,
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
    if algorithm not in ALGORITHMS:
        raise InputError(f"algorithm={algorithm!r} is not known; choose one of {', '.join(map(repr, ALGORITHMS))}")
    if min(steps, inner_steps, batch_size) < 1 or not (lr > 0 and inner_lr > 0):
        raise InputError(
            f"steps={steps}, inner_steps={inner_steps}, batch_size={batch_size}, lr={lr:g}, inner_lr={inner_lr:g}: "
            "all must be positive"
        )
    net = copy_of(model)
    held = dict(net.named_parameters())
    names = select_params(held, None)
    frozen = {k: v for k, v in {**held, **dict(net.named_buffers())}.items() if k not in names}
    trained = [held[name] for name in names]
    x, y = _signals(trained[0], r, signals)

    def loss(params: Params, target: Tensor) -> Tensor:
        out = call(net, {**frozen, **params}, (x,))
        if out.shape != target.shape:
            raise InputError(f"the network gives {list(out.shape)} on the grid, a signal has {list(target.shape)}")
        error: Tensor = (out - target).square().mean()
        return error

    outer = _outer(loss, algorithm, inner_steps, inner_lr)
    update = torch.optim.Adam(trained, lr=lr)
    rng, losses = generator(seed, "meta"), []
    for _ in progress(range(steps), f"meta-learning ({algorithm})", leave=False):
        index = torch.randperm(len(y), generator=rng, device="cpu")[:batch_size].to(y.device)
        gradients, value = outer({name: held[name].detach() for name in names}, y[index])
        for name in names:
            held[name].grad = gradients[name]
        update.step()
        losses.append(value.detach())
    for p in trained:
        p.grad = None
    found = torch.stack(losses).double().cpu()
    if not bool(found.isfinite().all()):
        bad = int((~found.isfinite()).nonzero()[0])
        raise InputError(f"the loss became {found[bad]:g} in step {bad}: use a smaller lr or inner_lr")
    return MetaLearned(net, found, algorithm, inner_steps, inner_lr, seed)


def _outer(
    loss: Callable[[Params, Tensor], Tensor], algorithm: str, inner_steps: int, inner_lr: float
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
        after: Tensor = vmap(lambda target: loss(adapted(params, target), target))(targets).mean()
        return after

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
def dictionary_change(before: Dictionary, after: Dictionary, signals: Tensor, k: int = 10) -> DictionaryChange:
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
    if before.grid != after.grid:
        raise InputError(f"the dictionaries live on grids {list(before.grid)} and {list(after.grid)}: give one grid")
    if not 1 <= k <= min(len(before.values), len(after.values)):
        raise InputError(f"k={k} must lie between 1 and {min(len(before.values), len(after.values))}")
    one, two = before.energy(signals), after.energy(signals)
    x = one.thresholds.log10()
    gains = torch.trapezoid(two.shares - one.shares, x, dim=1) / (x[-1] - x[0])
    n = len(gains)
    error = float(gains.std() / math.sqrt(n)) if n > 1 else math.nan
    rows = before.rows(signals)
    span = (rows - rows.mean(1, keepdim=True)).T
    return DictionaryChange(
        one,
        two,
        (float(gains.mean()), error),
        principal_angles(before.atoms[:, :k], span),
        principal_angles(after.atoms[:, :k], span),
        subspace_overlap(before.atoms[:, :k], after.atoms[:, :k]),
    )


def _signals(like: Tensor, r: Tensor, signals: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates [N, d] and signals [n, N, c] where the network is."""
    shape = tuple(r.shape[:-1])
    if r.dim() < 2 or tuple(signals.shape[1 : len(shape) + 1]) != shape or signals.dim() > len(shape) + 2:
        raise InputError(
            f"coordinates {list(r.shape)} and signals {list(signals.shape)} do not belong together: give [*grid, d] "
            "and [n, *grid] or [n, *grid, c]"
        )
    if not len(signals) or not bool(torch.isfinite(signals).all()):
        raise InputError("signals is empty or has a NaN or infinity")
    N = math.prod(shape)
    return r.detach().reshape(N, -1).to(like), signals.detach().reshape(len(signals), N, -1).to(like)
