"""Kronecker factors within a budget: what every rung of the ladder holds, against matrices written out in float64."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.curvature import build, ladder
from biascope.curvature.pieces import ParameterSpace
from biascope.curvature.plan import Side, Unit
from biascope.curvature.reduced import Half
from biascope.curvature.uses import loss_gradients
from biascope.support.errors import InputError
from curvature.curvature_zoo import relative

FULL = Side()
N, T, IN, HIDDEN, OUT = 6, 3, 8, 12, 16


class Net(nn.Module):
    """Tokens through two linear layers, of which the second has no bias: [n, T, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(9, IN), nn.Linear(IN, HIDDEN)
        self.head = nn.Linear(HIDDEN, OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.words(x)))
        return self.head(h + h.mean(1, keepdim=True))


def network() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 9, (N, T), generator=g), torch.randint(0, OUT, (N, T), generator=g)


def metric(
    monkeypatch: pytest.MonkeyPatch,
    output: Side,
    inputs: Side = FULL,
    representation: str = "ekfac",
    **options: object,
) -> bs.curvature.Metric:
    """The empirical Fisher with these sides at the two linear layers."""

    def within(units: list[Unit], *_: object) -> list[Unit]:
        made = []
        for u in units:
            bias = len(u.names) == 2
            side = Side("diagonal") if inputs.kind == "blocks" and bias else inputs
            linear = u.kind in ("kfac", "ekfac") and not u.blocks[0].is_embedding
            made.append(replace(u, output=output, input=side, form="reduced") if linear else u)
        return made

    monkeypatch.setattr(build, "within", within)
    options = {"estimator": "empirical", "class_dim": -1, "max_memory": "1GB"} | options
    return bs.fisher(network(), data(), representation, **options)


SIDES = [Side("low rank", N * T), Side("blocks", 4), Side("diagonal"), Side("shared")]
INPUTS = [FULL, Side("blocks", 2), Side("diagonal")]


def basis(side: Side, S: Tensor) -> Tensor:
    """Eigenvectors [d, r] of what a side keeps of the factor S."""
    if side.kind in ("diagonal", "shared"):
        return torch.eye(len(S), dtype=S.dtype)
    if side.kind == "blocks":
        return torch.block_diag(*[torch.linalg.eigh(b)[1] for b in blocks_of(S, side.count)])
    values, U = torch.linalg.eigh(S)
    return U[:, values > 1e-12 * values.max()] if side.kind == "low rank" else U


def blocks_of(S: Tensor, h: int) -> list[Tensor]:
    d = len(S) // h
    return [S[i * d : (i + 1) * d, i * d : (i + 1) * d] for i in range(h)]


