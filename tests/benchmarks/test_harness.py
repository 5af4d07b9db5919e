"""The benchmark harness: it measures what it says, and failures never look fast."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("harness", FOLDER / "harness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module
    spec.loader.exec_module(module)
    return module


BENCH = """
import time, torch
from harness import Case, Contender
MB = 2**20
def hungry(x):
    y = torch.ones(200 * MB // 4); y += 1
    return x
def sleeps(x):
    time.sleep(0.05)
    return x
def spins(x):
    end = time.process_time() + 0.05
    while time.process_time() < end: pass
    return x
def raises(x): raise RuntimeError("out of luck")
def forever(x): time.sleep(60)
def setup(device): torch.ones(400 * MB // 4).sum(); return torch.arange(3.0)
CASES = [Case("one", setup, (
    Contender("biascope", sleeps), Contender("spins", spins), Contender("hungry", hungry), Contender("raises", raises),
    Contender("wrong", lambda x: x + 1), Contender("shape", lambda x: x[:2]), Contender("forever", forever),
    Contender("absent", sleeps, requires=("nobody_has_this",)),
    Contender("prepared", lambda x: x, prepare=lambda x: x.clone()),
), reference=lambda x: x), Case("gpu only", setup, (Contender("biascope", sleeps),), devices=("cuda",))]
"""


@pytest.mark.slow
def test_measurements(harness: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "tiny.py"
    file.write_text(BENCH)
    spec = importlib.util.spec_from_file_location("tiny", file)
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    out = tmp_path / "deep" / "report.json"
    report = harness.run_benchmark(tiny.CASES, file, repeats=3, out=out, timeout=8)
    assert json.loads(out.read_text()) == report
    found = {row["contender"]: row for row in report["measurements"]}
    assert {row["case"] for row in report["measurements"]} == {"one"}

    assert found["biascope"]["status"] == "ok"
    assert 0.045 < found["biascope"]["wall_s"] < 0.5  # sleeping takes time ...
    assert found["biascope"]["cpu_s"] < 0.03  # ... but no work
    assert 0.045 < found["spins"]["cpu_s"] < 0.5
    assert 3 <= len(found["spins"]["wall_all"]) <= 11  # half a second of them
    # the 200 MiB of the call are seen, the 400 MiB of the set-up are not
    assert 190 * 2**20 < found["hungry"]["peak_bytes"] < 260 * 2**20
    assert found["biascope"]["peak_bytes"] < 50 * 2**20
    assert found["prepared"]["error"] == 0.0

    assert found["raises"]["status"] == "failed"
    assert "out of luck" in found["raises"]["reason"]
    assert "error 0.5 above" in found["wrong"]["reason"]
    assert "shape (2,)" in found["shape"]["reason"]
    assert "more than 8 s" in found["forever"]["reason"]
    assert found["absent"]["status"] == "skipped"
    assert "nobody_has_this is not installed" in found["absent"]["reason"]

    text = harness.markdown(report)
    assert "| one |" in text
    assert "failed: RuntimeError: out of luck" in text


def test_ratios_are_against_the_best_rival(harness: ModuleType) -> None:
    def measured(case: str, contender: str, wall: float, status: str = "ok") -> object:
        return harness.Measurement(case, contender, "cpu", status, wall_s=wall, cpu_s=wall, peak_bytes=100)

    rows = [
        measured("a", "biascope", 1.0),
        measured("a", "slow", 9.0),
        measured("a", "fast", 2.0),
        measured("a", "broken", 0.001, "failed"),
        measured("b", "biascope", 1.0),
        measured("b", "fast", 8.0),
        measured("c", "biascope", 1.0),
        measured("c", "fast", 1.0, "failed"),
    ]
    ratios = harness.ratios(rows)
    assert ratios["cases"]["a"]["wall_s"] == {"best_rival": "fast", "ratio": 2.0}
    assert "c" not in ratios["cases"]
    assert ratios["geometric_mean"]["wall_s"] == pytest.approx(4.0)
    assert ratios["geometric_mean"]["peak_bytes"] == pytest.approx(1.0)
    against = harness.ratios(rows, baseline="slow")
    assert against["cases"]["a"]["baseline"]["wall_s"] == pytest.approx(9.0)
    assert against["baseline"]["cases"] == 1
    assert against["baseline"]["geometric_mean"]["wall_s"] == pytest.approx(9.0)


LIMITS = """
from harness import Case, Contender
def spins(x):
    while True: pass
CASES = [Case("quick", lambda device: 1, (Contender("biascope", lambda x: x),)),
         Case("slow", lambda device: 1, (Contender("biascope", spins, cpu_limit=1),
                                         Contender("gpu", spins, devices=("cuda",))))]
"""


@pytest.mark.slow
def test_cpu_limit_and_keep(harness: ModuleType, tmp_path: Path) -> None:
    file, out = tmp_path / "limits.py", tmp_path / "report.json"
    file.write_text(LIMITS)
    spec = importlib.util.spec_from_file_location("limits", file)
    assert spec is not None
    assert spec.loader is not None
    limits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(limits)
    harness.run_benchmark(limits.CASES, file, repeats=1, out=out, only="slow")
    first = json.loads(out.read_text())["measurements"]
    assert [(row["contender"], row["status"], row["reason"]) for row in first] == [
        ("biascope", "failed", "more than 1 CPU s")
    ]
    harness.run_benchmark(limits.CASES, file, repeats=1, out=out, only="quick", keep=True)
    both = json.loads(out.read_text())["measurements"]
    assert [row["case"] for row in both] == ["quick", "slow"]
    assert both[1] == first[0]


def test_what_is_kept_stays_until_its_case_is_finished(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contenders = (harness.Contender("biascope", abs), harness.Contender("rival", abs))
    cases = [harness.Case(name, lambda device: 1, contenders) for name in ("a", "b")]
    seconds = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0]

    def one(case: Any, contender: Any, *rest: Any) -> Any:
        if not seconds:
            raise KeyboardInterrupt
        return harness.Measurement(case.name, contender.name, "cpu", "ok", wall_s=seconds.pop(0), cpu_s=1.0)

    monkeypatch.setattr(harness, "_run_one", one)
    out = tmp_path / "report.json"
    harness.run_benchmark(cases, "x.py", out=out)
    assert [row["wall_s"] for row in json.loads(out.read_text())["measurements"]] == [1, 2, 3, 4]
    with pytest.raises(KeyboardInterrupt):  # in the middle of b
        harness.run_benchmark(cases, "x.py", out=out, keep=True)
    assert [row["wall_s"] for row in json.loads(out.read_text())["measurements"]] == [10, 20, 3, 4]


def test_machine_is_described(harness: ModuleType) -> None:
    where = harness.machine("cpu", ["nobody_has_this"])
    assert where["cpu"]
    assert where["gpu"] is None
    assert where["versions"]["nobody_has_this"] == "not installed"
    assert where["versions"]["torch"]


def test_short_calls_are_repeated_until_they_say_something(harness: ModuleType) -> None:
    calls: list[float] = []

    def short(state: None) -> None:
        calls.append(time.perf_counter())
        time.sleep(0.01)

    case = harness.Case("short", lambda device: None, (harness.Contender("biascope", short),))
    (row,) = harness.run_benchmark([case], __file__, repeats=2, in_process=True)["measurements"]
    assert sum(row["wall_all"]) >= 0.9 * harness.LEAST
    assert 10 <= len(row["wall_all"]) < len(calls)  # and warmed up before
    assert calls[len(calls) - len(row["wall_all"])] - calls[0] >= 0.9 * harness.WARM
