"""Norms of the weights that measures of complexity are compared with: products over layers, and the Fisher-Rao norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.inputs import batch_size, take
from biascope.jacobian import jacobian_vector
from biascope.precision import arithmetic
from biascope.probes.effective import effective_weights
from biascope.probes.losses import example_losses
from biascope.probes.metrics import register
from biascope.probes.path_metrics import spectral_norm
from biascope.probes.view import CHUNK, View
from biascope.signatures import checked


@checked
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


@checked
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
        losses = example_losses(out, view.y[rows].to(out.device), loss)
        if not losses.requires_grad:
            raise InputError(
                "loss_fn has no gradient in the outputs: the Fisher-Rao norm needs one that can be differentiated"
            )
        (slope,) = torch.autograd.grad(losses.sum(), out)
    return slope.double()
