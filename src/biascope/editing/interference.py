"""Weight disentanglement: does a task vector change the network on its own task's inputs only?

    xi(a) = sum_t E_{x ~ mu_t} dist( f(x; theta0 + a_t tau_t), f(x; theta0 + sum_s a_s tau_s) )

0: the tasks do not disturb one another at these coefficients. With dist = [arg-max differs] it lies between 0 and the
number of tasks. It is about predictors, not accuracy, and it is no property of linear networks: for those and the L2
distance xi(a_1, a_2) = |a_2| E_{mu_1} ||J tau_2|| + |a_1| E_{mu_2} ||J tau_1|| (`properties.leakage`).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from biascope.editing.plane import Head, Output, Plane, chunks, coefficients, per_task
from biascope.editing.vectors import TaskVector
from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.figures import axes_or_new, once
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import grid, number

GRID = tuple(i / 4 for i in range(-12, 13))  # the published 20 points on [-3, 3] contain neither 0 nor 1
Distance = Callable[[Tensor, Tensor], Tensor]  # ([n, c], [n, c]) -> [n]


@dataclass(frozen=True)
class Disentanglement:
    """xi on a grid of coefficients.

    tasks: their names. alphas [A]. distances: {task: [A, ..., A, n_t] (a grid) or [A, n_t] (a line)}: per example, the
    distance between what the task's vector alone and all together make of it. Standard errors are over examples, drawn
    independently for every task.
    """

    tasks: tuple[str, ...]
    alphas: Tensor = field(repr=False)
    distances: dict[str, Tensor] = field(repr=False)
    distance: str
    along: str

    @property
    def xi(self) -> Tensor:
        """The error, [A, ..., A] with one axis per task, or [A] along a line; float64."""
        return sum(self.by_task().values(), torch.zeros((), device="cpu"))

    @property
    def standard_error(self) -> Tensor:
        """Standard error of `xi`, of the same shape; NaN for a task of one example."""
        parts = map(Tensor.double, self.distances.values())
        squares = [
            d.var(-1) / d.shape[-1] if d.shape[-1] > 1 else torch.full(d.shape[:-1], torch.nan, device="cpu")
            for d in parts
        ]
        return sum(squares, torch.zeros((), device="cpu")).sqrt()

    def by_task(self) -> dict[str, Tensor]:
        """What every task's inputs add to xi."""
        return {task: d.double().mean(-1) for task, d in self.distances.items()}

    @checked
    def box(self, low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
        """Mean of xi over the coefficients between low and high (where they are searched), and its standard error."""
        eps = 1e-6  # a grid in float32 is a little beside its numbers
        inside = ((self.alphas >= low - eps) & (self.alphas <= high + eps)).nonzero()[:, 0]
        if not len(inside):
            raise InputError(f"no coefficient of the grid lies between {low:g} and {high:g}")
        mean = square = 0.0
        for d in self.distances.values():
            for axis in range(d.dim() - 1):
                d = d.index_select(axis, inside.to(d.device))
            per_example = d.double().reshape(-1, d.shape[-1]).mean(0)
            mean += float(per_example.mean())
            square += float(per_example.var() / len(per_example)) if len(per_example) > 1 else float("nan")
        return mean, math.sqrt(square)

    def plot(self, ax: Any = None) -> Any:
        """Heat map (two tasks) with the box of the search, or the curve along a line; returns the figure."""
        xi, alphas = self.xi.numpy(), self.alphas.numpy()
        if xi.ndim > 2:
            raise InputError(f"xi has {xi.ndim} axes: plot it with along='line', or two tasks at a time")
        ax = axes_or_new(ax, (3.6, 3.0))
        if xi.ndim == 1:
            ax.errorbar(alphas, xi, self.standard_error.numpy(), color="#0072B2", capsize=2)
            every = r"coefficient $\alpha$ of all tasks"
            ax.set_xlabel(every if self.along == "line" else rf"$\alpha$, {self.tasks[0]}")
            ax.set_ylabel(r"disentanglement error $\xi$")
            return once(ax.figure)
        # a_1 (rows of xi) goes right, as in the paper
        image = ax.pcolormesh(alphas, alphas, xi.T, shading="nearest", cmap="viridis", vmin=0)
        ax.plot([0, 1, 1, 0, 0], [0, 0, 1, 1, 0], color="red", linewidth=1.2)  # where coefficients are searched
        ax.set_xlabel(rf"$\alpha_1$, {self.tasks[0]}")
        ax.set_ylabel(rf"$\alpha_2$, {self.tasks[1]}")
        ax.set_aspect("equal")
        ax.figure.colorbar(image, ax=ax, label=r"$\xi(\alpha_1, \alpha_2)$")
        return once(ax.figure)

    def _repr_html_(self) -> str:
        """xi at every coefficient, for notebooks."""
        xi, error = self.xi.cpu(), self.standard_error.cpu()
        title = f"Disentanglement error of {', '.join(self.tasks)} ({self.distance})"
        if xi.dim() == 1:
            cells = [(a, number(v, e)) for a, v, e in zip(self.alphas.tolist(), xi.tolist(), error.tolist())]
            return grid(title, ["a", "xi"], cells)
        if not bool(((self.alphas >= 0) & (self.alphas <= 1)).any()):
            return grid(title, ["coefficients", "largest xi"], [(len(self.alphas), float(xi.max()))])
        return grid(title, ["mean xi on [0, 1]", "largest xi"], [(number(*self.box()), float(xi.max()))])


@checked
@without_autocast()
def disentanglement(
    model: nn.Module,
    vectors: Mapping[str, TaskVector],
    data: Mapping[str, Any],
    alphas: Sequence[float] | Tensor = GRID,
    *,
    distance: Literal["argmax", "l2", "kl"] | Distance = "argmax",
    along: Literal["grid", "line"] = "grid",
    heads: Mapping[str, Head] | None = None,
    output: Output | None = None,
    batch_size: int = 256,
) -> Disentanglement:
    """The weight disentanglement error of any number of tasks, with standard errors.

    Costs one pass over all data per grid point, and one over a task's own per coefficient; for a linearised network
    (`bs.linearize`) one product J tau per task and point of the data in all, whatever the grid. Data are read once.

    Args:
        model: the network at theta0, in eval mode; a `bs.linearize`d one for tangent and post-hoc task vectors.
        vectors: {task: task vector}.
        data: {task: inputs}: a tensor [n, ...], (x, y), or an iterable of batches; labels are not used.
        alphas: coefficients, the same for every task.
        distance: "argmax": 1 where the predicted class differs (of one output: its sign); "l2": ||f - f'||; "kl":
            KL(softmax f || softmax f') in nats, f of the task alone; or a function ([n, c], [n, c]) -> [n].
        along: "grid": all combinations, [A, ..., A]; "line": all coefficients equal, [A].
        heads: {task: function [n, c] -> [n, classes]}, where every task has its own head behind the network.
        output: how to get a tensor [n, c] from what the model returns.
        batch_size: most examples in one pass.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> tau = {"left": TaskVector.from_tensors({"weight": torch.tensor([[1.0, 0.0]])}),
        ...        "right": TaskVector.from_tensors({"weight": torch.tensor([[0.0, 2.0]])})}
        >>> x = {"left": torch.tensor([[1.0, 0.0]] * 3), "right": torch.tensor([[1.0, 1.0]] * 3)}
        >>> disentanglement(net, tau, x, [0.0, 1.0], distance="l2").xi.numpy().round(4)  # left disturbs right
        array([[0., 0.],
               [1., 1.]])
    """
    summary, compare = _distance(distance)
    names, steps = tuple(vectors), coefficients(alphas)
    data = per_task(data, names, "data")
    heads = per_task(heads, names, "heads") if heads is not None else {}
    A, T = len(steps), len(names)
    points = [(i,) * T for i in range(A)] if along == "line" else list(itertools.product(range(A), repeat=T))
    plane = Plane(model, vectors, output, batch_size, rows=distance in {"argmax", "kl"})
    raw = {task: plane.on(chunks(data[task], f"data[{task!r}]", batch_size)) for task in names}

    def predictions(task: str, a: Sequence[float]) -> Tensor:
        out = raw[task](a)
        if task in heads:
            with torch.no_grad():
                out = heads[task](out)
        return summary(out)

    alone = {
        task: [predictions(task, [a if s == t else 0.0 for s in range(T)]) for a in steps]
        for t, task in enumerate(names)
    }
    distances: dict[str, list[Tensor]] = {task: [] for task in names}
    for point in progress(points, "disentanglement error", leave=False):
        a = [steps[i] for i in point]
        for t, task in enumerate(names):
            distances[task].append(compare(alone[task][point[t]], predictions(task, a)).cpu())
    shape = (A,) if along == "line" else (A,) * T
    return Disentanglement(
        names,
        torch.tensor(steps, dtype=torch.float64, device="cpu"),
        {task: torch.stack(d).reshape(*shape, -1) for task, d in distances.items()},
        distance if isinstance(distance, str) else getattr(distance, "__name__", "distance"),
        along,
    )


@checked
def disentanglement_error(
    model: nn.Module,
    tv1: TaskVector,
    tv2: TaskVector,
    data1: Any,
    data2: Any,
    alphas: Sequence[float] | Tensor = GRID,
    **options: Any,
) -> Tensor:
    """xi(a_1, a_2) of two tasks, [len(alphas), len(alphas)], a_1 down the rows; float64.

    `options` go to `disentanglement`, which also gives standard errors and takes any number of tasks.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> e1, e2 = (TaskVector.from_tensors({"weight": row[None]}) for row in torch.eye(2))
        >>> xi = disentanglement_error(net, e1, e2, torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), [-1.0, 1.0])
        >>> xi.tolist()  # every vector acts on its own task's inputs only
        [[0.0, 0.0], [0.0, 0.0]]
    """
    pair = {"task 1": tv1, "task 2": tv2}
    return disentanglement(model, pair, {"task 1": data1, "task 2": data2}, alphas, **options).xi


def _distance(distance: Literal["argmax", "l2", "kl"] | Distance) -> tuple[Callable[[Tensor], Tensor], Distance]:
    """What is kept of the outputs [n, c], and how two of those are compared, [n]."""
    if distance == "argmax":
        return predicted_class, lambda a, b: (a != b).float() + 0 * (a + b)  # NaN stays NaN
    if distance == "l2":
        return lambda out: out, lambda a, b: torch.linalg.vector_norm(a - b, dim=1)
    if distance == "kl":
        return lambda out: out.log_softmax(1), _kl

    def given(a: Tensor, b: Tensor) -> Tensor:
        d = distance(a, b)
        if d.shape != (len(a),):
            raise InputError(f"the distance must return one number per example, shape [{len(a)}], not {list(d.shape)}")
        return d

    return lambda out: out, given


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL [n] of log-probabilities [n, c]; a class of probability 0, such as a masked one, adds 0."""
    return torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum(1)


def predicted_class(out: Tensor) -> Tensor:
    """The class that [n, c] outputs predict, as numbers [n]: arg-max, or the sign of one output.

    NaN where there is none: a NaN or +infinity in the row, or nothing but -infinity, which masks a class.
    """
    label = out.argmax(1) if out.shape[1] > 1 else (out[:, 0] > 0).long()
    return torch.where(out.amax(1).isfinite(), label.double(), torch.nan)  # the maximum of a NaN is NaN
