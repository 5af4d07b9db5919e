"""Kernel regression, gradient flow and descent, modes and RKHS norms against weight space and explicit iteration."""

import math

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.kernels import open_kernel
from biascope.kernels.regression import gradient_step_modes, steps_to_loss, time_constants
from biascope.kernels.rkhs import generalization_bound
from biascope.support.errors import InputError

F64 = torch.float64


def make(n=8, c=2, m=5, seed=0):
    gen = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, c)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=F64) / p.shape[-1] ** 0.5)
    x, x2 = torch.randn(n, 3, generator=gen, dtype=F64), torch.randn(m, 3, generator=gen, dtype=F64)
    return net, x, x2, torch.randn(n, c, generator=gen, dtype=F64)


def features(net, x):
    """Dense Jacobian [n c, p] by autograd alone."""
    params = {k: p.detach() for k, p in net.named_parameters()}
    jac = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(params)
    return torch.cat([j.flatten(2) for j in jac.values()], -1).flatten(0, 1)


# ------------------------------------------------------------------------------------------------------------- ridge


def test_dual_ridge_is_primal_ridge_with_n_lambda():
    net, x, x2, y = make()
    Phi, Phi2, lam, n = features(net, x), features(net, x2), 0.03, len(x)
    w = torch.linalg.solve(Phi.T @ Phi + lam * n * torch.eye(Phi.shape[1], dtype=F64), Phi.T @ y.flatten())
    fit = bs.kernel_regression(bs.ntk(net, x), y, ridge=n * lam, K_test=bs.ntk(net, x2, x))
    torch.testing.assert_close(fit.train, (Phi @ w).view(8, 2), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(fit.test, (Phi2 @ w).view(5, 2), rtol=1e-9, atol=1e-10)
    assert fit.rkhs_norm_squared == pytest.approx(float(w @ w), rel=1e-9)
    hat = Phi @ torch.linalg.solve(Phi.T @ Phi + lam * n * torch.eye(Phi.shape[1], dtype=F64), Phi.T)
    assert fit.degrees_of_freedom == pytest.approx(float(hat.trace()), rel=1e-9)
    assert fit.residual == pytest.approx(float((Phi @ w - y.flatten()).norm()), rel=1e-9)


def test_ridgeless_is_the_shortest_interpolation():
    net, x, x2, y = make()
    Phi, Phi2 = features(net, x), features(net, x2)
    assert Phi.shape[1] > Phi.shape[0]
    delta = torch.linalg.pinv(Phi) @ y.flatten()
    K = bs.ntk(net, x)
    fit = bs.kernel_regression(K, y, K_test=bs.ntk(net, x2, x))
    torch.testing.assert_close(fit.train, y, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(fit.test, (Phi2 @ delta).view(5, 2), rtol=1e-7, atol=1e-8)
    # ||theta - theta0||^2 = y^T K^+ y = RKHS norm, and the weights are J^T a
    assert fit.rkhs_norm_squared == pytest.approx(float(delta @ delta), rel=1e-8)
    assert bs.rkhs_norm(K, y).squared == pytest.approx(float(delta @ delta), rel=1e-8)
    weights = bs.Jacobian(net, x).T @ fit.coefficients
    torch.testing.assert_close(weights.as_subclass(torch.Tensor), delta, rtol=1e-7, atol=1e-8)
    # any other interpolating weights are longer
    gen = torch.Generator().manual_seed(0)
    z = torch.randn(Phi.shape[1], generator=gen, dtype=F64)
    null = z - torch.linalg.pinv(Phi) @ (Phi @ z)
    assert float((Phi @ (delta + null) - y.flatten()).norm()) < 1e-8
    assert float((delta + null).norm()) > float(delta.norm())


def test_singular_kernels_give_the_projection():
    gen = torch.Generator().manual_seed(1)
    Phi, y = torch.randn(9, 3, generator=gen, dtype=F64), torch.randn(9, generator=gen, dtype=F64)
    fit = bs.kernel_regression(Phi @ Phi.T, y)
    w = torch.linalg.lstsq(Phi, y[:, None]).solution[:, 0]
    torch.testing.assert_close(fit.train, Phi @ w, rtol=1e-9, atol=1e-10)
    assert fit.rank == 3
    assert fit.degrees_of_freedom == pytest.approx(3, rel=1e-10)
    assert fit.rkhs_norm_squared == pytest.approx(float(w @ w), rel=1e-9)
    norm = bs.rkhs_norm(Phi @ Phi.T, y)
    assert norm.outside == pytest.approx(float((y - Phi @ w).square().sum() / y.square().sum()), rel=1e-9)


def test_the_start_of_the_network_is_taken_off_and_put_back():
    net, x, x2, y = make()
    K, Kt = bs.ntk(net, x), bs.ntk(net, x2, x)
    f0, f02 = net(x).detach(), net(x2).detach()
    moved = bs.kernel_regression(K, y, 0.1, Kt, f0, f02)
    plain = bs.kernel_regression(K, y - f0, 0.1, Kt)
    torch.testing.assert_close(moved.train, f0 + plain.train)
    torch.testing.assert_close(moved.test, f02 + plain.test)


def test_class_indices_and_tensors():
    net, x, x2, _ = make()
    y = torch.arange(8) % 2
    K, Kt = bs.ntk(net, x), bs.ntk(net, x2, x)
    one = bs.kernel_regression(K, y, 0.1, Kt)
    two = bs.kernel_regression(K.tensor, nn.functional.one_hot(y, 2).double(), 0.1, Kt.tensor)
    torch.testing.assert_close(one.test, two.test)
    trace = bs.ntk(net, x, outputs="trace")
    assert bs.kernel_regression(trace, y, 0.1).train.shape == (8, 2)
    assert bs.kernel_regression(trace, y * 2 - 1, 0.1).train.shape == (8,)


# ------------------------------------------------------------------------------------------------- flow and descent


def test_gradient_descent_equals_descent_in_weight_space():
    net, x, x2, y = make()
    Phi, Phi2 = features(net, x), features(net, x2)
    f0, f02 = net(x).detach(), net(x2).detach()
    lr = 1.5 / float(torch.linalg.eigvalsh(Phi @ Phi.T)[-1])
    w = torch.zeros(Phi.shape[1], dtype=F64)
    curve = bs.gradient_descent(bs.ntk(net, x), y, range(31), lr, bs.ntk(net, x2, x), f0, f02)
    for t in range(31):
        f = f0.flatten() + Phi @ w
        torch.testing.assert_close(curve.train[t].flatten(), f, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(curve.test[t].flatten(), f02.flatten() + Phi2 @ w, rtol=1e-10, atol=1e-11)
        assert float(curve.loss[t]) == pytest.approx(float(0.5 * (f - y.flatten()).square().sum()), rel=1e-10)
        w = w - lr * Phi.T @ (f - y.flatten())


def test_residuals_decay_mode_by_mode():
    net, x, _, y = make()
    K = bs.ntk(net, x)
    lam, U = torch.linalg.eigh(K.matrix())
    r0 = U.T @ y.flatten()
    lr, t = 1.0 / float(lam[-1]), 7
    after = U.T @ (y - bs.gradient_descent(K, y, t, lr).train[0]).flatten()
    torch.testing.assert_close(after, (1 - lr * lam) ** t * r0, rtol=1e-9, atol=1e-12)
    after = U.T @ (y - bs.gradient_flow(K, y, 0.4).train[0]).flatten()
    torch.testing.assert_close(after, torch.exp(-lam * 0.4) * r0, rtol=1e-9, atol=1e-12)


def test_flow_is_the_limit_of_small_steps_and_ends_in_regression():
    net, x, x2, y = make()
    K, Kt = bs.ntk(net, x), bs.ntk(net, x2, x)
    flow = bs.gradient_flow(K, y, [0.0, 0.5], Kt)
    assert flow.train[0].abs().max() == 0
    assert flow.test[0].abs().max() == 0
    small = [bs.gradient_descent(K, y, s, 0.5 / s, Kt).test[0] for s in (2000, 4000)]
    errors = [float((f - flow.test[1]).norm()) for f in small]
    assert errors[1] < 0.6 * errors[0] < 1e-2
    end = bs.gradient_flow(K, y, 1e12, Kt)
    torch.testing.assert_close(end.test[0], bs.kernel_regression(K, y, K_test=Kt).test, rtol=1e-6, atol=1e-6)


def test_flow_on_a_singular_kernel_moves_only_what_it_can():
    K = torch.diag(torch.tensor([2.0, 0.0], dtype=F64))
    Kt = torch.tensor([[1.0, 3.0]], dtype=F64)  # the second column is not in the range of K
    flow = bs.gradient_flow(K, torch.ones(2, dtype=F64), 1.5, Kt)
    assert flow.train[0].tolist() == pytest.approx([1 - math.exp(-3), 0])
    assert float(flow.test[0]) == pytest.approx((1 - math.exp(-3)) / 2 + 3 * 1.5)  # phi(0) = t
    step = bs.gradient_descent(K, torch.ones(2, dtype=F64), 5, 0.3, Kt)
    assert float(step.test[0]) == pytest.approx((1 - 0.4**5) / 2 + 3 * 1.5)


def test_steps_to_loss_is_the_first_step_at_or_below():
    net, x, _, y = make()
    K = bs.ntk(net, x)
    lr = 1 / float(K.eigh(1).values[0])
    goal = 0.3 * float(0.5 * y.square().sum())
    steps = steps_to_loss(K, y, goal)
    losses = bs.gradient_descent(K, y, [steps - 1, steps], lr).loss
    assert float(losses[0]) > goal >= float(losses[1])
    singular = torch.diag(torch.tensor([1.0, 0.0], dtype=F64))
    assert steps_to_loss(singular, torch.ones(2), 0.4) == math.inf
    assert steps_to_loss(singular, torch.ones(2), 1.5) == 0


# -------------------------------------------------------------------------------------------------------------- modes


def test_one_step_of_the_linearised_model_is_the_sum_of_its_modes():
    net, x, _, y = make()
    params = {k: p.detach() for k, p in net.named_parameters()}

    def f(p):
        return torch.func.functional_call(net, p, (x,))

    out, pull = torch.func.vjp(f, params)
    grad, lr = out - y, 0.05
    (g,) = pull(grad)
    change = torch.func.jvp(f, (params,), ({k: -lr * v for k, v in g.items()},))[1]
    step = gradient_step_modes(bs.ntk(net, x), grad, lr)
    torch.testing.assert_close(step.change, change, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(step.vectors @ step.coefficients, change.flatten(), rtol=1e-10, atol=1e-12)
    lam, U = torch.linalg.eigh(bs.ntk(net, x).matrix())
    one = -lr * lam[-1] * (U[:, -1] @ grad.flatten())
    assert abs(float(step.coefficients[0])) == pytest.approx(abs(float(one)), rel=1e-10)


def test_time_constants_have_the_inverse():
    lam = torch.tensor([2.0, 1.0, 0.1, 0.0], dtype=F64)
    tau = time_constants(lam)
    assert tau.tolist() == pytest.approx([0, -1 / math.log(0.5), -1 / math.log(0.95), math.inf])
    K, y = torch.diag(lam), torch.ones(4, dtype=F64)
    residual = 1 - bs.gradient_descent(K, y, 10, 0.5).train[0, 2]
    assert float(residual) == pytest.approx(math.exp(-10 / float(tau[2])), rel=1e-10)
    assert time_constants(torch.tensor([1.0, 0.5]), lr=2.0).tolist() == [math.inf, 0.0]
    with pytest.raises(InputError, match="between 0 and 2"):
        time_constants(lam, lr=1.5)


# --------------------------------------------------------------------------------------------------------------- RKHS


def test_rkhs_bound_is_tight_for_an_eigenvector_and_strict_for_a_mixture():
    net, x, *_ = make()
    K = bs.ntk(net, x)
    lam, U = torch.linalg.eigh(K.matrix())
    single = bs.rkhs_norm(K, 3 * U[:, -2].view(8, 2))
    assert single.squared == pytest.approx(single.lower_bound, rel=1e-8)
    assert single.squared == pytest.approx(9 / float(lam[-2]), rel=1e-8)
    mixed = bs.rkhs_norm(K, (U[:, -1] + U[:, -4]).view(8, 2))
    assert mixed.squared == pytest.approx(float(1 / lam[-1] + 1 / lam[-4]), rel=1e-8)
    assert mixed.squared > 1.01 * mixed.lower_bound
    assert mixed.alpha == pytest.approx(float(lam[-1] + lam[-4]) / 64, rel=1e-10)
    # in the notation of the paper: ||f||_k^2 >= ||f||_2^4 / alpha with averages over the sample
    mean_square = 2 / 8
    assert mixed.lower_bound == pytest.approx(mean_square**2 / mixed.alpha, rel=1e-10)
    assert mixed.condition == pytest.approx(float(lam[-1] / lam[0]), rel=1e-6)


def test_generalization_bound_is_the_rademacher_ball():
    gen = torch.Generator().manual_seed(0)
    X = torch.randn(12, 30, generator=gen, dtype=F64)
    K, y = X @ X.T, torch.randn(12, generator=gen, dtype=F64)
    B = bs.rkhs_norm(K, y).value
    assert generalization_bound(K, y) == pytest.approx(B / 12 * float(K.trace()) ** 0.5, rel=1e-10)
    # exact Rademacher complexity of the ball, E (B / n) ||X^T sigma||, is below it
    sigma = torch.randint(0, 2, (4000, 12), generator=gen).double() * 2 - 1
    assert float((sigma @ X).norm(dim=1).mean()) * B / 12 < generalization_bound(K, y)
    with pytest.raises(InputError, match="either y or norm_squared"):
        generalization_bound(K)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda K, y: bs.kernel_regression(K, y[:3]), "3 labels for 6 examples"),
        (lambda K, y: bs.kernel_regression(K, y * float("nan")), "y has a NaN or infinity"),
        (lambda K, y: bs.kernel_regression(K, y, ridge=-1), "ridge=-1"),
        (lambda K, y: bs.kernel_regression(K, y, K_test=torch.ones(6, 4)), "looks transposed"),
        (lambda K, y: bs.kernel_regression(K, y, K_test=torch.ones(3, 4)), "K_test has 4 columns, expected 6"),
        (lambda K, y: bs.kernel_regression(K, y, f0_test=y), "without K_test"),
        (lambda K, y: bs.kernel_regression(K, y, f0_train=y[:2]), "f0_train has shape"),
        (lambda K, y: bs.kernel_regression(K - 2 * torch.eye(6, dtype=F64), y), "eigenvalues go from -1"),
        (lambda K, y: bs.kernel_regression(K.triu(), y), "symmetric kernel"),
        (lambda K, y: bs.kernel_regression(K[:4], y), "symmetric kernel"),
        (lambda K, y: bs.kernel_regression(K * 0, y), "kernel is zero"),
        (lambda K, y: bs.kernel_regression(K.log(), y), "the kernel has a NaN or infinity"),
        (lambda K, y: bs.kernel_regression(K, torch.tensor([0, 1, 2, 0, 1, -3])), "classes -3 to 2"),
        (lambda K, y: bs.gradient_descent(K, y, 3, lr=10.0), "lr=10 diverges"),
        (lambda K, y: bs.gradient_descent(K, y, 2.5, lr=0.1), "without a fraction"),
        (lambda K, y: bs.gradient_flow(K, y, -1.0), "t must be"),
        (lambda K, y: gradient_step_modes(K, y[:2], 0.1), r"grad has shape \[2\], expected \[6, 1\]"),
        (lambda K, y: steps_to_loss(K, y, 0.0), "loss=0.0"),
    ],
)
def test_bad_input_is_named(call, message):
    K = torch.eye(6, dtype=F64) + torch.full((6, 6), 0.1, dtype=F64).triu(1) * 0
    K[0, 1] = K[1, 0] = 0.1
    if "the kernel has a NaN" in message:
        K = torch.zeros(6, 6, dtype=F64)
    with pytest.raises(InputError, match=message):
        call(K, torch.arange(6).double())


def test_cross_kernels_and_wrong_classes_are_refused():
    net, x, x2, _ = make()
    from biascope.support.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="K\\(x, x2\\)"):
        bs.kernel_regression(bs.ntk(net, x2, x), torch.ones(5, 2))
    with pytest.raises(InputError, match="classes 0 to 5, but the model has outputs 0 to 1"):
        bs.kernel_regression(bs.ntk(net, x), torch.tensor([0, 1, 5, 0, 0, 0, 0, 0]))


