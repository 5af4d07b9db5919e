"""LeNet: two 5x5 convolutions, two poolings, two hidden dense layers."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from biascope.nets.parts import Activation, Pool, make_activation, make_pool2d
from biascope.nets.registry import register
from biascope.support.errors import InputError
from biascope.support.limits import Count
from biascope.support.signatures import checked


@register("lenet", summary="conv5(6)-pool-conv5(16)-pool-120-84, max pooling", input_shape=(1, 32, 32))
@register("lenet-avg", summary="LeNet with average pooling", input_shape=(1, 32, 32), pool="avg")
@register(
    "lenet-small",
    summary="LeNet with average pooling and FC 96-67: about 48,000 parameters",
    input_shape=(1, 32, 32),
    pool="avg",
    hidden=(96, 67),
)
@register(
    "lenet-nopool", summary="LeNet without pooling, first dense layer enlarged", input_shape=(1, 32, 32), pool="none"
)
class LeNet(nn.Module):
    """conv5(6)-pool2-conv5(16)-pool2-120-84-outputs: [n, in_channels, image_size, image_size] -> [n, outputs].

    `pool`: "max" (the NAD work), "avg" (the GIH and NTK work), "none" (pooling removed, first dense layer enlarged; the
    convolutions have stride 1 anyway). `padding`: "valid" or "same".
    """

    @checked
    def __init__(
        self,
        *,
        in_channels: Count = 1,
        outputs: Count = 1,
        image_size: Count = 32,
        channels: Sequence[Count] = (6, 16),
        hidden: Sequence[Count] = (120, 84),
        pool: Pool = "max",
        padding: Literal["valid", "same"] = "valid",
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        pad = 2 if padding == "same" else 0
        self.features = nn.Sequential()
        side, width = image_size, in_channels
        for index, count in enumerate(channels, start=1):
            self.features.add_module(f"conv{index}", nn.Conv2d(width, count, kernel_size=5, padding=pad))
            self.features.add_module(f"act{index}", make_activation(activation))
            self.features.add_module(f"pool{index}", make_pool2d(pool))
            side, width = side - 4 + 2 * pad, count
            side = side if pool == "none" else side // 2
            if side < 1:
                raise InputError(f"LeNet: image_size={image_size} is too small for {len(channels)} convolutions")
        self.classifier = nn.Sequential()
        fan_in = width * side**2
        for index, fan_out in enumerate(hidden, start=1):
            self.classifier.add_module(f"fc{index}", nn.Linear(fan_in, fan_out))
            self.classifier.add_module(f"act{index}", make_activation(activation))
            fan_in = fan_out
        self.classifier.add_module(f"fc{len(hidden) + 1}", nn.Linear(fan_in, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_channels, image_size, image_size] -> [n, outputs]."""
        out: Tensor = self.classifier(self.features(x).flatten(1))
        return out
