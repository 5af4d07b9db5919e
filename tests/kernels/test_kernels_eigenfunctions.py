"""Eigenfunctions as targets, Nystrom, rotation, swap, local energy and Fourier analysis."""

import copy
import math

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.kernels import (
    binarization_overlap,
    fourier_power,
    local_energy,
    nystrom_extension,
    pullback,
    rotation_gain,
    target_alignments,
)
from biascope.kernels.regression import steps_to_loss
from biascope.support.errors import InputError

F64 = torch.float64


def make(n=20, c=1, seed=0, width=8):
    gen = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, c)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=F64) / p.shape[-1] ** 0.5)
    return net, torch.randn(n, 3, generator=gen, dtype=F64)


def ring(n, width=0.4):
    """A shift-invariant kernel on a ring with distinct pairs of eigenvalues."""
    t = 2 * math.pi * torch.arange(n, dtype=F64) / n
    return torch.exp((torch.cos(t[:, None] - t) - 1) / width)


# ------------------------------------------------------------------------------------------------- targets, Nystrom


def test_eigenfunction_targets():
    net, x = make()
    K = bs.ntk(net, x, outputs=0)
    U = torch.linalg.eigh(K.tensor)[1].flip(1)
    phi = bs.eigenfunction_targets(K, 3, binarize=False)
    assert float(phi.square().mean()) == pytest.approx(1, rel=1e-12)
    assert abs(float(phi @ U[:, 3])) == pytest.approx(20**0.5, rel=1e-9)
    signs = bs.eigenfunction_targets(K, [0, 3])
    assert signs.shape == (20, 2)
    assert set(signs.unique().tolist()) <= {-1.0, 1.0}
    assert torch.equal(signs[:, 1], torch.where(phi < 0, -1.0, 1.0).double())
    assert torch.equal(bs.eigenfunction_targets(K.eigh(5), 3), signs[:, 1])
    with pytest.raises(InputError, match="index must be between 0 and 19"):
        bs.eigenfunction_targets(K, 20)
    with pytest.raises(InputError, match="index must be between 0 and 4"):
        bs.eigenfunction_targets(K.eigh(5), 5)


