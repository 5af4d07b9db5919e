"""How the average geometry starts to move: Delta at initialisation (GIH paper, Def. 2.2), matrix-free per network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from biascope.derivatives import call, differentiable_attention, second_derivatives
from biascope.ensembles import Factory, Initialiser, Networks, scalar_of
from biascope.ensembles.arithmetic import arithmetic
from biascope.ensembles.evaluate import Scalarise, activation_bytes
from biascope.ensembles.initialisers import with_something_to_train
from biascope.ensembles.trust import check_networks
from biascope.errors import InputError
from biascope.functional import as_rows, device_of
from biascope.geometry.average import (
    FEW,
    AverageGeometry,
    at_least_float32,
    blocks_within,
    count_probes,
    draw_probes,
    from_moments,
    refuse_infinite,
)
from biascope.geometry.gradients import NO_GRADIENT
from biascope.geometry.losses import as_sum, check_labels, check_reals
from biascope.geometry.moments import BlockMoments
from biascope.linalg import FromFunction
from biascope.memory import budget
from biascope.precision import without_autocast
from biascope.progress import progress
from biascope.refusals import refuse_batch_dependence
from biascope.signatures import checked

Params = dict[str, Tensor]
SumLoss = Callable[[Tensor, Tensor], Tensor]  # f [b], y [b] -> the sum of the losses
LOSSES: dict[str, SumLoss] = {
    "sse": lambda f, y: 0.5 * (f - y).square().sum(),
    "logistic": lambda f, y: F.softplus(-y * f).sum(),  # y = +-1; two-logit cross-entropy on the difference
}


@checked
@without_autocast()
def geometry_evolution(
    factory: Factory | Initialiser,
    x_train: Tensor,
    y_train: Tensor,
    n_networks: int = 1000,
    loss: str | SumLoss = "sse",
    n_probes: int | None = None,
    seed: int = 0,
    probe_std: float = 1.0,
    scalarise: Scalarise | None = None,
    device: torch.device | str | None = None,
    max_memory: str | int | None = None,
    dtype: torch.dtype | None = None,
    batch: int = 1024,
    probes: Tensor | None = None,
) -> AverageGeometry:
    """Delta = B + B^T, B = E[(d/ds grad_x f along theta-dot) grad_x f^T], theta-dot = -grad of the summed loss.

    Per network: one pass over the data for theta-dot, then one forward-over-reverse derivative per probe; the mixed
    Hessian is never formed. Delta(0) is negative semi-definite in every case that can be solved (it points away from S
    and GSG); labels do not matter for squared error and a centred last layer (Prop. A.1).

    Args:
        factory: builds a freshly initialised network; eval mode.
        x_train: [m, *input_shape]; above D = 4096 entries, or where three matrices do not fit into `max_memory`, the
            result is matrix-free (`Delta @ v`, `Delta.eigh(k)`), and every product is a pass over all networks.
        y_train: [m], floats (for "logistic" -1 and +1).
        n_networks: networks to average over.
        loss: "sse" (half the summed squares), "logistic", or a function (f [b], y [b]) -> sum of losses.
        n_probes: inputs drawn for each network, 1 by default; not together with `probes`.
        seed: of networks and probes.
        probe_std: of the Gaussian probes.
        scalarise: outputs [n, c] -> [n].
        device: where to compute.
        max_memory: for example "4GB".
        dtype: of the networks.
        batch: training examples at a time.
        probes: [n, *input_shape], used for all networks instead of fresh draws; Delta(x) at one input with n = 1.

    Example:
        >>> from torch import nn
        >>> net = lambda: nn.Linear(3, 1, bias=False)
        >>> D = geometry_evolution(net, torch.randn(8, 3), torch.zeros(8), n_networks=50)
        >>> D.kind, D.matrix.shape
        ('evolution', torch.Size([3, 3]))
    """
    if len(x_train) != len(y_train) or y_train.dim() != 1:
        raise InputError(f"x_train has {len(x_train)} examples, y_train has shape {list(y_train.shape)}; need [m]")
    if isinstance(loss, str) and loss not in LOSSES:
        raise InputError(f"loss={loss!r} is not one of {', '.join(LOSSES)}, and not a function")
    check_reals(x_train, "x_train")
    check_labels(y_train, loss, "y_train")
    shape, D = tuple(x_train.shape[1:]), x_train[0].numel()
    each = count_probes(n_probes, probe_std, probes, shape)
    if n_networks < 1 or each < 1 or batch < 1 or not 0 <= probe_std < math.inf:
        raise InputError(
            f"need positive numbers: n_networks={n_networks}, n_probes={each}, batch={batch}, probe_std={probe_std}"
        )
    initialiser = with_something_to_train(factory)
    refuse_batch_dependence(initialiser.template)
    where = device_of(device)
    first = initialiser.draw(seed, 0, 1, where, dtype)
    kind = first.dtype
    x, y = x_train.to(where, kind), y_train.to(where, kind)
    check_networks(initialiser, first, x)
    total = as_sum(LOSSES[loss] if isinstance(loss, str) else loss)
    template = initialiser.template

    def f(params: Params, buffers: Params, inputs: Tensor) -> Tensor:
        out = as_rows(call(template, (params, buffers), (inputs,)), len(inputs), None, template)
        return scalar_of(out, scalarise)

    room = budget(max_memory, where)
    weight = sum(p.numel() * p.element_size() for p in first.params.values())
    cost = 6 * weight * (1 + each) + 6 * activation_bytes(first, x[:1]) * (min(batch, len(x)) + 4 * each)
    group = max(1, min(n_networks, initialiser.block, room // (4 * cost)))

    def rows() -> Iterator[tuple[int, Tensor, Tensor]]:
        """First network, moved gradients and gradients [networks, probes, D] of a group."""
        silent = True
        with differentiable_attention(), arithmetic(where, "float32"):
            for start in progress(range(0, n_networks, group), "networks", leave=False):
                networks = initialiser.draw(seed, start, min(start + group, n_networks), where, dtype)
                if probes is None:
                    own = draw_probes(seed, start, start + len(networks), each, shape, probe_std).to(where, kind)
                else:
                    own = probes.detach().to(where, kind).expand(len(networks), *probes.shape)
                with second_derivatives(template):
                    flow = descent(f, networks, x, y, total, batch)
                    g, u = along(f, networks, flow, own)
                silent = silent and not g.any()
                if silent and start + len(networks) >= min(n_networks, FEW):  # the others are drawn alike
                    raise InputError(NO_GRADIENT.format("", "probe_std > 0" if probes is None else "other probes"))
                refuse_infinite(g)
                refuse_infinite(u)
                yield start, u.flatten(2) / math.sqrt(each), g.flatten(2) / math.sqrt(each)

    blocks = blocks_within(D, room, n_networks)
    if not blocks:

        def product(X: Tensor) -> Tensor:
            made = torch.zeros_like(X)
            for _, u, g in rows():
                a, b = u.reshape(-1, D).to(X), g.reshape(-1, D).to(X)
                made += a.T @ (b @ X) + b.T @ (a @ X)
            return made / n_networks

        operator = FromFunction(product, (D, D), at_least_float32(kind), where, symmetric=True)
        about = dict(initialiser.reasons)
        return AverageGeometry(operator, None, shape, n_networks, each, seed, float("nan"), "evolution", about)
    moments = BlockMoments(D, blocks, where)
    for start, u, g in rows():
        moments.add(start, u, g)
    return from_moments(moments, shape, each, seed, "evolution", initialiser.reasons)


def descent(
    f: Callable[[Params, Params, Tensor], Tensor], networks: Networks, x: Tensor, y: Tensor, loss: SumLoss, batch: int
) -> Params:
    """theta-dot of every network: minus the gradient of the summed loss, {name: [T, *shape]}."""

    def total(params: Params, buffers: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        return loss(f(params, buffers, inputs), labels)

    slopes = vmap(grad(total), in_dims=(0, 0, None, None))
    flow = {name: torch.zeros_like(value) for name, value in networks.params.items()}
    for start in range(0, len(x), batch):
        part = slopes(dict(networks.params), dict(networks.buffers), x[start : start + batch], y[start : start + batch])
        flow = {name: value - part[name].detach() for name, value in flow.items()}
    return flow


def along(
    f: Callable[[Params, Params, Tensor], Tensor], networks: Networks, flow: Params, probes: Tensor
) -> tuple[Tensor, Tensor]:
    """grad_x f and its derivative along the flow at probes [T, n, ...]: two tensors [T, n, ...]."""

    def one(params: Params, buffers: Params, direction: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        def gradient(p: Params) -> Tensor:
            slope: Tensor = grad(lambda z: f(p, buffers, z[None])[0])(x)
            return slope

        found = jvp(gradient, (params,), (direction,))
        return found[0], found[1]

    probe = vmap(one, in_dims=(None, None, None, 0))
    g, u = vmap(probe)(dict(networks.params), dict(networks.buffers), flow, probes)
    return g.detach(), u.detach()
