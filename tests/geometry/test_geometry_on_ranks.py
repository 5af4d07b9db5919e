"""Averages over networks on several ranks: the same networks and the same result as of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.support.errors import InputError
from ranks import Ranks

SHAPE = (1, 4, 5)


def small(width: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GELU(), nn.Flatten(), nn.Linear(18, width), nn.ReLU(), nn.Linear(width, 1)
    )


def training() -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)
    return {"x_train": torch.randn(7, *SHAPE, generator=gen), "y_train": torch.randn(7, generator=gen)}


def nads(**options: Any) -> Callable[[Any], tuple[Any, ...]]:
    def case(group: Any) -> tuple[Any, ...]:
        asked = {"n_networks": 70, "dtype": torch.float64, "seed": 3, **options}
        found = bs.nads(small, SHAPE, group=group, **asked)
        outer = found.directions.flatten(1).T * found.eigenvalues
        about = (found.n_networks, found.stability_k, [n for n, _ in found.stability])
        return (outer @ found.directions.flatten(1), found.eigenvalues, found.standard_errors,
                [s for _, s in found.stability], *about)  # fmt: skip

    return case


CASES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "finite differences": nads(),
    "gradients": nads(method="autograd", centered=True),
    "marginal head": nads(head="marginal"),
    "many networks": nads(n_networks=700),
    "auto": nads(n_networks="auto", tolerance=0.5, stability_k=3),
    "fewer networks than ranks": nads(n_networks=3, stability_k=1),
    "mixed derivatives": nads(method="mixed-derivative", n_networks=9, top=4),
    "mixed derivatives averaged": nads(method="mixed-derivative", n_networks=9, top=2, average="operator"),
    "mixed differences": nads(method="mixed-derivative", n_networks=5, derivative="finite-difference", step=100.0),
    "tangent kernel": nads(method="ntk", top=4, n_points=16),
}


def run_case(group: Any, name: str) -> tuple[Any, ...]:
    return CASES[name](group)


@pytest.mark.parametrize("name", CASES)
def test_directions(ranks: Ranks, name: str) -> None:
    alone = CASES[name](None)
    for size in (2, 4) if name in ("finite differences", "fewer networks than ranks") else (4,):
        for found in ranks.run(run_case, size, name):
            for mine, other in zip(found, alone):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12, equal_nan=True)


def large(group: Any, keep: bool) -> tuple[Any, ...]:
    net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4900, 3), nn.Tanh(), nn.Linear(3, 1))  # noqa: E731
    memory = "64MB" if keep else "3MB"
    found = bs.nads(
        net, (4900,), 12, "autograd", top=3, stability_k=2, max_memory=memory, dtype=torch.float64, group=group
    )
    G = bs.average_geometry(net, (4900,), 12, dtype=torch.float64, group=group)
    pairs = G.eigh(2)
    w = torch.linspace(0, 1, 4900, dtype=torch.float64)
    spans = [V.T @ (V @ w) for V in (found.directions[:2].flatten(1), pairs.vectors.T)]
    product = G @ w
    return found.eigenvalues, found.standard_errors, found.stability_k, product, pairs.values, *spans


@pytest.mark.parametrize("keep", [True, False])
def test_without_a_matrix(ranks: Ranks, keep: bool) -> None:
    alone = large(None, keep)
    for found in ranks.run(large, 2, keep):
        for mine, other in zip(found, alone):
            torch.testing.assert_close(mine, other, rtol=1e-6 if not keep else 1e-10, atol=1e-12)


def geometry(group: Any, n: int, dtype: torch.dtype) -> tuple[Any, ...]:
    G = bs.average_geometry(small, SHAPE, n, 2, 5, dtype=dtype, group=group)
    D = bs.geometry_evolution(small, **training(), n_networks=n, seed=5, dtype=dtype, group=group)
    return G.matrix, G.relative_error, D.matrix, D.relative_error, D.kind


@pytest.mark.parametrize(("n", "size"), [(21, 2), (21, 4), (2, 4)])
def test_geometry_and_evolution(ranks: Ranks, n: int, size: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        alone = geometry(None, n, dtype)
        for found in ranks.run(geometry, size, n, dtype):
            for mine, other in zip(found, alone):
                if isinstance(mine, str):
                    assert mine == other
                else:
                    torch.testing.assert_close(
                        mine, other, rtol=tolerance, atol=tolerance * float(alone[0].abs().max())
                    )


def dead(group: Any, what: str) -> None:
    net = lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(0), nn.Unflatten(0, (-1, 4)), Zero())  # noqa: E731
    if what == "seeds":
        bs.average_geometry(lambda: nn.Linear(3, 1), (3,), 10, seed=int(torch.distributed.get_rank(group)), group=group)
    elif what == "nads":
        bs.nads(net, (3,), 5, "autograd", group=group)
    else:
        bs.average_geometry(net, (3,), 5, group=group)


class Zero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0 * x[:, :1]


@pytest.mark.parametrize(
    ("what", "words"), [("seeds", "rank 1 has"), ("nads", "gradients are zero"), ("G", "gradients are")]
)
def test_all_ranks_refuse(ranks: Ranks, what: str, words: str) -> None:
    for outcome in ranks.outcomes(dead, 2, what):
        assert isinstance(outcome.error, InputError)
        assert words in str(outcome.error)
