"""Ten networks that nobody tuned for, small, as their authors write them."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """Segmentation of images, two levels."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down(x))
        b = F.relu(self.deep(F.max_pool2d(a, 2)))
        return self.out(torch.cat([a, self.up(b)], 1))  # type: ignore[no-any-return]


class GraphNet(nn.Module):
    """Two rounds of messages on a fixed ring of nodes, features [n, nodes, channels]."""

    def __init__(self, nodes: int = 6, width: int = 8) -> None:
        super().__init__()
        ring = torch.eye(nodes).roll(1, 0) + torch.eye(nodes).roll(-1, 0) + torch.eye(nodes)
        self.register_buffer("adjacency", ring / 3)
        self.first, self.second, self.head = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.adjacency @ self.first(x))
        x = F.relu(self.adjacency @ self.second(x))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Tagger(nn.Module):
    """A tag for every token, by an LSTM in both directions."""

    def __init__(self, words: int = 20, tags: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 6)
        self.lstm, self.head = nn.LSTM(6, 5, batch_first=True, bidirectional=True), nn.Linear(10, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])  # type: ignore[no-any-return]


class TabularTransformer(nn.Module):
    """A token for every column, a parameter for the class token."""

    def __init__(self, columns: int = 5, width: int = 8) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(columns, width)), nn.Parameter(torch.randn(columns, width))
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., None] * self.scale + self.shift
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens)[:, 0])  # type: ignore[no-any-return]


class DiffusionUNet(nn.Module):
    """The noise of an image at a time, which is a second input."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width, self.time = width, nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.inside, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(2, width)
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1e4) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = t.reshape(-1, 1) * frequencies
        shift = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        return self.out(F.silu(self.norm(self.inside(x)) + shift[:, :, None, None]))  # type: ignore[no-any-return]


class DeepONet(nn.Module):
    """An operator: a branch for the function's values, a trunk for the place."""

    def __init__(self, sensors: int = 6, modes: int = 5) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(sensors, 8), nn.Tanh(), nn.Linear(8, modes))
        self.trunk = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, modes))

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        return (self.branch(u) * self.trunk(y)).sum(1, keepdim=True)  # type: ignore[no-any-return]


class VAE(nn.Module):
    """Returns reconstruction, mean and log-variance; draws in training mode only."""

    def __init__(self, size: int = 8, latent: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 8), nn.ReLU(), nn.Linear(8, size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp() if self.training else mean
        return self.decoder(z), mean, logvar


class Siamese(nn.Module):
    """How far two inputs are from one another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.net(a) - self.net(b)).square().sum(1, keepdim=True)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Experts of which each example takes the best two, with the gate's weights; returns the gate too."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(4, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)) for _ in range(experts))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        gate = self.gate(x)
        top = gate.topk(2).indices
        kept = torch.full_like(gate, -torch.inf).scatter(1, top, gate.gather(1, top)).softmax(1)
        each = torch.stack([expert(x) for expert in self.experts], 1)
        return {"logits": (kept[..., None] * each).sum(1), "gate": gate}


class PINN(nn.Module):
    """A field u(x, t), smooth enough for two derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, place: Tensor) -> Tensor:
        return self.net(place)  # type: ignore[no-any-return]
