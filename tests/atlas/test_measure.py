"""Fingerprints against closed forms: linear models, kernels of known harmonics, gradients of known spectra."""

import math

import pytest
import torch
from torch import nn

from biascope.atlas import Fingerprint, fingerprint
from biascope.atlas.measure import (
    band_profile,
    centred_shares,
    harmonic_shares,
    image_maps,
    normalised,
    participation,
    power_shares,
)
from biascope.atlas.probing import circle, inputs, kind_of
from biascope.support.errors import InputError


@pytest.fixture(scope="module")
def linear() -> Fingerprint:
    def build() -> nn.Module:
        net = nn.Linear(12, 1, bias=False)
        nn.init.normal_(net.weight)
        return net

    return fingerprint(build, (12,))


def test_linear_models_learn_the_first_harmonic_only(linear: Fingerprint) -> None:
    # K = x x' and f = w x on a cos t + b sin t: nothing but cos t and sin t
    assert linear.learning[:, 1] == pytest.approx(1, abs=1e-5)
    assert linear.function[:, 1] == pytest.approx(1, abs=1e-5)
    assert linear.mean_harmonic == pytest.approx(1, abs=1e-5)


def test_the_kernel_of_a_linear_model_has_the_rank_of_its_inputs(linear: Fingerprint) -> None:
    assert (linear.kernel[:, 12:] < 1e-6).all()
    assert (linear.kernel[:, 11] > 1e-3).all()


def test_gradients_of_independent_weights_spread_over_all_directions(linear: Fingerprint) -> None:
    # G = I: participation ratio D; 32 networks leave an error of about a tenth
    assert linear.spread == pytest.approx(1, abs=0.4)
    assert linear.bands.shape == (2, 0)


def test_only_the_constant_is_shared_when_only_a_bias_is_trained() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5), requires_grad=False)
            self.bias = nn.Parameter(torch.randn(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight)[:, None] + self.bias

    found = fingerprint(Constant, (5,))
    assert found.constant == pytest.approx(1, abs=1e-5)
    assert found.learning[:, 0] == pytest.approx(1, abs=1e-5)


def test_harmonics_of_a_known_kernel() -> None:
    n = 32
    t = torch.arange(n, dtype=torch.float64) * 2 * math.pi / n
    features = torch.stack(
        [0.5 + 0 * t, *(w * f(k * t) for k, w in ((1, 2.0), (5, 1.0)) for f in (torch.sin, torch.cos))]
    )
    features = torch.cat([features, 3.0 * torch.cos(16 * t)[None]])
    shares = harmonic_shares(features.T @ features)
    # n |w|^2 for a pair of sine and cosine, n w^2 for the constant and for Nyquist's
    expected = torch.zeros(17, dtype=torch.float64)
    expected[0], expected[1], expected[5], expected[16] = 0.25, 4.0, 1.0, 9.0
    assert shares == pytest.approx(expected / expected.sum(), abs=1e-12)


def test_centred_shares_against_numpy_like_definition() -> None:
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = rows - rows.mean(0)
    expected = torch.linalg.svdvals(centred).square() / rows.square().sum()
    assert centred_shares(rows @ rows.T)[:4] == pytest.approx(expected, abs=1e-12)


def test_bands_of_white_and_of_constant_gradients() -> None:
    rng = torch.Generator().manual_seed(0)
    white = torch.randn(400, 3, 16, 16, generator=rng, dtype=torch.float64)
    assert band_profile(white, "image") == pytest.approx(torch.zeros(6), abs=0.2)
    flat = torch.ones(4, 3, 16, 16, dtype=torch.float64)
    assert float(band_profile(flat, "image")[0]) == pytest.approx(math.log2(16 * 16))
    assert (band_profile(flat, "image")[1:] == -20).all()


def test_a_wave_lies_in_its_band_and_its_mode() -> None:
    t = torch.arange(32, dtype=torch.float64)
    wave = torch.cos(2 * math.pi * 6 / 32 * t).expand(1, 1, 32, 32)  # 6 / 16 of Nyquist's: the band up to 1/2
    assert int(band_profile(wave, "image").argmax()) == 3
    modes, places = image_maps(wave, "image")
    top = {divmod(int(i), 32) for i in modes.flatten().topk(2).indices}
    assert top == {(16, 16 + 6), (16, 16 - 6)}
    assert places.shape == (32, 32)


def test_participation_of_k_directions() -> None:
    rng = torch.Generator().manual_seed(0)
    gradients = torch.zeros(1000, 2, 40, dtype=torch.float64)
    gradients[..., :10] = torch.randn(1000, 1, 10, generator=rng, dtype=torch.float64)
    # the two gradients of a network are the same: only pairs of different networks count
    assert float(participation(gradients)) == pytest.approx(10 / 40, rel=0.03)


def test_power_on_a_circle() -> None:
    t = torch.arange(32, dtype=torch.float64) * 2 * math.pi / 32
    shares = power_shares(7 + 3 * torch.sin(2 * t) + torch.cos(16 * t) / math.sqrt(2))
    expected = torch.zeros(17, dtype=torch.float64)
    expected[2], expected[16] = 0.9, 0.1  # mean squares 4.5 and 0.5
    assert shares == pytest.approx(expected, abs=1e-12)
    assert power_shares(7 + 1e-8 * torch.sin(t)).isnan().all()


def test_batch_norm_has_the_statistics_of_its_inputs() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 1))
    x = 5 + 2 * torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    norm = normalised(net, x)[1]  # type: ignore[index]
    hidden = net[0](x)
    assert torch.allclose(norm.running_mean, hidden.mean(0), atol=1e-5)
    assert torch.allclose(norm.running_var, hidden.var(0), rtol=1e-4)
    assert norm.momentum == 0.1
    assert not any(m.training for m in net.modules())


def test_inputs_have_unit_size_and_circles_stay_natural() -> None:
    for kind, shape in (("image", (3, 16, 16)), ("signal", (2, 64)), ("tabular", (200,))):
        x = inputs(kind, shape, 20, 0)
        assert x.square().mean() == pytest.approx(1, abs=0.1), kind
        ring = circle(kind, shape, 8, 0)
        assert torch.allclose(ring[0], -ring[4], atol=1e-6), kind
    assert inputs("coordinates", (2,), 100, 0).abs().max() <= 1
    assert circle("coordinates", (2,), 8, 0).norm(dim=1) == pytest.approx(torch.full((8,), 0.7), abs=1e-6)


def test_images_are_stronger_at_low_frequencies() -> None:
    power = torch.fft.fft2(inputs("image", (1, 32, 32), 50, 0)).abs().square().mean((0, 1))
    # amplitudes 1/f: eight times the frequency has 1/64 of the power
    assert float(power[0, 1] / power[0, 8]) == pytest.approx(64, rel=0.5)


def test_the_seed_decides(linear: Fingerprint) -> None:
    again = [fingerprint("logreg", (1, 8, 8), seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(again[0].kernel, again[1].kernel)
    assert not torch.equal(again[0].kernel, again[2].kernel)


def test_shapes_without_a_kind_are_named() -> None:
    with pytest.raises(InputError, match="no place in the atlas"):
        kind_of((1, 2, 3, 4))