def factors(net: Net, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and the gradients [N, o, i] of a linear layer, by autograd; i with the bias."""
    x, y = data()
    layer = getattr(net, name)
    A: list[Tensor] = []
    B: list[Tensor] = []
    D: list[Tensor] = []
    for xi, yi in zip(x, y):
        seen: dict[str, Tensor] = {}

        def hook(_: nn.Module, args: tuple[Tensor], out: Tensor, seen: dict[str, Tensor] = seen) -> None:
            seen["a"], seen["z"] = args[0][0].detach(), out

        handle = layer.register_forward_hook(hook)
        loss = nn.functional.cross_entropy(net(xi[None])[0], yi, reduction="sum")
        handle.remove()
        (g,) = torch.autograd.grad(loss, seen["z"])
        a = seen["a"] if layer.bias is None else torch.cat([seen["a"], torch.ones(T, 1, dtype=torch.float64)], 1)
        A.append(a.T @ a)
        B.append(g[0].T @ g[0])
        D.append(g[0].T @ a)
    return sum(A) / N, sum(B) / (N * T), torch.stack(D)  # type: ignore[operator, return-value]


def truth(net: Net, name: str, output: Side, inputs: Side) -> Tensor:
    """The metric [o i, o i] of a layer in homogeneous coordinates, by its definition."""
    A, B, D = factors(net, name)
    U_B, U_A = basis(output, B), basis(inputs, A)
    s = (U_B.T @ D @ U_A).square().mean(0)
    if output.kind == "shared":
        s = s.mean(0, keepdim=True).expand_as(s)
    U = torch.kron(U_B.contiguous(), U_A.contiguous())
    return U @ torch.diag(s.flatten()) @ U.T


def dense(F: bs.curvature.Metric, name: str) -> Tensor:
    piece = next(p for p in F.pieces if p.names[0] == f"{name}.weight")
    M = piece.to_dense()
    if len(piece.names) == 1:
        return M
    p = HIDDEN * IN  # weights, then biases: to rows of [W | b]
    order = torch.cat([torch.cat([torch.arange(IN) + o * IN, torch.tensor([p + o])]) for o in range(HIDDEN)])
    return M[order][:, order]


@pytest.mark.parametrize("inputs", INPUTS, ids=str)
@pytest.mark.parametrize("output", SIDES, ids=str)
def test_every_rung_by_its_definition(monkeypatch: pytest.MonkeyPatch, output: Side, inputs: Side) -> None:
    net = network()
    F = metric(monkeypatch, output, inputs)
    for name in ("inner", "head"):
        side = Side("diagonal") if inputs.kind == "blocks" and name == "inner" else inputs
        assert relative(dense(F, name), truth(net, name, output, side)) < 1e-9, name


@pytest.mark.parametrize("output", SIDES, ids=str)
def test_operations_follow_from_the_matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: Side) -> None:
    F = metric(monkeypatch, output, Side("diagonal"))
    D = F.to_dense()
    v = torch.randn(len(D), 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    damped = D + 0.1 * torch.eye(len(D), dtype=torch.float64)
    assert relative(F @ v, D @ v) < 1e-10
    assert relative(F.diagonal(), D.diagonal()) < 1e-10
    assert relative(F.trace(), D.trace()) < 1e-10
    assert relative(F.frobenius_norm(), D.norm()) < 1e-10
    assert relative(F.solve(v, 0.1), torch.linalg.solve(damped, v)) < 1e-9
    assert relative(F.inverse(0.1) @ v, torch.linalg.solve(damped, v)) < 1e-9
    assert relative(F.power(0.5) @ (F.power(0.5) @ v), D @ v) < 1e-8
    draws = F.sample(20000, damping=0.1).double()
    assert relative(draws.T @ draws / 20000, torch.linalg.inv(damped)) < 0.2  # sqrt(p / samples) = 0.14
    back = bs.load_curvature(F.save(tmp_path / "F.safetensors"))
    assert relative(back.to_dense(), D) == 0
    assert F.solve(v, 0.1, mode="factored").isfinite().all()


def test_low_rank_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    full = bs.fisher(network(), data(), estimator="empirical", class_dim=-1)
    low = metric(monkeypatch, Side("low rank", N * T))
    assert relative(low.to_dense(), full.to_dense()) < 1e-9
    v = torch.randn(full.shape[0], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for mode in ("exact", "factored"):
        assert relative(low.solve(v, 0.01, mode), full.solve(v, 0.01, mode)) < 1e-8  # type: ignore[arg-type]


def test_kfac_has_products_of_the_factors_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    F = metric(monkeypatch, Side("diagonal"), representation="kfac")
    A, B, _ = factors(network(), "head")
    assert relative(dense(F, "head"), torch.kron(B.diagonal().diag(), A)) < 1e-10


@pytest.mark.parametrize("side", SIDES[1:], ids=str)
def test_what_a_side_leaves_out_is_measured(side: Side) -> None:
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(16, 16, generator=g, dtype=torch.float64)
    X = torch.randn(200, 1, 16, 5, generator=g, dtype=torch.float64)
    X = torch.einsum("ij,bgjt->bgit", mix + 3 * torch.eye(16, dtype=torch.float64), X)
    half = Half(side, 1, 16, ParameterSpace({}, torch.float64, torch.device("cpu")))
    half.add(X)
    S = torch.einsum("bgit,bgjt->ij", X, X)
    kept = {
        "blocks": lambda: torch.block_diag(*blocks_of(S, side.count or 1)),
        "diagonal": lambda: S.diagonal().diag(),
        "shared": lambda: S.diagonal().mean() * torch.eye(16, dtype=torch.float64),
    }[side.kind]()
    exact = float((S - kept).norm() / S.norm())
    assert half.error() == pytest.approx(exact, abs=0.06)  # 256 of 1000 rows


def test_the_largest_side_goes_down_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "LEAST", 2)
    monkeypatch.setattr(ladder.contract, "WORKSPACE", {"cpu": 0})
    net = nn.Sequential(nn.Linear(10, 64, bias=False), nn.Tanh(), nn.Linear(64, 10))
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    full = bs.fisher(net, x, max_memory="10MB")
    assert "factor" not in str(full.plan)
    some = bs.fisher(net, x, max_memory="90KB")
    assert "output factor in" in str(some.plan)
    assert "leaves out" in str(some.plan)
    with pytest.raises(InputError, match=r"the smallest Kronecker factors|the passes over the data need"):
        bs.fisher(net, x, max_memory="2KB")


def test_a_vocabulary_has_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from biascope.curvature.plan import make_units
    from biascope.network.functional import functional
    from biascope.network.stream import Stream, anatomy

    net = nn.Linear(8, 128, bias=False)
    f = functional(net)
    found = anatomy(f, Stream(f, torch.randn(4, 8)).first[0])
    (unit,) = make_units(found, ParameterSpace.of(f), "ekfac", "expand", False, lambda: 1)
    assert [s.kind for s in ladder.rungs(unit, "output", 128, lambda: 8)] == ["low rank", "diagonal", "shared"]
    assert [s.kind for s in ladder.rungs(unit, "output", 0, lambda: 99)] == ["blocks", "diagonal", "shared"]
    monkeypatch.setattr(ladder, "WORDS", 7)  # so many rows would take longer than everything else
    assert [s.kind for s in ladder.rungs(unit, "output", 128, lambda: 8)] == ["diagonal", "shared"]


def test_a_large_vocabulary_goes_down_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "WORDS", 100)
    monkeypatch.setattr(build, "MANY", 0)
    net = nn.Linear(8, 128, bias=False)
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    few = bs.fisher(net, x[:20], estimator="monte-carlo")
    assert "output factor low rank" in str(few.plan)
    assert "output factor diagonal" in str(bs.fisher(net, x, estimator="monte-carlo").plan)
    assert "factor" not in str(bs.fisher(net, x, estimator="monte-carlo", likelihood="gaussian").plan)


SCRIPT = """
import ctypes, gc, json, sys, torch
import biascope as bs
from torch import nn
d, n, budget = map(int, sys.argv[1:])
V, T = 12000, 64
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(V, d), nn.Linear(d, d), nn.Linear(d, V, bias=False)
    def forward(self, x):
        h = torch.tanh(self.inner(self.words(x)))
        return self.head(h + h.mean(1, keepdim=True))
def kilobytes(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))
torch.manual_seed(0)
net, ids = LM(), torch.randint(0, V, (n, T))
# what torch loads and the network is looked at with, before the budget counts
bs.fisher(net, ids[:2], "diagonal", estimator="monte-carlo", class_dim=-1)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = kilobytes("VmRSS")
F = bs.fisher(net, ids, "ekfac", estimator="monte-carlo", class_dim=-1, max_memory=budget)
print(json.dumps([1024 * (kilobytes("VmHWM") - before) / budget, F.plan.rows[-1][3]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is asked of Linux")
@pytest.mark.parametrize(("width", "examples", "megabytes"), [(48, 24, 300), (192, 16, 110), (192, 16, 90)])
def test_memory_of_a_vocabulary_of_12000_words(width: int, examples: int, megabytes: int) -> None:
    """A full factor takes 550 MiB, and its eigendecomposition five times that; the head of width 192 takes 9 MiB."""
    sizes = map(str, (width, examples, megabytes * 2**20))
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, *sizes], capture_output=True, text=True, check=True, timeout=240
    )
    share, why = json.loads(found.stdout.splitlines()[-1])
    assert "output factor diagonal (full: 549.3 MiB); output factor leaves out" in why
    assert share < 1.15


def test_gradients_of_the_oracle_are_those_of_the_library() -> None:
    net = network()
    rows = loss_gradients(net, data(), class_dim=-1)[:, -OUT * HIDDEN :]
    assert relative(factors(net, "head")[2].flatten(1), rows) < 1e-12
