"""The queue of long runs: what its files may say, and a runner that keeps to its limit and loses nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from biascope.studies import queue as queue_module
from biascope.studies.queue import Entry, memory, read_queue, run_queue
from biascope.studies.runs import MARKER
from biascope.support.errors import InputError

QUEUE = Path(__file__).parents[2] / "reproductions" / "queue"
# takes the place of `biascope`: does what the name of the study says
STAND_IN = f"""
import os, pathlib, signal, sys, time
_, _, study, how, folder, *rest = sys.argv
folder = pathlib.Path(folder)
folder.mkdir(parents=True, exist_ok=True)
(folder / "{MARKER}").write_text("")
print(how, *rest, flush=True)
if study == "bad":
    sys.exit("it went wrong")
if study == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if study == "meet":
    while len(list(folder.parent.glob("meet*/{MARKER}"))) < 2:
        time.sleep(0.02)
if study == "pipe":
    print(os.environ["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
if study == "share":
    (folder / f"here-{{os.getpid()}}").touch()
    while len(list(folder.glob("here-*"))) < 3:
        time.sleep(0.02)
if study in ("slow", "deaf") and how == "--out":
    time.sleep(60)
(folder / "result.json").write_text('{{"measured": "all is well"}}')
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return [sys.executable, str(script)]


def entry(study: str, minutes: float = 0.01, name: str = "", **more: object) -> Entry:
    return Entry(study, minutes, name=name or study, **more)  # type: ignore[arg-type]


def test_what_fails_is_listed_and_stops_nothing(command: list[str], tmp_path: Path) -> None:
    runs, lines = tmp_path / "runs", list[str]()
    entries = [entry("bad"), entry("fast", set={"nets": ["a", "b"], "flag": True}, seed=3)]
    failed = run_queue(entries, runs, 1, command=command, say=lines.append)
    assert failed == {"bad": "--out --device cpu --size paper --seed 0\nit went wrong"}
    assert [each.state(runs) for each in entries] == ["begun", "done"]
    log = (runs / "logs" / "fast.txt").read_text()
    assert log == "--out --device cpu --size paper --seed 3 --set=nets=a,b --set=flag=true\n"
    assert lines[1].startswith("fast done in ")
    assert lines[1].endswith("all is well")
    assert memory(runs)["bad"]["failed"].endswith("it went wrong")
    assert 0 < memory(runs)["fast"]["seconds"] < 60
    more = [*entries, entry("fast", name="later")]
    run_queue(more, runs, 1, command=command, say=lines.append)
    assert [line.split()[0] for line in lines] == ["bad", "fast", "later", "bad"]  # what failed comes last


def test_the_limit_is_kept_and_what_was_cut_off_goes_on(command: list[str], tmp_path: Path) -> None:
    runs, lines, begin = tmp_path / "runs", list[str](), time.monotonic()
    slow = [entry("slow")]
    assert run_queue(slow, runs, 3 / 60, command=command, say=lines.append) == {}
    assert time.monotonic() - begin < 3 + queue_module.GRACE
    assert "stopped after 3 s" in lines[0]
    assert slow[0].state(runs) == "begun"
    run_queue(slow, runs, 1, command=command, say=lines.append)
    assert slow[0].state(runs) == "done"
    assert (runs / "logs" / "slow.txt").read_text().splitlines()[-1] == "--resume --size paper --seed 0"
    assert memory(runs)["slow"]["seconds"] > 3  # of both sessions


def test_a_run_that_does_not_stop_is_ended(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "GRACE", 0.2)
    begin = time.monotonic()
    run_queue([entry("deaf")], tmp_path / "runs", 2 / 60, command=command, say=lambda line: None)
    assert time.monotonic() - begin < 30


def test_what_does_not_fit_waits_unless_told(command: list[str], tmp_path: Path) -> None:
    runs, lines = tmp_path / "runs", list[str]()
    entries = [entry("long", 5.0), entry("fast")]
    run_queue(entries, runs, 1, command=command, say=lines.append)
    assert [each.state(runs) for each in entries] == ["waiting", "done"]
    assert lines[-1] == "1 runs wait: they do not fit what is left of the time"
    run_queue(entries, runs, 1, command=command, say=lines.append, start_anyway=True)
    assert entries[0].state(runs) == "done"


def test_small_runs_share_the_device(command: list[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    met = [entry("meet", name="meet-1", small=True), entry("meet", name="meet-2")]  # each waits for the other
    run_queue(met, runs, 1, command=command, say=lambda line: None)
    assert [each.state(runs) for each in met] == ["done", "done"]
    small, large, alone = entry("s", small=True), entry("l"), entry("a", alone=True)
    room = queue_module._has_room
    assert room(large, [small], 2)
    assert room(small, [large], 2)
    assert not room(large, [large], 2)
    assert not room(small, [large, small], 2)
    assert not room(alone, [small], 2)
    assert not room(small, [alone], 2)
    assert room(alone, [], 1)


def test_processes_share_a_run(command: list[str], tmp_path: Path) -> None:
    runs, shared = tmp_path / "runs", entry("share", processes=3)  # which ends once three of them are there
    run_queue([shared], runs, 1, command=command, say=lambda line: None)
    assert shared.state(runs) == "done"
    log = (runs / "logs" / "share.txt").read_text().splitlines()
    assert sorted(line.split()[0] for line in log) == ["--out", "--resume", "--resume"]
    small = entry("s", small=True)
    assert not queue_module._has_room(small, [shared], 9)
    assert not queue_module._has_room(shared, [small], 9)


def test_runs_on_one_gpu_run_at_once(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's server, here a script, is started before the runs, which know its pipe, and ended after them."""
    log, server = tmp_path / "log.txt", tmp_path / "bin" / "nvidia-cuda-mps-control"
    server.parent.mkdir()
    server.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $@ $(cat)" >> {log}\n')
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(server.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    run_queue([entry("pipe")], tmp_path / "runs", 1, command=command, device="cuda", say=lambda line: None)
    pipe = (tmp_path / "runs" / "logs" / "pipe.txt").read_text().splitlines()[-1]
    assert log.read_text().splitlines() == [f"{pipe} -d ", f"{pipe}  quit"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    run_queue([entry("fast")], tmp_path / "runs", 1, command=command, device="cpu", say=lambda line: None)
    assert len(log.read_text().splitlines()) == 2

    def interrupted(entries: object, running: object, jobs: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(queue_module, "_has_room", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_queue([entry("later")], tmp_path / "runs", 1, command=command, device="cuda", say=lambda line: None)
    assert [line.split(" ", 1)[1] for line in log.read_text().splitlines()[2:]] == ["-d ", " quit"]


def test_a_killed_queue_resumes(command: list[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    script = "import sys; from pathlib import Path; from biascope.studies.queue import Entry, run_queue\n"
    script += "run_queue([Entry('slow', .01, name='slow')], Path(sys.argv[1]), 5, command=sys.argv[2:])"
    first = subprocess.Popen([sys.executable, "-c", script, str(runs), *command], start_new_session=True)
    while not (runs / "slow" / MARKER).exists():
        assert first.poll() is None
        time.sleep(0.05)
    with pytest.raises(InputError, match="another queue, or a run that one left behind, is at work"):
        run_queue([entry("slow")], runs, 1, command=command)
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(30) != 0
    assert entry("slow").state(runs) == "begun"
    run_queue([entry("slow")], runs, 1, command=command, say=lambda line: None)
    assert entry("slow").state(runs) == "done"


def test_a_run_waits_for_its_data(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIASCOPE_DATA", str(tmp_path / "empty"))
    lines = list[str]()
    run_queue([entry("fast", data=["digits", "mnist"])], tmp_path / "runs", 1, command=command, say=lines.append)
    assert lines == ["fast waits for data: mnist"]
    waiting = entry("fast", data=["mnist"], extract="networks/ingredients")
    assert waiting.absent() == ["mnist"]
    (tmp_path / "empty" / "networks" / "ingredients").mkdir(parents=True)
    assert waiting.absent() == []


def test_the_queue_in_order_with_names_and_data(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("""
        [[run]]
        study = "nad/fig4a"
        minutes = 2
        [[run]]
        study = "nad/fig4a"
        set = { D = 32 }
        minutes = 4
        seed = 3
    """)
    (tmp_path / "b.toml").write_text("""
        [[run]]
        study = "nad/fig8"
        set = { nets = ["lenet", "vgg11"] }
        minutes = 4
        claims = ["nad/8, accuracy"]
        [[run]]
        study = "nad/fig4b"
        minutes = 9.5
        claims = ["nad/4b"]
        name = "mine"
    """)
    entries = read_queue(tmp_path)
    names = [each.name for each in entries]
    assert names[:3] == ["nad-fig8-paper-lenet-vgg11", "mine", "nad-fig4a-paper"]
    assert names[3].startswith("nad-fig4a-paper-")
    assert names[3].endswith("-seed3")
    assert [list(each.data) for each in entries] == [["cifar10"], [], [], []]  # the option dataset has that value
    assert [each.name for each in read_queue(tmp_path, "nad/fig4a")] == names[2:]
    assert [each.name for each in read_queue(tmp_path, "m*")] == ["mine"]
    assert [each.name for each in read_queue(tmp_path, "m*, nad/fig4a")] == ["mine", *names[2:]]
    assert [each.name for each in read_queue(tmp_path, "*-seed3,*")] == [names[3], *names[:3]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            'study = "nad/fig4z"',
            "a.toml, run 1 (nad-fig4z-paper): no study is called 'nad/fig4z'; did you mean nad/fig4",
        ),
        ('study = "nad/fig4a"\nset = { sigm = 2 }', "unknown option 'sigm'; did you mean sigma?"),
        ('study = "nad/fig4a"\nset = { sigma = "loud" }', "option sigma='loud' should be float"),
        ('study = "nad/fig4a"\nsize = "huge"', "size 'huge' is not one of"),
        ('study = "nad/fig4a"\nclaims = ["nad/4z"]\nname = "x"', "a.toml, run 1 (x): no claim is called 'nad/4z'"),
        ('study = "nad/fig4a"\ndata = ["mnits"]', "there is no set called 'mnits'"),
        ('study = "nad/fig4a"\nclaim = ["nad/4a"]', "unknown key 'claim'; did you mean claims?"),
        ('name = "y"', "a.toml, run 1 (y): it needs a study"),
        (
            'study = "nad/fig4a"\n[[run]]\nminutes = 1\nstudy = "nad/fig4a"',
            "nad-fig4a-paper is the name of more than one",
        ),
    ],
)
def test_wrong_entries_are_named(row: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"[[run]]\nminutes = 1\n{row}\n")
    with pytest.raises(InputError) as refused:
        read_queue(tmp_path)
    assert message in str(refused.value)


def test_claims_may_be_patterns_and_unknown_ones_can_run(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[[run]]\nstudy = "nad/fig4a"\nminutes = 1\nclaims = ["nad/4[ab]"]\n')
    assert list(read_queue(tmp_path)[0].claims) == ["nad/4a", "nad/4b"]
    (tmp_path / "a.toml").write_text('[[run]]\nstudy = "nad/fig4a"\nminutes = 1\nclaims = ["nad/new"]\n')
    with pytest.raises(InputError, match="no claim is called 'nad/new'"):
        read_queue(tmp_path)
    assert list(read_queue(tmp_path, any_claims=True)[0].claims) == ["nad/new"]


@pytest.mark.skipif(not QUEUE.is_dir(), reason="nothing waits")
def test_every_entry_of_the_real_queue_can_run() -> None:
    entries = read_queue(QUEUE)
    assert [each.name for each in entries if not each.claims] == []
