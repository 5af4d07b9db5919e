"""Imperfect recovery, aliasing and fitting: closed forms, exact identities, and small trainings under their bounds."""

import math

import pytest
import torch
from torch import Tensor, nn

from biascope.fields import alias_test, coordinates, fit, frozen_siren, recovery_bound, single_frequency
from biascope.fields.fitting import psnr
from biascope.fields.networks import seeded
from biascope.nets import FFN, MLP, SIREN
from biascope.support.errors import InputError


def picture(n: int = 32, channels: int = 3) -> Tensor:
    """A smooth picture with an edge, in [0, 1]."""
    r = coordinates((n, n), dtype=torch.float64)
    x, y = r[..., 0], r[..., 1]
    waves = [0.5 + 0.2 * torch.sin(math.pi * (k + 1) * x + k) * torch.cos(math.pi * y) for k in range(channels)]
    return torch.stack([torch.where(x + 0.3 * y > 0.2, w + 0.25, w) for w in waves], -1)


def odd_energy(image: Tensor) -> float:
    """Share of the energy at DFT bins with an odd index along any axis."""
    power = torch.fft.fft2(image.double(), dim=(0, 1)).abs().square().sum(-1)
    odd = torch.arange(len(image)) % 2 == 1
    return float(power[odd[:, None] | odd[None]].sum() / power.sum())


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_d3_one_frequency_leaves_odd_bins_empty(activation: str) -> None:
    """Check D3: whatever the weights, and to rounding; f0 = 0.5 has energy there."""
    r = coordinates((32, 32), dtype=torch.float64)
    whole, half = (single_frequency(f0, hidden=(64, 64), activation=activation).double() for f0 in (1.0, 0.5))
    with torch.no_grad():
        assert odd_energy(whole(r)) < 1e-28
        assert odd_energy(whole.float()(r.float())) < 1e-10
        assert odd_energy(half(r) - half(r).mean((0, 1))) > 0.3
        torch.testing.assert_close(half(r + 2), half(r))
    closed = torch.stack([torch.linspace(-1, 1, 32, dtype=torch.float64)] * 2)
    points = torch.stack(torch.meshgrid(*closed, indexing="ij"), -1)
    assert odd_energy(whole.double()(points).detach()) > 1e-6  # the end point must be left out


def test_d3_frozen_siren_does_the_same() -> None:
    net = frozen_siren(torch.eye(2), hidden=(16, 16)).double()
    assert odd_energy(net(coordinates((16, 16), dtype=torch.float64)).detach()) < 1e-28


def test_the_bound_is_the_mean_of_shifts_and_the_energy_of_odd_bins() -> None:
    image = picture()
    found = recovery_bound(image, f0=1.0)
    shifts = [image.roll((16 * i, 16 * j), (0, 1)) for i in (0, 1) for j in (0, 1)]
    torch.testing.assert_close(found.best, torch.stack(shifts).mean(0))
    assert found.psnr == pytest.approx(psnr(torch.stack(shifts).mean(0), image))
    assert found.missing == pytest.approx(odd_energy(image), rel=1e-10)  # Parseval
    assert recovery_bound(image, 0.5).psnr == math.inf
    assert recovery_bound(found.best, 1.0).missing < 1e-30  # a projection
    signal = torch.arange(6.0)
    assert recovery_bound(signal, 1.0, extent=3.0, dims=1).best.tolist() == [2, 3, 2, 3, 2, 3]
    assert recovery_bound(signal**2, 0.75, extent=2.0, dims=1).best.tolist() == [8, 13, 4, 9, 8, 13]  # 1.5 periods


def test_d4_training_stays_under_the_bound_and_comes_near() -> None:
    image, r = picture(24), coordinates((24, 24))
    bound = recovery_bound(image, 1.0).psnr
    ghost = fit(single_frequency(1.0, hidden=(64, 64)), r, image, steps=400, lr=3e-3, every=20)
    assert bool((ghost.train_psnr <= bound + 1e-4).all())
    assert ghost.psnr > bound - 0.5
    sharp = fit(single_frequency(0.5, hidden=(64, 64)), r, image, steps=400, lr=3e-3)
    assert sharp.psnr > bound + 3  # nothing holds this one


