"""A network on the affine set theta0 + sum_t a_t tau_t: its outputs at many coefficients, without new modules.

Plain networks are evaluated at every point, with one copy of the weights that is written over. A linearised network is
affine there: f + sum_t a_t J tau_t, so one pass for f and one product per vector serve all points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from biascope.editing.states import listed, read
from biascope.editing.vectors import TaskVector, check_vectors, coefficient, refuse_constants
from biascope.errors import InputError
from biascope.functional import Functional, Params, functional
from biascope.inputs import Inputs, batch_size, batches, take
from biascope.jacobian import jacobian_vector
from biascope.linearize.tangent import Linearized

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
        check_vectors(vectors)
        self.f: Functional = functional(model, "all", prediction_rows(output) if rows else output)
        state = read(self.f.module, "the model").tensors
        self.taus: list[Params] = [vector.on(state) for vector in vectors.values()]
        # an output of the user's own behind a linearised network need not be linear: then every point is evaluated
        self.linear = isinstance(self.f.module, Linearized) and output is None
        for vector, tau in zip(vectors.values(), self.taus):
            refuse_constants(self.f.module, tau, vector.buffers)
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
                raise InputError(
                    f"the vector of {task!r} moves the buffer {listed(constant)}, in which nothing is linearised: "
                    "build it with buffers='keep'"
                )
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


def chunks(data: Any, what: str, size: int) -> tuple[list[Inputs], Tensor | None]:
    """All examples in pieces of at most `size`, and their labels [n] or None; read once, so the order is fixed."""
    if not isinstance(size, int) or size < 1:
        raise InputError(f"batch_size={size}: a whole number of at least 1 is needed")
    pieces: list[Inputs] = []
    labels: list[Tensor] = []
    total = 0
    for inputs, y in batches(data, what):
        n = batch_size(inputs)
        pieces += [take(inputs, slice(i, i + size)) for i in range(0, n, size)]
        total += n
        if y is not None:
            labels.append(torch.as_tensor(y))
            if labels[-1].dim() == 0:
                raise InputError(f"{what}: expected a tensor of {n} labels, got the number {y}")
    if not labels:
        return pieces, None
    y = torch.cat(labels)
    if len(y) != total:
        raise InputError(f"{what}: {len(y)} labels for {total} examples")
    return pieces, y


def coefficients(alphas: Sequence[float] | Tensor) -> list[float]:
    """A grid of coefficients as numbers, or an error."""
    if isinstance(alphas, Tensor):
        alphas = alphas.tolist() if alphas.dim() == 1 else []
    found = [coefficient(a) for a in alphas]
    if not found:
        raise InputError("alphas: expected a row of numbers, at least one")
    return found


def per_task(given: Mapping[str, Any], names: Sequence[str], what: str) -> dict[str, Any]:
    """One entry per task, in the tasks' order, or an error that names the task without one or the surplus."""
    if not isinstance(given, Mapping):
        raise InputError(f"{what}: expected a dict with one entry per task ({', '.join(names)})")
    lost, surplus = [k for k in names if k not in given], [k for k in given if k not in names]
    if lost or surplus:
        said = f"nothing for task {lost[0]!r}" if lost else f"no task vector is called {surplus[0]!r}"
        raise InputError(f"{what}: {said}; the tasks are {', '.join(map(repr, names))}")
    return {k: given[k] for k in names}


def prediction_rows(output: Output | None) -> Output:
    """The rows of a network's output; a grid of outputs per example is refused."""

    def rows(out: Any) -> Tensor:
        if output is not None:
            out = output(out)
        elif not isinstance(out, Tensor) and isinstance(getattr(out, "logits", None), Tensor):
            out = out.logits  # Hugging Face heads
        if isinstance(out, Tensor) and out.dim() > 2:
            raise InputError(
                f"the model returned shape {list(out.shape)}: one prediction per example is needed, [n, classes]. Say "
                "how to get it with output=lambda out: ..."
            )
        tensor: Tensor = out  # anything else is refused by as_rows, with what to do
        return tensor

    return rows