def test_binarisation_overlap_of_gaussian_entries():
    g = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    assert binarization_overlap(g).tolist() == pytest.approx([math.sqrt(2 / math.pi)] * 2, abs=4e-3)
    phi = g[:, 0] / g[:, 0].norm()
    assert float(binarization_overlap(phi)) == pytest.approx(float(phi @ phi.sign()) / 200_000**0.5, rel=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
def test_nystrom_extension_gives_eigenvectors_back_and_extends_consistently(normalize):
    net, x = make(n=12)
    _, new = make(n=5, seed=7)
    K, cross = bs.ntk(net, x, outputs=0), bs.ntk(net, new, x, outputs=0)
    spec = K.eigh(6, normalize=normalize)
    torch.testing.assert_close(nystrom_extension(K, spec), spec.vectors, rtol=1e-8, atol=1e-9)
    phi = nystrom_extension(cross, spec)
    lam, U = torch.linalg.eigh(K.tensor)
    truth = cross.tensor @ U.flip(1)[:, :6] / lam.flip(0)[:6] * (12**0.5 if normalize else 1)
    torch.testing.assert_close(phi.abs(), truth.abs(), rtol=1e-8, atol=1e-9)
    # Mercer on new points with all modes: sum lambda phi(x) phi(x_i) = k(x, x_i)
    full = K.eigh(normalize=normalize)
    keep = full.values > 1e-10 * full.values[0]
    spec = type(full)(full.values[keep], full.vectors[:, keep], full.residuals[keep], normalize, n=12)
    back = (nystrom_extension(cross, spec) * spec.values) @ spec.vectors.T
    torch.testing.assert_close(back, cross.tensor, rtol=1e-6, atol=1e-7)


def test_nystrom_refuses_zero_eigenvalues_and_wrong_sides():
    x = torch.arange(1.0, 5.0, dtype=F64)[:, None]
    K = bs.Kernel(x @ x.T, "trace", "trace", True)
    with pytest.raises(InputError, match=r"eigenvalue 1 .* ask for the top 1"):
        nystrom_extension(K, K.eigh())
    with pytest.raises(InputError, match="looks transposed"):
        nystrom_extension(torch.ones(4, 2, dtype=F64), K.eigh(1))


# --------------------------------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize("c", [1, 2])
def test_alignments_of_eigenvectors_are_eigenvalues(c, monkeypatch):
    net, x = make(n=10, c=c)
    K = bs.ntk(net, x)
    lam, U = torch.linalg.eigh(K.matrix())
    alpha = target_alignments(net, x, U)
    torch.testing.assert_close(alpha, lam.clamp_min(0), rtol=1e-9, atol=1e-10 * float(lam[-1]))
    f = torch.randn(10 * c, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
    by_n = target_alignments(net, x, f, normalize=False, batch_size=3)
    assert float(by_n) == pytest.approx(float(f[:, 0] @ K.matrix() @ f[:, 0]) / 100, rel=1e-11)
    monkeypatch.setattr(pullback, "HELD", 1)  # two targets at a time
    torch.testing.assert_close(target_alignments(net, x, U), alpha, rtol=1e-12, atol=1e-12)


def test_rotation_gain_against_the_dense_kernels_and_after_training_on_one_eigenfunction():
    net, x = make(n=20, width=40)
    before = bs.ntk(net, x, outputs=0)
    spec = before.eigh(8)
    k = 5
    y = bs.eigenfunction_targets(spec, k, binarize=False)
    after = copy.deepcopy(net)
    optimiser = torch.optim.SGD(after.parameters(), lr=0.05)
    for _ in range(1500):
        optimiser.zero_grad()
        (after(x)[:, 0] - y).square().mean().backward()
        optimiser.step()
    rotation = rotation_gain(net, after, x, spec)
    dense = bs.ntk(after, x, outputs=0).tensor
    alpha = (spec.vectors * (dense @ spec.vectors)).sum(0)
    torch.testing.assert_close(rotation.after, alpha, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rotation.before, spec.values, rtol=1e-8, atol=1e-9)
    ratio = alpha / spec.values
    torch.testing.assert_close(rotation.gains, ratio / ratio.quantile(0.5), rtol=1e-7, atol=1e-8)
    assert float(rotation.gains[k]) > 1.5  # the kernel turned towards what was learnt


def test_a_kernel_that_does_not_move_has_gain_one():
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    a, b = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()  # linear in the weights: the kernel is the same
    gains = rotation_gain(a, b, x, bs.ntk(a, x).eigh(4)).gains
    torch.testing.assert_close(gains, torch.ones(4, dtype=F64), rtol=1e-12, atol=1e-12)


def test_rotation_refuses_bad_targets():
    net, x = make(n=6)
    with pytest.raises(InputError, match=r"need \[6, k\]"):
        target_alignments(net, x, torch.ones(5, 2))
    with pytest.raises(InputError, match="NaN"):
        target_alignments(net, x, torch.full((6, 1), float("nan")))
    with pytest.raises(InputError, match="target 1 has no alignment"):
        rotation_gain(net, net, x, torch.eye(6)[:, :2] * torch.tensor([1.0, 0.0]))
    dead = nn.Linear(3, 1, bias=False).double()
    with pytest.raises(InputError, match="target 0 has no alignment"):
        rotation_gain(dead, dead, x * 0, torch.ones(6, 1))


# ------------------------------------------------------------------------------------------------------------- swap


def test_centred_prediction_and_the_kernel_swap():
    net, x = make(n=8, c=2)
    J = bs.Jacobian(net, x)
    v = torch.randn(J.p, generator=torch.Generator().manual_seed(0), dtype=F64)
    torch.testing.assert_close((J @ v).flatten(), J.to_dense().flatten(0, 1) @ v)
    # the representer form: weights J^T a predict what kernel regression without f0 predicts
    y = torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    _, new = make(n=3, seed=5)
    fit = bs.kernel_regression(bs.ntk(net, x), y, 0.01, bs.ntk(net, new, x))
    torch.testing.assert_close(bs.Jacobian(net, new) @ (J.T @ fit.coefficients), fit.test, rtol=1e-8, atol=1e-9)


def test_a_kernel_aligned_with_the_task_learns_faster():
    net, x = make(n=12)
    K = bs.ntk(net, x, outputs=0).tensor
    y = bs.eigenfunction_targets(bs.Kernel(K, 0, "trace", True), 6, binarize=False)
    swapped = K + torch.outer(y, y) / 12 * float(torch.linalg.eigvalsh(K)[-1]) / 2
    assert steps_to_loss(swapped, y, 0.01) < 0.1 * steps_to_loss(K, y, 0.01)


# ----------------------------------------------------------------------------------------------------- local energy


def test_local_energy_is_the_diagonal_of_a_projection():
    gen = torch.Generator().manual_seed(0)
    features = torch.randn(40, 300, generator=gen, dtype=F64)
    K = features[:20] @ features.T  # 20 task points, 20 task + 20 control points
    energy = local_energy(K)
    P = torch.linalg.pinv(K) @ K
    torch.testing.assert_close(energy.values, P.diagonal(), rtol=1e-9, atol=1e-10)
    assert float(energy.values.sum()) == pytest.approx(20, rel=1e-10)
    assert energy.rank == 20
    assert float(energy.values.min()) >= 0
    assert float(energy.values.max()) <= 1 + 1e-12
    task, control = energy.split(20)
    assert task + control == pytest.approx(1, rel=1e-10)
    assert task > 0.8


def test_local_energy_of_disjoint_features_of_squares_and_of_truncation():
    gen = torch.Generator().manual_seed(1)
    block = torch.block_diag(*(torch.randn(5, 9, generator=gen, dtype=F64) for _ in range(2)))
    K = block[:5] @ block.T
    assert local_energy(K).split(5) == pytest.approx((1, 0), abs=1e-12)
    square = local_energy(block @ block.T)
    torch.testing.assert_close(square.values, torch.ones(10, dtype=F64))
    assert float(local_energy(K, rank=3).values.sum()) == pytest.approx(3, rel=1e-12)
    per_output = local_energy(torch.stack([K, 2 * K]))
    assert per_output.values.shape == (2, 10)
    assert per_output.rank == (5, 5)


@pytest.mark.parametrize("r", [1, 3, 7])
def test_ring_kernels_are_not_localised(r):
    torch.testing.assert_close(local_energy(ring(16), rank=r).values, torch.full((16,), r / 16, dtype=F64))


def test_local_energy_correlated_features_localise_less():
    values = []
    for rho in (0.0, 0.3, 0.9):
        gen = torch.Generator().manual_seed(0)
        shared = torch.randn(1, 2000, generator=gen, dtype=F64)
        own = torch.randn(100, 2000, generator=gen, dtype=F64)
        z = rho**0.5 * shared + (1 - rho) ** 0.5 * own
        values.append(local_energy(z[:50] @ z.T).split(50)[0])
    assert values[0] > 0.9
    assert values == sorted(values, reverse=True)


def test_local_energy_cuts_at_the_precision_the_kernel_was_computed_in():
    """30 task points in a 12-dimensional feature space: rank 12, whichever type the kernel is handed over in."""
    gen = torch.Generator().manual_seed(0)
    z = torch.randn(60, 12, generator=gen, dtype=F64)
    exact, single = z[:30] @ z.T, z[:30].float() @ z.float().T
    for K in (exact, single, single.double(), exact.float(), exact.float().double()):
        found = local_energy(K)
        assert found.rank == 12  # float32 rounding taken for float64's made it 30
        torch.testing.assert_close(found.values, local_energy(exact).values, rtol=0, atol=1e-5)
    assert local_energy(single.double(), rank=20).rank == 20  # who names a rank gets it
    noisy = exact + 1e-3 * torch.randn(30, 60, generator=gen, dtype=F64)
    error = float((noisy - exact).norm() / exact.norm())
    assert local_energy(bs.Kernel(noisy, 0, "trace", False, error=error)).rank == 12
    assert local_energy(noisy).rank == 30


def test_local_energy_refuses_what_it_cannot_do():
    net, x = make(n=4, c=2)
    with pytest.raises(InputError, match="one kernel per output"):
        local_energy(bs.ntk(net, x))
    assert local_energy(bs.ntk(net, x[:2], x, outputs="diagonal")).values.shape == (2, 4)
    with pytest.raises(InputError, match="between 1 and 3"):
        local_energy(torch.ones(3, 5), rank=4)
    with pytest.raises(InputError, match=r"K is torch\.int64"):
        local_energy(torch.ones(3, 5, dtype=torch.int64))
    with pytest.raises(InputError, match="NaN"):
        local_energy(torch.full((2, 2), float("nan")))


# ---------------------------------------------------------------------------------------------------------- Fourier


@pytest.mark.parametrize("n", [16, 17])
def test_fourier_shares_add_up_and_find_the_wave(n):
    t = 2 * math.pi * torch.arange(n, dtype=F64) / n
    waves = torch.stack([torch.ones(n, dtype=F64), torch.cos(t), torch.sin(5 * t + 0.3)], 1)
    assert fourier_power(waves).argmax(0).tolist() == [0, 1, 5]
    mixed = fourier_power(3 * torch.cos(t) + 4 * torch.sin(5 * t))
    assert float(mixed.sum()) == pytest.approx(1, rel=1e-12)
    assert [float(mixed[1]), float(mixed[5])] == pytest.approx([9 / 25, 16 / 25], rel=1e-10)


def test_eigenvectors_of_a_ring_kernel_have_rising_frequencies():
    spec = bs.Kernel(ring(32), "trace", "trace", True).eigh(9)
    assert fourier_power(spec.vectors).argmax(0).tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_dominant_frequencies_of_a_network_in_one_dimension_rise():
    gen = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 1)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=F64) * (2 / p.shape[-1]) ** 0.5)
    x = torch.linspace(-1, 1, 64, dtype=F64)[:, None]
    freq = fourier_power(bs.ntk(net, x, outputs=0).centered().eigh(16).vectors).argmax(0).double()
    assert float(freq[8:].mean()) > float(freq[:8].mean())


def test_a_vector_of_zeros_has_no_frequency():
    assert bool(fourier_power(torch.zeros(8)).isnan().all())
