"""How the average geometry of networks at hand moves: Delta^t at any time of training (GIH paper, Def. 2.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from biascope.derivatives import call, differentiable_attention, second_derivatives
from biascope.ensembles import Networks, scalar_of
from biascope.ensembles.arithmetic import arithmetic
from biascope.ensembles.evaluate import Scalarise, activation_bytes
from biascope.ensembles.trust import refuse_mixing
from biascope.errors import InputError
from biascope.functional import as_rows
from biascope.geometry.average import AverageGeometry, at_least_float32, blocks_within, from_moments, refuse_infinite
from biascope.geometry.evolution import LOSSES, Params, SumLoss, along, descent
from biascope.geometry.losses import as_sum, check_labels, check_reals
from biascope.geometry.moments import BlockMoments
from biascope.linalg import FromFunction
from biascope.memory import budget
from biascope.precision import without_autocast
from biascope.refusals import refuse_batch_dependence
from biascope.signatures import checked


@checked
@without_autocast()
def evolution_of(
    networks: Networks,
    probes: Tensor,
    x_train: Tensor,
    y_train: Tensor,
    loss: str | SumLoss = "sse",
    scalarise: Scalarise | None = None,
    max_memory: str | int | None = None,
    batch: int = 1024,
) -> AverageGeometry:
    """Delta^t = B + B^T of networks at hand (for example trained ones), at probes [n, *input_shape].

    B is the mean over networks and probes of (d/ds grad_x f along theta-dot) grad_x f^T, theta-dot = -grad of the
    summed loss of each network; it is the time derivative of `geometry_of(networks, probes)` under gradient flow. Is it
    contained in the leading eigenvectors of GSG (Conjecture 2)? `containment(Delta.matrix, gsg(G, S), k)`. At
    initialisation `geometry_evolution` draws the networks and their probes itself.

    Args:
        networks: stacked, in eval mode as far as batch normalisation and dropout are concerned.
        probes: the same for all networks, and best the same at every time; above D = 4096 entries, or where three
            matrices do not fit into `max_memory`, the result is matrix-free (`Delta @ v`, `Delta.eigh(k)`).
        x_train: [m, *input_shape], what the networks are trained on.
        y_train: [m], floats (for "logistic" -1 and +1).
        loss: "sse" (half the summed squares), "logistic", or a function (f [b], y [b]) -> sum of losses.
        scalarise: outputs [n, c] -> [n]; one output, or the difference of two logits, by default.
        max_memory: for example "4GB".
        batch: training examples at a time.

    Example:
        >>> from torch import nn
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=50)
        >>> Delta = evolution_of(drawn, torch.randn(2, 3), torch.eye(3), torch.zeros(3))
        >>> Delta.kind, Delta.matrix.shape
        ('evolution', torch.Size([3, 3]))
    """
    if isinstance(loss, str) and loss not in LOSSES:
        raise InputError(f"loss={loss!r} is not one of {', '.join(LOSSES)}, and not a function")
    if len(x_train) != len(y_train) or y_train.dim() != 1:
        raise InputError(f"x_train has {len(x_train)} examples, y_train has shape {list(y_train.shape)}; need [m]")
    if probes.dim() < 2 or probes.shape[1:] != x_train.shape[1:]:
        raise InputError(f"probes {list(probes.shape)} and x_train {list(x_train.shape)} must be [n, *input_shape]")
    if batch < 1:
        raise InputError(f"batch={batch}: at least one example at a time")
    if not networks.params:
        raise InputError(f"{type(networks.template).__name__} has no parameter that is trained: nothing moves")
    check_reals(probes, "probes")
    check_reals(x_train, "x_train")
    check_labels(y_train, loss, "y_train")
    refuse_batch_dependence(networks.template)
    refuse_mixing(networks, probes.to(networks.device, networks.dtype))
    moving = _Moving(networks, probes, x_train, y_train, LOSSES[loss] if isinstance(loss, str) else loss, scalarise)
    room = budget(max_memory, networks.device)
    size = moving.group(room, batch)
    D, n, shape = probes[0].numel(), len(probes), tuple(probes.shape[1:])
    blocks = blocks_within(D, room, len(networks))
    if blocks:
        moments = BlockMoments(D, blocks, networks.device)
        for start, u, g in moving.rows(size, batch):
            moments.add(start, u, g)
        return from_moments(moments, shape, n, 0, "evolution", {})

    def product(X: Tensor) -> Tensor:
        made = torch.zeros_like(X)
        for _, u, g in moving.rows(size, batch):
            a, b = u.reshape(-1, D).to(X), g.reshape(-1, D).to(X)
            made += a.T @ (b @ X) + b.T @ (a @ X)
        return made / len(networks)

    kind = at_least_float32(networks.dtype)
    operator = FromFunction(product, (D, D), kind, networks.device, symmetric=True)
    return AverageGeometry(operator, None, shape, len(networks), n, 0, math.nan, "evolution", {})


@without_autocast()
def moving_gradients(
    networks: Networks,
    probes: Tensor,
    x_train: Tensor,
    y_train: Tensor,
    loss: str | SumLoss = "sse",
    max_memory: str | int | None = None,
    batch: int = 1024,
) -> tuple[Tensor, Tensor]:
    """The factors of `evolution_of`, network by network: grad_x f at the probes, and its derivative along theta-dot.

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
    moving = _Moving(networks, probes, x_train, y_train, LOSSES[loss] if isinstance(loss, str) else loss, None)
    size = moving.group(budget(max_memory, networks.device), batch)
    found, scale = list(moving.rows(size, batch)), math.sqrt(len(probes))
    return scale * torch.cat([g for _, _, g in found]), scale * torch.cat([u for _, u, _ in found])


class _Moving:
    """Networks with what they are trained on, and where their gradients are taken."""

    def __init__(
        self,
        networks: Networks,
        probes: Tensor,
        x: Tensor,
        y: Tensor,
        loss: SumLoss,
        scalarise: Scalarise | None,
    ) -> None:
        self.networks, self.loss, self.scalarise = networks, as_sum(loss), scalarise
        self.probes, self.x, self.y = (t.detach().to(networks.device, networks.dtype) for t in (probes, x, y))

    def f(self, params: Params, buffers: Params, inputs: Tensor) -> Tensor:
        """Scalar outputs [n] of one network."""
        template = self.networks.template
        out = as_rows(call(template, (params, buffers), (inputs,)), len(inputs), None, template)
        return scalar_of(out, self.scalarise)

    def group(self, room: int, batch: int) -> int:
        """Networks at a time, within a budget in bytes."""
        first, n = self.networks[:1], len(self.probes)
        weight = sum(p.numel() * p.element_size() for p in first.params.values())
        cost = 6 * weight * (1 + n) + 6 * activation_bytes(first, self.x[:1]) * (min(batch, len(self.x)) + 4 * n)
        return max(1, min(len(self.networks), room // (4 * cost)))

    def rows(self, size: int, batch: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """First network, moved gradients and gradients [networks, probes, D] of a group, over sqrt(probes)."""
        scale = math.sqrt(len(self.probes))
        with differentiable_attention(), arithmetic(self.networks.device, "float32"):
            for start in range(0, len(self.networks), size):
                group = self.networks[start : start + size]
                with second_derivatives(group.template):
                    flow = descent(self.f, group, self.x, self.y, self.loss, batch)
                    g, u = along(self.f, group, flow, self.probes.expand(len(group), *self.probes.shape))
                refuse_infinite(g)
                refuse_infinite(u)
                yield start, u.flatten(2) / scale, g.flatten(2) / scale
