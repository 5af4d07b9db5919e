"""The engines behind `train_ensemble`: each takes networks and their data and gives trained networks and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from biascope.ensembles.compiled import Forward, compiled_training, worth_compiling
from biascope.ensembles.engines import logits_of, takes_channels_last
from biascope.ensembles.evaluate import clock
from biascope.ensembles.graphs import capture
from biascope.ensembles.networks import Networks
from biascope.ensembles.precision import HALF, arithmetic
from biascope.ensembles.stacks import Together, own_randomness, same_kind, update
from biascope.ensembles.work import Work
from biascope.network.derivatives import RightGradients

Runner = Callable[[range, Tensor, Tensor], tuple[Networks, Tensor]]
LARGEST_GROUP = 1024
LARGE = 2_000_000  # parameters above which a network fills a GPU by itself, so that vmap is not tried
LANES = 4  # networks trained side by side by captured graphs
PLAIN: Forward = nn.Module.__call__


def make(engine: str, work: Work) -> Runner:
    """The function that trains the networks `indices` on inputs [T, n, ...] and labels [T, n]."""
    if engine == "vmap":
        return Together(work)
    if engine == "loop":
        return lambda indices, x, y: train_in_turn(work, indices, x, y)
    return CapturedStep(work)


def train_in_turn(work: Work, indices: range, x: Tensor, y: Tensor) -> tuple[Networks, Tensor]:
    """loop: torch's own SGD on each network."""
    networks, histories, trained = work.start(indices), [], []
    for place in range(len(indices)):
        module, own_x, own_y = networks.module(place).train(), x[place], y[place]
        sgd = torch.optim.SGD(module.parameters(), work.sgd.lr, work.sgd.momentum, weight_decay=work.sgd.weight_decay)
        rates, history, index = work.sgd.rates(len(own_x)), list[Tensor](), indices[place]
        with own_randomness(work, range(index, index + 1)), arithmetic(x.device, work.precision), RightGradients():
            for epoch in range(work.sgd.epochs):
                order = work.order(range(index, index + 1), epoch, len(own_x))[0]
                for batch in torch.split(order, work.sgd.batch_size):
                    sgd.param_groups[0]["lr"] = rates[len(history)]
                    sgd.zero_grad()
                    loss = work.loss(logits_of(module(own_x[batch])), own_y[batch])
                    torch.autograd.backward(loss)
                    if work.sgd.clip_norm is not None:
                        nn.utils.clip_grad_norm_(module.parameters(), work.sgd.clip_norm)
                    sgd.step()
                    history.append(loss.detach())
        histories.append(torch.stack(history))
        trained.append(module)
    return stacked(networks, trained), torch.stack(histories)


