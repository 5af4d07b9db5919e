"""The Jacobian as an operator: products, blocks, loaders, algebra with other operators."""

import gc
import itertools
import operator
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import biascope as bs
from biascope.linalg import eigsh, hutchinson
from biascope.support.errors import InputError
from biascope.support.inputs import mark
from zoo import brute_force


@pytest.fixture
def case() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x = torch.randn(6, 5)
    return net, x, brute_force(net, x)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.as_subclass(torch.Tensor), b, rtol=1e-10, atol=1e-12)


def test_products_in_every_form(case: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> None:
    net, x, dense = case
    J = bs.Jacobian(net, x, precision="float64")
    assert J.shape == (18, dense.shape[-1])
    v = torch.randn(J.p, 4, dtype=torch.float64)
    same(J @ v[:, 0], dense @ v[:, 0])
    same(J @ v, dense @ v)
    same(J @ J.unflatten(v[:, 0]), dense @ v[:, 0])
    only = {"0.bias": torch.ones(7, dtype=torch.float64)}
    same(J @ only, dense[..., 35:42].sum(-1))
    u = torch.randn(6, 3, 2, dtype=torch.float64)
    same(J.T @ u, torch.einsum("nck,ncp->pk", u, dense))
    back = J.T @ u[..., 0]
    same(back, torch.einsum("nc,ncp->p", u[..., 0], dense))
    assert list(back.as_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    same(torch.cat([t.flatten() for t in back.as_dict().values()]), back.as_subclass(torch.Tensor))
    assert J.T.T is J


def test_one_object_two_faces(case: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> None:
    net, x, dense = case
    J = bs.Jacobian(net, x, precision="float64")
    flat = dense.reshape(18, -1)
    same((J @ J.T).to_dense(), flat @ flat.T)
    same((J.T @ J).to_dense(), flat.T @ flat)
    same(bs.ntk(net, x, precision="float64").matrix(), flat @ flat.T)
    kernel, metric = J @ J.T, J.T @ J
    top = eigsh(kernel, 3).values
    same(top, eigsh(metric, 3).values)
    trace = hutchinson(metric, samples=40, seed=0)
    assert trace.standard_error > 0
    assert abs(trace.value - float(flat.square().sum())) < 4 * trace.standard_error


def test_streams_over_loaders(case: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> None:
    net, x, dense = case
    loader = DataLoader(TensorDataset(x, torch.arange(6)), batch_size=4)
    for J in (bs.Jacobian(net, loader, precision="float64"), bs.Jacobian(net, x, precision="float64", batch_size=2)):
        v, u = torch.randn(J.p, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
        same(J @ v, dense @ v)
        same(J.T @ u, torch.einsum("nc,ncp->p", u, dense))
        same(J.to_dense(), dense)
        same(J.rows(slice(1, 5)), dense[1:5])


@pytest.mark.parametrize("batch_size", [None, 4, 1])
def test_rows_are_in_the_order_of_the_index(
    case: tuple[nn.Module, torch.Tensor, torch.Tensor], batch_size: int | None
) -> None:
    net, x, dense = case
    J = bs.Jacobian(net, x, precision="float64", batch_size=batch_size)
    for index in ([5, 0], [3, 3, 1, 4, 3], [-1, 2, -6], []):
        same(J.rows(torch.tensor(index, dtype=torch.long)), dense[index])
        same(J.rows(index), dense[index])
    mask = torch.tensor([True, False, False, True, True, False])
    same(J.rows(mask), dense[mask])
    same(J.rows(slice(4, None, 1)), dense[4:])
    same(J.rows(slice(0, 0)), dense[:0])


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([6]),
        torch.tensor([0, -7]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([True, False]),
        torch.tensor(2),
        slice(None, None, -1),
    ],
    ids=["past the end", "before the start", "no whole numbers", "short mask", "scalar", "negative step"],
)
def test_an_index_that_does_not_fit_is_named(
    case: tuple[nn.Module, torch.Tensor, torch.Tensor], index: torch.Tensor | slice, batch_size: int | None
) -> None:
    net, x, _ = case
    with pytest.raises(InputError, match=r"J\.rows"):
        bs.Jacobian(net, x, batch_size=batch_size).rows(index)


@pytest.mark.parametrize("batch_size", [-1, 0, -4, 1.5, "all"])
def test_batch_sizes_below_one_are_named(
    case: tuple[nn.Module, torch.Tensor, torch.Tensor], batch_size: object
) -> None:
    net, x, _ = case
    with pytest.raises(InputError, match=r"batch_size must be .*not " + re.escape(repr(batch_size))):
        bs.Jacobian(net, x, batch_size=batch_size)  # type: ignore[arg-type]


class Augmented:
    """Batches with other noise at every pass."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.noise = x, torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for part in self.x.split(4):
            yield part + 0.1 * torch.randn(part.shape, generator=self.noise)


class Reordered(Augmented):
    """The same examples within every batch, in another order."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for part in self.x.split(4):
            yield part[torch.randperm(len(part), generator=self.noise)]


class Shrinking(Augmented):
    """Fewer batches at every pass after the first."""

    passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        yield from self.x.split(4)[: 1 if self.passes > 1 else None]


def shuffling(x: torch.Tensor) -> dict[str, DataLoader[Any]]:
    """Every way in which a DataLoader gives another order."""
    data: Any = TensorDataset(x, torch.arange(len(x)))
    gen = torch.Generator().manual_seed(0)
    return {
        "shuffle": DataLoader(data, batch_size=4, shuffle=True, generator=gen),
        "subset": DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(len(x)), gen)),
        "weighted": DataLoader(
            data, batch_size=4, sampler=WeightedRandomSampler([1.0] * len(x), len(x), generator=gen)
        ),
        "batches": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=gen), 4, False)),
    }


