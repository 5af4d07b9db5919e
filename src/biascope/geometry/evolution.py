"""How the average geometry moves: Delta at initialisation and at any time of training (GIH paper, Def. 2.2).

Per network: one pass over the data for theta-dot, then one forward-over-reverse derivative per probe; the mixed Hessian
is never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from biascope.ensembles import Factory, Initialiser, Networks, arithmetic
from biascope.ensembles.evaluate import Scalarise, activation_bytes, scalar_of
from biascope.ensembles.initialisers import with_something_to_train
from biascope.ensembles.trust import check_networks, refuse_mixing
from biascope.geometry.average import FEW, Average, AverageGeometry, count_probes, draw_probes, pieces_of
from biascope.geometry.gradients import dtype_of
from biascope.network.derivatives import call, differentiable_attention, second_derivatives
from biascope.network.functional import as_rows
from biascope.support.arguments import check_tensor, device_of, shown
from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.limits import Count, FiniteTensor, NonNegative, check_shapes
from biascope.support.memory import budget
from biascope.support.precision import without_autocast
from biascope.support.processes import processes
from biascope.support.signatures import checked

Params = dict[str, Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]
Loss = Literal["sse", "logistic"] | LossFunction
LOSSES: dict[str, LossFunction] = {  # f, y -> losses, entry by entry
    "sse": lambda f, y: 0.5 * (f - y) ** 2,
    "logistic": lambda f, y: F.softplus(-y * f),  # y = +-1; two-logit cross-entropy on the difference
}


@checked
@without_autocast()
def geometry_evolution(
    factory: Factory | Initialiser,
    x_train: FiniteTensor,
    y_train: FiniteTensor,
    n_networks: Count = 1000,
    loss: Loss = "sse",
    n_probes: Count | None = None,
    seed: int = 0,
    probe_std: NonNegative = 1.0,
    scalarise: Scalarise | None = None,
    device: torch.device | str | None = None,
    max_memory: str | int | None = None,
    dtype: torch.dtype | None = None,
    batch: Count = 1024,
    probes: FiniteTensor | None = None,
    *,
    group: Any = None,
) -> AverageGeometry:
    """Delta = B + B^T, B = E[(d/ds grad_x f along theta-dot) grad_x f^T], theta-dot = -grad of the summed loss.

    Delta(0) is negative semi-definite in every case that can be solved (it points away from S and GSG); labels do not
    matter for squared error and a centred last layer (Prop. A.1).

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
        dtype: of the networks; None for the factory's own, float32 for half precision.
        batch: training examples at a time.
        probes: [n, *input_shape], used for all networks instead of fresh draws; Delta(x) at one input with n = 1.
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call, each for its share of
            the networks; the same networks at any number of ranks. Products with a matrix-free result are such calls
            too.

    Example:
        >>> from torch import nn
        >>> net = lambda: nn.Linear(3, 1, bias=False)
        >>> D = geometry_evolution(net, torch.randn(8, 3), torch.zeros(8), n_networks=50)
        >>> D.kind, D.matrix.shape
        ('evolution', torch.Size([3, 3]))
    """
    check_examples(x_train, y_train, loss, "x_train", "y_train")
    shape = tuple(x_train.shape[1:])
    each = count_probes(n_probes, probe_std, probes, shape)
    initialiser, where = with_something_to_train(factory), device_of(device)
    dtype = dtype_of(initialiser, dtype)
    first = initialiser.draw(seed, 0, 1, where, dtype)
    flow = _Flow(first, x_train, y_train, loss, scalarise, batch)
    check_networks(initialiser, first, flow.x)
    room = budget(max_memory, where)
    size, team = min(n_networks, initialiser.block, flow.group(first, each, room)), processes(group)

    def rows() -> Iterator[tuple[int, Tensor, Tensor]]:
        for start, stop in progress(pieces_of(team.share(n_networks), size), "networks", leave=False):
            networks = initialiser.draw(seed, start, stop, where, dtype)
            if probes is None:
                own = draw_probes(seed, start, start + len(networks), each, shape, probe_std)
            else:
                own = probes.expand(len(networks), *probes.shape)
            yield start, *flow.moved(networks, own)

    reasons, fix = dict(initialiser.reasons), "probe_std > 0" if probes is None else "other probes"
    about = Average(shape, n_networks, each, seed, where, room, reasons, "evolution", first.dtype, team)
    return about.of(rows, enough=min(n_networks, FEW), fix=fix)


@checked
@without_autocast()
def evolution_of(
    networks: Networks,
    probes: FiniteTensor,
    x_train: FiniteTensor,
    y_train: FiniteTensor,
    loss: Loss = "sse",
    scalarise: Scalarise | None = None,
    max_memory: str | int | None = None,
    batch: Count = 1024,
) -> AverageGeometry:
    """Delta^t = B + B^T of networks at hand (for example trained ones), at probes [n, *input_shape].

    B is the mean over networks and probes of (d/ds grad_x f along theta-dot) grad_x f^T, theta-dot = -grad of the
    summed loss of each network; it is the time derivative of `geometry_of(networks, probes)` under gradient flow. Is it
    contained in the leading eigenvectors of GSG (Conjecture 2)? `containment(Delta.matrix, gsg(G, S), k)`. At
    initialisation `geometry_evolution` draws the networks and their probes itself.

    Arguments as of `geometry_evolution`, with stacked networks, in eval mode as far as batch normalisation and dropout
    are concerned, in place of the factory. The probes are best the same at every time.

    Example:
        >>> from torch import nn
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=50)
        >>> Delta = evolution_of(drawn, torch.randn(2, 3), torch.eye(3), torch.zeros(3))
        >>> Delta.kind, Delta.matrix.shape
        ('evolution', torch.Size([3, 3]))
    """
    flow, room = (
        _of_networks(networks, probes, x_train, y_train, loss, scalarise, batch),
        budget(max_memory, networks.device),
    )
    shape, n, where, kind = tuple(probes.shape[1:]), len(probes), networks.device, networks.dtype
    about = Average(shape, len(networks), n, 0, where, room, {}, "evolution", kind)
    return about.of(lambda: flow.groups(networks, probes, room))


@checked
@without_autocast()
def moving_gradients(
    networks: Networks,
    probes: FiniteTensor,
    x_train: FiniteTensor,
    y_train: FiniteTensor,
    loss: Loss = "sse",
    max_memory: str | int | None = None,
    batch: Count = 1024,
) -> tuple[Tensor, Tensor]:
    """The factors of `evolution_of`, network by network: grad_x f at the probes, and its derivative along theta-dot.

    Arguments as of `evolution_of`.

    Returns:
        g and u, [T, n, D] each; Delta^t of network i is the mean over probes of u_i g_i^T + g_i u_i^T.

    Example:
        >>> from torch import nn
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=5)
        >>> g, u = moving_gradients(drawn, torch.randn(2, 3), torch.eye(3), torch.zeros(3))
        >>> g.shape, u.shape
        (torch.Size([5, 2, 3]), torch.Size([5, 2, 3]))
    """
    flow = _of_networks(networks, probes, x_train, y_train, loss, None, batch)
    found = list(flow.groups(networks, probes, budget(max_memory, networks.device)))
    return torch.cat([g for _, _, g in found]).flatten(2), torch.cat([u for _, u, _ in found]).flatten(2)


def _of_networks(
    networks: Networks, probes: Tensor, x: Tensor, y: Tensor, loss: Loss, scalarise: Scalarise | None, batch: int
) -> _Flow:
    check_examples(x, y, loss, "x_train", "y_train")
    check_shapes("probes [n, ...], x_train [m, ...]", check_tensor(probes, "probes", floating=True), x)
    refuse_mixing(networks, probes.to(next(iter(networks.trained.values()))))
    return _Flow(networks, x, y, loss, scalarise, batch)


class _Flow:
    """Gradient flow of networks like those given: the template, what it is trained on, and by which loss."""

    def __init__(
        self, networks: Networks, x: Tensor, y: Tensor, loss: Loss, scalarise: Scalarise | None, batch: int
    ) -> None:
        self.template, self.loss, self.scalarise, self.batch = networks.template, summed(loss), scalarise, batch
        self.x, self.y = (t.detach().to(networks.device, networks.dtype) for t in (x, y))

    def f(self, params: Params, buffers: Params, inputs: Tensor) -> Tensor:
        """Scalar outputs [n] of one network."""
        out = as_rows(call(self.template, (params, buffers), (inputs,)), len(inputs), None, self.template)
        return scalar_of(out, self.scalarise)

    def group(self, first: Networks, probes: int, room: int) -> int:
        """Networks at a time, within a budget in bytes."""
        weight = sum(p[0].numel() * p.element_size() for p in first.trained.values())
        inputs = min(self.batch, len(self.x)) + 4 * probes
        cost = 6 * weight * (1 + probes) + 6 * activation_bytes(first[:1], self.x[:1]) * inputs
        return max(1, room // (4 * cost))

    def groups(self, networks: Networks, probes: Tensor, room: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """First network, moved gradients and gradients [networks, probes, ...] of a group, at common probes."""
        size = min(len(networks), self.group(networks, len(probes), room))
        for start in range(0, len(networks), size):
            part = networks[start : start + size]
            yield start, *self.moved(part, probes.expand(len(part), *probes.shape))

    def moved(self, networks: Networks, probes: Tensor) -> tuple[Tensor, Tensor]:
        """u = d/ds grad_x f along theta-dot, and g = grad_x f, at probes [T, n, ...] of each network: [T, n, ...]."""
        probes = probes.detach().to(self.x)
        with differentiable_attention(), arithmetic(networks.device, "float32"), second_derivatives(self.template):
            direction = self.descent(networks)

            def one(params: Params, buffers: Params, along: Params, x: Tensor) -> tuple[Tensor, Tensor]:
                def gradient(p: Params) -> Tensor:
                    slope: Tensor = grad(lambda z: self.f(p, buffers, z[None])[0])(x)
                    return slope

                found = jvp(gradient, (params,), (along,))
                return found[1], found[0]

            probe = vmap(one, in_dims=(None, None, None, 0))
            u, g = vmap(probe)(dict(networks.params), dict(networks.buffers), direction, probes)
        return u.detach(), g.detach()

    def descent(self, networks: Networks) -> Params:
        """theta-dot of every network: minus the gradient of the summed loss, {name: [T, *shape]}."""

        def total(params: Params, buffers: Params, inputs: Tensor, labels: Tensor) -> Tensor:
            return self.loss(self.f(params, buffers, inputs), labels)

        slopes = vmap(grad(total), in_dims=(0, 0, None, None))
        flow = {name: torch.zeros_like(value) for name, value in networks.params.items()}
        for x, y in zip(torch.split(self.x, self.batch), torch.split(self.y, self.batch)):
            part = slopes(dict(networks.params), dict(networks.buffers), x, y)
            flow = {name: value - part[name].detach() for name, value in flow.items()}
        return flow


def check_examples(x: Tensor, y: Tensor, loss: Loss, x_name: str = "x", y_name: str = "y") -> None:
    """Refuse pixels 0 to 255, which networks are not trained on, and labels that a loss would take for others.

    softplus(-y f) takes any number: classes 0 and 1 would give the constant log 2 for one of them, and no gradient.
    """
    check_shapes(f"{x_name} [n, D, ...], {y_name} [n]", check_tensor(x, x_name, floating=True), y)
    if loss == "logistic" and bool((y.double().abs() != 1).any()):
        raise InputError(f'{y_name}: "logistic" wants labels -1 and +1; for classes 0 and 1 give 2 y - 1')


def summed(loss: Loss) -> LossFunction:
    """The loss (f [b], y [b]) -> sum of losses, which a function of the user gives itself."""

    def total(f: Tensor, labels: Tensor) -> Tensor:
        made = LOSSES[loss](f, labels).sum() if isinstance(loss, str) else loss(f, labels)
        if getattr(made, "shape", None) != ():
            raise InputError(f"loss gave {shown(made)} for outputs {list(f.shape)}: it must give their sum")
        return made

    return total
