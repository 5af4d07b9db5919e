"""Full-batch Adam on many ReLU networks at once: one stack of weights, one batched product for each layer.

The networks share nothing but the step count, so Adam on the stack is Adam on each. On a GPU a step is one replayed
CUDA graph.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import InputError
from biascope.ensembles import Networks, capture, record
from biascope.spectral import spectral_norm
from biascope.studies import Chart, HeatMap, Run, Series
from biascope.studies.estimates import spearman
from biascope.support import progress
from biascope.support.precision import arithmetic

Measure = Callable[[Tensor, list[Tensor]], dict[str, Tensor]]  # outputs [T, n], weights -> {name: [T, ...]}
FEW = 12  # steps, for which a capture does not pay


def relu_mlp(inputs: int, depth: int, width: int) -> nn.Sequential:
    """A ReLU network with `depth` Linear layers of `width` units (torch's own initialisation) and one output."""
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
    """Trained networks (on the CPU) and what was measured on the way, at 0, every, 2 every, ..., the last step.

    Attributes:
        steps: [r], those at which measurements were taken.
        losses: [r, T], training loss of each network there.
        records: what `measure` gave, {name: [r, T, ...]}.
    """

    networks: Networks = field(repr=False)
    steps: Tensor = field(repr=False)
    losses: Tensor = field(repr=False)
    records: dict[str, Tensor] = field(repr=False)

    def arrays(self, losses: str = "losses") -> dict[str, Tensor]:
        """What a run keeps: all but the networks."""
        return {"steps": self.steps, losses: self.losses, **self.records}


def fit(
    networks: Networks,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    lr: float = 3e-4,
    every: int = 100,
    loss: Literal["mse", "bce"] = "mse",
    measure: Measure | None = None,
    clip: Tensor | float | None = None,
    precision: str = "float32",
    what: str = "training",
) -> Fit:
    """Train stacked networks with full-batch Adam (its default moments) on x [n, d] or [T, n, d] and y [T, n].

    loss: "bce" takes logits and labels 0/1. clip: every parameter is clamped to [-clip, clip] after each step, one
    number for all networks or one for each [T].
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
    def take(done: int) -> None:
        out = forward(params, x)
        at.append(done)
        rows.append(losses_of(out).float().cpu())
        for name, value in (measure(out, [p.detach() for p in params]) if measure else {}).items():
            found.setdefault(name, []).append(value.float().cpu())

    with arithmetic(precision):
        clamp()
        take(0)
        advance: Callable[[], None] = step
        for done in progress(range(1, steps + 1), what, leave=False):
            if done == 2 and steps > FEW:  # the first step made Adam's moments and its counters
                moments = [tensor for each in optimiser.state.values() for tensor in each.values()]
                advance = capture(step, device=device, state=[*params, *moments])
            advance()
            if done % every == 0 or done == steps:
                take(done)
    names = list(networks.params)
    trained = Networks(networks.template, {n: p.detach().cpu() for n, p in zip(names, params)}, {})
    kept = {name: torch.stack(values) for name, values in found.items()}
    return Fit(trained, torch.tensor(at), torch.stack(rows), kept)


@dataclass(frozen=True)
class Training:
    """Options of the studies in which such networks are trained."""

    depth: Annotated[int, "Linear layers"] = 6
    width: Annotated[int, "units in a hidden layer"] = 256
    steps: Annotated[int, "full-batch Adam steps"] = 80_000
    lr: Annotated[float, "of Adam (not given in the text)"] = 3e-4
    precision: Annotated[Literal["float32", "tf32"], "of products on a GPU"] = "float32"

    def __str__(self) -> str:
        return f"{self.steps} steps, {self.depth} Linear layers of {self.width} units"

    def draw(self, run: Run, count: int, inputs: int, seed: int) -> Networks:
        """Untrained networks, on the run's device."""
        return draw_mlps(count, inputs, self.depth, self.width, seed, run.device)

    def fit(
        self,
        run: Run,
        networks: int | Networks,
        x: Tensor,
        y: Tensor,
        every: int = 0,
        measure: Measure | None = None,
        loss: Literal["mse", "bce"] = "mse",
        what: str = "training",
    ) -> Fit:
        """Networks (or new ones of that seed, one for each target) trained on x [n, d] or [T, n, d] and y [T, n]."""
        if isinstance(networks, int):
            networks = self.draw(run, len(y), x.shape[-1], networks)
        return fit(networks, x, y, steps=self.steps, lr=self.lr, every=every or self.steps, loss=loss, measure=measure,
                   precision=self.precision, what=what)  # fmt: skip


def norms_of(params: list[Tensor], iterations: int = 10) -> Tensor:
    """Spectral norms [T, layers] of stacked weights, by power iteration on W^T W."""
    return torch.stack([spectral_norm(p, iterations) for p in params if p.dim() == 3], 1)


def tensors(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a run has stored, all of it as tensors."""
    return {name: torch.as_tensor(value) for name, value in found.items()}


def stacked(parts: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """One stored array of several parts [parts, ...]."""
    return torch.stack([torch.as_tensor(part[name]) for part in parts])


def rank_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's rank correlation of x [m] with each row of y [..., m]; ties get their mean rank."""
    rows = [spearman(x.tolist(), row) for row in y.reshape(-1, len(x)).tolist()]
    return torch.tensor(rows, dtype=torch.float64).reshape(y.shape[:-1])


def thinned(count: int, most: int) -> Tensor:
    """At most that many of the numbers 0, ..., count - 1, evenly, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


def loss_chart(name: str, title: str, series: Iterable[Series], alt: str) -> Chart:
    """Mean squared errors over training."""
    return Chart(name, title, "step", "mean squared error", tuple(series), alt=alt, log_y=True)


def spectrum_map(
    name: str,
    title: str,
    frequencies: Sequence[int],
    at: Tensor,
    values: Tensor,
    alt: str,
    high: float = 1.0,
    most: int = 50,
) -> HeatMap:
    """Amplitudes [r, frequencies] over the steps at [r], from 0 to `high`; of many steps some are shown."""
    rows = thinned(len(at), most)
    return HeatMap.of(name, title, x=frequencies, y=at[rows].tolist(), z=values[rows].clamp(0, high).tolist(), low=0.0,
                      high=high, x_label="frequency", y_label="step", z_label="amplitude", alt=alt)  # fmt: skip
