"""NADs against closed forms (spec 01, checks 6 to 9, 11, 12, 14; spec 03, 2.18)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from biascope import nets
from biascope.ensembles import input_gradients, record
from biascope.geometry import NADs, nads
from biascope.geometry.closed_forms import mlp_geometry_constant
from biascope.geometry.gradients import Sampler
from biascope.geometry.moments import BlockMoments
from biascope.support.errors import CorruptError, InputError, UnsupportedError
from biascope.support.seeds import generator


def pooling() -> nn.Module:
    return nets.build("linear-pooling", in_features=12, stride=3)


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)
    )


def smooth() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 10), nn.Tanh(), nn.Linear(10, 1))


def mean_of(found: NADs) -> Tensor:
    U = found.directions.flatten(1).double()
    return (U.T * found.eigenvalues) @ U


def test_logistic_regression_shows_sampling_noise_only() -> None:
    """Spec 01, check 9: singular values inside the Marchenko-Pastur edges [1.227, 2.382], as published (1.2344 and
    2.3697); a finite sample ends inside them, so its ratio is below 3.77.
    """
    found = nads(lambda: nets.build("logreg"), (1, 32, 32), n_networks=10_000, method="autograd")
    singular = (found.eigenvalues * 10_000).sqrt()
    assert singular[0].item() == pytest.approx(2.374, abs=0.01)
    assert singular[-1].item() == pytest.approx(1.233, abs=0.008)
    band = found.marchenko_pastur()
    assert (found.eigenvalues[0] / found.eigenvalues[-1]).item() == pytest.approx(3.71, abs=0.06)
    assert not band.outliers(found.eigenvalues, slack=0.03).any()
    assert found.trace == pytest.approx(1 / 3, rel=0.01)
    assert found.stability[-1][1] < 0.1  # an isotropic network has no stable directions


def test_finite_differences_equal_autograd_for_linear_networks_at_any_step() -> None:
    exact = nads(pooling, (12,), n_networks=50, method="autograd", dtype=torch.float64)
    for step in (1e-2, 1.0, 100.0):
        other = nads(pooling, (12,), n_networks=50, step=step, dtype=torch.float64)
        assert torch.allclose(mean_of(other), mean_of(exact), atol=1e-10)


def test_finite_differences_tend_to_autograd_for_smooth_networks() -> None:
    at: dict[str, Any] = {"n_networks": 20, "x": torch.linspace(-1, 1, 9).reshape(1, 3, 3), "dtype": torch.float64}
    exact = mean_of(nads(smooth, (1, 3, 3), method="autograd", **at))
    errors = []
    for step in (0.2, 0.1, 0.05):
        found = mean_of(nads(smooth, (1, 3, 3), step=step, **at))
        errors.append((found - exact).norm().item())
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


def test_linear_pooling_recovers_the_canonical_basis() -> None:
    """Both algorithms: eigenvectors e_i sorted by m^2 (check 14); eigenvalues within their standard errors."""
    net = pooling()
    m = net.prefilter.double()
    S, D = 3, 12
    expected = m.square().sort(descending=True).values / S  # s_theta = s_phi = 1
    for method, scale, count in (("finite-difference", 1.0, 20_000), ("mixed-derivative", 2.0, 600)):
        found = nads(pooling, (D,), n_networks=count, method=method, top=8, dtype=torch.float64)  # type: ignore[arg-type]
        truth = scale * expected[:8]
        slack = 5 * found.standard_errors + 0.06 * truth  # sample eigenvalues repel: a bias the errors do not contain
        assert ((found.eigenvalues - truth).abs() <= slack).all(), (method, found.eigenvalues, truth)
        top = found.directions[:3].flatten(1).square().sum(0)  # DC and the first pair
        strongest = m.square().argsort(descending=True)[:3]
        assert top[strongest].sum().item() > 2.9, method


def test_default_mlp_is_isotropic_with_the_known_constant() -> None:
    factory = lambda: nets.build("mlp", in_features=6, hidden=(20, 20))  # noqa: E731
    found = nads(factory, (6,), n_networks=20_000, method="autograd")
    c = mlp_geometry_constant(6, [20, 20])
    assert found.trace == pytest.approx(6 * c, rel=0.05)
    assert (mean_of(found) / c - torch.eye(6)).abs().max() < 0.12


def test_mixed_derivative_against_dense_hessians() -> None:
    T = 5
    found = nads(smooth, (1, 3, 3), n_networks=T, method="mixed-derivative", top=9, seed=3, dtype=torch.float64)
    drawn = record(smooth).draw(3, 0, T, dtype=torch.float64)
    x = torch.randn((1, 3, 3), generator=generator(3, "x"))
    total = torch.zeros(9, 9, dtype=torch.float64)
    energies = []
    for t in range(T):
        net = drawn.module(t)

        def f(params: dict[str, Tensor], z: Tensor, net: nn.Module = net) -> Tensor:
            out: Tensor = functional_call(net, params, (z.view(1, 1, 3, 3),))
            return out[0, 0]

        params = {k: v.detach() for k, v in net.named_parameters()}
        H = jacrev(lambda z: grad(f)(params, z))(x.flatten().double())  # noqa: B023
        dense = torch.cat([part.reshape(-1, 9) for part in H.values()])
        total += dense.T @ dense / T
        energies.append((dense @ found.directions.flatten(1).T).square().sum(0))
    values = torch.linalg.eigvalsh(total).flip(0)
    assert torch.allclose(found.eigenvalues, values, rtol=1e-5, atol=1e-12)
    assert torch.allclose(mean_of(found), total, atol=1e-6 * values[0].item())
    assert torch.allclose(found.standard_errors, torch.stack(energies).std(0) / T**0.5, rtol=1e-6)


def test_ntk_nads_against_stein() -> None:
    """alpha(u) = ||E H u||^2; and E[H] = E[grad_theta f(x) x^T] for Gaussian x (Stein), an estimator without H."""
    found = nads(smooth, (1, 3, 3), n_networks=1, method="ntk", top=9, n_points=4000, dtype=torch.float64)
    net = record(smooth).draw(0, 0, 1, dtype=torch.float64).module(0)
    x = torch.randn(40_000, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    params = {k: v.detach() for k, v in net.named_parameters()}

    def f(params: dict[str, Tensor], z: Tensor) -> Tensor:
        out: Tensor = functional_call(net, params, (z.view(1, 1, 3, 3),))
        return out[0, 0]

    g = torch.func.vmap(grad(f), in_dims=(None, 0))(params, x)
    rows = torch.cat([part.reshape(len(x), -1) for part in g.values()], 1)
    E = rows.T @ x / len(x)
    truth = torch.linalg.svdvals(E).square()
    assert torch.allclose(found.eigenvalues, truth, rtol=0.15, atol=0.02 * truth[0].item())
    assert found.n_networks == 1
    assert (found.standard_errors > 0).all()
    fine = (E @ found.directions.flatten(1).T).square().sum(0)  # the directions agree, too
    assert fine[0].item() == pytest.approx(truth[0].item(), rel=0.05)


def test_marginal_head_has_the_same_expectation_and_less_noise() -> None:
    big = nads(conv, (1, 6, 6), n_networks=12_000, step=10.0)
    few = 300
    marginal = nads(conv, (1, 6, 6), n_networks=few, step=10.0, head="marginal", seed=1)
    sampled = nads(conv, (1, 6, 6), n_networks=few, step=10.0, seed=1)
    truth = mean_of(big)
    error = [(mean_of(found) - truth).norm().item() for found in (marginal, sampled)]
    assert error[0] < 0.7 * error[1]
    assert marginal.trace == pytest.approx(big.trace, rel=0.1)
    assert marginal.overlap(big, 5) > sampled.overlap(big, 5)
    with pytest.raises(UnsupportedError, match="independent gradients"):
        marginal.marchenko_pastur()


def test_as_large_as_imagenet() -> None:
    """D = 150,528, never as a matrix: the spectrum is that of the Gram matrix of the gradients."""

    def large() -> nn.Module:
        layers = (nn.Conv2d(3, 4, 7, 4, 3), nn.ReLU(), nn.AvgPool2d(4), nn.Conv2d(4, 4, 3, 2), nn.ReLU())
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 1))

    shape, T = (3, 224, 224), 12
    x = torch.randn(shape, generator=generator(1, "x"))
    found = nads(large, shape, T, method="autograd", top=3, seed=1, x=x)
    rows = input_gradients(record(large).draw(1, 0, T), x[None], engine="loop").flatten(1).double()
    gram = torch.linalg.eigvalsh(rows @ rows.T / T).flip(0)
    assert found.directions.shape == (3, *shape)
    torch.testing.assert_close(found.eigenvalues, gram[:3], rtol=1e-3, atol=0)
    along = (found.directions.flatten(1).double() @ rows.T).square().sum(1) / T
    torch.testing.assert_close(along, gram[:3], rtol=1e-3, atol=0)
    assert len(nads(large, shape, T, method="autograd", top=13, seed=1, x=x).directions) == 12


class Again(nn.Module):
    """The last layer is used below itself: called twice, or by its weight alone."""

    def __init__(self, call: bool) -> None:
        super().__init__()
        self.head, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        below = self.head(x) if self.call else x @ self.head.weight
        return self.head(torch.tanh(below))


@pytest.mark.parametrize("call", [True, False])
def test_a_head_that_is_used_below_is_not_averaged_out(call: bool) -> None:
    with pytest.raises(UnsupportedError, match="last layer 'head' is used below it too"):
        nads(lambda: Again(call), (4,), n_networks=4, head="marginal")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_marginal_head_of_a_linear_network_has_nothing_below_it(dtype: torch.dtype) -> None:
    """Example 2: s^2 I, exactly and from one network; torch draws the weights of a layer of 16 with s^2 = 1 / 48."""
    found = nads(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), (1, 4, 4), n_networks=3, head="marginal", dtype=dtype
    )
    assert found.eigenvalues.double().numpy() == pytest.approx(1 / 48, rel=1e-5)


def test_marginal_head_is_exactly_the_conditional_expectation() -> None:
    """One network, many heads drawn by hand."""
    drawn = record(conv).draw(0, 0, 1, dtype=torch.float64)
    net = drawn.module(0)
    found = nads(conv, (1, 6, 6), n_networks=1, step=10.0, head="marginal", dtype=torch.float64)
    x = torch.randn((1, 6, 6), generator=generator(0, "x"))
    body, plus = net[:-1], 10 * torch.eye(36, dtype=torch.float64).view(36, 1, 6, 6)
    J = ((body(x + plus) - body(x - plus)) / 20).detach().T  # [8, 36]
    assert torch.allclose(mean_of(found), J.T @ J / (3 * 8), atol=1e-10)


def test_two_logits_give_twice_the_covariance() -> None:
    def two() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 2))

    one = nads(lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 1)), (1, 3, 3), n_networks=4000, method="autograd")
    both = nads(two, (1, 3, 3), n_networks=4000, method="autograd")
    assert both.trace / one.trace == pytest.approx(2, rel=0.05)
    deeper = lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Linear(5, 2))  # noqa: E731
    marginal = nads(deeper, (1, 3, 3), n_networks=500, head="marginal")
    sampled = nads(deeper, (1, 3, 3), n_networks=4000)
    assert marginal.trace == pytest.approx(sampled.trace, rel=0.1)


def test_standard_errors_are_right() -> None:
    """The spread of the first eigenvalue over independent runs, against the reported error."""
    runs = [nads(_Stretched, (4,), n_networks=400, top=1, seed=seed) for seed in range(40)]
    spread = torch.stack([run.eigenvalues[0] for run in runs]).std().item()
    reported = torch.stack([run.standard_errors[0] for run in runs]).mean().item()
    assert reported == pytest.approx(spread, rel=0.35)


def test_matrix_free_equals_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = nads(conv, (1, 6, 6), n_networks=120, method="autograd", top=4)
    monkeypatch.setattr("biascope.geometry.anisotropy.DENSE_UP_TO", 10)
    kept = nads(conv, (1, 6, 6), n_networks=120, method="autograd", top=4)
    again = nads(conv, (1, 6, 6), n_networks=120, method="autograd", top=4, max_memory=40_000)
    assert torch.allclose(kept.eigenvalues, dense.eigenvalues, rtol=1e-3)
    assert kept.overlap(dense, 4) > 0.999
    assert kept.trace == pytest.approx(dense.trace, rel=1e-5)
    assert torch.allclose(again.eigenvalues, dense.eigenvalues, rtol=1e-3)
    assert again.overlap(dense, 4) > 0.999
    assert kept.standard_errors[0].item() == pytest.approx(dense.standard_errors[0].item(), rel=0.7)
    assert kept.stability[0][0] == 120


def test_auto_stops_when_stable() -> None:
    found = nads(pooling, (12,), n_networks="auto", tolerance=0.9, stability_k=3)
    assert found.stability[-1][1] >= 0.9
    assert found.n_networks == found.stability[-1][0] < 65_536
    counts = [n for n, _ in found.stability]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("size", [300, 4096])
def test_where_auto_stops_is_not_up_to_the_size_of_the_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    small = nads(pooling, (12,), n_networks="auto", tolerance=0.9, stability_k=3)

    def pieces(self: Sampler, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:  # larger ones, as on CUDA
        for first in range(start, min(stop, 8192), size):
            last = min(first + size, stop, 8192)
            yield first, self.rows(self.initialiser.draw(self.seed, first, last, self.device, self.dtype))

    monkeypatch.setattr(Sampler, "chunks", pieces)
    large = nads(pooling, (12,), n_networks="auto", tolerance=0.9, stability_k=3)
    assert [n for n, _ in large.stability] == [n for n, _ in small.stability]
    assert large.n_networks == small.n_networks
    assert torch.allclose(large.eigenvalues, small.eigenvalues)


def test_result_object(tmp_path: Path) -> None:
    found = nads(conv, (1, 6, 6), n_networks=64)
    U = found.directions.flatten(1)
    assert torch.allclose(U @ U.T, torch.eye(36, dtype=U.dtype), atol=1e-5)
    assert found.overlap(found, 7) == pytest.approx(1.0)
    assert found.overlap(found.directions, 7) == pytest.approx(1.0)
    assert found.principal_angles(found, 3).max() < 1e-6
    energy = found.fourier_energy()
    assert torch.allclose(energy.flatten(1).sum(1), torch.ones(36, dtype=energy.dtype))
    found.save(tmp_path / "n.safetensors")
    back = NADs.load(tmp_path / "n.safetensors")
    assert torch.equal(back.directions, found.directions)
    assert (back.stability, back.n_networks, back.trace) == (found.stability, found.n_networks, found.trace)
    with pytest.raises(CorruptError, match="is missing"):
        NADs.load(tmp_path / "missing")
    (tmp_path / "bad").write_bytes(b"xx")
    with pytest.raises(CorruptError, match="does not hold"):
        NADs.load(tmp_path / "bad")
    figure = found.plot()
    assert len(figure.axes) == 7  # three directions in pixels and in frequency, the spectrum


def test_picture_of_few_networks_leaves_out_the_zeros() -> None:
    found = nads(conv, (1, 6, 6), n_networks=5)
    spectrum = found.plot().axes[-1]
    assert spectrum.get_title() == "31 of 36 are zero: 5 networks"
    assert len(spectrum.lines[0].get_ydata()) == 5
    assert spectrum.get_ylim()[0] > 1e-6 * spectrum.get_ylim()[1]


def test_reproducible_and_independent_of_memory() -> None:
    a = nads(conv, (1, 6, 6), n_networks=40)
    b = nads(conv, (1, 6, 6), n_networks=40, max_memory="1MB")
    assert torch.allclose(mean_of(a), mean_of(b), rtol=1e-4, atol=1e-9)
    # the same networks again; vmap or loop is chosen by a measured pilot, and the two round differently
    again = nads(conv, (1, 6, 6), n_networks=40)
    assert torch.allclose(a.eigenvalues, again.eigenvalues, rtol=1e-4, atol=1e-9 * float(a.eigenvalues[0]))


def test_centring() -> None:
    shifted = lambda: nn.Sequential(nn.Flatten(), _Shift())  # noqa: E731
    raw = nads(shifted, (4,), n_networks=500, method="autograd")
    centred = nads(shifted, (4,), n_networks=500, method="autograd", centered=True)
    assert raw.trace == pytest.approx(4 * (9 + 1), rel=0.1)
    assert centred.trace == pytest.approx(4, rel=0.2)


class _Stretched(nn.Module):
    """One eigenvalue well apart from the others: where they are close, they repel and vary less."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4) * torch.tensor([3.0, 1.0, 0.5, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w)[:, None]


