"""Likelihoods, estimators and losses against their definitions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import biascope as bs
from biascope.curvature import gradient_covariance, l2_metric, vocabulary
from biascope.curvature.families import Categorical, OutputShape, likelihood_family
from biascope.support.errors import InputError
from curvature.curvature_zoo import brute_fisher, case, jacobian, relative


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Segmenter(nn.Module):
    """[n, 2, 3, 3] -> [n, 3, 2, 2]: three classes at four pixels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)

    def forward(self, x):
        return self.conv(x)


def segmenter():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Segmenter().double()
    return net, torch.randn(5, 2, 3, 3, generator=generator(), dtype=torch.float64)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_square_root_of_the_softmax_hessian(classes):
    z = 3 * torch.randn(4, classes, generator=generator(), dtype=torch.float64)
    z[0] = torch.linspace(-800, 800, classes)  # probabilities that underflow
    family = Categorical(OutputShape(classes, 1, False))
    S = family.cotangents(z, None, None, range(family.width))
    p = torch.softmax(z, 1)
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    assert family.width == classes - 1
    assert float((torch.einsum("knc,knd->ncd", S, S) - H).abs().max()) < 1e-14
    u = torch.randn(4, classes, generator=generator(1), dtype=torch.float64)
    assert float((family.apply(z, None, None, u) - (H @ u[..., None])[..., 0]).abs().max()) < 1e-13


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("representation", ["dense", "implicit"])
def test_exact_families(likelihood, representation):
    net, x = case("mlp")
    G = bs.fisher(net, x, representation, likelihood)
    assert relative(G.to_dense(), brute_fisher(net, x, likelihood)) < 1e-10


