"""The queue of long runs: what waits in TOML files, and a runner that starts the next ones until a time limit.

    [[run]]
    study = "nad/fig2"
    set = { nets = ["lenet"] }    # options of the study
    minutes = 4.0                 # expected
    small = true                  # may share the device with others
    processes = 6                 # that share the independent parts of the run, with nothing beside them
    claims = ["nad/2"]            # that the run decides

Each run is a process of its own (`python -m biascope run`) with its folder, so what is finished stays whatever happens
to the others, and what was cut off is resumed.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from biascope import data
from biascope.studies.claims import claims
from biascope.studies.registry import find
from biascope.studies.runs import MARKER
from biascope.support.errors import CorruptError, InputError, near
from biascope.support.files import read_json, write_json

MEMORY = "queue-state.json"  # seconds that each entry has taken, and how it failed
GRACE = 10.0  # seconds in which an interrupted run may save what it has
PAUSE = 0.1  # seconds between two looks at what runs
State = Literal["done", "begun", "waiting"]
NETWORKS = ("net", "nets", "network")  # options that name networks
COMMAND = (sys.executable, "-m", "biascope")


@dataclass(frozen=True)
class Entry:
    """One run of the queue."""

    study: str
    minutes: float
    size: str = "paper"
    set: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    small: bool = False  # runs side by side with others
    alone: bool = False  # its wall time is judged: nothing runs beside it
    processes: int = 1  # that go on with its folder together (see `Run.cached_each`)
    claims: Sequence[str] = ()
    data: Sequence[str] = ()  # sets that it reads, beside those that its options name
    extract: str = ""  # a folder in the cache of the sets with which it needs none of them
    name: str = ""  # of its run folder

    def state(self, runs: Path) -> State:
        """How far its run folder is."""
        folder = runs / self.name
        return "done" if (folder / "result.json").exists() else "begun" if (folder / MARKER).exists() else "waiting"

    def absent(self) -> list[str]:
        """The sets it reads that are not in the cache."""
        if self.extract and (data.data_root() / self.extract).is_dir():
            return []
        return [name for name in self.data if not data.info(name).cached]

    def arguments(self, runs: Path, device: str) -> list[str]:
        """What follows `biascope`; a begun run gets its options again, and refused if they have changed."""
        folder = str(runs / self.name)
        where = ["--resume", folder] if self.state(runs) == "begun" else ["--out", folder, "--device", device]
        options = [f"--set={key}={_text(value)}" for key, value in self.set.items()]
        return ["run", self.study, *where, "--size", self.size, "--seed", str(self.seed), *options]


@dataclass(frozen=True)
class _Job:
    entry: Entry
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    before: float  # seconds that it took in earlier sessions
    helpers: list[subprocess.Popen[bytes]] = field(default_factory=list)


def read_queue(
    folder: str | Path = "reproductions/queue", only: str = "*", any_claims: bool = False
) -> tuple[Entry, ...]:
    """The entries of all files of a folder whose name or study is like `only`: patterns, with commas between them.

    They come in the order of the patterns, then most claims a minute first.

    Every entry that cannot run is named: an unknown study, option, set or key, a name that is not its own; and, without
    `any_claims`, one for claims that no catalogue has (a claim may be a pattern).
    """
    entries: list[Entry] = []
    problems: list[str] = []
    patterns = [each.strip() for each in only.split(",")]

    def place(study: str, name: str) -> int:
        """Of the first pattern that means it; as many as there are if none does."""
        likes = (fnmatchcase(name, each) or fnmatchcase(study, each) for each in patterns)
        return next((i for i, like in enumerate(likes) if like), len(patterns))

    for file in sorted(Path(folder).glob("*.toml")):
        try:
            rows = tomllib.loads(file.read_text(encoding="utf-8")).get("run", [])
        except tomllib.TOMLDecodeError as error:
            raise CorruptError(f"{file} is not TOML: {error}") from error
        for count, row in enumerate(rows, 1):
            if place(str(row.get("study")), _name(row)) == len(patterns):
                continue
            try:
                entries.append(_entry(row, any_claims))
            except InputError as error:
                problems.append(f"{file.name}, run {count} ({_name(row)}): {error}")
    names = [entry.name for entry in entries]
    problems += [f"{name} is the name of more than one run" for name in dict.fromkeys(names) if names.count(name) > 1]
    if problems:
        raise InputError("\n  ".join([f"{folder} cannot be run as it is:", *problems]))
    if not entries:
        raise InputError(f"{folder}: no file there has a [[run]] with a study or name like {only!r}")
    return tuple(sorted(entries, key=lambda e: (place(e.study, e.name), -len(e.claims) / e.minutes)))


def _entry(row: Mapping[str, Any], any_claims: bool) -> Entry:
    known = [each.name for each in fields(Entry)]
    for key in row:
        if key not in known:
            raise InputError(f"unknown key {key!r}{near(key, known)}")
    if "study" not in row or not row.get("minutes", 0) > 0:
        raise InputError("it needs a study, and minutes above 0")
    entry = Entry(**{**row, "name": _name(row)})
    values = find(entry.study).values(entry.size, {key: _text(value) for key, value in entry.set.items()})
    meant = {claim: [one.id for one in claims() if fnmatchcase(one.id, claim)] for claim in entry.claims}
    unknown = [claim for claim, found in meant.items() if not found]
    if unknown and not any_claims:
        raise InputError(f"no claim is called {' or '.join(map(repr, unknown))}")
    for name in entry.data:
        data.info(name)
    words = [word.split(":")[0] for value in values.values() for word in _words(value)]
    decided = list(dict.fromkeys(one for claim, found in meant.items() for one in found or [claim]))
    needed = sorted({*entry.data, *(word for word in words if word in data.names())})
    return replace(entry, claims=decided, data=needed)


def _name(row: Mapping[str, Any]) -> str:
    """Of an entry: its own, or study, size, networks, a sum of its other options, seed."""
    options = dict(row.get("set", {}))
    parts = [str(row.get("study")), str(row.get("size", Entry.size))]
    parts += [word for key in NETWORKS for word in _words(options.pop(key, ()))]
    if options:
        parts.append(hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:6])
    if row.get("seed"):
        parts.append(f"seed{row['seed']}")
    return str(row.get("name") or re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts)))


def _words(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list | tuple) else [value])]


def _text(value: Any) -> str:
    """A value of TOML as `--set` reads it."""
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def memory(runs: Path) -> dict[str, dict[str, Any]]:
    """What is known of entries that ran: {name: {"seconds": ..., "failed": its last lines or ""}}."""
    found: dict[str, dict[str, Any]] = read_json(runs / MEMORY) if (runs / MEMORY).exists() else {}
    return found


def run_queue(
    entries: Sequence[Entry],
    runs: Path,
    minutes: float,
    *,
    jobs: int = 4,
    device: str = "cpu",
    start_anyway: bool = False,
    say: Callable[[str], None] = print,
    command: Sequence[str] = COMMAND,
) -> dict[str, str]:
    """Run the next entries until the limit, and return the last lines of those that failed.

    An entry that failed before comes last. One that does not fit the rest of the time is not started; with
    `start_anyway` it is, once nothing that fits is left, and goes on in the next session.
    """
    deadline = time.monotonic() + 60 * minutes
    (runs / "logs").mkdir(parents=True, exist_ok=True)
    known, running, failed = memory(runs), list[_Job](), dict[str, str]()
    waiting = [entry for entry in entries if entry.state(runs) != "done"]
    waiting.sort(key=lambda entry: bool(known.get(entry.name, {}).get("failed")))
    for entry in [entry for entry in waiting if entry.absent()]:
        say(f"{entry.name} waits for data: {', '.join(entry.absent())}")
        waiting.remove(entry)

    def spent(entry: Entry) -> float:
        return float(known.get(entry.name, {}).get("seconds", 0)) if entry.state(runs) == "begun" else 0.0

    def ended(job: _Job, stopped: bool = False) -> None:
        seconds, name = time.monotonic() - job.began, job.entry.name
        last = ""
        if job.entry.state(runs) == "done":
            say(f"{name} done in {seconds:.0f} s: {_measured(runs / name)}")
        elif stopped:
            say(f"{name} stopped after {seconds:.0f} s; it goes on next time")
        else:
            last = failed[name] = "\n".join(job.log.read_text(errors="replace").splitlines()[-5:])
            say(f"{name} failed after {seconds:.0f} s")
        known[name] = {"seconds": round(job.before + seconds, 1), "failed": last}
        write_json(runs / MEMORY, known)

    beside = max([jobs, *(entry.processes for entry in waiting)])
    with _sole_user(runs) as lock, _interruptible(), _one_gpu_for_several(device if beside > 1 else "cpu"):
        try:
            while (left := deadline - time.monotonic()) > 0:
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    _stop(job.helpers, patience=GRACE)  # they end by themselves, and may be writing now
                    ended(job)
                for job in running:
                    _wait(job.helpers, 0)  # so that what a killed one held is free at once
                    if len(job.helpers) + 1 < job.entry.processes and job.entry.state(runs) == "begun":
                        arguments = job.entry.arguments(runs, device)
                        job.helpers.append(_start([*command, *arguments], job.log, job.entry.processes, lock))
                room = [entry for entry in waiting if _has_room(entry, [job.entry for job in running], jobs)]
                fits = [entry for entry in room if 60 * entry.minutes - spent(entry) <= left]
                if startable := fits or (room if start_anyway else []):
                    entry = startable[0]
                    waiting.remove(entry)
                    before, log = spent(entry), runs / "logs" / f"{entry.name}.txt"
                    process = _start([*command, *entry.arguments(runs, device)], log, max(jobs, entry.processes), lock)
                    running.append(_Job(entry, process, log, time.monotonic(), before))
                elif running:
                    time.sleep(min(PAUSE, left))
                else:
                    break
            if waiting:
                say(f"{len(waiting)} runs wait: they do not fit what is left of the time")
        finally:
            _stop([process for job in running for process in (job.process, *job.helpers)])
            for job in running:
                ended(job, stopped=True)
    return failed


def _has_room(entry: Entry, running: Sequence[Entry], jobs: int) -> bool:
    """Whether an entry may start beside others: no more than one of them is large."""
    if any(each.alone or each.processes > 1 for each in (entry, *running)):
        return not running
    return len(running) < jobs and (entry.small or all(other.small for other in running))


def _start(command: Sequence[str], log: Path, jobs: int, lock: int) -> subprocess.Popen[bytes]:
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "BIASCOPE_PROGRESS": "0"}
    with log.open("ab") as out:  # a group of its own, so that Ctrl-C reaches this process alone
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            process_group=0,
            pass_fds=(lock,),
        )


def _stop(processes: Sequence[subprocess.Popen[bytes]], patience: float = 0.0) -> None:
    """Interrupt those that do not end by themselves, wait until they have saved what they have, and end the rest."""
    _wait(processes, patience)
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in _wait(processes, GRACE):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[subprocess.Popen[bytes]]:
    """Those that have not ended by then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(PAUSE)
    return [process for process in processes if process.poll() is None]


