"""SuperNat: its recurrence from the definition, the optimality behind it, and the demonstration of check 30."""

import pytest
import torch
from scipy.optimize import minimize

import biascope as bs
from biascope.support.errors import InputError
from optim.optim_oracle import error, rng


def demo(seed, n=50, d=10, noise=0.1, projector=True, test=1000):
    """phi ~ N(0, 1) carries the signal, d noise features carry the label noise; test targets are clean."""
    r = rng(seed)
    draw = lambda *shape: torch.randn(*shape, generator=r, dtype=torch.float64)  # noqa: E731
    phi, phi_noise = draw(n, 1), draw(n, d) / d**0.5
    P = phi_noise @ (torch.linalg.pinv(phi_noise) if projector else phi_noise.T)
    y = phi[:, 0] + P @ draw(n) * noise**0.5
    phi_test, noise_test = draw(test, 1), draw(test, d) / d**0.5
    return torch.cat([phi, phi_noise], 1), y, torch.cat([phi_test, noise_test], 1), phi_test[:, 0]


def gradient_descent(Phi, y, lr, steps):
    w = torch.zeros(Phi.shape[1], dtype=Phi.dtype)
    for _ in range(steps):
        w = w - lr * Phi.T @ (Phi @ w - y)
    return w


def supernat(Phi, y, lr, steps, **options):
    w = torch.nn.Parameter(torch.zeros(Phi.shape[1], dtype=Phi.dtype))
    opt = bs.optim.SuperNat(w, Phi, lr=lr, **options)
    for _ in range(steps):
        opt.step(Phi @ w.detach() - y)
    return w.detach(), opt


def by_definition(Phi, y, lr, steps, scale=None):
    """GD in features that are reparametrised after every step, with dense matrices; w in the original coordinates."""
    U, _, Vh = torch.linalg.svd(Phi, full_matrices=False)
    M = torch.eye(Phi.shape[1], dtype=Phi.dtype)  # metric M = (A A^T)^-1 of the original coordinates
    w = torch.zeros(Phi.shape[1], dtype=Phi.dtype)
    for _ in range(steps):
        g = Phi @ w - y
        c = U.T @ g
        scale = scale or float(c.abs().max())
        w = w - lr * M @ Phi.T @ g
        nu = scale / c.abs()
        root = Vh.T @ torch.diag(nu.rsqrt()) @ Vh
        M = root @ M @ root
    return w


@pytest.mark.parametrize("scale", ["first", 3.0])
def test_recurrence(scale):
    Phi, y, _, _ = demo(0)
    lr = float(1 / torch.linalg.eigvalsh(Phi.T @ Phi)[-1])
    w, opt = supernat(Phi, y, lr, 20, scale=scale)
    assert error(w, by_definition(Phi, y, lr, 20, None if scale == "first" else scale)) < 1e-8
    assert opt.eigenvalues.shape == (11,)


def test_the_rescaling_is_the_minimum():
    """nu_j = kappa / |c_j| minimises ||dw||_A ||A^-1 Phi^T||_F, and the value is eta sum_j lam_j |c_j| (check 25)."""
    lam, c = torch.rand(5, generator=rng(1)).double() + 0.1, torch.randn(5, generator=rng(2)).double()

    def value(log_nu):
        nu = torch.as_tensor(log_nu).exp()
        return float(((nu * lam * c**2).sum() * (lam / nu).sum()).sqrt())

    best = minimize(value, [0.0] * 5, method="Nelder-Mead", options={"maxiter": 20000, "maxfev": 20000, "fatol": 1e-14})
    assert best.fun == pytest.approx(float((lam * c.abs()).sum()), rel=1e-4)
    assert value((1 / c.abs()).log()) == pytest.approx(float((lam * c.abs()).sum()), rel=1e-12)


def test_gradients_from_backward_are_the_same():
    Phi, y, _, _ = demo(0)
    lr = float(1 / torch.linalg.eigvalsh(Phi.T @ Phi)[-1])
    w, _ = supernat(Phi, y, lr, 10)
    v = torch.nn.Parameter(torch.zeros(11, dtype=torch.float64))
    opt = bs.optim.SuperNat(v, Phi, lr=lr)
    for _ in range(10):
        opt.zero_grad()
        (0.5 * (Phi @ v - y).square().sum()).backward()
        opt.step()
    assert error(v.detach(), w) < 1e-8


