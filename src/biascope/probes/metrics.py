"""The register of metrics: each is a small function of a `View`, known by name, with what it needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.probes.view import View
from biascope.support.arguments import as_number, check_choice
from biascope.support.errors import InputError
from biascope.support.signatures import checked

Values = float | Tensor | Mapping[str, float]
Function = Callable[..., Values]
Need = Literal["labels", "group labels", "layers", "steps"]


@dataclass(frozen=True)
class Metric:
    """A function (view, **options) -> a number, or {part: number}, recorded as "name" or "name/part".

    `needs`: "labels", "group labels", "layers" (kernels of the layers), "steps" (lengths of all steps). `keeps`: what
    the previous measurement must keep for it (names of `View`'s quantities). `decades`: its parts are of very different
    sizes, to be drawn on a logarithmic axis.
    """

    name: str
    function: Function
    needs: frozenset[str] = frozenset()
    keeps: tuple[str, ...] = ()
    decades: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, view: View) -> dict[str, float]:
        """Values on a view, {name or name/part: number}."""
        found = self.function(view, **self.options)
        if not isinstance(found, Mapping):
            return {self.name: as_number(found, f"metric {self.name}")}
        return {f"{self.name}/{part}": as_number(value, f"metric {self.name}") for part, value in found.items()}


REGISTER: dict[str, Metric] = {}


@checked
def register(
    needs: Sequence[Need] = (), keeps: Sequence[str] = (), name: str | None = None, decades: bool = False
) -> Callable[[Any], Any]:
    """Decorator: make a function of a view known by its name; see `Metric`.

    Example:
        >>> @register(name="output_scale")
        ... def scale(view):
        ...     return view.outputs.abs().mean()
        >>> metric("output_scale").name
        'output_scale'
        >>> _ = REGISTER.pop("output_scale")
    """

    def keep(function: Any) -> Any:
        known, held = name or function.__name__, checked(function)
        REGISTER[known] = Metric(known, held, frozenset(needs), tuple(keeps), decades)
        return held

    return keep


@checked
def metric(name: str, **options: Any) -> Metric:
    """A registered metric with options, for `Probe(metrics=[...])`.

    Example:
        >>> metric("trace_ratio", ks=(5, 10)).options
        {'ks': (5, 10)}
    """
    return replace(REGISTER[check_choice(name, "metric", REGISTER)], options=options)


def as_metrics(metrics: Any) -> list[Metric]:
    """Metrics from names, `Metric`s and functions, or from {name: one of those}."""
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    items = metrics.items() if isinstance(metrics, Mapping) else [(None, m) for m in metrics]
    found = []
    for given, item in items:
        if isinstance(item, str):
            item = metric(item)
        elif not isinstance(item, Metric):
            item = Metric(getattr(item, "__name__", type(item).__name__).strip("<>"), item)
        found.append(item if given is None else replace(item, name=given))
    names = [m.name for m in found]
    if len(set(names)) < len(names):
        raise InputError(f"two of the metrics {names} have one name; pass {{'one': ..., 'two': ...}}")
    return found


def velocity(view: View, distance: float) -> dict[str, float]:
    """A distance from the previous measurement, and that per step."""
    steps = view.step - view.previous.step if view.previous is not None else 0
    return {"distance": distance, "per_step": ratio(distance, steps)}


def ratio(top: float, bottom: float) -> float:
    """top / bottom, NaN where bottom is 0."""
    return top / bottom if bottom else math.nan


def cosine(A: Tensor, B: Tensor) -> float:
    """<A, B> / (||A|| ||B||), in float64; NaN where one is zero."""
    A, B = A.double(), B.double().to(A.device)
    scale = float(torch.linalg.vector_norm(A) * torch.linalg.vector_norm(B))
    return within_one(ratio(float((A * B).sum()), scale))


def within_one(correlation: float) -> float:
    """Without what rounding adds to a correlation of 1 or -1; NaN stays."""
    return min(max(correlation, -1.0), 1.0)