def _measured(folder: Path) -> str:
    text = str(read_json(folder / "result.json").get("measured", ""))
    return text if len(text) <= 160 else f"{text[:160]}..."


@contextmanager
def _sole_user(runs: Path) -> Iterator[int]:
    """A lock on the folder, held also by the runs themselves: two processes would spoil each other's folders."""
    import fcntl  # not on Windows

    with (runs / "queue.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"another queue, or a run that one left behind, is at work in {runs}") from error
        yield lock.fileno()


@contextmanager
def _one_gpu_for_several(device: str) -> Iterator[None]:
    """NVIDIA's MPS, where it is installed and not running: without it, processes take turns on a GPU."""
    control, key = shutil.which("nvidia-cuda-mps-control"), "CUDA_MPS_PIPE_DIRECTORY"
    if control is None or key in os.environ or not device.startswith("cuda"):
        yield
        return
    with tempfile.TemporaryDirectory() as pipes:
        os.environ[key] = pipes
        logs = {**os.environ, "CUDA_MPS_LOG_DIRECTORY": pipes}
        begun = subprocess.run([control, "-d"], env=logs, stdin=subprocess.DEVNULL, start_new_session=True, check=False)
        try:
            yield
        finally:
            del os.environ[key]
            if begun.returncode == 0:
                subprocess.run([control], env=logs, input=b"quit\n", stdout=subprocess.DEVNULL, timeout=60, check=False)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM end the queue cleanly; a handler also makes SIGINT reach runs of a queue in the background."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
