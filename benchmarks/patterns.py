"""Twenty-six ways to put a layer into a network: is the kernel that each tool gives right, refused, or silently wrong?

    python benchmarks/patterns.py [--out FILE]

Truth is brute-force autograd in float64 on the whole batch. A cell says

- `ok`: relative error below 1e-6 in float64 (1e-4 in float32 for a tool that fails in float64);
- `refuses`: an exception; for `BatchNorm2d train` that is right, because there no example has a gradient of its own;
- `omits`: some parameters are left out without a word, the kernel of the others is right;
- `~e`: approximate by design, relative error e (ASDL's Hadamard kernel of layers with several positions);
- `WRONG e`: none of these, relative error e.

biascope is also asked for products J v and J^T u and for the diagonal of J^T J from its rows.
"""

import argparse
import copy
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rivals
import torch
from harness import machine
from torch import Tensor, nn

N, C, GOOD, GOOD_FLOAT32 = 5, 3, 1e-6, 1e-4


class Fn(nn.Module):
    """A module from a function of (self, x) and some parts."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def dense(*layers: nn.Module, d: int = 6) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*layers), torch.randn(N, d)


def with_head(first: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    """first, tanh, flatten, Linear."""
    x = torch.randn(N, *shape)
    with torch.no_grad():
        d = copy.deepcopy(first)(x)[0].numel()
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(d, C)), x


def batch_norm(train: bool) -> tuple[nn.Module, Tensor]:
    norm = nn.BatchNorm2d(4)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    nn.init.normal_(norm.running_mean)
    nn.init.normal_(norm.weight)
    model, x = with_head(nn.Sequential(nn.Conv2d(2, 4, 3), norm), 2, 6, 6)
    return model.train(train), x


def attention() -> tuple[nn.Module, Tensor]:
    parts = {"a": nn.MultiheadAttention(6, 2, batch_first=True), "b": nn.Linear(6, C)}
    return Fn(lambda m, x: m.b(m.a(x, x, x, need_weights=False)[0].tanh().mean(1)), **parts), torch.randn(N, 4, 6)


def tied() -> tuple[nn.Module, Tensor]:
    model, x = dense(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, C))
    model[2].weight = model[0].weight
    return model, x


def wired(forward: Callable[[Any, Tensor], Tensor], **more: Any) -> tuple[nn.Module, Tensor]:
    """Two linear layers a and b, two tanh modules s and t, joined by a function."""
    return Fn(forward, a=nn.Linear(6, 6), s=nn.Tanh(), t=nn.Tanh(), b=nn.Linear(6, C), **more), torch.randn(N, 6)


def in_place() -> tuple[nn.Module, Tensor]:
    relu = nn.ReLU(inplace=True)
    return dense(nn.Linear(6, 8), relu, nn.Linear(8, 5), nn.ReLU(inplace=True), nn.Linear(5, C))


PATTERNS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "Linear": lambda: dense(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, C)),
    "Linear no bias": lambda: dense(nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, C, bias=False)),
    "Linear on [N,T,d]": lambda: with_head(nn.Linear(6, 5), 4, 6),
    "Conv1d": lambda: with_head(nn.Conv1d(2, 4, 3, padding=1), 2, 8),
    "Conv2d": lambda: with_head(nn.Conv2d(2, 4, 3), 2, 6, 6),
    "Conv2d stride 2": lambda: with_head(nn.Conv2d(2, 4, 3, stride=2, padding=1), 2, 6, 6),
    "Conv2d groups=2": lambda: with_head(nn.Conv2d(4, 6, 3, groups=2), 4, 6, 6),
    "Conv2d dilation 2": lambda: with_head(nn.Conv2d(2, 4, 3, dilation=2), 2, 6, 6),
    "Conv2d padding='same'": lambda: with_head(nn.Conv2d(2, 4, 3, padding="same"), 2, 6, 6),
    "Conv2d circular pad": lambda: with_head(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), 2, 6, 6),
    "Conv2d, wide on small map": lambda: with_head(nn.Conv2d(16, 24, 2), 16, 3, 3),
    "Conv3d": lambda: with_head(nn.Conv3d(2, 3, 2), 2, 3, 4, 4),
    "ConvTranspose2d": lambda: with_head(nn.ConvTranspose2d(2, 3, 3), 2, 4, 4),
    "ConvTranspose2d stride 2": lambda: with_head(nn.ConvTranspose2d(2, 3, 3, stride=2), 2, 4, 4),
    "BatchNorm2d eval": lambda: batch_norm(train=False),
    "BatchNorm2d train": lambda: batch_norm(train=True),
    "LayerNorm": lambda: dense(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, C)),
    "LayerNorm on [N,T,d]": lambda: with_head(nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), 4, 6),
    "GroupNorm": lambda: with_head(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), 2, 6, 6),
    "Embedding": lambda: (
        nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Tanh(), nn.Linear(20, C)),
        torch.randint(7, (N, 5)),
    ),
    "MultiheadAttention": attention,
    "weight tying": tied,
    "layer called twice": lambda: wired(lambda m, x: m.b(m.t(m.a(m.s(m.a(x)))))),
    "residual": lambda: wired(lambda m, x: m.b(x + m.t(m.a(x)))),
    "in-place ReLU": in_place,
    "bare nn.Parameter": lambda: wired(lambda m, x: m.b(m.t(m.scale * m.a(x))), scale=nn.Parameter(torch.randn(6))),
}  # fmt: skip


def make(pattern: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = PATTERNS[pattern]()
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


def jacobian(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """{parameter: [n, c, size]} of the batch function, by autograd, one output at a time."""
    params = dict(model.named_parameters())
    out = model(x)
    rows = [
        torch.autograd.grad(o, list(params.values()), retain_graph=True, materialize_grads=True) for o in out.flatten()
    ]
    return {name: torch.stack([row[i].flatten() for row in rows]).view(*out.shape, -1) for i, name in enumerate(params)}


# ---- what is asked ----


def biascope_kernel(model: nn.Module, x: Tensor) -> Tensor:
    import biascope as bs

    return bs.ntk(model, x, precision="float64").tensor


def biascope_trace(model: nn.Module, x: Tensor) -> Tensor:
    import biascope as bs

    return bs.ntk(model, x, outputs="trace", precision="float64").tensor


def _operator(model: nn.Module, x: Tensor) -> Any:
    import biascope as bs

    return bs.Jacobian(model, x, precision="float64")


def _flat(J: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(J.values()), -1)


def _probe(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def full(J: dict[str, Tensor]) -> Tensor:
    return torch.einsum("ncp,mdp->ncmd", _flat(J), _flat(J))


def trace(J: dict[str, Tensor]) -> Tensor:
    return torch.einsum("ncp,mcp->nm", _flat(J), _flat(J))


Ask = tuple[Callable[[nn.Module, Tensor], Tensor], Callable[[dict[str, Tensor]], Tensor], str]
COLUMNS: dict[str, Ask] = {  # what to run, what is true given J, the package it needs
    "biascope kernel": (biascope_kernel, full, "biascope"),
    "biascope trace": (biascope_trace, trace, "biascope"),
    "biascope diagonal": (
        lambda m, x: _operator(m, x).rows().square().sum((0, 1)),
        lambda J: _flat(J).square().sum((0, 1)),
        "biascope",
    ),
    "biascope J v": (
        lambda m, x: (lambda J: J @ _probe(J.p))(_operator(m, x)),
        lambda J: _flat(J) @ _probe(_flat(J).shape[-1]),
        "biascope",
    ),
    "biascope J^T u": (
        lambda m, x: (_operator(m, x).T @ _probe(N, C)).as_subclass(Tensor),
        lambda J: torch.einsum("ncp,nc->p", _flat(J), _probe(N, C)),
        "biascope",
    ),
    "torch.func": (rivals.torch_func, full, "torch"),
    "nngeometry": (rivals.nngeometry, full, "nngeometry"),
    "BackPACK BatchGrad": (rivals.backpack, full, "backpack"),
    "BackPACK SqrtGGN": (rivals.backpack_sqrt, full, "backpack"),
    "curvlinops": (rivals.curvlinops, full, "curvlinops"),
    "ASDL trace": (rivals.asdl_trace, trace, "asdl"),
    "ASDL implicit": (rivals.asdl_implicit, full, "asdl"),
}


def judge(column: str, pattern: str) -> tuple[str, str]:
    """(what the cell says, detail)."""
    ask, true, _ = COLUMNS[column]
    model, x = make(pattern, torch.float64)
    J = jacobian(copy.deepcopy(model), x)
    truth, good = true(J), GOOD
    try:
        found = ask(model, x).detach()
    except Exception as problem:
        said = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:160]
        try:  # some tools know only float32
            found, good = ask(*make(pattern, torch.float32)).detach().double(), GOOD_FLOAT32
        except Exception:
            return "refuses", said
    if found.shape != truth.shape:
        return "WRONG shape", f"{tuple(found.shape)} for {tuple(truth.shape)}"
    error = float((found - truth).norm() / truth.norm())
    if error < good:
        return "ok", f"{error:.1e}"
    if true in (full, trace):
        for count in range(1, len(J)):
            for left_out in itertools.combinations(J, count):
                rest = true({name: part for name, part in J.items() if name not in left_out})
                if float((found - rest).norm() / truth.norm()) < good:
                    return "omits", ", ".join(left_out)
    positions = any(isinstance(m, nn.Conv2d) for m in model.modules()) and not pattern.endswith("train")
    by_design = column == "ASDL trace" and positions
    return (f"~{error:.2g}" if by_design else f"WRONG {error:.2g}"), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=None, help="write the cells as JSON here")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    columns = [c for c, (_, _, package) in COLUMNS.items() if _installed(package)]
    cells = {pattern: {column: judge(column, pattern) for column in columns} for pattern in PATTERNS}
    print("| pattern | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
    for pattern, row in cells.items():
        print(f"| {pattern} | " + " | ".join(row[column][0] for column in columns) + " |")
    silently = {c: sum(row[c][0].startswith(("WRONG", "omits")) for row in cells.values()) for c in columns}
    print(f"\nsilently wrong or incomplete, of {len(PATTERNS)}: " + ", ".join(f"{c} {k}" for c, k in silently.items()))
    if out is not None:
        packages = [package for _, _, package in COLUMNS.values()]
        out.write_text(json.dumps({"machine": machine("cpu", packages), "cells": cells}, indent=1) + "\n")


def _installed(package: str) -> bool:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        print(f"{package} is not installed: left out", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
