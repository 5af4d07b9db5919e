"""The weights a network starts from have the distribution the papers give."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

from biascope import nets


def assert_normal(weight, variance):
    """Sample mean and variance within 5 standard errors of N(0, variance), and normal by Kolmogorov-Smirnov."""
    w = weight.detach().double().flatten()
    n = w.numel()
    assert abs(w.mean()) < 5 * math.sqrt(variance / n)
    assert abs(w.var() / variance - 1) < 5 * math.sqrt(2 / n)
    assert stats.kstest((w[:5000] / math.sqrt(variance)).numpy(), "norm").pvalue > 1e-4


def assert_uniform(weight, bound):
    w = weight.detach().double().flatten()
    assert w.abs().max() <= bound
    assert stats.kstest((w[:5000] / bound).numpy(), stats.uniform(-1, 2).cdf).pvalue > 1e-4


@pytest.fixture(scope="module")
def bn_free():
    return nets.build("resnet18-nobn", seed=0, in_channels=3, width=32, outputs=10)


def test_bn_free_resnet_variances(bn_free):
    seen = {0.2: 0, 1.0: 0, 2.0: 0}
    for name, module in bn_free.named_modules():
        if isinstance(module, nn.Conv2d):
            k = module.in_channels * module.kernel_size[0] ** 2
            gain = 0.2 if name.endswith("conv2") else 1.0 if "stem" in name or "shortcut" in name else 2.0
            seen[gain] += 1
            assert_normal(module.weight, gain / k)
            assert not module.bias.any()
    assert seen == {0.2: 8, 1.0: 1 + 3, 2.0: 8}
    assert_normal(bn_free.fc.weight, 2 / 256)
    assert not bn_free.fc.bias.any()


def test_bn_free_scale_survives_depth():
    """Without a norm the default initialisation shrinks the signal; the BN-free one keeps its order of magnitude."""
    x = torch.randn(8, 1, 32, 32, generator=torch.Generator().manual_seed(0))

    def gain(**options):
        net = nets.build("resnet18-nobn", seed=0, width=16, **options)
        return (net.stages(net.stem(x)).pow(2).mean() / net.stem(x).pow(2).mean()).item()

    assert 0.1 < gain() < 30
    assert gain(init="default") < 0.1


@pytest.mark.parametrize("depth", [11, 19])
def test_vgg_convolutions_have_fan_out_variance(depth):
    net = nets.build("vgg11", seed=1, depth=depth, width=32, hidden=(64,))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            assert_normal(module.weight, 2 / (9 * module.out_channels))
            assert not module.bias.any()
    assert_uniform(net.classifier.fc1.weight, 1 / math.sqrt(256))  # dense layers are left to torch


def test_vgg_fan_in_reaches_every_layer():
    net = nets.build("vgg19", seed=1, width=32, outputs=10)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert_normal(module.weight, 2 / module.weight[0].numel())
            assert not module.bias.any()


def test_vgg_default_init_is_torchs():
    conv = nets.build("vgg11", seed=1, width=32, init="default").features.conv3_2
    assert_uniform(conv.weight, 1 / math.sqrt(128 * 9))
    assert conv.bias.any()


def test_siren_bounds():
    net = nets.build("siren", seed=0, in_features=3, w0=100.0, w_h=30.0, outputs=64)
    assert_uniform(net.layers.fc1.weight, 1 / 3)  # whatever w0 is
    for name in ("fc2", "fc3", "fc4", "fc5"):
        assert_uniform(net.layers.get_submodule(name).weight, math.sqrt(6 / 256) / 30)
    assert [m.frequency for m in net.layers if hasattr(m, "frequency")] == [100, 30, 30, 30]


def test_siren_scale_survives_depth():
    """What that initialisation is for.

    q = E (w_h (W z + b))^2 follows q -> 1 - exp(-2 q) + w_h^2 / (3 n) from layer to layer, z = sin(Gaussian).
    """
    n, w_h = 512, 30.0
    net = nets.build("siren", seed=0, hidden=(n,) * 6, w_h=w_h)
    z = torch.rand(500, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    z = net.layers.sine1(net.layers.fc1(z))  # sines of wide phases: E z^2 = 1/2
    from_bias = w_h**2 / (3 * n)
    q = 1 + from_bias
    for index in range(2, 7):
        pre = net.layers.get_submodule(f"fc{index}")(z)
        assert (w_h * pre).pow(2).mean().item() == pytest.approx(q, rel=0.06)
        z = net.layers.get_submodule(f"sine{index}")(pre)
        q = 1 - math.exp(-2 * q) + from_bias


def test_ntk_parametrisation_has_unit_variance():
    net = nets.build("mlp-ntk", seed=0)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            assert_normal(module.weight, 1.0)
    assert_normal(torch.cat([m.bias for m in net.modules() if isinstance(m, nn.Linear)]), 1.0)


def test_ntk_forward_is_the_formula():
    net = nets.build("mlp-ntk", seed=0, in_features=5, hidden=(7, 6), outputs=2, activation="tanh").double()
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fc = [m for m in net.modules() if isinstance(m, nn.Linear)]
    z = torch.tanh(x @ fc[0].weight.T / math.sqrt(5) + fc[0].bias)
    z = torch.tanh(z @ fc[1].weight.T / math.sqrt(7) + fc[1].bias)
    expected = z @ fc[2].weight.T / math.sqrt(6) + fc[2].bias
    torch.testing.assert_close(net(x), expected)


def test_ntk_outputs_are_stable_in_width():
    """Var f = (E h^2) + 1 layer by layer: for ReLU q -> q/2 + 1, whatever the width; the standard one differs."""
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    x = x / x.norm() * 8  # |x|^2 / 64 = 1, so q1 = 2, q2 = 2, q3 = 2
    for width in (64, 256):
        outputs = [nets.build("mlp-ntk", seed=s, in_features=64, hidden=(width, width))(x).item() for s in range(600)]
        assert torch.tensor(outputs).var() == pytest.approx(2.0, rel=0.25)


def test_vit_positions_and_class_token():
    net = nets.build("vit", seed=0)
    assert_normal(net.positions, 0.02**2)
    assert_normal(net.class_token, 0.02**2)


def test_linear_pooling_standard_deviations():
    net = nets.build("linear-pooling", seed=0, in_features=40_000, stride=4, s_theta=0.3, s_phi=2.0)
    assert_normal(net.theta, 0.3**2)
    assert_normal(net.phi, 2.0**2)


def test_fourier_frequencies():
    net = nets.build("ffn", seed=0, sigma=10.0, mapping_size=2000)
    assert_normal(net.features.frequencies, 100.0)
    assert "features.frequencies" not in dict(net.named_parameters())
    assert "features.frequencies" in net.state_dict()


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_batch_norm_nets_start_with_torchs_default(name):
    options = {"width": 16} if name == "resnet18" else {"blocks": (2, 2), "growth": 16}
    net = nets.build(name, seed=0, **options)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias is None
            assert_uniform(module.weight, 1 / math.sqrt(module.weight[0].numel()))
