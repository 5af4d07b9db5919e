"""The least time each Fisher matrix can take: the multiplications that its definition needs, at this machine's speed.

    python benchmarks/curvature_floor.py [--device cpu|cuda] [--only mlp]

Counted are: one forward pass; a backward pass to the layers' outputs per cotangent (9 exact, 1 sampled); for KFAC half
of every symmetric second moment (of patches by pixel shifts where that is less); for EKFAC also the eigendecompositions
(timed on random matrices of these sizes), both rotations and the squares. Copies, activations, sums and
launches are not. The speed is that of a float32 product of 4096 x 1024 by 1024 x 1024, the best of five.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvature import MODELS

CLASSES = 10


@dataclass(frozen=True)
class Layer:
    """Inputs (with the bias's one), outputs, positions, and multiplications of its moment by pixel shifts."""

    i: int
    o: int
    T: int
    weights: int
    shifts: int | None


def layers(name: str) -> list[Layer]:
    from biascope.curvature.patches import patch_moment
    from biascope.network.layers.rules import Conv

    build, shape, _, _ = MODELS[name]
    model, found = build().eval(), []

    def look(m: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        assert isinstance(m, nn.Linear | nn.Conv2d)
        shifts = None
        if isinstance(m, nn.Conv2d):
            rule = Conv.parse(m.weight, m.stride, m.padding, m.dilation, m.groups)  # type: ignore[arg-type]
            moment = patch_moment(rule, inputs[0].shape, torch.float32, torch.device("cpu"))
            shifts = None if moment is None else moment.form.cost * moment.channels**2
        found.append(Layer(m.weight[0].numel() + 1, len(m.weight), out[0, 0].numel(), m.weight.numel(), shifts))

    for m in model.modules():
        if isinstance(m, nn.Linear | nn.Conv2d):
            m.register_forward_hook(look)
    with torch.no_grad():
        model(torch.zeros(1, *shape))
    return found


def multiplications(name: str, representation: str, monte_carlo: bool) -> int:
    """Per example."""
    k = 1 if monte_carlo else CLASSES - 1
    total = 0
    for n, layer in enumerate(layers(name)):
        i, o, T = layer.i, layer.o, layer.T
        total += layer.weights * T * (1 + (k if n else 0))  # nothing flows below the first layer
        squares = i * o if T == 1 else i * o * T * k
        if representation == "diagonal":
            total += squares
            continue
        total += layer.shifts or i * i * T // 2
        total += k * o * o * T // 2
        if representation == "ekfac":
            total += i * i * T + k * o * o * T + squares
    return total


def seconds(job: Callable[[], object], device: str, repeats: int) -> float:
    """The best of some calls after one to warm up: CPU seconds with one thread on a CPU, else wall seconds."""
    gpu = device.startswith("cuda")
    clock = time.process_time if not gpu and torch.get_num_threads() == 1 else time.perf_counter
    best = float("inf")
    for again in range(repeats + 1):
        start = clock()
        job()
        if gpu:
            torch.cuda.synchronize()
        best = min(best, clock() - start) if again else best
    return best


def speed(device: str) -> float:
    """FLOP per second."""
    a, b = torch.randn(4096, 1024, device=device), torch.randn(1024, 1024, device=device)
    return 2 * 4096 * 1024 * 1024 / seconds(lambda: a @ b, device, 5)


def decompositions(name: str, device: str) -> float:
    """Seconds for the eigendecompositions of all factors."""
    total = 0.0
    sizes = [size for layer in layers(name) for size in (layer.i, layer.o)]
    for size in sorted(set(sizes)):
        X = torch.randn(size, size, device=device)
        S = X @ X.T / size
        total += sizes.count(size) * seconds(lambda S=S: torch.linalg.eigh(S), device, 1 if size > 1000 else 3)
    return total


def announce(device: str, only: str) -> None:
    """Before a run: what every case costs per call at least, eigendecompositions not counted."""
    rate = speed(device)
    for name in MODELS:
        for representation in ("diagonal", "kfac", "ekfac"):
            for monte_carlo in (False, True):
                case = f"{name}-{representation}-{'sampled' if monte_carlo else 'exact'}"
                flop = 2 * MODELS[name][2][device.split(":")[0]] * multiplications(name, representation, monte_carlo)
                if only in case:
                    extra = " and eigendecompositions" if representation == "ekfac" else ""
                    print(f"{case:<32} at least {flop / rate:.2g} s a call{extra}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The least time each Fisher matrix can take")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rate = speed(given.device)
    print(f"float32 products on {given.device}: {rate / 1e9:.0f} GFLOP/s, {given.threads} thread(s)\n")
    print("| case | examples | GFLOP of products | at that speed, s | eigendecompositions, s | floor, s |")
    print("|---|---|---|---|---|---|")
    for name in MODELS:
        if given.only not in name:
            continue
        n = MODELS[name][2][given.device.split(":")[0]]
        eigen = decompositions(name, given.device)
        for representation in ("diagonal", "kfac", "ekfac"):
            for monte_carlo in (False, True):
                flop = 2 * n * multiplications(name, representation, monte_carlo)
                extra = eigen if representation == "ekfac" else 0.0
                case = f"{name}-{representation}-{'sampled' if monte_carlo else 'exact'}"
                print(
                    f"| {case} | {n} | {flop / 1e9:.1f} | {flop / rate:.3g} | {extra:.3g} | {flop / rate + extra:.3g} |"
                )


if __name__ == "__main__":
    main()
