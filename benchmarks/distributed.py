"""Weak scaling: as much work per process on two as on one, and the bytes that travel.

    python benchmarks/distributed.py              # 1 and 2 processes on the CPU (gloo), a thread each
    python benchmarks/distributed.py --ranks 4 --repeats 5
    torchrun --nproc-per-node 8 benchmarks/distributed.py --device cuda     # 8 GPUs against 1 (nccl)

Every case gets `n` examples per process. Its speed-up is W * t(1, n) / t(W, W n): W where the other processes cost
nothing. It is given of wall seconds and of CPU seconds (of the slowest process), which other jobs on the machine hardly
change; waiting for another process is not in the latter. Of a kernel, whose work grows with n^2, W processes get
sqrt(W) n examples. `bytes` is what the slowest process handed to collectives, `expected` what follows from the sizes.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import biascope as bs
from biascope.kernels.shared import exchanged
from biascope.support.processes import processes

GOAL = 1.7  # at two processes
WIDTH, CLASSES = 256, 10
PROBES, VECTORS = 16, 8


def network(device: str) -> nn.Module:
    """The same on every process."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*layers).to(device)


def data(n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(n)
    return torch.randn(n, WIDTH, generator=gen).to(device), (torch.arange(n) % CLASSES).to(device)


def kernel(net: nn.Module, n: int, group: Any, device: str) -> Any:
    return bs.ntk(net, data(n, device)[0], outputs="trace", group=group).tensor


def alignment(net: nn.Module, n: int, group: Any, device: str) -> Any:
    return bs.label_alignment(net, *data(n, device), sketch=PROBES, group=group)


def ekfac(net: nn.Module, n: int, group: Any, device: str) -> Any:
    return bs.fisher(net, data(n, device)[0], "ekfac", group=group)


def product(net: nn.Module, n: int, group: Any, device: str) -> Any:
    H = bs.hessian(net, data(n, device), group=group)
    return H @ torch.ones(H.shape[0], VECTORS, device=device)


def bytes_of_ekfac(net: nn.Module, n: int, ranks: int) -> int:
    """Factors once to their ranks and once back as eigenvectors with eigenvalues; scalings and a count once."""
    total = 0
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            o, i = layer.out_features, layer.in_features + 1
            total += 2 * (o * o + i * i) + o + i + o * i + 2
    return 4 * total


def numbers(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# what, examples per process, does it grow with n^2, bytes that a process hands to collectives
CASES: dict[str, tuple[Callable[..., Any], int, bool, Callable[[nn.Module, int, int], int]]] = {
    "ntk": (kernel, 3000, True, lambda net, n, ranks: 4 * exchanged(n, ranks)),
    "label_alignment": (
        alignment,
        8000,
        False,
        lambda net, n, ranks: 8 * (PROBES + 1) * numbers(net),
    ),  # and the labels
    "fisher ekfac": (ekfac, 8000, False, bytes_of_ekfac),
    "hessian product": (product, 8000, False, lambda net, n, ranks: 4 * VECTORS * numbers(net)),
}


def measure(group: Any, device: str, repeats: int, ranks: int, smoke: bool) -> list[dict[str, Any]]:
    """Seconds and bytes of every case on this process."""
    rows = []
    net = network(device)
    for name, (do, n, square, sizes) in CASES.items():
        n = 40 if smoke else n
        count = round(n * (math.sqrt(ranks) if square else ranks))
        times: list[tuple[float, float]] = []
        sent = 0
        for _ in range(repeats + 1):
            if group is not None:
                processes(group).bytes.clear()  # type: ignore[attr-defined]
                dist.barrier(group)
            wall, cpu = time.perf_counter(), time.process_time()
            do(net, count, group, device)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
            sent = 0 if group is None else sum(processes(group).bytes.values())  # type: ignore[attr-defined]
        wall, cpu = (statistics.median(t) for t in zip(*times[1:], strict=True))  # the first call is a warm-up
        expected = 0 if group is None else sizes(net, count, ranks)
        rows.append({"case": name, "n": count, "wall_s": wall, "cpu_s": cpu, "bytes": sent, "expected": expected})
    return rows


def work(rank: int, ranks: int, folder: str, device: str, repeats: int, smoke: bool) -> None:
    """One process of a group."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks)
    rows = measure(dist.group.WORLD, device, repeats, ranks, smoke)
    Path(folder, f"{ranks}-{rank}.json").write_text(json.dumps(rows))
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def slowest(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {key: max((row[key] for row in same), key=lambda v: v if isinstance(v, (int, float)) else 0) for key in same[0]}
        for same in zip(*found, strict=True)
    ]


def run(ranks: int, device: str, repeats: int, smoke: bool) -> list[dict[str, Any]]:
    """Measurements of a group of processes that are started here."""
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            torch.set_num_threads(1)
            return measure(None, device, repeats, 1, smoke)
        mp.spawn(work, (ranks, folder, device, repeats, smoke), nprocs=ranks)  # type: ignore[no-untyped-call]
        return slowest([json.loads(Path(folder, f"{ranks}-{r}.json").read_text()) for r in range(ranks)])


def report(one: list[dict[str, Any]], many: list[dict[str, Any]], ranks: int) -> None:
    """A table."""
    heads = f"{'1 process':>10} {f'{ranks} processes':>12} {'speed-up':>9} {'by CPU':>7} {'bytes':>12}"
    print(f"{'case':16} {'n':>7} {heads}")
    for a, b in zip(one, many, strict=True):
        wall, cpu = ranks * a["wall_s"] / b["wall_s"], ranks * a["cpu_s"] / b["cpu_s"]
        note = " as expected" if b["bytes"] == b["expected"] else f" not {b['expected']}"
        seconds = f"{a['wall_s']:9.3f}s {b['wall_s']:11.3f}s"
        print(f"{a['case']:16} {a['n']:7} {seconds} {wall:8.2f}x {cpu:6.2f}x {b['bytes']:12}{note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--smoke", action="store_true", help="few examples, to see that it runs")
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:  # under torchrun: the group is there, one process alone is measured first on rank 0
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else None
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        one = measure(None, args.device, args.repeats, 1, args.smoke) if dist.get_rank() == 0 else []
        dist.barrier()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            found, measure(dist.group.WORLD, args.device, args.repeats, dist.get_world_size(), args.smoke)
        )
        if dist.get_rank() == 0:
            report(one, slowest(found), dist.get_world_size())
        dist.barrier()
        dist.destroy_process_group()
        return
    one = run(1, args.device, args.repeats, args.smoke)
    report(one, run(args.ranks, args.device, args.repeats, args.smoke), args.ranks)


if __name__ == "__main__":
    sys.exit(main())
