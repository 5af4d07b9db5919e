"""Jobs by local processes and by a real Ray: the same outcomes, errors told, lost workers replaced."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from biascope.ensembles.sweep import sweep
from biascope.studies import Run, configure, execute
from biascope.support.errors import BiascopeError, InputError, UnsupportedError
from biascope.support.executors import Failure, current, executor


def outcomes(kind: Any, function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    with executor(kind, jobs=2) as there:
        assert there is not None
        assert current() is there
        found = dict(there.map(function, items))
    assert current() is None
    return [found[i] for i in range(len(items))]


def outcomes_in_their_places(kind: Any) -> None:
    weight = torch.arange(6.0).view(2, 3)

    def job(n: int) -> dict[str, Any]:
        assert current() is None
        return {"sum": (n * weight).sum(0), "n": n, "threads": torch.get_num_threads()}

    for n, found in enumerate(outcomes(kind, job, list(range(5)))):
        torch.testing.assert_close(found["sum"], n * weight.sum(0))
        assert (found["n"], found["threads"]) == (n, 1)


def an_error_is_that_of_its_job(kind: Any) -> None:
    def job(n: int) -> int:
        if n == 1:
            raise InputError("no data for 1")
        return n

    first, second, third = outcomes(kind, job, [0, 1, 2])
    assert (first, third) == (0, 2)
    assert isinstance(second, Failure)
    with pytest.raises(InputError, match="no data for 1"):
        raise second.error


def the_job_of_a_killed_worker_runs_again(kind: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def job(n: int) -> int:
        marker = Path(folder) / "killed"
        if n == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return n * n

    assert outcomes(kind, job, [0, 1, 2, 3, 4]) == [0, 1, 4, 9, 16]
    assert (tmp_path / "killed").exists()


def test_local_processes(tmp_path: Path) -> None:
    outcomes_in_their_places("processes")
    an_error_is_that_of_its_job("processes")
    the_job_of_a_killed_worker_runs_again("processes", tmp_path)
    a_sweep("processes", tmp_path / "sweep")


@pytest.mark.slow
def test_a_real_ray(tmp_path: Path) -> None:
    """One cluster of two workers, started here; a study gives the numbers that it gives without."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        outcomes_in_their_places("ray")
        an_error_is_that_of_its_job("ray")
        the_job_of_a_killed_worker_runs_again("ray", tmp_path)
        a_sweep("ray", tmp_path / "sweep")
        found = [execute(Run.create(tmp_path / str(kind), configure("nad/theory")), kind) for kind in (None, "ray")]
        assert found[0] == found[1]
        assert ray.is_initialized()  # it is not ours to end
    finally:
        ray.shutdown()


def test_a_job_that_always_ends_its_process_is_given_up() -> None:
    with pytest.raises(BiascopeError, match=r"job 1 ended its process 3 times.*-9"):
        outcomes("processes", lambda n: os.kill(os.getpid(), signal.SIGKILL) if n else n, [0, 1])


def test_what_cannot_come_back_is_an_error() -> None:
    (found,) = outcomes("processes", lambda n: lambda: n, [0])
    assert isinstance(found, Failure)


def a_sweep(kind: Any, tmp_path: Path) -> None:
    def job(n: int) -> dict[str, Any]:
        if n == 3:
            raise ValueError("three")
        return {"x": torch.full((2,), float(n)), "n": n}

    with pytest.raises(BiascopeError, match="1 of 4 jobs failed"):
        sweep(job, [{"n": n} for n in (1, 2, 3, 4)], tmp_path, kind, at_once=2)
    assert len(list(tmp_path.iterdir())) == 3
    here = sweep(job, [{"n": n} for n in (1, 2, 4)], tmp_path / "here")
    there = sweep(job, [{"n": n} for n in (1, 2, 4)], tmp_path, kind, at_once=2)
    assert [o["n"] for o in there] == [1, 2, 4]
    for one, other in zip(here, there):
        assert torch.equal(one["x"], other["x"])


def test_without_ray_local_processes_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.warns(UserWarning, match="local processes do it"):
        assert outcomes("ray", lambda n: n + 1, [1, 2]) == [2, 3]
    with pytest.raises(UnsupportedError, match="Ray is not installed"), executor("ray", address="auto"):
        pass


def test_local_processes_have_no_gpu() -> None:
    with pytest.raises(UnsupportedError, match="cannot share"), executor("processes", gpus=1):
        pass
