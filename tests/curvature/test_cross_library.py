"""The same numbers as nngeometry, curvlinops and BackPACK, where they mean the same thing.

These libraries belong to the `bench` extra; without them the tests are skipped.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import biascope as bs


def network(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "mlp":
            net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        else:
            net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, *((4,) if kind == "mlp" else (2, 4, 4)), generator=g, dtype=torch.float64)
    return net.double(), x, torch.randint(0, 3, (6,), generator=g)


def close(a, b, tol=1e-9):
    assert float((a - b).norm() / b.norm()) < tol


KINDS = ["mlp", "conv"]


@pytest.fixture
def double():
    """nngeometry allocates in torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("representation", ["dense", "diagonal", "block", "quasidiagonal", "kfac", "ekfac", "lowrank"])
def test_nngeometry(kind, likelihood, representation, double):
    pytest.importorskip("nngeometry")
    from nngeometry.metrics import FIM
    from nngeometry.object import pspace

    net, x, y = network(kind)
    forms = {
        "dense": pspace.PMatDense,
        "diagonal": pspace.PMatDiag,
        "block": pspace.PMatBlockDiag,
        "quasidiagonal": pspace.PMatQuasiDiag,
        "kfac": pspace.PMatKFAC,
        "ekfac": pspace.PMatEKFAC,
        "lowrank": pspace.PMatLowRank,
    }
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    variant = {"categorical": "classif_logits", "gaussian": "regression"}[likelihood]
    theirs = FIM(net, loader, forms[representation], variant=variant)
    if representation == "ekfac":
        theirs.update_diag(loader)
    split = {"split_weight_bias": True} if representation in {"kfac", "ekfac"} else {}
    ours = bs.fisher(net, x, representation, likelihood)
    close(ours.to_dense(), theirs.to_torch(**split))


@pytest.mark.parametrize("kind", KINDS)
def test_curvlinops_products(kind):
    curvlinops = pytest.importorskip("curvlinops")
    net, x, y = network(kind)
    params = list(net.parameters())
    p = sum(q.numel() for q in params)
    eye = torch.eye(p, dtype=torch.float64)
    data = [(x[:4], y[:4]), (x[4:], y[4:])]
    loss = nn.CrossEntropyLoss()
    close(bs.ggn(net, x, "dense").to_dense(), curvlinops.GGNLinearOperator(net, loss, params, data) @ eye)
    close(bs.hessian(net, data, "dense").to_dense(), curvlinops.HessianLinearOperator(net, loss, params, data) @ eye)
    targets = torch.rand(6, 3, dtype=torch.float64)
    mse = [(x, targets)]
    close(
        bs.ggn(net, x, "implicit", "mse").to_dense(),
        curvlinops.GGNLinearOperator(net, nn.MSELoss(), params, mse) @ eye,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("representation", ["kfac", "ekfac"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_curvlinops_kronecker(kind, representation, sharing):
    curvlinops = pytest.importorskip("curvlinops")
    if (representation, sharing, kind) == ("ekfac", "reduce", "conv"):
        pytest.skip("curvlinops scales by the reduced gradients, we by the true ones (which is the optimal diagonal)")
    net, x, y = network(kind)
    params = list(net.parameters())
    p = sum(q.numel() for q in params)
    make = {"kfac": curvlinops.KFACLinearOperator, "ekfac": curvlinops.EKFACLinearOperator}[representation]
    theirs = make(
        net,
        nn.CrossEntropyLoss(),
        params,
        [(x, y)],
        fisher_type="type-2",
        kfac_approx=sharing,
        separate_weight_and_bias=False,
    )
    ours = bs.fisher(net, x, representation, sharing=sharing)
    close(ours.to_dense(), theirs @ torch.eye(p, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_backpack(kind):
    backpack = pytest.importorskip("backpack")
    from backpack.extensions import KFLR, DiagGGNExact, SumGradSquared

    net, x, y = network(kind)
    extended = backpack.extend(net)
    loss = backpack.extend(nn.CrossEntropyLoss())(extended(x), y)
    with backpack.backpack(DiagGGNExact(), SumGradSquared(), KFLR()):
        loss.backward()
    exact = torch.cat([p.diag_ggn_exact.flatten() for p in net.parameters()])
    close(bs.ggn(net, x, "diagonal").diagonal(), exact)
    squares = torch.cat([p.sum_grad_squared.flatten() for p in net.parameters()])
    # BackPACK squares the gradients of the mean loss: n^2 and one sum over n apart from a mean of squares
    close(bs.fisher(net, (x, y), "diagonal", estimator="empirical").diagonal(), squares * len(x))
    weight = net[-1].weight
    B, A = weight.kflr  # linear layers: the factors of the weight, without the bias
    ours = bs.fisher(net, x, "kfac").pieces[-1]
    d = A.shape[0]
    close(torch.kron(ours.B[0], ours.A[0, :d, :d]), torch.kron(B, A))
