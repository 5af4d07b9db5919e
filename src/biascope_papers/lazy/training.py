"""One training in an alpha-scaled regime, everything on the device, measured when the loss crosses thresholds.

f^alpha = f0 + alpha (f - f0), trained by SGD with momentum at the rate lr / alpha^2: what `bs.lazy` and `lazy_lr` do,
but f0 of every example is computed once and looked up. Runs with the same seed see the same batches in the same order.
The loss is read every few steps; when its mean has crossed the next threshold of a geometric grid, the groups are
measured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import InputError
from biascope.ensembles import capture, data_order
from biascope.probes import View, ntk_alignment, representation_alignment, sign_similarity
from biascope.studies import Run
from biascope.support import derive, progress
from biascope.support.precision import arithmetic
from biascope.tangent import lazy_lr

LOGITS = 1000  # examples per forward pass when groups are measured
SIMILARITIES = ("sign similarity", "tangent kernel alignment", "representation alignment")


@dataclass(frozen=True)
class Setting:
    """How to train: `lr` is that of the plain network, the step is lr / alpha^2."""

    alpha: float = 1.0
    lr: float = 0.01
    momentum: float = 0.9
    batch_size: int = 125
    steps: int = 64_000
    stop: float = 0.01  # end when the mean loss of the last batches is below this
    factor: float = 0.96  # ratio of successive thresholds
    every: int = 20  # steps between readings of the loss
    linearity_every: int = 5  # probes between measurements of linearity, the costly ones
    capture: bool = True  # replay a CUDA graph, on CUDA


@dataclass(frozen=True)
class Watched:
    """Examples measured at every probe, in named groups: x [n, ...], y [n] classes, group [n] in 0..len(names)-1."""

    x: Tensor
    y: Tensor
    group: Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.x) == len(self.y) == len(self.group) > 0:
            raise InputError(f"{len(self.x)} inputs, {len(self.y)} labels, {len(self.group)} groups")

    @classmethod
    def of(cls, parts: Mapping[str, tuple[Tensor, Tensor]]) -> Watched:
        """Groups from {name: (x, y)}."""
        group = torch.cat([torch.full((len(y),), i, device=y.device) for i, (_, y) in enumerate(parts.values())])
        xs, ys = zip(*parts.values())
        return cls(torch.cat(xs), torch.cat(ys), group, tuple(parts))


@dataclass(frozen=True)
class Trajectory:
    """What was measured: at P probes the groups, at Q of them the linearity.

    steps [P], batch_loss [P] (mean of the batches before the probe), loss and accuracy [P, G] of the groups;
    linearity [Q, 3] (signs, tangent kernel, representation) at linearity_probes [Q] (positions in 0..P-1).
    """

    names: tuple[str, ...]
    steps: Tensor
    batch_loss: Tensor
    loss: Tensor
    accuracy: Tensor
    linearity_probes: Tensor
    linearity: Tensor

    def measured(self, measure: str, name: str) -> Tensor:
        """Loss or accuracy [P] of a group."""
        values: Tensor = getattr(self, measure)
        return values[:, self.names.index(name)]

    def losses(self, name: str) -> Tensor:
        """Loss [P] of a group."""
        return self.measured("loss", name)

    def accuracies(self, name: str) -> Tensor:
        """Accuracy [P] of a group."""
        return self.measured("accuracy", name)

    def values(self) -> dict[str, Any]:
        """For `run.cached`; `Trajectory.read` is the way back."""
        return {k: v for k, v in vars(self).items() if k != "names"} | {"names": "\n".join(self.names)}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Trajectory:
        """From what `values` gave."""
        names = tuple(str(values["names"]).split("\n"))
        return cls(names, **{k: v for k, v in values.items() if k != "names"})


def trajectories(
    run: Run, experiment: str, settings: Mapping[str, Setting], seeds: int, once: Callable[[int, Setting], Trajectory]
) -> dict[str, list[Trajectory]]:
    """Every setting from every seed (`{label: trajectories}`), each trained once and then read from the run.

    `once(seed, setting)`: one training; settings share the seeds, which are those of the experiment by name.
    """

    def stored(seed: int, label: str) -> Trajectory:
        own = derive(run.seed, experiment, seed)
        return Trajectory.read(run.cached(f"{label} seed={seed}", lambda: once(own, settings[label]).values()))

    found: dict[str, list[Trajectory]] = {label: [] for label in settings}
    for seed, label in progress([(s, k) for s in range(seeds) for k in settings], "trainings"):
        found[label].append(stored(seed, label))
    return found


def train(
    net: nn.Module, x: Tensor, y: Tensor, watched: Watched, setting: Setting, seed: int = 0, lin: Tensor | None = None
) -> Trajectory:
    """Train a copy of `net` on x [n, ...], y [n] (classes), all on one device.

    `lin` [m, ...]: examples for the linearity metrics; None leaves them out. A training that diverges ends early.
    """
    n, size = len(x), min(setting.batch_size, len(x))
    net = copy.deepcopy(net)
    with exact_float32():
        f0 = start_outputs(net, x, size)
        probe = _Probe(net, watched, setting, None if lin is None else Linearity(net, lin))
        step = make_step(net, x, y, f0, setting)
        window = torch.zeros(setting.every, device=x.device)
        probe(0, math.nan)
        threshold, done = setting.factor * math.log(f0.shape[1]), 0
        for batch in batches(n, size, seed, x.device):
            window[done % setting.every] = step(batch)
            done += 1
            if done % setting.every and done < setting.steps:
                continue
            loss = float(window.mean())  # the only place that waits for the device
            if loss <= threshold:
                probe(done, loss)
                while threshold >= max(loss, 1e-12):
                    threshold *= setting.factor
            if done >= setting.steps or loss < setting.stop or not math.isfinite(loss):
                break
        if math.isfinite(loss) and probe.steps[-1] != done:
            probe(done, loss)
        return probe.trajectory()


def batches(n: int, size: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Positions of the examples of each batch, for ever; a last batch that is not full is left out."""
    epoch = 0
    while True:
        order = data_order(seed, 0, epoch, n).to(device)
        yield from torch.split(order[: n - n % size], size)
        epoch += 1


