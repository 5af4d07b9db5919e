"""What is set around a call: an autocast ends at its door, and so does a default device for new tensors."""

import ast
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import biascope as bs

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(6, 1, 6, 6, generator=GENERATOR)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
PAIRS = torch.randn(200, 2, generator=GENERATOR)
NET = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))
LINE = nn.Sequential(nn.Linear(1, 5), nn.ReLU(), nn.Linear(5, 1))
with torch.no_grad():
    for p in (*NET.parameters(), *LINE.parameters()):
        p.copy_(0.3 * torch.randn(p.shape, generator=GENERATOR))
V = torch.randn(sum(p.numel() for p in NET.parameters()), generator=GENERATOR)


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 1))


def classes() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))


def fisher(kind: str, estimator: str) -> Callable[[], object]:
    return lambda: bs.fisher(NET, X, kind, estimator=estimator)


def probed() -> list[float]:
    probe = bs.Probe(NET, X, Y)  # measures at once
    return [value for value in probe.records[0].values.values() if isinstance(value, float)]


CALLS: dict[str, Callable[[], Any]] = {
    **{
        f"fisher {kind} {estimator}": fisher(kind, estimator)
        for kind in ("diagonal", "kfac", "ekfac", "dense", "lowrank")
        for estimator in ("exact", "monte-carlo")
    },
    "implicit": lambda: bs.fisher(NET, X, "implicit") @ V,
    "ggn": lambda: bs.ggn(NET, (X, Y), "kfac"),
    "hessian": lambda: bs.hessian(NET, (X, Y)) @ V,
    "ntk": lambda: bs.ntk(NET, X).tensor,
    "trace": lambda: bs.ntk(NET, X, outputs="trace").tensor,
    "sketch": lambda: bs.sketched_ntk(NET, X, dim=16).features,
    "label alignment": lambda: [bs.label_alignment(NET, X, Y, sketch=8).value],
    "Jacobian": lambda: bs.Jacobian(NET, X) @ V,
    "nads": lambda: bs.nads(small, (1, 6, 6), 20).eigenvalues,
    "nads by autograd": lambda: bs.nads(small, (1, 6, 6), 20, method="autograd").eigenvalues,
    "average geometry": lambda: bs.average_geometry(small, (1, 6, 6), 20).eigh(3).values,
    "geometry evolution": lambda: bs.geometry_evolution(small, X, Y.float(), 20).eigh(3).values,
    "ensemble": lambda: bs.ensembles.train_ensemble(classes, [(X, Y)] * 2, epochs=2, batch_size=3).losses,
    "regions": lambda: bs.spectral.linear_regions_1d(LINE, -4.0, 4.0).slopes,
    "mutual information": lambda: [bs.mutual_information(PAIRS[:, :1], PAIRS.sum(1, keepdim=True), steps=20).nats],
    "probe": probed,
}
AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
}


def adam_runs() -> bool:
    """Torch 2.11's own Adam keeps its step count on the default device and asks a meta tensor for its value."""
    weight = nn.Parameter(torch.ones(1, device="cpu"))
    weight.grad = torch.ones_like(weight)
    try:
        with torch.device("meta"):
            torch.optim.Adam([weight]).step()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("around", AROUND)
def test_the_same_is_measured(name: str, around: str) -> None:
    if (name, around) == ("mutual information", "device") and not adam_runs():
        pytest.skip("this torch's Adam cannot step under a meta default device")
    expected = CALLS[name]()
    with AROUND[around]():
        found = CALLS[name]()
        assert torch.is_autocast_enabled("cpu") == (around == "autocast")  # still there for the caller
        assert torch.empty(0).device.type == ("meta" if around == "device" else "cpu")
    if isinstance(expected, bs.curvature.Metric):
        expected, found = expected @ V, found @ V
    expected, found = (torch.tensor(v) if isinstance(v, list) else v for v in (expected, found))
    assert expected.numel() > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Mixed(nn.Module):
    """A network with an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x).float()


def test_an_autocast_of_the_network_is_the_network() -> None:
    model, x = Mixed(), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    found = bs.Jacobian(model, x) @ torch.ones(8)
    exact = torch.cat([x, torch.ones(4, 1)], 1).sum(1, keepdim=True).expand(4, 2)
    error = float((found.view(4, 2) - exact).abs().max() / exact.abs().max())
    assert 1e-5 < error < 1e-2  # rounded to eight bits


FACTORIES = {"rand", "randn", "randint", "randperm", "zeros", "ones", "eye", "arange", "tensor", "linspace", "empty"}
FACTORIES |= {"full", "logspace", "tril_indices", "triu_indices"}
OF_THE_USER = {
    "nets",
    "data",
    "studies",
    "reports",
    "cli",
}  # networks go where the user wants them


def test_every_new_tensor_says_where_it_is() -> None:
    """`torch.set_default_device` moves those that do not, away from the generators and tensors they meet."""
    source = Path(bs.__file__).parent
    found = []
    for file in source.rglob("*.py"):
        where = file.relative_to(source)
        if where.parts[0] in OF_THE_USER or where.as_posix() in {"fields/networks.py", "atlas/networks.py"}:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            placed = any(word.arg in ("device", None) for word in node.keywords)
            if of_torch and node.func.attr in FACTORIES and not placed:
                found.append(f"{where}:{node.lineno} torch.{node.func.attr}")
    assert not found
