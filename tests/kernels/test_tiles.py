"""Kernels on disk: same values, resumable after kill -9, damage found, foreign folders refused."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope.errors import CorruptError, InputError
from biascope.kernels import open_kernel

MODEL = """
import sys, time, torch
from torch import nn
import biascope as bs

class Slow(nn.Module):
    def __init__(self, pause):
        super().__init__()
        self.net, self.pause = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), pause
    def forward(self, x):
        time.sleep(self.pause)
        return self.net(x)

def make(pause):
    torch.manual_seed(3)
    return Slow(pause), torch.randn(30, 6)

if __name__ == "__main__":
    model, x = make(0.05)
    bs.ntk(model, x, store=sys.argv[1], max_memory="40KB", precision="float64")
"""


def make() -> tuple[nn.Module, torch.Tensor]:
    scope: dict[str, object] = {"__name__": "model"}
    exec(MODEL, scope)
    return scope["make"](0.0)  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal", 0])
@pytest.mark.parametrize("cross", [False, True])
def test_same_values_as_in_memory(tmp_path: Path, outputs: str | int, cross: bool) -> None:
    model, x = make()
    x2 = x[:7] + 1 if cross else None
    budget = "40KB" if outputs in ("full", "diagonal") else "9KB"
    K = bs.ntk(model, x, x2, outputs=outputs, store=tmp_path / "k", max_memory=budget, precision="float64")
    exact = bs.ntk(model, x, x2, outputs=outputs, precision="float64")
    torch.testing.assert_close(K.tensor, exact.tensor, rtol=1e-12, atol=1e-14)
    assert len((tmp_path / "k" / "tiles.jsonl").read_text().splitlines()) > 1
    torch.testing.assert_close(open_kernel(tmp_path / "k").tensor, exact.tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_resumes_after_kill_nine(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MODEL)
    folder = tmp_path / "kernel"
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(folder)])
    log = folder / "tiles.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and len(log.read_text().splitlines()) >= 2):
        assert time.monotonic() < deadline
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = log.read_text().splitlines()
    with pytest.raises(CorruptError, match="unfinished kernel"):
        open_kernel(folder)
    model, x = make()
    K = bs.ntk(model, x, store=folder, max_memory="40KB", precision="float64")
    after = log.read_text().splitlines()
    assert after[: len(done)] == done, "finished tiles were computed again"
    assert len(after) > len(done)
    torch.testing.assert_close(K.tensor, bs.ntk(model, x, precision="float64").tensor, rtol=1e-12, atol=1e-14)


def test_a_damaged_tile_is_computed_again(tmp_path: Path) -> None:
    model, x = make()
    K = bs.ntk(model, x, outputs="trace", store=tmp_path / "k", max_memory="10KB", precision="float64")
    good = K.tensor.clone()
    array = np.lib.format.open_memmap(tmp_path / "k" / "values.npy", mode="r+")
    array[0, 1] += 1.0
    array.flush()
    with pytest.raises(CorruptError, match="tiles are missing"):
        open_kernel(tmp_path / "k")
    again = bs.ntk(model, x, outputs="trace", store=tmp_path / "k", max_memory="10KB", precision="float64")
    assert torch.equal(again.tensor, good)


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    model, x = make()
    good = bs.ntk(
        model, x, outputs="trace", store=tmp_path / "k", max_memory="10KB", precision="float64"
    ).tensor.clone()
    log = tmp_path / "k" / "tiles.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:-1]) + '\n{"row": 20, "co')
    again = bs.ntk(model, x, outputs="trace", store=tmp_path / "k", max_memory="10KB", precision="float64")
    assert torch.equal(again.tensor, good)


def test_other_computations_are_refused_by_name(tmp_path: Path) -> None:
    model, x = make()
    bs.ntk(model, x, store=tmp_path / "k", outputs="trace")
    with pytest.raises(InputError, match="its data is"):
        bs.ntk(model, x + 1, store=tmp_path / "k", outputs="trace")
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(InputError, match="its parameters is"):
        bs.ntk(model, x, store=tmp_path / "k", outputs="trace")
    with pytest.raises(InputError, match="its shape is"):
        bs.ntk(model, x, store=tmp_path / "k")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="is not empty and holds no kernel"):
        bs.ntk(model, x, store=tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").read_text() == "x"
    with pytest.raises(CorruptError, match="not a biascope kernel folder"):
        open_kernel(tmp_path / "other")
    (tmp_path / "k" / "kernel.json").write_text(json.dumps({"format": "else"}))
    with pytest.raises(CorruptError, match=r"kernel\.json"):
        bs.ntk(model, x, store=tmp_path / "k", outputs="trace")


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 0, 4096

    monkeypatch.setattr("os.statvfs", lambda path: Full())
    model, x = make()
    with pytest.raises(InputError, match="the disk has fewer free"):
        bs.ntk(model, x, store=tmp_path / "k")
    assert not list((tmp_path / "k").iterdir())


def test_reading_does_not_change_the_file(tmp_path: Path) -> None:
    model, x = make()
    K = bs.ntk(model, x, outputs="trace", store=tmp_path / "k")
    K.values.mul_(2)
    assert not torch.equal(open_kernel(tmp_path / "k").tensor, K.tensor)
