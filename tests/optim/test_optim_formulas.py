"""One step against the dense formula, in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import biascope as bs
from biascope.curvature import kronecker
from biascope.optim import EKFAC
from optim.optim_oracle import (
    backward,
    conv,
    conv_data,
    dense_steps,
    error,
    factors,
    homogeneous,
    mlp,
    mlp_data,
    moved,
    per_example,
    rng,
    seeded,
    snapshot,
)

CASES = {"mlp": (mlp, mlp_data), "conv": (conv, conv_data)}


def step_error(net, opt, x, y, oracle, lr):
    before = snapshot(net)
    backward(net, x, y)
    opt.step()
    step = moved(net, before, lr)
    return max(error(homogeneous(net, step, layer), V) for layer, V in oracle.items())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["plain", "deep"])
def test_ekfac_step_is_the_dense_formula(name, mode):
    net, (x, y) = CASES[name][0](), CASES[name][1]()
    opt = bs.optim.EKFAC(net, lr=0.3, damping=0.01, damping_mode=mode)
    assert step_error(net, opt, x, y, dense_steps(net, x, y, "ekfac", 0.01, mode), 0.3) < 1e-10


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["factored", "exact"])
def test_kfac_step_is_the_inverse_of_the_kronecker_product(name, mode):
    net, (x, y) = CASES[name][0](), CASES[name][1]()
    opt = bs.optim.KFAC(net, lr=0.3, damping=0.01, damping_mode=mode)
    assert step_error(net, opt, x, y, dense_steps(net, x, y, "kfac", 0.01, mode), 0.3) < 1e-10


def test_kfac_is_B_inverse_G_A_inverse():
    """Without the Kronecker product, from the definition (4.2.10)."""
    net, (x, y) = mlp(), mlp_data(40)
    A, B = (f[0] for f in factors(net, x, y)["0"])
    kfac = bs.optim.KFACPreconditioner(net, damping=1e-12)
    backward(net, x, y)
    G = torch.cat([net[0].weight.grad, net[0].bias.grad[:, None]], 1)
    kfac.precondition()
    D = torch.cat([net[0].weight.grad, net[0].bias.grad[:, None]], 1)
    assert error(D, torch.linalg.inv(B) @ G @ torch.linalg.inv(A)) < 1e-3  # the rest is damping
    assert error(B @ D @ A, G) < 1e-4


def test_the_metric_is_the_second_moment_of_the_individual_losses_with_true_labels():
    """The library's empirical Fisher, built from the labels, is the same operator."""
    net, (x, y) = mlp(), mlp_data()
    opt = bs.optim.EKFAC(net, lr=0.0, damping=0.01)
    backward(net, x, y)
    opt.step()
    F_emp = bs.fisher(net, [(x, y)], "ekfac", "categorical", "empirical", precision="float64")
    for piece in F_emp.pieces:
        mine = opt.preconditioner.pieces()[piece.names[0]]
        assert error(mine.to_dense(), piece.to_dense()) < 1e-10


