"""Sweeps: written as they finish, resumed, never half-written."""

from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.ensembles.sweep import finished, sweep
from biascope.support.errors import BiascopeError, CorruptError, InputError

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
    with pytest.raises(BiascopeError, match="outcome must hold tensors and plain values"):
        sweep(lambda **job: {"bad": object()}, [{"n": 9}], tmp_path)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (4, "the function returned int; it must return a dict"),
        (None, "the function returned NoneType"),
        ({"v": object()}, "the outcome must hold tensors and plain values only"),
        ({"v": torch.ones(2).to_sparse()}, "its outcome cannot be written"),
        ({1: torch.ones(2)}, "its outcome cannot be written"),
    ],
)
def test_an_outcome_that_cannot_be_kept_is_a_failure_of_its_job(bad: object, said: str, tmp_path: Path) -> None:
    def work(n: int, name: str) -> dict[str, object]:
        return bad if n == 1 else {"n": n}  # type: ignore[return-value]

    with pytest.raises(BiascopeError, match=rf'1 of 4 jobs failed.*\n.*"n": 1.*{said}'):
        sweep(work, JOBS, tmp_path)
    assert finished(JOBS, tmp_path) == [JOBS[0], *JOBS[2:]]
    assert [o["n"] for o in sweep(lambda n, name: {"n": n}, JOBS, tmp_path)] == [0, 1, 2, 3]


def test_a_disk_that_takes_nothing_stops_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every further job would be computed for nothing."""
    calls: list[int] = []

    def work(n: int, name: str) -> dict[str, object]:
        calls.append(n)
        if n == 1:
            monkeypatch.setattr("biascope.files.os.replace", full)
        return {"n": n}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(BiascopeError, match="No space left on device"):
        sweep(work, JOBS, tmp_path)
    assert calls == [0, 1]


def test_same_job_twice_is_computed_once(tmp_path: Path) -> None:
    calls = []
    done = sweep(lambda n: calls.append(n) or {"n": n}, [{"n": 1}, {"n": 1}], tmp_path)  # type: ignore[func-returns-value]
    assert len(calls) == 1
    assert len(done) == 2


def test_numbers_and_arrays_of_numpy_are_kept(tmp_path: Path) -> None:
    """They failed every job, after it was computed."""
    made = {"count": np.int64(3), "mean": np.float32(0.5), "curve": np.arange(3.0)[::-1]}
    (outcome,) = sweep(lambda n: made, [{"n": 1}], tmp_path)
    assert (outcome["count"], outcome["mean"], outcome["curve"].tolist()) == (3, 0.5, [2.0, 1.0, 0.0])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BiascopeError, match=r"cannot write .*file: File exists"):
        sweep(lambda n: {}, [{"n": 1}], tmp_path / "file")
