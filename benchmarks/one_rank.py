"""Groups of one rank on a GPU (NCCL), and a 1B-parameter Llama spread by FSDP2 over one rank.

    python benchmarks/one_rank.py --out results          # one GPU of 100 GiB, two minutes
    python benchmarks/one_rank.py --smoke --out /tmp/o   # CPU and gloo, tiny, the same code path

Every number is a line of JSON in one_rank.jsonl and a short line on the screen, as soon as it is known. A part that
fails says so and the next one runs; a part that would begin after --seconds is left out and said so.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import biascope as bs
from biascope.network import shards

BEGIN = time.perf_counter()
warnings.simplefilter("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("--smoke", action="store_true")
parser.add_argument("--out", default=os.environ.get("OUT", "."))
parser.add_argument("--seconds", type=float, default=105.0)
parser.add_argument("--parts", default="overhead,small,ekfac,lanczos")
parser.add_argument("--cases", default="", help="of overhead, all by default")
parser.add_argument("--steps", type=int, default=10, help="of Lanczos, at most")
args = parser.parse_args()
SMOKE = args.smoke
CUDA = torch.cuda.is_available() and not SMOKE
DEVICE = "cuda" if CUDA else "cpu"
Path(args.out).mkdir(parents=True, exist_ok=True)
FILE = Path(args.out) / "one_rank.jsonl"


def elapsed():
    return time.perf_counter() - BEGIN


def say(part, **numbers):
    with FILE.open("a") as file:
        file.write(json.dumps({"part": part, "at_s": round(elapsed(), 1), **numbers}, default=str) + "\n")
    text = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in numbers.items())
    print(f"[{elapsed():5.1f}s] {part}: {text}", flush=True)


def sync():
    if CUDA:
        torch.cuda.synchronize()


def timed(do, *args, **kwargs):
    sync()
    begin = time.perf_counter()
    out = do(*args, **kwargs)
    sync()
    return out, time.perf_counter() - begin


def peak_reset():
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak():
    return torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0


def tensors(value):
    """All tensors of a result."""
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    if isinstance(value, float):
        return [torch.tensor(value)]
    return []


def difference(a, b):
    a, b = tensors(a), tensors(b)
    assert a
    assert len(a) == len(b)
    return max(float((x.double() - y.double()).norm() / x.double().norm().clamp_min(1e-300)) for x, y in zip(a, b))


def attempt(name, do):
    if name not in args.parts.split(","):
        return
    if elapsed() > args.seconds:
        say(name, skipped="no time left")
        return
    try:
        do()
    except Exception as error:
        say(name, failed=f"{type(error).__name__}: {error}"[:300])
        traceback.print_exc()
        sync()
    finally:
        peak_reset()


# ----------------------------------------------------------------------------------- a: what a group of one rank costs


def images(n):
    gen = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, 32, 32, generator=gen).to(DEVICE), (torch.arange(n) % 10).to(DEVICE)


def convnet(width=64):
    a, b, c = width, 2 * width, 4 * width
    layers = [nn.Conv2d(3, a, 3, 2, 1), nn.ReLU(), nn.Conv2d(a, b, 3, 2, 1), nn.ReLU(), nn.Conv2d(b, c, 3, 2, 1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10))


def overhead():
    group = dist.group.WORLD
    torch.manual_seed(0)
    net = convnet(8 if SMOKE else 64).to(DEVICE).eval()
    n = 24 if SMOKE else 8192
    x, y = images(n)
    small = lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 1))  # noqa: E731
    mlp = lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))  # noqa: E731
    tasks = [(x[i : i + n // 2], y[i : i + n // 2]) for i in range(4)]
    trained = {"epochs": 1, "batch_size": 128, "engine": "vmap", "seed": 1, "device": DEVICE}
    H, v = {}, {}

    def product(group):
        key = group is None
        if key not in H:
            H[key] = bs.hessian(net, (x[: n // 4], y[: n // 4]), group=group)
            v[key] = torch.ones(H[key].shape[0], 2, device=DEVICE)
        return H[key] @ v[key]

    def ensemble(group):
        done = bs.ensembles.train_ensemble(mlp, tasks, group=group, **trained)
        return dict(done.networks.params)

    def directions(group):
        count = 16 if SMOKE else 2048
        found = bs.nads(small, (1, 16, 16), count, "autograd", device=DEVICE, stability_k=3, group=group)
        return [found.eigenvalues, (found.directions.flatten(1).T * found.eigenvalues) @ found.directions.flatten(1)]

    cases = {
        "ntk trace": lambda g: bs.ntk(net, x[: n // 4], outputs="trace", group=g).tensor,
        "label_alignment": lambda g: (lambda A: [A.value, A.frobenius])(
            bs.label_alignment(net, x, y, sketch=16, group=g)
        ),
        "sketched_ntk": lambda g: bs.sketched_ntk(net, x[: n // 4], dim=16, group=g).features,
        "fisher ekfac": lambda g: (lambda F: [F.trace(), F.diagonal()])(bs.fisher(net, x, "ekfac", group=g)),
        "hessian product": product,
        "nads": directions,
        "average_geometry": lambda g: (
            bs.average_geometry(small, (1, 16, 16), 16 if SMOKE else 2048, device=DEVICE, group=g).matrix
        ),
        "train_ensemble": ensemble,
    }
    most = 0.2 if SMOKE else 2.5  # seconds per case
    for name, do in cases.items():
        if args.cases and name not in args.cases.split(","):
            continue
        try:
            alone, _ = timed(do, None)
            grouped, _ = timed(do, group)
            error = difference(alone, grouped)
            again = difference(alone, do(None))  # what atomic additions on a GPU do between two equal calls
            del alone, grouped
            sides, stop = ([], []), time.perf_counter() + most
            while len(sides[1]) < 3 or (time.perf_counter() < stop and len(sides[1]) < 40):
                order = (0, 1) if len(sides[1]) % 2 else (1, 0)
                for side in order:
                    sides[side].append(timed(do, group if side else None)[1])
            one, many = (statistics.median(s) for s in sides)
            pairs = statistics.median(b / a for a, b in zip(*sides))
            say(
                f"overhead, {name}", alone_ms=1e3 * one, group_ms=1e3 * many, percent=100 * (many / one - 1),
                percent_of_pairs=100 * (pairs - 1), percent_of_minima=100 * (min(sides[1]) / min(sides[0]) - 1),
                repeats=len(sides[1]), difference=error, same_call_twice=again,
            )  # fmt: skip
        except Exception as error:
            say(f"overhead, {name}", failed=f"{type(error).__name__}: {error}"[:300])
            traceback.print_exc()


# ------------------------------------------------------------------------------------ b: a Llama spread over one rank


def llama(width, inner, depth, words, heads, kv, tied=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=inner, num_hidden_layers=depth,
        num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).float().eval()


def spread(net):
    mesh = DeviceMesh.from_group(dist.group.WORLD, DEVICE, mesh=[0])
    for block in net.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return mesh


def tokens(n, length, words):
    ids = torch.randint(0, words, (n, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def vector(p, k=1, seed=2):
    gen = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(p, generator=gen, device=DEVICE) if k == 1 else torch.randn(p, k, generator=gen, device=DEVICE)


EMPIRICAL = {"estimator": "empirical", "class_dim": -1}


def small():
    """Everything against the same network unspread, at a size where both take no time; steps of training."""
    sizes = (16, 24, 2, 40, 4, 2) if SMOKE else (512, 1024, 2, 4000, 8, 4)
    data = tokens(4, 8 if SMOKE else 64, sizes[3])
    found = {}
    for way in ("whole", "spread"):
        net = llama(*sizes)
        group = None
        if way == "spread":
            group = spread(net)
            shards.KEPT = 0.0  # put parameters together for every use, as a network must that does not fit
        gc.collect()
        F, build_s = timed(bs.fisher, net, data, "ekfac", group=group, **EMPIRICAL)
        D = bs.fisher(net, data, "diagonal", group=group, **EMPIRICAL)
        v = vector(F.shape[0])
        H = bs.hessian(net, data, class_dim=-1, group=group)
        H @ v
        Hv, product_s = timed(H.__matmul__, v)
        top = bs.linalg.eigsh(H, 1, tol=1e-3, max_iterations=3, verify=False).values
        found[way] = {
            "F @ v": F @ v, "solve": F.solve(v, damping=1e-2 * float(D.diagonal().max())), "trace": F.trace(),
            "diagonal": D.diagonal(), "H @ v": Hv, "top": top,
        }  # fmt: skip
        if hasattr(H, "spectral_density"):
            rho = H.spectral_density(probes=1, steps=6)
            found[way]["density"] = [rho.nodes, rho.weights]
        say(f"small, {way}", parameters=F.shape[0], ekfac_s=build_s, product_s=product_s)
        opt = bs.optim.KFAC(net, lr=0.01, damping=0.03)
        times = []
        for _ in range(3):
            opt.zero_grad()
            out = net(**data)
            out.loss.backward()
            times.append(timed(opt.step)[1])
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        found[way]["KFAC, 3 steps"] = torch.cat([p.detach().flatten() for p in whole])
        say(f"small, KFAC step, {way}", first_ms=1e3 * times[0], last_ms=1e3 * times[-1], loss=float(out.loss.detach()))
        del F, D, H, Hv, net, opt
        peak_reset()
    shards.KEPT = 0.2
    gaps = {k: difference(found["whole"][k], found["spread"][k]) for k in found["whole"]}
    say("small, spread against whole", **gaps)


SIZES = (16, 24, 3, 40, 4, 2) if SMOKE else (2048, 8192, 16, 128_256, 32, 8)
LLAMA = {}


def ekfac():
    data = tokens(8, 8 if SMOKE else 256, SIZES[3])
    peak_reset()
    net, build_s = timed(llama, *SIZES)
    parameters = sum(p.numel() for p in net.parameters())
    say("1B", parameters=parameters, build_s=build_s, peak_gib=peak())
    # how many layers: eigendecompositions are what it costs, and seconds are few
    seconds = {}
    for d in (8, 16) if SMOKE else (2048, 8192):
        S = torch.randn(d, d, device=DEVICE)
        S = S @ S.T / d
        torch.linalg.eigh(S[:256, :256])
        seconds[d] = timed(torch.linalg.eigh, S)[1]
        del S
    small_s, large_s = seconds.values()
    per_layer = 3 * large_s + 7 * small_s
    left = max(5.0, min(45.0, args.seconds - elapsed() - 35))
    layers = max(1, min(SIZES[2], int(left / per_layer)))
    say("1B, eigh", small_s=small_s, large_s=large_s, layers_taken=layers, of=SIZES[2])
    chosen = [f"model.layers.{i}.*" for i in range(layers)]
    # unspread: the diagonal, whose sum is the trace of EKFAC too (scalings are squares in another basis)
    try:
        D, s = timed(bs.fisher, net, data, "diagonal", params=chosen, **EMPIRICAL)
        whole = float(D.trace())
        say("1B, diagonal of the whole network", seconds=s, trace=whole, peak_gib=peak())
        del D
    except Exception as error:
        whole = float("nan")
        say("1B, diagonal of the whole network", failed=f"{type(error).__name__}: {error}"[:300])
    peak_reset()
    mesh, s = timed(spread, net)
    LLAMA["net"], LLAMA["mesh"] = net, mesh
    say("1B, fully_shard", seconds=s)
    shards.KEPT = 0.0
    F, s = timed(
        bs.fisher, net, data, "ekfac", params=chosen, group=mesh, max_memory=None if SMOKE else "100GB", **EMPIRICAL
    )
    trace = float(F.trace())
    say(
        "1B, EKFAC, spread", seconds=s, peak_gib=peak(), measured=F.shape[0], plan=F._kinds(), trace=trace,
        trace_error=abs(trace - whole) / whole,
    )  # fmt: skip
    v = vector(F.shape[0])
    damping = 1e-2 * float(F.diagonal().max())
    solved, s = timed(F.solve, v, damping=damping)
    back = F @ solved + damping * solved
    say("1B, solve", seconds=s, residual=float((back - v).norm() / v.norm()), peak_gib=peak())


# ------------------------------------------------------------------------------------------- c: spectra of that network


def lanczos():
    if "net" not in LLAMA:
        LLAMA["net"] = llama(*SIZES)
        LLAMA["mesh"] = spread(LLAMA["net"])
    shards.KEPT = 0.0
    net, mesh = LLAMA["net"], LLAMA["mesh"]
    data = tokens(2, 8 if SMOKE else 128, SIZES[3])
    peak_reset()
    H = bs.hessian(net, data, class_dim=-1, group=mesh)
    v = vector(H.spread.rows)
    v /= v.norm()
    H @ v
    _, s = timed(H.__matmul__, v)
    say("1B, Hessian product", seconds=s, peak_gib=peak(), parameters=H.shape[0])
    steps = max(4, min(args.steps, int(0.35 * (args.seconds + 5 - elapsed()) / s)))
    pairs, s = timed(bs.linalg.eigsh, H, 1, tol=1e-2, max_iterations=1, start=v, subspace=steps, verify=False)
    say(
        "1B, Lanczos", seconds=s, products=pairs.matvecs, value=pairs.values.tolist(),
        residual=pairs.residuals.tolist(), peak_gib=peak(),
    )  # fmt: skip
    del pairs, v
    peak_reset()
    if not hasattr(H, "spectral_density"):
        say("1B, density", skipped="this tree has none")
        return
    del H  # of fewer parameters: a probe is drawn on the CPU, 10 s per billion numbers
    some = [f"model.layers.{i}.*" for i in range(SIZES[2] - 2, SIZES[2])]
    H = bs.hessian(net, data, class_dim=-1, params=some, group=mesh)
    rho, s = timed(H.spectral_density, probes=1, steps=steps)
    nodes = rho.nodes[0][rho.weights[0] > 0]
    say(
        "1B, density of two layers", seconds=s, parameters=H.shape[0], products=rho.matvecs,
        nodes=[round(x, 6) for x in nodes.tolist()],
        weights=[round(x, 6) for x in rho.weights[0].tolist()], peak_gib=peak(),
    )  # fmt: skip


def main():
    torch.set_num_threads(8 if CUDA else 1)
    if CUDA:
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if CUDA else "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1,
            **({"device_id": torch.device("cuda", 0)} if CUDA else {}),
        )  # fmt: skip
        say("start", torch=torch.__version__, device=torch.cuda.get_device_name() if CUDA else "cpu")
        attempt("overhead", overhead)
        attempt("small", small)
        attempt("ekfac", ekfac)
        attempt("lanczos", lanczos)
        say("end", seconds=elapsed())
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
