"""The dipole metric and its bounds (NAD paper, Sec. 3): which directions a network can tell apart, and learn to.

A dipole is a pair x, x + v with opposite labels; q(v) = g(|f(x) - f(x + v)|) says how well the network separates it.
For small v that is g(|v^T grad_x f|), whose gradient with respect to the parameters is g'(|v^T grad_x f|) H v up to a
sign, H = d2f/dtheta dx: Lemma 2 bounds its mean length by two moments, which `dipole_derivatives` gives for real
networks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from biascope.ensembles import Factory, Initialiser, Networks, arithmetic, input_gradients, outputs
from biascope.ensembles.engines import rows_of, try_input
from biascope.ensembles.evaluate import Scalarise, scalar_of
from biascope.ensembles.initialisers import with_something_to_train
from biascope.ensembles.networks import stack_of
from biascope.ensembles.trust import refuse_hidden_randomness, refuse_mixing
from biascope.geometry.gradients import dtype_of
from biascope.geometry.mixed import MixedDerivative
from biascope.network.derivatives import second_derivatives
from biascope.network.door import refuse_batch_dependence
from biascope.network.functional import explained
from biascope.support.arguments import device_of, shown
from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.limits import Count, FiniteTensor, NonNegative, Positive, check_shapes
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import one_line

G = Callable[[Tensor], Tensor]  # increasing, entry by entry
HELD = 2**27  # numbers of H v held at once


@dataclass(frozen=True)
class DipoleDerivatives:
    """What Lemma 2 needs of T networks at a point: `directional` v^T grad_x f and `mixed` ||H v||, float64.

    [T] each for one direction v, [T, k] for k of them.

    Example:
        >>> found = dipole_derivatives(lambda: nn.Linear(2, 1), torch.ones(2), torch.tensor([3.0, 4.0]), n_networks=5)
        >>> found.directional.shape, found.mixed.tolist()  # f = w x + b, so H v = (v, 0)
        (torch.Size([5]), [5.0, 5.0, 5.0, 5.0, 5.0])
    """

    directional: Tensor
    mixed: Tensor
    __repr__ = one_line


@checked
@without_autocast()
def dipole_metric(
    networks: nn.Module | Networks, x: Tensor, v: Tensor, g: G = torch.square, *, scalarise: Scalarise | None = None
) -> Tensor:
    """q(v) = g(|f(x) - f(x + v)|) of one network or of a stack of them.

    Args:
        networks: a module, in eval mode where the mode matters; its q can be differentiated by its parameters. Or T
            stacked networks (`Initialiser.draw`), without gradients.
        x: the point [*shape]; x + v is added in the network's precision, or that of x or v where it is finer.
        v: one direction [*shape], or k of them [k, *shape]. With a small v let the network be float64: f(x) - f(x + v)
            cancels.
        g: an increasing function, applied entry by entry.
        scalarise: outputs [n, c] -> [n], for networks with more than two outputs (two: the difference of logits).

    Returns:
        [] or [k] for a module, [T] or [T, k] for a stack.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> q = dipole_metric(net, torch.ones(2), torch.tensor([1.0, 0.0]))
        >>> bool(torch.isclose(q, net.weight[0, 0] ** 2))
        True
    """
    directions, single = _directions(x, v)
    refuse_batch_dependence(networks.template if isinstance(networks, Networks) else networks)
    if isinstance(networks, Networks):
        inputs = _ends(x, directions, networks.device, networks.dtype)  # [1 + k, *shape]
        try_input(networks, inputs)
        refuse_mixing(networks, inputs)
        out = outputs(networks, inputs)
        T, n, c = out.shape
        f = scalar_of(out.reshape(T * n, c), scalarise).view(T, n)
    else:
        like = next(networks.parameters(), x + directions[0].to(x.device))
        inputs = _ends(x, directions, like.device, like.dtype).to(like.dtype)
        with explained(networks, inputs):
            out = rows_of(networks(inputs), inputs, networks)
        if any(True for _ in (*networks.parameters(), *networks.buffers())):
            refuse_mixing(stack_of(networks), inputs)
        f = scalar_of(out, scalarise)
    q = _entrywise(g, "g", (f[..., :1] - f[..., 1:]).abs())
    return q[..., 0] if single else q


@checked
@without_autocast()
def dipole_derivatives(
    networks: Factory | Initialiser | Networks,
    x: Tensor,
    v: Tensor,
    *,
    n_networks: Count = 1000,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    scalarise: Scalarise | None = None,
) -> DipoleDerivatives:
    """v^T grad_x f and ||H v||, H = d2f/dtheta dx, of each of T networks at x: for the bounds of this module.

    Autograd's derivatives: with ReLU those almost everywhere, the kinks left out.

    Args:
        networks: builds a freshly initialised network (or an `Initialiser`), evaluated in eval mode; or T stacked
            networks, for which `n_networks`, `seed`, `device` and `dtype` say nothing.
        x: the point [*shape].
        v: one direction [*shape], or k of them [k, *shape]; of any length.
        n_networks: T.
        seed: of the networks, drawn as `nads` draws them.
        device: where to compute.
        dtype: of the networks; by default the factory's own, float32 for half precision.
        scalarise: outputs [n, c] -> [n], for networks with more than two outputs (two: the difference of logits).

    Example:
        >>> factory = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> found = dipole_derivatives(factory, torch.ones(3), torch.tensor([0.1, 0.0, 0.0]), n_networks=50)
        >>> learning_bound(found.directional, found.mixed, alpha=2.0) > 0
        True
    """
    directions, single = _directions(x, v)
    V = directions.flatten(1).T  # [D, k]
    parts = list[tuple[Tensor, Tensor]]()
    source = networks if isinstance(networks, Networks) else with_something_to_train(networks)
    dtype = dtype_of(source, dtype) if isinstance(source, Initialiser) else dtype
    groups = _groups(source, V.shape[1], n_networks, seed, device_of(device), dtype)
    for group in progress(groups, "networks", leave=False):
        point = x[None].to(group.device, group.dtype)
        if not parts:
            try_input(group, point)
        if not parts and isinstance(source, Initialiser):
            refuse_hidden_randomness(source, point)
        with arithmetic(group.device, "float32"), second_derivatives(group.template):
            gradients = input_gradients(group, point, scalarise=scalarise).flatten(1).double()  # [T, D]
            energies = MixedDerivative(group.template, point, scalarise).energies(group, V)
        parts.append(((gradients @ V.to(gradients)).cpu(), energies.sqrt().cpu()))
    directional, mixed = (torch.cat(column) for column in zip(*parts))
    return DipoleDerivatives(directional[:, 0], mixed[:, 0]) if single else DipoleDerivatives(directional, mixed)


@checked
def learning_bound(
    directional: FiniteTensor, mixed: FiniteTensor, alpha: NonNegative, beta: NonNegative = 0.0
) -> float:
    """Lemma 2: a bound on E ||grad_theta q(v)|| when |g'(t)| <= alpha |t| + beta.

    alpha sqrt(E (v^T grad_x f)^2) sqrt(E ||H v||^2) + beta E ||H v||. The paper prints alpha^2; that is not a bound.

    Args:
        directional: v^T grad_x f of each sampled network, [T].
        mixed: ||H v|| of each, H = d2f/dtheta dx, [T].
        alpha: slope of the bound on g'.
        beta: offset of it.

    Example:
        >>> learning_bound(torch.ones(3), torch.full((3,), 2.0), alpha=0.5)
        1.0
    """
    return general_learning_bound(directional, mixed, lambda t: alpha * t) + beta * float(mixed.double().mean())


@checked
def general_learning_bound(directional: FiniteTensor, mixed: FiniteTensor, w: G) -> float:
    """sqrt(E w(|v^T grad f|)^2) sqrt(E ||H v||^2) for any w with |g'| <= w (the paper's general version).

    Example:
        >>> general_learning_bound(torch.ones(2), torch.ones(2), lambda t: 3 * t)
        3.0
    """
    check_shapes("directional [T], mixed [T]", directional, mixed)
    slopes = _entrywise(w, "w", directional.double().abs())
    return float(slopes.square().mean().sqrt() * mixed.double().square().mean().sqrt())


@checked
def markov_bound(v: FiniteTensor, covariance: FiniteTensor, eta: Positive) -> float:
    """Eq. 6: P((v^T grad f)^2 >= eta) <= v^T Sigma v / eta, with Sigma = E grad grad^T [D, D]; at most 1.

    It holds exactly for the gradients of any sample, with their own second moment.

    Example:
        >>> markov_bound(torch.tensor([1.0, 0.0]), torch.eye(2), eta=4.0)
        0.25
    """
    flat = v.double().flatten()
    check_shapes("v [D], covariance [D, D]", flat, covariance)
    square = float(flat @ covariance.double() @ flat)
    if square < -1e-9 * float(flat.square().sum() * covariance.double().abs().max()):
        raise InputError(f"v^T covariance v = {square:.3g} is negative: covariance is no second moment")
    return min(1.0, max(0.0, square) / eta)


def _directions(x: Tensor, v: Tensor) -> tuple[Tensor, bool]:
    """v as [k, *shape], and whether it was a single one [*shape]."""
    if v.shape == x.shape:
        return v[None], True
    if v.shape[1:] != x.shape or not len(v):
        raise InputError(f"v needs the shape of x {list(x.shape)}, or [k, ...] of such; got {list(v.shape)}")
    return v, False


def _ends(x: Tensor, directions: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """x and each x + v, [1 + k, *shape], added in the finest of the three precisions, for networks of `dtype`.

    Whole numbers stay whole: they may name entries of an embedding.
    """
    own = torch.promote_types(x.dtype, directions.dtype)
    finest = torch.promote_types(own, dtype) if own.is_floating_point else own
    start = x[None].to(device, finest)
    ends = torch.cat([start, start + directions.to(device, finest)])
    return ends.to(dtype) if own.is_floating_point else ends


def _entrywise(g: G, name: str, t: Tensor) -> Tensor:
    made = g(t)
    if getattr(made, "shape", None) != t.shape:
        raise InputError(f"{name} made {shown(made)} of {list(t.shape)}; it must act entry by entry")
    return made


def _groups(
    networks: Initialiser | Networks, k: int, T: int, seed: int, device: torch.device, dtype: torch.dtype | None
) -> Iterator[Networks]:
    """The networks, in groups whose H v for k directions can be held."""
    if isinstance(networks, Networks):
        size = max(1, HELD // (k * sum(value[0].numel() for value in networks.trained.values())))
        for start in range(0, len(networks), size):
            yield networks[start : start + size]
        return
    size = max(1, HELD // (k * sum(p.numel() for p in networks.template.parameters())))
    size = min(size, networks.block)  # blocks are drawn whole
    for start in range(0, T, size):
        yield networks.draw(seed, start, min(start + size, T), device, dtype)
