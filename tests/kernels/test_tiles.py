"""Kernels on disk: same values, resumable after kill -9, damage found, foreign folders refused."""

import functools
import json
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope.kernels import open_kernel
from biascope.support.errors import CorruptError, InputError, UnsupportedError

MODEL = """
import os, sys, time, torch
from torch import nn
import biascope as bs

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    def forward(self, x):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        return self.net(x)

def make():
    torch.manual_seed(3)
    return Slow(), torch.randn(30, 6)

if __name__ == "__main__":
    model, x = make()
    bs.ntk(model, x, store=sys.argv[1], max_memory="40KB", precision="float64")
"""


def make() -> tuple[nn.Module, torch.Tensor]:
    scope: dict[str, object] = {"__name__": "model"}
    exec(MODEL, scope)
    return scope["make"]()  # type: ignore[operator,no-any-return]


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
    environment = os.environ | {"PAUSE": "0.05"}
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(folder)], env=environment)
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
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    model, x = make()
    with pytest.raises(InputError, match="the disk has 0 free"):
        bs.ntk(model, x, store=tmp_path / "k")
    assert not list((tmp_path / "k").iterdir())


def test_reading_does_not_change_the_file(tmp_path: Path) -> None:
    model, x = make()
    K = bs.ntk(model, x, outputs="trace", store=tmp_path / "k")
    K.values.mul_(2)
    assert not torch.equal(open_kernel(tmp_path / "k").tensor, K.tensor)


class Net(nn.Module):
    """A network whose kernel depends on much that is not a differentiated parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh()
        self.second, self.third = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.gate, self.slope, self.shift = torch.tanh, 1.0, torch.zeros(5)
        self.extra = nn.Parameter(torch.tensor(1.0))
        with torch.no_grad():
            self.third.weight.copy_(self.second.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.act(self.norm(self.first(x))) * self.slope + self.shift
        return self.second(self.gate(self.third(z))) * self.extra, z


def first(out: Any) -> torch.Tensor:
    return out[0]  # type: ignore[no-any-return]


def scaled(factor: float) -> Callable[[Any], torch.Tensor]:
    return lambda out: factor * out[0]


def relu(net: Net) -> None:
    net.act = nn.ReLU()  # type: ignore[assignment]


def loud(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return 2 * out


CHANGES: dict[str, Callable[[Net], Any]] = {
    "frozen weight": lambda net: net.first.weight.data.add_(0.5),
    "a single number": lambda net: net.extra.data.add_(1e-6),
    "buffer": lambda net: net.norm.running_mean.add_(1.0),  # type: ignore[union-attr]
    "activation module": relu,
    "activation function": lambda net: setattr(net, "gate", torch.sigmoid),
    "number": lambda net: setattr(net, "slope", 2.0),
    "tensor that is no buffer": lambda net: net.shift.add_(1.0),
    "hook": lambda net: net.first.register_forward_hook(loud),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_does_not_answer_for_another_network(tmp_path: Path, change: str) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    net = Net().eval()
    asked = {"params": "second", "output": first, "outputs": "trace", "store": tmp_path / "k"}
    before = bs.ntk(net, x, **asked).tensor.clone()  # type: ignore[arg-type]
    assert torch.equal(bs.ntk(net, x, **asked).tensor, before)  # type: ignore[arg-type]
    CHANGES[change](net)
    assert not torch.equal(bs.ntk(net, x, **asked | {"store": None}).tensor, before)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"holds another kernel: its (frozen is|entries are)"):
        bs.ntk(net, x, **asked)  # type: ignore[arg-type]


def test_a_folder_does_not_answer_for_another_selection(tmp_path: Path) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    net = Net().eval()  # "second" and "third" have equal weights
    bs.ntk(net, x, params="second", output=first, store=tmp_path / "k")
    with pytest.raises(InputError, match="holds another kernel: its parameters is"):
        bs.ntk(net, x, params="third", output=first, store=tmp_path / "k")


def test_keywords_of_the_data_count(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 1)

        def forward(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.a(u) * v.sum(1, keepdim=True)  # type: ignore[no-any-return]

    net, u, v = Two(), torch.randn(4, 3), torch.randn(4, 3)
    bs.ntk(net, {"u": u, "v": v}, store=tmp_path / "k")
    with pytest.raises(InputError, match="its data is"):
        bs.ntk(net, {"v": u, "u": v}, store=tmp_path / "k")


def test_output_functions_count_by_what_they_do(tmp_path: Path) -> None:
    net, x = Net().eval(), torch.randn(4, 4)
    same: list[tuple[Any, Any]] = [
        (scaled(2.0), scaled(2.0)),
        (operator.itemgetter(0), operator.itemgetter(0)),
        (functools.partial(first), functools.partial(first)),
    ]
    for i, (one, again) in enumerate(same):
        bs.ntk(net, x, output=one, store=tmp_path / str(i))
        bs.ntk(net, x, output=again, store=tmp_path / str(i))
    for other in (scaled(3.0), first, operator.itemgetter(1), lambda out: out[1]):
        with pytest.raises(InputError, match="holds another kernel"):
            bs.ntk(net, x, output=other, store=tmp_path / "0")


def test_a_folder_of_unknown_origin_is_not_resumed(tmp_path: Path) -> None:
    model, x = make()
    K = bs.ntk(model, x, store=tmp_path / "k").tensor.clone()
    config = json.loads((tmp_path / "k" / "kernel.json").read_text())
    del config["frozen"]
    (tmp_path / "k" / "kernel.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="does not say which frozen"):
        bs.ntk(model, x, store=tmp_path / "k")
    assert torch.equal(open_kernel(tmp_path / "k").tensor, K)


def test_layers_are_refused_and_the_error_is_measured(tmp_path: Path) -> None:
    model, x = make()
    with pytest.raises(UnsupportedError, match="whole kernel only"):
        bs.ntk(model, x, store=tmp_path / "k", by_layer=True)
    K = bs.ntk(model, x, store=tmp_path / "k", check=True)
    assert K.error == pytest.approx(bs.ntk(model, x, check=True).error, rel=0.5)  # rounding depends on the tiles
    assert 0 < K.error < 1e-5  # type: ignore[operator]
    assert open_kernel(tmp_path / "k").error == K.error
    assert bs.ntk(model, x, store=tmp_path / "k").error is None
