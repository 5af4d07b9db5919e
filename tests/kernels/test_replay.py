"""Replayed kernels without a GPU: a graph is played by the calls it would hold. On a GPU: test_ntk_gpu.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.kernels import empirical, replay
from biascope.network.functional import functional
from biascope.network.stream import anatomy


class Net(nn.Module):
    """A network with an attribute that says what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(3, 5), nn.Linear(5, 2), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x).tanh()) * self.scale
        return out


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What graphs did."""
    done: list[str] = []
    jobs: dict[int, Any] = {}
    launch = replay._Replay._launch

    def remembered(self: Any, job: Any) -> None:
        jobs[id(self.graph)] = (self, job)
        launch(self, job)

    class Graph:
        def replay(self) -> None:
            done.append("replayed")
            mine, job = jobs[id(self)]
            launch(mine, job)

    @contextmanager
    def graph(one: Any, **options: Any) -> Iterator[None]:
        done.append("recorded")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**35))
    monkeypatch.setattr(replay._Replay, "_launch", remembered)
    monkeypatch.delenv("BIASCOPE_REPLAY", raising=False)
    return done


def kernel(net: nn.Module, x: torch.Tensor, outputs: Any = "full") -> torch.Tensor:
    """As `Job.run` does on a GPU."""
    f = functional(net, precision="float64")
    job = empirical.Job.make(f, anatomy(f, x), x, None, outputs, "auto", "float64", None)
    K = replay.replayed(job)
    return job.run_once()[0] if K is None else K


def exact(net: nn.Module, x: torch.Tensor, outputs: Any = "full") -> torch.Tensor:
    K = bs.ntk(net, x, outputs=outputs, precision="float64", max_memory="1GB").tensor
    return K.permute(1, 0, 3, 2) if outputs == "full" else K


@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal", 1])
def test_other_inputs_and_trained_parameters(played: list[str], outputs: Any) -> None:
    net = Net().double()
    for call in range(5):
        x = torch.randn(4, 3, dtype=torch.float64)
        with torch.no_grad():
            net.a.weight.mul_(1.1)
        torch.testing.assert_close(kernel(net, x, outputs), exact(net, x, outputs), rtol=1e-12, atol=1e-12)
        assert played == ["recorded", "replayed", *["replayed"] * (call - 1)] * (call > 0)


def test_a_network_that_became_another_is_run(played: list[str]) -> None:
    net = Net().double()
    for _ in range(3):
        kernel(net, torch.randn(4, 3, dtype=torch.float64))
    before = len(played)
    net.scale = 3.0  # an attribute
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(kernel(net, x), exact(net, x))
    assert len(played) == before
    kernel(net, x)
    assert len(played) == before + 2
    net.a.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))  # another place in memory
    torch.testing.assert_close(kernel(net, x), exact(net, x))
    assert len(played) == before + 2


def test_what_python_alone_knows_shows_in_the_outputs(played: list[str]) -> None:
    factor = [1.0]
    net = Net().double()
    net.b.register_forward_hook(lambda m, args, out: out * factor[0])
    x = torch.randn(4, 3, dtype=torch.float64)
    for _ in range(3):
        kernel(net, x)
    factor[0] = 1.001

    rows = exact(net, x)
    found = replay._SEEN[net]
    old = next(iter(found.values())).replay
    assert old is not None
    old.graph.replay = lambda: None  # a graph knows the old factor
    torch.testing.assert_close(kernel(net, x), rows)
    assert found == {}


def test_what_is_refused_is_refused_by_an_ordinary_call(played: list[str]) -> None:
    net = Net().double()
    x = torch.randn(4, 3, dtype=torch.float64)
    for _ in range(3):
        kernel(net, x)
    with torch.no_grad():
        net.b.bias[0] = float("nan")
    with pytest.raises(bs.UnsupportedError, match="NaN"):
        kernel(net, x)


def test_what_cannot_be_recorded_is_run(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refuses(one: Any, **options: Any) -> Iterator[None]:
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "graph", refuses)
    net, x = Net().double(), torch.randn(4, 3, dtype=torch.float64)
    for _ in range(4):
        torch.testing.assert_close(kernel(net, x), exact(net, x))
    assert played == []


def test_graphs_hold_no_more_than_their_share(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_HELD", [])
    nets, x = [Net().double() for _ in range(3)], torch.randn(4, 3, dtype=torch.float64)
    f = functional(nets[0], precision="float64")
    size = replay._bytes(empirical.Job.make(f, anatomy(f, x), x, None, "full", "auto", "float64", None))
    monkeypatch.setattr(replay, "_room", lambda job: 2 * size)
    for net in nets:
        for _ in range(3):
            kernel(net, x)
    held = [next(iter(replay._SEEN[net].values())).replay is not None for net in nets]
    assert held == [False, True, True]


def test_a_recording_holds_what_it_reads(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Net().double(), torch.randn(4, 3, dtype=torch.float64)
    given: list[Any] = []
    launch = replay._Replay._launch
    monkeypatch.setattr(replay._Replay, "_launch", lambda self, job: [given.append(job.cot), launch(self, job)])
    for _ in range(3):
        kernel(net, x)
    held = next(iter(replay._SEEN[net].values())).replay.held
    assert held[0] is given[0]


def test_can_be_turned_off(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIASCOPE_REPLAY", "0")
    net = Net().double()
    for _ in range(3):
        kernel(net, torch.randn(4, 3, dtype=torch.float64))
    assert played == []
