"""Public architectures at small random sizes: is what biascope says of each right, and how fast is it?

    python benchmarks/models.py                     # every model not yet in the result
    python benchmarks/models.py --only llama --again
    python benchmarks/models.py --page              # write docs/reference/models.md from the result

Truth is a Jacobian by autograd, one output of one example at a time, in float64. Parameters are moved off their
initialisation by noise, so that nothing vanishes by construction. biascope sees other inputs first: what it learns of
a network there, such as which experts take which tokens, must hold for these. Checked against it:

- kernel: all entries of the full kernel, and the same from a batch of two and one of one;
- diagonal: of the exact Fisher information, every entry;
- EKFAC: it is the projection of the Fisher information onto the diagonals of its eigenbasis, so trace(E) = trace(F) and
  <E, F> = <E, E>; and the eigenbasis of every nn.Linear diagonalises factors collected with hooks;
- influence: of every example on every other one, with random labels and the diagonal of the Fisher information;
- linearise: the value f + J delta away from the expansion point, and the gradient J^T u there.

A cell says `ok` (relative error below 1e-8; 1e-5 for models that round to float32 inside, as RMSNorm of transformers
does), `refused` with the sentence, `WRONG` with the error, or `error`. Times are
CPU seconds of the second call over those of a plain forward and backward pass on the same batch (`linearise`: of a
plain forward pass), float32, one thread. At these sizes they show the work in Python, not the arithmetic.
"""

import argparse
import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import machine
from model_zoo import ZOO, Batch, Entry, installed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import biascope as bs

HERE = Path(__file__).parent
RESULT = HERE / "results" / "models.json"
PAGE = HERE.parent / "docs" / "reference" / "models.md"
GOOD, GOOD_ROUNDED = 1e-8, 1e-5  # relative errors; the second for models that compute in float32 inside
CALLS = ("kernel", "diagonal", "ekfac", "linearise", "influence")
TITLES = {
    "kernel": "kernel",
    "diagonal": "Fisher diagonal",
    "ekfac": "EKFAC",
    "linearise": "linearise",
    "influence": "influence",
}


def build(entry: Entry, seed: int = 0) -> tuple[nn.Module, Batch]:
    """The model in float64 and eval mode, off its initialisation, and its inputs."""
    torch.manual_seed(seed)  # this process is the benchmark's own
    model, x = entry.build()
    model = model.double().eval()
    with torch.no_grad():
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            if not t.is_floating_point() or name.endswith(("inv_freq", "attn_bias")):
                continue
            noise = 0.2 * torch.randn_like(t)
            t.copy_(t * torch.exp(noise) if name.endswith("running_var") else t + noise)
    return model, double(x)


def double(x: Batch) -> Batch:
    """Floating-point inputs in float64."""
    if isinstance(x, dict):
        return {k: double(v) for k, v in x.items()}  # type: ignore[misc]
    return x.double() if x.is_floating_point() else x


def part(x: Batch, at: slice) -> Batch:
    """Some examples."""
    return {k: v[at] for k, v in x.items()} if isinstance(x, dict) else x[at]


def size(x: Batch) -> int:
    """Number of examples."""
    return len(next(iter(x.values()))) if isinstance(x, dict) else len(x)


def call(model: nn.Module, x: Batch) -> Tensor:
    """Logits [n, ..., classes]."""
    out = model(**x) if isinstance(x, dict) else model(x)
    return out if isinstance(out, Tensor) else out.logits


