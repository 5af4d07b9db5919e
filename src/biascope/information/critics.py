"""Statistics networks T(x, y): two default ones, and how any of them is evaluated on pairs."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from biascope.errors import InputError
from biascope.information.samples import is_discrete
from biascope.seeds import generator

CHUNK = 16_384  # pairs in one pass of the critic where no gradient is needed


class Encoder(nn.Module):
    """A variable [n, ...] as features [n, f] in float32: standardised and flattened, or labels as one-hot vectors.

    Mean, scale and classes are those of the values given; columns that do not vary and labels not seen become 0.
    Mutual information does not change under such maps, training does.

    Example:
        >>> Encoder(torch.tensor([3, 7, 7]))(torch.tensor([7, 3])).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """

    mean: Tensor
    scale: Tensor
    classes: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.discrete = is_discrete(values)
        if self.discrete:
            self.register_buffer("classes", torch.unique(values.flatten().long()))
            self.features = len(self.classes)
        else:
            flat = values.reshape(len(values), -1).double()
            std = flat.std(0)
            self.register_buffer("mean", flat.mean(0))
            # rounding of a constant column is no signal: 1e-12 of its size is all it can be
            varies = std > 1e-12 * flat.abs().amax(0)
            self.register_buffer("scale", torch.where(varies, std, torch.inf))
            self.features = flat.shape[1]

    def forward(self, values: Tensor) -> Tensor:
        """Features [n, f]."""
        if self.discrete:
            return (values.flatten()[:, None] == self.classes).float()
        flat = values.reshape(len(values), -1)
        return ((flat - self.mean) / self.scale).float()


def _empty_linear(fan_in: int, fan_out: int) -> nn.Linear:
    """A layer without initial values: nn.Linear would draw them from the global generator."""
    return nn.Linear(fan_in, fan_out, device="meta", dtype=torch.float32).to_empty(device="cpu")


def mlp(widths: list[int], rng: torch.Generator) -> nn.Sequential:
    """Linear layers with ELU between them, torch's default initialisation drawn from `rng`.

    Example:
        >>> mlp([3, 8, 1], torch.Generator().manual_seed(0))(torch.zeros(5, 3)).shape
        torch.Size([5, 1])
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        linear = _empty_linear(fan_in, fan_out)
        for parameter in linear.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=rng)
        layers += [linear, nn.ELU()]
    return nn.Sequential(*layers[:-1])


class JointCritic(nn.Module):
    """T(x, y): one network of x and y side by side; the default of mine, mine-f, nwj and smile.

    x [n, ...] and y [n, ...] are examples from which the sizes and scales of the inputs are read. Gives [n].

    Example:
        >>> x, y = torch.randn(10, 3), torch.arange(10) % 2
        >>> JointCritic(x, y)(x, y).shape
        torch.Size([10])
    """

    def __init__(self, x: Tensor, y: Tensor, width: int = 128, depth: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.x, self.y = Encoder(x), Encoder(y)
        widths = [self.x.features + self.y.features, *[width] * depth, 1]
        self.network = mlp(widths, generator(seed, "critic")).to(x.device)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [n] of the rows of x with the rows of y."""
        scores: Tensor = self.network(torch.cat([self.x(x), self.y(y)], 1))
        return scores[:, 0]


class SeparableCritic(nn.Module):
    """T(x, y) = <g(x), h(y)>: all n m pairs for the price of n + m passes; the default of infonce.

    Example:
        >>> x, y = torch.randn(10, 3), torch.randn(10)
        >>> critic = SeparableCritic(x, y)
        >>> torch.allclose(critic.pairs(x, y).diagonal(), critic(x, y), atol=1e-5)
        True
    """

    def __init__(self, x: Tensor, y: Tensor, width: int = 128, depth: int = 2, seed: int = 0, size: int = 32) -> None:
        super().__init__()
        self.x, self.y = Encoder(x), Encoder(y)
        rng = generator(seed, "critic")
        self.g = mlp([self.x.features, *[width] * depth, size], rng).to(x.device)
        self.h = mlp([self.y.features, *[width] * depth, size], rng).to(x.device)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [n] of the rows of x with the rows of y."""
        g, h = self.embed(x, y)
        return (g * h).sum(1)

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [n, m] of every row of x with every row of y."""
        g, h = self.embed(x, y)
        return g @ h.T

    def embed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """g(x) [n, e] and h(y) [m, e]."""
        return self.g(self.x(x)), self.h(self.y(y))


def paired_scores(critic: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Scores [n] of the rows of x with the rows of y; what a critic returns is checked here."""
    scores = critic(x, y)
    if not isinstance(scores, Tensor) or scores.shape not in {(len(x),), (len(x), 1)}:
        shape = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(f"critic {type(critic).__name__} gave {shape} for {len(x)} pairs: it must give [{len(x)}]")
    return scores.reshape(len(x))


def all_scores(critic: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Scores [n, m] of all pairs: by the critic's own `pairs(x, y)` where it has one, else one by one."""
    own = getattr(critic, "pairs", None)
    if callable(own):
        scores: Tensor = own(x, y)
        if scores.shape != (len(x), len(y)):
            raise InputError(
                f"critic {type(critic).__name__}.pairs gave {list(scores.shape)}: it must give [{len(x)}, {len(y)}]"
            )
        return scores
    rows = max(1, CHUNK // len(y))
    parts = []
    for start in range(0, len(x), rows):
        few = x[start : start + rows]
        repeated = y.repeat(len(few), *[1] * (y.dim() - 1))
        parts.append(paired_scores(critic, few.repeat_interleave(len(y), 0), repeated).view(len(few), len(y)))
    return torch.cat(parts)


def block_scores(critic: nn.Module, x: Tensor, y: Tensor, block: int, shifts: int) -> tuple[Tensor, Tensor]:
    """Scores of pairs [B, b] and of independent draws [B, b, shifts], in float64, without gradients.

    The rows are cut into B blocks of b = `block` pairs that share nothing; draws pair x_i with y_(i + s), s = 1 to
    `shifts`, around the block, so that no pair meets itself.
    """
    blocks = len(x) // block
    index = torch.arange(blocks * block, device=x.device).view(blocks, block)
    partners = [index, *(index.roll(-s, 1) for s in range(1, shifts + 1))]
    scores = []
    with torch.no_grad():
        for partner in partners:
            parts = zip(torch.split(index.flatten(), CHUNK), torch.split(partner.flatten(), CHUNK))
            scores.append(torch.cat([paired_scores(critic, x[i], y[j]) for i, j in parts]).double().view_as(index))
    return scores[0], torch.stack(scores[1:], -1)
