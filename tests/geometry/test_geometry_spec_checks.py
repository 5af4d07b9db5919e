"""The checks of the NAD and GIH papers that the other files of this room cover loosely, as tight as they can be had.

Expectations over Gaussian weights of networks that are polynomials in them need no sampling: Gauss-Hermite nodes are
exact. Two nodes (+-1) integrate up to the third power of every weight, three nodes up to the fifth.
"""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from biascope import nets
from biascope.data.fourier import dft_basis
from biascope.ensembles import record
from biascope.geometry import average_geometry, data_second_moment, nads
from biascope.geometry.closed_forms import (
    aliasing_matrix,
    deep_linear_hessians,
    linear_pooling_covariance,
    linear_pooling_mixed,
    mlp_geometry_constant,
)
from biascope.geometry.linear_cnn import (
    dense_head,
    pool_matrix,
    pooled_cnn_evolution,
    pooled_cnn_geometry,
    tap_matrices,
    through_average_pool,
    through_convolution,
)
from biascope.geometry.mixed import MixedDerivative
from biascope.geometry.mlp_theory import mlp_evolution, mlp_evolution_large_dimension
from biascope.geometry.pooling import (
    box_prefilter,
    linear_map_bayes_accuracy,
    pooling_bayes_accuracy,
    pooling_matrix,
)
from biascope.support.errors import InputError

F64 = torch.float64


def nodes(count: int, points: int) -> tuple[Tensor, Tensor]:
    """All combinations of the Gauss-Hermite nodes of `count` standard normal variables, and their weights."""
    at, weight = {2: ([-1.0, 1.0], [0.5, 0.5]), 3: ([-(3**0.5), 0.0, 3**0.5], [1 / 6, 2 / 3, 1 / 6])}[points]
    grid = torch.tensor(list(itertools.product(at, repeat=count)), dtype=F64)
    weights = torch.tensor([math.prod(w) for w in itertools.product(weight, repeat=count)], dtype=F64)
    return grid, weights


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


# ------------------------------------------------------------ deep linear pooling: spec 01, 5 and 6

D, S = 4, 2
M = D // S
m = torch.tensor([1.0, 0.9, 0.5, 0.2], dtype=F64)
A = aliasing_matrix(D, S)


def deep_linear(theta: Tensor, phi: Tensor, x: Tensor) -> Tensor:
    return theta @ (A @ (m * phi * x))


