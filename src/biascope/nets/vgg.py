"""VGG for small images: 3x3 convolutions in five stages, each ended by a pooling."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from biascope.nets.parts import Activation, Norm, Pool, make_activation, make_norm2d, make_pool2d
from biascope.nets.registry import register
from biascope.support.errors import InputError
from biascope.support.limits import Count, Share
from biascope.support.signatures import checked

STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions per stage, by depth."""


@register("vgg11", summary="VGG-11 with batch norm, FC 512-512", input_shape=(1, 32, 32))
@register("vgg11-nobn", summary="VGG-11 without batch norm", input_shape=(1, 32, 32), norm="none")
@register(
    "vgg11-nopool",
    summary="VGG-11 without pooling; its first dense layer alone has 268 million weights",
    input_shape=(1, 32, 32),
    pool="none",
)
@register(
    "vgg19",
    summary="VGG-19 without batch norm, one linear head, width scalable",
    input_shape=(1, 32, 32),
    depth=19,
    norm="none",
    hidden=(),
    init="fan_in",
)
class VGG(nn.Module):
    """VGG-11, 13, 16 or 19: [n, in_channels, image_size, image_size] -> [n, outputs].

    Stages have width * (1, 2, 4, 8, 8) channels, width = 64 being the published one. `init`: "fan_out" draws
    convolution weights from N(0, 2 / (k^2 c_out)) with zero biases and leaves dense layers to torch (the NAD work);
    "fan_in" draws every weight from N(0, 2 / fan_in) with zero biases (the alignment work); "default" is torch's own.
    `pool="none"` removes the five poolings and enlarges the first dense layer; no convolution has a stride to remove.
    """

    @checked
    def __init__(
        self,
        *,
        depth: Literal[11, 13, 16, 19] = 11,
        in_channels: Count = 1,
        outputs: Count = 1,
        image_size: Count = 32,
        width: Count = 64,
        hidden: Sequence[Count] = (512, 512),
        dropout: Share = 0.5,
        norm: Norm = "batch",
        pool: Pool = "max",
        init: Literal["fan_out", "fan_in", "default"] = "fan_out",
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        side = image_size if pool == "none" else image_size // 2**5
        if side < 1:
            raise InputError(f"VGG: image_size={image_size} is too small for five poolings; it needs at least 32")
        self.features = nn.Sequential()
        channels = in_channels
        for stage, (convolutions, factor) in enumerate(zip(STAGES[depth], (1, 2, 4, 8, 8)), start=1):
            for index in range(1, convolutions + 1):
                self.features.add_module(f"conv{stage}_{index}", nn.Conv2d(channels, width * factor, 3, padding=1))
                self.features.add_module(f"norm{stage}_{index}", make_norm2d(norm, width * factor))
                self.features.add_module(f"act{stage}_{index}", make_activation(activation))
                channels = width * factor
            self.features.add_module(f"pool{stage}", make_pool2d(pool))
        self.classifier = nn.Sequential()
        fan_in = channels * side**2
        for index, fan_out in enumerate(hidden, start=1):
            if dropout:
                self.classifier.add_module(f"drop{index}", nn.Dropout(dropout))
            self.classifier.add_module(f"fc{index}", nn.Linear(fan_in, fan_out))
            self.classifier.add_module(f"act{index}", make_activation(activation))
            fan_in = fan_out
        self.classifier.add_module(f"fc{len(hidden) + 1}", nn.Linear(fan_in, outputs))
        if init != "default":
            self._initialise(init)

    def _initialise(self, init: str) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d) or (init == "fan_in" and isinstance(module, nn.Linear)):
                fan = module.weight[0].numel() if init == "fan_in" else module.weight[:, 0].numel()
                nn.init.normal_(module.weight, std=(2 / fan) ** 0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_channels, image_size, image_size] -> [n, outputs]."""
        out: Tensor = self.classifier(self.features(x).flatten(1))
        return out
