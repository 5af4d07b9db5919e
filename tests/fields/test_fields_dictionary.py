"""Atoms and energies against dense Jacobians and against a network whose atoms are known waves."""

import math

import pytest
import torch
from torch import Tensor, nn

from biascope.fields import Dictionary, coordinates, dictionary, fit
from biascope.fields.atoms import Energy
from biascope.fields.networks import seeded
from biascope.nets import FFN, SIREN
from biascope.support.errors import InputError, UnsupportedError
from fields.field_pictures import blobs


class Waves(nn.Module):
    """Linear in its weights on features a_k cos(2 pi k r): the atoms are cosines, with eigenvalues a_k^2 N / 2."""

    def __init__(self, sizes: list[float]) -> None:
        super().__init__()
        self.sizes = sizes
        self.linear = nn.Linear(len(sizes), 1, bias=False).double()

    def forward(self, r: Tensor) -> Tensor:
        k = torch.arange(1, len(self.sizes) + 1, dtype=torch.float64)
        features = torch.tensor(self.sizes, dtype=torch.float64) * torch.cos(2 * torch.pi * r * k)
        out: Tensor = self.linear(features)
        return out


def test_atoms_that_are_known() -> None:
    n, sizes = 32, [1.0, 3.0, 0.1]
    r = coordinates(n, 0.0, 1.0, torch.float64)
    found, whole = dictionary(Waves(sizes), r, k=3), dictionary(Waves(sizes), r)
    torch.testing.assert_close(found.values, torch.tensor([9.0, 1.0, 0.01], dtype=torch.float64) * n / 2)
    waves = torch.stack([torch.cos(2 * torch.pi * k * r[:, 0]) for k in (2, 1, 3)]) * math.sqrt(2 / n)
    torch.testing.assert_close((found.images() * waves).sum(1).abs(), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(found.centroids(), torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64))
    # 4 cos 2 + 3 cos 1 + 2 (the mean) + 5 sin 4 (in no atom): 16 + 9 of 50 without the mean
    signal = waves.T @ torch.tensor([4.0, 3.0, 0.0], dtype=torch.float64)
    signal = signal + 2 + 5 * math.sqrt(2 / n) * torch.sin(2 * torch.pi * 4 * r[:, 0])
    energy = whole.energy(signal, [1.0, 0.2, 0.1, 1e-6, 0.0])
    torch.testing.assert_close(energy.mean, torch.tensor([16.0, 16.0, 25.0, 25.0, 50.0], dtype=torch.float64) / 50)
    torch.testing.assert_close(found.energy(signal, [1.0, 0.2, 0.1]).mean, energy.mean[:3])
    with pytest.raises(UnsupportedError, match="3 of 32 atoms are held"):
        found.energy(signal)
    with_mean = whole.energy(signal, [1e-6], centered=False)
    assert float(with_mean.mean) == pytest.approx(25 / (50 + 4 * n))
    torch.testing.assert_close(found.coefficients(signal).abs()[0], torch.tensor([4.0, 3.0, 0.0], dtype=torch.float64))
    p = torch.tensor([9.0, 1.0, 0.01], dtype=torch.float64) / 10.01
    assert whole.effective_rank() == pytest.approx(math.exp(-float((p * p.log()).sum())))
    with pytest.raises(UnsupportedError, match="needs all 32 eigenvalues and there are 3"):
        found.effective_rank()


def test_atoms_are_those_of_the_dense_jacobian() -> None:
    net = seeded(SIREN, 0, hidden=(6, 5), outputs=2, w0=8.0).double()
    r = coordinates((5, 4), dtype=torch.float64)
    rows = []
    for point in r.reshape(-1, 2):
        out = net(point[None])[0, 1]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(out, list(net.parameters()))]))
    J = torch.stack(rows)
    found = dictionary(net, r, output=1)
    values, vectors = torch.linalg.eigh(J @ J.T)
    torch.testing.assert_close(found.values, values.flip(0).clamp(min=0), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close((found.atoms * vectors.flip(1)).sum(0).abs()[:8], torch.ones(8, dtype=torch.float64))
    assert found.images().shape == (20, 5, 4)
    torch.testing.assert_close(found.atoms.T @ found.atoms, torch.eye(20, dtype=torch.float64))


def random_dictionary(n: int = 12, seed: int = 0) -> Dictionary:
    gen = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=gen, dtype=torch.float64)).Q
    return Dictionary(10.0 ** -torch.arange(n, dtype=torch.float64), Q, (3, 4))


def test_d6_energy_is_monotone_and_ends_at_one() -> None:
    found = random_dictionary()
    signals = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(1))
    energy = found.energy(signals, [0.0, *(10.0**-k for k in range(11, -1, -1))], centered=False)
    assert bool((energy.shares.diff(dim=1) <= 1e-14).all())
    assert bool(((energy.shares >= 0) & (energy.shares <= 1 + 1e-12)).all())
    torch.testing.assert_close(energy.shares[:, 0], torch.ones(7, dtype=torch.float64))
    squares = found.coefficients(signals).square() / signals.double().square().sum((1, 2))[:, None]
    torch.testing.assert_close(energy.shares[:, -3], squares[:, :3].sum(1))
    torch.testing.assert_close(energy.mean, energy.shares.mean(0))
    torch.testing.assert_close(energy.standard_error, energy.shares.std(0) / math.sqrt(7))
    assert bool(found.energy(signals[0]).standard_error.isnan().all())
    # the printed denominator would scale with the signal
    torch.testing.assert_close(found.energy(9 * signals).shares, found.energy(signals).shares)


