"""Test processes that form `torch.distributed` groups (gloo): started once, they run one named case after the other.

A case is a function of a test module, `case(group, *args)`: `ranks.run(case, 2)` calls it on two ranks at once and
gives what each returned, in the order of the ranks. An error on a rank is raised here.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

MOST = 4
SECONDS = 60.0


class Failed:
    """An error of a rank."""

    def __init__(self, error: BaseException) -> None:
        try:
            self.error: BaseException = pickle.loads(pickle.dumps(error))
        except Exception:
            self.error = RuntimeError(f"{type(error).__name__}: {error}")
        self.notes = getattr(error, "__notes__", [])


class Ranks:
    """Four processes, of which a case takes the first `size`."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.workers: list[Any] = []
        self.pipes: list[Connection] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # torch is imported once, by the server
        context.set_forkserver_preload(["torch", "torch.distributed", "biascope", "torch.testing"])
        meeting = tempfile.mktemp(dir=self.folder.name)
        for rank in range(MOST):
            mine, theirs = context.Pipe()
            worker = context.Process(target=serve, args=(rank, meeting, theirs), daemon=True)
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.pipes.append(mine)

    def run(self, case: Callable[..., Any], size: int, *args: Any, seconds: float = SECONDS) -> list[Any]:
        """What `case(group, *args)` returned on each of `size` ranks; the first error of a rank is raised."""
        found = self.outcomes(case, size, *args, seconds=seconds)
        for outcome in found:
            if isinstance(outcome, Failed):
                for note in outcome.notes:
                    outcome.error.add_note(note)
                raise outcome.error
        return found

    def outcomes(self, case: Callable[..., Any], size: int, *args: Any, seconds: float = SECONDS) -> list[Any]:
        """The same with a `Failed` where a rank raised."""
        if not self.workers:
            self._start()
        file = Path(sys.modules[case.__module__].__file__ or "")
        for pipe in self.pipes[:size]:
            pipe.send((str(file), case.__module__, case.__qualname__, size, args))
        found, end = [], monotonic() + seconds
        for rank, pipe in enumerate(self.pipes[:size]):
            if not pipe.poll(max(0.0, end - monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} of {size} has not come back from {case.__qualname__} in {seconds} s")
            found.append(pipe.recv())
        return found

    def close(self) -> None:
        """End all processes; the next case starts new ones."""
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.workers, self.pipes = [], []


def serve(rank: int, meeting: str, pipe: Connection) -> None:
    """Run what comes through the pipe until it closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=MOST, timeout=timedelta(seconds=SECONDS)
    )
    groups = {size: dist.new_group(list(range(size)), timeout=timedelta(seconds=SECONDS)) for size in (1, 2, 3, 4)}
    while True:
        try:
            file, module, name, size, args = pipe.recv()
        except EOFError:
            return
        try:
            if module not in sys.modules:
                spec = importlib.util.spec_from_file_location(module, file)
                assert spec is not None
                assert spec.loader is not None
                sys.modules[module] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(sys.modules[module])
            torch.manual_seed(0)
            pipe.send(getattr(sys.modules[module], name)(groups[size], *args))
        except BaseException as error:
            pipe.send(Failed(error))