def start_outputs(net: nn.Module, x: Tensor, size: int) -> Tensor:
    """f0 [n, c], in pieces of the batch size and with gradients on, as in the steps: the same kernels, so that their
    rounding cancels in f - f0.
    """
    return torch.cat([net(part).detach() for part in torch.split(x, size)])


def make_step(net: nn.Module, x: Tensor, y: Tensor, f0: Tensor, setting: Setting) -> Callable[[Tensor], Tensor]:
    """A function of the positions of a batch that makes one SGD step in place and gives the loss before it."""
    params: list[Tensor] = [p for p in net.parameters() if p.requires_grad]
    momenta = [torch.zeros_like(p) for p in params]
    rate, alpha = lazy_lr(setting.lr, setting.alpha), setting.alpha

    def step(batch: Tensor) -> Tensor:
        start = f0[batch]
        out = net(x[batch])
        loss = F.cross_entropy(out if alpha == 1 else start + alpha * (out - start), y[batch])
        gradients = torch.autograd.grad(loss, params)
        with torch.no_grad():
            torch._foreach_mul_(momenta, setting.momentum)
            torch._foreach_add_(momenta, gradients)
            torch._foreach_add_(params, momenta, alpha=-rate)
        return loss.detach()

    if not setting.capture:
        return step
    first = torch.arange(min(setting.batch_size, len(x)), device=x.device)
    return capture(step, first, device=x.device, state=[*params, *net.buffers(), *momenta])


@contextmanager
def exact_float32() -> Iterator[None]:
    """No tf32: its rounding, times alpha, would drown f - f0. cuDNN may time its algorithms (shapes are fixed)."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with arithmetic("float32"):
            yield
    finally:
        torch.backends.cudnn.benchmark = before


class Linearity:
    """Three similarities with `net` as it is now, on x [m, ...]; all are 1 for a network that has not moved.

    Share of ReLU units times examples that are on or off as at the start; Tr[K K0] / (||K|| ||K0||) of the uncentred
    tangent kernels; the same of the Gram matrices of the input of the last linear layer.
    """

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.start = View.of(net, x)

    def __call__(self, net: nn.Module) -> Tensor:
        """[3]: signs, tangent kernel, representation; float64 on the CPU."""
        now = View(net, self.start.setup, init=self.start)
        found = (sign_similarity(now), ntk_alignment(now), representation_alignment(now)["init"])
        return torch.tensor(found, dtype=torch.float64)


class _Probe:
    """Measures the groups (and the linearity) and keeps what it found."""

    def __init__(self, net: nn.Module, watched: Watched, setting: Setting, linearity: Linearity | None) -> None:
        self.net, self.watched, self.setting, self.linearity = net, watched, setting, linearity
        self.steps: list[int] = []
        self.batch_loss: list[float] = []
        self.rows: list[Tensor] = []  # losses and accuracies of the groups, [2, G] each
        self.probes: list[int] = []
        self.similar: list[Tensor] = []
        self.f0 = self._forward()
        self.counts = torch.bincount(watched.group, minlength=len(watched.names)).double()

    @torch.no_grad()
    def _forward(self) -> Tensor:
        return torch.cat([self.net(part) for part in torch.split(self.watched.x, LOGITS)])

    @torch.no_grad()
    def __call__(self, step: int, batch_loss: float) -> None:
        y = self.watched.y
        out = self.f0 + self.setting.alpha * (self._forward() - self.f0)
        each = F.cross_entropy(out.double(), y, reduction="none"), (out.argmax(1) == y).double()
        zero = torch.zeros_like(self.counts)
        sums = torch.stack([zero.index_add(0, self.watched.group, values) for values in each])
        self.rows.append((sums / self.counts).cpu())
        if len(self.steps) % self.setting.linearity_every == 0:
            self._compare(len(self.steps))
        self.steps.append(step)
        self.batch_loss.append(batch_loss)

    def _compare(self, probe: int) -> None:
        if self.linearity is not None and probe not in self.probes:
            self.probes.append(probe)
            self.similar.append(self.linearity(self.net))

    def trajectory(self) -> Trajectory:
        self._compare(len(self.steps) - 1)  # always at the end
        return Trajectory(
            self.watched.names,
            torch.tensor(self.steps),
            torch.tensor(self.batch_loss, dtype=torch.float64),
            torch.stack([loss for loss, _ in self.rows]),
            torch.stack([accuracy for _, accuracy in self.rows]),
            torch.tensor(self.probes, dtype=torch.long),
            torch.stack(self.similar) if self.similar else torch.zeros(0, 3, dtype=torch.float64),
        )
