"""Run folders: what is written survives kills, full disks and changed minds; what is broken is named."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.studies.runs import MARKER, Run
from biascope.support import files
from biascope.support.errors import BiascopeError, CorruptError, InputError

CONFIG = {"study": "nad/fig4a", "seed": 3, "device": "cpu", "options": {"sigma": 3.0}}


def make(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", CONFIG)


def test_a_folder_says_what_it_was_made_with(tmp_path: Path) -> None:
    run = Run.open(make(tmp_path).path)
    assert run.config == CONFIG
    assert run.seed == 3
    assert run.environment["torch"] == torch.__version__
    assert {"python", "numpy", "biascope", "device_name", "threads", "git", "argv", "started"} <= set(run.environment)
    assert not run.finished


def test_arrays_come_back_bit_by_bit(tmp_path: Path) -> None:
    run = make(tmp_path)
    strided = torch.arange(12.0).reshape(3, 4).T
    run.save_arrays("spectra/a b", x=strided, y=np.arange(3), same=strided, empty=torch.zeros(0, 2))
    back = Run.open(run.path).load_arrays("spectra/a b")
    assert torch.equal(back["x"], strided)
    assert back["y"].dtype == torch.int64
    assert back["empty"].shape == (0, 2)
    assert run.arrays() == ["spectra/a b"]
    with pytest.raises(InputError, match=r"no arrays named 'c'; it has spectra/a b"):
        run.load_arrays("c")


def test_cached_computes_once_and_stores_scalars(tmp_path: Path) -> None:
    run, calls = make(tmp_path), []

    def compute() -> dict[str, object]:
        calls.append(1)
        return {"w": torch.randn(3, dtype=torch.float64), "loss": 0.25, "steps": 7, "name": "x", "ok": True, "no": None}

    first = run.cached("job 1", compute)  # type: ignore[arg-type]
    again = Run.resume(run.path, CONFIG).cached("job 1", compute)  # type: ignore[arg-type]
    assert len(calls) == 1
    assert torch.equal(first.pop("w"), again.pop("w"))  # type: ignore[arg-type]
    assert first == again == {"loss": 0.25, "steps": 7, "name": "x", "ok": True, "no": None}


def test_cached_each_computes_every_item_once_under_its_own_name(tmp_path: Path) -> None:
    run, calls = make(tmp_path), list[int]()

    def square(i: int) -> dict[str, int]:
        calls.append(i)
        return {"square": i * i}

    assert [each["square"] for each in run.cached_each("job", range(3), square)] == [0, 1, 4]
    again = Run.resume(run.path, CONFIG).cached_each("job", [2, 3], square)
    assert [each["square"] for each in again] == [4, 9]
    assert calls == [0, 1, 2, 3]
    assert run.arrays() == ["job 0", "job 1", "job 2", "job 3"]


def test_cached_together_computes_what_is_missing_some_at_a_time(tmp_path: Path) -> None:
    run, calls = make(tmp_path), list[list[str]]()

    def lengths(keys: list[str]) -> list[dict[str, int]]:
        calls.append(keys)
        return [{"length": len(key)} for key in keys]

    run.cached("bb", lambda: {"length": 2})
    found = run.cached_together(["a", "bb", "ccc", "dddd"], lengths, 2)
    assert [each["length"] for each in found] == [1, 2, 3, 4]
    assert run.cached_together(["dddd", "a"], lengths, 2) == [{"length": 4}, {"length": 1}]
    assert calls == [["a", "ccc"], ["dddd"]]
    assert run.cached_together(["dddd", "eeeee"], lengths, 2)[1] == {"length": 5}
    assert run.arrays() == ["a", "bb", "ccc", "dddd", "eeeee"]
    assert not (run.path / "claims").exists()


SHARED = """
import sys, time
from pathlib import Path
from biascope.studies import Run

run, me = Run.resume(sys.argv[1]), sys.argv[2]
(run.path.parent / me).touch()
while len(list(run.path.parent.glob("process-*"))) < 2:  # both begin at once
    time.sleep(0.01)

