"""Milliseconds of a training step of KFAC, EKFAC and EKFAC-ra beside SGD, and how long the GPU works in it.

    python benchmarks/natural_gradient_steps.py vgg11 resnet34

The networks of Fig. 4.5 and 4.6 (batch 500, SUA, tf32 on a GPU), random data; steps between refreshes, mean of ten.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from biascope.optim import EKFAC, KFAC
from biascope.support.precision import arithmetic
from biascope_papers.ekfac.cifar import build


def optimisers(net: torch.nn.Module) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    """How to make each; one at a time, since each watches the network."""
    deep = {"lr": 1e-3, "damping": 1e-2, "refresh_every": 50, "sua": True, "damping_mode": "deep"}
    return {
        "SGD": lambda: torch.optim.SGD(net.parameters(), 1e-3),
        "KFAC": lambda: KFAC(net, lr=1e-3, damping=1e-2, refresh_every=50, factor_decay=0.0, sua=True),
        "EKFAC": lambda: EKFAC(net, **deep),
        "EKFAC-ra": lambda: EKFAC(net, scalings="running", **deep),
    }


def measure(name: str, network: str, batch: int, width: int, device: str, steps: int) -> str:
    net = build(network, 0, False, width, 3).to(device).train()
    opt = optimisers(net)[name]()
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(batch, 3, 32, 32, generator=g).to(device), torch.randint(10, (batch,), generator=g).to(device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step() -> None:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()

    for _ in range(3):
        step()
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    said = f"{network:10s} {name:10s} {1e3 * (time.perf_counter() - start) / steps:8.1f} ms a step"
    if device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            wait()
        kernels = [e for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
        busy = sum(e.self_device_time_total for e in kernels) / 1e3
        said += f", GPU busy {busy:.1f} ms in {sum(e.count for e in kernels)} kernels"
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", choices=["vgg11", "resnet34"])
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU", torch.__version__)
    with arithmetic("tf32"):
        for network in args.networks:
            for name in ("SGD", "KFAC", "EKFAC", "EKFAC-ra"):
                print(measure(name, network, args.batch, args.width, device, args.steps), flush=True)


if __name__ == "__main__":
    main()
