"""How much a function changes along directions of its parameters (Fig. B.1 of the alignment chapter)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from biascope.arguments import check_tensor
from biascope.errors import InputError
from biascope.functional import Functional, Params, ParamSelection, functional
from biascope.inputs import batches
from biascope.jacobian import jacobian_vector
from biascope.linearize.residual import evaluated
from biascope.precision import arithmetic
from biascope.seeds import generator
from biascope.signatures import checked
from biascope.tables import grid


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
    which the slope on that sample is sqrt(n lambda_j); `random_directions` gives what to hold them against, whose mean
    squared slope is ||J||^2 / p. In float32 a change below about 1e-7 of the outputs is rounding: use float64 there.
    The padding row of an Embedding moves with the direction, but J, as training sees it, does not know that row.

    Args:
        model: the network at w.
        x: a tensor [n, ...], a dict of keyword tensors or batches of those: other examples than those of J, as a rule.
        directions: [p] or [p, k] in the order of the parameters, or {parameter: [k, *shape]}; used as they are, so of
            length 1 if eps is to be the length of the step.
        eps: one length or several.
        params: which parameters move, p in all (see `bs.functional.functional`).
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
    if not lengths or not all(map(math.isfinite, lengths)):
        raise InputError(f"eps={eps}: one finite length or several are needed")
    moves = _columns(f, directions)
    squares = torch.zeros(len(lengths), len(moves), dtype=torch.float64, device="cpu")
    slopes = torch.zeros(len(moves), dtype=torch.float64, device="cpu")
    count = 0
    with torch.no_grad():
        for inputs, _ in batches(x):
            batch, before = evaluated(f, inputs)
            count += before.numel()
            for j, v in enumerate(moves):
                slopes[j] += float(jacobian_vector(f, batch, v).double().square().sum())
                for i, e in enumerate(lengths):
                    after = f({k: p + e * v[k] for k, p in f.params.items()}, batch)
                    squares[i, j] += float((after - before).double().square().sum())
    return PerturbationResponse(
        torch.tensor(lengths, dtype=torch.float64, device="cpu"), squares.sqrt(), slopes.sqrt(), count
    )


@checked
def random_directions(p: int, k: int, seed: int = 0) -> Tensor:
    """k directions of length 1, uniform on the sphere of p parameters: [p, k] in float64.

    Example:
        >>> random_directions(5, 2).norm(dim=0).round(decimals=6)
        tensor([1., 1.], dtype=torch.float64)
    """
    if p < 1 or k < 1:
        raise InputError(f"need p >= 1 parameters and k >= 1 directions, got {p} and {k}")
    drawn = torch.randn(p, k, generator=generator(seed, "directions"), dtype=torch.float64, device="cpu")
    return torch.nn.functional.normalize(drawn, dim=0)


def _columns(f: Functional, directions: Tensor | Params) -> list[Params]:
    """The directions one by one, each as {parameter: tensor}."""
    if isinstance(directions, dict):
        wrong = [k for k in directions if k not in f.params] or [k for k in f.params if k not in directions]
        if wrong:
            raise InputError(f"directions: '{wrong[0]}' is in one of directions and the moving parameters, not in both")
        sizes = {len(t) if check_tensor(t, name).dim() else 0 for name, t in directions.items()}
        if len(sizes) != 1 or any(directions[k].shape[1:] != w.shape for k, w in f.params.items()):
            shapes = {k: list(t.shape) for k, t in directions.items()}
            raise InputError(f"directions {shapes}: need {{parameter: [k, *shape]}} with one k for all")
        directions = torch.cat([directions[k].detach().reshape(len(directions[k]), -1).T for k in f.params])
    flat = directions.detach()[:, None] if directions.dim() == 1 else directions.detach()
    if flat.dim() != 2 or len(flat) != f.num_params or not flat.shape[1]:
        raise InputError(f"directions {list(directions.shape)}: need [p] or [p, k] with p = {f.num_params} parameters")
    if not bool(flat.isfinite().all()):
        raise InputError("directions has a NaN or infinity")
    sizes_of = [w.numel() for w in f.params.values()]
    return [
        {k: part.view(w.shape).to(w) for (k, w), part in zip(f.params.items(), column.split(sizes_of))}
        for column in flat.T
    ]