class _Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4) + 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w)[:, None]


def test_what_cannot_be_is_refused_by_name() -> None:
    bare = lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 1, bias=False))  # noqa: E731
    with pytest.raises(InputError, match="all gradients are zero"):
        nads(bare, (4,), n_networks=3, method="autograd", x=torch.zeros(4))
    with pytest.raises(InputError, match="method"):
        nads(bare, (4,), method="magic")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"x \[5\] does not fit"):
        nads(bare, (4,), n_networks=2, x=torch.zeros(5))
    with pytest.raises(UnsupportedError, match="finite-difference"):
        nads(bare, (4,), n_networks=2, method="autograd", head="marginal")
    with pytest.raises(UnsupportedError, match="head='marginal': the network does not"):
        nads(pooling, (12,), n_networks=2, head="marginal")


def test_flip_is_an_involution_and_a_rotation() -> None:
    """U flip(U^T x) twice is x, keeps norms, and takes u_1 to u_D (check 12)."""
    U = nads(conv, (1, 6, 6), n_networks=64).directions.flatten(1).double().T
    flip = lambda v: U @ (U.T @ v).flip(0)  # noqa: E731
    v = torch.randn(36, dtype=torch.float64)
    assert torch.allclose(flip(flip(v)), v, atol=1e-10)
    assert flip(v).norm().item() == pytest.approx(v.norm().item())
    assert torch.allclose(flip(U[:, 0]), U[:, -1], atol=1e-10)