def test_d6_energy_does_not_depend_on_the_basis_of_an_eigenspace() -> None:
    found = random_dictionary()
    values = found.values.clone()
    values[2:5] = values[2]
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)).Q
    atoms = found.atoms.clone()
    atoms[:, 2:5] = atoms[:, 2:5] @ turn
    signals = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(3))
    one, two = (Dictionary(values, a, (3, 4)).energy(signals).shares for a in (found.atoms, atoms))
    torch.testing.assert_close(one, two)


def test_area() -> None:
    lam = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    assert Energy(lam, torch.tensor([[0.0, 0.5, 1.0]])).area == pytest.approx(0.5)
    assert Energy(lam, torch.ones(3, 3)).area == pytest.approx(1)
    mixed = torch.tensor([0, 2, 1])  # in this order the trapezia would give 0.2
    uneven = torch.tensor([[0.1, 0.7, 0.9]])  # trapezia of 0.4 and 0.8
    assert Energy(lam, uneven).area == pytest.approx(0.6)
    assert Energy(lam[mixed], uneven[:, mixed]).area == pytest.approx(0.6)
    assert Energy(lam.flip(0), uneven.flip(1)).area == pytest.approx(0.6)
    for bad in (torch.zeros(2), torch.ones(2), torch.ones(1)):
        with pytest.raises(InputError, match="two different thresholds"):
            _ = Energy(bad, torch.ones(1, len(bad))).area


def test_centroids_of_images() -> None:
    r = coordinates((16, 16), 0.0, 1.0, torch.float64)
    waves = [torch.cos(2 * torch.pi * (r @ torch.tensor(k, dtype=torch.float64))) for k in ([3.0, 4.0], [0.0, 2.0])]
    atoms = torch.stack([w.flatten() / w.norm() for w in waves], 1)
    found = Dictionary(torch.ones(2, dtype=torch.float64), atoms, (16, 16))
    torch.testing.assert_close(found.centroids(), torch.tensor([5.0, 2.0], dtype=torch.float64))


def test_d7_atoms_of_larger_w0_and_sigma_are_finer() -> None:
    r = coordinates((16, 16))

    def centroid(nets: list[nn.Module]) -> float:
        return sum(float(dictionary(net, r, k=5).centroids().mean()) for net in nets) / len(nets)

    sirens = [centroid([seeded(SIREN, s, hidden=(64,) * 3, w0=w0) for s in (0, 1)]) for w0 in (5.0, 30.0, 100.0)]
    ffns = [
        centroid([seeded(FFN, s, hidden=(64,) * 3, mapping_size=64, sigma=v) for s in (0, 1)]) for v in (0.5, 1.0, 5.0)
    ]
    for found in (sirens, ffns):
        assert found[1] > 1.2 * found[0]
        assert found[2] > 1.2 * found[1]


def test_d7_energy_orders_psnr_after_few_steps() -> None:
    r, images = coordinates((16, 16)), blobs(12, 1)
    found = []
    for w0 in (1.0, 5.0, 30.0, 100.0):
        net = seeded(SIREN, 0, hidden=(64,) * 3, w0=w0, output_offset=0.5)
        db = [fit(net, r, image, steps=10, lr=1e-3).psnr for image in images]
        found.append((dictionary(net, r).energy(images).area, sum(db) / len(db)))
    assert [b for _, b in sorted(found)] == sorted(b for _, b in found)
    assert max(b for _, b in found) > min(b for _, b in found) + 5


def test_d7_one_image_makes_a_worse_dictionary_for_others() -> None:
    r, net = coordinates((16, 16)), seeded(SIREN, 0, hidden=(64,) * 3, w0=30.0, output_offset=0.5)
    one = fit(net, r, blobs(1, 0)[0], steps=500, lr=1e-4).model
    before, after = (dictionary(m, r).energy(blobs(30, 1)) for m in (net, one))
    gain = after.shares.mean(1) - before.shares.mean(1)
    assert float(gain.mean() + 2 * gain.std() / math.sqrt(30)) < 0


def test_what_cannot_be_is_refused() -> None:
    found = random_dictionary()
    with pytest.raises(InputError, match="grid \\[3, 4\\]"):
        found.energy(torch.ones(2, 12))
    with pytest.raises(InputError, match="signal 1 is constant"):
        found.energy(torch.stack([torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)]))
    with pytest.raises(InputError, match="NaN"):
        found.energy(torch.full((3, 4), torch.nan))
    with pytest.raises(InputError, match="r has shape"):
        dictionary(nn.Linear(2, 1), torch.ones(3))


def test_pictures() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    found = random_dictionary()
    figure = found.plot(5)
    assert sum(bool(ax.images) for ax in figure.axes) == 5
    curve = found.energy(torch.randn(3, 3, 4)).plot()
    assert len(curve.axes[0].lines) == 1
    line = Dictionary(found.values, found.atoms, (12,)).plot(3)
    assert sum(bool(ax.lines) for ax in line.axes) == 3
    with pytest.raises(InputError, match="no picture"):
        Dictionary(found.values, found.atoms, (3, 2, 2)).plot()
    plt.close("all")
