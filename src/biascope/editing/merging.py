"""Editing by arithmetic: addition, negation, analogies and averages, with the coefficient found on held-out data.

theta = theta0 + a sum_t tau_t with one coefficient for all tasks (Eq. 6.3 leaves `a` out), theta0 - a tau to forget.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from biascope.editing.interference import predicted_class
from biascope.editing.plane import Head, Output, Plane, coefficients, labelled, mean_and_error, per_task
from biascope.editing.vectors import TaskVector
from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import grid, number

SEARCH = tuple(i / 20 for i in range(21))  # 0, 0.05, ..., 1
Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs [n, c], labels [n, ...]) -> scores [n], higher is better


@checked
def combine(vectors: Sequence[TaskVector], scales: Sequence[float]) -> TaskVector:
    """sum_i scales[i] vectors[i], with one new tensor per parameter however many vectors there are.

    Example:
        >>> a = TaskVector.from_tensors({"w": torch.tensor([1.0, 2.0])})
        >>> combine([a, a, a], [1.0, 1.0, -0.5])["w"]
        tensor([1.5000, 3.0000])
    """
    total = scales[0] * vectors[0]
    for vector, scale in zip(vectors[1:], scales[1:], strict=True):
        for _, t, tau in total._pairs(vector):
            t.add_(tau, alpha=scale)
    return total


@checked
def average(vectors: Sequence[TaskVector]) -> TaskVector:
    """The mean of task vectors: applied to theta0 it gives the mean of the fine-tuned weights.

    Example:
        >>> a, b = (TaskVector.from_tensors({"w": torch.tensor([x])}) for x in (1.0, 4.0))
        >>> average([a, b])["w"]
        tensor([2.5000])
    """
    return combine(vectors, [1 / max(1, len(vectors))] * len(vectors))


@checked
def analogy(a: TaskVector, b: TaskVector, c: TaskVector) -> TaskVector:
    """A is to B as C is to the result: tau_C + (tau_B - tau_A).

    Example:
        >>> a, b, c = (TaskVector.from_tensors({"w": torch.tensor([x])}) for x in (1.0, 3.0, 10.0))
        >>> analogy(a, b, c)["w"]
        tensor([12.])
    """
    return combine([c, b, a], [1.0, 1.0, -1.0])


def accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """1 where the predicted class (arg-max; of one output its sign) is the label, else 0: [n]."""
    n, classes = outputs.shape[0], max(2, outputs.shape[1])
    if labels.shape != (n,) or labels.is_floating_point() or not bool(((labels >= 0) & (labels < classes)).all()):
        raise InputError(f"labels must be {n} integers between 0 and {classes - 1}; for others give metric=")
    return (predicted_class(outputs) == labels.to(outputs.device)).double()


@dataclass(frozen=True)
class Addition:
    """theta0 + alpha sum_t tau_t, alpha found on held-out data.

    held_out [A, T]: score of every task at every coefficient of `alphas` [A]. single, multi, pretrained: {task: scores
    [n_t]} of theta0 + tau_t, of the merged network, of theta0, on the test data, or else on the held-out ones.
    """

    tasks: tuple[str, ...]
    alpha: float
    alphas: Tensor = field(repr=False)
    held_out: Tensor = field(repr=False)
    single: dict[str, Tensor] = field(repr=False)
    multi: dict[str, Tensor] = field(repr=False)
    pretrained: dict[str, Tensor] = field(repr=False)

    def absolute(self) -> tuple[float, float]:
        """Mean score of the merged network over tasks, and its standard error over examples."""
        return _over_tasks([mean_and_error(s) for s in self.multi.values()])

    def normalised(self) -> tuple[float, float]:
        """Mean over tasks of score(merged) / score(single task), and its standard error (the examples are paired)."""
        return _over_tasks([_ratio(self.multi[t], self.single[t], t) for t in self.tasks])

    def _repr_html_(self) -> str:
        """Scores per task, for notebooks."""
        columns = (self.pretrained, self.single, self.multi)
        rows = [(task, *(number(*mean_and_error(column[task])) for column in columns)) for task in self.tasks]
        return grid(f"Task addition at alpha = {self.alpha:g}", ["task", "pre-trained", "single", "merged"], rows)


@checked
@without_autocast()
def task_addition(
    model: nn.Module,
    vectors: Mapping[str, TaskVector],
    held_out: Mapping[str, Any],
    test: Mapping[str, Any] | None = None,
    alphas: Sequence[float] | Tensor = SEARCH,
    *,
    choose: Literal["normalised", "absolute"] = "normalised",
    metric: Metric = accuracy,
    heads: Mapping[str, Head] | None = None,
    output: Output | None = None,
    batch_size: int = 256,
) -> Addition:
    """Add task vectors with the one coefficient that is best on held-out data, and score the result on test data.

    Args:
        model: the network at theta0, in eval mode; a `bs.linearize`d one for tangent and post-hoc task vectors.
        vectors: {task: task vector}.
        held_out: {task: (x, y) or labelled batches}, not used in fine-tuning.
        test: the same for the report; None: the held-out data, which flatters.
        alphas: coefficients to try. Of equally good ones the smallest in size is taken: nearest to theta0.
        choose: by the mean over tasks of the "normalised" score (merged / single task; the appendix), or of the
            "absolute" one (the main text).
        metric: (outputs [n, c], labels) -> scores [n], higher is better.
        heads: {task: function [n, c] -> [n, classes]}, where every task has its own head behind the network.
        output: how to get a tensor [n, c] from what the model returns.
        batch_size: most examples in one pass.

    Example:
        >>> net = nn.Linear(2, 2, bias=False)
        >>> with torch.no_grad(): _ = net.weight.zero_()
        >>> tau = {"a": TaskVector.from_tensors({"weight": torch.tensor([[0.0, 0.0], [1.0, 0.0]])}),
        ...        "b": TaskVector.from_tensors({"weight": torch.tensor([[0.0, 0.0], [0.0, 1.0]])})}
        >>> e1, e2, one = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([1])
        >>> x = {"a": (e1, one), "b": (e2, one)}
        >>> found = task_addition(net, tau, x)
        >>> found.alpha, found.normalised()[0]
        (0.05, 1.0)
    """
    names, steps = tuple(vectors), coefficients(alphas)
    plane = Plane(model, vectors, output, batch_size)
    heads = per_task(heads, names, "heads") if heads is not None else {}
    T = len(names)

    def scorers(data: Mapping[str, Any], what: str) -> dict[str, Scorer]:
        given = per_task(data, names, what)
        return {k: Scorer(plane, given[k], f"{what}[{k!r}]", metric, heads.get(k)) for k in names}

    score = scorers(held_out, "held_out")
    search = progress(steps, "task addition", leave=False)
    table = torch.stack([torch.stack([score[k]([a] * T).mean() for k in names]) for a in search])

    def singles(score: Mapping[str, Scorer]) -> dict[str, Tensor]:
        return {k: score[k]([float(s == t) for s in range(T)]) for t, k in enumerate(names)}

    single = singles(score)
    by = [_positive(single[k], k) for k in names] if choose == "normalised" else [1.0] * T
    alpha = _best(steps, (table / torch.tensor(by, dtype=torch.float64, device="cpu")).mean(1).tolist())
    if test is not None:
        score = scorers(test, "test")
        single = singles(score)
    return Addition(
        names,
        alpha,
        torch.tensor(steps, dtype=torch.float64, device="cpu"),
        table,
        single,
        {k: score[k]([alpha] * T) for k in names},
        {k: score[k]([0.0] * T) for k in names},
    )


@dataclass(frozen=True)
class Negation:
    """theta0 - alpha tau, alpha found on held-out data.

    held_out [A, 2]: score on target and on control data at every coefficient of `alphas` [A]. target, control: scores
    [n] of the edited network on the test data; target_before, control_before: of theta0.
    """

    alpha: float
    keep: float
    alphas: Tensor = field(repr=False)
    held_out: Tensor = field(repr=False)
    target: Tensor = field(repr=False)
    control: Tensor = field(repr=False)
    target_before: Tensor = field(repr=False)
    control_before: Tensor = field(repr=False)

    def means(self) -> dict[str, tuple[float, float]]:
        """{"target", "control", "target_before", "control_before": (mean score, standard error)}."""
        names = ("target", "control", "target_before", "control_before")
        return {name: mean_and_error(getattr(self, name)) for name in names}

    def _repr_html_(self) -> str:
        """Scores before and after, for notebooks."""
        m = {name: number(*value) for name, value in self.means().items()}
        rows = [(k, m[f"{k}_before"], m[k]) for k in ("target", "control")]
        return grid(f"Task negation at alpha = {self.alpha:g}", ["data", "before", "after"], rows)


@checked
@without_autocast()
def task_negation(
    model: nn.Module,
    vector: TaskVector,
    target: Any,
    control: Any,
    test: tuple[Any, Any] | None = None,
    alphas: Sequence[float] | Tensor = SEARCH,
    *,
    keep: float = 0.95,
    metric: Metric = accuracy,
    heads: tuple[Head | None, Head | None] = (None, None),
    output: Output | None = None,
    batch_size: int = 256,
) -> Negation:
    """Forget a task: theta0 - alpha tau, with the alpha that makes the target worst and leaves the control.

    Among the coefficients whose held-out control score is at least `keep` times that of theta0, the one with the lowest
    target score; the smallest of equal ones; 0 if none qualifies.

    Args:
        model: the network at theta0, in eval mode; a `bs.linearize`d one for tangent and post-hoc task vectors.
        vector: the task vector of what is to be forgotten.
        target: held-out data of it, (x, y) or labelled batches.
        control: held-out data of what must stay.
        test: (target, control) for the report; None: the held-out data, which flatters.
        alphas: coefficients to try, not negative.
        keep: share of the control score that must be left, 0 to 1.
        heads: of target and control, functions [n, c] -> [n, classes].
        metric, output, batch_size: as in `task_addition`.

    Example:
        >>> net = nn.Linear(2, 2, bias=False)
        >>> with torch.no_grad(): _ = net.weight.copy_(torch.tensor([[0.0, 0.0], [0.5, 1.0]]))
        >>> tau = TaskVector.from_tensors({"weight": torch.tensor([[0.0, 0.0], [1.0, 0.0]])})
        >>> e1, e2, one = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([1])
        >>> found = task_negation(net, tau, (e1, one), (e2, one))
        >>> found.alpha, found.means()["target"][0], found.means()["control"][0]
        (0.5, 0.0, 1.0)
    """
    steps = coefficients(alphas)
    if min(steps) < 0:
        raise InputError(f"alphas: {min(steps):g} would add the task; negation takes coefficients from 0 on")
    if not 0 <= keep <= 1:
        raise InputError(f"keep={keep:g}: the share of the control score to be left lies between 0 and 1")
    plane = Plane(model, {"task": vector}, output, batch_size)

    def scorers(data: tuple[Any, Any], what: Sequence[str]) -> list[Scorer]:
        return [Scorer(plane, *each) for each in zip(data, what, (metric, metric), heads)]

    scores = scorers((target, control), ("target", "control"))
    search = progress(steps, "task negation", leave=False)
    table = torch.stack([torch.stack([s([-a]).mean() for s in scores]) for a in search])
    before_edit = float(scores[1]([0.0]).mean())
    if not before_edit >= 0:
        raise InputError(f"control: theta0 scores {before_edit:g} on it, of which no share can be kept")
    allowed = [(a, -t) for a, (t, c) in zip(steps, table.tolist()) if c >= keep * before_edit - 1e-12]
    alpha = _best(*zip(*allowed)) if allowed else 0.0
    scores = scores if test is None else scorers(test, ("test[0]", "test[1]"))
    after, before = [s([-alpha]) for s in scores], [s([0.0]) for s in scores]
    return Negation(alpha, keep, torch.tensor(steps, dtype=torch.float64, device="cpu"), table, *after, *before)


class Scorer:
    """Scores [n] of a network on one labelled set, as a function of the coefficients; float64, on the CPU."""

    def __init__(self, plane: Plane, data: Any, what: str, metric: Metric, head: Head | None) -> None:
        pieces, self.labels = labelled(data, what, plane.batch_size)
        self.outputs, self.metric, self.head, self.what = plane.on(pieces), metric, head, what

    def __call__(self, a: Sequence[float]) -> Tensor:
        """Scores at theta0 + sum_t a_t tau_t."""
        out = self.outputs(a)
        if not any(a) and bool(out.isnan().any()):  # elsewhere a network may blow up, and scores what its NaN scores
            raise InputError(f"{self.what}: the outputs of theta0 have a NaN: there is no score to begin with")
        with torch.no_grad():
            scores = self.metric(out if self.head is None else self.head(out), self.labels)
        if scores.shape != (len(out),):
            raise InputError(f"{self.what}: the metric must return one score per example, shape [{len(out)}]")
        return scores.double().cpu()


def _best(steps: Sequence[float], values: Sequence[float]) -> float:
    """The step with the largest value; of equal ones the smallest in size. NaN is no value."""
    scored = [(a, v) for a, v in zip(steps, values) if not math.isnan(v)]
    if not scored:
        raise InputError(f"the held-out score is NaN at every one of {len(steps)} coefficients: there is no best one")
    return min(scored, key=lambda pair: (-pair[1], abs(pair[0])))[0]


def _ratio(top: Tensor, bottom: Tensor, task: str) -> tuple[float, float]:
    """mean(top) / mean(bottom) of paired scores; its standard error to first order."""
    below = _positive(bottom, task)
    ratio = float(top.mean()) / below
    return ratio, mean_and_error((top - ratio * bottom) / below)[1]


def _positive(scores: Tensor, task: str) -> float:
    mean = float(scores.mean())
    if not mean > 0:
        raise InputError(f"task {task!r} alone scores {mean:g}: nothing to normalise by; use choose='absolute'")
    return mean


def _over_tasks(each: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean over tasks, whose examples are independent."""
    return math.fsum(m for m, _ in each) / len(each), math.sqrt(math.fsum(e**2 for _, e in each)) / len(each)
