"""Metrics of the path: how far parameters, tangent model and input geometry went, and how complex the way was."""

from __future__ import annotations

import math

import torch

from biascope.probes.effective import effective_weights
from biascope.probes.metrics import ratio, register
from biascope.probes.view import View
from biascope.signatures import checked


@checked
@register()
def parameter_distance(view: View) -> dict[str, float]:
    """||theta - theta0||, and the same relative to ||theta0||.

    Example:
        >>> parameter_distance(View.of(nn.Linear(2, 1), torch.eye(2)))["absolute"]
        0.0
    """
    start = view.init.theta.double()
    distance = float((view.theta.double() - start).norm())
    return {"absolute": distance, "relative": ratio(distance, float(start.norm()))}


@checked
@register()
def linearisation_error(view: View) -> float:
    """||f - f_lin|| / ||f_lin - f0||, f_lin the tangent model at initialisation, moved to the same parameters.

    0: the network is its tangent model; above about 1 the tangent model says nothing. NaN where nothing has moved.
    Buffers (running statistics) are held at initialisation in both.

    Example:
        >>> start = View.of(nn.Linear(2, 1), torch.eye(2))
        >>> linearisation_error(View.of(nn.Linear(2, 1), torch.eye(2), init=start)) < 1e-5
        True
    """
    from biascope.linearize import taylor_residual  # late: this import takes seconds (torch.compiler)

    s = view.setup
    return taylor_residual(view.init.network, view.f.params, s.x, s.output, s.precision)


@checked
@register(keeps=["theta", "feature_norm"])
def complexity(view: View) -> float:
    """C = sum ||dw|| ||Phi||_F over measurements: dw since the last one, ||Phi||_F = sqrt(tr K) at the last one.

    Coarser measurements give smaller sums (triangle inequality); `path_complexity` adds up the lengths of all steps.

    Example:
        >>> x = torch.eye(2)
        >>> net = nn.Linear(2, 1, bias=False)
        >>> before = View.of(net, x)
        >>> complexity(before)
        0.0
        >>> with torch.no_grad():
        ...     _ = net.weight.add_(torch.tensor([[3.0, 4.0]]))
        >>> round(complexity(View.of(net, x, previous=before)), 4)  # 5 sqrt(2)
        7.0711
    """
    _ = view.feature_norm, view.theta  # the next measurement needs them
    total = 0.0
    if (last := view.previous) is not None:
        step = float((view.theta.double() - last.theta.double()).norm())
        total = last.totals.get("complexity", math.nan) + step * last.feature_norm
    view.totals["complexity"] = total
    return total


@checked
@register(needs=["steps"], keeps=["feature_norm"])
def path_complexity(view: View) -> float:
    """C = sum_t ||dw_t|| ||Phi_t||_F over all optimiser steps, ||Phi_t||_F as it was at the last measurement.

    The probe follows every step (one copy of the parameters and one pass over them per step).

    Example:
        >>> before = View.of(nn.Linear(2, 1, bias=False), torch.eye(2))
        >>> path_complexity(before)
        0.0
    """
    _ = view.feature_norm
    total = 0.0
    if (last := view.previous) is not None:
        total = last.totals.get("path_complexity", math.nan) + view.path * last.feature_norm
    view.totals["path_complexity"] = total
    return total


@checked
@register(keeps=["_slopes"])
def input_velocity(view: View, std: float | None = None) -> dict[str, float]:
    """Geometric velocity 1 - Corr(G, G'), G = mean of g g^T over probes and outputs, g = df/dx; and that per step.

    Corr(A, B) = <A, B> / (||A|| ||B||). The probes are the same at all times, so the velocity is 0 if nothing moved.
    Nothing at the first measurement.

    Args:
        view: what is measured.
        std: use as many Gaussian inputs of this standard deviation instead of the probe batch (the paper: 1e-3 to
            1e-5, with smooth activations).

    Example:
        >>> before = View.of(nn.Linear(2, 1), torch.eye(2))
        >>> input_velocity(View.of(before.model, torch.eye(2), previous=before, step=1))["distance"] < 1e-6
        True
    """
    R = view.input_gradients(std).double()  # [m, D]: G = R^T R / m is never formed, <R^T R, S^T S> = ||R S^T||^2
    if view.previous is None:
        return {}
    S = view.previous.input_gradients(std).double()

    def inner(A: torch.Tensor, B: torch.Tensor) -> float:
        return float((A @ B.mT).square().sum())

    distance = 1 - ratio(inner(R, S), math.sqrt(inner(R, R) * inner(S, S)))
    steps = view.step - view.previous.step
    return {"distance": distance, "per_step": distance / steps if steps else math.nan}


@checked
@register()
def spectral_norm(view: View) -> dict[str, float]:
    """Largest singular value of every weight matrix, as its layer uses it: after weight norm and the like.

    Kernels of convolutions are read as matrices [out, in * k * k], with one row of in / groups channels for every
    output channel if there are groups; so are those of transposed convolutions, which torch stores as [in, out, k, k].

    Example:
        >>> net = nn.Linear(2, 2)
        >>> with torch.no_grad():
        ...     _ = net.weight.copy_(torch.diag(torch.tensor([3.0, 1.0])))
        >>> {k: round(v, 4) for k, v in spectral_norm(View.of(net, torch.eye(2))).items()}
        {'weight': 3.0}
    """
    return {name: float(torch.linalg.matrix_norm(W.flatten(1), 2)) for name, W in effective_weights(view.f).items()}
