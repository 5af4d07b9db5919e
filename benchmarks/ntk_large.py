"""The large kernel: K(X, X) of one logit of ResNet-18 on n inputs of CIFAR-10 size, in one call on one GPU.

    python benchmarks/ntk_large.py --n 60000 --precision bf16 --out benchmarks/results/ntk-large-h200.json

Published times for comparison (other hardware, so no ratio is claimed): 32 hours on four V100 for 60,000 (thesis of
G. Ortiz-Jimenez), 43 minutes on four A100 for 60,000 x 50,000 (empirical-ntks). Floor: the contraction takes n^2 p
FLOPs (half of 2 n^2 p by symmetry), 4.0e16 for n = 60,000 and p = 11.17 million.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch

import biascope as bs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=60_000)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--max-memory", default="125GB")
    parser.add_argument("--data", choices=["gaussian", "cifar10"], default="gaussian")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = bs.nets.build("resnet18", seed=0, in_channels=3, outputs=10).eval().to(device)
    if args.data == "cifar10":
        x = torch.cat([bs.data.load("cifar10", s).x for s in ("train", "test")])[: args.n]
    else:
        x = torch.randn(args.n, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    x = x.to(device)
    bs.ntk(net, x[:64], outputs=0, precision=args.precision)  # warm up: kernels, handles, the certificate
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    K = bs.ntk(net, x, outputs=0, precision=args.precision, max_memory=args.max_memory)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    p = sum(q.numel() for q in net.parameters())
    sample = K.tensor[:: max(1, args.n // 512), :: max(1, args.n // 512)].double()
    result = {
        "n": args.n,
        "parameters": p,
        "precision": args.precision,
        "data": args.data,
        "seconds": round(seconds, 2),
        "relative_error_against_float64": K.error,
        "asymmetry": float((sample - sample.T).abs().max()),
        "smallest_diagonal": float(K.tensor.diagonal().min()),
        "finite": bool(torch.isfinite(sample).all()),
        "passes": K.plan.passes,
        "methods": {b.block.names[0]: b.method for b in K.plan.blocks if b.block.kind == "matrix"},
        "tflops_of_n2p": round(args.n**2 * p / seconds / 1e12, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