class Rounding(TorchDispatchMode):
    """Notices float32 numbers made of float64 ones."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32 and out.numel() > 1:
            self.seen |= any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args)
        return out


class Truth:
    """Outputs, the Jacobian and the Fisher information of a model, by autograd in float64."""

    def __init__(self, model: nn.Module, x: Batch) -> None:
        self.model, self.x, self.n = model, x, size(x)
        with Rounding() as self.rounding, torch.no_grad():
            call(model, x)
        named = {k: p for k, p in model.named_parameters() if p.requires_grad}
        self.names, params = list(named), list(named.values())
        out = call(model, x)
        flat, rows = out.flatten(), []
        for k in range(len(flat)):
            last = k + 1 == len(flat)
            grads = torch.autograd.grad(flat[k], params, retain_graph=not last, materialize_grads=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
        self.outputs = out.detach().double()  # [n, ..., classes]
        self.J = torch.stack(rows).view(*self.outputs.shape, -1)  # [n, ..., classes, p]

    @property
    def kernel(self) -> Tensor:
        """[n, c, n, c], outputs flattened."""
        J = self.J.flatten(0, -2)
        return (J @ J.T).view(self.n, -1, self.n, len(J) // self.n)

    def fisher_rows(self) -> Tensor:
        """R [r, p] with F = R^T R / n: the categorical Fisher information, positions added up."""
        p = self.outputs.softmax(-1)
        root = torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]  # H = root root^T
        return torch.einsum("...cp,...ck->...kp", self.J, root).flatten(0, -2)


def relative(value: Tensor, truth: Tensor) -> float:
    """Frobenius error."""
    return float((value - truth).norm() / truth.norm())


def kernel_error(model: nn.Module, truth: Truth) -> float:
    """Of the full kernel, and of a block computed by itself."""
    K = bs.ntk(model, truth.x, output=logits, precision="float64").tensor
    block = bs.ntk(model, part(truth.x, slice(0, 2)), part(truth.x, slice(2, 3)), output=logits).tensor
    return max(relative(K, truth.kernel), relative(block, truth.kernel[:2, :, 2:3]))


def metric(model: nn.Module, x: Batch, kind: str, positions: bool, **how: Any) -> Any:
    """The Fisher information; classes are the last axis."""
    return bs.fisher(model, x, kind, output=logits, class_dim=-1 if positions else 1, **how)


def diagonal_error(model: nn.Module, truth: Truth) -> float:
    """Of every entry of the diagonal."""
    R = truth.fisher_rows()
    F = metric(model, truth.x, "diagonal", truth.outputs.dim() > 2)
    return relative(F.diagonal(), R.square().sum(0) / truth.n)


def ekfac_error(model: nn.Module, truth: Truth) -> float:
    """Of trace(E) = trace(F) and <E, F> = <E, E>, and of the eigenbasis of linear layers."""
    R = truth.fisher_rows()
    E = metric(model, truth.x, "ekfac", truth.outputs.dim() > 2)
    product, square = (R * (E @ R.T).T).sum() / truth.n, E.frobenius_norm() ** 2
    trace, expected = E.diagonal().sum(), R.square().sum() / truth.n
    errors = [abs(float(product / square) - 1), abs(float(trace / expected) - 1)]
    return max(errors + [commutator(E, name, A, G, bias) for name, A, G, bias in hooked_factors(model, truth)])


def hooked_factors(model: nn.Module, truth: Truth) -> list[tuple[str, Tensor, Tensor, bool]]:
    """Kronecker factors (A, G) of linear layers that are called once, from hooks: an independent way to them."""
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m.weight.requires_grad}
    owners: dict[int, int] = {}
    for m in model.modules():
        for p in m.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    layers = {k: m for k, m in layers.items() if owners[id(m.weight)] == 1}
    inputs: dict[str, list[Tensor]] = {k: [] for k in layers}
    outputs: dict[str, list[Tensor]] = {k: [] for k in layers}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            inputs[name].append(args[0].detach())
            outputs[name].append(out)

        return hook

    handles = [m.register_forward_hook(watch(k)) for k, m in layers.items()]
    try:
        logits = call(model, truth.x)
    finally:
        for h in handles:
            h.remove()
    layers = {k: m for k, m in layers.items() if len(inputs[k]) == 1}
    if not layers:
        return []
    p = logits.detach().softmax(-1)
    root = torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]
    G = {k: torch.zeros(m.out_features, m.out_features).double() for k, m in layers.items()}
    places = p.flatten(1, -2).shape[1] if p.dim() > 2 else 1
    for t in range(places):
        for k in range(p.shape[-1]):
            cot = torch.zeros_like(p).view(len(p), places, -1)
            cot[:, t] = root.view(len(p), places, p.shape[-1], -1)[:, t, :, k]
            wanted = [outputs[name][0] for name in layers]
            grads = torch.autograd.grad(logits, wanted, cot.view_as(p), retain_graph=True, materialize_grads=True)
            for name, g in zip(layers, grads):
                g = g.flatten(0, -2)
                G[name] += g.T @ g
    found = []
    for name, m in layers.items():
        a, bias = inputs[name][0].flatten(0, -2), m.bias is not None and m.bias.requires_grad
        a = torch.cat([a, torch.ones(len(a), 1).to(a)], 1) if bias else a
        found.append((name, a.T @ a, G[name], bias))
    return found


def commutator(E: Any, name: str, A: Tensor, G: Tensor, bias: bool) -> float:
    """|E (G x A) v - (G x A) E v| for a vector v in the block of one layer: zero if they share eigenvectors."""
    names = [f"{name}.weight"] + ([f"{name}.bias"] if bias else [])
    if any(E.plan[n] != "ekfac" for n in names):
        return 0.0
    gen = torch.Generator().manual_seed(0)
    v = torch.randn(len(G), len(A), generator=gen, dtype=torch.float64)

    def apply(v: Tensor) -> Tensor:
        parts = dict(zip(names, v.split([len(A) - bias, 1] if bias else [len(A)], 1)))
        whole = {k: torch.zeros(s, dtype=torch.float64) for k, s in E.space.shapes.items()}
        out = E @ {k: parts[k].reshape(whole[k].shape) if k in parts else t for k, t in whole.items()}
        return torch.cat([out[k].reshape(len(G), -1) for k in names], 1)

    return float((apply(G @ v @ A) - G @ apply(v) @ A).norm() / (G @ apply(v) @ A).norm())


def linearise_error(model: nn.Module, truth: Truth) -> float:
    """Of the value and of the gradient away from the expansion point."""
    lin = bs.linearize(model)
    gen = torch.Generator().manual_seed(0)
    deltas = []
    with torch.no_grad():
        named = dict(lin.named_parameters())
        for name in truth.names:
            deltas.append(torch.randn(named[name].shape, generator=gen, dtype=torch.float64))
            named[name].add_(0.1 * deltas[-1])
    delta = 0.1 * torch.cat([d.flatten() for d in deltas])
    out = call(lin, truth.x)
    u = torch.randn(out.shape, generator=gen, dtype=torch.float64)
    grads = torch.autograd.grad(out, [named[k] for k in truth.names], u, materialize_grads=True)
    back = torch.cat([g.flatten() for g in grads])
    gradient = torch.einsum("...p,...->p", truth.J, u)
    return max(relative(out.detach() - truth.outputs, truth.J @ delta), relative(back, gradient))


def influence_error(model: nn.Module, truth: Truth) -> float:
    """Of the scores g_i^T (diag F + damping)^-1 g_j."""
    classes, positions = truth.outputs.shape[-1], truth.outputs.dim() > 2
    y = torch.randint(classes, truth.outputs.shape[:-1], generator=torch.Generator().manual_seed(0))
    d, damping = truth.fisher_rows().square().sum(0) / truth.n, 0.01
    residual = truth.outputs.softmax(-1) - nn.functional.one_hot(y, classes)
    g = torch.einsum("n...cp,n...c->np", truth.J, residual)
    F = metric(model, truth.x, "diagonal", positions)
    how: dict[str, Any] = {"damping": damping, "top": 1, "output": logits, "class_dim": -1 if positions else 1}
    found = bs.influence(model, (truth.x, y), (truth.x, y), F, **how)
    return relative(found.scores, (g / (d + damping)) @ g.T)


ERRORS: dict[str, Callable[[nn.Module, Truth], float]] = {
    "kernel": kernel_error,
    "diagonal": diagonal_error,
    "ekfac": ekfac_error,
    "linearise": linearise_error,
    "influence": influence_error,
}


def logits(out: Any) -> Tensor:
    """Of what a model returned."""
    return out if isinstance(out, Tensor) else out.logits


def judge(error: Callable[[nn.Module, Truth], float], model: nn.Module, truth: Truth) -> dict[str, Any]:
    """One cell."""
    try:
        e = error(model, truth)
    except bs.BiascopeError as problem:
        return {"status": "refused", "why": str(problem)}
    except Exception as problem:
        return {"status": "error", "why": f"{type(problem).__name__}: {str(problem)[:300]}"}
    return {"status": "ok" if e < (GOOD_ROUNDED if truth.rounding.seen else GOOD) else "WRONG", "error": e}


def clocked(run: Callable[[], object]) -> float:
    """CPU seconds: the least of three calls after a first one."""
    run()
    times = []
    for _ in range(3):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def times(model: nn.Module, x: Batch) -> dict[str, float]:
    """CPU seconds over those of plain passes, float32."""
    model, x = model.float(), single(x)
    params = [p for p in model.parameters() if p.requires_grad]
    positions = call(model, x).dim() > 2

    def plain() -> None:
        torch.autograd.grad(call(model, x).sum(), params, allow_unused=True)

    def forward() -> None:
        with torch.no_grad():
            call(model, x)

    lin: list[nn.Module] = []

    def linear() -> None:
        lin[:] = lin or [bs.linearize(model)]
        with torch.no_grad():
            call(lin[0], x)

    mc: Any = {"estimator": "monte-carlo"}
    out = call(model, x).detach()
    labelled = (x, out.argmax(-1))

    def influence() -> object:
        how: dict[str, Any] = {"output": logits, "class_dim": -1 if positions else 1, "top": 1}
        return bs.influence(model, labelled, labelled, None, damping=1.0, **how)

    runs: dict[str, tuple[Callable[[], object], Callable[[], None]]] = {
        "kernel": (lambda: bs.ntk(model, x, outputs=0, output=logits), plain),
        "diagonal": (lambda: metric(model, x, "diagonal", positions, **mc), plain),
        "ekfac": (lambda: metric(model, x, "ekfac", positions, **mc), plain),
        "linearise": (linear, forward),
        "influence": (influence, plain),
    }
    found = {}
    base = {base: clocked(base) for base in (plain, forward)}
    for name, (run, against) in runs.items():
        try:
            found[name] = clocked(run) / base[against]
        except Exception:  # its cell says why
            continue
    return found


def single(x: Batch) -> Batch:
    """Floating-point inputs in float32."""
    if isinstance(x, dict):
        return {k: single(v) for k, v in x.items()}  # type: ignore[misc]
    return x.float() if x.is_floating_point() else x


def row(name: str, entry: Entry) -> dict[str, Any]:
    """Everything about one model."""
    start = time.process_time()
    model, x = build(entry)
    with contextlib.suppress(bs.BiascopeError):  # its cells say why
        bs.ntk(model, double(entry.build()[1]), outputs=0, output=logits)
    truth = Truth(model, x)
    cells = {what: judge(ERRORS[what], model, truth) for what in CALLS}
    try:
        by_rule = covered(model.float(), single(x))
    except bs.BiascopeError:
        by_rule = None
    return {
        "model": name,
        "source": entry.source,
        "kind": entry.kind,
        "parameters": truth.J.shape[-1],
        "outputs": truth.J[0].numel() // truth.J.shape[-1],
        "by_rule": by_rule,
        "rounds": truth.rounding.seen,
        "cells": cells,
        "times": times(model, x),
        "cpu_s": round(time.process_time() - start, 2),
    }


def covered(model: nn.Module, x: Batch) -> float:
    """Share of the parameters whose gradients come from layer rules."""
    rows = bs.Jacobian(model, x, output=logits).coverage().rows
    count = {r.parameter: torch.Size(r.shape).numel() for r in rows}
    slow = sum(count[r.parameter] for r in rows if r.handled_by == "autograd fallback")
    return 1 - slow / sum(count.values())


def page(report: dict[str, Any]) -> str:
    """The documentation page."""
    rows = report["models"]
    right = [sum(r["cells"][c]["status"] == "ok" for r in rows) for c in CALLS]
    lines = [
        "# Models",
        "",
        "<!-- written by `python benchmarks/models.py --page`: change that -->",
        "",
        f"{len(rows)} public architectures at small random sizes, checked in float64 against autograd, one output of",
        "one example at a time, on other inputs than those that biascope saw first (experts take other tokens there).",
        "A cell says what the second call costs in plain forward and backward passes of the same batch (linearise: in",
        "plain forward passes) where the value is right; else what happened. At these sizes costs show the work in",
        "Python, not the arithmetic. *By rule* is the share of parameters that have a layer rule; the gradients of the",
        "others are taken example by example.",
        "",
        "| model | from | parameters | by rule | " + " | ".join(TITLES[c] for c in CALLS) + " |",
        "|---" * (4 + len(CALLS)) + "|",
    ]
    notes: list[str] = []
    for kind in dict.fromkeys(r["kind"] for r in rows):
        lines.append(f"| **{kind}** " + "| " * (3 + len(CALLS)) + "|")
        for r in (r for r in rows if r["kind"] == kind):
            share = "" if r["by_rule"] is None else f"{100 * r['by_rule']:.0f} %"
            cells = [cell(r, c, notes) for c in CALLS]
            lines.append(
                f"| {r['model']} | {r['source']} | {r['parameters']:,} | {share} | " + " | ".join(cells) + " |"
            )
    summary = ", ".join(f"{TITLES[c]} {k}" for c, k in zip(CALLS, right))
    lines += ["", f"Right of {len(rows)}: {summary}.", ""]
    lines += [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    known = {k: v for k, v in report["machine"]["versions"].items() if k != "biascope" and v != "not installed"}
    versions = ", ".join(f"{k} {v}" for k, v in known.items())
    lines += ["" if notes else None, f"Made with {versions}, on one thread of {report['machine']['cpu']}."]  # type: ignore[list-item]
    lines += [
        "How each cell is checked stands at the top of `benchmarks/models.py`; `biascope bench models --again` makes",
        "the table anew.",
    ]
    return "\n".join(line for line in lines if line is not None) + "\n"


def cell(r: dict[str, Any], what: str, notes: list[str]) -> str:
    """One cell of the page; why something is refused becomes a note."""
    found = r["cells"][what]
    if found["status"] == "ok":
        cost = r["times"].get(what)
        return "right" if cost is None else f"{cost:.1f}"
    if found["status"] == "WRONG":
        return f"**wrong**, {found['error']:.0e}"
    note = " ".join(found["why"].split()).replace("|", "\\|")
    if note not in notes:
        notes.append(note)
    return f"{found['status']} ({notes.index(note) + 1})"


def main() -> int:
    """Every model not yet in the result; after each one the result is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--page", action="store_true", help="write the documentation page from the result, run nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    known = {r["model"]: r for r in json.loads(options.out.read_text())["models"]} if options.out.exists() else {}
    if options.page:
        PAGE.write_text(page(json.loads(options.out.read_text())))
        return 0
    for name, entry in ZOO.items():
        if options.only not in name or (name in known and not options.again):
            continue
        if not installed(entry):
            print(f"{name:<24} skipped: {entry.source} is not installed", file=sys.stderr)
            continue
        known[name] = row(name, entry)
        cells = "  ".join(f"{c} {v['status']} {v.get('error', '')!s:.8}" for c, v in known[name]["cells"].items())
        print(f"{name:<24} {known[name]['cpu_s']:6.1f} s  {cells}", file=sys.stderr, flush=True)
        report = {
            "machine": machine("cpu", ["transformers", "timm", "peft"]),
            "models": [known[n] for n in ZOO if n in known],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    bad = [n for n, r in known.items() if any(c["status"] in ("WRONG", "error") for c in r["cells"].values())]
    print("wrong: " + ", ".join(bad) if bad else "nothing is wrong", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
