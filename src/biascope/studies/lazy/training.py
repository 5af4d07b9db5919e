"""One training in an alpha-scaled regime, everything on the device, measured when the loss crosses thresholds.

f^alpha = f0 + alpha (f - f0), trained by SGD with momentum at the rate lr / alpha^2: what `bs.lazy` and `lazy_lr` do.
Here f0 of every example is computed once and looked up, which saves a forward pass per step; a test compares both. Runs
with the same seed see the same batches in the same order, whatever alpha.

The loss of the batches is looked at every few steps, so that the device is not waited for; when its mean has crossed
the next threshold of a geometric grid, the groups are measured. On CUDA a step is captured once and replayed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.ensembles import data_order
from biascope.ensembles.capture import capture, fastest_convolutions
from biascope.errors import InputError
from biascope.linearize import lazy_lr
from biascope.precision import arithmetic
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.lazy.linearity import Linearity
from biascope.studies.runs import Run, Value

LOGITS = 1000  # examples per forward pass when groups are measured


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
    every: int = 20  # steps between looks at the loss
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

    def losses(self, name: str) -> Tensor:
        """Loss [P] of a group."""
        return self.loss[:, self.names.index(name)]

    def accuracies(self, name: str) -> Tensor:
        """Accuracy [P] of a group."""
        return self.accuracy[:, self.names.index(name)]

    def values(self) -> dict[str, Value]:
        """For `run.cached`; `Trajectory.read` is the way back."""
        return {k: v for k, v in vars(self).items() if k != "names"} | {"names": "\n".join(self.names)}

    @classmethod
    def read(cls, values: Mapping[str, Value]) -> Trajectory:
        """From what `values` gave."""
        names = tuple(str(values["names"]).split("\n"))
        return cls(names, **{k: v for k, v in values.items() if k != "names"})  # type: ignore[arg-type]


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


@dataclass
class _Log:
    steps: list[int] = field(default_factory=list)
    batch_loss: list[float] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    accuracy: list[Tensor] = field(default_factory=list)
    probes: list[int] = field(default_factory=list)
    linearity: list[Tensor] = field(default_factory=list)


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
        if math.isfinite(loss) and probe.log.steps[-1] != done:
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
    with arithmetic("float32"), fastest_convolutions():
        yield


class _Probe:
    """Measures the groups (and the linearity) and keeps what it found."""

    def __init__(self, net: nn.Module, watched: Watched, setting: Setting, linearity: Linearity | None) -> None:
        self.net, self.watched, self.setting, self.linearity = net, watched, setting, linearity
        self.log = _Log()
        self.f0 = self._forward()
        self.counts = torch.bincount(watched.group, minlength=len(watched.names)).double()

    @torch.no_grad()
    def _forward(self) -> Tensor:
        return torch.cat([self.net(part) for part in torch.split(self.watched.x, LOGITS)])

    @torch.no_grad()
    def __call__(self, step: int, batch_loss: float) -> None:
        watched = self.watched
        out = self.f0 + self.setting.alpha * (self._forward() - self.f0)
        losses = F.cross_entropy(out.double(), watched.y, reduction="none")
        right = (out.argmax(1) == watched.y).double()
        zero = torch.zeros_like(self.counts)
        self.log.loss.append((zero.index_add(0, watched.group, losses) / self.counts).cpu())
        self.log.accuracy.append((zero.index_add(0, watched.group, right) / self.counts).cpu())
        if self.linearity is not None and len(self.log.steps) % self.setting.linearity_every == 0:
            self.log.probes.append(len(self.log.steps))
            self.log.linearity.append(self.linearity(self.net))
        self.log.steps.append(step)
        self.log.batch_loss.append(batch_loss)

    def trajectory(self) -> Trajectory:
        log = self.log
        if self.linearity is not None and log.probes[-1] != len(log.steps) - 1:  # always at the end
            log.probes.append(len(log.steps) - 1)
            log.linearity.append(self.linearity(self.net))
        return Trajectory(
            self.watched.names,
            torch.tensor(log.steps),
            torch.tensor(log.batch_loss, dtype=torch.float64),
            torch.stack(log.loss),
            torch.stack(log.accuracy),
            torch.tensor(log.probes, dtype=torch.long),
            torch.stack(log.linearity) if log.linearity else torch.zeros(0, 3, dtype=torch.float64),
        )
