"""Train R networks and look at their input gradients after every epoch (Figs 2, 3, 8, 12, 13).

`train_ensemble` gives networks at the end of training; here the way there is what matters. Small networks are trained
as a stack, large ones in turn; on CUDA, large networks under mini-batch SGD replay a captured step.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

from biascope import InputError
from biascope.ensembles import (
    SGD,
    Factory,
    Initialiser,
    Networks,
    arithmetic,
    data_order,
    input_gradients,
    outputs,
    record,
)
from biascope.ensembles.steppers import LANES, Lane, stacked, train_epochs
from biascope.ensembles.work import Work
from biascope.studies import Run
from biascope.support import derive, generator, progress
from biascope_papers.gih.networks import at_least
from biascope_papers.gih.training import Precision

Watch = Callable[[int, Networks], None]  # epoch, the networks as they are


def squared_error(logits: Tensor, y: Tensor) -> Tensor:
    """Half the mean square of (difference of two logits [n, 2]) - (+-1), for classes y [n] 0 and 1."""
    return 0.5 * (logits[:, 1] - logits[:, 0] - (2.0 * y - 1)).square().mean()


Criterion = Callable[[Tensor, Tensor], Tensor]
CRITERIA: dict[str, Criterion] = {"cross-entropy": F.cross_entropy, "sse": squared_error}


@dataclass(frozen=True)
class Descent:
    """How to train while watching; batch_size 0 is gradient descent on the whole set, one step per epoch."""

    epochs: int
    lr: float
    batch_size: int = 128
    momentum: float = 0.9
    optimiser: Literal["sgd", "adam"] = "sgd"
    clip_norm: float | None = None
    micro: int = 1024  # examples per forward pass when a step takes more
    precision: Precision = "float32"
    engine: Literal["auto", "eager", "graph"] = "auto"
    loss: Literal["cross-entropy", "sse"] = "cross-entropy"

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, micro=self.micro)
        at_least(0, batch_size=self.batch_size, clip_norm=self.clip_norm or 0)  # a negative norm turns gradients around

    def steps(self, n: int) -> int:
        """Steps per epoch for n examples."""
        return 1 if self.batch_size == 0 else -(-n // self.batch_size)


@dataclass(frozen=True)
class Task:
    """Networks to draw, the data x [n, ...] and y [n] that all of them learn, where these are, and how."""

    recorded: Initialiser
    seed: int
    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    descent: Descent


@dataclass(frozen=True)
class Track:
    """Gradients [epochs + 1, R, probes, D] and accuracy on the training set [epochs + 1, R]."""

    gradients: Tensor = field(repr=False)
    accuracy: Tensor = field(repr=False)


def common_probes(run: Run, n: int, shape: tuple[int, ...], std: float = 1.0) -> Tensor:
    """Probes [n, *shape] ~ N(0, std^2 I) that all networks and all epochs share."""
    at_least(1, probes=n)
    return std * torch.randn(n, *shape, generator=generator(run.seed, "probes"))


def track(
    run: Run, key: str, factory: Factory, x: Tensor, y: Tensor, probes: Tensor, runs: int, descent: Descent,
    stream: str | None = None,
) -> Track:  # fmt: skip
    """Train `runs` networks on (x [n, ...], y [n]), each with its own start and order of data.

    `key` names the files; starts and orders come from `stream` (by default the key), so that two sets can be given to
    the same networks.
    """
    at_least(1, runs=runs)
    recorded, device = record(factory), torch.device(run.device)
    x, y, probes = x.to(device), y.to(device), probes.to(device)
    precision: Precision = descent.precision if device.type == "cuda" else "float32"
    group = stack_size(recorded, runs)
    group = group if group == 1 or stacks(recorded, x[:2], y[:2], CRITERIA[descent.loss]) else 1
    minibatch = descent.batch_size > 0 and descent.optimiser == "sgd"
    captured = group == 1 and device.type == "cuda" and minibatch and descent.engine != "eager"
    if descent.engine == "graph" and not captured:
        raise InputError("engine=graph is for large networks trained by mini-batch SGD on CUDA; use eager or auto")
    group = min(runs, LANES) if captured else group
    seen = slice(0, min(len(x), 2000))  # accuracy on the first 2000 training examples

    def piece(start: int) -> dict[str, Tensor]:
        stop = min(start + group, runs)
        gradients: list[Tensor] = []
        accuracies: list[Tensor] = []

        def watch(epoch: int, networks: Networks) -> None:
            gradients.append(input_gradients(networks, probes).flatten(2).float().cpu())
            guess = outputs(networks, x[seen], engine="vmap" if len(networks) > LANES else "loop").argmax(-1)
            accuracies.append((guess == y[seen]).float().mean(1).cpu())

        task = Task(recorded, derive(run.seed, stream or key), x, y, replace(descent, precision=precision))
        train = train_lanes if captured else train_stack
        train(task, range(start, stop), watch)
        return {"gradients": torch.stack(gradients), "accuracy": torch.stack(accuracies)}

    made = run.cached_each(key, progress(range(0, runs, group), f"{key}: networks", leave=False), piece)
    return Track(*(torch.cat([torch.as_tensor(each[part]) for each in made], 1) for part in ("gradients", "accuracy")))


def watched(
    run: Run, key: str, task: Task, runs: int, times: Sequence[int], look: Callable[[Networks], dict[str, Tensor]]
) -> dict[tuple[str, int], Tensor]:
    """Train `runs` networks and look at them at some epochs: {(what, epoch): [runs, ...]} of what `look` gives.

    `look` has networks as they are and gives tensors with one row for each of them.
    """
    group = stack_size(task.recorded, runs)

    def piece(start: int) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}

        def watch(epoch: int, networks: Networks) -> None:
            if epoch in times:
                kept.update({f"{name} {epoch}": value.float().cpu() for name, value in look(networks).items()})

        train_stack(task, range(start, min(start + group, runs)), watch)
        return kept

    made = run.cached_each(key, progress(range(0, runs, group), f"{key}: networks", leave=False), piece)
    names = [name.rsplit(" ", 1) for name in made[0]]
    return {
        (name, int(epoch)): torch.cat([torch.as_tensor(each[f"{name} {epoch}"]) for each in made]).double()
        for name, epoch in names
    }


def stack_size(recorded: Initialiser, runs: int) -> int:
    """How many networks are trained as one stack: many small ones, one large one."""
    weight = sum(p.numel() for p in recorded.template.parameters())
    return max(1, min(runs, 2**23 // weight)) if weight < 2**20 else 1


def stacks(recorded: Initialiser, x: Tensor, y: Tensor, criterion: Criterion = F.cross_entropy) -> bool:
    """Whether vmap can train such networks; not all that users bring can be."""
    drawn = recorded.draw(0, 0, 2, x.device)
    template, buffers = copy.deepcopy(drawn.template).train(), {k: v.clone() for k, v in drawn.buffers.items()}

    def loss(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return criterion(logits_of(functional_call(template, (params, buffers), (x,))), y)

    params = {name: value.clone().requires_grad_(True) for name, value in drawn.params.items()}
    try:
        torch.autograd.backward(vmap(loss, randomness="different")(params, buffers).sum())
    except RuntimeError:  # what vmap does not know
        return False
    return True


def logits_of(out: Any) -> Tensor:
    """The tensor of an output, which an own network may hold as `logits`."""
    return out if isinstance(out, Tensor) else out.logits


def train_stack(task: Task, indices: range, watch: Watch) -> None:
    """Train these networks together; `watch` sees them before the first epoch and after each one."""
    x, y, descent = task.x, task.y, task.descent
    drawn, n = task.recorded.draw(task.seed, indices.start, indices.stop, x.device), len(x)
    template = copy.deepcopy(drawn.template).train()
    params = {name: value.clone().requires_grad_(True) for name, value in drawn.params.items()}
    buffers = {name: value.clone() for name, value in drawn.buffers.items()}
    T, leaves = len(indices), list(params.values())
    # one optimiser for the stack: SGD and Adam work entry by entry, so networks do not mix
    optimiser: torch.optim.Optimizer = torch.optim.SGD(leaves, descent.lr, descent.momentum)
    if descent.optimiser == "adam":
        optimiser = torch.optim.Adam(leaves, descent.lr)

    def loss(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return CRITERIA[descent.loss](logits_of(functional_call(template, (params, buffers), (x,))), y)

    def losses(batch: Tensor) -> Tensor:  # [T, b] -> [T]
        if T > 1:
            return vmap(loss, randomness="different")(params, buffers, x[batch], y[batch])
        first, second = ({k: v[0] for k, v in part.items()} for part in (params, buffers))
        return loss(first, second, x[batch[0]], y[batch[0]])[None]

    def look(epoch: int) -> None:
        watch(epoch, Networks(drawn.template, {k: v.detach() for k, v in params.items()}, buffers))

    look(0)
    size = descent.batch_size or n
    for epoch in progress(range(descent.epochs), "epochs", leave=False):
        order = torch.stack([data_order(task.seed, i, epoch, n) for i in indices]).to(x.device)
        with arithmetic(x.device, descent.precision):  # not while looking: gradients are measured in full float32
            for batch in torch.split(order, size, dim=1):
                optimiser.zero_grad()
                for part in torch.split(batch, descent.micro, dim=1):
                    torch.autograd.backward(losses(part).sum() * (part.shape[1] / batch.shape[1]))
                if descent.clip_norm is not None:
                    clip(leaves, descent.clip_norm)
                optimiser.step()
        look(epoch + 1)


def clip(leaves: list[Tensor], largest: float) -> None:
    """Clip the gradient norm of each network of a stack, in place."""
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    factor = (largest / (norms + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))


def train_lanes(task: Task, indices: range, watch: Watch) -> None:
    """The same with captured steps, a few large networks side by side (see `CapturedStep`); CUDA only."""
    x, y, descent = task.x, task.y, task.descent
    sgd = SGD(descent.epochs, descent.batch_size, descent.lr, descent.momentum, 0.0, descent.clip_norm, "constant")
    same = [(x, y)] * indices.stop  # every network has the same task
    work = Work(task.recorded, same, sgd, CRITERIA[descent.loss], task.seed, x.device, None, descent.precision)
    networks = work.start(indices)
    lanes = [Lane(work, networks.module(place), x, y) for place in range(len(indices))]
    for place, lane in enumerate(lanes):
        lane.training.load(networks, place, indices[place], x, y)

    def look(epoch: int) -> None:
        watch(epoch, stacked(networks, [lane.training.module for lane in lanes]))

    look(0)
    for epoch in progress(range(work.sgd.epochs), "epochs", leave=False):
        train_epochs(lanes, 1)
        look(epoch + 1)
