"""Building blocks of the spectral-bias studies: stacked Adam against torch's own, targets, ranks, neighbours."""

import copy
import math
from typing import Literal

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from biascope.ensembles import Networks
from biascope.spectral import amplitude_spectrum, spectral_norm
from biascope.studies import Run
from biascope.support import InputError
from biascope_papers.spectral.fitting import draw_mlps, fit, forward, norms_of, rank_correlation, relu_mlp
from biascope_papers.spectral.flowers import flower_classes, nearest_probability, plane
from biascope_papers.spectral.label_noise import binned, radial_wave, two_classes
from biascope_papers.spectral.paths import attack
from biascope_papers.spectral.sinusoids import wave_targets


@pytest.mark.parametrize("loss", ["mse", "bce"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_stack_trains_as_each_network_alone(loss: Literal["mse", "bce"], shared: bool) -> None:
    networks = draw_mlps(3, 2, 4, 8, seed=1)
    x = torch.randn(12, 2) if shared else torch.randn(3, 12, 2)
    y = torch.rand(3, 12).round()
    done = fit(networks, x, y, steps=25, lr=1e-2, every=10, loss=loss)
    assert done.steps.tolist() == [0, 10, 20, 25]
    for i in range(3):
        alone = copy.deepcopy(networks.module(i))
        adam = torch.optim.Adam(alone.parameters(), lr=1e-2)
        own = x if shared else x[i]
        criterion = nn.BCEWithLogitsLoss() if loss == "bce" else nn.MSELoss()
        assert float(done.losses[0, i]) == pytest.approx(float(criterion(alone(own)[:, 0], y[i]).detach()), rel=1e-5)
        for _ in range(25):
            adam.zero_grad()
            criterion(alone(own)[:, 0], y[i]).backward()
            adam.step()
        for name, value in alone.named_parameters():
            assert torch.allclose(value, done.networks.params[name][i], atol=2e-4), name
        assert float(done.losses[-1, i]) == pytest.approx(float(criterion(alone(own)[:, 0], y[i]).detach()), rel=1e-2)


def test_forward_is_the_module() -> None:
    networks, x = draw_mlps(4, 3, 5, 7, seed=0), torch.randn(9, 3)
    params = list(networks.params.values())
    expected = torch.stack([networks.module(i)(x)[:, 0] for i in range(4)])
    assert torch.allclose(forward(params, x), expected, atol=1e-6)
    assert torch.allclose(forward(params, x.expand(4, 9, 3)), expected, atol=1e-6)
    exact = torch.stack([spectral_norm(networks.params[f"{2 * i}.weight"]) for i in range(5)], 1)
    assert torch.allclose(norms_of(params, 2000), exact, rtol=1e-3)
    assert relu_mlp(1, 6, 256)[0].weight.shape == (256, 1)
    with pytest.raises(InputError, match="two Linear"):
        relu_mlp(1, 1, 4)


def test_clipping_bounds_every_network_by_its_own() -> None:
    networks = draw_mlps(2, 1, 3, 8, seed=0)
    x = torch.arange(10.0)[:, None] / 10
    done = fit(networks, x, 5 * x.T.expand(2, -1), steps=200, lr=1e-2, every=100, clip=torch.tensor([0.1, 10.0]))
    largest = torch.stack([p.abs().flatten(1).amax(1) for p in done.networks.params.values()]).amax(0)
    assert float(largest[0]) == pytest.approx(0.1)
    assert 0.1 < float(largest[1]) <= 10
    assert float(done.losses[-1, 1]) < 0.1 * float(done.losses[-1, 0])


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(InputError, match=r"need y \[T, n\], got \[3, 5\]"):
        fit(draw_mlps(2, 1, 2, 4, seed=0), torch.zeros(5, 1), torch.zeros(3, 5), steps=1)


@pytest.mark.gpu
def test_a_replayed_graph_trains_as_the_cpu_does() -> None:
    networks = draw_mlps(3, 1, 4, 32, seed=0)
    z, y = wave_targets([2, 3], [1.0, 1.0], 50, 3, seed=0)
    device = Networks(networks.template, {name: p.cuda() for name, p in networks.params.items()}, {})
    host, graph = (
        fit(each, z[:, None], y, steps=60, lr=1e-3, every=20, clip=torch.tensor([0.1, 0.5, 9.0]))
        for each in (networks, device)
    )
    assert torch.allclose(host.losses, graph.losses, rtol=1e-3)
    assert (graph.losses[-1] < graph.losses[0]).all()


def test_targets_have_their_amplitudes() -> None:
    z, y = wave_targets([5, 10, 15], [0.1, 0.5, 1.0], 200, 4, seed=3)
    spectrum = amplitude_spectrum(y)
    assert torch.allclose(spectrum[:, [5, 10, 15]], torch.tensor([0.1, 0.5, 1.0]).double().expand(4, 3))
    assert float(z[1]) == 1 / 200
    assert not torch.allclose(y[0], y[1])


def test_rank_correlation_is_spearmans() -> None:
    x, y = torch.tensor([1.0, 2.0, 2.0, 5.0, 7.0]), torch.randn(6, 5).round(decimals=0)
    y[:, 0] = 9.0
    expected = [spearmanr(x.numpy(), row.numpy()).statistic for row in y]
    assert np.allclose(rank_correlation(x, y).numpy(), expected)


def test_neighbours_are_sklearns() -> None:
    x, y, _ = flower_classes([(7, 3)], 120, 0.5, seed=1)
    grid = plane(20)
    for neighbours in (1, 3, 6):
        known = KNeighborsClassifier(neighbours).fit(x[0].numpy(), y[0].numpy())
        expected = known.predict_proba(grid.numpy())[:, 1]
        found = nearest_probability(x[0], y[0], grid, neighbours).numpy()
        assert np.mean(np.abs(found - expected) > 1e-6) < 0.02  # equal distances may be broken otherwise
    assert torch.equal(nearest_probability(x[0], y[0], x[0], 1), y[0])
    assert torch.allclose(plane(2), torch.tensor([[-1.6, -1.6], [0.0, -1.6], [-1.6, 0.0], [0.0, 0.0]]))


def test_cells_of_one_frequency_share_their_labels() -> None:
    x, y, majority = flower_classes([(5, 0), (5, 8), (10, 0)], 1000, 0.5, seed=2)
    assert torch.equal(y[0], y[1])
    assert not torch.equal(x[0], x[1])
    share = y.mean(1)
    assert torch.allclose(majority, torch.maximum(share, 1 - share).float())
    _, twin, _ = flower_classes([(200, 20)], 1000, 0.5, seed=2)
    assert len({tuple(c) for c in twin[0].reshape(-1, 5).tolist()}) == 1  # five phases, again and again


def test_radial_wave_and_its_printed_form() -> None:
    x = torch.randn(5, 3)
    assert torch.allclose(radial_wave(x, 0.3), torch.sin(2 * math.pi * 0.3 * x.norm(dim=1)))
    assert torch.allclose(radial_wave(x, 0.3, cycles=False), torch.sin(0.3 * x.norm(dim=1)))
    assert binned(torch.tensor([1.0, -3.0, 0.0, 2.0]), 2) == [2.0, 1.0]


def test_two_classes_are_split(tmp_path: object) -> None:
    run = Run.create(f"{tmp_path}/r", {"study": "x", "seed": 0, "device": "cpu"})
    x, y, x_val, y_val = two_classes(run, "digits", (3, 8), 100, seed=0)
    assert x.shape == (80, 64)
    assert x_val.shape == (20, 64)
    assert set(y.tolist()) == {0.0, 1.0}
    assert len(y_val) == 20
    with pytest.raises(InputError, match="two classes"):
        two_classes(run, "digits", (3,), 100, seed=0)


def test_attack_reaches_its_class() -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 3).requires_grad_(False)
    x = torch.randn(20, 6)
    moved = attack(net, x, target=2, steps=200)
    assert (net(moved).argmax(1) == 2).all()
    already = net(x).softmax(1)[:, 2] >= 0.9
    assert torch.equal(moved[already], x[already])