def test_expected_hessian_of_the_deep_linear_model_exactly() -> None:
    """Spec 01 check 5, spec 03 B5: both blocks with their 1/S, and the one cross entry -2 eps m_l / sqrt S."""
    eps, sigma, at, s_theta, s_phi = 1.5, 0.6, 3, 0.8, 1.2
    z, weights = nodes(M + D + D + 1, 2)
    params = z[:, : M + D] * torch.tensor([s_theta] * M + [s_phi] * D, dtype=F64)
    x, y = sigma * z[:, M + D : -1].clone(), z[:, -1]
    x[:, at] += eps * y

    def loss(params: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (y - deep_linear(params[:M], params[M:], x)) ** 2

    H = torch.einsum("t,tij->ij", weights, vmap(hessian(loss))(params, x, y))
    theta, phi, cross = deep_linear_hessians(m, S, at, eps, sigma, s_theta, s_phi)
    assert torch.allclose(H[:M, :M], theta, atol=1e-12)
    assert torch.allclose(H[M:, M:], phi, atol=1e-12)
    assert torch.allclose(H[:M, M:], cross, atol=1e-12)
    assert float(cross[at % M, at]) == pytest.approx(-2 * eps * float(m[at]) / S**0.5)
    assert int((H[:M, M:].abs() > 1e-12).sum()) == 1


def test_covariances_of_linear_pooling_exactly() -> None:
    """Spec 01 check 6, spec 03 B4: Eqs 4 and 5 with the factors 1/S, and their order is that of m^2."""
    s_theta, s_phi = 0.7, 1.3
    z, weights = nodes(M + D, 2)
    theta, phi, x = s_theta * z[:, :M], s_phi * z[:, M:], torch.tensor([0.4, -1.0, 2.0, 0.3], dtype=F64)
    g = vmap(grad(deep_linear, argnums=2), in_dims=(0, 0, None))(theta, phi, x)
    covariance = torch.einsum("t,ti,tj->ij", weights, g, g)
    assert torch.allclose(covariance, linear_pooling_covariance(m, S, s_theta, s_phi), atol=1e-12)

    def mixed(theta: Tensor, phi: Tensor) -> Tensor:
        by_theta = jacrev(lambda t: grad(deep_linear, argnums=2)(t, phi, x))(theta)
        by_phi = jacrev(lambda q: grad(deep_linear, argnums=2)(theta, q, x))(phi)
        return by_theta @ by_theta.T + by_phi @ by_phi.T

    second = torch.einsum("t,tij->ij", weights, vmap(mixed)(theta, phi))
    assert torch.allclose(second, linear_pooling_mixed(m, S, s_theta, s_phi), atol=1e-12)
    for matrix in (covariance, second):
        assert matrix.diagonal().argsort(descending=True).tolist() == m.square().argsort(descending=True).tolist()


# ------------------------------------------------------------ MLPs: spec 01, 7 and 8; spec 02, 3


def test_one_hidden_layer_is_isotropic_to_half_a_percent() -> None:
    """Spec 01 check 7. The standard error of a diagonal entry is 2.03 / sqrt T: 0.0037 at the spec's 3e5 draws, where
    0.005 cannot be promised for all entries; with 3e6 draws it is four standard errors."""
    rng, total = torch.Generator().manual_seed(0), torch.zeros(5, 5, dtype=F64)
    x = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.5])
    for _ in range(10):
        w, phi = torch.randn(300_000, 7, generator=rng), torch.randn(300_000, 7, 5, generator=rng)
        g = torch.einsum("tn,tnd->td", w * (phi @ x > 0), phi)
        total += (g.T @ g).double() / 3e6
    assert float((total / mlp_geometry_constant(5, [7], [1.0, 1.0]) - torch.eye(5)).abs().max()) < 0.005


@pytest.mark.parametrize(("L", "trace"), [(1, 0.0556), (2, 0.00926), (3, 0.00154)])
def test_torchs_default_mlp_is_isotropic_at_any_input(L: int, trace: float) -> None:
    """Spec 01 check 8, spec 02 check 3: biases on, two inputs, D = 3, trace (1/3) 6^-L, off-diagonals zero."""
    factory = lambda: nets.build("mlp", in_features=3, hidden=(40,) * L)  # noqa: E731
    probes = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.1, 0.0]])
    for probe in probes:
        G = average_geometry(factory, (3,), n_networks=40_000, probes=probe[None])
        c = mlp_geometry_constant(3, [40] * L)
        assert 3 * c == pytest.approx(trace, rel=4e-3)
        # every network's g g^T / c has mean I; entries of 4e4 draws are known to better than 1.5 % at L = 3
        assert float((G.matrix / c - torch.eye(3)).abs().max()) < 0.06
        assert G.trace() == pytest.approx(3 * c, rel=0.03)


# ------------------------------------------------------------ estimators: spec 01, 14


def body_and_head() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)
    )


def test_marginal_head_saves_two_thirds_of_the_networks() -> None:
    """Root mean square errors over 8 seeds are 0.16 and 0.29: a ratio of 0.54, between 0.45 and 0.74 for one seed."""

    def matrix(n: int, seed: int, head: str) -> Tensor:
        found = nads(body_and_head, (1, 6, 6), n_networks=n, step=10.0, head=head, seed=seed)  # type: ignore[arg-type]
        U = found.directions.flatten(1).double()
        return (U.T * found.eigenvalues) @ U

    truth = matrix(12_000, 99, "marginal")
    errors = {
        head: math.sqrt(sum(relative(matrix(300, seed, head), truth) ** 2 for seed in range(1, 9)) / 8)
        for head in ("marginal", "sampled")
    }
    assert errors["marginal"] / errors["sampled"] == pytest.approx(0.54, abs=0.1)


