"""The least time each tangent kernel can take: the multiplications that its definition needs, at this machine's speed.

    python benchmarks/ntk_floor.py [--device cpu|cuda] [--only vit]

Counted are: one forward pass; a backward pass to the layers' outputs, never to the weights, for each output of the
network; and per parameter the cheapest contraction that the planner knows, over pairs of examples i <= j only, and over
positions at which gradients arrive. Copies, activations, sums and launches are not. The speed is that of a float32
product (`curvature_floor.speed`); on a GPU large products run on tensor cores here, and a share may exceed 100 %.
"""

import argparse
from typing import Any

import torch
from curvature_floor import speed
from ntk import MODELS, setup
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def flops(model: nn.Module, x: torch.Tensor, outputs: str) -> float:
    """Floating-point operations of one kernel of all examples x."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from biascope.kernels.empirical import cotangents
    from biascope.kernels.plan import METHODS, _cost
    from biascope.network.functional import functional
    from biascope.network.layers.pilot import taped
    from biascope.network.stream import anatomy

    f, n = functional(model), len(x)
    found = anatomy(f, x)
    mode, cot = cotangents(outputs, found.outputs)  # type: ignore[arg-type]
    two = f.prepare(x[:2])
    with sdpa_kernel(SDPBackend.MATH):  # counted as products; what fused kernels do twice is not
        with FlopCounterMode(display=False) as there:
            tape = taped(f, two, found.scope)
        with FlopCounterMode(display=False) as back:
            tape.gradients(torch.ones_like(tape.rows))
    passes = n / 2 * (there.get_total_flops() + len(cot) * back.get_total_flops())
    half = (n + 1) / (2 * n)
    least = [
        min(_cost(b, m, mode, n, n, len(cot), half, 4)[0] for m in (METHODS if b.kind == "matrix" else ("contract",)))
        for b in map(found.narrowed, found.blocks)
    ]
    return passes + sum(least)


def print_shares(report: dict[str, Any]) -> None:
    """For every case of a report by `ntk.py`, the share of the floor's speed that biascope reached."""
    device = report["settings"]["device"]
    ours = {row["case"]: row for row in report["measurements"] if row["contender"] == "biascope"}
    rate, states = speed(device), dict[str, Any]()
    print("\n| kernel | GFLOP | floor, s | biascope, s | share of the floor |\n|---|---|---|---|---|")
    for case, row in ours.items():
        seconds = row[report["settings"]["headline"]]
        if seconds is None:
            continue
        name, outputs = case.rsplit("-", 1)
        state = states[name] = states.get(name) or setup(*MODELS[name], device)
        count = row["flops"] = flops(state.model, state.x, outputs)
        least = row["floor_s"] = count / rate
        print(f"| {case} | {count / 1e9:.1f} | {least:.3g} | {seconds:.3g} | {least / seconds:.0%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The least time each tangent kernel can take")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rate, kind = speed(given.device), given.device.split(":")[0]
    print(f"float32 products on {given.device}: {rate / 1e9:.0f} GFLOP/s, {given.threads} thread(s)\n")
    print("| kernel | examples | GFLOP | floor, s |\n|---|---|---|---|")
    for name, spec in MODELS.items():
        if given.only not in name or kind not in spec[2]:
            continue
        state = setup(*spec, given.device)
        for outputs in ("full", "trace"):
            count = flops(state.model, state.x, outputs)
            print(f"| {name}-{outputs} | {len(state.x)} | {count / 1e9:.1f} | {count / rate:.3g} |", flush=True)


if __name__ == "__main__":
    main()