def test_softmax_fisher_by_enumerating_labels_through_autograd():
    net, x = case("mlp")
    params, total = list(net.parameters()), 0
    for i in range(len(x)):
        log_p = torch.log_softmax(net(x[i : i + 1]), 1)[0]
        for y in range(3):
            g = torch.cat([t.flatten() for t in torch.autograd.grad(log_p[y], params, retain_graph=True)])
            total = total + log_p[y].exp().detach() * torch.outer(g, g)
    assert relative(bs.fisher(net, x, "dense").to_dense(), total / len(x)) < 1e-10


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_empirical_fisher_is_the_second_moment_of_loss_gradients(likelihood):
    net, x = case("mlp")
    y = torch.randint(0, 3, (6,), generator=generator()) if likelihood == "categorical" else torch.rand(6, 3)
    loss = {
        "categorical": lambda z, t: F.cross_entropy(z, t),
        "bernoulli": lambda z, t: F.binary_cross_entropy_with_logits(z, t.double(), reduction="sum"),
        "gaussian": lambda z, t: 0.5 * (z - t).square().sum(),
    }[likelihood]
    rows = []
    for i in range(6):
        grads = torch.autograd.grad(loss(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    R = torch.stack(rows)
    for representation in ("dense", "lowrank", "implicit"):
        E = bs.fisher(net, (x, y), representation, likelihood, "empirical")
        assert relative(E.to_dense(), R.T @ R / 6) < 1e-10
    centred = R - R.mean(0)
    cov = centred.T @ centred / 6
    options = {"likelihood": likelihood}
    for representation in ("dense", "lowrank", "implicit"):
        C = gradient_covariance(net, (x, y), representation, **options)
        assert relative(C.to_dense(), cov) < 1e-9
        assert relative(C.trace(), cov.trace()) < 1e-9
        assert relative(C.diagonal(), cov.diagonal()) < 1e-9
    assert relative(gradient_covariance(net, (x, y), "diagonal", **options).diagonal(), cov.diagonal()) < 1e-9
    assert relative(gradient_covariance(net, (x, y), "quasidiagonal", **options).diagonal(), cov.diagonal()) < 1e-9
    E = gradient_covariance(net, (x, y), "ekfac", **options)
    Q = E.from_eigenbasis(torch.eye(len(cov), dtype=cov.dtype))
    s = torch.cat([piece.eigenvalues() for piece in E.pieces])
    assert relative(s, (Q.T @ cov @ Q).diagonal()) < 1e-9


def test_kfac_cannot_be_centred():
    net, x = case("mlp")
    with pytest.raises(NotImplementedError, match="cannot be centred; use ekfac"):
        gradient_covariance(net, (x, torch.zeros(6, dtype=torch.long)), "kfac")


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_monte_carlo_converges_at_the_right_rate(likelihood):
    net, x = case("mlp")
    exact = bs.fisher(net, x, "dense", likelihood).to_dense()
    errors = [
        relative(bs.fisher(net, x, "dense", likelihood, "monte-carlo", m, generator(1)).to_dense(), exact)
        for m in (20, 2000)
    ]
    assert errors[1] < 0.15
    assert 4 < errors[0] / errors[1] < 25  # about 10 for 100 times as many samples


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_sampled_labels_are_the_same_in_every_representation_and_pass(likelihood):
    net, x = case("conv2d")
    options = {"likelihood": likelihood, "estimator": "monte-carlo", "samples": 3}
    D = bs.fisher(net, x, "dense", generator=generator(4), **options).to_dense()
    implicit = bs.fisher(net, x, "implicit", generator=generator(4), **options)
    assert relative(implicit.to_dense(), D) < 1e-10
    v = torch.ones(len(D), dtype=D.dtype)
    assert torch.equal(implicit @ v, implicit @ v)
    E = bs.fisher(net, x, "ekfac", generator=generator(4), max_memory="200KB", **options)  # two real passes
    Q = E.from_eigenbasis(torch.eye(len(D), dtype=D.dtype))
    s = torch.cat([piece.eigenvalues() for piece in E.pieces])
    assert relative(s, (Q.T @ D @ Q).diagonal()) < 1e-10
    other = bs.fisher(net, x, "dense", generator=generator(5), **options).to_dense()
    assert relative(other, D) > 1e-3
    assert implicit.info["seed"] == E.info["seed"]


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("representation", ["dense", "ekfac", "implicit"])
def test_sampled_labels_do_not_depend_on_how_the_data_is_cut(likelihood, representation):
    """Batches of 1, 3 and 2, of 4 and 2, or one of 6: the same draws for the same examples."""
    net, x = case("mlp")
    cuts = ([x[:1], x[1:4], x[4:]], [x[:4], x[4:]], x)
    options = {"likelihood": likelihood, "estimator": "monte-carlo", "samples": 3}
    found = [bs.fisher(net, c, representation, generator=generator(4), **options).to_dense() for c in cuts]
    assert relative(found[0], found[2]) < 1e-10
    assert relative(found[1], found[2]) < 1e-10


def test_gaussian_draws_are_gaussian():
    """Moments 0, 1, 0, 3 within four standard errors of 60,000 draws, and no infinity."""
    shape = OutputShape.of((6,), 1)
    z = likelihood_family("gaussian", "monte-carlo", 100, shape).draw(generator(0), 100).flatten()
    assert len(z) == 60_000
    assert bool(z.isfinite().all())
    for power, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert abs(float((z**power).mean()) - mean) < 4 * (variance / 60_000) ** 0.5


def test_a_loader_that_shuffles_is_caught():
    net, x = case("mlp")

    class Shuffling:
        turn = 0

        def __iter__(self):
            self.turn += 1
            yield x.roll(self.turn, 0)[:3]
            yield x.roll(self.turn, 0)[3:]

    with pytest.raises(InputError, match="no shuffling"):
        bs.fisher(net, Shuffling(), "implicit", estimator="monte-carlo") @ torch.ones(43, dtype=torch.float64)
    exact = bs.fisher(net, Shuffling(), "implicit")  # the order does not matter for exact expectations
    assert relative(exact.to_dense(), brute_fisher(net, x)) < 1e-10


@pytest.mark.parametrize("representation", ["dense", "diagonal", "implicit", "ekfac"])
def test_outputs_with_positions(representation):
    net, x = segmenter()
    truth = brute_fisher(net, x)
    G = bs.fisher(net, x, representation)
    assert relative(G.trace(), truth.trace()) < 1e-10
    if representation in {"dense", "implicit"}:
        assert relative(G.to_dense(), truth) < 1e-10
    y = torch.randint(0, 3, (5, 2, 2), generator=generator())
    y[0, 0, 0] = -100  # no label there
    rows = []
    for i in range(5):
        loss = F.cross_entropy(net(x[i : i + 1]), y[i : i + 1], reduction="sum")
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
    R = torch.stack(rows)
    E = bs.fisher(net, (x, y), representation, estimator="empirical")
    assert relative(E.trace(), (R.T @ R / 5).trace()) < 1e-10
    sampled = bs.fisher(net, x, representation, estimator="monte-carlo", samples=400)
    assert abs(float(sampled.trace() / truth.trace()) - 1) < 0.1


def test_l2_metric_and_duality_with_the_kernel():
    net, x = case("conv2d")
    J = jacobian(net, x)
    n = len(x)
    K = bs.ntk(net, x, precision="float64")
    for representation in ("dense", "lowrank"):
        G = l2_metric(net, x, representation)
        assert relative(G.to_dense(), torch.einsum("ncp,ncq->pq", J, J) / n) < 1e-10
        assert relative(G.trace(), torch.as_tensor(K.trace(), dtype=J.dtype) / n) < 1e-10
        assert relative(G.frobenius_norm(), torch.as_tensor(K.frobenius_norm(), dtype=J.dtype) / n) < 1e-10
        values = K.eigh().values.double() / n
        assert relative(G.eigh(10).values, values[:10]) < 1e-9
    assert int(torch.linalg.matrix_rank(G.to_dense())) <= min(3 * n, G.shape[0])


def test_user_supplied_weights():
    """A logit difference: F = E (J_0 - J_1)^T (J_0 - J_1)."""
    net, x = case("mlp")

    def difference(z, y):
        return torch.tensor([1.0, -1.0, 0.0], dtype=z.dtype).expand(1, len(z), 3)

    J = jacobian(net, x)
    d = J[:, 0] - J[:, 1]
    for representation in ("dense", "implicit"):
        G = bs.fisher(net, x, representation, likelihood=difference)
        assert relative(G.to_dense(), d.T @ d / len(x)) < 1e-10
    with pytest.raises(InputError, match=r"must give \[k, n, 3\]"):
        bs.fisher(net, x, likelihood=lambda z, y: z)
    for options in ({"estimator": "monte-carlo"}, {"samples": -3}):
        with pytest.raises(InputError, match="a function as likelihood"):
            bs.fisher(net, x, likelihood=difference, **options)
    for options in ({"estimator": "monte-carlo", "samples": 0},):
        with pytest.raises(InputError, match=r"estimator=|samples must"):
            bs.fisher(net, x, **options)


def test_fisher_is_the_hessian_of_the_divergence():
    """KL(p_w || p_{w + t v}) / (t^2 / 2 v^T F v) -> 1."""
    net, x = case("mlp")
    G = bs.fisher(net, x, "dense")
    v = torch.randn(G.shape[0], generator=generator(), dtype=torch.float64)
    step = G.space.unflatten(v)
    log_p = torch.log_softmax(net(x), 1)
    ratios = []
    for t in (1e-2, 1e-3):
        moved = {k: p + t * step[k] for k, p in net.named_parameters()}
        log_q = torch.log_softmax(torch.func.functional_call(net, moved, x), 1)
        kl = (log_p.exp() * (log_p - log_q)).sum(1).mean()
        ratios.append(abs(float(kl.detach() / (t**2 / 2 * G.quadratic_form(v))) - 1))
    assert ratios[1] < 1e-2
    assert ratios[1] < 0.2 * ratios[0]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda x: x, {"estimator": "empirical"}, "needs labels"),
        (
            lambda x: (x, torch.zeros(4, dtype=torch.long)),
            {"estimator": "empirical"},
            "do not fit",
        ),
        (lambda x: (x, torch.full((6,), 3)), {"estimator": "empirical"}, "label 3 is not a class"),
        (lambda x: (x, torch.full((6,), 0.5)), {"estimator": "empirical"}, r"y\.long\(\)"),
        (lambda x: (x, torch.zeros(6, 2)), {"estimator": "empirical", "likelihood": "gaussian"}, "do not fit outputs"),
        (
            lambda x: (x, torch.full((6, 3), 2.0)),
            {"estimator": "empirical", "likelihood": "bernoulli"},
            "from 0 to 1",
        ),
        (
            lambda x: (x, torch.full((6, 3), float("nan"))),
            {"estimator": "empirical", "likelihood": "gaussian"},
            "finite",
        ),
        (lambda x: x, {"likelihood": "poisson"}, "there is bernoulli, categorical, gaussian"),
        (lambda x: x, {"estimator": "guess"}, "there is empirical, exact, monte-carlo"),
        (lambda x: x, {"estimator": "monte-carlo", "samples": 0}, "samples must be at least 1"),
        (lambda x: x, {"representation": "sparse"}, "representation='sparse' is not known; there is block, dense"),
        (lambda x: x, {"class_dim": 2}, "class_dim=2"),
        (lambda x: x, {"batch_size": 0}, "batch_size must be at least 1, not 0"),
        (lambda x: x, {"sharing": "none"}, "there is expand, reduce"),
        (lambda x: x, {"representation": "dense", "max_memory": "1KB"}, "use representation='ekfac'"),
        (lambda x: [], {}, "empty"),
        (lambda x: iter([x]), {}, "one-shot iterator"),
        (lambda x: x / 0, {}, "NaN or infinity"),
    ],
)
def test_bad_input_is_named(data, options, message):
    net, x = case("mlp")
    with pytest.raises(InputError, match=message):
        bs.fisher(net, data(x), **options)


