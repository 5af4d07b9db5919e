"""Captured steps do what eager ones do and leave nothing behind.

On a CPU a graph is imitated by a tape: it keeps the operations of the step and does them again on the same tensors. So
whatever a step decides on the host, or keeps in Python, shows up as a difference.
"""

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from biascope.data import Dataset
from biascope.ensembles import SGD, Networks, compiled, engines, evaluate, outputs, record, stacks, steppers
from biascope.ensembles.engines import Plan
from biascope.ensembles.evaluate import Evaluator
from biascope.ensembles.graphs import Captured, capture
from biascope.ensembles.stacks import Together
from biascope.ensembles.steppers import CapturedStep, Lane, train_in_turn
from biascope.ensembles.work import Work
from biascope_papers.gih import tracking
from biascope_papers.lazy import training as lazy
from biascope_papers.mine import ali, bottleneck, digit_ali, planar_gans, stacked_digits
from biascope_papers.mine import stacks as mine
from biascope_papers.ntk import training as function_space
from biascope_papers.spectral import fitting as spectral

CUDA = torch.device("cuda")


class Tape(TorchDispatchMode):
    """What stands in for a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def register_generator_state(self, rng: torch.Generator) -> None:
        """Replays draw from the generators that the step drew from."""

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Amnesia:
    """A graph that holds no tensor, as real ones do not."""

    def replay(self) -> None:
        pass


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA, imitated; what happened on the streams."""
    happened: list[str] = []

    class Stream:
        def __init__(self, device: object = None, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            happened.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def record_on(graph: Any, stream: Stream) -> Iterator[None]:
        happened.append("record")
        with graph if isinstance(graph, Tape) else nullcontext():
            yield

    here = Stream(name="here")
    for name, value in {
        "Stream": Stream,
        "CUDAGraph": Tape,
        "graph": record_on,
        "current_stream": lambda device=None: here,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: happened.append(f"sync {mode}"),
        "get_rng_state": lambda device=None: None,
        "set_rng_state": lambda state, device=None: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return happened


@pytest.fixture
def taped(events: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules that capture do so on the CPU; what they got from `capture`."""
    made: list[Any] = []

    def on_the_cpu(step: Callable[..., Any], *inputs: Tensor, device: torch.device, **more: Any) -> Any:
        made.append(capture(step, *inputs, device=CUDA, **more))
        return made[-1]

    for module in (engines, stacks, steppers, function_space, lazy, spectral, mine):
        monkeypatch.setattr(module, "capture", on_the_cpu)
    return made


class Descent:
    """SGD with momentum and dropout on tensors that stay where they are."""

    def __init__(self, device: str = "cpu") -> None:
        g = torch.Generator().manual_seed(0)
        self.w = torch.randn(5, 3, generator=g).to(device).requires_grad_(True)
        self.momentum = torch.zeros_like(self.w, requires_grad=False)
        self.count = torch.zeros(1, device=device)

    def state(self) -> list[Tensor]:
        return [self.w, self.momentum, self.count]

    def step(self, x: Tensor) -> Tensor:
        loss = F.dropout(x @ self.w, 0.5).square().mean()
        (gradient,) = torch.autograd.grad(loss, self.w)
        with torch.no_grad():
            self.momentum.mul_(0.9).add_(gradient)
            self.w.sub_(0.1 * self.momentum)
            self.count += 1
        return loss.detach()


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(48, 2))


def data(n: int = 50) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return x, (x.mean((1, 2, 3)) > 0).long()


def work_of(device: torch.device, dropout: bool, epochs: int = 2, n: int = 50) -> Work:
    factory = net if dropout else lambda: nn.Sequential(*(m for m in net() if not isinstance(m, nn.Dropout)))  # type: ignore[attr-defined]
    sgd = SGD(epochs=epochs, batch_size=16, lr=0.1, momentum=0.9, weight_decay=1e-2)
    return Work(record(factory), [data(n)] * 4, sgd, F.cross_entropy, 0, device, None, "float32")


# ------------------------------------------------------------------------------------------------- capture by itself


def test_on_a_cpu_the_step_itself_is_given_back() -> None:
    descent = Descent()
    step = descent.step
    assert capture(step, torch.ones(4, 5), device=torch.device("cpu"), state=descent.state()) is step
    assert float(descent.count) == 0


def test_replays_are_the_eager_steps_and_the_warm_up_leaves_no_trace(events: list[str]) -> None:
    eager, graph = Descent(), Descent()
    before, random = [t.detach().clone() for t in graph.state()], torch.get_rng_state()
    advance = capture(graph.step, torch.zeros(4, 5), device=CUDA, state=graph.state())
    assert events == ["side waits for here", "record", "here waits for side"]
    assert all(torch.equal(a, b) for a, b in zip(before, graph.state()))
    assert torch.equal(random, torch.get_rng_state())
    batches = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(2))
    losses = []
    for run in (eager.step, advance):
        with torch.random.fork_rng([]):
            losses.append([float(run(x)) for x in batches])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 6
    assert all(torch.equal(a, b) for a, b in zip(eager.state(), graph.state()))
    with pytest.raises(ValueError, match="zip"):
        advance()


def test_what_the_graph_writes_into_lives_as_long_as_it_and_no_longer(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Amnesia)

    def make() -> tuple[Callable[..., Tensor], list[weakref.ref[Tensor]]]:
        descent = Descent()
        example = torch.ones(4, 5)
        advance = capture(descent.step, example, device=CUDA)  # even what is not named as state
        assert isinstance(advance, Captured)
        assert advance.inputs[0] is not example
        return advance, [weakref.ref(t) for t in (*descent.state(), *advance.inputs)]

    gc.disable()
    try:
        advance, alive = make()
        assert all(ref() is not None for ref in alive)
        del advance
        assert all(ref() is None for ref in alive)  # without a reference cycle
    finally:
        gc.enable()


def test_a_step_that_waits_for_the_host(events: list[str]) -> None:
    descent, benchmark = Descent(), torch.backends.cudnn.benchmark
    before = [t.detach().clone() for t in descent.state()]

    def step(x: Tensor) -> Tensor:
        return descent.step(x * descent.count.item())

    assert capture(step, torch.ones(4, 5), device=CUDA, state=descent.state(), optional=True) is step
    assert all(torch.equal(a, b) for a, b in zip(before, descent.state()))
    assert events == ["side waits for here", "sync error", "sync 0", "record", "here waits for side"]
    with pytest.raises(RuntimeError, match="capturing"):
        capture(step, torch.ones(4, 5), device=CUDA, state=descent.state())
    assert torch.backends.cudnn.benchmark == benchmark


# ----------------------------------------------------------------------------------------- the places that capture


def test_lanes_train_as_the_loop_does(taped: list[Any]) -> None:
    work = work_of(torch.device("cpu"), dropout=False)
    x, y = (part.expand(2, *part.shape) for part in data())
    graph, losses = CapturedStep(work)(range(2), x, y)
    loop, expected = train_in_turn(work, range(2), x, y)
    assert len(taped) == 4  # two lanes, batches of 16 and of 2
    assert torch.equal(x[1], data()[0])  # lanes work on copies, also where the layout is right already
    assert torch.allclose(losses, expected, rtol=1e-4, atol=1e-5)
    for name, value in {**loop.params, **loop.buffers}.items():
        assert torch.allclose({**graph.params, **graph.buffers}[name].double(), value.double(), atol=1e-4), name


def test_lanes_draw_the_same_noise_whether_they_are_new_or_not(taped: list[Any]) -> None:
    work = work_of(torch.device("cpu"), dropout=True)
    x, y = (part.expand(2, *part.shape) for part in data())
    new, used = CapturedStep(work), CapturedStep(work)
    first = used(range(2), x, y)[1]
    again = used(range(2, 4), x, y)[1]
    assert len(taped) == 4
    assert torch.equal(new(range(2, 4), x, y)[1], again)
    assert not torch.allclose(first, again, rtol=1e-2)


@pytest.mark.parametrize("dropout", [False, True])
def test_lanes_of_a_compiled_network(taped: list[Any], monkeypatch: pytest.MonkeyPatch, dropout: bool) -> None:
    """Compiled after a few steps that leave no trace; the next sweep finds it; the last, smaller batch goes without."""
    x, y = (part.expand(2, *part.shape) for part in data())
    plain = CapturedStep(work_of(torch.device("cpu"), dropout))(range(2), x, y)
    monkeypatch.setattr("biascope.ensembles.work.LONG", 0)
    monkeypatch.setattr(compiled, "TRAINING_PAYS", 0.0)
    sizes: list[int] = []

    def fake(function: Callable[..., Tensor], **kwargs: object) -> Callable[..., Tensor]:
        def called(values: dict[str, Tensor], x: Tensor) -> Tensor:
            sizes.append(len(x))
            return function(values, x)

        return called

    monkeypatch.setattr(torch, "compile", fake)
    work = work_of(torch.device("cpu"), dropout)
    for lanes_made in (4 + 4, 4):
        taped.clear()
        networks, losses = CapturedStep(work)(range(2), x, y)
        assert len(taped) == lanes_made
        assert torch.equal(losses, plain[1])
        assert all(torch.equal(value, plain[0].params[name]) for name, value in networks.params.items())
        assert all(torch.equal(value, plain[0].buffers[name]) for name, value in networks.buffers.items())
    assert set(sizes) == {16}


def test_lanes_are_given_back_at_once(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Amnesia)
    monkeypatch.setattr(steppers, "capture", lambda *a, device, **k: capture(*a, device=CUDA, **k))
    work = work_of(torch.device("cpu"), dropout=True)
    gc.disable()
    try:
        lane = Lane(work, work.start(range(1)).module(0), *data())
        step, parameter = lane.steps[16], weakref.ref(lane.training.params[0])
        del lane
        assert parameter() is not None  # a step alone keeps what it needs
        del step
        assert parameter() is None
    finally:
        gc.enable()


def test_stacked_networks_train_as_the_loop_does(taped: list[Any]) -> None:
    """Twice: the second group goes through the tensors and captured steps of the first."""
    work = work_of(torch.device("cpu"), dropout=False)
    together = Together(work)
    for indices in (range(2), range(2, 4)):
        (x, y), expected = work.load(indices), train_in_turn(work, indices, *work.load(indices))
        trained, losses = together(indices, x, y)
        assert torch.allclose(losses, expected[1], atol=1e-5)
        for name, value in {**expected[0].params, **expected[0].buffers}.items():
            assert torch.allclose({**trained.params, **trained.buffers}[name].float(), value.float(), atol=1e-4), name
    assert [type(step) for step in taped] == [Captured, Captured]  # full batches and the last one, once


def test_outputs_by_one_graph_for_all_networks(taped: list[Any]) -> None:
    drawn, (x, _) = record(net).draw(0, 0, 3), data(7)
    with torch.no_grad():
        found = engines.Replay(drawn, x, Plan("graph", inputs=3))(drawn)
    assert len(taped) == 1
    assert torch.allclose(found, outputs(drawn, x, engine="loop"), atol=1e-5)


def test_a_graph_is_captured_once_for_all_groups_of_networks(taped: list[Any]) -> None:
    initialiser, (x, _) = record(net), data(7)
    by_graph = Evaluator(x, plan=Plan("graph", inputs=3))
    for start, stop in ((0, 3), (3, 4), (4, 9)):
        drawn = initialiser.draw(0, start, stop)
        assert torch.allclose(by_graph(drawn, total=9 - start), outputs(drawn, x, engine="loop"), atol=1e-5)
    assert len(taped) == 1
    other = record(net).draw(1, 0, 2)  # of another template: its parameters may be of other shapes
    assert torch.allclose(by_graph(other), outputs(other, x, engine="loop"), atol=1e-5)
    assert len(taped) == 2


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_function_space_fits(optimiser: str, taped: list[Any]) -> None:
    ends = []
    for graph in (True, False):
        model, looked = record(net).draw(0, 0, 1).module(0).train(), list[int]()
        recipe = function_space.Recipe(20, 16, 0.05, optimiser=optimiser, graph=graph)  # type: ignore[arg-type]
        with torch.random.fork_rng([]):
            losses = function_space.fit(model, *data(), recipe, seed=0, at=(0, 7, 20), look=looked.append)
        assert looked == [0, 7, 20]
        ends.append([losses, *model.state_dict().values()])
    assert len(taped) == 1
    assert isinstance(taped[0], Captured)
    assert all(torch.equal(a, b) for a, b in zip(*ends))


def test_lazy_training(taped: list[Any]) -> None:
    x, y = data()
    watched, model = lazy.Watched.of({"all": (x, y)}), record(net).draw(0, 0, 1).module(0)
    ends = [
        lazy.train(model, x, y, watched, lazy.Setting(2.0, 0.1, batch_size=16, steps=40, capture=on))
        for on in (True, False)
    ]
    assert len(taped) == 1
    assert torch.equal(ends[0].loss, ends[1].loss)
    assert torch.equal(ends[0].batch_loss[1:], ends[1].batch_loss[1:])
    assert len(ends[0].steps) > 2


def test_tracked_networks(taped: list[Any]) -> None:
    descent, seen = tracking.Descent(2, 0.1, 16, momentum=0.9, clip_norm=0.5), []
    factory = lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))  # noqa: E731
    for train in (tracking.train_lanes, tracking.train_stack):

        def watch(epoch: int, networks: Networks) -> None:
            seen.append((epoch, {name: value.clone() for name, value in networks.params.items()}))

        train(tracking.Task(record(factory), 5, *data(), descent), range(1, 3), watch)
    assert len(taped) == 4  # two lanes, batches of 16 and of 2
    assert [epoch for epoch, _ in seen] == [0, 1, 2] * 2
    for (_, lanes), (_, stack) in zip(seen[:3], seen[3:]):
        assert all(torch.allclose(lanes[name], stack[name], atol=1e-5) for name in stack)
    assert not torch.allclose(seen[0][1]["0.weight"], seen[2][1]["0.weight"], atol=1e-3)


def test_spectral_fits(taped: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    networks, z = spectral.draw_mlps(2, 1, 3, 16, seed=0), torch.arange(16)[:, None] / 16
    fit = partial(spectral.fit, networks, z, z.T.expand(2, 16), steps=30, lr=1e-2, every=10, clip=0.4)
    graph = fit()
    assert len(taped) == 1
    monkeypatch.setattr(spectral, "FEW", 30)
    eager = fit()
    assert len(taped) == 1
    assert torch.equal(graph.losses, eager.losses)
    assert (graph.losses[-1] < graph.losses[0]).all()


POINTS = torch.randn(200, 2, generator=torch.Generator().manual_seed(3))
IMAGES = Dataset(torch.rand(60, 1, 6, 6, generator=torch.Generator().manual_seed(4)), torch.arange(60) % 3, "stripes")
DIGITS = 2 * torch.rand(30, 28, 28, generator=torch.Generator().manual_seed(5)) - 1
TINY = {"steps": 6, "batch": 8, "lr": 1e-2}
PLANAR = TINY | {"generator_width": 5, "width": 5, "samples": 20}


def planar(beta: float) -> list[Tensor]:
    setting = planar_gans.Setting(**PLANAR, noise=2, code=2)
    made = planar_gans.train(POINTS, beta, setting, [3, 4], 0, planar_gans.modes)
    return [made["samples"], made["first"], made["nats"]]


def two_way(arm: ali.Arm) -> list[Tensor]:
    made = ali.train(POINTS, POINTS[:9], arm, ali.Setting(**PLANAR), [3, 4], 0)
    return [made["samples"], made["back"]]


def squeezed(name: str) -> list[Tensor]:
    setting = bottleneck.Setting(
        epochs=3, batch=20, lr=1e-2, width=5, bottleneck=3, average=0.9, critic_width=5, critic_lr=1e-2, draws=2
    )
    made = bottleneck.train(IMAGES, IMAGES, bottleneck.METHODS[name], setting, [3, 4], 0)
    return [made["errors"], made["nats"]]


def stacked(beta: float) -> list[Tensor]:
    setting = stacked_digits.Setting(**TINY, images=40, width=1, critic_width=1, samples=20)
    return [stacked_digits._train(DIGITS, beta, setting, 0)]


def digits_two_way(arm: ali.Arm) -> list[Tensor]:
    return list(digit_ali.train(DIGITS[:, None], DIGITS[:4, None], arm, digit_ali.Setting(**TINY, width=1), 0))


@pytest.mark.parametrize(
    "train",
    [partial(planar, beta) for beta in (0.0, 1.0)]
    + [partial(two_way, arm) for arm in ali.ARMS]
    + [partial(squeezed, name) for name in ("DVB + noise", "dropout", "MINE (additive)")]
    + [partial(stacked, beta) for beta in (0.0, 1.0)]
    + [partial(digits_two_way, arm) for arm in ("ALI + MINE", "ALICE (adv.)")],
    ids=lambda train: f"{train.func.__name__}-{train.args[0]}",
)
def test_games_with_mine(train: Callable[[], list[Tensor]], taped: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def adam(parameters: Any, lr: float, betas: tuple[float, float] = mine.BETAS) -> torch.optim.Adam:
        own = list(parameters)  # what `stacks.adam` makes on a GPU
        return torch.optim.Adam(own, lr=torch.tensor(lr), betas=betas, capturable=True, foreach=True)

    torch_adam = importlib.import_module("torch.optim.adam")  # torch.optim hides it
    monkeypatch.setattr(torch_adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    for module in (mine, ali, bottleneck, planar_gans, stacked_digits):
        monkeypatch.setattr(module, "adam", adam)
    graph = train()
    assert len(taped) == 1
    assert isinstance(taped[0], Captured)
    monkeypatch.setattr(mine, "capture", lambda step, *_, **__: step)
    assert all(torch.equal(a, b) for a, b in zip(graph, train(), strict=True))


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
def test_on_a_gpu_replays_are_the_eager_steps() -> None:
    """With the same dropout, although other memory of the same size was asked for in between."""
    batches = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(2)).cuda()

    def make() -> tuple[Callable[..., Tensor], Tensor, Tensor]:
        descent = Descent("cuda")
        advance = capture(descent.step, batches[0], device=CUDA, state=descent.state())
        assert isinstance(advance, Captured)
        assert float(descent.count) == 0
        return advance, descent.w.detach().clone(), Descent("cuda").w.detach()

    random = torch.cuda.get_rng_state()
    advance, after, start = make()
    assert torch.equal(random, torch.cuda.get_rng_state())
    assert torch.equal(after, start)
    other = [torch.full((5, 3), torch.nan, device="cuda") for _ in range(200)]
    torch.cuda.manual_seed(7)
    graph = torch.stack([advance(x).clone() for x in batches])
    torch.cuda.manual_seed(7)
    eager = torch.stack([*map(Descent("cuda").step, batches)])
    assert torch.allclose(graph, eager, rtol=1e-5)
    assert len(set(graph.tolist())) == 6
    assert all(bool(t.isnan().all()) for t in other)
    torch.cuda.set_rng_state(random)


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_waits_for_the_host() -> None:
    descent, stream = Descent("cuda"), torch.cuda.current_stream()

    def step(x: Tensor) -> Tensor:
        return descent.step(x * (1 + descent.count.item()))

    x = torch.ones(4, 5, device="cuda")
    assert capture(step, x, device=CUDA, state=descent.state(), optional=True) is step
    assert float(descent.count) == 0
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    assert bool(step(x).isfinite())  # dropout still draws
    assert isinstance(capture(descent.step, x, device=CUDA, state=descent.state(), optional=True), Captured)


@pytest.mark.gpu
def test_on_a_gpu_lanes() -> None:
    """Losses of the loop; the same noise in new lanes and in used ones; given back at once."""
    x, y = (part[None].cuda() for part in data())
    plain = work_of(CUDA, dropout=False)
    expected = train_in_turn(plain, range(1), x, y)[1]
    assert torch.allclose(CapturedStep(plain)(range(1), x, y)[1], expected, rtol=1e-2, atol=1e-3)
    work = work_of(CUDA, dropout=True)
    new, used = CapturedStep(work), CapturedStep(work)
    used(range(1), x, y)
    again = used(range(1, 2), x, y)[1]
    assert torch.allclose(new(range(1, 2), x, y)[1], again, rtol=1e-3, atol=1e-4)
    gc.disable()
    try:
        parameter = weakref.ref(used.lanes[0].training.params[0])
        del used
        assert parameter() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_on_a_gpu_spectral_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    networks, z = spectral.draw_mlps(2, 1, 3, 16, seed=0, device="cuda"), torch.arange(16)[:, None] / 16
    fit = partial(spectral.fit, networks, z, z.T.expand(2, 16), steps=60, lr=1e-3, every=10, clip=0.4)
    graph = fit()
    monkeypatch.setattr(spectral, "FEW", 60)
    assert torch.allclose(graph.losses, fit().losses, rtol=1e-4)


# ---------------------------------------------------------------------------------------- cuDNN's search for algorithms


@pytest.mark.parametrize("search", [False, True])
def test_algorithms_are_searched_for_while_capturing(search: bool, events: list[str]) -> None:
    seen, count = set(), torch.zeros(1)

    def step() -> None:
        seen.add(torch.backends.cudnn.benchmark)
        count.add_(1)

    before = torch.backends.cudnn.benchmark
    capture(step, device=CUDA, state=[count], search=search)
    assert seen == {search}
    assert torch.backends.cudnn.benchmark == before


def test_only_long_work_pays_for_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def eager(step: Callable[..., Any], *inputs: Tensor, device: torch.device, search: bool, **more: Any) -> Any:
        asked.append(search)
        return step

    monkeypatch.setattr(engines, "capture", eager)
    drawn, (x, _) = record(net).draw(0, 0, 3), data(7)
    for total in (3, 29, 31):
        monkeypatch.setattr(evaluate, "worth_compiling", lambda *args: False)
        Evaluator(x, plan=Plan("graph", inputs=3, seconds=1.0))(drawn, total)
    assert asked == [False, False, True]
    assert [work_of(CUDA, False, epochs).is_long for epochs in (624, 625)] == [False, True]  # 4 networks, 4 steps each


@pytest.mark.gpu
def test_on_a_gpu_replays_go_on_with_the_numbers_of_a_generator() -> None:
    drawn = []
    for captured in (True, False):
        rng, x = torch.Generator("cuda").manual_seed(1), torch.ones(3, device="cuda")

        def step(rng: torch.Generator = rng, x: Tensor = x) -> Tensor:
            return x * torch.rand(3, generator=rng, device="cuda")

        first = step()
        go = capture(step, device=CUDA, generators=[rng]) if captured else step
        assert isinstance(go, Captured) == captured
        drawn.append(torch.stack([first, *(go().clone() for _ in range(3))]))
    assert torch.equal(*drawn)


@pytest.mark.gpu
def test_on_a_gpu_games_are_played_as_if_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[Tensor]:
        setting = bottleneck.Setting(epochs=3, batch=20, lr=1e-2, width=5, bottleneck=3, critic_width=5, draws=2)
        method = bottleneck.METHODS["MINE (additive)"]
        made = bottleneck.train(IMAGES.to("cuda"), IMAGES.to("cuda"), method, setting, [3, 4], 0)
        setting = planar_gans.Setting(**PLANAR, noise=2, code=2)
        gan = planar_gans.train(POINTS.cuda(), 1.0, setting, [3, 4], 0, planar_gans.modes)
        digits = stacked_digits.Setting(**TINY, images=40, width=1, critic_width=1, samples=20)
        return [made["nats"], gan["samples"], gan["nats"], stacked_digits._train(DIGITS.cuda(), 1.0, digits, 0)]

    made: list[Any] = []
    monkeypatch.setattr(mine, "capture", lambda *a, **k: made.append(capture(*a, **k)) or made[-1])
    graph = train()
    assert [isinstance(each, Captured) for each in made] == [True] * 3
    monkeypatch.setattr(mine, "capture", lambda step, *_, **__: step)
    for a, b in zip(graph, train(), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)
