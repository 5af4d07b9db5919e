"""Networks on coordinates: SIREN, a network of sines, and the Fourier feature network, fixed sines before an MLP."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from biascope.nets.dense import MLP
from biascope.nets.parts import Activation, Sine
from biascope.nets.registry import register
from biascope.support.errors import InputError
from biascope.support.limits import Count, Finite, NonNegative, Positive, shaped
from biascope.support.signatures import checked

Frequencies = Annotated[Tensor, shaped(2, floating=True)]


@register("siren", summary="sine network on coordinates, 4 hidden layers of 256", input_shape=(2,))
class SIREN(nn.Module):
    """sin(w0 (W_0 r + b_0)), then layers sin(w_h (W z + b)), then a linear layer: [..., in_features] -> [..., outputs].

    Weights: first layer U(-1/d, 1/d), d = in_features; the others, the last included, U(-c, c) with
    c = sqrt(6 / fan_in) / w_h. Biases as torch draws them. Both frequencies stand inside the sine, so the weights keep
    this scale whatever w0 is. `output_offset` is added to the output (0.5 for images in [0, 1]).

    Example:
        >>> import torch
        >>> image = SIREN(in_features=2, outputs=3, w0=30.0, output_offset=0.5)
        >>> image(torch.zeros(8, 8, 2)).shape
        torch.Size([8, 8, 3])
    """

    @checked
    def __init__(
        self,
        *,
        in_features: Count = 2,
        hidden: Sequence[Count] = (256, 256, 256, 256),
        outputs: Count = 1,
        w0: Positive = 30.0,
        w_h: Positive = 30.0,
        output_offset: Finite = 0.0,
    ) -> None:
        super().__init__()
        self.output_offset = output_offset
        self.layers = nn.Sequential()
        for index, (fan_in, fan_out) in enumerate(pairwise((in_features, *hidden, outputs)), start=1):
            first, last = index == 1, index == len(hidden) + 1
            linear = nn.Linear(fan_in, fan_out)
            bound = 1 / fan_in if first else math.sqrt(6 / fan_in) / w_h
            nn.init.uniform_(linear.weight, -bound, bound)
            self.layers.add_module(f"fc{index}", linear)
            if not last:
                self.layers.add_module(f"sine{index}", Sine(w0 if first else w_h))

    def forward(self, r: Tensor) -> Tensor:
        """[..., in_features] -> [..., outputs]."""
        out: Tensor = self.layers(r) + self.output_offset
        return out


class FourierFeatures(nn.Module):
    """r -> [sin(2 pi B r), cos(2 pi B r)] with B [T, d] fixed, a buffer: [..., d] -> [..., 2 T]."""

    frequencies: Tensor

    @checked
    def __init__(self, frequencies: Frequencies) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies.detach().clone())

    def forward(self, r: Tensor) -> Tensor:
        """[..., d] -> [..., 2 T]."""
        phase = 2 * math.pi * r @ self.frequencies.T
        return torch.cat([torch.sin(phase), torch.cos(phase)], dim=-1)


@register("ffn", summary="Fourier feature network on coordinates, mapping 256, 3 hidden of 256", input_shape=(2,))
class FFN(nn.Module):
    """An MLP on Fourier features of the coordinates: [..., in_features] -> [..., outputs].

    `mapping`: "gaussian" draws B [mapping_size, in_features] from N(0, sigma^2); "octaves" takes 1/2, 1, 2, ... for
    each coordinate, so that 2 pi B = pi 2^k, NeRF style. `frequencies` gives B itself, for example
    `f0 * torch.eye(2)`, and overrides both.

    Example:
        >>> import torch
        >>> net = FFN(in_features=2, outputs=3, sigma=10.0)
        >>> net(torch.zeros(8, 8, 2)).shape
        torch.Size([8, 8, 3])
    """

    @checked
    def __init__(
        self,
        *,
        in_features: Count = 2,
        hidden: Sequence[Count] = (256, 256, 256),
        outputs: Count = 1,
        mapping: Literal["gaussian", "octaves"] = "gaussian",
        mapping_size: Count = 256,
        sigma: NonNegative = 10.0,
        octaves: Count = 8,
        frequencies: Frequencies | None = None,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        if frequencies is None and mapping == "gaussian":
            frequencies = sigma * torch.randn(mapping_size, in_features)
        elif frequencies is None:
            frequencies = torch.kron(2.0 ** (torch.arange(octaves) - 1).unsqueeze(1), torch.eye(in_features))
        if frequencies.shape[1] != in_features:
            raise InputError(f"FFN: frequencies has shape {tuple(frequencies.shape)}, it must be (T, {in_features})")
        self.features = FourierFeatures(frequencies)
        self.mlp = MLP(
            in_features=2 * len(frequencies), hidden=hidden, outputs=outputs, activation=activation, flatten=False
        )

    def forward(self, r: Tensor) -> Tensor:
        """[..., in_features] -> [..., outputs]."""
        out: Tensor = self.mlp(self.features(r))
        return out
