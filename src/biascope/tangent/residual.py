"""How far a network is from linear in its parameters: between two points, and along directions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from biascope.network.functional import Functional, Params, ParamSelection, functional
from biascope.network.jacobian import jacobian_vector
from biascope.support.errors import InputError
from biascope.support.inputs import Inputs, batches, ordered_by_data
from biascope.support.precision import arithmetic
from biascope.support.signatures import checked
from biascope.support.tables import grid
from biascope.tangent.anchored import State, deterministic, state_of


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def linearized_prediction(
    model: nn.Module, params: State, x: Any, output: Callable[[Any], Tensor] | None = None, precision: str = "float32"
) -> Tensor:
    """f(x; theta0) + J(x) (theta - theta0), [n, c], for theta = `params` and theta0 the model's own parameters.

    Args:
        model: the network at theta0.
        params: a module, a state dict or {name: tensor}; parameters left out stay where they are.
        x: a tensor, a dict of keyword tensors or batches of those.
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64".
    """
    f, new = _points(model, params, output, precision)
    v = {k: new[k] - f.params[k] for k in new}
    parts = []
    with torch.no_grad():
        for inputs, _ in batches(ordered_by_data(x), "x", f.certificate.arguments):
            batch, f0 = _evaluated(f, inputs)
            parts.append(f0 + jacobian_vector(f, batch, v))
    return torch.cat(parts)


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def taylor_residual(
    model: nn.Module, params: State, x: Any, output: Callable[[Any], Tensor] | None = None, precision: str = "float32"
) -> float:
    """||f(theta) - f(theta0) - J (theta - theta0)|| / ||J (theta - theta0)|| over all examples and outputs.

    0 for a network linear in its parameters; shrinks linearly with the displacement for smooth activations; above
    about 1 the tangent model says nothing about the move. Arguments as in `linearized_prediction`. NaN where the
    parameters do not differ.

    Example:
        >>> net, moved = nn.Linear(3, 2), nn.Linear(3, 2)
        >>> taylor_residual(net, moved, torch.eye(3)) < 1e-5
        True
    """
    f, new = _points(model, params, output, precision)
    v = {k: new[k] - f.params[k] for k in new}
    wrong = moved = 0.0
    for inputs, _ in batches(x, "x", f.certificate.arguments):
        with torch.no_grad():
            batch, f0 = _evaluated(f, inputs)  # first: an input that does not fit is explained here
            change = f(new, batch) - f0
            Jv = jacobian_vector(f, batch, v)
            wrong += float((change - Jv).double().square().sum())
        moved += float(Jv.double().square().sum())
    return (wrong / moved) ** 0.5 if moved else float("nan")


@dataclass(frozen=True)
class PerturbationResponse:
    """Changes of the outputs after steps eps [m] along k directions of the parameters.

    Attributes:
        eps: lengths of the steps [m], in units of the directions.
        change: ||f(w + eps v) - f(w)|| over all examples and outputs, [m, k].
        slope: ||J v||, [k]; to first order the change is |eps| times this.
        count: examples times outputs; change / sqrt(count) is the root mean square over them.
    """

    eps: Tensor = field(repr=False)
    change: Tensor = field(repr=False)
    slope: Tensor = field(repr=False)
    count: int

    @property
    def first_order(self) -> Tensor:
        """|eps| ||J v||, [m, k]: what the linearised network would change by."""
        return self.eps.abs()[:, None] * self.slope

    @property
    def ratio(self) -> Tensor:
        """Change over first order, [m, k]: 1 where the network is its tangent model; NaN where that does not move."""
        return self.change / torch.where(self.first_order > 0, self.first_order, math.nan)

    def _repr_html_(self) -> str:
        """Median and largest change over the directions, and the median ratio, for notebooks."""
        rows = [
            (float(eps), float(change.median()), float(change.max()), float(ratio.nanmedian()))
            for eps, change, ratio in zip(self.eps, self.change, self.ratio)
        ]
        title = f"Change along {len(self.slope)} directions"
        return grid(title, ["eps", "median", "largest", "median over first order"], rows)


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def perturbation_response(
    model: nn.Module,
    x: Any,
    directions: Tensor | Params,
    eps: float | Sequence[float],
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    precision: str = "float32",
) -> PerturbationResponse:
    """||f(w + eps v) - f(w)|| over x for each of the directions v, and what first order predicts for it.

    The top right singular vectors of the Jacobian on a sample are `bs.metric_eigenpairs(model, sample, k).vectors`, for
    which the slope on that sample is sqrt(n lambda_j); directions drawn uniformly on the sphere have a mean squared
    slope of ||J||^2 / p. In float32 a change below about 1e-7 of the outputs is rounding: use float64 there. The
    padding row of an Embedding moves with the direction, but J, as training sees it, does not know that row.

    Args:
        model: the network at w.
        x: a tensor [n, ...], a dict of keyword tensors or batches of those: other examples than those of J, as a rule.
        directions: [p] or [p, k] in the order of the parameters, or {parameter: [k, *shape]}; used as they are, so of
            length 1 if eps is to be the length of the step.
        eps: one length or several.
        params: which parameters move, p in all (as for `bs.ntk`).
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64".

    Example:
        >>> net, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 0.0], [4.0, 0.0]])
        >>> found = perturbation_response(net, x, torch.eye(2), [0.5, 1.0], precision="float64")
        >>> found.change.round(decimals=6)
        tensor([[2.5000, 0.0000],
                [5.0000, 0.0000]], dtype=torch.float64)
        >>> found.slope
        tensor([5., 0.], dtype=torch.float64)
    """
    f = functional(model, params, output, precision)
    lengths = [float(e) for e in (eps if isinstance(eps, Sequence) else [eps])]
    moves = _columns(f, directions)
    squares = torch.zeros(len(lengths), len(moves), dtype=torch.float64, device="cpu")
    slopes = torch.zeros(len(moves), dtype=torch.float64, device="cpu")
    count = 0
    with torch.no_grad():
        for inputs, _ in batches(x, "x", f.certificate.arguments):
            batch, before = _evaluated(f, inputs)
            count += before.numel()
            for j, v in enumerate(moves):
                slopes[j] += float(jacobian_vector(f, batch, v).double().square().sum())
                for i, e in enumerate(lengths):
                    after = f({k: p + e * v[k] for k, p in f.params.items()}, batch)
                    squares[i, j] += float((after - before).double().square().sum())
    return PerturbationResponse(
        torch.tensor(lengths, dtype=torch.float64, device="cpu"), squares.sqrt(), slopes.sqrt(), count
    )


def _evaluated(f: Functional, inputs: Inputs) -> tuple[Inputs, Tensor]:
    """A batch ready for more calls, and f at the network's own parameters there, [n, c]; refuses random networks."""
    batch = f.prepare(inputs)
    with deterministic(f.module, f.device):
        return batch, f(f.params, batch)


