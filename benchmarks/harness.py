"""One harness for every benchmark: the same clock, the same memory meter, the rivals in the same run.

A benchmark file lists cases as data and hands them over:

    from harness import Case, Contender, main

    def setup(device):                      # builds the inputs; not timed
        return torch.randn(512, 512, device=device)

    CASES = [
        Case("gram-512", setup, contenders=(
            Contender("biascope", lambda x: x @ x.T),
            Contender("other", other_gram, requires=("otherlib",)),     # skipped by name where it is not installed
        ), reference=lambda x: (x.double() @ x.double().T), tolerance=1e-4),
    ]

    if __name__ == "__main__":
        main(CASES, __file__)

Every (case, contender) runs in a fresh process: warm-up, then repeats, each ended by a device synchronisation; the
median counts. A first call of more than `LONG` seconds is itself the measurement (its share of warm-up is small; on a
GPU, where kernels are chosen and compiled, a minute), and repeats stop after `ENOUGH` seconds, but not before `LEAST`.
Wall seconds and CPU
seconds of the process are both kept; with one thread on a CPU the headline is CPU seconds, which other jobs on the
machine hardly change, else wall seconds. Peak memory is the process's high-water mark above what it was after `setup`
(CPU) or `torch.cuda.max_memory_allocated` above what was allocated then (GPU). A contender that raises, runs out of
time, or disagrees with the reference is recorded as failed and never as fast.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

OURS = "biascope"
LONG, ENOUGH = {"cpu": 8.0, "cuda": 60.0}, 8.0  # seconds
WARM, LEAST = 0.1, 0.5  # seconds that short calls are warmed up and repeated: a processor changes its speed in less
MOST = 1000  # repeats, however short
KEYS = ("wall_s", "cpu_s", "peak_bytes")


@dataclass(frozen=True)
class Contender:
    """One way to do the job. `run(state)` is timed; `prepare(state)` is not and its value replaces the state."""

    name: str
    run: Callable[[Any], Any]
    requires: tuple[str, ...] = ()
    prepare: Callable[[Any], Any] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    cpu_limit: int | None = None  # CPU seconds, set-up included, after which the contender is stopped as too slow


@dataclass(frozen=True)
class Case:
    """One job. `setup(device)` builds the state; `reference(state)` is the truth, `extract(output)` what to compare."""

    name: str
    setup: Callable[[str], Any]
    contenders: tuple[Contender, ...]
    reference: Callable[[Any], Any] | None = None
    tolerance: float = 1e-4
    extract: Callable[[Any], Any] = lambda output: output
    devices: tuple[str, ...] = ("cpu", "cuda")
    note: str = ""


@dataclass
class Measurement:
    """What came out of one contender on one case."""

    case: str
    contender: str
    device: str
    status: str  # ok | skipped | failed
    reason: str = ""
    wall_s: float | None = None
    cpu_s: float | None = None
    wall_all: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    error: float | None = None  # relative error against the reference


def run_benchmark(
    cases: Sequence[Case],
    file: str | Path,
    device: str = "cpu",
    repeats: int = 5,
    warmup: int = 1,
    out: Path | None = None,
    only: str = "",
    timeout: float = 600.0,
    baseline: str | None = None,
    keep: bool = False,
    call_limit: float | None = None,
    in_process: bool = False,
    only_contenders: str = "",
) -> dict[str, Any]:
    """Run every case of a benchmark file; returns (and writes to `out`) what was measured, on what, and the ratios.

    `keep`: the cases in `out` stay there until they have been run again; the contenders of one case are of one run.
    `call_limit`: a rival whose first call takes more seconds is stopped and recorded as failed. `in_process`: no fresh
    process per contender (starting one costs a GPU several seconds); memory is then only measured on a GPU.
    """
    measurements = []
    if keep and out is not None and out.exists():
        measurements = [Measurement(**row) for row in json.loads(out.read_text())["measurements"]]
    kind = device.split(":")[0]
    report = _report(cases, measurements, file, device, repeats, warmup, baseline, None)
    for case in cases:
        if only not in case.name or kind not in case.devices:
            continue
        new = []
        with tempfile.TemporaryDirectory() as folder:  # of this case: the reference is computed once
            for contender in case.contenders:
                if kind not in contender.devices or only_contenders not in contender.name:
                    continue
                measured = _run_one(
                    case,
                    contender,
                    Path(file),
                    device,
                    repeats,
                    warmup,
                    timeout,
                    Path(folder),
                    None if contender.name == OURS else call_limit,
                    in_process,
                )
                print(f"{case.name:<32} {contender.name:<20} {_cell(measured)}", file=sys.stderr, flush=True)
                new.append(measured)
        measurements = [row for row in measurements if row.case != case.name] + new
        report = _report(cases, measurements, file, device, repeats, warmup, baseline, out)  # kept if the next one dies
    return report


def _report(
    cases: Sequence[Case],
    measurements: list[Measurement],
    file: str | Path,
    device: str,
    repeats: int,
    warmup: int,
    baseline: str | None,
    out: Path | None,
) -> dict[str, Any]:
    """What was measured so far, on what, and the ratios; written to `out` at once."""
    kind = device.split(":")[0]
    order = {case.name: index for index, case in enumerate(cases)}
    measurements.sort(key=lambda row: order.get(row.case, len(order)))
    report = {
        "benchmark": Path(file).stem,
        "machine": (where := machine(device, [r for case in cases for c in case.contenders for r in c.requires])),
        "settings": {
            "device": device,
            "repeats": repeats,
            "warmup": warmup,
            "headline": "cpu_s" if kind == "cpu" and where["threads"] == 1 else "wall_s",
            "baseline": baseline,
        },
        "measurements": [asdict(measured) for measured in measurements],
        "ratios": ratios(measurements, baseline=baseline),
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(f".{out.name}.tmp")
        temporary.write_text(json.dumps(report, indent=2) + "\n")
        os.replace(temporary, out)
    return report


def main(
    cases: Sequence[Case],
    file: str | Path,
    arguments: Sequence[str] | None = None,
    threads: int | None = None,
    baseline: str | None = None,
) -> dict[str, Any]:
    """The command line of a benchmark file; `threads` is the default, `baseline` a rival compared with by name."""
    parser = argparse.ArgumentParser(description=f"Benchmark {Path(file).stem}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--only-contenders", default="", help="run only those whose name contains this")
    parser.add_argument("--keep", action="store_true", help="keep the cases in --out that are not run now")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per contender")
    parser.add_argument("--call-limit", type=float, default=None, help="stop a rival whose first call takes longer (s)")
    parser.add_argument("--in-process", action="store_true", help="no fresh process per contender: saves GPU minutes")
    parser.add_argument("--out", type=Path, default=None, help="write the JSON report here")
    parser.add_argument("--threads", type=int, default=threads, help=f"CPU threads (default: {threads or 'all'})")
    given = parser.parse_args(arguments)
    if given.threads:
        import torch

        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(given.threads)  # for the contenders
        torch.set_num_threads(given.threads)  # for what the report says
    report = run_benchmark(
        cases,
        file,
        given.device,
        given.repeats,
        given.warmup,
        given.out,
        given.only,
        given.timeout,
        baseline,
        given.keep,
        given.call_limit,
        given.in_process,
        given.only_contenders,
    )
    print(markdown(report))
    return report


# ---- what a report says ----


def ratios(measurements: Sequence[Measurement], ours: str = OURS, baseline: str | None = None) -> dict[str, Any]:
    """Per case, the best rival's figure divided by ours (above 1: we are better), and geometric means over cases.

    With a baseline also that rival's figures divided by ours, under "baseline".
    """
    cases: dict[str, Any] = {}
    for name in dict.fromkeys(m.case for m in measurements):
        good = {m.contender: m for m in measurements if m.case == name and m.status == "ok"}
        rivals = {key: m for key, m in good.items() if key != ours}
        if ours not in good or not rivals:
            continue
        row: dict[str, Any] = {}
        for key in KEYS:
            mine = getattr(good[ours], key)
            theirs = {rival: getattr(m, key) for rival, m in rivals.items() if getattr(m, key) is not None}
            if mine and theirs:
                best = min(theirs, key=lambda rival: theirs[rival])
                row[key] = {"best_rival": best, "ratio": theirs[best] / mine}
                if baseline in theirs:
                    row.setdefault("baseline", {})[key] = theirs[baseline] / mine
        cases[name] = row
    means = {key: _geometric_mean([row[key]["ratio"] for row in cases.values() if key in row]) for key in KEYS}
    found = {"cases": cases, "geometric_mean": {key: value for key, value in means.items() if value}}
    if baseline:
        rows = [row["baseline"] for row in cases.values() if "baseline" in row]
        found["baseline"] = {
            "rival": baseline,
            "cases": len(rows),
            "geometric_mean": {key: _geometric_mean([row[key] for row in rows if key in row]) for key in KEYS},
        }
    return found


def _geometric_mean(values: Sequence[float]) -> float | None:
    values = [value for value in values if value > 0]
    return math.exp(math.fsum(math.log(value) for value in values) / len(values)) if values else None


def markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown table: one row per case, one column per contender."""
    rows = [Measurement(**row) for row in report["measurements"]]
    contenders = list(dict.fromkeys(row.contender for row in rows))
    where, headline = report["machine"], report["settings"]["headline"]
    lines = [
        f"{report['benchmark']} on {where['gpu'] or where['cpu']}, torch {where['versions'].get('torch')}, "
        f"{where['threads']} thread(s); median of {report['settings']['repeats']}, wall (CPU) seconds, peak memory; "
        f"ratios of {'CPU' if headline == 'cpu_s' else 'wall'} seconds",
        "",
        f"| case | {' | '.join(contenders)} | best rival / {OURS} |",
        "|" + "---|" * (len(contenders) + 2),
    ]
    for case in dict.fromkeys(row.case for row in rows):
        found = {row.contender: row for row in rows if row.case == case}
        cells = [_cell(found[name]) if name in found else "" for name in contenders]
        ratio = report["ratios"]["cases"].get(case, {}).get(headline)
        lines.append("| " + " | ".join([case, *cells, _ratio(ratio)]) + " |")
    against = report["ratios"].get("baseline") or {"rival": "", "geometric_mean": {}}
    for rival, means in (
        ("best rival", report["ratios"]["geometric_mean"]),
        (against["rival"], against["geometric_mean"]),
    ):
        words = {"wall_s": "wall time", "cpu_s": "CPU time", "peak_bytes": "peak memory"}
        if said := ", ".join(f"{words[key]} {value:.2f}" for key, value in means.items() if value):
            lines += ["", f"Geometric mean of {rival} / {OURS}: {said}."]
    return "\n".join(lines)


