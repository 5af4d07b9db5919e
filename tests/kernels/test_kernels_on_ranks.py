"""Kernels, sketches and alignments on several ranks, against one process."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import biascope as bs
from biascope.kernels.shared import rectangles
from biascope.support.errors import InputError, UnsupportedError
from ranks import Failed, Ranks


def network(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).to(dtype)
    return net, torch.randn(11, 2, 4, 4, generator=gen, dtype=dtype), torch.arange(11) % 3


def results(group: Any, dtype: torch.dtype, n: int) -> list[Tensor]:
    net, x, y = network(dtype)
    x, y = x[:n], y[:n]
    kernels = [
        bs.ntk(net, x, group=group).tensor,
        bs.ntk(net, x, outputs="trace", strategy="gram", group=group).tensor,
        bs.ntk(net, x, outputs="diagonal", strategy="contract", group=group).tensor,
        bs.ntk(net, x, x[:3], outputs="sum", group=group).tensor,
        bs.ntk(net, x[:2], x, strategy="products", group=group).tensor,
    ]
    K = bs.ntk(net, x, by_layer=True, group=group)
    kernels += [K.tensor, *(part.tensor for part in K.by_layer().values())]
    loader = [(x[i : i + 3], y[i : i + 3]) for i in range(0, n, 3)]
    sketches = [
        bs.sketched_ntk(net, x, dim=8, group=group).features,
        bs.sketched_ntk(net, [x for x, _ in loader], dim=8, kind="gaussian", factored=False, group=group).features,
    ]
    numbers = []
    for data, labels, more in [(x, y, {}), (loader, None, {"by_layer": True}), (x, y, {"batch_size": 2, "sketch": 5})]:
        found = bs.label_alignment(net, data, labels, group=group, **more)
        for one in (found, *found.layers.values()):
            numbers += [one.value, one.standard_error, one.alpha, one.frobenius]
    return [*kernels, *sketches, torch.tensor(numbers, dtype=torch.float64)]


@pytest.mark.parametrize(
    ("size", "dtype", "n"),
    [(1, torch.float64, 11), (2, torch.float64, 11), (4, torch.float32, 11), (4, torch.float64, 3)],
)
def test_any_number_of_ranks_gives_what_one_process_gives(ranks: Ranks, size: int, dtype: torch.dtype, n: int) -> None:
    alone = results(None, dtype, n)
    for found in ranks.run(results, size, dtype, n):
        for a, b in zip(alone, found, strict=True):
            error = (a - b).norm() / a.norm()
            assert error < (1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("n", [1, 3, 12, 17])
def test_every_pair_belongs_to_one_rank(size: int, n: int) -> None:
    square, wide = torch.zeros(n, n), torch.zeros(n, 5)
    for rank in range(size):
        for rows, columns in rectangles(rank, size, n, None):
            some = torch.arange(rows.start, rows.stop) if columns is None else columns
            square[rows, some] += 1
            if columns is not None:
                square[some, rows] += 1
        for rows, columns in rectangles(rank, size, n, 5):
            assert columns is not None
            wide[rows, columns] += 1
    assert bool((square == 1).all())
    assert bool((wide == 1).all())


def refused(group: Any, what: str) -> None:
    net, x, y = network(torch.float32)
    rank = torch.distributed.get_rank(group)
    if what == "networks":
        net[0].weight.data[0, 0, 0, 0] += rank
        bs.label_alignment(net, x, y, group=group)
    elif what == "data":
        bs.sketched_ntk(net, x + rank, dim=4, group=group)
    elif what == "x2":
        bs.ntk(net, x, x + rank, group=group)
    elif what == "sampler":
        data = TensorDataset(x, y)
        loader = DataLoader(data, sampler=DistributedSampler(data, 2, rank))
        bs.label_alignment(net, loader, group=group)
    elif what == "labels":
        bs.label_alignment(net, x, torch.roll(y, rank), group=group)
    elif what == "bad":  # found by one rank, in the part of the data that is its own

        class Sensitive(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = net

            def forward(self, x: Tensor) -> Tensor:
                if rank == 1 and bool((x == x_bad).any()):
                    raise RuntimeError("broken sensor")
                return self.inner(x)

        x_bad = x[9, 0, 0, 0]
        bs.label_alignment(Sensitive(), x, y, batch_size=1, group=group)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("networks", "different networks"),
        ("data", "same x, all of it"),
        ("x2", "same x and x2"),
        ("sampler", "DistributedSampler"),
        ("labels", "same y"),
        ("bad", "broken sensor"),
    ],
)
def test_what_would_be_wrong_ends_all_ranks(ranks: Ranks, what: str, text: str) -> None:
    begin = time.monotonic()
    for outcome in ranks.outcomes(refused, 2, what):
        assert isinstance(outcome, Failed)
        assert text in str(outcome.error)
    assert time.monotonic() - begin < 10


def test_a_store_needs_no_group(tmp_path: Any) -> None:
    net, x, _ = network(torch.float32)
    with pytest.raises(UnsupportedError, match="without group"):
        bs.ntk(net, x, store=tmp_path, group="any")
    with pytest.raises(InputError, match="group is a str"):
        bs.ntk(net, x, group="any")