def job(name):
    with open(run.path.parent / "log.txt", "a") as log:
        log.write(f"{name} {me}\\n")
    if name == "b" and not (run.path.parent / "killed").exists():
        (run.path.parent / "killed").touch()
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    return {"length": len(name)}

def jobs(keys):
    return [job(key.removeprefix("job ")) for key in keys]

names = ["a", "b", "ccc", "dd"]
if sys.argv[3] == "together":
    found = run.cached_together([f"job {name}" for name in names], jobs, 1)
else:
    found = run.cached_each("job", names, job)
assert [each["length"] for each in found] == [1, 1, 3, 2]
assert run.cached("last", lambda: job("last"))["length"] == 4
"""


@pytest.mark.parametrize("how", ["each", "together"])
def test_processes_share_the_items_of_a_run(tmp_path: Path, how: str) -> None:
    """One of them is killed over an item: the other takes that too, at once. Everything else is computed once."""
    run = make(tmp_path)
    workers = [subprocess.Popen([sys.executable, "-c", SHARED, str(run.path), f"process-{i}", how]) for i in range(2)]
    while None in [worker.poll() for worker in workers]:  # also lets the system forget the one that was killed
        time.sleep(0.02)
    assert sorted(worker.wait() for worker in workers) == [-signal.SIGKILL, 0]
    lines = (tmp_path / "log.txt").read_text().split("\n")[:-1]
    names = [line.split()[0] for line in lines]
    assert sorted(names) == ["a", "b", "b", "ccc", "dd", "last"]
    assert len({line.split()[1] for line in lines}) == 2
    assert run.arrays() == ["job a", "job b", "job ccc", "job dd", "last"]
    assert not (run.path / "claims").exists()


def test_a_value_that_another_process_computes_is_waited_for(tmp_path: Path) -> None:
    run = make(tmp_path)
    script = "import sys, time; from biascope.studies import Run; run = Run.open(sys.argv[1])\n"
    script += (
        "def slow():\n    print('begun', flush=True); time.sleep(1); return {'who': 'other'}\nrun.cached('x', slow)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "begun\n"
    assert run.cached("x", lambda: {"who": "this"}) == {"who": "other"}
    assert other.wait(60) == 0


def test_a_cached_number_stays_a_number(tmp_path: Path) -> None:
    run = make(tmp_path)
    found = run.cached("diverged", lambda: {"loss": float("nan"), "norm": torch.tensor(float("inf")).item()})
    assert isinstance(found["loss"], float)
    assert math.isnan(found["loss"])
    assert found["norm"] == float("inf")


def test_a_torn_last_line_is_dropped_and_the_next_append_is_whole(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.log(step=1, loss=torch.tensor(0.5), bad=float("nan"))
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in Run.open(run.path).metrics()] == [1]
    resumed = Run.resume(run.path)
    resumed.log(step=3)
    assert [row["step"] for row in resumed.metrics()] == [1, 3]
    assert resumed.metrics()[0]["bad"] == "nan"


@pytest.mark.parametrize("name", [MARKER, "config.json", "environment.json"])
@pytest.mark.parametrize("content", ["{", "", "[1]", None])
def test_a_corrupt_file_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    run = make(tmp_path)
    if content is None:
        (run.path / name).unlink()
    else:
        (run.path / name).write_text(content)
    with pytest.raises(CorruptError, match=name):
        Run.open(run.path)


@pytest.mark.parametrize(
    ("name", "content", "way"),
    [
        (MARKER, "{", 'write {"format": 1} into it'),
        ("config.json", "{", "environment.json holds the command"),
        ("config.json", "[1]", "or start a new run"),
        ("config.json", None, "put it back from a copy"),
        ("environment.json", "{", "write {} into it"),
        ("metrics.jsonl", '{"a": 1}\nbroken\n', "delete that line, or the file, and go on"),
    ],
)
def test_a_damaged_file_comes_with_a_way_out(tmp_path: Path, name: str, content: str | None, way: str) -> None:
    run = make(tmp_path)
    whole = (run.path / name).read_text() if name != "metrics.jsonl" else ""
    if content is None:
        (run.path / name).unlink()
    else:
        (run.path / name).write_text(content)
    with pytest.raises(CorruptError, match=f"{re.escape(name)}.*{re.escape(way)}"):
        Run.open(run.path)
    mended = {MARKER: '{"format": 1}', "environment.json": "{}"}.get(name, whole)  # the ways out lead out
    (run.path / name).write_text(mended)
    assert Run.resume(run.path, CONFIG).config == CONFIG


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("where", ["mkdir", "write"])
def test_a_folder_that_cannot_be_filled_has_nothing_to_resume(
    where: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        (tmp_path / "run").mkdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(*{"mkdir": (Path, "mkdir"), "write": (files.os, "replace")}[where], refuse)
    with pytest.raises(BiascopeError, match=r"cannot begin a run in .*run: Read-only file system") as refused:
        make(tmp_path)
    assert "choose another folder (--out FOLDER)" in str(refused.value)
    assert "resume" not in str(refused.value)
    assert "intact" not in str(refused.value)
    assert (tmp_path / "run").exists() == there
    monkeypatch.undo()
    assert make(tmp_path).bare  # nothing is in the way


def test_only_a_bare_folder_is_discarded(tmp_path: Path) -> None:
    for number, keep in enumerate(
        ["arrays/x.safetensors", "metrics.jsonl", "figures/a.png", "notes.txt", "result.json"]
    ):
        run = Run.create(tmp_path / str(number), CONFIG)
        (run.path / keep).touch()
        before = sorted(run.path.rglob("*"))
        assert not run.bare
        assert not run.discard()
        assert sorted(run.path.rglob("*")) == before
    run = make(tmp_path)
    assert run.bare
    assert run.discard()
    assert not run.path.exists()


@pytest.mark.parametrize("name", [MARKER, "config.json", "environment.json", "metrics.jsonl"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    run = make(tmp_path)
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).mkdir()
    for look in (Run.open, Run.resume):
        with pytest.raises(CorruptError, match=f"{name} is a folder, a file belongs there"):
            look(run.path)


def test_foreign_and_future_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(CorruptError, match=r"photos is not a biascope run folder"):
        Run.open(tmp_path / "photos")
    with pytest.raises(InputError, match="nowhere is not a folder"):
        Run.open(tmp_path / "nowhere")
    run = make(tmp_path)
    (run.path / MARKER).write_text('{"format": 99}')
    with pytest.raises(CorruptError, match="format 99"):
        Run.open(run.path)


def test_a_damaged_line_and_a_damaged_array_are_named(tmp_path: Path) -> None:
    run = make(tmp_path)
    path = run.save_arrays("w", w=torch.zeros(100))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CorruptError, match=r"w\.safetensors is damaged"):
        run.load_arrays("w")
    (run.path / "metrics.jsonl").write_text('{"a": 1}\ngarbage\n{"a": 2}\n')
    with pytest.raises(CorruptError, match=r"metrics\.jsonl, line 2"):
        Run.open(run.path)


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    run = make(tmp_path)
    with pytest.raises(InputError, match="--resume"):
        Run.create(run.path, CONFIG)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(InputError, match="exists already: choose another"):
        Run.create(tmp_path / "full", CONFIG)


def test_resuming_with_another_configuration_names_the_key(tmp_path: Path) -> None:
    run = make(tmp_path)
    with pytest.raises(InputError, match=r"options\.sigma \(3\.0 stored, 2\.0 asked\)") as caught:
        Run.resume(run.path, {**CONFIG, "options": {"sigma": 2.0}})
    assert "seed" not in str(caught.value)
    with pytest.raises(InputError, match=r"extra \('absent' stored, 1 asked\)"):
        Run.resume(run.path, {**CONFIG, "extra": 1})


def test_config_must_be_plain(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="configuration must hold only numbers"):
        Run.create(tmp_path / "x", {"model": torch.nn.Linear(1, 1)})
    assert not (tmp_path / "x").exists()


JOB = """
import sys, time, torch
from pathlib import Path
from biascope.studies.runs import Run, MARKER
path = Path(sys.argv[1])
run = Run.resume(path) if (path / MARKER).exists() else Run.create(path, {"seed": 0})
for i in range(400):
    run.cached(f"job {i}", lambda: {"x": torch.full((20_000,), float(i)), "i": i})
    run.log(i=i)
