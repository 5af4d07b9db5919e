"""Parameter counts and layer sizes are the ones the papers state. Built on the meta device: nothing is allocated."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from biascope import nets
from biascope.support.errors import InputError


def meta(name, **options):
    with torch.device("meta"):
        return nets.build(name, **options)


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("logreg", {"outputs": 2}, 2050),
        ("mlp", {"outputs": 2}, 1_014_502),
        ("mlp-ntk", {"outputs": 2}, 1_014_502),
        ("mlp", {"in_features": 3072, "hidden": (100, 100), "outputs": 2}, 317_602),
        ("mlp", {"in_features": 1024, "hidden": (100, 100), "outputs": 2}, 112_802),
        ("mlp", {"in_features": 3072, "hidden": (100, 100)}, 317_501),
        ("mlp", {"in_features": 784, "hidden": (512, 512), "outputs": 10}, 669_706),
        ("lenet", {"outputs": 2}, 61_026),
        ("lenet", {}, 60_941),
        ("lenet-avg", {"in_channels": 3}, 61_241),
        ("lenet-small", {"in_channels": 3, "outputs": 2}, 48_003),
        ("resnet18", {}, 11_168_193),
        # with 3 channels and 10 classes these two are the well-known counts of the CIFAR variants
        ("resnet18", {"in_channels": 3, "outputs": 10}, 11_173_962),
        ("resnet34", {"in_channels": 3, "outputs": 10}, 21_282_122),
        ("densenet121", {"in_channels": 3, "outputs": 10}, 6_956_298),
        ("densenet121", {}, 6_945_921),
        ("siren", {}, 198_401),
        ("relu-coords", {}, 198_401),
        ("linear-pooling", {}, 128 + 32),
        ("mobilenet-v2", {}, 3_504_872),  # torchvision's
        ("vgg19", {"in_channels": 3, "outputs": 10}, 20_029_514),
        # sum over the eight layers of (fan_in + 1) fan_out
        ("autoencoder", {}, 2_837_314),
    ],
)
def test_parameter_count(name, options, expected):
    assert count(meta(name, **options)) == expected


def test_autoencoder_count_by_hand():
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    assert count(meta("autoencoder")) == sum((a + 1) * b for a, b in pairwise(widths))
    linear = [m for m in meta("autoencoder").modules() if isinstance(m, nn.Linear)]
    assert [m.in_features for m in linear] + [linear[-1].out_features] == widths


@pytest.mark.parametrize(
    ("name", "options", "layer", "fan_in"),
    [
        ("lenet-nopool", {}, "classifier.fc1", 9216),
        ("lenet", {"padding": "same"}, "classifier.fc1", 1024),
        ("lenet", {"image_size": 28}, "classifier.fc1", 256),
        ("resnet18-nopool", {}, "fc", 8192),
        ("resnet18-nopool", {"stride": 1}, "fc", 524_288),
        ("vgg11-nopool", {}, "classifier.fc1", 524_288),
        ("vgg11", {"image_size": 64}, "classifier.fc1", 2048),
        ("densenet121", {}, "fc", 1024),
        ("densenet121-nopool", {}, "fc", 1_048_576),
        ("ffn", {}, "mlp.layers.fc1", 512),
        ("ffn", {"mapping": "octaves", "octaves": 6}, "mlp.layers.fc1", 24),
    ],
)
def test_first_dense_layer(name, options, layer, fan_in):
    assert meta(name, **options).get_submodule(layer).in_features == fan_in


@pytest.mark.parametrize("name", [n for n in nets.names() if n.endswith("nopool")])
def test_pooling_free_nets_hold_no_pooling(name):
    pools = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
    assert not any(isinstance(m, pools) for m in meta(name).modules())
    assert any(isinstance(m, pools) for m in meta(name.removesuffix("-nopool")).modules())


def test_strides_of_the_two_pooling_free_modes():
    def strides(**options):
        return {m.stride for m in meta("resnet18-nopool", **options).modules() if isinstance(m, nn.Conv2d)}

    assert strides() == {(1, 1), (2, 2)}
    assert strides(stride=1) == {(1, 1)}
    for name in ("lenet", "vgg11", "densenet121"):  # both modes coincide: nothing else is strided
        assert {m.stride for m in meta(name).modules() if isinstance(m, nn.Conv2d)} == {(1, 1)}


@pytest.mark.parametrize(("depth", "convolutions"), [(11, 8), (13, 10), (16, 13), (19, 16)])
def test_vgg_depths_and_width(depth, convolutions):
    net = meta("vgg11", depth=depth, width=16)
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == convolutions
    assert sorted({c.out_channels for c in convs}) == [16, 32, 64, 128]
    assert sum(isinstance(m, nn.MaxPool2d) for m in net.modules()) == 5


def test_vit_sizes():
    net = meta("vit", in_channels=3)
    assert net.positions.shape == (1, 17, 192)
    assert net.patches.weight.shape == (192, 3, 8, 8)
    assert len(net.blocks) == 9
    assert net.blocks[0].fc1.weight.shape == (768, 192)
    assert net.blocks[0].attention.heads == 12


def test_a_transition_keeps_the_floor_of_its_share_and_a_stage_has_a_block():
    net = meta("densenet121", blocks=(3, 1), growth=20, compression=0.29)  # 100 channels; in floats 28.999...
    assert net.features.transition1.conv.out_channels == 29
    assert meta("densenet121", blocks=(2, 1), growth=5, compression=0.33).features.transition1.conv.out_channels == 6
    with pytest.raises(InputError, match="leaves none of 3 channels"):
        meta("densenet121", blocks=(1, 1), growth=1, compression=0.1)
    with pytest.raises(InputError, match=r"blocks\[1\] must be at least 1"):
        meta("resnet18", blocks=(1, 0, 1))