class Stretched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4) * torch.tensor([3.0, 1.0, 0.3, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w)[:, None]


def test_standard_errors_of_eigenvalues_have_the_closed_form() -> None:
    """Gaussian gradients with separated variances: the error of an eigenvalue is lambda sqrt(2 / T). One reported
    error is itself known to a fifth only; their mean over 30 runs to a few per cent."""
    T = 2000
    runs = [nads(Stretched, (4,), n_networks=T, method="autograd", seed=seed) for seed in range(30)]
    reported = torch.stack([run.standard_errors for run in runs]).mean(0)
    exact = torch.tensor([9.0, 1.0, 0.09, 0.01], dtype=F64) * math.sqrt(2 / T)
    assert torch.allclose(reported, exact, rtol=0.15)
    assert torch.allclose(torch.stack([run.eigenvalues for run in runs]).mean(0), exact / math.sqrt(2 / T), rtol=0.02)


def test_push_and_pull_of_the_mixed_derivative_are_adjoint() -> None:
    """Spec 03 B7: <w, H v> = <H^T w, v>; and H v is the small-step difference of grad_theta f (Algorithm 2's DVP)."""
    drawn = record(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))).draw(0, 0, 1, dtype=F64)
    net, rng = drawn.module(0), torch.Generator().manual_seed(1)
    params = {k: p.detach() for k, p in net.named_parameters()}
    x, v = (torch.randn(5, generator=rng, dtype=F64) for _ in range(2))
    w = {k: torch.randn(p.shape, generator=rng, dtype=F64) for k, p in params.items()}
    H = MixedDerivative(net, x[None])
    pushed = H.push(params, {}, v)
    left = sum(float((w[k] * pushed[k]).sum()) for k in w)
    assert left == pytest.approx(float(H.pull(params, {}, w) @ v), rel=1e-12)

    def gradient(x: Tensor) -> dict[str, Tensor]:
        return grad(lambda p: functional_call(net, p, (x[None],))[0, 0])(params)

    plus, minus = gradient(x + 1e-5 * v), gradient(x - 1e-5 * v)
    for k in w:
        assert torch.allclose(pushed[k], (plus[k] - minus[k]) / 2e-5, atol=1e-8)


# ------------------------------------------------------------ Bayes accuracy: spec 03, B3


@pytest.mark.parametrize(
    ("pool", "expected"),
    [(2, {5: 0.9693, 7: 0.8885, 9: 0.7941, 13: 0.6192}), (4, {3: 0.9055, 5: 0.7130, 7: 0.5606, 13: 0.5982})],
)
def test_bayes_accuracy_of_short_signals(pool: int, expected: dict[int, float]) -> None:
    for variant in ("exact", "real"):
        got = {k: pooling_bayes_accuracy(box_prefilter(pool, 32), pool, k, 1.0, 1.0, variant) for k in expected}  # type: ignore[arg-type]
        assert got == pytest.approx(expected, abs=1e-4)


def test_bayes_accuracy_of_pooled_images() -> None:
    """2 x 2 pooling of 16 x 16, cosines (a, b); what discriminant analysis learns from samples does not exceed it."""
    line = pooling_matrix(box_prefilter(2, 16), 2)
    P, basis = np.kron(line, line), dft_basis((16, 16)).part("re")
    expected = {(1, 2): 0.9839, (3, 1): 0.9206, (5, 3): 0.6988, (6, 5): 0.5861}
    for (a, b), accuracy in expected.items():
        v = np.cos(2 * np.pi * (a * np.arange(16)[:, None] + b * np.arange(16)) / 16)
        v /= np.linalg.norm(v)
        assert any(np.allclose(v.ravel(), u.flatten()) for u in basis.vectors.numpy())
        assert linear_map_bayes_accuracy(P, v, 1.0, 1.0) == pytest.approx(accuracy, abs=1e-4)
    rng, n = np.random.default_rng(0), 20_000
    y, noise = rng.choice([-1.0, 1.0], (2, n)), rng.standard_normal((2, n, 256))
    u = v.ravel()  # the last of them, (6, 5)
    z = (noise - (noise @ u)[..., None] * u + y[..., None] * u) @ P.T
    w = np.linalg.lstsq(z[0], y[0], rcond=None)[0]
    assert np.mean(np.sign(z[1] @ w) == y[1]) < 0.5861 + 4 * 0.5 / n**0.5
    with pytest.raises(InputError, match="v must have length 1"):
        linear_map_bayes_accuracy(P, 2 * u)


# ------------------------------------------------------------ linear CNNs: spec 02, checks 1, 4, 6 and 8


