"""How fast the network is here: a short timed pilot, from which the panels choose how much they do.

Operations are no measure of time: a network of many small layers takes ten times as long as its operations say. What
follows from the pilot is written on the page (networks, examples), so that a reader knows what it rests on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from biascope.ensembles.evaluate import clock

ENOUGH = 0.1  # seconds after which a timing is trusted
BATCH = 128


@dataclass(frozen=True)
class Pace:
    """Seconds to evaluate an input (in a batch), to differentiate by a single input, to train on an example."""

    evaluate: float
    gradient: float
    train: float


def measure(network: nn.Module, x: Tensor) -> Pace:
    """The pace of a network at inputs like x [n, ...].

    Example:
        >>> pace = measure(nn.Linear(2, 1), torch.zeros(4, 2))
        >>> 0 < pace.evaluate < 1
        True
    """
    parameters = [p for p in network.parameters() if p.requires_grad]

    def batch(n: int) -> Tensor:
        return x[torch.arange(n, device=x.device) % len(x)]

    def evaluate(n: int) -> None:
        with torch.no_grad():
            network(batch(n))

    def by_input(_: int) -> None:
        one = x[:1].clone().requires_grad_()
        _gradient(network(one), [one])

    def train(n: int) -> None:
        _gradient(network(batch(n)), parameters)

    largest = 1024 if x.device.type == "cuda" else 256  # a CPU has small caches
    return Pace(
        per_example(evaluate, x.device, largest),
        per_example(by_input, x.device, 1),
        per_example(train, x.device, BATCH),
    )


def per_example(work: Callable[[int], None], device: torch.device, largest: int) -> float:
    """Seconds per example of work(n), with n grown until it takes long enough to be timed.

    Example:
        >>> import time
        >>> per_example(lambda n: time.sleep(0.001 * n), torch.device("cpu"), 4) < 0.01
        True
    """
    n = min(4, largest)
    while True:
        work(n)  # the first call of a size pays for memory, and on a GPU for loading kernels
        seconds = min(timed(lambda: work(n), device) for _ in range(2))  # noqa: B023
        if seconds >= ENOUGH or n >= largest:
            return seconds / n
        n = min(4 * n, largest)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the work is done, on the device too.

    Example:
        >>> timed(lambda: None, torch.device("cpu")) < 0.1
        True
    """
    _wait(device)
    begin = clock()
    work()
    _wait(device)
    return clock() - begin


def largest_within(seconds: float, each: float, sizes: tuple[int, ...]) -> int:
    """The largest of the sizes that fits into the seconds at `each` seconds per unit, or the smallest of all.

    Example:
        >>> largest_within(10.0, 0.5, (8, 16, 32)), largest_within(1.0, 0.5, (8, 16, 32))
        (16, 8)
    """
    return max((size for size in sizes if size * each <= seconds), default=min(sizes))


def in_words(seconds: float) -> str:
    """A duration for people.

    Example:
        >>> in_words(47), in_words(600), in_words(9000)
        ('47 seconds', '10 minutes', '2.5 hours')
    """
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.2g} hours"


def _gradient(out: Tensor, by: Sequence[Tensor]) -> None:
    if by and out.requires_grad:
        torch.autograd.grad(out.reshape(len(out), -1)[:, 0].sum(), by, allow_unused=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
