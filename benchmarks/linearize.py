"""Cost of the linearised network against the plain one: forward pass and training step, time and memory.

On a CPU every contender runs in a process of its own, at theta0, where f_lin = f and the gradients agree, so the plain
network in float64 is the reference. "biascope" is the default engine; "plain" is the network itself, so "best rival /
biascope" is 1 / (our cost ratio).

On a GPU (or with --cost) the contenders take turns in one process, at a displaced theta, with torch.func.jvp in float64
as the reference, for contiguous and channels-last tensors; the report then has "cost": our figures and those of
torch.func.jvp divided by the plain network's, with the time the GPU is busy (sum over kernels) next to wall time.

    python benchmarks/linearize.py --device cuda --out benchmarks/results/linearize-h200.json      # less than 40 s
    python benchmarks/linearize.py --device cuda --net vit-b --batch 32 --repeats 5
    python benchmarks/linearize.py --cost --batch 4 --width 4 --repeats 3                          # a check on a CPU
"""

import argparse
import copy
import gc
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import Case, Contender, Measurement, machine, main, markdown, ratios
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import biascope as bs
from biascope import nets

State = tuple[nn.Module, Tensor, Tensor]


VIT_B = {"in_channels": 3, "outputs": 1000, "image_size": 224, "patch": 16, "depth": 12, "heads": 12, "width": 768}
NETS = {  # networks that are not registered in this size: name, options
    "vit-b": ("vit", {**VIT_B, "mlp": 3072, "attention": "fused"}),
    "vit-s": ("vit", {**VIT_B, "mlp": 1536, "width": 384, "heads": 6, "depth": 4, "attention": "fused"}),
}


def setup(name: str, batch: int, device: str, **options: Any) -> State:
    gen = torch.Generator().manual_seed(0)
    name, more = NETS.get(name, (name, {}))
    options |= more
    shape = (3, 224, 224) if more else nets.info(name).input_shape
    model = nets.build(name, 0, **options).eval().to(device)
    x = torch.randn(batch, *shape, generator=gen).to(device)
    with torch.no_grad():
        classes = model(x[:2]).shape[1]
    return model, x, torch.randint(max(classes, 2), (batch,), generator=gen).to(device).clamp(max=classes - 1)


