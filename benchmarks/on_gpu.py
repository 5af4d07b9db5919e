"""Everything that only a GPU decides, most telling first, until the minutes are over.

    python benchmarks/on_gpu.py --minutes 10 --out FOLDER       # on a machine with a GPU; nothing has to be installed
    python benchmarks/on_gpu.py --smoke --out FOLDER            # what of it runs on a CPU, at a small size
    python benchmarks/on_gpu.py --index 100000 --out FOLDER     # one of the steps: an index of so many examples

Each step is a process of its own with a limit, whose output lies in FOLDER/STEP.txt; a step that fails or is cut off
stops no other. Rivals are measured where Python finds them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

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
    quick = ["--device", device, "--in-process", "--repeats", "3", "--call-limit", "1.5"]
    ntk = [str(HERE / "ntk.py"), *quick, *(["--only", "mlp-trace"] if smoke else [])]
    models = [str(HERE / "language_models.py"), "--device", device, "--in-process", "--repeats", "1"]
    test = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-m", "gpu"]
    one = "llama-tiny" if smoke else "llama-1B"
    return [
        Step("tests-replay", [*test, "tests/kernels/test_ntk_gpu.py", "-k", "replayed or tensor_cores"], 60),
        Step("ntk", [*ntk, "--out", str(out / "ntk.json")], 100, {"BIASCOPE_REPLAY": "0"}),
        Step("ntk-replay", [*ntk, "--out", str(out / "ntk-replay.json")], 100, {"BIASCOPE_REPLAY": "1"}),
        Step("ekfac", [*models, "--only", f"ekfac-{one}", "--out", str(out / "ekfac.json")], 90),
        Step("index", [__file__, "--index", "32" if smoke else "100000", "--out", str(out)], 330),
        Step("linearize", [str(HERE / "linearize.py"), *quick, "--out", str(out / "linearize.json")], 60),
        Step("tests", [*test, *GPU_TESTS], 240),
    ]


def index(n: int, out: Path) -> None:
    """Random features of n examples of 256 tokens under GPT-2's linear layers, in tf32, whole and on disk."""
    sys.path[:0] = [str(HERE), str(ROOT / "src")]
    import language_models as lm

    import biascope as bs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = "gpt2-124M" if device == "cuda" else "gpt2-tiny"
    model, size = lm.setup(name, device).model, lm.SIZES[name]
    for p in model.parameters():
        p.requires_grad_(id(p) in lm.base_layers(model))
    ids = torch.randint(0, size.words, (n, size.tokens), generator=torch.Generator().manual_seed(1)).to(device)
    data, query = {"input_ids": ids, "labels": ids}, {"input_ids": ids[:2], "labels": ids[:2]}
    precision = "tf32" if device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        found = bs.influence(
            model, data, query, None, damping=0.0, dim=lm.DIM, store=folder, top=8, precision=precision
        )
        seconds = time.perf_counter() - begin
        disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    exact = bs.influence(model, {k: v[:8] for k, v in data.items()}, query, None, damping=0.0)
    row = {
        "examples": n, "tokens": size.tokens, "model": name, "dim": lm.DIM, "precision": precision, "seconds": seconds,
        "examples per second": n / seconds, "gigabytes": disk / 1e9, "finds the query itself": [
            int(rows[0]) for rows in found.top.tolist()] == [0, 1],
        "error over the query's own score": float(found.errors.max() / exact.scores.diagonal().min()),
    }  # fmt: skip
    (out / "index.json").write_text(json.dumps(row, indent=1))
    print(json.dumps(row))


def main() -> None:
    """Run the steps that fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="", help="steps, by commas")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.index:
        return index(given.index, out)
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
