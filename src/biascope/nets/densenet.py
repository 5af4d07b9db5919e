"""DenseNet for small images: every layer sees all the maps before it in its block."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from biascope.errors import InputError
from biascope.signatures import checked

from .parts import Activation, check_choice, check_sizes, make_activation, make_norm2d
from .registry import register


class DenseLayer(nn.Module):
    """norm-act-conv1(4 growth)-norm-act-conv3(growth), and the input kept beside it.

    Example:
        >>> import torch
        >>> DenseLayer(8, growth=4)(torch.zeros(1, 8, 6, 6)).shape
        torch.Size([1, 12, 6, 6])
    """

    def __init__(self, inputs: int, *, growth: int, norm: str = "batch", activation: Activation = "relu") -> None:
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

    Example:
        >>> import torch
        >>> net = DenseNet(blocks=(2, 2), growth=4, outputs=10, activation="gelu")
        >>> net(torch.zeros(2, 1, 16, 16)).shape
        torch.Size([2, 10])
    """

    @checked
    def __init__(
        self,
        *,
        in_channels: int = 1,
        outputs: int = 1,
        image_size: int = 32,
        blocks: Sequence[int] = (6, 12, 24, 16),
        growth: int = 32,
        compression: float = 0.5,
        pool: str = "avg",
        norm: str = "batch",
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        check_sizes(in_channels=in_channels, outputs=outputs, image_size=image_size, growth=growth)
        if not 0 < compression <= 1:
            raise InputError(f"compression={compression} must lie in (0, 1]: the share of channels a transition keeps")
        check_choice("pool", pool, ("avg", "none"))
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
                    raise InputError(
                        f"DenseNet: compression={compression} leaves none of the {channels} channels of block {index}"
                    )
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