def _points(
    model: nn.Module, params: State, output: Callable[[Any], Tensor] | None, precision: str
) -> tuple[Functional, Params]:
    f = functional(model, "all", output, precision)
    return f, {**f.params, **state_of(params, f.params, "params")}


def _columns(f: Functional, directions: Tensor | Params) -> list[Params]:
    """The directions one by one, each as {parameter: tensor}."""
    if isinstance(directions, dict):
        if {k: t.shape[1:] for k, t in directions.items()} != {k: w.shape for k, w in f.params.items()}:
            shapes = {k: list(w.shape) for k, w in f.params.items()}
            raise InputError(f"directions: need {{parameter: [k, *shape]}} for the parameters {shapes}")
        directions = torch.cat([directions[k].detach().reshape(len(directions[k]), -1).T for k in f.params])
    flat = directions.detach()[:, None] if directions.dim() == 1 else directions.detach()
    if flat.dim() != 2 or len(flat) != f.num_params:
        raise InputError(f"directions {list(directions.shape)}: need [p] or [p, k] with p = {f.num_params} parameters")
    sizes = [w.numel() for w in f.params.values()]
    return [
        {k: part.view(w.shape).to(w) for (k, w), part in zip(f.params.items(), column.split(sizes))}
        for column in flat.T
    ]
