"""MobileNetV2, whole or cut short, with the names of torchvision's weights."""

from torch import Tensor, nn

from biascope.nets.registry import register
from biascope.support.limits import Count
from biascope.support.signatures import checked

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""(expansion, channels, blocks, stride of the first) of every stage, Table 2 of the paper."""


def _conv(inputs: int, outputs: int, side: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU6."""
    conv = nn.Conv2d(inputs, outputs, side, stride, side // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class InvertedResidual(nn.Module):
    """Widen (1x1), filter each channel (3x3), narrow (1x1, no activation); plus x where the shapes allow."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([_conv(inputs, inner, 1)] if expansion > 1 else []),
            _conv(inner, inner, 3, stride=stride, groups=inner),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, s, s] -> [n, outputs, s', s']."""
        out: Tensor = self.conv(x)
        return x + out if self.residual else out


@register("mobilenet-v2", summary="MobileNetV2 for ImageNet; weights: data.load_weights", input_shape=(3, 224, 224))
class MobileNetV2(nn.Module):
    """Stem, `stages` stages of inverted residuals, global average, linear head: [n, c, side, side] -> [n, outputs].

    With the defaults, `load_state_dict(data.load_weights("mobilenet-v2"))` gives torchvision's ImageNet network. Fewer
    than 7 stages end in 16, 24, 32, 64, 96 or 160 channels instead of the last convolution's 1280. Initial weights are
    torchvision's, made for batch norm in training mode: before statistics are gathered, eval mode shrinks the signal.
    """

    @checked
    def __init__(
        self, *, in_channels: Count = 3, outputs: Count = 1000, image_size: Count = 224, stages: Count = 7
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(in_channels, 32, 3, stride=2)]
        channels = 32
        for expansion, width, blocks, stride in STAGES[:stages]:
            for block in range(blocks):
                step = stride if block == 0 else 1
                layers.append(InvertedResidual(channels, width, stride=step, expansion=expansion))
                channels = width
        if stages >= len(STAGES):
            layers.append(_conv(channels, 1280, 1))
            channels = 1280
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(channels, outputs))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_channels, image_size, image_size] -> [n, outputs]; other sides of 32 and more work too."""
        out: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return out
