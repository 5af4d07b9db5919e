"""Products with Fisher, Gauss-Newton and Hessian matrices on several ranks, against one process."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from ranks import Failed, Ranks


def network(dtype: torch.dtype, n: int) -> tuple[nn.Module, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)
    return (
        net,
        torch.randn(n, 5, generator=gen, dtype=torch.float64).to(dtype),
        torch.randint(0, 3, (n,), generator=gen),
    )


def results(group: Any, dtype: torch.dtype, n: int) -> list[Tensor]:
    net, x, y = network(dtype, n)
    p = sum(q.numel() for q in net.parameters())
    V = torch.randn(p, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)
    loader = [(x[i : i + 2], y[i : i + 2]) for i in range(0, n, 2)]
    H = bs.hessian(net, (x, y), group=group)
    found = [H @ V, H @ V[:, 0], bs.hessian(net, loader, "dense", group=group).to_dense(), H.eigh(1).values]
    metrics = [
        bs.fisher(net, x, "implicit", group=group),
        bs.fisher(net, loader, "implicit", estimator="empirical", centered=True, group=group),
        bs.fisher(net, loader, "implicit", estimator="monte-carlo", samples=2, group=group),
        bs.ggn(net, x, "implicit", "mse", batch_size=3, group=group),
    ]
    for F in metrics:
        found += [F @ V, F @ V[:, 0], F.quadratic_form(V), F.trace()[None], F.diagonal()]
    return found


@pytest.mark.parametrize(
    ("size", "dtype", "n"),
    [(1, torch.float64, 7), (2, torch.float64, 7), (4, torch.float32, 13), (4, torch.float64, 3)],
)
def test_any_number_of_ranks_gives_what_one_process_gives(ranks: Ranks, size: int, dtype: torch.dtype, n: int) -> None:
    alone = results(None, dtype, n)
    for found in ranks.run(results, size, dtype, n):
        for i, (a, b) in enumerate(zip(alone, found, strict=True)):
            error = (a - b).norm() / a.norm()
            assert error < (1e-12 if dtype == torch.float64 else 1e-6), i


def solved(group: Any) -> Tensor:
    net, x, _ = network(torch.float64, 9)
    F = bs.fisher(net, x, "implicit", group=group)
    return F.solve(torch.ones(F.shape[0], dtype=torch.float64), damping=0.1, tol=1e-13)


def test_conjugate_gradients_take_the_same_steps_everywhere(ranks: Ranks) -> None:
    alone = solved(None)
    for found in ranks.run(solved, 2):
        assert (alone - found).norm() / alone.norm() < 1e-12


def broken(group: Any) -> None:
    net, x, y = network(torch.float32, 9)
    rank = torch.distributed.get_rank(group)

    def loss(z: Tensor, labels: Tensor) -> Tensor:
        if rank == 1:
            raise RuntimeError("broken loss")
        return z.square().sum(1)

    bs.hessian(net, (x, y), loss=loss, group=group) @ torch.ones(sum(q.numel() for q in net.parameters()))


def other_draws(group: Any) -> None:
    net, x, _ = network(torch.float32, 9)
    gen = torch.Generator().manual_seed(torch.distributed.get_rank(group))
    bs.fisher(net, x, "implicit", estimator="monte-carlo", generator=gen, group=group)


@pytest.mark.parametrize(("case", "text"), [(broken, "broken loss"), (other_draws, "generators in different states")])
def test_an_error_ends_all_ranks(ranks: Ranks, case: Any, text: str) -> None:
    begin = time.monotonic()
    for outcome in ranks.outcomes(case, 2):
        assert isinstance(outcome, Failed)
        assert text in str(outcome.error)
    assert time.monotonic() - begin < 10