"""


@pytest.mark.slow
def test_kill_minus_9_in_the_middle_leaves_a_resumable_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for _ in range(3):  # three kills at different places
        process = subprocess.Popen([sys.executable, "-c", JOB, str(path)])
        have = len(list(path.glob("arrays/*.safetensors")))
        while process.poll() is None and len(list(path.glob("arrays/*.safetensors"))) < have + 20:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        run = Run.open(path)
        for name in run.arrays():  # nothing half-written carries a real name
            assert run.load_arrays(name)["x"].unique().item() == int(name.split()[1])
    done = len(run.arrays())
    assert 60 <= done < 400
    before = {name: (path / "arrays" / f"{name}.safetensors").stat().st_mtime_ns for name in run.arrays()}
    (path / "arrays" / f"{files.TEMPORARY}x").touch()  # as one of the kills may have left
    for leftover in path.rglob(f"{files.TEMPORARY}*"):
        os.utime(leftover, (0, 0))  # long ago
    subprocess.run([sys.executable, "-c", JOB, str(path)], check=True)
    run = Run.open(path)
    assert len(run.arrays()) == 400
    for name, stamp in before.items():  # finished jobs were not computed again
        assert (path / "arrays" / f"{name}.safetensors").stat().st_mtime_ns == stamp
    assert not list(path.rglob(f"{files.TEMPORARY}*"))


FULL = """
import json, resource, sys, torch
from biascope.support.errors import BiascopeError
from biascope.studies.runs import Run
run = Run.create(sys.argv[1], {"seed": 0})
run.cached("small", lambda: {"x": torch.ones(10)})
for i in range(20):
    run.log(i=i)