class FuncJvp(nn.Module):
    """The textbook: torch.func.jvp and autograd through it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.params0 = {k: p.detach().clone() for k, p in model.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        moved = {k: p - self.params0[k] for k, p in self.model.named_parameters()}
        with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no forward mode
            f0, Jv = torch.func.jvp(
                lambda p: torch.func.functional_call(self.model, p, (x,)), (self.params0,), (moved,)
            )
        return f0 + Jv


def forward(state: State) -> Tensor:
    with torch.no_grad():
        return state[0](state[1])


def step(state: State) -> Tensor:
    model, x, y = state
    model.zero_grad(set_to_none=True)
    out = model(x)
    loss = F.cross_entropy(out, y) if out.shape[1] > 1 else out.square().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    return torch.cat([grads[0].flatten(), grads[-1].flatten()])


def double(job: Any) -> Any:
    return lambda state: job((copy.deepcopy(state[0]).double(), state[1].double(), state[2]))


def with_model(wrap: Any) -> Any:
    return lambda state: (wrap(state[0]), *state[1:])


WAYS = {
    "biascope": bs.linearize,
    "plain": lambda model: model,
    "engine=jvp": lambda model: bs.linearize(model, engine="jvp"),
    "torch.func.jvp": FuncJvp,
}
CASES = [
    Case(
        f"{job.__name__}-{name}-{batch}",
        lambda device, name=name, batch=batch: setup(name, batch, device),
        tuple(Contender(way, job, prepare=with_model(wrap)) for way, wrap in WAYS.items()),
        reference=double(job),
        tolerance=1e-3,
        devices=("cpu",),
    )
    for name, batch in (("lenet", 32), ("resnet18", 32))
    for job in (forward, step)
]


# ---- in one process, by turns ----


def displaced(model: nn.Module) -> nn.Module:
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-3 * torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p))
    return model


def take_turns(case: str, job: Any, states: dict[str, State], truth: Tensor, given: Any) -> list[Measurement]:
    """Error, peak memory, wall and CPU seconds and busy seconds (GPU) of every contender of one case."""
    gpu = given.device.startswith("cuda")
    synchronize = torch.cuda.synchronize if gpu else lambda: None
    rows: dict[str, Measurement] = {}
    for way, state in states.items():
        rows[way] = row = Measurement(case, way, given.device, "ok")
        found = job(state).double()
        for _ in range(given.warmup):
            job(state)
        if way != "plain":
            row.error = float((found - truth).abs().max() / truth.abs().max())
            if not row.error <= (2e-2 if gpu else 1e-3):  # tf32 convolutions are on by default on GPUs
                row.status, row.reason = "failed", f"error {row.error:.2g}"
        state[0].zero_grad(set_to_none=True)
        if gpu:
            synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            job(state)
            synchronize()
            row.peak_bytes = torch.cuda.max_memory_allocated() - before
            state[0].zero_grad(set_to_none=True)
    gc.collect()
    cpu: dict[str, list[float]] = {way: [] for way in states}
    for _ in range(given.repeats):
        for way, state in states.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            job(state)
            synchronize()
            rows[way].wall_all.append(time.perf_counter() - start)
            cpu[way].append(time.process_time() - start_cpu)
            state[0].zero_grad(set_to_none=True)
    for way, row in rows.items():
        row.wall_s, row.cpu_s = statistics.median(row.wall_all), statistics.median(cpu[way])
    return list(rows.values())


def busy_seconds(job: Any, state: State) -> tuple[float, int]:
    """Seconds of all kernels together, and their number, of one call on a GPU."""
    job(state)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        job(state)
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.time_range.elapsed_us() for e in events) / 1e6, len(events)


def cost(given: Any) -> dict[str, Any]:
    """Measure, print and write everything the goals are about."""
    gpu = given.device.startswith("cuda")
    measured: list[Measurement] = []
    costs: dict[str, Any] = {}
    options = {"width": given.width} if given.width else {}
    plain, x, y = setup(given.net, given.batch, given.device, **options)
    reference = displaced(FuncJvp(copy.deepcopy(plain).double()))
    truths = {job: job((reference, x.double(), y)) for job in (forward, step)}
    del reference
    layouts = (torch.contiguous_format,) if given.net in NETS else (torch.contiguous_format, torch.channels_last)
    for layout in layouts:
        model, batch = copy.deepcopy(plain).to(memory_format=layout), x.to(memory_format=layout)
        ways = {"biascope": displaced(bs.linearize(model)), "plain": model, "torch.func.jvp": displaced(FuncJvp(model))}
        states = {way: (net, batch, y) for way, net in ways.items()}
        for job in (forward, step):
            case = f"{job.__name__}-{given.net}-{given.batch}-{str(layout).removeprefix('torch.')}"
            rows = {row.contender: row for row in take_turns(case, job, states, truths[job], given)}
            measured += rows.values()
            costs[case] = {}
            busy = {way: busy_seconds(job, state) for way, state in states.items()} if gpu else {}
            for way in ("biascope", "torch.func.jvp"):
                mine, base = rows[way], rows["plain"]
                found = {"wall": mine.wall_s / base.wall_s, "cpu": mine.cpu_s / base.cpu_s}
                if gpu:
                    found["memory"] = mine.peak_bytes / base.peak_bytes
                    found["busy"], found["kernels"] = (a / b for a, b in zip(busy[way], busy["plain"]))
                costs[case][way] = found
            print(case, {way: {k: round(v, 2) for k, v in found.items()} for way, found in costs[case].items()})
    report = {
        "benchmark": "linearize",
        "machine": machine(given.device),
        "settings": {
            **{"device": given.device, "repeats": given.repeats, "warmup": given.warmup},
            **{"headline": "wall_s", "baseline": None},
        },
        "measurements": [asdict(row) for row in measured],
        "ratios": ratios(measured),
        "cost": costs,
    }
    print(markdown(report))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cost", action="store_true")
    if (found := parser.parse_known_args()[0]).cost or found.device.startswith("cuda"):
        parser = argparse.ArgumentParser(parents=[parser])
        parser.add_argument("--net", default="resnet18")
        parser.add_argument("--batch", type=int, default=256)
        parser.add_argument("--width", type=int, default=None, help="channels, where the network has that option")
        parser.add_argument("--repeats", type=int, default=20)
        parser.add_argument("--warmup", type=int, default=3)
        parser.add_argument("--out", type=Path, default=None, help="write the JSON report here")
        cost(parser.parse_args())
    else:
        main(CASES, __file__)
