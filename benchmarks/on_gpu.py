"""Everything that only a GPU decides, most telling first, until the minutes are over.

    python benchmarks/on_gpu.py --minutes 10 --out FOLDER       # on a machine with a GPU; nothing has to be installed
    python benchmarks/on_gpu.py --smoke --out FOLDER            # what of it runs on a CPU, at a small size

Each step is a process of its own with a limit, whose output lies in FOLDER/STEP.txt; a step that fails or is cut off
stops no other. Rivals are measured where Python finds them.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GPU_TESTS = [
    *("tests/kernels/test_ntk_gpu.py", "tests/curvature/test_curvature_gpu.py", "tests/editing/test_editing_gpu.py"),
    *(
        "tests/optim/test_optim_automatic.py",
        "tests/optim/test_optim_operations.py",
        "tests/reports/test_card_on_gpu.py",
    ),
]


@dataclass(frozen=True)
class Step:
    """A command of Python, and the seconds it may take."""

    name: str
    arguments: list[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)


def steps(out: Path, smoke: bool) -> list[Step]:
    """All of them."""
    device = "cpu" if smoke else "cuda"
    quick = ["--device", device, "--in-process", "--repeats", "3", "--call-limit", "2.5"]
    ntk = [str(HERE / "ntk.py"), *quick, *(["--only", "mlp-trace"] if smoke else [])]
    models = [str(HERE / "language_models_gpu.py"), "--out", str(out), *(["--smoke"] if smoke else [])]
    natural = [str(HERE / "natural_gradient.py"), "--steps", "20" if smoke else "150", *([] if smoke else ["--full"])]
    test = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-m", "gpu"]
    return [
        Step("tests-replay", [*test, "tests/kernels/test_ntk_gpu.py", "-k", "replayed or tensor_cores"], 60),
        Step("ntk-replay", [*ntk, "--out", str(out / "ntk-replay.json")], 150, {"BIASCOPE_REPLAY": "1"}),
        Step(
            "ntk", [*ntk, "--only-contenders", "biascope", "--out", str(out / "ntk.json")], 50, {"BIASCOPE_REPLAY": "0"}
        ),
        Step("language", [*models, "--short", "--seconds", "170"], 185),
        Step("index", [*models, "--index", "32" if smoke else "100000", "--seconds", "320"], 330),
        Step("natural", [*natural, "--seconds", "60", "--out", str(out / "natural.json")], 100),
        Step("linearize", [str(HERE / "linearize.py"), *quick, "--out", str(out / "linearize.json")], 60),
        Step("tests", [*test, *GPU_TESTS], 240),
    ]


def main() -> None:
    """Run the steps that fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="", help="steps, by commas")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * given.minutes
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    for step in steps(out, given.smoke):
        left = end - time.monotonic()
        if left < 20 or (given.only and step.name not in given.only.split(",")):
            continue
        environment = {**os.environ, "PYTHONPATH": path, "BIASCOPE_PROGRESS": "0", **step.environment}
        begin, log = time.monotonic(), out / f"{step.name}.txt"
        try:
            with log.open("wb") as to:
                code: int | str = subprocess.run(
                    [sys.executable, *step.arguments], cwd=ROOT, env=environment, stdout=to, stderr=to,
                    timeout=min(step.seconds, left), check=False,
                ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "cut off"
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        print(f"{step.name}: {code} after {time.monotonic() - begin:.0f} s; {''.join(last)[:300]}", flush=True)


if __name__ == "__main__":
    main()
