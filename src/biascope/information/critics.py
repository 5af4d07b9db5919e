"""Statistics networks T(x, y): two default ones, and how any of them is evaluated on pairs."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from biascope.information.pairs import is_discrete
from biascope.support.arguments import check_count
from biascope.support.errors import InputError
from biascope.support.seeds import generator
from biascope.support.signatures import checked

KNOTS = 256  # of the map to normal scores, per column
EMBEDDING = 32  # features in which a separable critic compares x and y
CHUNK = 16_384  # pairs in one pass of the critic where no gradient is needed


class Encoder(nn.Module):
    """A variable [n, ...] as features [n, f] in float32: normal scores of its columns, or labels as one-hot vectors.

    A column goes through the increasing map that makes the values given standard normal (ranks, read off at 256 knots
    and linear between them). Mutual information does not change under such maps; training on heavy tails does. Columns
    that do not vary and labels not among the values given become 0.
    """

    classes: Tensor
    knots: Tensor
    scores: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.discrete = is_discrete(values)
        if self.discrete:
            self.register_buffer("classes", torch.unique(values.flatten().long()))
            self.features = len(self.classes)
            return
        flat = values.reshape(len(values), -1).double()
        n, self.features = flat.shape
        end = torch.special.ndtri(torch.tensor(0.5 / n, dtype=torch.float64, device=flat.device))
        steps = torch.linspace(-1, 1, KNOTS, dtype=torch.float64, device=flat.device)
        rank = (torch.special.ndtr(-end * steps) * n - 0.5).round().clamp(0, n - 1)
        self.register_buffer("knots", flat.sort(0).values[rank.long()].T.contiguous())  # [f, KNOTS]
        self.register_buffer("scores", torch.special.ndtri((rank + 0.5) / n))

    def forward(self, values: Tensor) -> Tensor:
        """Features [n, f]."""
        if self.discrete:
            return (values.flatten()[:, None] == self.classes).float()
        columns = values.reshape(len(values), -1).double().T.contiguous()
        # a value that many samples share has many ranks: the middle between the first and the last
        return ((self._score(columns, False) + self._score(columns, True)) / 2).T.float()

    def _score(self, columns: Tensor, right: bool) -> Tensor:
        high = torch.searchsorted(self.knots, columns, right=right).clamp(1, KNOTS - 1)
        left, gap = self.knots.gather(1, high - 1), self.knots.gather(1, high) - self.knots.gather(1, high - 1)
        weight = torch.where(gap > 0, (columns - left) / gap, float(right)).clamp(-4, 5)  # goes on beyond the ends
        return torch.lerp(self.scores[high - 1], self.scores[high], weight)


def _mlp(fan_in: int, width: int, depth: int, fan_out: int, rng: torch.Generator) -> nn.Sequential:
    """Linear layers with ELU between them, torch's default initialisation drawn from `rng`."""
    check_count(depth, "depth", least=0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([fan_in, *[width] * depth, fan_out]):
        # without initial values, which nn.Linear would draw from the global generator
        linear = nn.Linear(inputs, outputs, device="meta", dtype=torch.float32).to_empty(device="cpu")
        for parameter in linear.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=rng)
        layers += [linear, nn.ELU()]
    return nn.Sequential(*layers[:-1])


class JointCritic(nn.Module):
    """T(x, y) [n]: one network of x [n, p] and y [n, q] side by side; the default of mine, mine-f, nwj and smile.

    Example:
        >>> JointCritic(3, 1)(torch.randn(10, 3), torch.randn(10, 1)).shape
        torch.Size([10])
    """

    @checked
    def __init__(self, x_features: int, y_features: int, width: int = 128, depth: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.network = _mlp(x_features + y_features, width, depth, 1, generator(seed, "critic"))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [n] of the rows of x with the rows of y."""
        scores: Tensor = self.network(torch.cat([x, y], 1))
        return scores[:, 0]


class SeparableCritic(nn.Module):
    """T(x, y) = <g(x), h(y)>: all n m pairs for the price of n + m passes; the default of infonce."""

    def __init__(self, x_features: int, y_features: int, width: int = 128, depth: int = 2, seed: int = 0) -> None:
        super().__init__()
        rng = generator(seed, "critic")
        self.g = _mlp(x_features, width, depth, EMBEDDING, rng)
        self.h = _mlp(y_features, width, depth, EMBEDDING, rng)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [n] of the rows of x with the rows of y."""
        products: Tensor = self.g(x) * self.h(y)
        return products.sum(1)

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [n, m] of every row of x with every row of y."""
        scores: Tensor = self.g(x) @ self.h(y).T
        return scores


class EncodedCritic(nn.Module):
    """A critic of features behind the encoders of both variables: T(x, y) [n] for samples as they were given."""

    def __init__(self, x: Encoder, y: Encoder, critic: nn.Module) -> None:
        super().__init__()
        self.x, self.y, self.critic = x, y, critic

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [n] of the rows of x with the rows of y."""
        scores: Tensor = self.critic(self.x(x), self.y(y))
        return scores


def paired_scores(critic: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
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
