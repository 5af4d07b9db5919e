"""Fourier feature network: fixed sines and cosines of the coordinates, then an MLP."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from biascope.arguments import check_number, check_tensor
from biascope.errors import InputError
from biascope.signatures import checked

from .mlp import MLP
from .parts import Activation, check_choice, check_sizes
from .registry import register


def gaussian_frequencies(in_features: int, mapping_size: int, sigma: float) -> Tensor:
    """B [mapping_size, in_features] with entries N(0, sigma^2), drawn from the global random state.

    Example:
        >>> gaussian_frequencies(2, 256, sigma=10.0).shape
        torch.Size([256, 2])
    """
    return sigma * torch.randn(mapping_size, in_features)


def octave_frequencies(in_features: int, octaves: int) -> Tensor:
    """B [octaves * in_features, in_features]: for each coordinate 1/2, 1, 2, ..., so that 2 pi B = pi 2^k (NeRF style).

    Example:
        >>> octave_frequencies(1, 4).flatten()
        tensor([0.5000, 1.0000, 2.0000, 4.0000])
    """
    powers = 2.0 ** (torch.arange(octaves) - 1)
    return torch.kron(powers.unsqueeze(1), torch.eye(in_features))


class FourierFeatures(nn.Module):
    """r -> [sin(2 pi B r), cos(2 pi B r)] with B [T, d] fixed, a buffer: [..., d] -> [..., 2 T].

    Example:
        >>> FourierFeatures(torch.ones(1, 1))(torch.zeros(1, 1))
        tensor([[0., 1.]])
    """

    frequencies: Tensor

    @checked
    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        check_tensor(frequencies, "frequencies", dims=2, floating=True)
        self.register_buffer("frequencies", frequencies.detach().clone())

    def forward(self, r: Tensor) -> Tensor:
        """[..., d] -> [..., 2 T]."""
        phase = 2 * math.pi * r @ self.frequencies.T
        return torch.cat([torch.sin(phase), torch.cos(phase)], dim=-1)


@register("ffn", summary="Fourier feature network on coordinates, mapping 256, 3 hidden of 256", input_shape=(2,))
class FFN(nn.Module):
    """An MLP on Fourier features of the coordinates: [..., in_features] -> [..., outputs].

    `mapping`: "gaussian" draws B [mapping_size, in_features] from N(0, sigma^2); "octaves" takes powers of two per
    coordinate, NeRF style. `frequencies` gives B itself, for example `f0 * torch.eye(2)`, and overrides both.

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
        in_features: int = 2,
        hidden: Sequence[int] = (256, 256, 256),
        outputs: int = 1,
        mapping: str = "gaussian",
        mapping_size: int = 256,
        sigma: float = 10.0,
        octaves: int = 8,
        frequencies: Tensor | None = None,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, hidden=hidden, outputs=outputs, mapping_size=mapping_size, octaves=octaves)
        check_number(sigma, "sigma", least=0)
        check_choice("mapping", mapping, ("gaussian", "octaves"))
        if frequencies is None and mapping == "gaussian":
            frequencies = gaussian_frequencies(in_features, mapping_size, sigma)
        elif frequencies is None:
            frequencies = octave_frequencies(in_features, octaves)
        if frequencies.ndim != 2 or frequencies.shape[1] != in_features:
            raise InputError(f"FFN: frequencies has shape {tuple(frequencies.shape)}, it must be (T, {in_features})")
        self.features = FourierFeatures(frequencies)
        self.mlp = MLP(
            in_features=2 * len(frequencies), hidden=hidden, outputs=outputs, activation=activation, flatten=False
        )

    def forward(self, r: Tensor) -> Tensor:
        """[..., in_features] -> [..., outputs]."""
        out: Tensor = self.mlp(self.features(r))
        return out
