"""EKFAC, influence and indices of language models at real size, with rivals beside: one JSON line per case.

    python benchmarks/language_models_gpu.py --out FOLDER [--rivals FOLDER] [--seconds 225] [--only TEXT] [--smoke]
    python benchmarks/language_models_gpu.py --out FOLDER --short            # indices, and a model of 1.5B parameters
    python benchmarks/language_models_gpu.py --out FOLDER --index 100000     # one index of so many examples, in tf32

The models and rivals of `language_models.py`, in one process that a GPU of which minutes are short can be given: every
case is under an alarm, and one that fails or is too slow is a line like the others. Rivals are read from `--rivals`.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--rivals", default="rivals-language")
parser.add_argument("--smoke", action="store_true")
parser.add_argument("--seconds", type=float, default=225)
parser.add_argument("--only", default="")
parser.add_argument("--short", action="store_true")
parser.add_argument("--index", type=int, default=0)
args = parser.parse_args()
START = time.perf_counter()
sys.path[:0] = [str(HERE.parent / "src"), str(HERE), args.rivals]
warnings.filterwarnings("ignore")
os.environ["TQDM_DISABLE"] = "1"
import logging  # noqa: E402

import torch  # noqa: E402

logging.disable(logging.WARNING)
import language_models as lm  # noqa: E402

import biascope as bs  # noqa: E402

CUDA = torch.cuda.is_available()
DEV = "cuda" if CUDA else "cpu"
OUT = args.out
OUT.mkdir(parents=True, exist_ok=True)
ROWS = []
G = 2.0**30
# small sizes of the same shapes, so that every line below runs on a CPU
Size = lm.Size
if args.smoke:
    lm.SIZES |= {
        "gpt2-124M": Size("gpt2", 9_000, 64, 256, 2, 4, 6, 16),
        "llama-170M-32000": Size("llama", 9_000, 64, 192, 2, 4, 6, 16),
        "llama-170M-128256": Size("llama", 12_000, 64, 192, 2, 4, 6, 16),
        "llama-1B": Size("llama", 9_000, 128, 512, 2, 4, 4, 32),
        "llama-1B-2": Size("llama", 9_000, 128, 512, 1, 4, 4, 32),
    }
else:
    lm.SIZES["llama-1B-2"] = Size("llama", 128_256, 2048, 8192, 2, 32, 32, 512)


class Slow(BaseException):
    """The alarm went off."""


def _alarm(*_):
    raise Slow


signal.signal(signal.SIGALRM, _alarm)


def left():
    return args.seconds - (time.perf_counter() - START)


def sync():
    if CUDA:
        torch.cuda.synchronize()


def clean():
    gc.collect()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def emit(case, **row):
    row = {"case": case, "t": round(time.perf_counter() - START, 1), **row}
    ROWS.append(row)
    with (OUT / "language.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({k: (v[:160] if isinstance(v, str) else v) for k, v in row.items() if k != "plan"}), flush=True)


@contextlib.contextmanager
def case(name, cap):
    """The body under an alarm; what it raises becomes a row."""
    if args.only not in name:
        yield None
        return
    limit = min(cap, left() - 2)
    if limit < 3:
        emit(name, status="no time")
        yield None
        return
    clean()
    box = {}
    start = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield box
        sync()
        box.setdefault("status", "ok")
    except Slow:
        box["status"] = f"over {limit:.0f} s"
    except Exception as e:
        box["status"] = f"{type(e).__name__}: {str(e)[:400]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    box["wall_s"] = round(time.perf_counter() - start, 2)
    if CUDA:
        box["peak_GB"] = round(torch.cuda.max_memory_allocated() / G, 2)
    emit(name, **box)


# `with case(...) as box` must be skipped where box is None
def on(box):
    return box is not None


def timed(box, key, run):
    """Seconds of one call, its result, and its own peak above what was held."""
    gc.collect()
    sync()
    held = torch.cuda.memory_allocated() if CUDA else 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    out = run()
    sync()
    box[f"{key}_s"] = round(time.perf_counter() - start, 3)
    if CUDA:
        box[f"{key}_own_peak_GB"] = round((torch.cuda.max_memory_allocated() - held) / G, 2)
    return out


STATES = {}


def state(name):
    if name not in STATES:
        STATES.clear()
        clean()
        with torch.device(DEV):  # random weights at once where they live
            torch.manual_seed(0)
            torch.set_float32_matmul_precision("highest")
            s = lm.SIZES[name]
            STATES[name] = lm.State(lm.build(name), torch.randint(0, s.words, (s.examples, s.tokens)))
    return STATES[name]


def squares(st, names):
    """Mean over the examples of the squared gradients, by autograd in float32, added in float64."""
    params = [st.model.get_parameter(n) for n in names]
    total = torch.zeros((), dtype=torch.float64, device=st.ids.device)
    for ids in st.ids.split(1):
        for g in torch.autograd.grad(lm.log_likelihood(st.model, ids), params):
            total += g.double().square().sum()
    return float(total) / len(st.ids)


def reduced(F):
    """Lines of the plan that are no full Kronecker factors, each kind once."""
    seen = {}
    for name, shape, kind, why in F.plan.rows:
        if "factor" in why and ("full:" in why or "leaves out" in why):
            key = (shape, kind, why.split(" leaves out")[0])
            seen.setdefault(key, f"{name} {list(shape)}: {kind}, {why}")
    return list(seen.values())


def ekfac(name, label, names, cap, check=True, again=True, **how):
    st = state(name)
    with case(f"ekfac/{name}/{label}", cap) as box:
        if not on(box):
            return
        box["parameters"] = sum(
            st.model.get_parameter(n).numel() for n in (names or [n for n, _ in st.model.named_parameters()])
        )
        run = lambda: bs.fisher(st.model, st.data, "ekfac", estimator="empirical", params=names, **how)  # noqa: E731
        F = timed(box, "first", run)
        box["trace"] = float(F.trace())
        box["kinds"] = {}
        for _, _, kind, _ in F.plan.rows:
            box["kinds"][kind] = box["kinds"].get(kind, 0) + 1
        box["ladder"] = reduced(F)[:12]
        (OUT / f"plan-{name}-{label}.txt").write_text(str(F.plan))
        if again and left() > 3 * box["first_s"]:
            del F
            F = timed(box, "second", run)
        if check:
            truth = timed(box, "autograd", lambda: squares(st, names or [n for n, _ in st.model.named_parameters()]))
            box["trace_error"] = abs(box["trace"] / truth - 1)
        v = torch.randn(F.shape[0], device=DEV)
        timed(box, "solve", lambda: F.solve(v, damping=1e-4 * box["trace"]))


def kronfluence(name, cap):
    """Its factors on the same modules; the empirical Fisher information."""
    if importlib.util.find_spec("kronfluence") is None:
        return
    st = state(name)
    with case(f"ekfac/{name}/linear/kronfluence", cap) as box:
        if on(box):
            box["modules"] = len(st.inner)
            box["trace"] = float(timed(box, "first", lambda: lm.kronfluence_ekfac(st, st.inner)))


def bergson_factors(name, cap):
    """Its factors on the same modules, and on disk, where it always puts them; the empirical Fisher information."""
    if importlib.util.find_spec("bergson") is None:
        return
    st = state(name)
    with case(f"ekfac/{name}/linear/bergson", cap) as box:
        if on(box):
            box["trace"] = float(timed(box, "first", lambda: lm.bergson_ekfac(st)))


def solver():
    """Eigendecompositions, alone and side by side: they are most of what EKFAC takes at this size."""
    from concurrent.futures import ThreadPoolExecutor

    with case("eigh", 25) as box:
        if not on(box):
            return
        for d, together in ((64, 2),) if args.smoke else ((3072, 8), (8192, 3)):
            X = torch.randn(d + 64, d, device=DEV)
            S = X.T @ X / d
            torch.linalg.eigh(S[:32, :32].contiguous())
            timed(box, f"{d}", lambda S=S: torch.linalg.eigh(S))

            def work(S):
                if not CUDA:
                    return torch.linalg.eigh(S)
                with torch.cuda.stream(torch.cuda.Stream()):
                    out = torch.linalg.eigh(S)
                torch.cuda.current_stream().synchronize()
                return out

            many = [S.clone() for _ in range(together)]
            with ThreadPoolExecutor(together) as pool:
                timed(box, f"{d}x{together}", lambda many=many, pool=pool: list(pool.map(work, many)))


# ---------------------------------------------------------------------------------------------------------- indices


def rows_of(n, name="gpt2-124M"):
    s = lm.SIZES[name]
    gen = torch.Generator().manual_seed(1)
    return torch.randint(0, s.words, (n, s.tokens), generator=gen)


def index(n, dim, cap, label="biascope", **how):
    st = state("gpt2-124M")
    with case(f"index/gpt2-124M/{label}", cap) as box:
        if not on(box):
            return
        layers = lm.base_layers(st.model)
        for p in st.model.parameters():
            p.requires_grad_(id(p) in layers)
        ids = rows_of(n).to(DEV)
        data, query = {"input_ids": ids, "labels": ids}, {"input_ids": ids[:1], "labels": ids[:1]}
        try:
            with tempfile.TemporaryDirectory() as folder:
                few = {k: v[:64] for k, v in data.items()}
                make = lambda d, f: bs.influence(  # noqa: E731
                    st.model, d, query, None, damping=0.0, dim=dim, store=f"{folder}/{f}", self_influence=False, **how
                )
                timed(box, "warm", lambda: make(few, "warm"))
                found = timed(box, "index", lambda: make(data, "all"))
                box["bytes"] = sum(f.stat().st_size for f in Path(f"{folder}/all").iterdir())
                box |= {"examples": n, "dim": dim}
                box["examples_per_s"] = round(n / box["index_s"], 1)
                box["seconds_of_100000"] = round(1e5 / box["examples_per_s"], 1)
                if label == "biascope, tf32":
                    return
                # is it right? the best scores against exact products of gradients
                timed(box, "again", lambda: make(data, "all"))  # another question of the same store
                own = bs.influence(st.model, {k: v[:8] for k, v in data.items()}, query, None, damping=0.0)
                scale = float(own.scores[0, 0])  # of the query on itself
                off = (found.scores[0, :8] - own.scores[0]).abs().max()
                box["largest_error_over_self"] = float(off) / scale
                box["said_error_over_self"] = float(found.errors[0, 0]) / scale
        finally:
            for p in st.model.parameters():
                p.requires_grad_(True)


def bergson(n, batch, cap, label="bergson"):
    if importlib.util.find_spec("bergson") is None:
        return
    st = state("gpt2-124M")
    with case(f"index/gpt2-124M/{label}", cap) as box:
        if not on(box):
            return
        from bergson import GradientProcessor, IndexConfig, collect_gradients
        from datasets import Dataset

        st.model.requires_grad_(False)  # as `bergson build` does
        st.model.get_input_embeddings().requires_grad_(True)

        if "tf32" in label:
            torch.set_float32_matmul_precision("high")

        def run(n):
            rows = rows_of(n).tolist()
            data = Dataset.from_dict({"input_ids": rows, "labels": rows, "length": [len(r) for r in rows]})
            with tempfile.TemporaryDirectory() as folder:
                config = IndexConfig(run_path=f"{folder}/index", projection_dim=16)
                config.partial_run_path.mkdir(parents=True, exist_ok=True)
                batches = [list(range(i, min(i + batch, n))) for i in range(0, n, batch)]
                collect_gradients(st.model, data, GradientProcessor(projection_dim=16), config, batches=batches)
                return sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())

        try:
            timed(box, "warm", lambda: run(batch))
            box["bytes"] = timed(box, "index", lambda: run(n))
            box |= {"examples": n, "batch": batch, "examples_per_s": round(n / box["index_s"], 1)}
            box["seconds_of_100000"] = round(1e5 / box["examples_per_s"], 1)
        finally:
            torch.set_float32_matmul_precision("highest")
            st.model.requires_grad_(True)


def phases():
    """Seconds in the pilot and in the eigendecompositions, and the peak of the pilot, added up from here on."""
    from biascope.curvature import build, sums

    spent = {"pilot_s": 0.0, "eigh_s": 0.0, "pilot_peak_GB": 0.0}

    def clocked(module, name, key):
        inner = getattr(module, name)

        def run(*a, **k):
            sync()
            start = time.perf_counter()
            try:
                return inner(*a, **k)
            finally:
                sync()
                spent[key] += time.perf_counter() - start
                if CUDA and key == "pilot_s":
                    spent["pilot_peak_GB"] = torch.cuda.max_memory_allocated() / G
                    torch.cuda.reset_peak_memory_stats()

        setattr(module, name, run)

    clocked(build, "anatomy", "pilot_s")
    clocked(sums, "decompose", "eigh_s")
    return spent


def short():
    small, n = args.smoke, 16 if args.smoke else 768
    dim = 64 if small else 1024
    state("gpt2-124M")
    index(n, dim, 15)
    bergson(n, 4 if small else 32, 8, "bergson, batches of 32")
    index(n, dim, 8, "biascope, tf32", precision="tf32")
    bergson(n, 4 if small else 32, 6, "bergson, batches of 32, tf32")
    ekfac("llama-1B-2", "linear", state("llama-1B-2").inner, 25, check=False, again=False)
    kronfluence("llama-1B-2", 25)
    bergson_factors("llama-1B-2", 30)
    st = state("llama-1B")
    spent = phases()
    with case("ekfac/llama-1B/all, 60 GB", 100) as box:
        if on(box):
            run = lambda: bs.fisher(  # noqa: E731
                st.model, st.data, "ekfac", estimator="empirical", max_memory="60MB" if small else "60GB"
            )
            F = timed(box, "first", run)
            box |= {k: round(v, 2) for k, v in spent.items()}
            box["trace"], box["ladder"] = float(F.trace()), reduced(F)[:6]
    emit("end", seconds=round(time.perf_counter() - START, 1))


def trak(n, cap):
    """TRAK's features of all parameters, by its projector in plain torch; the CUDA one has to be compiled."""
    if importlib.util.find_spec("trak") is None:
        return
    st = state("gpt2-124M")
    with case("index/gpt2-124M/trak", cap) as box:
        if not on(box):
            return
        small = lm.State(st.model, rows_of(n).to(DEV))
        from trak import projectors

        keep = projectors.BasicProjector
        with contextlib.suppress(Exception):
            lm.DIM = 1024
        timed(box, "index", lambda: lm.trak_index(small))
        box |= {"examples": n, "examples_per_s": round(n / box["index_s"], 2), "projector": str(keep)}


