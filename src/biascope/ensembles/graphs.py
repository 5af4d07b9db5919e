"""A step captured once as a CUDA graph and replayed: the host launches one thing instead of hundreds."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Captured(Generic[T]):
    """A captured step; calling it replays the graph (on `stream`, or else on the current stream).

    A graph knows addresses, not tensors. So this object holds the step, and with it every tensor that the step can
    reach, as long as the graph can be replayed. The owner of those tensors must not hold the captured step in turn: in
    a reference cycle, GPU memory waits for the garbage collector.
    """

    graph: torch.cuda.CUDAGraph
    step: Callable[..., T]
    inputs: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    out: T
    stream: torch.cuda.Stream | None

    def __call__(self, *values: Tensor) -> T:
        """One step on these values of the inputs; the next one overwrites what it gives."""
        with torch.cuda.stream(self.stream):
            for held, value in zip(self.inputs, values, strict=True):
                held.copy_(value)
            self.graph.replay()
        return self.out


def capture(
    step: Callable[..., T],
    *inputs: Tensor,
    device: torch.device,
    state: Iterable[Tensor] = (),
    stream: torch.cuda.Stream | None = None,
    warm_up: int = 3,
    optional: bool = False,
    search: bool = True,
    generators: Iterable[torch.Generator] = (),
) -> Callable[..., T]:
    """The step as a graph on CUDA; on another device the step itself.

    Capturing needs a few runs before it; afterwards `state` and torch's random numbers are as they were. Settings of
    precision that are in force at this call stay those of the graph.

    Args:
        step: works in place on tensors that stay where they are, and asks the device for nothing.
        inputs: examples of its arguments; the graph has copies, filled at every call.
        device: where it runs.
        state: whatever the step changes and reads again: parameters, buffers, momenta, counters.
        stream: to capture and to replay on; None replays on the current stream of each call.
        warm_up: runs before the capture.
        optional: a step that cannot be captured is given back as it is, instead of an error.
        search: let cuDNN time its algorithms, seconds for a deep network: for what will be replayed that long.
        generators: that the step draws from, beside torch's own; replays go on with their numbers.

    Example:
        >>> count = torch.zeros(1)
        >>> advance = capture(lambda by: count.add_(by), torch.ones(1), device=count.device, state=[count])
        >>> float(advance(torch.ones(1))), float(advance(2 * torch.ones(1)))
        (1.0, 3.0)
    """
    if device.type != "cuda":
        return step
    held, kept, drawn = tuple(value.clone() for value in inputs), tuple(state), tuple(generators)
    before, places = [tensor.detach().clone() for tensor in kept], [rng.get_state() for rng in drawn]
    here, side = torch.cuda.current_stream(device), stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    made = step
    side.wait_stream(here)
    try:
        # `stream` encloses `graph`, which leaves its stream the current one when a capture fails
        with torch.random.fork_rng([device]), fastest_convolutions(search), torch.cuda.stream(side):
            for left in reversed(range(warm_up)):
                with no_waiting() if optional and left == 0 else nullcontext():
                    step(*held)
            graph = torch.cuda.CUDAGraph()
            for rng in drawn:
                graph.register_generator_state(rng)
            with torch.cuda.graph(graph, stream=side):  # recorded, not run
                out = step(*held)
        made = Captured(graph, step, held, kept, out, stream)
    except RuntimeError:  # something in the network waits for the host, or needs more memory than there is
        if not optional:
            raise
        torch.cuda.synchronize(device)
    here.wait_stream(side)
    with torch.no_grad():
        for tensor, value in zip(kept, before):
            tensor.copy_(value)
    for rng, place in zip(drawn, places):
        rng.set_state(place)
    return made


@contextmanager
def no_waiting() -> Iterator[None]:
    """RuntimeError from operations that wait for the device, none of which can be captured.

    It is better to know before: a capture that fails on the way leaves torch's allocator and generator in disorder.
    """
    old = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(old)


@contextmanager
def fastest_convolutions(search: bool = True) -> Iterator[None]:
    """cuDNN times its algorithms for each new shape: worth it where one capture is replayed many times."""
    old = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = search or old
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = old
