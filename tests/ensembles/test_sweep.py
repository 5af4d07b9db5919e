"""Sweeps: written as they finish, resumed, never half-written."""

from pathlib import Path

import pytest
import torch

from biascope.ensembles import finished, sweep
from biascope.errors import BiascopeError, CorruptError, InputError

JOBS = [{"n": n, "name": "a"} for n in range(4)]


def test_resumes_after_an_interrupt(tmp_path: Path) -> None:
    calls: list[int] = []

    def work(n: int, name: str) -> dict[str, object]:
        calls.append(n)
        if n == 2 and len(calls) < 4:
            raise KeyboardInterrupt
        return {"x": torch.full((2,), float(n)), "name": name, "n": n}

    with pytest.raises(KeyboardInterrupt):
        sweep(work, JOBS, tmp_path)
    assert finished(JOBS, tmp_path) == JOBS[:2]
    done = sweep(work, JOBS, tmp_path)
    assert calls == [0, 1, 2, 2, 3]
    assert [o["n"] for o in done] == [0, 1, 2, 3]
    assert done[3]["x"].tolist() == [3.0, 3.0]
    assert len(list(tmp_path.iterdir())) == 4  # nothing temporary is left


def test_one_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    def work(n: int, name: str) -> dict[str, object]:
        return {"y": 1 / (n - 1)}

    with pytest.raises(BiascopeError, match=r'1 of 4 jobs failed.*\n.*"n": 1.*ZeroDivisionError'):
        sweep(work, JOBS, tmp_path)
    assert len(finished(JOBS, tmp_path)) == 3


def test_damaged_and_impossible(tmp_path: Path) -> None:
    sweep(lambda **job: {"ok": 1}, JOBS[:1], tmp_path)
    file = next(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CorruptError, match="delete it"):
        sweep(lambda **job: {"ok": 1}, JOBS[:1], tmp_path)
    with pytest.raises(InputError, match="plain values"):
        sweep(lambda **job: {}, [{"n": object()}], tmp_path)
    with pytest.raises(InputError, match="outcome"):
        sweep(lambda **job: {"bad": object()}, [{"n": 9}], tmp_path)


def test_same_job_twice_is_computed_once(tmp_path: Path) -> None:
    calls = []
    done = sweep(lambda n: calls.append(n) or {"n": n}, [{"n": 1}, {"n": 1}], tmp_path)  # type: ignore[func-returns-value]
    assert len(calls) == 1
    assert len(done) == 2
