"""Two checkouts of biascope side by side: the same calls in turn, each in a process of its own, one thread.

    python benchmarks/side_by_side.py OTHER_CHECKOUT [--files ntk curvature patterns] [--only mlp] [--rounds 5]

Prints CPU seconds (the least over all rounds) of the other checkout and of this one, and their ratio: above 1 this one
is faster. Cases of one name are run as each checkout's own `benchmarks/` defines them; "small" are second calls of
`bs.ntk` and of a product with an EKFAC Fisher matrix, in which what surrounds the arithmetic counts.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = """
import importlib, json, sys, time
sys.path.insert(0, "benchmarks")
import torch
from torch import nn
import biascope as bs

torch.set_num_threads(1)
held = (None, None, None)

def small(name):
    torch.manual_seed(0)
    sizes = (784, 512, 512, 10) if name.startswith("mlp") else (4, 8, 2)
    net = nn.Sequential(*[m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.ReLU())][:-1])
    x = torch.randn(64, sizes[0])
    if name.endswith("ntk"):
        return lambda: bs.ntk(net, x)
    if name.endswith("trace"):
        return lambda: bs.ntk(net, x, outputs="trace")
    v = torch.randn(sum(p.numel() for p in net.parameters()))
    return lambda: bs.fisher(net, x, "ekfac") @ v

def find(file, name):
    if file == "small":
        return small(name)
    case = next(case for case in importlib.import_module(file).CASES if case.name == name)
    ours = next(c for c in case.contenders if c.name == "biascope")
    state = case.setup("cpu")
    state = ours.prepare(state) if ours.prepare else state
    return lambda: ours.run(state)

for line in sys.stdin:
    file, name, seconds = json.loads(line)
    if name is None:
        cases = importlib.import_module(file).CASES
        answer = [case.name for case in cases if any(one.name == "biascope" for one in case.contenders)]
    else:
        try:
            if held[:2] != (file, name):
                held = (None, None, None)
                held = (file, name, find(file, name))
                held[2]()
            answer, begun = float("inf"), time.perf_counter()
            while answer == float("inf") or time.perf_counter() - begun < seconds:
                start = time.process_time()
                held[2]()
                answer = min(answer, time.process_time() - start)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:200]
    print("ANSWER " + json.dumps(answer), flush=True)
"""
SMALL = [f"{size}-{what}" for what in ("ntk", "trace", "ekfac") for size in ("mlp", "tiny")]


class Checkout:
    """A process that runs the cases of one checkout when it is told to."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", WORKER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]

    def __call__(self, *question: Any) -> Any:
        """The least seconds of a case, or the names of a file's cases."""
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError("a worker ended")


def main() -> None:
    """Ask both checkouts in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--files", nargs="*", default=["small", "ntk", "curvature", "patterns"])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of calls per case, checkout and round")
    given = parser.parse_args()
    both = [Checkout(given.other.resolve()), Checkout(Path(__file__).resolve().parents[1])]
    print("| case | other | this | ratio |\n|---|---|---|---|")
    for file in given.files:
        for name in SMALL if file == "small" else both[1](file, None, 0):
            if given.only not in name:
                continue
            least: list[Any] = [float("inf")] * 2
            for _ in range(given.rounds):
                for i, checkout in enumerate(both):
                    found = checkout(file, name, given.seconds)
                    least[i] = found if isinstance(found, str) or isinstance(least[i], str) else min(least[i], found)
            if any(isinstance(each, str) for each in least):
                print(f"| {file} {name} | {least[0]} | {least[1]} | |", flush=True)
            else:
                print(f"| {file} {name} | {least[0]:.4g} | {least[1]:.4g} | {least[0] / least[1]:.2f} |", flush=True)
    for checkout in both:
        checkout.process.stdin.close()


if __name__ == "__main__":
    main()
