"""Metrics of the weights: how far they and the tangent model went, how complex the way was, how large they are."""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from biascope.network.door import modules_of
from biascope.network.functional import Functional
from biascope.network.jacobian import jacobian_vector
from biascope.probes.groups import example_losses
from biascope.probes.metrics import ratio, register, velocity, within_one
from biascope.probes.view import CHUNK, View
from biascope.support.inputs import batch_size, take
from biascope.support.precision import arithmetic
from biascope.tangent.residual import taylor_residual


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
    s = view.setup
    return taylor_residual(view.init.network, view.f.params, s.x, s.output, s.precision)


@register(keeps=["theta", "feature_norm"])
def complexity(view: View) -> float:
    """C = sum ||dw|| ||Phi||_F over measurements: dw since the last one, ||Phi||_F = sqrt(tr K) at the last one.

    Coarser measurements give smaller sums (triangle inequality); `path_complexity` adds up the lengths of all steps.

    Example:
        >>> complexity(View.of(nn.Linear(2, 1), torch.eye(2)))  # nothing has moved
        0.0
    """
    start = view.theta if view.previous is None else view.previous.theta
    return _add_up(view, "complexity", float((view.theta.double() - start.double()).norm()))


def _add_up(view: View, name: str, step: float) -> float:
    """A running sum of lengths of steps times ||Phi||_F at the last measurement."""
    _ = view.feature_norm  # the next measurement needs it
    last = view.previous
    view.totals[name] = 0.0 if last is None else last.totals.get(name, math.nan) + step * last.feature_norm
    return view.totals[name]


@register(needs=["steps"], keeps=["feature_norm"])
def path_complexity(view: View) -> float:
    """C = sum_t ||dw_t|| ||Phi_t||_F over all optimiser steps, ||Phi_t||_F as it was at the last measurement.

    The probe follows every step (one copy of the parameters and one pass over them per step).

    Example:
        >>> path_complexity(View.of(nn.Linear(2, 1), torch.eye(2)))
        0.0
    """
    return _add_up(view, "path_complexity", view.path)


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

    def inner(A: Tensor, B: Tensor) -> float:
        return float((A @ B.mT).square().sum())

    return velocity(view, 1 - within_one(ratio(inner(R, S), math.sqrt(inner(R, R) * inner(S, S)))))


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


@register()
def norm_products(view: View) -> dict[str, float]:
    """Number of parameters, and products over the weight matrices of their Frobenius and of their spectral norms.

    Of networks with two weight matrices also "two_layers", ||V||_F (||U - U_0||_F + ||U_0||_2), the measure of
    Neyshabur et al. (2019) up to constants, for hidden weights U, output weights V and initial U_0. Matrices are all
    weights of more than one dimension, read as in `spectral_norm`. The distance from initialisation is
    `parameter_distance`, and the path norm a function of its own, `path_norm`.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> with torch.no_grad():
        ...     _ = net.weight.copy_(torch.diag(torch.tensor([3.0, 4.0])))
        >>> {k: round(v, 4) for k, v in norm_products(View.of(net, torch.eye(2))).items()}
        {'parameters': 6.0, 'frobenius': 5.0, 'spectral': 4.0}
    """
    spectral, weights = spectral_norm(view), effective_weights(view.f)
    found = {
        "parameters": float(view.f.num_params),
        "frobenius": math.prod((float(W.norm()) for W in weights.values()), start=1.0),
        "spectral": math.prod(spectral.values(), start=1.0),
    }
    if len(weights) == 2:
        first, last = weights
        moved = float((weights[first] - effective_weights(view.init.f)[first]).norm())
        found["two_layers"] = float(weights[last].norm()) * (moved + spectral_norm(view.init)[first])
    return found


@register(needs=["labels"])
@arithmetic("float32")  # cuDNN would convolve in tf32
def fisher_rao_norm(view: View) -> float:
    """sqrt(theta^T I theta), I = E[grad l grad l^T] over the batch's examples and labels (Liang et al., 2019).

    Computed as the root mean square of <dl/df, J theta>, one forward-mode derivative. Of a ReLU network without biases
    J theta = L f for L layers, so the norm is L sqrt(E <dl/df, f>^2): like the path norm it does not change when units
    are rescaled. The loss is the probe's, the labels are those of the batch (with labels drawn from the model it would
    be the Fisher metric: `bs.fisher(...).quadratic_form(theta)`).

    Example:
        >>> net = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(net.weight, 2.0)
        >>> fisher_rao_norm(View.of(net, torch.ones(3, 1), torch.full((3,), 1.0)))  # dl/df = 2 (f - y) = 2, J theta = 2
        4.0
    """
    total = 0.0
    for start in range(0, view.n, CHUNK):
        rows = slice(start, start + CHUNK)
        inputs = view.f.prepare(take(view.x, rows))
        along = jacobian_vector(view.f, inputs, view.f.params).double()
        slope = _output_gradients(view, rows)
        total += float((slope * along).sum(1).square().sum())
    return math.sqrt(total / batch_size(view.x))


def _output_gradients(view: View, rows: slice) -> Tensor:
    """dl/df of some examples, [b, c] in float64."""
    with torch.enable_grad():
        loss, out = view.setup.loss_fn, view.outputs[rows].detach()
        out = (out if callable(loss) else out.double()).requires_grad_()  # a user's loss may hold float32 weights
        (slope,) = torch.autograd.grad(example_losses(out, view.y[rows].to(out.device), loss).sum(), out)
    return slope.double()


def effective_weights(f: Functional) -> dict[str, Tensor]:
    """{"layer.weight": [out, ...]} in float64: all weights of more than one dimension, made of chosen parameters.

    As layers use them: under weight norm, spectral norm and the like the parameters are something else. Kernels of
    transposed convolutions, which torch stores as [in, out, ...], are turned.
    """
    layers = {name: layer for layer, name in modules_of(f.module).items()}
    found = {}
    for name, parameter in f.params.items():
        head, parametrised, tail = f".{name}".partition(".parametrizations.")
        where, _, own = name.rpartition(".")
        if parametrised:
            where, own = head[1:], tail.partition(".")[0]
        layer = layers.get(where)  # a module may name its parameters as it likes
        with torch.no_grad():
            own, weight = (own, getattr(layer, own)) if parametrised else _before_a_call(layer, own, parameter)
        if weight.dim() > 1:
            found[f"{where}.{own}" if where else own] = _rows_first(weight.detach().double(), layer)
    return found


def _before_a_call(layer: nn.Module | None, own: str, parameter: Tensor) -> tuple[str, Tensor]:
    """What the hook of torch.nn.utils.spectral_norm puts in a parameter's place; networks with others have no copy."""
    if layer is None:
        return own, parameter
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm) and own == f"{hook.name}_orig":
            return hook.name, hook.compute_weight(layer, do_power_iteration=False)
    return own, parameter


def _rows_first(p: Tensor, layer: nn.Module | None) -> Tensor:
    """A weight as [out, ...]; `layer` is the module that it belongs to."""
    if isinstance(layer, nn.modules.conv._ConvTransposeNd) and p.shape == layer.weight.shape:
        p = p.reshape(layer.groups, -1, *p.shape[1:]).transpose(1, 2).flatten(0, 1)  # now [out, in / groups, ...]
    return p
