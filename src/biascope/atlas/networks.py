"""Small networks of the atlas that are in no registry: on signals, on rows of a table, on coordinates."""

from itertools import pairwise

import torch
from torch import Tensor, nn

Layers = list[nn.Module]


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape that body keeps."""
        return x + self.body(x)  # type: ignore[no-any-return]


class Mean(nn.Module):
    """The mean over all places: [n, c, length] -> [n, c]."""

    def forward(self, x: Tensor) -> Tensor:
        """As above."""
        return x.mean(-1)


def cnn1d(channels: int = 1) -> nn.Module:
    """Three convolutions of width 9 with strides, mean over time."""
    sizes = [channels, 32, 64, 128]
    layers: Layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Conv1d(a, b, 9, 2, 4), nn.ReLU()]
    return nn.Sequential(*layers, Mean(), nn.Linear(128, 1))


def tcn(channels: int = 1) -> nn.Module:
    """Six dilated residual convolutions (1 to 32) of width 3, as in WaveNet; mean over time."""
    blocks = [Residual(nn.Conv1d(32, 32, 3, padding=2**i, dilation=2**i), nn.ReLU()) for i in range(6)]
    return nn.Sequential(nn.Conv1d(channels, 32, 1), *blocks, Mean(), nn.Linear(32, 1))


class Recurrent(nn.Module):
    """An RNN over time, read at the last step: [n, c, length] -> [n, 1]."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU], channels: int = 1) -> None:
        super().__init__()
        self.rnn = cell(channels, 64, batch_first=True)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """As above."""
        return self.head(self.rnn(x.transpose(1, 2))[0][:, -1])  # type: ignore[no-any-return]


def lstm(channels: int = 1) -> nn.Module:
    """LSTM of 64 units."""
    return Recurrent(nn.LSTM, channels)


def gru(channels: int = 1) -> nn.Module:
    """GRU of 64 units."""
    return Recurrent(nn.GRU, channels)


class Patches(nn.Module):
    """A transformer on patches of a signal, or on the entries of a row, with learnt positions; mean over tokens."""

    def __init__(self, tokens: int, patch: int, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.patch = tokens, patch
        self.embed = nn.Linear(patch, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens * patch] in any shape -> [n, 1]."""
        parts = self.embed(x.reshape(len(x), self.tokens, self.patch)) + self.positions
        return self.head(self.layers(parts).mean(1))  # type: ignore[no-any-return]


def transformer1d() -> nn.Module:
    """Transformer on 16 patches of 8 samples."""
    return Patches(16, 8)


def dense1d(length: int = 128) -> nn.Module:
    """Two hidden layers of 256 on the whole signal."""
    return nn.Sequential(nn.Flatten(), *_dense(length, 256, 2, nn.ReLU))


def _dense(features: int, width: int, hidden: int, activation: type[nn.Module]) -> Layers:
    layers: Layers = []
    for i in range(hidden):
        layers += [nn.Linear(features if i == 0 else width, width), activation()]
    return [*layers, nn.Linear(width, 1)]


def table_mlp(features: int = 20) -> nn.Module:
    """Three hidden layers of 128, ReLU."""
    return nn.Sequential(*_dense(features, 128, 3, nn.ReLU))


def table_tanh(features: int = 20) -> nn.Module:
    """Three hidden layers of 128, tanh."""
    return nn.Sequential(*_dense(features, 128, 3, nn.Tanh))


def table_resnet(features: int = 20) -> nn.Module:
    """Four residual blocks of width 128 with layer norm (Gorishniy et al. 2021)."""
    blocks: Layers = []
    for _ in range(4):
        blocks.append(Residual(nn.LayerNorm(128), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)))
    return nn.Sequential(nn.Linear(features, 128), *blocks, nn.LayerNorm(128), nn.Linear(128, 1))


def table_transformer(features: int = 20) -> nn.Module:
    """Every column a token, as in the FT-Transformer."""
    return Patches(features, 1)


class Additive(nn.Module):
    """A neural additive model: one small network per column, summed (Agarwal et al. 2021)."""

    def __init__(self, features: int = 20, width: int = 32) -> None:
        super().__init__()
        bound = 1.0
        self.into = nn.Parameter(torch.empty(features, width).uniform_(-bound, bound))
        self.offset = nn.Parameter(torch.empty(features, width).uniform_(-bound, bound))
        self.out = nn.Linear(features * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, features] -> [n, 1]."""
        return self.out(torch.relu(x[:, :, None] * self.into + self.offset).flatten(1))  # type: ignore[no-any-return]


class Cross(nn.Module):
    """Three cross layers x0 * (W x + b) + x and a linear head (Wang et al. 2021)."""

    def __init__(self, features: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(3))
        self.head = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, features] -> [n, 1]."""
        at = x
        for layer in self.layers:
            at = x * layer(at) + at
        return self.head(at)  # type: ignore[no-any-return]


class Gaussian(nn.Module):
    """exp(-x^2 / (2 s^2)), the activation of Ramasinghe and Lucey (2022)."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return torch.exp(-((x / 0.1) ** 2) / 2)


def gaussian_coords() -> nn.Module:
    """Gaussian activations on coordinates, four hidden layers of 256."""
    return nn.Sequential(*_dense(2, 256, 4, Gaussian))


def tanh_coords() -> nn.Module:
    """tanh on coordinates, four hidden layers of 256."""
    return nn.Sequential(*_dense(2, 256, 4, nn.Tanh))


class Octaves(nn.Module):
    """The positional encoding of NeRF, sines and cosines at six octaves, before a ReLU network."""

    def __init__(self, octaves: int = 6) -> None:
        super().__init__()
        self.octaves = octaves
        self.body = nn.Sequential(*_dense(4 * octaves + 2, 256, 4, nn.ReLU))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 2] -> [n, 1]."""
        turned = [torch.pi * 2**k * x for k in range(self.octaves)]
        return self.body(torch.cat([x, *(f(t) for t in turned for f in (torch.sin, torch.cos))], 1))  # type: ignore[no-any-return]
