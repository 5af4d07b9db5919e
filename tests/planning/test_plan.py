"""Forecasts against measurement: memory within 15 %, CPU time within a factor of 1.5, bytes sent to the byte."""

from time import process_time
from typing import Any

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.planning import pilots
from biascope.planning.forecast import Forecast
from biascope.planning.pilots import measure, peak_of
from biascope.support.errors import InputError
from biascope.support.processes import processes
from ranks import Ranks

CPU = torch.device("cpu")
TRIES = 3  # to see a speed on a machine with other work


def network(kind: str) -> tuple[nn.Module, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    if kind == "mlp":
        layers = [nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8)]
        return nn.Sequential(*layers), torch.randn(40, 48, generator=gen)
    conv = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    return conv, torch.randn(40, 1, 16, 16, generator=gen)


def whole(sample: torch.Tensor, n: int) -> torch.Tensor:
    return sample[torch.arange(n) % len(sample)]


def call(net: nn.Module, what: Any, x: torch.Tensor, options: dict[str, Any], group: Any = None) -> Any:
    if what == "ntk":
        return bs.ntk(net, x, group=group, **options)
    return bs.fisher(net, x, what, group=group, **options)


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilots, "perf_counter", process_time)  # other jobs on the machine do not count
    monkeypatch.setattr(pilots, "REPEATS", 2)


def speed_of_sums(group: Any) -> float:
    """Bytes per second of a ring, by what a large sum takes of the processor."""
    total, team = torch.ones(2**24), processes(group)
    with team:
        team.sum(total)
        begin = process_time()
        team.sum(total)
        return total.nbytes / (process_time() - begin)


def held(net: nn.Module, x: torch.Tensor) -> int:
    return sum(p.nbytes for p in net.parameters()) + x.nbytes


CASES = [
    ("mlp", "ntk", 500, {}),
    ("mlp", "ntk", 1200, {"outputs": "trace"}),
    ("conv", "ntk", 400, {"outputs": "diagonal"}),
    ("mlp", "diagonal", 4000, {}),
    ("mlp", "ekfac", 16_000, {}),
    ("conv", "kfac", 3000, {"likelihood": "gaussian"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "what", "n", "options"), CASES)
def test_one_process(monkeypatch: pytest.MonkeyPatch, kind: str, what: Any, n: int, options: dict[str, Any]) -> None:
    quickly(monkeypatch)
    net, sample = network(kind)
    x = whole(sample, n)
    for _ in range(TRIES):
        found = bs.plan(net, what, sample, n=n, options=options, patience=0.4)
        real = measure(lambda: call(net, what, x, options), n, CPU)
        if real.seconds / 1.5 < found.seconds < 1.5 * real.seconds:
            break
    assert found.memory == pytest.approx(real.peak + held(net, x), rel=0.15)
    assert real.seconds / 1.5 < found.seconds < 1.5 * real.seconds
    assert found.flops == pytest.approx(real.flops, rel=0.15)
    assert found.sent == 0


def on_a_rank(group: Any, kind: str, what: Any, n: int, options: dict[str, Any]) -> tuple[int, float, int]:
    net, sample = network(kind)
    x, team = whole(sample, n), processes(group)
    call(net, what, x, options, group)
    before, times = sum(team.bytes.values()), []  # type: ignore[attr-defined]
    for _ in range(3):
        begin = process_time()
        call(net, what, x, options, group)
        times.append(process_time() - begin)
    sent = (sum(team.bytes.values()) - before) // 3  # type: ignore[attr-defined]
    return peak_of(lambda: call(net, what, x, options, group), CPU) + held(net, x), min(times), sent


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "what", "n", "options"), [CASES[i] for i in (0, 2, 4, 5)])
def test_two_processes(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, kind: str, what: Any, n: int, options: dict[str, Any]
) -> None:
    quickly(monkeypatch)
    net, sample = network(kind)
    for _ in range(TRIES):
        bandwidth = min(ranks.run(speed_of_sums, 2))
        found = bs.plan(net, what, sample, 2, n=n, options=options, patience=0.4, bandwidth=bandwidth)
        measured = ranks.run(on_a_rank, 2, kind, what, n, options)
        slowest = max(m[1] for m in measured)
        if slowest / 1.5 < found.seconds < 1.5 * slowest:
            break
    assert found.memory == pytest.approx(max(m[0] for m in measured), rel=0.15)
    assert slowest / 1.5 < found.seconds < 1.5 * slowest
    assert found.sent == measured[0][2]


def test_the_whole_is_told_in_words() -> None:
    net, sample = network("mlp")
    found = bs.plan(net, "ntk", sample, 8, n=1000, max_memory="2GB", options={"outputs": "trace"}, patience=0.01)
    assert found.sent == (8 * 125**2 + 28 * 125**2) * 4  # squares on the diagonal, and 8 * 7 / 2 beside it
    rows = found.scaling()
    assert [row["processes"] for row in rows] == [2**i for i in range(10)]
    assert rows[0]["speed-up"] == 1.0
    assert 1 < rows[3]["speed-up"] < rows[4]["speed-up"] * 2
    assert all(row["memory"] >= 1000**2 * 4 for row in rows)
    text = str(found)
    assert "ntk of 1,000 examples" in text
    assert "simulated from" in text
    assert "simulated from" in found._repr_html_()


def test_what_fits() -> None:
    net, sample = network("mlp")
    found = bs.plan(net, "ntk", sample, n=100, max_memory="64MB", options={"outputs": "trace"}, patience=0.01)
    assert found.largest_n is not None
    assert found.at(1, found.largest_n)["memory"] <= 64 * 2**20
    assert found.at(1, found.largest_n + found.largest_n // 100)["memory"] > 64 * 2**20
    assert found.largest_n < 4096  # the kernel alone would take 64 MB
    large = bs.plan(net, "ntk", sample, n=10_000, max_memory="64MB", options={"outputs": "trace"}, patience=0.01)
    assert large.memory == float("inf")
    assert "does not fit" in str(large)


def test_a_wider_network_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(width: int) -> Forecast:
        net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
        return bs.plan(net, "ekfac", torch.randn(8, width), n=32, max_memory="1GB", patience=0.01)

    small, large = of(64), of(256)
    assert large.memory > small.memory
    assert large.largest_model > large.parameters


def test_slips() -> None:
    net, sample = network("mlp")
    with pytest.raises(InputError, match="'store' is not planned for"):
        bs.plan(net, "ntk", sample, options={"store": "x"})
    with pytest.raises(InputError, match="what"):
        bs.plan(net, "hessian", sample)  # type: ignore[arg-type]
