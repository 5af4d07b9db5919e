"""The mixed derivative averaged over networks before it is composed (spec 03, 2.14, average="operator")."""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from biascope.ensembles import Networks, record
from biascope.geometry import nads
from biascope.geometry.few_passes import few_passes
from biascope.geometry.mixed import MixedDerivative
from biascope.support.errors import InputError

F64 = torch.float64


def in_groups(networks: Networks, size: int) -> Callable[[], Iterator[Networks]]:
    return lambda: (networks[i : i + size] for i in range(0, len(networks), size))


def matrices(networks: Networks, points: Tensor) -> Tensor:
    """Hbar_t [T, p, D] in full, by a Jacobian of the gradient, one network and point after another."""
    made = []
    for t in range(len(networks)):
        net = networks.module(t)
        params = {k: p.detach() for k, p in net.named_parameters()}

        def gradient(params: dict[str, Tensor], x: Tensor, net: nn.Module = net) -> Tensor:
            return grad(lambda z: functional_call(net, params, (z[None],))[0, 0])(x)

        each = [jacrev(gradient)(params, x) for x in points]  # {name: [D, *shape]}
        made.append(torch.stack([torch.cat([v.flatten(1) for v in e.values()], 1).T for e in each]).mean(0))
    return torch.stack(made)


@pytest.mark.parametrize("n_points", [1, 3])
def test_the_mean_operator_against_full_matrices(n_points: int) -> None:
    networks = record(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))).draw(0, 0, 7, dtype=F64)
    rng = torch.Generator().manual_seed(1)
    points = torch.randn(n_points, 5, generator=rng, dtype=F64)
    V = torch.randn(5, 3, generator=rng, dtype=F64)
    H, full = MixedDerivative(networks.template, points), matrices(networks, points)
    Hm = full.mean(0)
    for size in (7, 3):
        groups = in_groups(networks, size)
        assert torch.allclose(H.mean_gram(groups, V), Hm.T @ Hm @ V, atol=1e-12)
        pushed, count = H.mean_push(groups, V)
        assert count == 7
        assert torch.allclose(torch.cat([part.flatten(1) for part in pushed.values()], 1).T, Hm @ V, atol=1e-12)
    gram = torch.einsum("tpd,tpe->de", full, full)
    assert torch.allclose(H.gram(networks, V), gram @ V, atol=1e-12)  # what averaging afterwards gives
    assert float((gram / 7 @ V - Hm.T @ Hm @ V).norm() / (gram / 7 @ V).norm()) > 0.2
    values, errors = H.mean_jackknife(in_groups(networks, 1), V)
    assert torch.allclose(values, (Hm @ V).square().sum(0), atol=1e-12)
    left = torch.stack([((7 * Hm - full[t]) / 6 @ V).square().sum(0) for t in range(7)])
    assert torch.allclose(errors, (6 / 7 * (left - left.mean(0)).square().sum(0)).sqrt(), atol=1e-12)
    assert H.mean_jackknife(in_groups(networks, 7), V)[1].isnan().all()
    pairs = few_passes(lambda X: H.mean_gram(in_groups(networks, 3), X).to(X), 5, 2, passes=8, dtype=F64)
    assert torch.allclose(pairs.values, torch.linalg.svdvals(Hm)[:2] ** 2, atol=1e-10)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.theta)[:, None]


def test_where_the_derivative_is_the_same_in_all_networks_both_orders_agree() -> None:
    """f = theta . x has H = I."""
    networks = record(Line).draw(0, 0, 6, dtype=F64)
    H, V = MixedDerivative(networks.template, torch.ones(1, 4, dtype=F64)), torch.eye(4, dtype=F64)
    assert torch.equal(H.mean_gram(in_groups(networks, 4), V), V)
    assert torch.equal(H.gram(networks, V) / 6, V)


class Product(nn.Module):
    """w (phi . x): H^T H = phi phi^T + w^2 I."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(4) * torch.tensor([2.0, 1.0, 0.5, 0.2]))
        self.w = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.phi)[:, None] * self.w


def test_signs_cancel_in_the_mean_of_centred_networks() -> None:
    """E[H] = 0: the Gram form tends to E[H^T H] = diag(s^2) + I, the operator form to that divided by T, and a second
    look at other networks is as far away as the first: averaging more does not help."""
    T, repeats, V = 25, 400, torch.eye(4, dtype=F64)
    exact = torch.diag(torch.tensor([4.0, 1.0, 0.25, 0.04], dtype=F64)) + V
    initialiser = record(Product)
    H = MixedDerivative(initialiser.template, torch.ones(1, 4, dtype=F64))
    draws = [initialiser.draw(0, T * r, T * (r + 1), dtype=F64) for r in range(repeats)]
    means = torch.stack([H.mean_gram(in_groups(networks, T), V) for networks in draws])
    grams = torch.stack([H.gram(networks, V) / T for networks in draws])
    error = T * means.std(0) / math.sqrt(repeats)
    assert ((T * means.mean(0) - exact).abs() < 4 * error + 1e-12).all()
    spread = [float((each - exact).square().sum((1, 2)).mean().sqrt() / exact.norm()) for each in (T * means, grams)]
    # the operator form of T networks is as noisy as the Gram form of one: sqrt T times noisier
    assert spread[0] / spread[1] == pytest.approx(math.sqrt(T), rel=0.15)


def test_parameters_without_dimensions_in_the_average_of_operators() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.body = nn.Parameter(torch.randn(())), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.gain * self.body(x)
            return out

    found = nads(Gain, (3,), 8, "mixed-derivative", top=3, average="operator", dtype=torch.float64)
    drawn = record(Gain).draw(0, 0, 8, dtype=torch.float64)
    of_gain = drawn.params["body.weight"].mean(0)  # d2f / d gain dx, [1, 3]; by the weights it is the gain itself
    H = torch.cat([of_gain, drawn.params["gain"].mean() * torch.eye(3, dtype=torch.float64)])
    assert torch.allclose(found.eigenvalues, torch.linalg.eigvalsh(H.T @ H).flip(0))
    assert bool((found.standard_errors >= 0).all())


@pytest.mark.parametrize("method", ["mixed-derivative", "ntk"])
def test_networks_in_half_precision(method: Literal["mixed-derivative", "ntk"]) -> None:
    """The same weights in float64 have the same directions, but for three digits."""

    def halves() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)).half()

    rough, fine = (nads(halves, (6,), 20, method, top=3, dtype=dtype) for dtype in (None, F64))
    assert torch.allclose(rough.eigenvalues, fine.eigenvalues, rtol=2e-3)
    assert torch.allclose(rough.standard_errors, fine.standard_errors, rtol=1e-2)
    assert rough.overlap(fine, 3) > 0.9999


@pytest.mark.parametrize("average", ["gram", "operator"])
def test_no_mixed_derivative_at_all_is_refused(average: Literal["gram", "operator"]) -> None:
    """Any basis would do, and all of it would be called certain."""

    def bare() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 1, bias=False))

    with pytest.raises(InputError, match="all mixed derivatives are zero"):
        nads(bare, (4,), 6, "mixed-derivative", x=torch.zeros(4), average=average)
    with pytest.raises(InputError, match="all mixed derivatives are zero"):
        nads(bare, (4,), 1, "ntk", scalarise=lambda out: 0 * out[:, 0])
