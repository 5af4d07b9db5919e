"""Claims: one winner, dead holders found by their process or by their silence, nothing left behind."""

import json
import subprocess
import threading
import time
from pathlib import Path

import pytest

from biascope.support.claims import Claims
from biascope.support.errors import BiascopeError


def test_one_of_many_wins(tmp_path: Path) -> None:
    everybody, won = [Claims(tmp_path) for _ in range(16)], []
    start = threading.Barrier(16)

    def rush(claims: Claims) -> None:
        start.wait()
        won.append(sum(claims.take(str(i)) for i in range(20)))

    threads = [threading.Thread(target=rush, args=(claims,)) for claims in everybody]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 20
    for claims in everybody:
        claims.__exit__(None, None, None)
    assert not tmp_path.exists()


def test_released_and_taken_again(tmp_path: Path) -> None:
    with Claims(tmp_path / "c") as one, Claims(tmp_path / "c") as two:
        assert one.take("a")
        assert one.take("a")
        assert not two.take("a")
        one.release("a")
        assert two.take("a")
        assert not one.take("a")


def test_a_process_that_ended_holds_nothing(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = Claims(tmp_path)
    assert dead.take("a")
    dead.ended.set()
    sign = json.loads((tmp_path / "a.1").read_text())
    (tmp_path / "a.1").write_text(json.dumps(sign | {"pid": ended.pid}))
    with Claims(tmp_path) as claims:
        assert claims.take("a")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["a.1", "a.2"]
        claims.release("a", done=True)
    assert not tmp_path.exists()


def test_silence_for_a_lease_is_death_and_a_heartbeat_is_not(tmp_path: Path) -> None:
    sign = {"count": "000000003", "token": "x", "pid": 1, "host": "another machine"}
    (tmp_path / "a.1").write_text(json.dumps(sign))
    with Claims(tmp_path, lease=0.3) as one, Claims(tmp_path, lease=0.3) as two:
        assert not one.take("a")
        time.sleep(0.2)
        (tmp_path / "a.1").write_text(json.dumps(sign | {"count": "000000004"}))  # alive
        time.sleep(0.2)
        assert not one.take("a")
        time.sleep(0.35)
        assert one.take("a")
        for _ in range(4):  # the heartbeat of `one` keeps it
            assert not two.take("a")
            time.sleep(0.2)


def test_who_slept_does_not_take_the_claim_of_a_later_one(tmp_path: Path) -> None:
    with Claims(tmp_path, lease=60) as slept, Claims(tmp_path, lease=60) as later, Claims(tmp_path) as other:
        assert slept.take("a")
        (tmp_path / "a.1").unlink()  # what a successor does when the work is done
        assert later.take("a")
        slept.release("a")
        assert not other.take("a")


def test_a_full_disk_is_named_and_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with Claims(tmp_path / "c") as claims:
        monkeypatch.setattr("os.write", full)
        with pytest.raises(BiascopeError, match="No space left on device"):
            claims.take("a")
        monkeypatch.undo()
        assert claims.take("a")
