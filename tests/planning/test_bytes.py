"""Bytes that every call hands to collectives, to the byte: from the sizes of what is sent, and as `bs.plan` says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import biascope as bs
from benchmark_scripts import script
from biascope.support.processes import processes
from ranks import Ranks

N, D, P, C = 11, 20, 66, 3  # examples, entries of an input of the small network, parameters, outputs
SKETCH, FEATURES, TASKS = 5, 8, 4
DOUBLE, SINGLE = 8, 4


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, C))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return network()


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(N, 5, generator=torch.Generator().manual_seed(0)), torch.arange(N) % C


def tasks() -> list[tuple[torch.Tensor, torch.Tensor]]:
    gen = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 5, generator=gen), torch.arange(8) % C) for _ in range(TASKS)]


def trained(group: Any) -> Any:
    return bs.ensembles.train_ensemble(network, tasks(), epochs=1, batch_size=4, engine="loop", group=group)


def evolution(group: Any) -> Any:
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 1, 4, 5, generator=gen), torch.randn(7, generator=gen)
    return bs.geometry_evolution(small, x, y, n_networks=NETWORKS, seed=5, group=group)


def metric(kind: Any, then: Callable[[Any], Any] | None = None) -> Callable[[Any], Callable[[], Any]]:
    """The making of a metric, or what is done with it."""

    def prepared(group: Any) -> Callable[[], Any]:
        if then is None:
            return lambda: bs.fisher(net(), data()[0], kind, group=group)
        F = bs.fisher(net(), data()[0], kind, group=group)
        return lambda: then(F)

    return prepared


def product(make: Callable[[Any], Any], then: Callable[[Any], Any]) -> Callable[[Any], Callable[[], Any]]:
    def prepared(group: Any) -> Callable[[], Any]:
        made = make(group)
        return lambda: then(made)

    return prepared


def plain(call: Callable[[Any], Any]) -> Callable[[Any], Callable[[], Any]]:
    return lambda group: lambda: call(group)


LAYERS = [(7, 6), (C, 8)]  # outputs and inputs with the bias
FACTORS = sum(o * o + i * i for o, i in LAYERS)
COUNTS = 2 * DOUBLE  # positions of every layer
hessian = lambda g: bs.hessian(net(), data(), group=g)  # noqa: E731
jacobian = lambda g: bs.Jacobian(net(), data()[0], group=g)  # noqa: E731
ones = lambda *shape: torch.ones(*shape)  # noqa: E731

# pairs of the 11 examples that are sent by number of ranks: their own squares, and all beside them once
PAIRS = {2: 5 * 5 + 6 * 6 + 5 * 6, 4: 2 * 2 + 3 * 3 * 3 + 2 * 9 + 3 * 9}
CASES: dict[str, tuple[Callable[[Any], Callable[[], Any]], int]] = {
    "ntk": (plain(lambda g: bs.ntk(net(), data()[0], group=g)), C * C * SINGLE),  # times PAIRS
    "ntk, trace": (plain(lambda g: bs.ntk(net(), data()[0], outputs="trace", group=g)), SINGLE),  # times PAIRS
    "ntk, two sets": (plain(lambda g: bs.ntk(net(), data()[0], data()[0][:4], "sum", group=g)), N * 4 * SINGLE),
    "label_alignment": (
        plain(lambda g: bs.label_alignment(net(), *data(), sketch=SKETCH, group=g)),
        (SKETCH + 1) * P * DOUBLE,
    ),
    "sketched_ntk": (
        plain(lambda g: bs.sketched_ntk(net(), data()[0], dim=FEATURES, group=g)),
        N * C * FEATURES * SINGLE,
    ),
    # factors to their owners, eigenvectors and eigenvalues back, scalings to their owners
    "ekfac": (metric("ekfac"), COUNTS + SINGLE * (2 * FACTORS + sum(o + i for o, i in LAYERS) + P)),
    "kfac": (metric("kfac"), COUNTS + SINGLE * FACTORS),
    "diagonal": (metric("diagonal"), SINGLE * P),
    "block": (metric("block"), SINGLE * (42**2 + 24**2)),
    "ekfac @ v": (metric("ekfac", lambda F: F @ ones(P)), SINGLE * P),
    "ekfac.solve": (metric("ekfac", lambda F: F.solve(ones(P, 2), damping=0.1)), 2 * SINGLE * P),
    "ekfac.trace": (metric("ekfac", lambda F: F.trace()), SINGLE),
    "implicit": (metric("implicit"), 0),
    "implicit @ v": (metric("implicit", lambda F: F @ ones(P, 2)), 2 * SINGLE * P),
    "implicit.diagonal": (metric("implicit", lambda F: F.diagonal()), SINGLE * P),
    "hessian": (plain(hessian), 0),
    "hessian @ v": (product(hessian, lambda H: H @ ones(P, 2)), 2 * SINGLE * P),
    "spectral density": (product(hessian, lambda H: H.spectral_density(2, 3)), 6 * SINGLE * P),
    "J.T @ u": (product(jacobian, lambda J: J.T @ ones(N, C)), SINGLE * P),
    "J @ v": (product(jacobian, lambda J: J @ ones(P)), SINGLE * N * C),
    "train_ensemble": (plain(trained), TASKS * P * SINGLE),
}
NETWORKS = 6  # each a block of its own, of which the errors follow
MOMENTS = NETWORKS * (D * D + D + 1) * DOUBLE  # sums of products, means and counts of every block
ROWS = NETWORKS * D * DOUBLE  # as long as there are few
CASES |= {
    "nads": (plain(lambda g: bs.nads(small, (1, 4, 5), NETWORKS, stability_k=2, group=g)), MOMENTS + ROWS),
    "average_geometry": (plain(lambda g: bs.average_geometry(small, (1, 4, 5), NETWORKS, group=g)), MOMENTS + ROWS),
    "geometry_evolution": (plain(evolution), MOMENTS),
}


def expected(name: str, size: int) -> int:
    return CASES[name][1] * (PAIRS[size] if name in ("ntk", "ntk, trace") else 1)


def sent(group: Any, name: str) -> int:
    torch.manual_seed(0)
    team = processes(group)
    call = CASES[name][0](group)
    team.bytes.clear()  # type: ignore[attr-defined]
    call()
    return sum(team.bytes.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CASES)
def test_bytes_follow_from_the_sizes(ranks: Ranks, name: str) -> None:
    for size in (2, 4):
        assert ranks.run(sent, size, name) == [expected(name, size)] * size


def benchmarked(group: Any) -> list[tuple[str, int, int]]:
    with script("distributed") as benchmark:
        rows = benchmark.measure(group, "cpu", 1, torch.distributed.get_world_size(group), smoke=True)
    return [(row["case"], row["bytes"], row["expected"]) for row in rows]


def test_the_benchmark_of_weak_scaling_expects_what_is_sent(ranks: Ranks) -> None:
    for rows in ranks.run(benchmarked, 2):
        assert len(rows) == 4
        for case, found, expected in rows:
            assert found == expected > 0, case


@pytest.mark.parametrize("what", ["ntk", "diagonal", "kfac", "ekfac"])
def test_the_plan_says_the_same(what: Any) -> None:
    found = bs.plan(net(), what, data()[0], 2, patience=0.01)
    assert (found.sent, found.at(4)["sent"]) == (expected(what, 2), expected(what, 4))
