"""Claims on pieces of work in a folder that several processes see: one at a time has a piece, for as long as it lives.

A claim is a file `NAME.1`, made in one step that only one process can win (`O_EXCL`). A thread of the holder writes a
count into it every few seconds. A claim whose count has stood still for a whole lease, by the clock of who is looking,
or whose process on the same machine is gone, is dead: the next one claims `NAME.2`, again in one step, and so on. No
clocks of different machines are compared, nothing is renamed under a holder's feet. A holder that was only asleep may
then work on beside its successor, so what is done under a claim must be harmless when it is done twice.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from biascope.support.files import explain_write_errors

LEASE = 120.0  # seconds; network file systems may show a file as it was a minute ago
BEATS = 6  # signs of life per lease


class Claims:
    """The claims of this process in a folder, and what it has seen of those of others. Used in `with`."""

    def __init__(self, folder: Path, lease: float = LEASE) -> None:
        self.folder, self.lease = folder, lease
        self.token = secrets.token_hex(8)
        self.held: dict[str, Path] = {}
        self.seen: dict[str, tuple[str, bytes, float]] = {}  # file, content and since when it has stood there
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *error: object) -> None:
        """Give everything back: others need not wait for the lease."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()
        for name in list(self.held):
            self.release(name)
        with suppress(OSError):
            self.folder.rmdir()  # if nobody else is there

    def take(self, name: str) -> bool:
        """Claim a piece of work; False if somebody alive has it."""
        if name in self.held:
            return True
        last = max((self._count(file) for file in self.folder.glob(f"{name}.*")), default=0)
        if last and not self._dead(name, self.folder / f"{name}.{last}"):
            return False
        file = self.folder / f"{name}.{last + 1}"
        with explain_write_errors(file):
            while True:
                try:
                    handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                except FileExistsError:
                    return False
                except FileNotFoundError:  # another one left last and took the folder with it
                    self.folder.mkdir(parents=True, exist_ok=True)
                    continue
                break
            try:
                os.write(handle, self._sign(0))
            except OSError:
                file.unlink()
                raise
            finally:
                os.close(handle)
        with self.lock:
            self.held[name] = file
        if self.thread is None:
            self.thread = threading.Thread(target=self._beat, daemon=True)
            self.thread.start()
        return True

    def release(self, name: str, *, done: bool = False) -> None:
        """Give a claim back; if the work is done, also what dead ones left of it."""
        with self.lock:
            own = self.held.pop(name)
        for file in [*([own] if self._mine(own) else ()), *(self.folder.glob(f"{name}.*") if done else ())]:
            file.unlink(missing_ok=True)

    def _mine(self, file: Path) -> bool:
        """Is this still the claim of this process? It is not if that slept, and others have come and gone since."""
        try:
            return self.token.encode() in file.read_bytes()
        except OSError:
            return False

    def _sign(self, count: int) -> bytes:
        return json.dumps({"count": f"{count:09}", "token": self.token, "pid": os.getpid(), "host": _host()}).encode()

    def _beat(self) -> None:
        count = 0
        while not self.ended.wait(self.lease / BEATS):
            count += 1
            with self.lock:  # a claim that was given back is not written again
                for file in filter(self._mine, self.held.values()):
                    with suppress(OSError), file.open("r+b") as opened:  # the next sign may come through
                        opened.write(self._sign(count))

    def _dead(self, name: str, file: Path) -> bool:
        try:
            sign = file.read_bytes()
        except FileNotFoundError:  # given back just now
            return False
        before = self.seen.get(name)
        if before is None or before[:2] != (file.name, sign):
            self.seen[name] = (file.name, sign, monotonic())
        elif monotonic() - before[2] > self.lease:
            return True
        return _gone(sign)

    @staticmethod
    def _count(file: Path) -> int:
        last = file.name.rpartition(".")[2]
        return int(last) if last.isdecimal() else 0


def _host() -> str:
    """This machine since it was started, and its table of processes: containers share a name, not that."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _gone(sign: bytes) -> bool:
    """Is this the sign of a process of this machine that has ended?"""
    try:
        owner: dict[str, Any] = json.loads(sign)
        if owner["host"] != _host():
            return False
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return True
    except (ValueError, KeyError, TypeError, OSError):  # half written, or somebody else's process
        return False
    return False
