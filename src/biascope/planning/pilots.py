"""Small runs of a computation: how long they take, how much memory at the most, how many FLOPs."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

REPEATS, ENOUGH = 5, 0.5  # timed runs, or seconds of them


@dataclass(frozen=True)
class Pilot:
    """A run on n examples: seconds, peak of what it allocated in bytes, and floating-point operations."""

    n: int
    seconds: float
    peak: int
    flops: float


def measure(call: Callable[[], Any], n: int, device: torch.device) -> Pilot:
    """Run `call` a few times; the first time is not counted."""
    call()
    times: list[float] = []
    while not times or (len(times) < REPEATS and sum(times) < ENOUGH):
        begin = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - begin)
    return Pilot(n, min(times), peak_of(call, device), _flops_of(call))


def peak_of(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes allocated at the most while `call` runs, above what was allocated before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with (
        _quiet(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        call()
    profiler: Any = seen.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _flops_of(call: Callable[[], Any]) -> float:
    aten = torch.ops.aten
    products = dict.fromkeys((aten.addmm_, aten.baddbmm_), _product)
    with FlopCounterMode(display=False, custom_mapping=products) as counter:
        call()
    return float(counter.get_total_flops())


def _product(into: Any, a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * prod(a) * b[-1])


@contextmanager
def _quiet() -> Iterator[None]:
    """Some builds of torch's profiler write to standard error, below Python, when they start and stop."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
