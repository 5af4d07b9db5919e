"""A study's independent jobs by local processes: the numbers of one process, also after a worker is killed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from biascope.cli.app import run as command
from biascope.studies import Run, configure, execute, load_result
from biascope.support.errors import InputError


def numbers(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())["numbers"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone") / "r"
    execute(Run.create(folder, configure("nad/theory")))
    return numbers(folder)


def test_the_command_and_its_slips(
    capsys: pytest.CaptureFixture[str], alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["run", "nad/theory", "--out", "r", "--executor", "processes", "--jobs", "2"]) == 0
    assert load_result("r")[0].path == Path("r")
    assert numbers(tmp_path / "r") == alone
    for slip, words in (
        (["--executor", "slurm"], "--executor 'slurm' should be processes or ray"),
        (["--jobs", "2"], "are for --executor ray or processes"),
        (["--executr=ray"], "did you mean --executor?"),
    ):
        assert command(["run", "nad/theory", *slip]) == 1
        assert words in capsys.readouterr().err


def test_a_killed_worker_and_an_error_in_the_middle(tmp_path: Path) -> None:
    from biascope.support.executors import executor

    run, marker = Run.create(tmp_path / "r", {"study": "none"}), tmp_path / "killed"

    def job(n: int) -> dict[str, Any]:
        if n == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if n == 9:
            raise InputError("no data for 9")
        return {"square": n * n}

    with executor("processes", jobs=2):
        assert [found["square"] for found in run.cached_each("job", range(4), job)] == [0, 1, 4, 9]
        with pytest.raises(InputError, match="no data for 9"):
            run.cached_each("job", [3, 9], job)
    assert run.arrays() == [f"job {n}" for n in range(4)]
    assert marker.exists()


def test_ray_says_which_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("biascope.studies.registry.device_of", lambda device: device)
    run = Run.create(tmp_path / "r", configure("nad/theory") | {"device": "cuda:1"})
    with pytest.raises(InputError, match="Ray says which GPU"):
        execute(run, "ray")