size = (run.path / "metrics.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, size + 10))  # files cannot grow any more: a full disk
said = []
for attempt in (lambda: run.cached("big", lambda: {"x": torch.ones(100_000)}), lambda: run.log(i=20)):
    try:
        attempt()
    except BiascopeError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_a_full_disk_is_explained_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    array, line = json.loads(done.stdout)
    assert "big.safetensors" in array
    assert "Everything written before is intact" in array
    assert "metrics.jsonl" in line
    run = Run.open(path)
    assert run.arrays() == ["small"]
    assert [row["i"] for row in run.metrics()] == list(range(20))
    assert not list(path.rglob(f"{files.TEMPORARY}*"))


def test_disk_errors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path)

    def no_space(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(files.os, "replace", no_space)
    with pytest.raises(BiascopeError, match=r"result\.json: No space left on device"):
        files.write_json(run.path / "result.json", {})
    assert not run.finished


def test_going_on_with_other_code_is_said_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the numbers would be of another torch than `environment.json` says."""
    run = Run.create(tmp_path / "r", CONFIG)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert Run.resume(run.path, CONFIG).environment["torch"] == "9.9"  # nothing was computed yet
    monkeypatch.setattr(torch, "__version__", "9.10")
    run.save_arrays("a", x=torch.ones(1))
    with pytest.warns(UserWarning, match=r"other code or another device \(torch 9\.9 then, 9\.10 now\)"):
        resumed = Run.resume(run.path, CONFIG)
    assert resumed.environment["torch"] == "9.9"
    assert [each["torch"] for each in Run.open(run.path).environment["resumed"]] == ["9.10"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run.resume(run.path, CONFIG)  # once is enough


def test_resuming_leaves_what_another_process_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removed every temporary file: the write of a second process on the folder failed, and its job was lost."""
    run, move = make(tmp_path), os.replace

    def meanwhile(temporary: Path, to: Path) -> None:
        Run.resume(run.path)
        move(temporary, to)

    monkeypatch.setattr(os, "replace", meanwhile)
    run.save_arrays("a", x=torch.ones(2))
    assert run.load_arrays("a")["x"].tolist() == [1.0, 1.0]