# ------------------------------------------------------------------------------------------- what cannot be reached


def test_the_bound_is_infinite_for_targets_outside_of_the_space():
    K = torch.diag(torch.tensor([1.0, 0.0]))
    inside, outside, both = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.01])
    assert generalization_bound(K, inside) == pytest.approx(0.5, rel=1e-6)
    assert bs.rkhs_norm(K, inside).reached
    for y in (outside, both):
        assert not bs.rkhs_norm(K, y).reached
        assert generalization_bound(K, y) == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rounding_of_a_singular_kernel_does_not_make_the_bound_infinite(dtype):
    gen = torch.Generator().manual_seed(0)
    X, w = torch.randn(40, 5, generator=gen, dtype=F64), torch.randn(5, generator=gen, dtype=F64)
    K = (X.to(dtype) @ X.to(dtype).T).to(dtype)
    y = (X @ w).to(dtype)  # ||f||^2 = |w|^2: X has full rank
    truth = float(w.norm()) * float(X.norm()) / 40
    assert generalization_bound(K, y) == pytest.approx(truth, rel=1e-4 if dtype == torch.float32 else 1e-9)
    assert generalization_bound(K, y + torch.randn(40, generator=gen).to(dtype)) == math.inf


def test_the_bound_takes_no_cross_kernels():
    net, x, x2, _ = make(c=1)
    for bad in (bs.ntk(net, x, x2, outputs=0), bs.ntk(net, x, x2, outputs=0).tensor, bs.ntk(net, x, x + 1).tensor):
        with pytest.raises((InputError, NotImplementedError), match="symmetric"):
            generalization_bound(bad, norm_squared=1.0)
    with pytest.raises(InputError, match=r"-1 on its diagonal"):
        generalization_bound(torch.diag(torch.tensor([2.0, -1.0])), norm_squared=1.0)


