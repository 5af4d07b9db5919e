"""DenseNet for small images: every layer sees all the maps before it in its block."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from biascope.nets.parts import Activation, Norm, make_activation, make_norm2d
from biascope.nets.registry import register
from biascope.support.errors import InputError
from biascope.support.limits import Count, Share
from biascope.support.signatures import checked


class DenseLayer(nn.Module):
    """norm-act-conv1(4 growth)-norm-act-conv3(growth), and the input kept beside it."""

    def __init__(self, inputs: int, *, growth: int, norm: Norm = "batch", activation: Activation = "relu") -> None:
        super().__init__()
        bias = norm == "none"
        self.norm1 = make_norm2d(norm, inputs)
        self.act1 = make_activation(activation)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=bias)
        self.norm2 = make_norm2d(norm, 4 * growth)
        self.act2 = make_activation(activation)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, s, s] -> [n, inputs + growth, s, s]."""
        new = self.conv2(self.act2(self.norm2(self.conv1(self.act1(self.norm1(x))))))
        return torch.cat([x, new], dim=1)


@register("densenet121", summary="DenseNet-121, CIFAR variant, batch norm", input_shape=(1, 32, 32))
@register("densenet121-nopool", summary="DenseNet-121 without any pooling", input_shape=(1, 32, 32), pool="none")
class DenseNet(nn.Module):
    """3x3 stem and dense blocks with transitions between them: [n, in_channels, side, side] -> [n, outputs].

    A transition keeps the fraction `compression` of the channels and halves the side by average pooling. `pool`: "avg",
    or "none", which removes the transitions' pooling and the final one; every pixel then goes to the dense layer, and
    there is no strided convolution to remove. `norm`: "batch", or "none", where the convolutions get biases instead.
    """

    @checked
    def __init__(
        self,
        *,
        in_channels: Count = 1,
        outputs: Count = 1,
        image_size: Count = 32,
        blocks: Sequence[int] = (6, 12, 24, 16),
        growth: Count = 32,
        compression: Share = 0.5,
        pool: Literal["avg", "none"] = "avg",
        norm: Norm = "batch",
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        halvings = len(blocks) - 1 if pool == "avg" else 0
        side = image_size // 2**halvings
        if side < 1:
            raise InputError(f"DenseNet: image_size={image_size} is too small for {halvings} poolings")
        bias = norm == "none"
        channels = 2 * growth
        self.stem = nn.Conv2d(in_channels, channels, 3, padding=1, bias=bias)
        self.features = nn.Sequential()
        for index, layers in enumerate(blocks, start=1):
            block = nn.Sequential()
            for _ in range(layers):
                block.append(DenseLayer(channels, growth=growth, norm=norm, activation=activation))
                channels += growth
            self.features.add_module(f"block{index}", block)
            if index < len(blocks):
                fewer = math.floor(channels * compression + 1e-9)  # 100 * 0.29 is 28.999...
                if not fewer:
                    raise InputError(f"DenseNet: compression={compression} leaves none of {channels} channels")
                transition = nn.Sequential()
                transition.add_module("norm", make_norm2d(norm, channels))
                transition.add_module("act", make_activation(activation))
                transition.add_module("conv", nn.Conv2d(channels, fewer, 1, bias=bias))
                transition.add_module("pool", nn.AvgPool2d(2) if pool == "avg" else nn.Identity())
                self.features.add_module(f"transition{index}", transition)
                channels = fewer
        self.norm = make_norm2d(norm, channels)
        self.act = make_activation(activation)
        self.pool = nn.AdaptiveAvgPool2d(1) if pool == "avg" else nn.Identity()
        self.fc = nn.Linear(channels if pool == "avg" else channels * side**2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_channels, image_size, image_size] -> [n, outputs]."""
        maps = self.act(self.norm(self.features(self.stem(x))))
        out: Tensor = self.fc(self.pool(maps).flatten(1))
        return out
