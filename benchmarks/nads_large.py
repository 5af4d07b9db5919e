"""Neural anisotropy directions of T = 10,000 networks, D = 1024: seconds from call to result.

    python benchmarks/nads_large.py lenet resnet18 --out benchmarks/results/nads-large-h200.json
    python benchmarks/nads_large.py densenet121 --precision fp16 --keep --out benchmarks/results/nads-large-h200.json

Nothing is left out: drawing the networks, compiling (where the engine decides to), 2 D forward passes of each, the
eigendecomposition. Goals on one H200: LeNet 3 s, ResNet-18 3 minutes, DenseNet-121 8 minutes. One small call before
it loads the libraries and the device.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch

import biascope as bs
from biascope.linalg import subspace_overlap
from biascope_papers.nad.anisotropy import published_directions

SHAPE = (1, 32, 32)


def measure(net: str, networks: int, method: str, precision: str, device: str, reference: str) -> dict[str, object]:
    """Seconds of one call, and what came out of it."""

    def factory() -> torch.nn.Module:
        return bs.nets.build(net, outputs=1, **bs.nets.info(net).options_for(SHAPE)).eval()

    bs.nads(factory, SHAPE, 2, method=method, device=device, precision=precision)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = bs.nads(factory, SHAPE, networks, method=method, device=device, precision=precision, seed=1)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    published = published_directions(net, reference, SHAPE[1] * SHAPE[2])
    vectors = found.directions.flatten(1).T.double().cpu()
    return {
        "net": net,
        "networks": networks,
        "method": method,
        "precision": precision,
        "seconds": round(seconds, 3),
        "milliseconds_per_network": round(1e3 * seconds / networks, 4),
        "first_eigenvalues": [float(value) for value in found.eigenvalues[:3]],
        "overlap_with_published_first_10": None
        if published is None
        else round(subspace_overlap(vectors[:, :10], published[:10].T), 4),
        "finite": bool(torch.isfinite(found.eigenvalues).all()),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="+")
    parser.add_argument("--networks", type=int, default=10_000)
    parser.add_argument("--method", default="finite-difference")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument(
        "--reference", default="", help="folder with published directions, nads_NAME.npz, to compare with"
    )
    parser.add_argument("--keep", action="store_true", help="keep what --out has of other nets, numbers or precisions")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = json.loads(args.out.read_text()) if args.keep and args.out and args.out.exists() else []
    for net in args.nets:
        precision = args.precision if device == "cuda" else "float32"
        row = measure(net, args.networks, args.method, precision, device, args.reference)
        print(json.dumps(row), flush=True)
        same = {key: row[key] for key in ("net", "networks", "method", "precision")}
        rows = [old for old in rows if {key: old[key] for key in same} != same] + [row]
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
