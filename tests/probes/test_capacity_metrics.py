"""Products of norms and the Fisher-Rao norm (spec 04, 2.23) against dense Jacobians and closed forms."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs
from biascope.probes import Probe, View
from biascope.probes import view as view_module
from biascope.probes.weight_metrics import fisher_rao_norm, norm_products
from biascope.support.errors import InputError
from biascope_papers.alignment.complexity import norms
from probes.probe_zoo import batch, jacobian_rows, mlp, moved

X, Y = batch()


def slopes(net: nn.Module, y: Tensor, loss: str) -> Tensor:
    out = net(X).detach().requires_grad_()
    if loss == "cross_entropy":
        total = F.cross_entropy(out, y, reduction="sum")
    elif loss == "logistic":
        total = F.softplus(-(2 * y - 1) * out[:, 0]).sum()
    else:
        total = (out - y).square().mean(1).sum()
    return torch.autograd.grad(total, out)[0]


@pytest.mark.parametrize("loss", ["cross_entropy", "logistic", "squared"])
def test_fisher_rao_against_the_dense_empirical_fisher(loss: str) -> None:
    net = mlp(3, 5, 1 if loss == "logistic" else 2)
    y = torch.randn(7, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64) if loss == "squared" else Y
    J = jacobian_rows(net, X).view(7, -1, sum(p.numel() for p in net.parameters()))
    gradients = torch.einsum("nc,ncp->np", slopes(net, y, loss), J)
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    expected = math.sqrt(float(theta @ (gradients.T @ gradients / 7) @ theta))
    assert fisher_rao_norm(View.of(net, X, y)) == pytest.approx(expected, rel=1e-12)
    assert expected > 0.01


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_fisher_rao_of_networks_without_biases(depth: int) -> None:
    """L sqrt(E <dl/df, f>^2) for L layers, and unchanged where a unit is rescaled."""
    net = mlp(3, *[4] * (depth - 1), 2, act=nn.ReLU)
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.bias = None  # type: ignore[assignment]
    f = net(X).detach()
    expected = depth * float((slopes(net, Y, "cross_entropy") * f).sum(1).square().mean().sqrt())
    assert fisher_rao_norm(View.of(net, X, Y)) == pytest.approx(expected, rel=1e-12)
    if depth > 1:
        with torch.no_grad():
            net[0].weight[1].mul_(50.0)
            net[2].weight[:, 1].div_(50.0)
        assert fisher_rao_norm(View.of(net, X, Y)) == pytest.approx(expected, rel=1e-10)


def test_fisher_rao_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    net = mlp(3, 5, 2)
    whole = fisher_rao_norm(View.of(net, X, Y))
    import biascope.probes.weight_metrics as capacity

    assert capacity.CHUNK == view_module.CHUNK
    monkeypatch.setattr(capacity, "CHUNK", 3)
    assert fisher_rao_norm(View.of(net, X, Y)) == pytest.approx(whole, rel=1e-13)


def test_products_of_norms() -> None:
    net = mlp(3, 6, 2)
    start, after = View.of(net, X, Y), moved(net)
    found = norm_products(View.of(after, X, Y, init=start))
    U, V = after[0].weight.detach(), after[2].weight.detach()  # type: ignore[index]
    U0 = net[0].weight.detach()
    top = [float(torch.linalg.svdvals(W)[0]) for W in (U, V, U0)]
    assert found == pytest.approx(
        {
            "parameters": 3 * 6 + 6 + 6 * 2 + 2,
            "frobenius": float(U.norm() * V.norm()),
            "spectral": top[0] * top[1],
            "two_layers": float(V.norm()) * (float((U - U0).norm()) + top[2]),
        },
        rel=1e-12,
    )
    study = norms(after, net)  # what Fig. 4.6 of the alignment chapter compares
    assert study["neyshabur"] == pytest.approx(found["two_layers"], rel=1e-12)
    assert study["spectral"] == pytest.approx(found["spectral"], rel=1e-12)
    assert "two_layers" not in norm_products(View.of(mlp(3, 4, 4, 2), X, Y))


def test_by_name_in_a_probe() -> None:
    net = mlp(3, 6, 2)
    values = Probe(net, X, Y, ["norm_products", "fisher_rao_norm"], max_overhead=None).measure(0.3)
    assert values["norm_products/parameters"] == 38
    assert values["fisher_rao_norm"] == fisher_rao_norm(View.of(net, X, Y))
    with pytest.raises(InputError, match="needs labels"):
        fisher_rao_norm(View.of(net, X))
    lin = View.of(bs.linearize(net), X, Y)
    assert fisher_rao_norm(lin) == pytest.approx(fisher_rao_norm(View.of(net, X, Y)), rel=1e-10)  # the same at theta_0


def test_fisher_rao_with_losses_of_the_user() -> None:
    """A loss that holds float32 weights got float64 outputs; one without gradient a raw error of autograd."""
    net, weight = mlp(3, 5, 2).float(), torch.tensor([0.3, 1.7])
    x, y = X.float(), Y

    def gradient(i: int) -> Tensor:
        loss = F.cross_entropy(net(x[i : i + 1]), y[i : i + 1], weight, reduction="sum")
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]).double()

    theta = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
    expected = math.sqrt(sum(float(gradient(i) @ theta) ** 2 for i in range(len(x))) / len(x))
    found = fisher_rao_norm(View.of(net, x, y, loss_fn=nn.CrossEntropyLoss(weight, reduction="none")))
    assert found == pytest.approx(expected, rel=1e-5)  # float32
    with pytest.raises(RuntimeError, match="does not require grad"):
        fisher_rao_norm(View.of(net, x, y, loss_fn=lambda f, t: (f.argmax(1) != t).float()))


def test_products_over_no_matrix_are_one() -> None:
    found = norm_products(View.of(nn.BatchNorm1d(3).eval(), X))
    assert found == {"parameters": 6.0, "frobenius": 1.0, "spectral": 1.0}
    assert all(isinstance(value, float) for value in found.values())
