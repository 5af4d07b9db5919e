"""Train many networks at once, each on its own data, with plain SGD.

Engines (all do the same arithmetic, in another order of networks):
  vmap    a group of networks per step: one batched forward and backward for all of them; for small networks
  loop    one network after another, eager; for large networks on the CPU
  graph   a few networks side by side, each step a replayed CUDA graph, channels-last, in tf32, fp16 or bf16; for
          large networks on the GPU
"auto" times a few steps of each that can run here.

A step is: gradient of the mean loss over the batch; its norm clipped (as torch.nn.utils.clip_grad_norm_); weight decay
added; momentum; learning rate. That is torch.optim.SGD: parameters that the factory has frozen, or that the loss does
not depend on, stay as they were drawn. Where torch itself misreads a gradient
(`biascope.network.derivatives.RightGradients`), the right one is taken. Network i starts from
`record(factory).draw(seed, i, i + 1)` and sees its data in the order of `data_order(seed, i, epoch, n)`. A last batch
that is not full is used as it is.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.ensembles import steppers
from biascope.ensembles.engines import as_vmap, logits_of, try_input
from biascope.ensembles.evaluate import outputs
from biascope.ensembles.initialisers import Factory, Initialiser, with_something_to_train
from biascope.ensembles.networks import Networks
from biascope.ensembles.precision import Precision
from biascope.ensembles.stacks import own_randomness
from biascope.ensembles.trust import refuse_hidden_randomness
from biascope.ensembles.work import LOSSES, SGD, Loss, LossFunction, Schedule, Task, Work
from biascope.network.door import refuse_inference_mode
from biascope.network.functional import explained
from biascope.support.arguments import device_of, shown
from biascope.support.bars import progress
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.estimate import mean
from biascope.support.limits import Count
from biascope.support.memory import budget
from biascope.support.processes import Processes, processes
from biascope.support.signatures import checked
from biascope.support.tables import facts

TrainEngine = Literal["auto", "vmap", "loop", "graph"]


@dataclass(frozen=True)
class TrainedEnsemble:
    """What came out.

    Attributes:
        networks: the trained networks, in eval mode, on the CPU; None when they were not to be kept.
        losses: [T, steps] in float32, the mean loss of each batch before the step.
        train_accuracy: [T], after training, in eval mode; NaN for a task whose labels are not classes 0, 1, ..., and
            empty when none's are, as for "mse".
        test_accuracy: the same on the test data; empty without them.
        engine: what ran.
        seconds: wall time of training alone.
        seed: of the initial networks and of the order of the data.
        fallback: {parameter: why} if the factory had to be called for each network.
    """

    networks: Networks | None = field(repr=False)
    losses: Tensor = field(repr=False)
    train_accuracy: Tensor = field(repr=False)
    test_accuracy: Tensor = field(repr=False)
    engine: str
    seconds: float
    seed: int
    fallback: dict[str, str] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """Losses and accuracies, means over networks with standard errors, for notebooks."""
        count, steps = self.losses.shape
        rows: dict[str, object] = {"networks": count, "steps": steps}
        if steps:
            rows["loss of the first batch"] = mean(self.losses[:, 0].tolist())
            rows["loss of the last batch"] = mean(self.losses[:, -1].tolist())
        for name, accuracies in (("training", self.train_accuracy), ("test", self.test_accuracy)):
            if len(accuracies):
                rows[f"{name} accuracy"] = mean(accuracies.tolist())
        kept = "kept" if self.networks is not None else "not kept"
        rows |= {"weights": kept, "engine": self.engine, "seconds": f"{self.seconds:.1f}", "seed": self.seed}
        if self.fallback:
            rows["factory called for each network"] = "; ".join(f"{name}: {why}" for name, why in self.fallback.items())
        return facts("Trained ensemble (mean ± standard error over networks)", rows)


@checked
@torch.enable_grad()
def train_ensemble(
    factory: Factory | Initialiser,
    tasks: Sequence[Task],
    *,
    test: Sequence[Task] | None = None,
    epochs: Count = 20,
    batch_size: Count = 128,
    lr: float = 0.5,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = 0.5,
    schedule: Schedule = "linear",
    loss: Loss = "cross-entropy",
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    engine: TrainEngine = "auto",
    precision: Precision = "float32",
    together: Count | None = None,
    keep: bool = True,
    max_memory: str | int | None = None,
    group: Any = None,
) -> TrainedEnsemble:
    """Train one network per task.

    Args:
        factory: builds a network (or the `Initialiser` recorded from one).
        tasks: any sequence with (inputs [n, ...], labels [n]); made on demand if its items are (a lazy sequence keeps
            memory small). vmap needs tasks of one size.
        test: like `tasks`; gives `test_accuracy`.
        epochs: passes over the data.
        batch_size: examples per step.
        lr: first learning rate.
        momentum: of SGD.
        weight_decay: of SGD, on all parameters.
        clip_norm: largest norm of the gradient, None for no clipping.
        schedule: "linear" (to zero), "constant", or a function of the fraction of training done.
        loss: "cross-entropy", "bce" (one logit, labels 0/1 or between), "mse", or a function.
        seed: of the initial networks and of the order of the data. Dropout follows it too, but its noise depends on the
            engine and on `together`: networks that are trained together draw it together.
        device: where to train.
        dtype: precision of parameters, the factory's by default.
        engine: see the module's docstring.
        precision: "tf32" or "bf16" arithmetic on CUDA (parameters and updates stay in float32).
        together: networks per step for vmap; by default what memory allows, at most 1024.
        keep: whether to return the trained networks.
        max_memory: for example "4GB".
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call with the same tasks:
            each trains its share, the same networks at any number of ranks, and all get everything.

    Example:
        >>> from torch import nn
        >>> x = torch.tensor([[-1.0], [1.0]]).repeat(32, 1); y = (x[:, 0] > 0).long()
        >>> done = train_ensemble(lambda: nn.Linear(1, 2), [(x, y), (x, 1 - y)], epochs=5, batch_size=8)
        >>> done.train_accuracy.tolist(), done.losses.shape
        ([1.0, 1.0], torch.Size([2, 40]))
    """
    refuse_inference_mode()
    if not len(tasks) or (test is not None and len(test) != len(tasks)):
        raise InputError(f"{len(tasks)} tasks and {len(tasks if test is None else test)} test sets: give one each")
    initialiser, where = with_something_to_train(factory), device_of(device)
    for name, p in initialiser.template.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise UnsupportedError(f"'{name}' has a hook on its gradient, which copies of a network do not have")
    if engine == "graph" and where.type != "cuda":
        raise UnsupportedError("engine='graph' needs a CUDA device; use 'vmap' or 'loop'")
    if precision == "fp16":
        raise UnsupportedError("precision='fp16' makes small gradients vanish; train with 'bf16' or 'tf32'")
    sgd = SGD(epochs, batch_size, lr, momentum, weight_decay, clip_norm, schedule)
    work = Work(initialiser, tasks, sgd, criterion(loss), seed, where, dtype, precision)
    team = processes(group)
    with team:
        asked = (len(tasks), seed, epochs, batch_size, lr, momentum, weight_decay, clip_norm)
        team.agree(asked, "the ranks ask for different trainings (tasks, seed, options of SGD)")
        classes = _try_out(work, loss)
        together = max(1, min(len(tasks), together or steppers.group_size(work, budget(max_memory, where))))
        together = min(team.gather(together))
        chosen = team.gather(engine if engine != "auto" else steppers.choose(work, together))[0]
        size = {"vmap": together, "graph": min(together, steppers.LANES)}.get(chosen, 1)
        return _joined(_train_share(work, team, chosen, size, test, loss, classes, keep), work, team)


def _train_share(
    work: Work,
    team: Processes,
    chosen: str,
    size: int,
    test: Sequence[Task] | None,
    loss: Loss,
    classes: int,
    keep: bool,
) -> TrainedEnsemble:
    """Train this rank's share of the tasks."""
    tasks, initialiser, where, precision = work.tasks, work.initialiser, work.device, work.precision
    spent = 0.0
    kept: list[Networks] = []
    losses, train_accuracy, test_accuracy = [], [], []
    run, share = steppers.make(chosen, work), team.share(len(tasks))
    starts = range(share.start, share.stop, size)
    for start in progress(starts, f"training ({chosen})", total=len(starts)):
        team.check()
        indices = range(start, min(start + size, share.stop))
        data = work.load(indices)
        _check_labels(data[1], loss, classes)
        begin = time.perf_counter()
        with as_vmap("train", initialiser.template) if chosen == "vmap" else nullcontext():
            networks, history = run(indices, *data)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        spent += time.perf_counter() - begin
        losses.append(history.float().cpu())
        train_accuracy.append(_accuracy_if_classes(networks, data, loss, classes, precision))
        if test is not None:
            test_accuracy.append(_accuracy_if_classes(networks, work.load(indices, test), loss, classes, precision))
        if keep:
            kept.append(networks.to("cpu"))
    if not kept and keep:  # a rank without tasks
        kept = [work.start(range(1)).to("cpu")[:0]]
    return TrainedEnsemble(
        _concatenate(kept) if keep else None,
        _histories(losses),
        torch.cat(train_accuracy) if train_accuracy else torch.empty(0, device="cpu"),
        torch.cat(test_accuracy) if test_accuracy else torch.empty(0, device="cpu"),
        chosen,
        spent,
        work.seed,
        dict(initialiser.reasons),
    )


