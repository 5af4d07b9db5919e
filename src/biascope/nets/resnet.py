"""ResNet for small images: 3x3 stem, four stages of basic blocks, average pooling."""

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from biascope.nets.parts import Activation, Norm, make_activation, make_norm2d
from biascope.nets.registry import register
from biascope.support.limits import Count
from biascope.support.signatures import checked


class BasicBlock(nn.Module):
    """act(conv(act(conv(x))) + shortcut(x)), each convolution followed by the norm."""

    def __init__(
        self, inputs: int, outputs: int, *, stride: int = 1, norm: Norm = "batch", activation: Activation = "relu"
    ) -> None:
        super().__init__()
        bias = norm == "none"  # a norm has a shift of its own
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=bias)
        self.norm1 = make_norm2d(norm, outputs)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias)
        self.norm2 = make_norm2d(norm, outputs)
        self.act2 = make_activation(activation)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.add_module("conv", nn.Conv2d(inputs, outputs, 1, stride=stride, bias=bias))
            self.shortcut.add_module("norm", make_norm2d(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, s, s] -> [n, outputs, s', s']."""
        residual = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        out: Tensor = self.act2(residual + self.shortcut(x))
        return out


@register("resnet18", summary="ResNet-18, CIFAR variant, batch norm", input_shape=(1, 32, 32))
@register(
    "resnet18-nobn",
    summary="ResNet-18 without batch norm, with the initialisation made for that",
    input_shape=(1, 32, 32),
    norm="none",
    init="bn_free",
)
@register(
    "resnet18-nopool",
    summary="ResNet-18 without the final pooling; stride=1 also removes the strides",
    input_shape=(1, 32, 32),
    pool="none",
)
@register("resnet34", summary="ResNet-34, CIFAR variant, batch norm", input_shape=(1, 32, 32), blocks=(3, 4, 6, 3))
class ResNet(nn.Module):
    """Stem conv3, then stages of width * (1, 2, 4, 8) channels: [n, in_channels, side, side] -> [n, outputs].

    `blocks`: (2, 2, 2, 2) is ResNet-18, (3, 4, 6, 3) is ResNet-34. `stride`: of the first block of stages 2 to 4; 1
    keeps the full resolution. `pool`: "avg", the global average (4x4 for images of 32), or "none", every pixel goes to
    the dense layer. `norm`: "batch", or "none", where the convolutions get biases instead.

    `init`: "default" is torch's own; "bn_free", for a network without norm and with fan-in k, has weight variances 2/k
    after an activation, 1/k in the stem and in the shortcuts, 0.2/k in the last convolution of each block, and zero
    biases. (The text says that scale is divided by ten; it is the variance.) The dense layer, behind an activation and
    the pooling, has 2/k.
    """

    @checked
    def __init__(
        self,
        *,
        in_channels: Count = 1,
        outputs: Count = 1,
        image_size: Count = 32,
        blocks: Sequence[Count] = (2, 2, 2, 2),
        width: Count = 64,
        stride: Count = 2,
        pool: Literal["avg", "none"] = "avg",
        norm: Norm = "batch",
        init: Literal["default", "bn_free"] = "default",
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential()
        self.stem.add_module("conv", nn.Conv2d(in_channels, width, 3, padding=1, bias=norm == "none"))
        self.stem.add_module("norm", make_norm2d(norm, width))
        self.stem.add_module("act", make_activation(activation))
        self.stages = nn.Sequential()
        channels, side = width, image_size
        for stage, count in enumerate(blocks):
            wide, step = width * 2**stage, stride if stage else 1
            side = math.ceil(side / step)
            self.stages.append(
                nn.Sequential(
                    BasicBlock(channels, wide, stride=step, norm=norm, activation=activation),
                    *(BasicBlock(wide, wide, norm=norm, activation=activation) for _ in range(count - 1)),
                )
            )
            channels = wide
        self.pool = nn.AdaptiveAvgPool2d(1) if pool == "avg" else nn.Identity()
        self.fc = nn.Linear(channels if pool == "avg" else channels * side**2, outputs)
        if init == "bn_free":
            self._initialise_bn_free()

    def _initialise_bn_free(self) -> None:
        for name, module in self.named_modules():
            if not isinstance(module, (nn.Conv2d, nn.Linear)):
                continue
            behind_nothing = name == "stem.conv" or name.endswith("shortcut.conv")
            gain = 0.2 if name.endswith("conv2") else 1.0 if behind_nothing else 2.0
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=math.sqrt(gain / fan_in))
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_channels, image_size, image_size] -> [n, outputs]."""
        out: Tensor = self.fc(self.pool(self.stages(self.stem(x))).flatten(1))
        return out