@pytest.mark.parametrize("outputs", [0, "trace", "sum", "full"])
def test_integers_are_values_for_a_model_with_one_output(outputs, tmp_path):
    net, x, *_ = make(c=1)
    y = torch.arange(8) % 2
    K = bs.ntk(net, x, outputs=outputs, by_layer=True)
    stored = bs.ntk(net, x, outputs=outputs, store=tmp_path / "k")
    K.save(tmp_path / "k.safetensors")
    sketched = bs.sketched_ntk(net, x, outputs=outputs, dim=4096).kernel()
    kernels = [K, stored, open_kernel(tmp_path / "k"), bs.Kernel.load(tmp_path / "k.safetensors"), sketched]
    for k in [*kernels, K.by_layer()["0"]]:
        assert k.alignment(y, False) == k.alignment(y.double(), False)
        assert bs.rkhs_norm(k, y, cutoff=0.1).squared == bs.rkhs_norm(k, y.double(), cutoff=0.1).squared
        assert k.energy_concentration(y, 3) == k.energy_concentration(y.double(), 3)
        assert torch.equal(bs.kernel_regression(k, y, 1.0).train, bs.kernel_regression(k, y.double(), 1.0).train)
    if outputs != "full":  # of a plain matrix nobody knows the model: class indices, as documented
        one_hot = nn.functional.one_hot(y).double()
        assert bs.rkhs_norm(K.tensor, y).squared == bs.rkhs_norm(K.tensor, one_hot).squared
    several = bs.ntk(make(c=2)[0], x, outputs=0)
    assert bs.rkhs_norm(several, y).squared == bs.rkhs_norm(several, nn.functional.one_hot(y)).squared