def test_a_single_logit_is_not_categorical():
    with pytest.raises(InputError, match="of one logit likelihood='bernoulli'"):
        bs.fisher(nn.Linear(3, 1), torch.randn(2, 3))


def test_non_finite_outputs_are_refused_by_example():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x):
            return self.lin(x) / (x[:, :1] - 7.0)

    x = torch.zeros(6, 2)
    x[4] = 7.0
    with pytest.raises(InputError, match="NaN or infinity for example 4"):
        bs.fisher(Bad(), x)


def test_a_batch_of_one_works():
    net, x = case("conv2d")
    for representation in ("ekfac", "kfac", "diagonal", "lowrank", "implicit"):
        assert float(bs.fisher(net, x[:1], representation).trace()) > 0


def test_the_model_is_left_as_it_was():
    net, x = case("norms")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state = torch.random.get_rng_state()
    bs.fisher(net, x, estimator="monte-carlo").sample(2, damping=0.1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


def test_a_choice_of_parameters():
    net, x = case("mlp")
    whole = bs.fisher(net, x, "dense")
    part = bs.fisher(net, x, "dense", params="2")
    assert list(part.space.shapes) == ["2.weight", "2.bias"]
    assert relative(part.to_dense(), whole.to_dense()[25:, 25:]) < 1e-10


@pytest.mark.parametrize("drawn", [False, True])
def test_scores_of_a_vocabulary_some_rows_at_a_time(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(7, 11, generator=g, dtype=torch.float64)
    u = torch.rand(3, 7, generator=g, dtype=torch.float64)
    y = torch.randint(0, 11, (1, 7), generator=g)
    counted = torch.tensor([True, True, False, True, True, True, True])
    p = torch.softmax(z, -1)
    labels = (u[..., None] > p.cumsum(-1)).sum(-1) if drawn else y
    truth = (torch.nn.functional.one_hot(labels, 11) - p) * counted[:, None]
    for entries in (1, 30, 10**6):
        monkeypatch.setattr(vocabulary, "ENTRIES", {"cpu": entries})
        found = vocabulary.scores(z, None if drawn else y, u if drawn else None, counted)
        assert relative(found, truth) < 1e-12


def test_classes_first_and_last_draw_the_same_labels() -> None:
    z = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # [n, P, c]
    u = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    last = Categorical(OutputShape(6, 5, True)).drawn_scores(z.flatten(1), None, u).view(2, 4, 5, 6)
    first = Categorical(OutputShape(6, 5, False)).drawn_scores(z.mT.flatten(1), None, u).view(2, 4, 6, 5)
    assert relative(last.mT, first) < 1e-12


def test_many_backward_passes_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    import biascope as bs
    from biascope.curvature import build

    monkeypatch.setattr(build, "MANY_PASSES", 3)
    net, x = torch.nn.Linear(3, 5), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="takes 4 backward passes per example"):
        bs.fisher(net, x)
