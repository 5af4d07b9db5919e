"""The register of metrics: each is a small function of a `View`, known by name, with what it needs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from biascope.errors import InputError, UnsupportedError, near
from biascope.probes.view import View
from biascope.signatures import checked

Values = float | Tensor | Mapping[str, float]
Function = Callable[..., Values]
NEEDS = {"labels", "group labels", "layers", "steps", "train"}


@dataclass(frozen=True)
class Metric:
    """A function of a `View` with a name.

    Attributes:
        name: under which its values are recorded: "name", or "name/part" for each part.
        function: (view, **options) -> a number, or {part: number}.
        needs: "labels", "group labels", "layers" (kernels of the layers), "steps" (lengths of all steps); "train"
            (train mode) is refused.
        keeps: what the previous measurement must keep for it (names of `View`'s quantities).
        options: keyword arguments of the function.

    Example:
        >>> import torch
        >>> from biascope.probes import View
        >>> size = Metric("mean_output", lambda view: float(view.outputs.mean()))
        >>> size.function(View.of(torch.nn.PReLU(), torch.ones(4, 2)))
        1.0
    """

    name: str
    function: Function
    needs: frozenset[str] = frozenset()
    keeps: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, view: View) -> dict[str, float]:
        """Values on a view, {name or name/part: number}."""
        found = self.function(view, **self.options)
        if isinstance(found, Mapping):
            return {f"{self.name}/{part}": _number(self.name, value) for part, value in found.items()}
        return {self.name: _number(self.name, found)}


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InputError(f"metric {name!r} returned a tensor {list(value.shape)}; return a number or {{part: number}}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(
            f"metric {name!r} returned {type(value).__name__}; return a number or {{part: number}}"
        ) from None


REGISTER: dict[str, Metric] = {}


@checked
def register(needs: Sequence[str] = (), keeps: Sequence[str] = (), name: str | None = None) -> Callable[[Any], Any]:
    """Decorator: make a function of a view known by its name.

    Example:
        >>> @register(name="output_scale")
        ... def scale(view):
        ...     return view.outputs.abs().mean()
        >>> metric("output_scale").name
        'output_scale'
        >>> _ = REGISTER.pop("output_scale")
    """
    unknown = set(needs) - NEEDS
    if unknown:
        raise InputError(f"needs {sorted(unknown)} are not known; choose from {sorted(NEEDS)}")

    def keep(function: Any) -> Any:
        known = name or function.__name__
        REGISTER[known] = Metric(known, function, frozenset(needs), tuple(keeps))
        return function

    return keep


@checked
def metric(name: str, **options: Any) -> Metric:
    """A registered metric with options, for `Probe(metrics=[...])`.

    Example:
        >>> metric("trace_ratio", ks=(5, 10)).options
        {'ks': (5, 10)}
    """
    if name not in REGISTER:
        raise InputError(f"no metric is called {name!r}{near(name, REGISTER)}")
    found = REGISTER[name]
    allowed = dict(list(inspect.signature(found.function).parameters.items())[1:])
    for option in options:
        if option not in allowed:
            raise InputError(f"metric {name!r} has no option {option!r}; it has {', '.join(allowed) or 'none'}")
    for option, about in allowed.items():
        if about.default is inspect.Parameter.empty and option not in options:
            raise InputError(f"metric {name!r} needs an option: metric({name!r}, {option}=...)")
    return Metric(name, found.function, found.needs, found.keeps, options)


def as_metrics(metrics: Any) -> list[Metric]:
    """Metrics from names, `Metric`s and functions, or from {name: one of those}."""
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    if isinstance(metrics, Tensor) or not isinstance(metrics, Iterable):
        raise InputError(f"metrics: expected names of metrics, e.g. ['ntk_alignment'], got {type(metrics).__name__}")
    items = metrics.items() if isinstance(metrics, Mapping) else [(None, m) for m in metrics]
    found = []
    for given, item in items:
        if isinstance(item, str):
            item = metric(item)
        elif not isinstance(item, Metric):
            if not callable(item):
                raise InputError(f"a metric is a name, a Metric or a function of a view, not {type(item).__name__}")
            item = Metric(getattr(item, "__name__", type(item).__name__).strip("<>"), item)
        if given is not None:
            item = Metric(given, item.function, item.needs, item.keeps, item.options)
        if "train" in item.needs:
            raise UnsupportedError(
                f"metric {item.name!r} needs train mode; probes evaluate a copy in eval mode, because BatchNorm in "
                "train mode mixes the examples and dropout draws at random. Compute it in your training loop instead"
            )
        found.append(item)
    names = [m.name for m in found]
    if not names:
        raise InputError(f"metrics is empty; choose from {', '.join(REGISTER)}")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two metrics are called {name!r}; give names with metrics={{'one': ..., 'two': ...}}")
    return found


def ratio(top: float, bottom: float) -> float:
    """top / bottom, NaN where bottom is 0."""
    return top / bottom if bottom else math.nan


def cosine(A: Tensor, B: Tensor) -> float:
    """<A, B> / (||A|| ||B||), in float64; NaN where one is zero."""
    A, B = A.double(), B.double().to(A.device)
    scale = float(torch.linalg.vector_norm(A) * torch.linalg.vector_norm(B))
    return ratio(float((A * B).sum()), scale)
