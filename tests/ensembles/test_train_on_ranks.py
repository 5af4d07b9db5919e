"""Ensembles trained on several ranks: every network is the one that one process trains."""

from typing import Any

import pytest
import torch
from torch import nn

from biascope.ensembles import train_ensemble
from biascope.support.errors import InputError
from ranks import Ranks


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def tasks(count: int, own_sizes: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = []
    for i in range(count):
        gen = torch.Generator().manual_seed(i)
        n = 12 + 4 * (i % 2) * own_sizes
        made.append((torch.randn(n, 4, generator=gen), torch.randint(3, (n,), generator=gen)))
    return made


def train(group: Any, count: int, engine: Any, own_sizes: bool = False) -> tuple[Any, ...]:
    data = tasks(count, own_sizes)
    done = train_ensemble(
        net,
        data,
        test=data,
        epochs=2,
        batch_size=4,
        seed=7,
        dtype=torch.float64,
        engine=engine,
        together=2,
        group=group,
    )
    assert done.networks is not None
    return dict(done.networks.params), dict(done.networks.buffers), done.losses, done.train_accuracy, done.test_accuracy


@pytest.mark.parametrize(
    ("count", "engine", "own_sizes", "size"),
    [(5, "vmap", False, 2), (5, "loop", True, 4), (3, "vmap", False, 4), (4, "auto", False, 2)],
)
def test_the_same_networks(ranks: Ranks, count: int, engine: str, own_sizes: bool, size: int) -> None:
    alone = train(None, count, engine if engine != "auto" else "loop", own_sizes)
    for found in ranks.run(train, size, count, engine, own_sizes):
        assert found[0].keys() == alone[0].keys()
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14, equal_nan=True)


def no_classes_on_one(group: Any) -> torch.Tensor:
    data = [(x, y.float() if i < 2 else y.float() + 0.5) for i, (x, y) in enumerate(tasks(4))]
    loss = lambda out, y: (out.sum(1) - y).square().mean()  # noqa: E731
    return train_ensemble(net, data, epochs=1, batch_size=4, loss=loss, group=group).train_accuracy


def test_tasks_without_classes(ranks: Ranks) -> None:
    alone = no_classes_on_one(None)
    assert alone.isnan().tolist() == [False, False, True, True]
    for found in ranks.run(no_classes_on_one, 2):
        torch.testing.assert_close(found, alone, equal_nan=True)


def slips(group: Any, what: str) -> None:
    rank = torch.distributed.get_rank(group)
    data = tasks(4)
    if what == "data":
        data[3] = (data[3][0], data[3][1] + 7)
    train_ensemble(net, data, epochs=1, seed=rank if what == "seed" else 0, together=1, engine="loop", group=group)


@pytest.mark.parametrize(("what", "words"), [("seed", "rank 1 has"), ("data", "labels from")])
def test_all_ranks_refuse(ranks: Ranks, what: str, words: str) -> None:
    for outcome in ranks.outcomes(slips, 2, what):
        assert isinstance(outcome.error, InputError)
        assert words in str(outcome.error)


def test_a_number_is_no_group() -> None:
    with pytest.raises(InputError, match="group is a int"):
        train_ensemble(net, tasks(1), group=2)
