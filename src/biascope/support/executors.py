"""Independent jobs by local processes or by Ray: results as they come, and the job of a lost worker again.

    with executor("ray", address="auto") as there:
        for index, outcome in there.map(function, items):  # in the order in which they end
            ...

Functions and items reach Ray's workers by cloudpickle, which takes functions within functions; local processes are
forked, so that nothing is sent to them at all. What a function returns comes back pickled, tensors on the CPU.
"""

import importlib
import multiprocessing
import os
import pickle
import signal
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map

from biascope.support.errors import BiascopeError, UnsupportedError
from biascope.support.processes import _packed, _unpacked

Choice = Literal["processes", "ray"]
Outcomes = Iterator[tuple[int, Any]]
TRIES = 3  # of a job whose worker is lost each time


@dataclass(frozen=True)
class Executor:
    """Who runs jobs, and what each of them takes."""

    jobs: int  # at a time; 0: as many as the resources allow
    cpus: float = 1.0
    gpus: float = 0.0

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Outcomes:
        """(index, what the function gave, or a `Failure`) for every item, in the order in which they end."""
        raise NotImplementedError


@dataclass(frozen=True)
class Failure:
    """An error of a job."""

    error: Exception


_CURRENT: ContextVar[Executor | None] = ContextVar("executor", default=None)


def current() -> Executor | None:
    """The executor of the `with` around; None where jobs are done one after another, here."""
    return _CURRENT.get()


@contextmanager
def executor(
    kind: Choice | None, *, jobs: int | None = None, cpus: float = 1.0, gpus: float = 0.0, address: str | None = None
) -> Iterator[Executor | None]:
    """Give jobs to local processes or to Ray; without Ray installed, to local processes, with a warning.

    Args:
        kind: None for neither.
        jobs: at a time; by default one per processor here, or as many as Ray's resources allow.
        cpus: threads of a job (and what Ray reserves for it).
        gpus: of a job on Ray, which may be a share of one.
        address: of a Ray cluster, "auto" for the one that this machine belongs to; None starts Ray here.
    """
    made: Executor | None = None
    started = False
    if kind == "ray":
        try:
            ray = _ray()
        except ImportError:
            if address is not None:
                raise UnsupportedError("Ray is not installed here: pip install 'biascope[ray]'") from None
            warnings.warn("Ray is not installed (pip install 'biascope[ray]'): local processes do it", stacklevel=4)
            kind = "processes"
        else:
            if not ray.is_initialized():
                size = {} if address is not None else {"num_cpus": jobs}
                ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR", **size)
                started = True
            made = OnRay(jobs or 0, cpus, gpus)
    if kind == "processes":
        if gpus or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise UnsupportedError("local processes cannot share this process's CUDA device: executor='ray' does that")
        made = Local(jobs or max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1), cpus)
    before = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(before)
        if started:
            ray.shutdown()


def _ray() -> Any:
    return importlib.import_module("ray")


def _outcome(function: Callable[[Any], Any], item: Any, threads: float) -> tuple[bool, Any]:
    """Do a job in a worker."""
    _CURRENT.set(None)  # its own jobs are done there, one after another
    os.environ["BIASCOPE_PROGRESS"] = "0"
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(threads)))
    try:
        found = function(item)
        return True, tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, found)
    except Exception as error:
        return False, _packed(error)
    finally:
        torch.set_num_threads(before)


def _pickled(outcome: tuple[bool, Any]) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        return pickle.dumps((False, _packed(error)))


def _read(outcome: tuple[bool, Any]) -> Any:
    fine, value = outcome
    return value if fine else Failure(_unpacked(value))


class OnRay(Executor):
    """Jobs as Ray tasks."""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Outcomes:  # noqa: D102
        ray = _ray()
        task = ray.remote(_outcome).options(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=TRIES - 1)
        sent, left, running = ray.put(function), deque(enumerate(items)), dict[Any, int]()
        try:
            while left or running:
                while left and (not self.jobs or len(running) < self.jobs):
                    index, item = left.popleft()
                    running[task.remote(sent, item, self.cpus)] = index
                (done, *_), _ = ray.wait(list(running), num_returns=1)
                index = running.pop(done)
                try:
                    outcome = ray.get(done)
                except ray.exceptions.RayError as error:
                    raise BiascopeError(f"Ray lost job {index} {TRIES} times: {error}") from error
                yield index, _read(outcome)
        finally:
            for task_left in running:
                ray.cancel(task_left, force=True)


class Local(Executor):
    """Jobs in forked processes; where there is no fork (Windows), one after another in this one."""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Outcomes:  # noqa: D102
        if "fork" not in multiprocessing.get_all_start_methods():
            for index, item in enumerate(items):
                yield index, _read(_outcome(function, item, self.cpus))
            return
        context = multiprocessing.get_context("fork")
        left, lost = deque(range(len(items))), Counter[int]()
        workers: dict[Connection, Any] = {}
        busy: dict[Connection, int] = {}

        def serve(pipe: Connection, others: list[Connection]) -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says when it ends
            for other in others:
                other.close()
            while True:
                try:
                    index = pipe.recv()
                except EOFError:
                    return
                pipe.send_bytes(_pickled(_outcome(function, items[index], self.cpus)))

        def start() -> None:
            mine, theirs = context.Pipe()
            worker = context.Process(target=serve, args=(theirs, [mine, *workers]), daemon=True)
            worker.start()
            theirs.close()
            workers[mine] = worker
            give(mine)

        def give(pipe: Connection) -> None:
            if left:
                busy[pipe] = left.popleft()
                pipe.send(busy[pipe])

        try:
            for _ in range(min(self.jobs, len(items))):
                start()
            while busy:
                for pipe in wait(list(busy)):
                    assert isinstance(pipe, Connection)
                    index = busy.pop(pipe)
                    try:
                        outcome = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        worker = workers.pop(pipe)
                        worker.join()
                        lost[index] += 1
                        if lost[index] == TRIES:
                            raise BiascopeError(
                                f"job {index} ended its process {TRIES} times, at last with exit code "
                                f"{worker.exitcode} (-9: killed, often for want of memory)"
                            ) from None
                        left.appendleft(index)
                        start()
                        continue
                    give(pipe)
                    yield index, _read(outcome)
        finally:
            for pipe, worker in workers.items():
                worker.kill()
                worker.join()
                pipe.close()