def plain(n, cap):
    """The floor: a forward and a backward pass, whose gradients nobody keeps, in float32 and in tf32."""
    st = state("gpt2-124M")
    with case("plain/gpt2-124M", cap) as box:
        if not on(box):
            return
        layers = lm.base_layers(st.model)
        params = [p for p in st.model.parameters() if id(p) in layers]

        def run():
            for ids in rows_of(n).to(DEV).split(16):
                torch.autograd.grad(lm.log_likelihood(st.model, ids), params)

        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            run()
            timed(box, precision, run)
            box[f"{precision}_examples_per_s"] = round(n / box[f"{precision}_s"], 1)
        torch.set_float32_matmul_precision("highest")


def influence(name, queries, cap):
    """Exact scores of a few queries on the inner linear layers, after the factors; kronfluence beside it."""
    st = state(name)
    with case(f"influence/{name}/biascope", cap) as box:
        if on(box):
            F = timed(
                box, "factors", lambda: bs.fisher(st.model, st.data, "ekfac", estimator="empirical", params=st.inner)
            )
            few = {k: v[:queries] for k, v in st.data.items()}
            damping = 0.1 * float(F.trace()) / F.shape[0]
            found = timed(box, "scores", lambda: bs.influence(st.model, st.data, few, F, damping=damping))
            box["scores_per_s"] = round(found.scores.numel() / box["scores_s"], 1)
            self_found = timed(
                box,
                "self",
                lambda: bs.influence(st.model, few, few, F, damping=damping, self_influence=True).self_influence,
            )
            box["self_error"] = float(
                (self_found - found.scores[:, :queries].diagonal()).abs().max() / self_found.max()
            )
            FOUND[name] = found.scores
            del F
    if importlib.util.find_spec("kronfluence") is None:
        return
    with case(f"influence/{name}/kronfluence", cap) as box:
        if on(box):
            kept, keep = st.linear, lm.QUERIES
            lm.QUERIES = queries
            real, modules = lm.kronfluence_task, [n.removesuffix(".weight") for n in st.inner]
            lm.kronfluence_task = lambda: real(modules)
            try:
                theirs = timed(box, "factors_and_scores", lambda: lm.kronfluence_influence(st))
                if name in FOUND:
                    pair = torch.stack([theirs.flatten().double().cpu(), FOUND[name].flatten().double().cpu()])
                    box["correlation_with_ours"] = float(torch.corrcoef(pair)[0, 1])
            finally:
                lm.QUERIES, lm.kronfluence_task = keep, real
            del kept