def test_many_small_steps_lose_no_digits():
    z = 1e-14  # of the slow mode; 1 - z keeps two digits of it
    K, y = torch.diag(torch.tensor([1.0, z], dtype=F64)), torch.tensor([0.0, 1.0], dtype=F64)
    assert steps_to_loss(K, y, 0.5 * math.exp(-2)) == pytest.approx(1 / z, rel=1e-9)  # (1 - z)^(2 t) = exp(-2)
    slow = steps_to_loss(torch.eye(2), torch.ones(2), math.exp(-2), lr=1e-20)
    assert slow == pytest.approx(1e20, rel=1e-9)  # the kernel gets there, however long it takes
    assert steps_to_loss(torch.eye(2, dtype=F64), torch.ones(2), 0.5, lr=2.0) == math.inf  # it goes back and forth


def test_the_time_of_training_by_a_mean():
    """t = 2 lr steps / (n c) on `F.mse_loss`, from the network's own outputs, as the docstring says."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    x, z = (torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (5, 4))
    y = torch.randn(5, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    lin = bs.linearize(net)
    lr, steps = 1e-3, 2000
    sgd = torch.optim.SGD(lin.parameters(), lr=lr)
    for _ in range(steps):
        sgd.zero_grad()
        torch.nn.functional.mse_loss(lin(x), y).backward()
        sgd.step()
    K, K_z = bs.ntk(net, x), bs.ntk(net, z, x)
    flow = bs.gradient_flow(K, y, 2 * lr * steps / y.numel(), K_z, net(x).detach(), net(z).detach())
    moved = (lin(z) - net(z)).norm()
    assert (flow.test[0] - lin(z)).norm() < 1e-3 * moved  # steps of finite length: first order in lr
    assert (flow.train[0] - lin(x)).norm() < 1e-3 * (lin(x) - net(x)).norm()
