"""Stacked MNIST: three digits as the colours of one image, 1000 modes; its networks, its classifier, its measures."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, elu, interpolate

from biascope import data
from biascope.progress import progress
from biascope.seeds import generator

Network = TypeVar("Network", bound=nn.Module)

MODES = 1000
LATENT = 100
SIDE = 28


def digit_images(name: str, split: Literal["train", "test"], device: str) -> tuple[Tensor, Tensor]:
    """Images [n, 28, 28] in [-1, 1] and labels [n]; smaller ones are enlarged."""
    found = data.load(name, split)
    x = found.x if found.x.shape[-1] == SIDE else interpolate(found.x, (SIDE, SIDE), mode="bilinear")
    return (2 * x[:, 0] - 1).to(device), found.y.to(device)


def triples(labels: Tensor) -> Tensor:
    """The mode 0..999 of labels [n, 3].

    Example:
        >>> triples(torch.tensor([[1, 2, 3], [0, 0, 9]]))
        tensor([123,   9])
    """
    return labels @ torch.tensor([100, 10, 1], device=labels.device)


def modes_and_divergence(found: Tensor) -> tuple[int, float]:
    """How many of 1000 modes occur in found [n], and KL of their histogram from the uniform one, in nats.

    n true samples give about 999 / (2 n), not 0.

    Example:
        >>> modes_and_divergence(torch.arange(1000).repeat(3))
        (1000, 0.0)
        >>> modes, kl = modes_and_divergence(torch.zeros(50, dtype=torch.long))
        >>> modes, round(kl, 4) == round(math.log(1000), 4)
        (1, True)
    """
    share = torch.bincount(found.cpu(), minlength=MODES).double() / len(found)
    return int((share > 0).sum()), float(torch.xlogy(share, share * MODES).sum())


def generator_network(width: int, rng: torch.Generator) -> nn.Sequential:
    """Table C.1: z [n, 100] -> images [n, 3, 28, 28]; published width 64. With batch normalisation, as in DCGAN."""
    channels = (8 * width, 4 * width, 2 * width, width, 3)
    with torch.device("meta"):
        layers: list[nn.Module] = [nn.Linear(LATENT, 4 * channels[0]), nn.Unflatten(1, (channels[0], 2, 2)), nn.ReLU()]
        for i, grow in enumerate((1, 0, 1, 1)):  # 2 -> 4 -> 7 -> 14 -> 28
            last = i == 3
            layers.append(nn.ConvTranspose2d(channels[i], channels[i + 1], 5, 2, 2, grow))
            layers += [nn.Tanh()] if last else [norm(channels[i + 1]), nn.ReLU()]
        net = nn.Sequential(*layers)
    return drawn(net, rng)


def discriminator_network(width: int, rng: torch.Generator) -> nn.Sequential:
    """Table C.2: images [n, 3, 28, 28] -> logits [n, 1]; published width 64."""
    channels = (3, width, 2 * width, 4 * width, 8 * width)
    with torch.device("meta"):
        layers: list[nn.Module] = []
        for i in range(4):  # 28 -> 14 -> 7 -> 4 -> 2
            layers.append(nn.Conv2d(channels[i], channels[i + 1], 5, 2, 2))
            layers += [norm(channels[i + 1]), nn.ReLU()] if i else [nn.ReLU()]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels[-1], 1))
    return drawn(net, rng)


class StatisticsNetwork(nn.Module):
    """Table C.3: T(x, z) [n] of images [n, 3, 28, 28] and z [n, 100]; z is a bias of every channel."""

    def __init__(self, width: int, rng: torch.Generator) -> None:
        super().__init__()
        channels = (3, width, 2 * width, 4 * width)  # published width 16
        with torch.device("meta"):
            self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 5, 2, 2) for a, b in pairwise(channels))
            self.biases = nn.ModuleList(nn.Linear(LATENT, b) for b in channels[1:])
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * channels[-1], 64 * width), nn.Linear(64 * width, 1))
        drawn(self, rng, small=False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Scores [n]."""
        for convolution, bias in zip(self.convolutions, self.biases):
            x = elu(convolution(x) + bias(z)[:, :, None, None])
        scores: Tensor = self.head(x)
        return scores[:, 0]


def norm(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation by the batch at hand, always."""
    return nn.BatchNorm2d(channels, track_running_stats=False)


def drawn(net: Network, rng: torch.Generator, small: bool = True) -> Network:
    """Initial values from `rng`: N(0, 0.02) as in DCGAN (small), or torch's default ranges."""
    net.to_empty(device="cpu")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            assert module.bias is not None
            if small:
                nn.init.normal_(module.weight, 0, 0.02, generator=rng)
                nn.init.zeros_(module.bias)
            else:
                bound = 1 / math.sqrt(module.weight[0].numel())
                nn.init.uniform_(module.weight, -bound, bound, generator=rng)
                nn.init.uniform_(module.bias, -bound, bound, generator=rng)
    return net


def train_classifier(x: Tensor, y: Tensor, steps: int, seed: int) -> nn.Sequential:
    """A small convolutional network for single digits x [n, 28, 28] in [-1, 1], trained by Adam."""
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
    net = drawn(net, generator(seed, "classifier"), small=False).to(x.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    rows = generator(seed, "classifier batches", device=x.device)
    for _ in progress(range(steps), "classifier", leave=False):
        index = torch.randint(len(x), (100,), generator=rows, device=x.device)
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(net(x[index][:, None]), y[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net.eval()


@torch.no_grad()
def classify(net: nn.Module, images: Tensor) -> Tensor:
    """Labels [n, c] of every channel of images [n, c, 28, 28]."""
    labels: Tensor = net(images.reshape(-1, 1, SIDE, SIDE)).argmax(1)
    return labels.reshape(images.shape[:2])


def sheet(images: Tensor) -> Tensor:
    """The first k^2 of images [n, c, 28, 28] in [-1, 1] as one picture [28 k, 28 k, c] in [0, 1].

    Example:
        >>> sheet(torch.zeros(11, 3, 28, 28)).shape
        torch.Size([84, 84, 3])
    """
    k, c = math.isqrt(len(images)), images.shape[1]
    rows = images[: k * k].reshape(k, k, c, SIDE, SIDE).permute(0, 3, 1, 4, 2)
    return ((rows.reshape(k * SIDE, k * SIDE, c) + 1) / 2).clamp(0, 1)


@torch.no_grad()
def confidence(net: nn.Module, images: Tensor) -> float:
    """Mean over channels of the largest probability: low where images [n, c, 28, 28] are no digits."""
    return float(net(images.reshape(-1, 1, SIDE, SIDE)).softmax(1).amax(1).mean())