class Tones(nn.Module):
    """0.7 of the tone and -0.3 of its alias, which is the tone on 128 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, r: Tensor) -> Tensor:
        both = 0.7 * torch.sin(2 * torch.pi * 23 * r) - 0.3 * torch.sin(2 * torch.pi * 105 * r)
        return self.scale * both


def test_the_alias_is_read_off_where_it_is_known() -> None:
    found = alias_test(Tones(), steps=1, lr=1e-30)
    assert found.amplitude == pytest.approx(0.7, abs=1e-12)
    assert found.alias_amplitude == pytest.approx(0.3, abs=1e-12)
    assert found.alias_ratio == pytest.approx(3 / 7, abs=1e-12)
    assert (found.frequency, found.alias, len(found.amplitudes)) == (23, 105, 129)
    assert found.train_mse < 1e-24
    assert found.test_mse == pytest.approx(0.3**2, abs=1e-12)  # (0.3^2 + 0.3^2) / 2
    with pytest.raises(InputError, match="frequency=64"):
        alias_test(Tones(), 64)


@pytest.mark.slow
def test_d5_aliasing_of_siren() -> None:
    """Check D5, the published setting: w0 = 300 folds, 30 does not; on an exact fit both amplitudes add up to 1."""
    found = {w0: alias_test(seeded(SIREN, 0, in_features=1, hidden=(128, 128), w0=w0).double()) for w0 in (30.0, 300.0)}
    assert found[30.0].amplitude == pytest.approx(1, abs=0.01)
    assert found[30.0].alias_amplitude < 0.005
    assert found[30.0].test_mse < 1e-3
    assert found[300.0].train_mse < 1e-6
    assert found[300.0].test_mse > 5e-3
    assert found[300.0].alias_ratio > 0.05
    assert found[300.0].amplitude + found[300.0].alias_amplitude == pytest.approx(1, abs=0.01)


# ------------------------------------------------------------------------------------------------------------ fit


def test_gradient_descent_has_the_closed_form_of_linear_regression() -> None:
    gen = torch.Generator().manual_seed(0)
    r = torch.randn(20, 3, generator=gen, dtype=torch.float64)
    y = torch.randn(20, 2, generator=gen, dtype=torch.float64)
    net, lr, steps = nn.Linear(3, 2, bias=False).double(), 0.05, 7
    found = fit(net, r, y, steps=steps, lr=lr, optimiser="gd")
    # loss = mean over 40 entries: W <- W - lr (2 / 40) (W X^T - Y^T) X
    H = torch.eye(3, dtype=torch.float64) - lr * 2 / 40 * r.T @ r
    best = torch.linalg.lstsq(r, y).solution.T
    W = best + (net.weight.detach() - best) @ torch.linalg.matrix_power(H, steps)
    torch.testing.assert_close(found.model.weight.detach(), W, rtol=1e-10, atol=1e-12)
    assert found.psnr == pytest.approx(-10 * math.log10(float((r @ W.T - y).square().mean())))
    assert float(found.losses[0]) == pytest.approx(float((net(r).detach() - y).square().mean()))


def test_adam_is_torchs_and_held_out_points_are_not_seen() -> None:
    r, image = coordinates((8, 8)), picture(8)[..., 0].float()
    mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    net = seeded(FFN, 0, hidden=(16,), mapping_size=8, sigma=1.0)
    changed = torch.where(mask, image, torch.tensor(9.0))
    found, same = (fit(net, r, v, steps=5, lr=1e-2, fitted=mask, every=2) for v in (image, changed))
    hand = seeded(FFN, 0, hidden=(16,), mapping_size=8, sigma=1.0)
    adam = torch.optim.Adam(hand.parameters(), lr=1e-2)
    for _ in range(5):
        adam.zero_grad()
        (hand(r[mask])[:, 0] - image[mask]).square().mean().backward()
        adam.step()
    for p, q, w in zip(found.model.parameters(), same.model.parameters(), hand.parameters()):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, w)
    assert found.steps_seen.tolist() == [0, 2, 4, 5]
    with torch.no_grad():
        assert float(found.test_psnr[-1]) == pytest.approx(psnr(found.model(r)[..., 0][~mask], image[~mask]))
    assert not torch.equal(found.test_psnr, same.test_psnr)
    assert bool(fit(net, r, image, steps=1).test_psnr.isnan().all())


def test_batches_are_seeded_and_nothing_is_touched() -> None:
    r, image = coordinates((8, 8)), picture(8)
    net = frozen_siren(torch.eye(2), hidden=(8,))
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    runs = [fit(net, r, image, steps=4, lr=1e-2, batch_size=10, seed=s) for s in (0, 0, 1)]
    assert torch.equal(runs[0].losses, runs[1].losses)
    assert not torch.equal(runs[0].losses, runs[2].losses)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(runs[0].model.layers[0].weight, net.layers[0].weight)  # the frozen layer
    assert all(p.grad is None for p in (*net.parameters(), *runs[0].model.parameters()))


def test_a_distance_and_a_video_are_fitted_too() -> None:
    disc = coordinates((16, 16)).norm(dim=-1) - 0.5
    net = seeded(SIREN, 0, hidden=(32, 32), w0=5.0)
    found = fit(net, coordinates((16, 16)), disc, steps=150, lr=1e-3)
    assert found.psnr > 25
    r = coordinates((3, 8, 8))
    moving = torch.sin(2 * r[..., 1] + r[..., 0])[..., None]
    clip = fit(seeded(SIREN, 0, in_features=3, hidden=(32, 32), w0=5.0), r, moving, steps=100, lr=1e-3)
    assert clip.psnr > clip.train_psnr[0] + 10


def test_what_cannot_be_fitted_is_refused() -> None:
    r, image = coordinates((4, 4)), torch.zeros(4, 4, 3)
    net = MLP(in_features=2, hidden=(4,), outputs=3, flatten=False)
    with pytest.raises(InputError, match="do not belong to coordinates"):
        fit(net, r, image[:3])
    with pytest.raises(InputError, match="but the values are"):
        fit(net, r, image[..., 0], steps=1)
    with pytest.raises(InputError, match="mask"):
        fit(net, r, image, fitted=torch.zeros(4, 4, dtype=torch.bool))
    wide, mask = coordinates((4, 6)), torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    with pytest.raises(InputError, match=r"mask \[4, 6\]"):  # as many entries, of other points
        fit(net, wide, torch.zeros(4, 6), fitted=mask)
    with pytest.raises(InputError, match="NaN"):
        fit(net, r, image / 0)
    with pytest.raises(InputError, match="optimiser='sgd'"):
        fit(net, r, image, optimiser="sgd")
    with pytest.raises(InputError, match="steps must be at least 1"):
        fit(net, r, image, steps=0)
    with pytest.raises(InputError, match="smaller lr"):
        fit(net, r, image + 1, steps=40, lr=1e12, optimiser="gd")
    with pytest.raises(InputError, match="requires_grad"):
        fit(net.requires_grad_(False), r, image)
    with pytest.raises(InputError, match="one period"):
        recovery_bound(torch.ones(9, 9), 1.0)
    with pytest.raises(InputError, match="one shape"):
        psnr(torch.zeros(2), torch.zeros(3))