def test_block_moments_do_not_depend_on_the_pieces() -> None:
    rows = torch.randn(11, 2, 3)
    whole, parts = BlockMoments(3, 4), BlockMoments(3, 4)
    whole.add(0, rows)
    for start in (0, 1, 6):
        parts.add(start, rows[start : {0: 1, 1: 6, 6: 11}[start]])
    assert torch.allclose(whole.sums, parts.sums)
    assert torch.equal(whole.counts, parts.counts)
    flat = rows.reshape(-1, 3).double()
    assert torch.allclose(whole.matrix(), flat.T @ flat / 11)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    a = nads(lambda: nets.build("lenet"), n_networks=512, device="cuda", head="marginal")
    b = nads(lambda: nets.build("lenet"), n_networks=512, head="marginal")
    assert a.overlap(b, 5) > 0.8


def test_directions_of_three_channels_are_those_of_one_in_each() -> None:
    """App. E: u_i (x) e_k. With a wide step the second moment is that of one channel in each of three blocks, a third
    of it (the first layer has three times the inputs), and nothing between them.
    """

    def moment(channels: int, seed: int) -> Tensor:
        def build() -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 1)
            )

        found = nads(build, (channels, 6, 6), n_networks=3000, head="marginal", seed=seed)
        U = found.directions.flatten(1).double()
        return (U.T * found.eigenvalues) @ U

    expected = torch.kron(torch.eye(3, dtype=torch.float64), moment(1, 1)) / 3
    one, other = moment(3, 2), moment(3, 3)
    noise = float((one - other).norm() / expected.norm())
    assert noise < 0.1
    assert float(((one + other) / 2 - expected).norm() / expected.norm()) < noise


@pytest.mark.parametrize(("shape", "dims"), [((2, 6), 1), ((6,), 1), ((1, 4, 4, 4), 3), ((4, 4), 2)])
def test_fourier_energy_of_signals_and_volumes(shape: tuple[int, ...], dims: int) -> None:
    """A cosine along the last dimension, alike along all others: half of its energy at each of two frequencies."""
    n = shape[-1]
    wave = torch.cos(2 * torch.pi * torch.arange(n) / n).expand(shape)
    one = NADs(wave[None] / wave.norm(), torch.ones(1), torch.zeros(1), 1.0, 1, 0, "autograd", 0.0)
    channels = shape[0] if len(shape) > dims else 1
    wanted = torch.zeros(shape, dtype=torch.float64)
    for frequency in (n // 2 - 1, n // 2 + 1):
        wanted[(..., *[size // 2 for size in shape[len(shape) - dims : -1]], frequency)] = 0.5 / channels
    torch.testing.assert_close(one.fourier_energy(dims)[0], wanted)
    with pytest.raises(UnsupportedError, match="have no 5 dimensions"):
        one.fourier_energy(5)
