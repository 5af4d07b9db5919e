"""Sums of squared gradients in every form, against the gradients; turning inputs against the plain product."""

import pytest
import torch

import biascope as bs
from biascope.curvature import contract, sums
from biascope.curvature.contract import add_squares, add_turned_squares, by_pairs, rotate, squared_sums


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=["cpu", "gpu"])
def device_like(request, monkeypatch):
    if request.param == "gpu":
        monkeypatch.setattr(contract, "CACHED", ())


def squared(G, A):
    return torch.einsum("kbgot,bgit->kbgoi", G, A).square().sum((0, 1))


@pytest.mark.parametrize(
    ("k", "T", "pairs"), [(1, 1, True), (1, 5, True), (3, 9, True), (1, 40, False), (2, 17, False)]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_squared_sums(k, T, pairs, groups, device_like, monkeypatch):
    monkeypatch.setattr(contract, "TRAFFIC", 10)
    assert by_pairs(k, T) == pairs
    G, A = random(k, 5, groups, 3, T), random(5, groups, 4, T, seed=1)
    torch.testing.assert_close(squared_sums(G, A), squared(G, A), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_turned_are_turned_inputs(bias, device_like):
    G, A, U = random(2, 7, 1, 3, 20), random(7, 1, 4, 20, seed=1), random(4 + bias, 4 + bias, seed=2)
    whole = torch.cat([A, torch.ones(7, 1, 1, 20)], 2) if bias else A
    total = random(3, 4 + bias, seed=3)
    exact = total + squared(G, U.T @ whole)[0]
    add_turned_squares(total, G, A, U, bias)
    torch.testing.assert_close(total, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("T", [3, contract.LONG])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("lead", "groups"), [((2, 3), 1), ((3,), 1), ((2, 3), 2)])
def test_rotate(T, bias, lead, groups, device_like):
    X, U = random(*lead, groups, 4, T)[..., 1:, :, :, :], random(groups, 4 + bias, 4 + bias, seed=1)
    whole = torch.cat([X, torch.ones(*X.shape[:-2], 1, T)], -2) if bias else X
    torch.testing.assert_close(rotate(U, X, bias), U.mT @ whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_ekfac_of_many_positions_is_the_same_either_way(bias, device_like, monkeypatch):
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, bias=bias), torch.nn.Flatten(), torch.nn.Linear(72, 3)).double()
    x, calls = random(5, 1, 8, 8), []
    late = bs.fisher(net, x, "ekfac")

    def early(total, G, A, U, bias):
        calls.append(bias)
        add_squares(total[None], G, rotate(U[None], A, bias))

    monkeypatch.setattr(sums, "add_turned_squares", early)
    other = bs.fisher(net, x, "ekfac")
    assert calls == [bias]
    torch.testing.assert_close(late.pieces[0].s, other.pieces[0].s, rtol=1e-12, atol=1e-12)