@pytest.mark.parametrize("way", ["shuffle", "subset", "weighted", "batches"])
def test_loaders_that_shuffle_are_read_in_one_order(
    case: tuple[nn.Module, torch.Tensor, torch.Tensor], way: str
) -> None:
    net, x, _ = case
    with pytest.warns(UserWarning, match="DataLoader that shuffles"):
        J = bs.Jacobian(net, shuffling(x)[way])
    v = torch.ones(J.p, dtype=J.dtype)
    assert torch.equal(J @ v, J @ v)
    if way in {"shuffle", "subset"}:
        torch.testing.assert_close(J @ v, bs.Jacobian(net, x) @ v)


@pytest.mark.parametrize(
    ("data", "message"),
    [(Augmented, "batch 0 of x is not what it was"), (Reordered, "is not what it was"), (Shrinking, "gave 2 batches")],
)
def test_data_that_change_between_passes_are_refused(
    case: tuple[nn.Module, torch.Tensor, torch.Tensor], data: type[Augmented], message: str
) -> None:
    net, x, _ = case
    for product in (lambda J: J @ torch.ones(J.p), lambda J: J.T @ torch.ones(6, 3), lambda J: J.rows()):
        J = bs.Jacobian(net, data(x))
        with pytest.raises(InputError, match=message):
            product(J)


def test_large_batches_are_known_by_entries_in_every_column() -> None:
    """Images with an empty border: that the shown entries fall into the border alone must not happen."""
    x = torch.zeros(8, 4096)
    x[:, 2048:] = torch.arange(1.0, 9.0)[:, None]
    assert len({mark(x[list(order)]) for order in itertools.islice(itertools.permutations(range(8)), 50)}) == 50


def test_batches_larger_than_memory_are_never_joined() -> None:
    """A loader that makes its batches on the fly is read batch by batch."""

    class Stream:
        largest = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            for i in range(20):
                yield torch.full((8, 5), float(i) / 20)

    net = nn.Linear(5, 2)
    J = bs.Jacobian(net, Stream())
    assert J.n == 160
    assert (J.T @ torch.ones(160, 2)).shape == (12,)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(3), r"flat \[66\]"),
        (torch.zeros(66, 2, 2), "got"),
        ({"nope": torch.zeros(2)}, "'nope' is not a differentiated parameter"),
        ({"0.bias": torch.zeros(2)}, r"has shape \[2\], the parameter \[7\]"),
        ("v", "got str"),
    ],
)
def test_bad_vectors_are_named(case: tuple[nn.Module, torch.Tensor, torch.Tensor], bad: object, message: str) -> None:
    net, x, _ = case
    with pytest.raises(InputError, match=message):
        bs.Jacobian(net, x) @ bad


def test_bad_cotangents_are_named(case: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> None:
    net, x, _ = case
    with pytest.raises(InputError, match=r"u must be \[6, 3\]"):
        bs.Jacobian(net, x).T @ torch.zeros(5, 3)


class Rounded(torch.autograd.Function):
    """Rounds; training sees the identity, forward mode the true derivative."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, u: torch.Tensor) -> torch.Tensor:
        return u

    @staticmethod
    def jvp(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(v)


def test_another_output_of_the_same_module_is_tried_anew(
    case: tuple[nn.Module, torch.Tensor, torch.Tensor],
) -> None:
    net, x, dense = case
    v = torch.randn(dense.shape[-1], dtype=torch.float64)
    for output in (None, Rounded.apply, lambda out: 2 * out, Rounded.apply, None):
        scale = 2 if output not in (None, Rounded.apply) else 1
        same(bs.Jacobian(net, x, output=output, precision="float64") @ v, scale * dense @ v)


def test_outputs_without_weak_references(case: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> None:
    net, x, dense = case

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, self.net(x)

    J = bs.Jacobian(Pair(), x, output=operator.itemgetter(1), precision="float64")
    same(J @ torch.ones(J.p, dtype=torch.float64), dense.sum(-1))


def test_an_output_that_holds_the_module_does_not_keep_it() -> None:
    net = nn.Linear(3, 2)
    bs.Jacobian(net, torch.ones(2, 3), output=lambda out, net=net: out * net.out_features) @ torch.ones(8)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_last_layer_only(case: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> None:
    net, x, dense = case
    J = bs.Jacobian(net, x, params="2", precision="float64")
    same(J.to_dense(), dense[..., 42:])


@pytest.mark.gpu
def test_on_a_gpu(case: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> None:
    net, x, dense = case
    J = bs.Jacobian(net.cuda(), x.cuda(), precision="float64")
    same(J.to_dense().cpu(), dense)
    same((J @ torch.ones(J.p, dtype=torch.float64, device="cuda")).cpu(), dense.sum(-1))
