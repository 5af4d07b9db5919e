"""The Jacobian as an operator: products, blocks, loaders, algebra with other operators."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.errors import InputError
from biascope.linalg import eigsh, hutchinson
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
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.arange(6)), batch_size=4)
    for J in (bs.Jacobian(net, loader, precision="float64"), bs.Jacobian(net, x, precision="float64", batch_size=2)):
        v, u = torch.randn(J.p, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
        same(J @ v, dense @ v)
        same(J.T @ u, torch.einsum("nc,ncp->p", u, dense))
        same(J.to_dense(), dense)
        same(J.rows(slice(1, 5)), dense[1:5])
        same(J.rows(torch.tensor([5, 0])), dense[[0, 5]])  # in the order of the data


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