@pytest.mark.parametrize(("size", "p", "circular"), [(3, 2, False), (4, 2, True), (3, 3, False)])
def test_linear_cnn_with_pooling_exactly(size: int, p: int, circular: bool) -> None:
    """Spec 02 checks 1 and 4: G and Delta of 2 channels to rounding; rank min(p, D), 1 with circular padding."""
    n, sw, sp = 2, 0.9, 0.7
    taps = tap_matrices((size,), p, circular=circular)
    patches = size if circular else size - p + 1
    rng = torch.Generator().manual_seed(0)
    data = torch.randn(4, size, generator=rng, dtype=F64)
    y, probe = torch.ones(4, dtype=F64), torch.ones(size, dtype=F64)

    def f(theta: Tensor, x: Tensor) -> Tensor:
        w, phi = theta[:n], theta[n:].view(n, p)
        signal = torch.cat([x, x[: p - 1]]) if circular else x
        pooled = torch.stack([signal[j : j + patches].mean() for j in range(p)])
        return w @ (phi @ pooled)

    def evolution(theta: Tensor) -> Tensor:
        loss = lambda t: 0.5 * (vmap(f, in_dims=(None, 0))(t, data) - y).square().sum()  # noqa: E731
        g, moved = jvp(lambda t: grad(f, argnums=1)(t, probe), (theta,), (-grad(loss)(theta),))
        return torch.outer(moved, g) + torch.outer(g, moved)

    z, weights = nodes(n + n * p, 3)
    theta = z * torch.tensor([sw] * n + [sp] * (n * p), dtype=F64)
    g = vmap(grad(f, argnums=1), in_dims=(0, None))(theta, probe)
    G = torch.einsum("t,ti,tj->ij", weights, g, g)
    assert torch.allclose(G, pooled_cnn_geometry(taps, n, sw, sp), atol=1e-12)
    assert int(torch.linalg.matrix_rank(G, rtol=1e-10)) == (1 if circular else min(p, size))
    found = torch.einsum("t,tij->ij", weights, vmap(evolution, chunk_size=2000)(theta))
    exact = pooled_cnn_evolution(taps, data_second_moment(data), n, sw, sp)
    assert relative(found, exact) < 1e-12


def test_circular_convolution_without_pooling_is_isotropic_when_sampled() -> None:
    """Spec 02 check 6, circular: a ReLU convolution that covers every pixel equally often has G = c I."""
    factory = lambda: nn.Sequential(  # noqa: E731
        nn.Conv1d(1, 4, 3, padding=1, padding_mode="circular", bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 1, bias=False),
    )
    G = average_geometry(factory, (1, 9), n_networks=30_000)
    c = 3 * 4 * (1 / (3 * 3)) * (1 / (3 * 36)) / 2  # taps, channels, both variances, half of the units active
    assert relative(G.matrix, c * torch.eye(9)) < 4 * G.relative_error < 0.2
    assert float((G.matrix.diagonal() / c - 1).abs().max()) < 0.06


def test_covariance_recursion_exactly() -> None:
    """Spec 02 check 8: convolution, pooling, convolution, pooling, dense, all 2^14 signs of the weights."""
    z, weights = nodes(14, 2)
    x = torch.zeros(8, dtype=F64)

    def f(theta: Tensor, x: Tensor) -> Tensor:
        h = nn.functional.conv1d(x[None], theta[:4].view(2, 1, 2))
        h = nn.functional.avg_pool1d(h[:, :6], 2)
        h = nn.functional.conv1d(h, theta[4:12].view(2, 2, 2))
        return theta[12:] @ nn.functional.avg_pool1d(h, 2)[:, 0]

    stds = torch.tensor([0.5] * 4 + [0.7] * 8 + [1.1] * 2, dtype=F64)
    g = vmap(grad(f, argnums=1), in_dims=(0, None), chunk_size=4096)(z * stds, x)
    sampled = torch.einsum("t,ti,tj->ij", weights, g, g)
    cov = through_average_pool(dense_head(1, [1.1**2]), pool_matrix((2,), 2))
    cov = through_convolution(cov, tap_matrices((3,), 2), 2, 0.7**2)
    cov = through_average_pool(cov, pool_matrix((6,), 2))
    cov = torch.block_diag(cov, torch.zeros(1, 1, dtype=F64))  # the seventh output is cut off before pooling
    cov = through_convolution(cov, tap_matrices((8,), 2), 2, 0.5**2)
    assert relative(sampled, cov) < 1e-12