def machine(device: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """The machine and the versions a report was made with."""
    import torch

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    versions = {}
    distributions = metadata.packages_distributions()  # a module's name need not be its package's
    for package in dict.fromkeys(["torch", "numpy", OURS, *packages]):
        try:
            versions[package] = metadata.version(distributions.get(package, [package])[0])
        except metadata.PackageNotFoundError:
            found = importlib.util.find_spec(package) is not None  # on the path, but not installed
            module = importlib.import_module(package) if found else None
            versions[package] = getattr(module, "__version__", "not installed")
    on_gpu = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def _ratio(ratio: dict[str, Any] | None) -> str:
    return f"{ratio['ratio']:.2f} ({ratio['best_rival']})" if ratio else ""


def _cell(m: Measurement) -> str:
    if m.status != "ok":
        return f"{m.status}: {m.reason[:60]}"
    memory = f", {m.peak_bytes / 2**20:.0f} MiB" if m.peak_bytes is not None else ""
    return f"{m.wall_s:.3g} ({m.cpu_s:.3g}){memory}"


# ---- one contender in its own process ----


def _run_one(
    case: Case,
    contender: Contender,
    file: Path,
    device: str,
    repeats: int,
    warmup: int,
    timeout: float,
    shared: Path,
    call_limit: float | None,
    in_process: bool,
) -> Measurement:
    result = Measurement(case.name, contender.name, device, "failed")
    missing = [name for name in contender.requires if importlib.util.find_spec(name) is None]
    if missing:
        result.status, result.reason = "skipped", f"{', '.join(missing)} is not installed"
        return result
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        job = {
            "file": str(file.resolve()),
            "case": case.name,
            "contender": contender.name,
            "device": device,
            "repeats": repeats,
            "warmup": warmup,
            "answer": str(answer),
            "reference": str(shared / "reference.pt"),
            "cpu_limit": contender.cpu_limit,
            "call_limit": call_limit,
        }
        if in_process:
            for key, value in _measure(case, contender, job).items():
                setattr(result, key, value)
            if not device.startswith("cuda"):
                result.peak_bytes = None
            return result
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(job)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            result.reason = f"more than {timeout:g} s"
            return result
        if contender.cpu_limit and done.returncode == -signal.SIGXCPU:
            result.reason = f"more than {contender.cpu_limit} CPU s"
            return result
        if not answer.exists():
            last = (done.stderr.strip().splitlines() or [""])[-1]
            result.reason = f"exit code {done.returncode}: {last}"[:300]
            return result
        for key, value in json.loads(answer.read_text()).items():
            setattr(result, key, value)
    return result


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """Inside the fresh process: find the case and measure it."""
    if job.get("cpu_limit"):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_limit"], resource.RLIM_INFINITY))
    folder = str(Path(job["file"]).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules["harness"] = sys.modules[__name__]  # so that the file's Case is this Case
    spec = importlib.util.spec_from_file_location("benchmark_file", job["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_file"] = module
    spec.loader.exec_module(module)
    case = next(case for case in module.CASES if case.name == job["case"])
    return _measure(case, next(c for c in case.contenders if c.name == job["contender"]), job)


@contextlib.contextmanager
def _within(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError after so many seconds (as soon as Python runs again)."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:g} s for one call")

    if not seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _measure(case: Case, contender: Contender, job: dict[str, Any]) -> dict[str, Any]:
    """Set up, check once, time, measure memory."""
    import torch

    device = job["device"]
    gpu = device.startswith("cuda")
    synchronize = torch.cuda.synchronize if gpu else lambda: None

    try:
        state = case.setup(device)
        mine = contender.prepare(state) if contender.prepare else state
        gc.collect()
        synchronize()
        before = _memory_now(gpu)
        _reset_peak(gpu)
        start, start_cpu = time.perf_counter(), time.process_time()
        with _within(job["call_limit"]):
            output = contender.run(mine)  # the first call: memory is measured here, and it warms up
            synchronize()
        wall, cpu = [time.perf_counter() - start], [time.process_time() - start_cpu]
        peak = max(_memory_peak(gpu) - before, 0)
        error = _relative_error(case, state, output, Path(job["reference"]))
        output = None
        if error is not None and not error <= case.tolerance:
            return {"status": "failed", "reason": f"error {error:.2g} above {case.tolerance:g}", "error": error}
        first, long = wall[0], LONG["cuda" if gpu else "cpu"]
        if first < long:
            warm, start = 0, time.perf_counter()
            while warm < (job["warmup"] if first < 1 else 0) or time.perf_counter() - start + first < WARM:
                contender.run(mine)
                synchronize()
                warm += 1
            wall, cpu = [], []
        begun = time.perf_counter()
        while not wall or (first < long and _goes_on(len(wall), time.perf_counter() - begun, job["repeats"])):
            start, start_cpu = time.perf_counter(), time.process_time()
            contender.run(mine)
            synchronize()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
    except Exception as problem:
        return {"status": "failed", "reason": f"{type(problem).__name__}: {problem}"[:300]}
    finally:
        state = mine = output = None  # the next contender in this process needs the room
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    return {
        "status": "ok",
        "wall_s": statistics.median(wall),
        "cpu_s": statistics.median(cpu),
        "wall_all": wall,
        "peak_bytes": peak,
        "error": error,
    }


def _goes_on(done: int, seconds: float, repeats: int) -> bool:
    """Is another repeat wanted?"""
    return (done < repeats and seconds < ENOUGH) or (done < MOST and seconds < LEAST)


def _relative_error(case: Case, state: Any, output: Any, kept: Path) -> float | None:
    """Largest absolute difference from the reference, relative to the reference's largest entry.

    `setup` must give every contender the same state: the reference of the first one that gets here is kept for all.
    """
    if case.reference is None:
        return None
    import torch

    if not kept.exists():
        temporary = kept.with_suffix(".tmp")
        torch.save(torch.as_tensor(case.reference(state)).double().cpu(), temporary)
        os.replace(temporary, kept)
    truth = torch.load(kept)
    found = torch.as_tensor(case.extract(output)).double().cpu()
    if truth.shape != found.shape:
        raise ValueError(f"shape {tuple(found.shape)}, the reference has {tuple(truth.shape)}")
    return float((truth - found).abs().max() / truth.abs().max().clamp_min(1e-300))


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def _memory_now(gpu: bool) -> int:
    if gpu:
        import torch

        return int(torch.cuda.memory_allocated())
    return _status("VmRSS") if Path("/proc/self/status").exists() else 0


def _reset_peak(gpu: bool) -> None:
    if gpu:
        import torch

        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # Linux: forget the high-water mark of imports and set-up
        Path("/proc/self/clear_refs").write_text("5")


def _memory_peak(gpu: bool) -> int:
    """High-water mark. Not `ru_maxrss`: that one is inherited from the parent process."""
    if gpu:
        import torch

        return int(torch.cuda.max_memory_allocated())
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    import resource

    factor = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor


if __name__ == "__main__":
    work = json.loads(sys.argv[1])
    Path(work["answer"]).write_text(json.dumps(_work(work)))