class CapturedStep:
    """graph: whole steps (batch, forward, backward, clipping, update) captured once and replayed for every network.

    One network of batch 128 does not fill a large GPU, so several are trained side by side, each lane on a stream of
    its own. Everything a step needs (order of the data, learning rates, step counter) lies on the device; a new network
    is copied into a lane. Where there is much to train, the network is compiled first.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.lanes: list[Lane] = []
        self.forward: Forward = PLAIN

    def __call__(self, indices: range, x: Tensor, y: Tensor) -> tuple[Networks, Tensor]:
        """Train the networks, one per lane."""
        with own_randomness(self.work, indices):  # captured dropout draws from the state at replay
            return self._train(indices, x, y)

    def _train(self, indices: range, x: Tensor, y: Tensor) -> tuple[Networks, Tensor]:
        networks = self.work.start(indices)
        if self.lanes and not (same_kind(self.lanes[0].training.x, x[0]) and same_kind(self.lanes[0].training.y, y[0])):
            self.lanes = []
        if not self.lanes:
            self._open(indices, networks, x, y)
        self._add_lanes(networks, x, y)
        lanes = self.lanes[: len(indices)]
        for place, lane in enumerate(lanes):
            lane.training.load(networks, place, indices[place], x[place], y[place])
        train_epochs(lanes, self.work.sgd.epochs)
        trainings = [lane.training for lane in lanes]
        trained = stacked(networks, [training.module for training in trainings])
        return trained, torch.stack([training.history for training in trainings])

    def _open(self, indices: range, networks: Networks, x: Tensor, y: Tensor) -> None:
        """First lanes, of the compiled network where there is one already; of none at all if it is only made now."""
        size, precision = min(self.work.sgd.batch_size, x.shape[1]), self.work.precision
        self.forward = compiled_training(networks, x[0, :size], precision, make=False) or PLAIN
        self._add_lanes(networks, x, y)
        if self.forward is PLAIN and self.work.is_long and self._is_worth_compiling(indices):
            first = self.lanes[0].training
            first.load(networks, 0, indices[0], x[0], y[0])
            made = compiled_training(networks, first.batch(size)[0], precision)
            if made is not None:
                self.lanes, self.forward = [], made

    def _add_lanes(self, networks: Networks, x: Tensor, y: Tensor) -> None:
        for place in range(len(self.lanes), len(networks)):
            self.lanes.append(Lane(self.work, networks.module(place), x[place], y[place], self.forward))

    def _is_worth_compiling(self, indices: range) -> bool:
        """By the time of a few steps, whose traces are gone when the lanes are loaded."""
        training = self.lanes[0].training
        few = min(3, len(training.rates))
        torch.cuda.synchronize(self.work.device)
        begin = clock()
        with torch.random.fork_rng([self.work.device]):
            for lane in self.lanes * few:
                lane.steps[training.full]()
            torch.cuda.synchronize(self.work.device)
        seconds = (clock() - begin) / few / len(self.lanes) * len(training.rates)
        template, left = self.work.initialiser.template, len(self.work.tasks) - indices.start
        return worth_compiling(template, seconds, left, left, training=True)


def train_epochs(lanes: list[Lane], epochs: int) -> None:
    """So many epochs in every lane, side by side; the current stream waits for the end."""
    n, size = len(lanes[0].training.x), lanes[0].training.work.sgd.batch_size
    streams = [lane.stream for lane in lanes if lane.stream is not None]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(lanes[0].training.x.device))
    for examples in [min(size, n - start) for start in range(0, n, size)] * epochs:
        for lane in lanes:
            lane.steps[examples]()
    for stream in streams:
        torch.cuda.current_stream(lanes[0].training.x.device).wait_stream(stream)


class Lane:
    """A training on a stream of its own, with a captured step for full batches and one for the last batch."""

    def __init__(self, work: Work, module: nn.Module, x: Tensor, y: Tensor, forward: Forward = PLAIN) -> None:
        self.training, self.steps = Training(work, module, x, y, forward), dict[int, Callable[[], None]]()
        self.stream = torch.cuda.Stream(x.device) if work.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        runs, state, search = min(3, len(self.training.rates)), self.training.state(), work.is_long
        with arithmetic(x.device, work.precision):
            for size in {self.training.full, len(x) % self.training.full or self.training.full}:
                step = partial(self.training.step, size)
                made = capture(step, device=x.device, state=state, stream=self.stream, warm_up=runs, search=search)
                self.steps[size] = made


class Training:
    """One network's training in tensors that stay where they are: steps ask the host for nothing.

    `forward` is for full batches; the last, smaller one is not worth another compilation.
    """

    def __init__(self, work: Work, module: nn.Module, x: Tensor, y: Tensor, forward: Forward = PLAIN) -> None:
        self.work, self.forward, sgd, n = work, forward, work.sgd, len(x)
        self.last = takes_channels_last(module, x)
        if self.last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module = module.train()
        self.buffers = {part: dict(part._buffers) for part in self.module.modules()}
        self.params: list[Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        self.momenta = [torch.zeros_like(p) for p in self.params] if sgd.momentum else []
        self.x = x.clone(memory_format=torch.channels_last) if self.last else x.clone()
        self.y = y.clone()
        self.full = min(sgd.batch_size, n)
        dtype = torch.promote_types(torch.float32, self.params[0].dtype).to_real()
        self.rates = torch.tensor(sgd.rates(n), dtype=dtype, device=x.device)
        self.orders = torch.zeros(len(self.rates), self.full, dtype=torch.long, device=x.device)
        self.history = torch.zeros(len(self.rates), device=x.device)
        self.count = torch.zeros(1, dtype=torch.long, device=x.device)

    def state(self) -> list[Tensor]:
        """What a step changes and later steps read."""
        return [*self.params, *self.module.buffers(), *self.momenta, self.count]

    def step(self, size: int) -> None:
        """One step on the first `size` examples of the batch whose turn it is."""
        sgd = self.work.sgd
        x, y = self.batch(size)
        out = self.forward(self.module, x) if size == self.full else self.module(x)
        out = logits_of(out)
        loss = self.work.loss(out.float() if out.dtype in HALF.values() else out, y)
        gradients = torch.autograd.grad(loss, self.params, allow_unused=True)
        self.settle_buffers()  # only now: the backward pass may read the old ones
        with torch.no_grad():
            update(sgd, self.params, self.momenta, gradients, self.rates.index_select(0, self.count))
            self.history.index_copy_(0, self.count, loss.detach().float().view(1))
            self.count += 1

    @torch.no_grad()
    def settle_buffers(self) -> None:
        """Put the value of a buffer that the module has replaced into the tensor that the next step reads."""
        for part in self.module.modules():
            for name, value in part._buffers.items():
                held = self.buffers.get(part, {}).get(name)
                if held is not None and value is not None and value is not held:
                    part._buffers[name] = held.copy_(value)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """The first `size` inputs and labels of the batch whose turn it is."""
        order = self.orders.index_select(0, self.count)[0, :size]
        x = self.x[order]
        return x.contiguous(memory_format=torch.channels_last) if self.last else x, self.y[order]

    @torch.no_grad()
    def load(self, networks: Networks, place: int, index: int, x: Tensor, y: Tensor) -> None:
        """Put a fresh network and its data into the fixed tensors."""
        own = dict((*self.module.named_parameters(), *self.module.named_buffers()))
        for name, value in networks.one(place).items():
            own[name].copy_(value)
        for momentum in self.momenta:
            momentum.zero_()
        self.x.copy_(x)
        self.y.copy_(y)
        n, batches = len(x), len(self.orders) // self.work.sgd.epochs
        padded = torch.zeros(batches * self.full, dtype=torch.long, device=x.device)
        for epoch in range(self.work.sgd.epochs):
            padded[:n] = self.work.order(range(index, index + 1), epoch, n)[0]
            self.orders[epoch * batches : (epoch + 1) * batches] = padded.view(batches, self.full)
        self.count.zero_()


# ------------------------------------------------------------------------------------------------- choosing an engine


def group_size(work: Work, room: int) -> int:
    """How many networks fit into memory with their data, parameters and what the backward pass keeps of a batch.

    The data are there three times: as loaded, in the tensors of the stack, and those of the test.
    """
    data = work.load(range(1))
    batch = min(work.sgd.batch_size, data[0].shape[1])
    networks, saved = work.start(range(1)), [0]

    def note(tensor: Tensor) -> Tensor:
        saved[0] += tensor.numel() * tensor.element_size()
        return tensor

    module = networks.module(0).train()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), own_randomness(work, range(1)):
        work.loss(logits_of(module(data[0][0, :batch])), data[1][0, :batch])
    tensors = sum(p.numel() * p.element_size() for p in module.parameters())
    own = sum(part.numel() * part.element_size() for part in data)
    return max(1, min(LARGEST_GROUP, int(0.8 * room) // (3 * own + 5 * tensors + 3 * saved[0])))


def choose(work: Work, group: int) -> str:
    """The engine that is fastest per network, by timing a few steps of each."""
    group = min(group, len(work.tasks))
    slow = "graph" if work.device.type == "cuda" else "loop"
    size = sum(p.numel() for p in work.initialiser.template.parameters())
    if group == 1 or (slow == "graph" and size > LARGE):
        return slow
    n = min(len(work.tasks[0][0]), 2 * work.sgd.batch_size)
    few = range(min(group, 32 if slow == "graph" else 4))
    trial, all_steps = 4 * (1 + len(few)), len(work.tasks) * len(work.sgd.rates(len(work.tasks[0][0])))
    if all_steps < 10 * trial:
        return slow  # trying would take longer than what it could save
    tasks = [(x[:n], y[:n]) for x, y in (work.tasks[i] for i in few)]
    short = replace(work, sgd=replace(work.sgd, epochs=1), tasks=tasks)
    times = {}
    for engine, indices in ((slow, range(1)), ("vmap", few)):
        run, data = make(engine, short), short.load(indices)
        try:
            for _ in range(2):  # the first run pays for compilation and capture
                begin = clock()
                run(indices, *data)
                if work.device.type == "cuda":
                    torch.cuda.synchronize(work.device)
                times[engine] = (clock() - begin) / len(indices)
        except (RuntimeError, NotImplementedError):  # vmap does not know every operation; the other engine does
            if engine == slow:
                raise
    return min(times, key=lambda engine: times[engine])


def stacked(networks: Networks, modules: list[nn.Module]) -> Networks:
    """Copies of the modules' parameters and buffers, as a stack like `networks`."""
    values = [dict((*m.named_parameters(), *m.named_buffers())) for m in modules]
    params = {name: torch.stack([v[name].detach().contiguous() for v in values]) for name in networks.params}
    buffers = {name: torch.stack([v[name].detach() for v in values]) for name in networks.buffers}
    return Networks(networks.template, params, buffers)
