"""How fast the network is here: a short timed pilot, from which the panels choose how much they do.

Operations are no measure of time: a network of many small layers takes ten times as long as its operations say. What
follows from the pilot is written on the page (networks, examples), so that a reader knows what it rests on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ENOUGH = 0.1  # seconds after which a timing is trusted
BATCH = 128


@dataclass(frozen=True)
class Pace:
    """Seconds to evaluate an input (in a batch), to differentiate by a single input, to train on an example."""

    evaluate: float
    gradient: float
    train: float


def measure(network: nn.Module, x: Tensor) -> Pace:
    """The pace of a network at inputs like x [n, ...]."""
    parameters = [p for p in network.parameters() if p.requires_grad]

    def evaluate(n: int) -> None:
        with torch.no_grad():
            network(_batch(x, n))

    def by_input(_: int) -> None:
        one = x[:1].clone().requires_grad_()
        _gradient(network(one), [one])

    def train(n: int) -> None:
        _gradient(network(_batch(x, n)), parameters)

    largest = 1024 if x.device.type == "cuda" else 256  # a CPU has small caches
    return Pace(
        per_example(evaluate, x.device, largest),
        per_example(by_input, x.device, 1),
        per_example(train, x.device, BATCH),
    )


@contextmanager
def worthwhile_threads(network: nn.Module, x: Tensor) -> Iterator[None]:
    """Inside, torch has as many threads as are worth it for this network: all that are set, or one.

    Threads that wait for one another cost more than they bring where other jobs hold the cores, and for small layers.
    """
    many = torch.get_num_threads()
    parameters = [p for p in network.parameters() if p.requires_grad]

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        return per_example(lambda n: _gradient(network(_batch(x, n)), parameters), x.device, BATCH)

    try:
        if many > 1 and x.device.type == "cpu":
            with suppress(Exception):  # a network that cannot be differentiated: the panels will say so
                torch.set_num_threads(min((many, 1), key=seconds))
        yield
    finally:
        torch.set_num_threads(many)


def per_example(work: Callable[[int], None], device: torch.device, largest: int) -> float:
    """Seconds per example of work(n), with n grown until it takes long enough to be timed."""
    n = min(4, largest)
    while True:
        work(n)  # the first call of a size pays for memory, and on a GPU for loading kernels
        seconds = min(timed(lambda: work(n), device) for _ in range(2))  # noqa: B023
        if seconds >= ENOUGH or n >= largest:
            return seconds / n
        n = min(4 * n, largest)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the work is done, on the device too.

    On a CPU never more than the processor time it took: where other jobs hold the cores, the wall clock says how busy
    the machine is at this moment, and a card would shrink to nothing because of it.
    """
    _wait(device)
    begin, busy = time.perf_counter(), time.process_time()
    work()
    _wait(device)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    return min(seconds, busy) if device.type == "cpu" else seconds


def largest_within(seconds: float, each: float, sizes: tuple[int, ...]) -> int:
    """The largest of the sizes that fits into the seconds at `each` seconds per unit, or the smallest of all.

    Example:
        >>> largest_within(10.0, 0.5, (8, 16, 32)), largest_within(1.0, 0.5, (8, 16, 32))
        (16, 8)
    """
    return max((size for size in sizes if size * each <= seconds), default=min(sizes))


def in_words(seconds: float) -> str:
    """A duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.2g} hours"


def _batch(x: Tensor, n: int) -> Tensor:
    return x[torch.arange(n, device=x.device) % len(x)]


def _gradient(out: Tensor, by: Sequence[Tensor]) -> None:
    if by and out.requires_grad:
        torch.autograd.grad(out.reshape(len(out), -1)[:, 0].sum(), by, allow_unused=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
