"""Positions without a label (-100) have no likelihood: no metric counts them, or it is refused by name."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.support.errors import InputError, UnsupportedError
from curvature.curvature_zoo import relative


class Tokens(nn.Module):
    """Token-wise layers and a mixing one between; classes on axis 1, or last."""

    def __init__(self, last: bool, mix: bool = True) -> None:
        super().__init__()
        self.inner, self.mix, self.head = nn.Linear(3, 4), nn.Linear(5, 5) if mix else nn.Identity(), nn.Linear(4, 3)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mix(torch.tanh(self.inner(x)).mT).mT
        z = self.head(h)
        return z if self.last else z.mT


def network(last: bool = False, mix: bool = True) -> Tokens:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tokens(last, mix).double()


def data(n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 5, 3, generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (n, 5), generator=g)
    y[torch.rand(n, 5, generator=g) < 0.4] = -100
    return x, y


def brute(net: Tokens, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over the examples of the sum over labelled positions of J^T (diag p - p p^T) J, row by row of J."""
    params = list(net.parameters())
    P = sum(p.numel() for p in params)
    F = torch.zeros(P, P, dtype=torch.float64)
    for xi, yi in zip(x, y):
        z = net(xi[None])[0]
        z = z if net.last else z.mT  # [T, c]
        for t in (yi != -100).nonzero().flatten().tolist():
            rows = [torch.autograd.grad(z[t, c], params, retain_graph=True) for c in range(z.shape[1])]
            J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
            p = torch.softmax(z[t].detach(), 0)
            F += J.T @ (torch.diag(p) - torch.outer(p, p)) @ J
    return F / len(x)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("representation", ["dense", "implicit"])
def test_exact_fisher_counts_labelled_positions_alone(representation: str, last: bool) -> None:
    net, (x, y) = network(last), data()
    F = bs.fisher(net, (x, y), representation, class_dim=-1 if last else 1)
    truth = brute(net, x, y)
    v = torch.randn(len(truth), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert relative(F @ v, truth @ v) < 1e-10
    whole = bs.fisher(net, x, representation, class_dim=-1 if last else 1)
    assert relative(whole @ v, truth @ v) > 0.1  # without labels all positions count
    full = bs.fisher(net, (x, y.clamp_min(0)), representation, class_dim=-1 if last else 1)
    assert relative(full @ v, whole @ v) < 1e-12  # which labels they are does not matter


def test_diagonal_and_trace() -> None:
    net, (x, y) = network(), data()
    truth = brute(net, x, y)
    assert relative(bs.fisher(net, (x, y), "diagonal").diagonal(), truth.diagonal()) < 1e-10
    assert relative(bs.fisher(net, (x, y), "block").trace(), truth.trace()) < 1e-10


def test_sampled_labels_are_not_drawn_where_there_are_none() -> None:
    net, (x, y) = network(), data()
    truth = brute(net, x, y)
    draws = [
        bs.fisher(
            net, (x, y), "dense", estimator="monte-carlo", samples=400, generator=torch.Generator().manual_seed(s)
        )
        for s in range(20)
    ]
    traces = torch.stack([F.trace() for F in draws])
    error = traces.std() / len(traces) ** 0.5
    assert abs(traces.mean() - truth.trace()) < 4 * error
    assert error < 0.01 * truth.trace()


def test_an_example_without_a_label_adds_nothing() -> None:
    """One position per example, for all three estimators."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(3, 3).double()
    x, y = data()[0][:, 0], torch.tensor([0, -100, 2, -100])
    for estimator in ("exact", "monte-carlo", "empirical"):
        F = bs.fisher(net, (x[1:2], y[1:2]), "dense", estimator=estimator, samples=1)
        assert not F.to_dense().any()
    exact = bs.fisher(net, (x, y), "dense").to_dense()
    kept = bs.fisher(net, (x[[0, 2]], y[[0, 2]]), "dense").to_dense()
    assert relative(exact, kept / 2) < 1e-12  # the mean is over all four


@pytest.mark.parametrize("estimator", ["exact", "monte-carlo"])
def test_kfac_of_tokens_that_do_not_mix_is_that_of_the_labelled_ones(estimator: str) -> None:
    net, (x, y) = network(mix=False), data()
    y[:, 3:] = -100
    y[:, :3] = y[:, :3].clamp_min(0)  # three labelled tokens per example, at the front
    K = bs.fisher(net, (x, y), "kfac", estimator=estimator, samples=3, generator=torch.Generator().manual_seed(0))
    short = bs.fisher(net, (x[:, :3], y[:, :3]), "kfac", estimator=estimator, samples=3)
    for mine, other in zip(K.pieces, short.pieces):
        assert relative(mine.A, other.A) < 1e-12
        if estimator == "exact":
            assert relative(mine.B, other.B) < 1e-10


def test_kfac_is_refused_where_the_cotangents_of_an_example_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from biascope.curvature.passes import Pass

    net, (x, y) = network(mix=False), data()
    monkeypatch.setattr(Pass, "_sizes", lambda self, blocks, b: (b, 2))
    with pytest.raises(UnsupportedError, match=r"all cotangents of an example at once.*monte-carlo"):
        bs.fisher(net, (x, y), "kfac")
    assert relative(bs.fisher(net, (x, y), "dense").to_dense(), brute(net, x, y)) < 1e-10
    bs.fisher(net, (x, y), "kfac", estimator="monte-carlo", samples=4)


def test_gauss_newton_of_a_mean_over_labelled_positions_is_refused() -> None:
    net, (x, y) = network(), data()
    for make in (bs.ggn, bs.hessian):
        with pytest.raises(UnsupportedError, match=r"ignored labels \(-100\)"):
            make(net, (x, y), "implicit", loss="ce")
    assert bs.ggn(net, (x, y.clamp_min(0)), "dense", loss="ce").trace() > 0


@pytest.mark.parametrize("estimator", ["exact", "monte-carlo", "empirical"])
def test_the_labels_tell_where_the_classes_are(estimator: str) -> None:
    """Outputs [n, 5 tokens, 3 words] and one label per token: axis 1 cannot be the classes."""
    net, (x, y) = network(last=True), data()
    y = y.clamp_min(0)
    found = bs.fisher(net, (x, y), "dense", estimator=estimator).to_dense()
    assert relative(found, bs.fisher(net, (x, y), "dense", estimator=estimator, class_dim=-1).to_dense()) < 1e-12
    with pytest.raises(InputError, match="class_dim=-1"):
        bs.fisher(net, (x, y), "dense", estimator=estimator, class_dim=1)


def test_a_metric_of_products_says_how_to_get_eigenvalues() -> None:
    net, (x, _) = network(), data()
    with pytest.raises(UnsupportedError, match=r"eigh\(k\)"):
        bs.fisher(net, x, "implicit").eigenvalues()