def test_deep_damping_identity():
    """eps' = (S_A + r)(S_B + r) - S_A S_B (check 12), read off how a gradient shrinks in the basis."""
    net, (x, y) = mlp(), mlp_data()
    eps = 0.04
    opt = bs.optim.EKFACPreconditioner(net, damping=eps, damping_mode="deep")
    backward(net, x, y)
    G = opt.units[0].gradient()
    opt.precondition()
    D = opt.units[0].gradient()
    E = opt.pieces()["0.weight"]
    ratio = E.rotate(E.layout.pack(G)) / E.rotate(E.layout.pack(D))
    r = eps**0.5
    expected = torch.kron(E.s_B[0] + r, E.s_A[0] + r) - torch.kron(E.s_B[0], E.s_A[0])
    assert torch.allclose(ratio.flatten() - E.s.flatten(), expected, rtol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_loss_reduction_sum_sees_the_same_metric(name):
    net, (x, y) = CASES[name][0](), CASES[name][1]()
    opt = bs.optim.EKFAC(net, lr=0.3 / len(x), damping=0.01, loss_reduction="sum")
    oracle = dense_steps(net, x, y, "ekfac", 0.01)
    before = snapshot(net)
    F.cross_entropy(net(x), y, reduction="sum").backward()
    opt.step()
    step = moved(net, before, 0.3)
    assert max(error(homogeneous(net, step, layer), V) for layer, V in oracle.items()) < 1e-10


def test_between_refreshes_the_basis_stays_and_the_scalings_follow():
    net, (x, y), (x2, y2) = mlp(), mlp_data(), mlp_data(seed=9)
    opt = bs.optim.EKFAC(net, lr=0.1, damping=0.01, refresh_every=2)
    frozen = factors(net, x, y)
    backward(net, x, y)
    opt.step()
    opt.zero_grad()
    assert step_error(net, opt, x2, y2, dense_steps(net, x2, y2, "ekfac", 0.01, basis_from=frozen), 0.1) < 1e-10
    opt.zero_grad()
    assert step_error(net, opt, x2, y2, dense_steps(net, x2, y2, "ekfac", 0.01), 0.1) < 1e-10  # refreshed


def test_kfac_between_refreshes_keeps_the_whole_metric():
    net, (x, y), (x2, y2) = mlp(), mlp_data(), mlp_data(seed=9)
    opt = bs.optim.KFAC(net, lr=0.1, damping=0.01, refresh_every=2, factor_decay=0.0, damping_mode="exact")
    frozen = factors(net, x, y)
    backward(net, x, y)
    opt.step()
    opt.zero_grad()
    assert step_error(net, opt, x2, y2, dense_steps(net, x2, y2, "kfac", 0.01, "exact", frozen), 0.1) < 1e-10


def test_running_average_of_the_factors():
    """Means at first (1/2 after two steps), then the decay; the basis follows at the refresh."""
    net, (x, y), (x2, y2) = mlp(), mlp_data(), mlp_data(seed=9)
    opt = bs.optim.KFAC(net, lr=0.0, damping=0.01, refresh_every=1, factor_decay=0.9)
    for data in ((x, y), (x2, y2)):
        opt.zero_grad()
        backward(net, *data)
        opt.step()
    (A1, B1), (A2, B2) = factors(net, x, y)["0"], factors(net, x2, y2)["0"]
    c = opt.preconditioner.curvatures["0.weight"]
    assert error(c.A, (A1 + A2) / 2) < 1e-12
    assert error(c.B, (B1 + B2) / 2) < 1e-12


def test_running_scalings_recurrence():
    """EKFAC-ra: s starts at S_B S_A, then s <- 0.75 s + 0.25 m G^2 of the mean gradient, every step."""
    net, (x, y), (x2, y2) = mlp(), mlp_data(), mlp_data(11, seed=9)
    opt = bs.optim.EKFAC(net, lr=0.0, damping=0.01, scalings="running", refresh_every=10)
    A, B = (f[0] for f in factors(net, x, y)["0"])
    for data in ((x, y), (x2, y2)):
        opt.zero_grad()
        backward(net, *data)
        opt.step()
    E = opt.preconditioner.pieces()["0.weight"]
    U_B, U_A = E.U_B[0], E.U_A[0]
    assert error(U_B @ torch.diag(E.s_B[0]) @ U_B.T, B) < 1e-10
    assert error(U_A @ torch.diag(E.s_A[0]) @ U_A.T, A) < 1e-10
    s = torch.outer(E.s_B[0], E.s_A[0])
    for data in ((x, y), (x2, y2)):
        G = homogeneous(net, {k: g.mean(0) for k, g in per_example(net, *data).items()}, "0")[0]
        s = 0.75 * s + 0.25 * len(data[0]) * (U_B.T @ G @ U_A).square()
    assert error(E.s[0, 0], s) < 1e-10
    assert not opt.preconditioner.watcher.capture  # nothing needs to be kept until the next refresh


def test_running_scalings_projected_into_the_new_basis():
    """The diagonal of the old metric in the new basis: its trace is kept, and it equals the dense computation."""
    net, (x, y), (x2, y2) = mlp(), mlp_data(), mlp_data(11, seed=9)
    options = {"lr": 0.0, "damping": 0.01, "scalings": "running", "refresh_every": 1}
    opt = bs.optim.EKFAC(net, on_refresh="project", rescale_by_batch=False, decay=0.5, **options)
    backward(net, x, y)
    opt.step()
    old = opt.preconditioner.pieces()["0.weight"]
    opt.zero_grad()
    backward(net, x2, y2)
    opt.step()
    new = opt.preconditioner.pieces()["0.weight"]
    Q = torch.kron(new.U_B[0], new.U_A[0])
    P = torch.kron(old.U_B[0], old.U_A[0])
    projected = (Q.T @ P @ torch.diag(old.s.flatten()) @ P.T @ Q).diagonal()
    G = homogeneous(net, {k: g.mean(0) for k, g in per_example(net, x2, y2).items()}, "0")[0]
    square = (new.U_B[0].T @ G @ new.U_A[0]).square().flatten()
    assert error(new.s.flatten(), 0.5 * projected + 0.5 * square) < 1e-10


def test_batch_of_one_is_exact():
    """One example: the metric is g g^T, so that the damped step is g / (|g|^2 + eps) in every layer."""
    net, (x, y) = mlp(), mlp_data(1)
    opt = bs.optim.EKFAC(net, lr=1.0, damping=0.5)
    before = snapshot(net)
    backward(net, x, y)
    grads = {n: p.grad.clone() for n, p in net.named_parameters()}
    opt.step()
    step = moved(net, before, 1.0)
    for layer in ("0", "2", "4"):
        g = homogeneous(net, grads, layer)
        assert error(homogeneous(net, step, layer), g / (g.square().sum() + 0.5)) < 1e-10


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class Tokens(nn.Module):
    """A shared linear layer, with the tokens as a dimension or folded into the batch."""

    def __init__(self, fold):
        super().__init__()
        self.inner, self.head, self.fold = nn.Linear(4, 5), nn.Linear(5, 3), fold

    def forward(self, x):
        h = self.inner(x.reshape(-1, 4)).reshape(*x.shape[:2], 5) if self.fold else self.inner(x)
        return self.head(torch.tanh(h).mean(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)).sum(1))