def _joined(part: TrainedEnsemble, work: Work, team: Processes) -> TrainedEnsemble:
    """What all ranks have trained, in the order of the tasks, on all of them."""
    found = team.gather((part.losses, part.train_accuracy, part.test_accuracy, part.seconds))
    losses, train, test, seconds = zip(*found)
    networks = part.networks
    if networks is not None and team.size > 1:
        total = len(work.tasks)
        params, buffers = (
            {name: _from_all(own, total, team) for name, own in tensors.items()}
            for tensors in (networks.params, networks.buffers)
        )
        networks = Networks(networks.template, params, buffers)
    return replace(
        part,
        networks=networks,
        losses=_histories([rows for rows in losses if len(rows)]),
        train_accuracy=_known(list(train)),
        test_accuracy=_known(list(test)),
        seconds=max(seconds),
    )


def _from_all(own: Tensor, total: int, team: Processes) -> Tensor:
    """The rows of all ranks, of which this one has `own`."""
    whole = own.new_empty(total, *own.shape[1:])
    whole[team.share(total)] = own
    for rank in range(team.size):
        rows = whole[rank * total // team.size : (rank + 1) * total // team.size]
        if len(rows):
            team.broadcast(rows, rank)
    return whole


def _histories(losses: list[Tensor]) -> Tensor:
    """Losses [T, steps], filled up with NaN where networks took different numbers of steps."""
    if not losses:
        return torch.empty(0, 0, device="cpu")
    return torch.cat(losses) if len({rows.shape[1] for rows in losses}) == 1 else _padded(losses)


@checked
@torch.enable_grad()
def training_epochs(
    initialiser: Initialiser,
    indices: range,
    x: Tensor,
    y: Tensor,
    sgd: SGD,
    *,
    loss: Loss = "cross-entropy",
    seed: int = 0,
    precision: Precision = "float32",
) -> Iterator[Networks]:
    """Networks of a seed before training and after each epoch, all trained on inputs x [n, ...] and labels y [n].

    For those who want to see more than the end, which `train_ensemble` gives: a few large networks side by side, on
    CUDA by captured steps. What is given are copies, where x is, to be run in eval mode.

    Example:
        >>> from torch import nn
        >>> from biascope.ensembles import record
        >>> x, y = torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1])
        >>> seen = training_epochs(record(lambda: nn.Linear(1, 2)), range(3), x, y, SGD(epochs=2, batch_size=1))
        >>> [len(networks) for networks in seen]
        [3, 3, 3]
    """
    tasks = [(x, y)] * indices.stop
    work = Work(initialiser, tasks, sgd, criterion(loss), seed, x.device, None, precision)
    networks = work.start(indices)
    lanes = [steppers.Lane(work, networks.module(place), x, y) for place in range(len(indices))]
    for place, lane in enumerate(lanes):
        lane.training.load(networks, place, indices[place], x, y)
    yield networks
    for _ in range(sgd.epochs):
        steppers.train_epochs(lanes, 1)
        yield steppers.stacked(networks, [lane.training.module for lane in lanes])


def criterion(loss: Loss) -> LossFunction:
    """The function of a loss."""
    return LOSSES[loss] if isinstance(loss, str) else loss


@checked
def accuracy(networks: Networks, x: Tensor, y: Tensor, precision: Precision = "float32") -> Tensor:
    """Share [T] of examples that each network classifies rightly: argmax of the logits, or the sign of a single one.

    `x` [T, n, ...], `y` [T, n] in classes 0, 1, ...; what is labelled -100 does not count, as for cross-entropy.

    Example:
        >>> from torch import nn
        >>> sign = Networks(nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1, 1)}, {})
        >>> accuracy(sign, torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1, 0]]))
        tensor([1.])
    """
    out = outputs(networks, x, per_network=True, precision=precision)
    guess = (out[..., 0] > 0).long() if out.shape[-1] == 1 else out.argmax(-1)
    if y.shape != guess.shape:
        raise InputError(f"y has shape {list(y.shape)}: one class for each example, {list(guess.shape)}, is needed")
    y = y.to(guess.device)
    counted = y != -100
    return ((guess == y) & counted).float().sum(1).div(counted.float().sum(1)).cpu()


def _try_out(work: Work, loss: Loss) -> int:
    """Number of outputs; errors say what does not fit: the inputs into the network, or its outputs to the labels."""
    (x, y), networks = work.load(range(1)), work.start(range(1))
    n = min(work.sgd.batch_size, len(x[0]))
    out = try_input(networks, x[0])
    refuse_hidden_randomness(work.initialiser, x[0])
    if loss == "bce" and out.shape[1] != 1:
        raise InputError(f"bce is for networks with one logit, not {out.shape[1]}; use loss='cross-entropy'")
    if len(x[0]) % work.sgd.batch_size == 1 and n > 1:  # batch normalisation cannot train on it
        module, last = networks.module(0).train(), x[0, :1]
        with own_randomness(work, range(1)), explained(module, last):
            module(last)
    with torch.no_grad(), own_randomness(work, range(1)):
        out = logits_of(networks.module(0)(x[0, :1]))  # as it is: images of outputs keep their shape
    classes = int(out.shape[1]) if out.dim() > 1 else 1
    _check_labels(y, loss, classes)
    try:
        value = work.loss(out.expand(n, *out.shape[1:]), y[0, :n])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        what = f"outputs {[n, *out.shape[1:]]} and labels {list(y[0, :n].shape)} of {y.dtype}"
        raise InputError(f"loss {loss} does not take {what} ({str(error).splitlines()[0]})") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError(f"the loss of a batch of {n} gave {shown(value)}: it must be one number, such as their mean")
    return classes


def _check_labels(y: Tensor, loss: Loss, classes: int) -> None:
    """Labels that are classes lie in 0, ..., classes - 1 (-100 is what cross-entropy leaves out); for bce in [0, 1]."""
    if loss == "bce" and bool(((y < 0) | (y > 1)).any()):
        raise InputError("bce wants labels 0 and 1, or numbers between; for -1 and +1 give (y + 1) / 2")
    if loss != "cross-entropy" or y.is_floating_point():
        return
    low, high = (int(value) for value in torch.aminmax(y))
    if high >= classes or (low < 0 and not ((y >= 0) | (y == -100)).all()):
        raise InputError(f"labels from {low} to {high}, but the network has {classes} outputs: classes are 0, 1, ...")


def _accuracy_if_classes(
    networks: Networks, data: Task, loss: Loss, outputs_count: int, precision: Precision
) -> Tensor:
    """`accuracy` [T], NaN where labels are not one class 0, 1, ... for each example.

    A number that "mse" is to come close to is no class, though it may be whole.
    """
    x, y = data
    classes = max(2, outputs_count)
    if loss == "mse" or y.dim() != 2:
        return torch.full((len(x),), math.nan, device="cpu")
    fits = ((y >= 0) & (y < classes) & (y == y.round())) | (y == -100)
    return accuracy(networks, x, y, precision=precision).where(fits.all(1).cpu(), math.nan)


def _known(parts: list[Tensor]) -> Tensor:
    """Accuracies [T], or [0] where none is known."""
    whole = torch.cat(parts) if parts else torch.empty(0, device="cpu")
    return whole[:0] if bool(whole.isnan().all()) else whole


def _concatenate(parts: list[Networks]) -> Networks:
    params = {name: torch.cat([part.params[name] for part in parts]) for name in parts[0].params}
    buffers = {name: torch.cat([part.buffers[name] for part in parts]) for name in parts[0].buffers}
    return Networks(parts[0].template, params, buffers)


def _padded(rows: list[Tensor]) -> Tensor:
    """Histories of different lengths as one matrix, filled up with NaN."""
    flat = [row for piece in rows for row in piece]
    return torch.nn.utils.rnn.pad_sequence(flat, batch_first=True, padding_value=float("nan"))