def test_resume():
    Phi, y, _, _ = demo(0)
    whole, _ = supernat(Phi, y, 0.01, 10)
    w, half = supernat(Phi, y, 0.01, 5)
    v = torch.nn.Parameter(w.clone())
    again = bs.optim.SuperNat(v, Phi, lr=1.0)
    again.load_state_dict(half.state_dict())
    for _ in range(5):
        again.step(Phi @ v.detach() - y)
    assert torch.equal(v.detach(), whole)


@pytest.mark.parametrize("scale", ["first", "max_residual", "keep_top", "keep_trace", 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("stop", [0, 5])
def test_a_state_taken_over_at_any_step_goes_on_bit_for_bit(scale, dtype, stop):
    """torch's own loading makes a rule's name a text that no rule has, and the ratios those of w's precision."""
    Phi, y, _, _ = demo(1)
    lr = 0.3 / float(torch.linalg.eigvalsh(Phi.T @ Phi)[-1])

    def train(break_at):
        w = torch.nn.Parameter(torch.zeros(Phi.shape[1], dtype=dtype))
        opt = bs.optim.SuperNat(w, Phi, lr=lr, scale=scale)
        for i in range(10):
            if i == break_at:
                saved, w = opt.state_dict(), torch.nn.Parameter(w.detach().clone())
                opt = bs.optim.SuperNat(w, Phi, lr=lr, scale=scale)
                opt.load_state_dict(saved)
            if i % 2:  # by w.grad
                w.grad = (Phi.T @ (Phi @ w.detach().double() - y)).to(dtype)
                opt.step()
            else:
                opt.step(Phi @ w.detach().double() - y)
        return w.detach()

    assert torch.equal(train(stop), train(None))


def test_a_state_of_other_features_is_refused():
    w = torch.nn.Parameter(torch.zeros(3))
    opt = bs.optim.SuperNat(w, torch.eye(5, 3), lr=0.1)
    few = bs.optim.SuperNat(torch.nn.Parameter(torch.zeros(2)), torch.eye(5, 2), lr=0.7)
    with pytest.raises(InputError, match=r"ratio is \[2\], these features have 3 modes"):
        opt.load_state_dict(few.state_dict())
    odd = opt.state_dict()
    odd["state"][0] = {**odd["state"][0], "scale": "largest"}
    with pytest.raises(InputError, match="scale='largest'"):
        opt.load_state_dict(odd)
    assert opt.param_groups[0]["lr"] == 0.1
    assert opt.state[w]["scale"] == "first"


@pytest.mark.parametrize("projector", [True, False])
def test_supernat_freezes_the_noise_that_gradient_descent_fits(projector):
    """Check 30: the final clean test error is below gradient descent's in at least 18 of 20 seeds."""
    wins, ours, theirs = 0, [], []
    for seed in range(20):
        Phi, y, Phi_test, y_test = demo(seed, projector=projector)
        lr = float(1 / torch.linalg.eigvalsh(Phi.T @ Phi)[-1])
        w, _ = supernat(Phi, y, lr, 1000)
        ours.append(float((Phi_test @ w - y_test).square().mean()))
        theirs.append(float((Phi_test @ gradient_descent(Phi, y, lr, 1000) - y_test).square().mean()))
        wins += ours[-1] < theirs[-1]
    assert wins >= 18, (wins, sum(ours) / 20, sum(theirs) / 20)


def test_bad_input():
    w = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(InputError, match="disagree"):
        bs.optim.SuperNat(w, torch.zeros(5, 4), lr=0.1)
    with pytest.raises(InputError, match="NaN"):
        bs.optim.SuperNat(w, torch.full((5, 3), float("nan")), lr=0.1)
    with pytest.raises(InputError, match=r"lr=.*a finite number above 0"):
        bs.optim.SuperNat(w, torch.ones(5, 3), lr=0.0)
    for bad in (float("inf"), float("nan"), -1.0):
        with pytest.raises(InputError, match=r"lr=.*a finite number above 0"):
            bs.optim.SuperNat(w, torch.ones(5, 3), lr=bad)
        with pytest.raises(InputError, match=r"scale=.*a finite number above 0"):
            bs.optim.SuperNat(w, torch.ones(5, 3), lr=0.1, scale=bad)
    opt = bs.optim.SuperNat(w, torch.eye(5, 3), lr=0.1)
    with pytest.raises(InputError, match="needs the gradient"):
        opt.step()
    with pytest.raises(InputError, match="has 4 entries, not 5"):
        opt.step(torch.zeros(4))
    with pytest.raises(InputError, match="the gradient has a NaN"):
        opt.step(torch.full((5,), float("inf")))
    assert torch.equal(w, torch.zeros(3))