# ------------------------------------------------------------ Theorem 3.1: spec 02, 5


def exact_by_mpmath(dimension: int, n: int) -> tuple[float, float, float, float]:
    """Coefficients of -S and -tr(S) I in Delta, and those of the large-dimension form, with 30 digits."""
    with mpmath.workdps(30):
        density = lambda t: mpmath.sin(t) ** (dimension - 2)  # noqa: E731
        halves = [0, mpmath.pi / 2, mpmath.pi]
        norm = mpmath.quad(density, halves)
        mean = lambda h: mpmath.quad(lambda t: h(t) * density(t), halves) / norm  # noqa: E731
        p = lambda t: (mpmath.pi - t) / (2 * mpmath.pi)  # noqa: E731
        q = lambda t: mpmath.sin(t) / (2 * mpmath.pi)  # noqa: E731
        along = mean(lambda t: (p(t) + q(t) * mpmath.cos(t)) ** 2)
        across = mean(lambda t: (q(t) * mpmath.sin(t)) ** 2) / (dimension - 1)
        mixed = mean(lambda t: p(t) * (p(t) + q(t) * mpmath.cos(t)))
        pairs = n * (n - 1)
        S = 2 * (mpmath.mpf(5 * n) / 4 + pairs * (along - across + mixed))
        eye = 2 * (mpmath.mpf(n) / 4 + pairs * across)
        large = 2 * (mpmath.mpf(5 * n) / 4 + mpmath.mpf(pairs) / 8)
        large_eye = 2 * (mpmath.mpf(n) / 4 + pairs / (4 * mpmath.pi**2 * dimension))
        return float(S), float(eye), float(large), float(large_eye)


@pytest.mark.parametrize(
    ("dimension", "n", "error"), [(8, 4, 0.0165), (8, 10, 0.0371), (8, 100, 0.0836), (200, 10, 0.0007)]
)
def test_large_dimension_form_of_theorem_31_by_independent_quadrature(dimension: int, n: int, error: float) -> None:
    """The 1.6 % at D = 8 is right for n = 4. The distance grows with the width, and falls with the dimension."""
    x = torch.randn(4, dimension, generator=torch.Generator().manual_seed(0)).double()
    second, eye = data_second_moment(x), torch.eye(dimension, dtype=F64)
    a, b, c, d = exact_by_mpmath(dimension, n)
    exact, large = -a * second - b * second.trace() * eye, -c * second - d * second.trace() * eye
    assert relative(mlp_evolution(x, n), exact) < 1e-10
    assert relative(mlp_evolution_large_dimension(second, n), large) < 1e-12
    assert relative(large, exact) == pytest.approx(error, abs=1e-4)


def test_theorem_31_by_direct_sampling() -> None:
    """Spec 02 check 5: Delta of the hidden-layer network, written out neuron by neuron, to one per cent."""
    n, dimension, sw, sp = 3, 3, 0.9, 0.7
    rng = torch.Generator().manual_seed(0)
    data = torch.randn(2, dimension, generator=rng)
    total, draws, rounds = torch.zeros(dimension, dimension, dtype=F64), 400_000, 5
    for _ in range(rounds):
        w, phi = sw * torch.randn(draws, n, generator=rng), sp * torch.randn(draws, n, dimension, generator=rng)
        x = torch.randn(draws, dimension, generator=rng)
        on = (torch.einsum("tnd,td->tn", phi, x) > 0).float()
        g = torch.einsum("tn,tnd->td", w * on, phi)
        moved = torch.zeros_like(g)
        for b in data:  # theta-dot for y = 0
            s = phi @ b
            out = (w * s.relu()).sum(1, keepdim=True)
            moved -= torch.einsum("tn,tnd->td", s.relu() * out * on, phi)
            moved -= (w * w * (s > 0) * on).sum(1, keepdim=True) * out * b
        B = (moved.T @ g).double() / (draws * rounds)
        total += B + B.T
    assert relative(total, mlp_evolution(data, n, sw, sp)) < 0.01