class TimeMajor(nn.Module):
    """Layers that see positions first and examples second, as in a transformer without batch_first."""

    def __init__(self, first):
        super().__init__()
        self.first, self.head = first, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x.transpose(0, 1))).mean(0))


def tokens(n=6):
    return torch.randn(n, 3, 4, generator=rng(1), dtype=torch.float64)


def words(n=6):
    return torch.randint(7, (n, 5), generator=rng(1))


MORE = {
    "reused": (Twice, lambda: mlp_data()[0]),
    "tokens": (lambda: Tokens(False), tokens),
    "folded": (lambda: Tokens(True), tokens),
    "embedding": (Words, words),
    "time-major": (lambda: TimeMajor(nn.Linear(4, 4)), tokens),
    "time-major embedding": (lambda: TimeMajor(nn.Embedding(7, 4)), words),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3, dilation=2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
        lambda: torch.randn(5, 2, 8, generator=rng(4), dtype=torch.float64),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
        lambda: torch.randn(5, 1, 3, 3, 3, generator=rng(4), dtype=torch.float64),
    ),
}


def test_what_could_be_time_major_is_asked_about():
    net = seeded(lambda: TimeMajor(nn.Linear(4, 4)))
    opt = bs.optim.EKFAC(net, lr=1.0, damping=0.05)
    with pytest.warns(UserWarning, match=r"\[4, 2, 4\] of first.weight has 2 examples along its second"):
        backward(net, torch.randn(2, 4, 4, generator=rng(1), dtype=torch.float64), torch.tensor([0, 1]))
    opt.step()


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_other_layers_agree_with_the_empirical_fisher(name, sharing):
    """The curvature room's EKFAC, itself tested against brute force, as the oracle for layers of every kind."""
    make, data = MORE[name]
    net, x = seeded(make), data()
    y = torch.randint(3, (len(x),), generator=rng(7))
    opt = bs.optim.EKFAC(net, lr=1.0, damping=0.05, sharing=sharing)
    oracle = bs.fisher(net, [(x, y)], "ekfac", "categorical", "empirical", precision="float64", sharing=sharing)
    before = snapshot(net)
    backward(net, x, y)
    grads = {n: p.grad.clone() for n, p in net.named_parameters()}
    opt.step()
    expected = oracle.space.unflatten(oracle.solve(oracle.space.flatten(grads), damping=0.05))
    step = moved(net, before, 1.0)
    assert {opt.coverage()[n] for n in step} == {"ekfac"}
    for key in step:
        assert error(step[key], expected[key]) < 1e-10, key


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_padding_modes(mode):
    """The module pads its input itself; so must the factors. The trace of EKFAC is exact."""
    padded = {"padding": 1, "padding_mode": mode}
    net = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3, **padded), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3)))
    x, y = conv_data()
    rows = homogeneous(net, per_example(net, x, y), "0")
    opt = bs.optim.EKFAC(net, lr=0.0, damping=0.05)
    backward(net, x, y)
    opt.step()
    trace = opt.preconditioner.pieces()["0.weight"].trace()
    assert float(trace) == pytest.approx(float(rows.square().sum() / len(x)), rel=1e-10)