FOUND = {}


def main():
    small = args.smoke
    emit(
        "machine",
        device=torch.cuda.get_device_name() if CUDA else "cpu",
        torch=torch.__version__,
        transformers=importlib.import_module("transformers").__version__,
        python=sys.version.split()[0],
        imports_s=round(time.perf_counter() - START, 1),
    )
    solver()
    ekfac("gpt2-124M", "all", None, 30)
    plain(8 if small else 256, 10)
    index(16 if small else 1_500, 64 if small else 1024, 35)
    bergson(8 if small else 1_500, 4 if small else 32, 20, "bergson, batches of 32")
    bergson(8 if small else 500, 4 if small else 8, 12)
    ekfac("llama-170M-32000", "all", None, 25, again=False)
    ekfac("llama-170M-32000", "linear", state("llama-170M-32000").inner, 15, check=False, again=False)
    kronfluence("llama-170M-32000", 35)
    ekfac("llama-170M-128256", "all", None, 25, check=small, again=False)
    ekfac("llama-1B", "all", None, 90, check=small, again=False, max_memory="60MB" if small else "20GB")
    ekfac("llama-1B-2", "linear", state("llama-1B-2").inner, 25, check=False, again=False)
    kronfluence("llama-1B-2", 30)
    bergson_factors("llama-1B-2", 30)
    influence("llama-170M-32000", 2 if small else 4, 25)
    trak(4 if small else 16, 15)
    emit("end", seconds=round(time.perf_counter() - START, 1))


if args.index:
    index(args.index, 64 if args.smoke else 1024, args.seconds, "biascope, whole, tf32", precision="tf32")
elif args.short:
    short()
else:
    main()
