"""A network on the affine set theta0 + sum_t a_t tau_t: its outputs at many coefficients, without new modules.

Plain networks are evaluated at every point, with one copy of the weights that is written over. A linearised network is
affine there: f + sum_t a_t J tau_t, so one pass for f and one product per vector serve all points.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from biascope.editing.states import listed
from biascope.editing.vectors import TaskVector
from biascope.network.functional import Functional, Params, functional
from biascope.network.jacobian import jacobian_vector
from biascope.support.arguments import check_count, check_number
from biascope.support.errors import InputError
from biascope.support.inputs import Inputs, batch_size, batches, take
from biascope.tangent.linearized import Linearized

Output = Callable[[Any], Tensor]
Head = Callable[[Tensor], Tensor]  # what a task puts behind the network: [n, c] -> [n, classes]


class Plane:
    """f(x; theta0 + sum_t a_t tau_t). `rows=True` refuses outputs that are not one row [c] per example."""

    def __init__(
        self,
        model: nn.Module,
        vectors: Mapping[str, TaskVector],
        output: Output | None = None,
        batch_size: int = 256,
        rows: bool = True,
    ) -> None:
        self.names, self.batch_size = tuple(vectors), batch_size
        if not vectors:
            raise InputError("vectors: at least one task vector is needed")
        self.f: Functional = functional(model, "all", prediction_rows(output) if rows else output)
        self.taus: list[Params] = [vector.places_in(self.f.module) for vector in vectors.values()]
        # an output of the user's own behind a linearised network need not be linear: then every point is evaluated
        self.linear = isinstance(self.f.module, Linearized) and output is None
        own = {**self.f.params, **self.f.frozen}
        self.start: Params = {name: own[name] for tau in self.taus for name in tau}
        self._moved: Params = {}
        self._at: tuple[float, ...] | None = None

    def parameters(self, a: Sequence[float]) -> Params:
        """theta0 + sum_t a_t tau_t; the same tensors in every call, written over."""
        a = tuple(a)
        if a != self._at:
            for name, t in self.start.items():
                moved = self._moved.setdefault(name, torch.empty_like(t)).copy_(t)
                for scale, tau in zip(a, self.taus):
                    if scale and name in tau:
                        moved.add_(tau[name].to(t.dtype), alpha=scale)
            self._at = a
        return self._moved

    def on(self, inputs: Sequence[Inputs]) -> Callable[[Sequence[float]], Tensor]:
        """The function a -> outputs [n, c] on these inputs."""
        if self.linear:
            return self._affine(inputs)

        def outputs(a: Sequence[float]) -> Tensor:
            params = {**self.f.params, **self.parameters(a)}
            with torch.no_grad():
                return torch.cat([self.f(params, self.f.prepare(x)) for x in inputs])

        return outputs

    def slopes(self, inputs: Sequence[Inputs]) -> list[Tensor]:
        """J tau_t at theta0 (of a linearised network: at its expansion point) on these inputs, [n, c] each."""
        here = self.f
        if isinstance(here.module, Linearized):
            here = _inner(here.module, here)
        zero = {k: torch.zeros_like(p) for k, p in here.params.items()}
        found = []
        for task, tau in zip(self.names, self.taus):
            constant = [k for k, t in tau.items() if k not in zero and bool((t != 0).any())]
            if constant:
                raise InputError(f"the vector of {task!r} moves the buffer {listed(constant)}: use buffers='keep'")
            v = {**zero, **{k: t.to(here.dtype) for k, t in tau.items() if k in zero}}
            found.append(torch.cat([jacobian_vector(here, here.prepare(x), v) for x in inputs]))
        return found

    def _affine(self, inputs: Sequence[Inputs]) -> Callable[[Sequence[float]], Tensor]:
        with torch.no_grad():
            start = torch.cat([self.f(self.f.params, self.f.prepare(x)) for x in inputs])
        slopes = self.slopes(inputs)

        def outputs(a: Sequence[float]) -> Tensor:
            out = start.clone()
            for scale, slope in zip(a, slopes):
                out.add_(slope, alpha=scale)
            return out

        return outputs


def _inner(lin: Linearized, f: Functional) -> Functional:
    """The plain network inside a linearised one at its expansion point, whose Jacobian is the linearised one's."""
    point = {k: t.detach() for k, t in lin.point.items()}
    params = {k: point.pop(k) for k in lin.linearized}
    return Functional(lin._skeleton, params, point, f.output, f.dtype, f.device).to(f.dtype)


def chunks(data: Any, what: str, size: int) -> list[Inputs]:
    """All examples in pieces of at most `size`; read once, so the order is fixed."""
    return [piece for inputs, _ in batches(data, what, ()) for piece in _cut(inputs, size)]


def labelled(data: Any, what: str, size: int) -> tuple[list[Inputs], Tensor]:
    """All examples in pieces of at most `size`, and their labels [n, ...]."""
    pieces, labels = [], []
    for inputs, given in batches(data, what, ()):
        y, n = torch.as_tensor([] if given is None else given), batch_size(inputs)
        if y.shape[:1] != (n,):
            raise InputError(f"{what}: labels are needed, one for each of {n} examples, not {list(y.shape)}")
        pieces += _cut(inputs, size)
        labels.append(y)
    return pieces, torch.cat(labels)


def _cut(inputs: Inputs, size: int) -> list[Inputs]:
    check_count(size, "batch_size")
    return [take(inputs, slice(i, i + size)) for i in range(0, batch_size(inputs), size)]


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean of values [n] and its standard error; NaN for one value."""
    n = len(values)
    return float(values.mean()), float(values.std() / math.sqrt(n)) if n > 1 else float("nan")


def coefficients(alphas: Sequence[float] | Tensor) -> list[float]:
    """A grid of coefficients as numbers."""
    return [check_number(a, "a coefficient") for a in (alphas.tolist() if isinstance(alphas, Tensor) else alphas)]


def per_task(given: Mapping[str, Any], names: Sequence[str], what: str) -> dict[str, Any]:
    """One entry per task, in the tasks' order."""
    if set(given) != set(names):
        raise InputError(f"{what}: one entry per task is needed ({', '.join(names)}), got {', '.join(given)}")
    return {k: given[k] for k in names}


def prediction_rows(output: Output | None) -> Output:
    """The rows of a network's output; a grid of outputs per example is refused."""

    def rows(out: Any) -> Tensor:
        if output is not None:
            out = output(out)
        elif not isinstance(out, Tensor) and isinstance(getattr(out, "logits", None), Tensor):
            out = out.logits  # Hugging Face heads
        if isinstance(out, Tensor) and out.dim() > 2:
            raise InputError(f"the model returned {list(out.shape)}: say how to get [n, classes] with output=")
        tensor: Tensor = out  # anything else is refused by as_rows, with what to do
        return tensor

    return rows