def test_sua_scalings_are_exact_in_their_basis_and_the_bias_stands_alone():
    net, (x, y) = conv(), conv_data()
    opt = bs.optim.EKFAC(net, lr=0.0, damping=0.05, sua=True)
    rows = per_example(net, x, y)
    backward(net, x, y)
    opt.step()
    E = opt.preconditioner.pieces()["2.weight"]  # [1, 4, 3, 4]: offsets apart
    g = rows["2.weight"].flatten(3)  # [n, o, c, e]
    s = torch.einsum("op,nocE,cd->npdE", E.U_B[0], g, E.U_A[0]).square().mean(0)
    assert error(E.s[0], s.permute(2, 0, 1)) < 1e-10
    bias = opt.preconditioner.pieces()["2.bias"]
    assert error(bias.to_dense(), rows["2.bias"].T @ rows["2.bias"] / len(x)) < 1e-10
    assert "SUA" in str(opt.coverage())


def test_the_preconditioner_and_torch_sgd_are_the_optimiser_bit_for_bit():
    for kind, pre in ((bs.optim.EKFAC, bs.optim.EKFACPreconditioner), (bs.optim.KFAC, bs.optim.KFACPreconditioner)):
        one, two = mlp(), mlp()
        opt = kind(one, lr=0.1, momentum=0.9, weight_decay=0.01, damping=0.01, refresh_every=2)
        sgd = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)
        edit = pre(two, damping=0.01, refresh_every=2)
        for i in range(5):
            x, y = mlp_data(seed=i)
            opt.zero_grad()
            backward(one, x, y)
            opt.step()
            sgd.zero_grad()
            backward(two, x, y)
            edit.precondition()
            sgd.step()
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters()))


def test_gradient_accumulation_joins_the_examples():
    """Two halves with the loss divided by two: the step of the whole batch."""
    one, two, (x, y) = conv(), conv(), conv_data(6)
    whole, parts = (bs.optim.EKFAC(net, lr=0.2, damping=0.01) for net in (one, two))
    backward(one, x, y)
    whole.step()
    for s in (slice(0, 3), slice(3, 6)):
        (F.cross_entropy(two(x[s]), y[s]) / 2).backward()
    parts.step()
    assert max(error(q, p) for p, q in zip(one.parameters(), two.parameters())) < 1e-12


@pytest.mark.parametrize(("refresh", "same"), [(1, True), (50, False)])
def test_in_a_null_space_of_the_factors_the_eigenbasis_is_arbitrary(monkeypatch, refresh, same):
    """Why trainings on two devices part: five examples leave null spaces, in which any basis is an eigenbasis.

    With a basis of the same batch, gradients have no part there and it does not matter. From the second step on an old
    basis does: gradients reach into the null space, where a diagonal in another basis is another metric.
    """
    real = kronecker.eigh_of

    def turned(matrices):
        pairs = real(matrices)
        for s, u in ((s, u) for values, U in pairs for s, u in zip(values, U)):
            null = s <= 1e-12 * s.max()
            k = int(null.sum())
            u[:, null] = u[:, null] @ torch.linalg.qr(torch.randn(k, k, generator=rng(9), dtype=u.dtype))[0]
        return pairs

    def trained(steps):
        net, (x, y) = conv(), conv_data()
        opt = EKFAC(net, lr=0.1, damping=0.01, refresh_every=refresh)
        for _ in range(steps):
            opt.zero_grad()
            backward(net, x, y)
            opt.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    plain = trained(1), trained(3)
    monkeypatch.setattr(kronecker, "eigh_of", turned)
    assert error(trained(1), plain[0]) < 1e-9
    assert (error(trained(3), plain[1]) < 1e-9) == same
    if not same:
        assert error(trained(3), plain[1]) > 1e-4
