"""Full-batch Adam on many ReLU networks at once: one stack of weights, one batched product for each layer.

The networks share nothing but the step count, so Adam on the stack is Adam on each. On a GPU the whole step is one
replayed CUDA graph, which makes ten small networks as quick as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.ensembles import Networks, record
from biascope.ensembles.capture import capture
from biascope.errors import InputError
from biascope.precision import arithmetic
from biascope.progress import progress
from biascope.spectral import spectral_norm

Measure = Callable[[Tensor, list[Tensor]], dict[str, Tensor]]  # outputs [T, n], weights -> {name: [T, ...]}
FEW = 12  # steps, for which a capture does not pay


def relu_mlp(inputs: int, depth: int, width: int) -> nn.Sequential:
    """A ReLU network with `depth` Linear layers of `width` units (torch's own initialisation) and one output.

    Example:
        >>> sum(isinstance(layer, nn.Linear) for layer in relu_mlp(1, 6, 256))
        6
    """
    if depth < 2:
        raise InputError(f"depth {depth}: give at least two Linear layers")
    layers: list[nn.Module] = []
    for a, b in pairwise((inputs, *[width] * (depth - 1), 1)):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def draw_mlps(
    count: int, inputs: int, depth: int, width: int, seed: int, device: torch.device | str = "cpu"
) -> Networks:
    """`count` such networks, drawn from `seed`."""
    return record(lambda: relu_mlp(inputs, depth, width)).draw(seed, 0, count, device)


def forward(params: Sequence[Tensor], x: Tensor) -> Tensor:
    """Outputs [T, n] of stacked weights and biases (in the order of the layers) at x [n, d] (shared) or [T, n, d]."""
    for i in range(0, len(params), 2):
        w, b = params[i], params[i + 1]
        if i == 0 and x.dim() == 2:  # one large product for inputs that all networks share
            h = (x @ w.flatten(0, 1).T).view(len(x), len(w), -1).transpose(0, 1) + b[:, None]
        else:
            h = torch.baddbmm(b[:, None], x if i == 0 else h.relu(), w.mT)
    return h[..., 0]


@dataclass(frozen=True)
class Fit:
    """Trained networks and what was measured on the way.

    Attributes:
        networks: on the CPU.
        steps: [r], at which measurements were taken: 0, every, 2 every, ..., the last step.
        losses: [r, T], training loss of each network there.
        records: what `measure` gave, {name: [r, T, ...]}.
    """

    networks: Networks = field(repr=False)
    steps: Tensor = field(repr=False)
    losses: Tensor = field(repr=False)
    records: dict[str, Tensor] = field(repr=False)


def fit(
    networks: Networks,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    lr: float = 3e-4,
    every: int = 100,
    loss: str = "mse",
    measure: Measure | None = None,
    clip: Tensor | float | None = None,
    precision: str = "float32",
    what: str = "training",
) -> Fit:
    """Train stacked networks with full-batch Adam (its default moments) on x [n, d] or [T, n, d] and y [T, n].

    loss: "mse" or "bce" (logits against 0/1). clip: every parameter is clamped to [-clip, clip] after each step, one
    number for all networks or one for each [T].

    Example:
        >>> z = torch.arange(16)[:, None] / 16
        >>> done = fit(draw_mlps(2, 1, 3, 32, seed=0), z, z[:, 0].expand(2, 16), steps=200, lr=1e-2, every=100)
        >>> done.steps.tolist(), bool((done.losses[-1] < 1e-2).all())
        ([0, 100, 200], True)
    """
    device = networks.device
    params = [nn.Parameter(value.detach().clone()) for value in networks.params.values()]
    x, y = x.to(device, params[0].dtype), y.to(device, params[0].dtype)
    if y.shape[0] != len(networks) or y.shape[1] != x.shape[-2]:
        raise InputError(f"{len(networks)} networks on x {list(x.shape)} need y [T, n], got {list(y.shape)}")
    optimiser = torch.optim.Adam(params, lr=lr, fused=True, capturable=device.type == "cuda")
    bounds = None
    if clip is not None:
        bounds = torch.as_tensor(clip, dtype=params[0].dtype, device=device).expand(len(networks)).clone()

    def losses_of(out: Tensor) -> Tensor:
        if loss == "bce":
            return F.binary_cross_entropy_with_logits(out, y, reduction="none").mean(1)
        return (out - y).square().mean(1)

    def step() -> None:
        optimiser.zero_grad()
        losses_of(forward(params, x)).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        clamp()

    @torch.no_grad()
    def clamp() -> None:
        if bounds is not None:
            for p in params:
                limit = bounds.view(-1, *[1] * (p.dim() - 1))
                p.copy_(torch.minimum(torch.maximum(p, -limit), limit))

    at: list[int] = []
    rows: list[Tensor] = []
    found: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def look(done: int) -> None:
        out = forward(params, x)
        at.append(done)
        rows.append(losses_of(out).float().cpu())
        for name, value in (measure(out, [p.detach() for p in params]) if measure else {}).items():
            found.setdefault(name, []).append(value.float().cpu())

    with arithmetic(precision):
        clamp()
        look(0)
        advance: Callable[[], None] = step
        for done in progress(range(1, steps + 1), what, leave=False):
            if done == 2 and steps > FEW:  # the first step made Adam's moments and its counters
                moments = [tensor for each in optimiser.state.values() for tensor in each.values()]
                advance = capture(step, device=device, state=[*params, *moments])
            advance()
            if done % every == 0 or done == steps:
                look(done)
    names = list(networks.params)
    trained = Networks(networks.template, {n: p.detach().cpu() for n, p in zip(names, params)}, {})
    kept = {name: torch.stack(values) for name, values in found.items()}
    return Fit(trained, torch.tensor(at), torch.stack(rows), kept)


def norms_of(params: list[Tensor], iterations: int = 10) -> Tensor:
    """Spectral norms [T, layers] of stacked weights, by power iteration on W^T W."""
    return torch.stack([spectral_norm(p, iterations) for p in params if p.dim() == 3], 1)
