"""Consistency scores: how often an example is classified rightly by networks that were not trained on it.

C(x, y) = mean over subset sizes of P[f(x; D) = y], D a random subset of that size without (x, y) (Jiang et al. 2021).
Many networks are trained together; each one votes on the examples it has not seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from biascope import InputError
from biascope.ensembles import Factory, Networks, outputs, train_ensemble
from biascope.support import derive, generator


@dataclass(frozen=True, eq=False)
class CScores:
    """Scores of n examples.

    Attributes:
        scores: [n] in [0, 1]; high is easy. NaN for an example that no network left out.
        standard_errors: [n], from the votes (each size's share p of m votes has variance q (1 - q) / m with
            q = (m p + 1/2) / (m + 1), so that unanimous votes are not taken for certainty).
        profile: [sizes, n], the score at each subset size; NaN where no subset left the example out.
        votes: [sizes, n], how many networks left the example out.
        sizes: examples in each subset.
        seed: of subsets, networks and orders.
    """

    scores: Tensor
    standard_errors: Tensor
    profile: Tensor
    votes: Tensor
    sizes: tuple[int, ...]
    seed: int

    @property
    def coverage(self) -> float:
        """Share of (size, example) pairs with at least one vote."""
        return float((self.votes > 0).double().mean())

    def groups(self, count: int = 10) -> Tensor:
        """Rank groups [n], 0 the lowest scores (most difficult); equal scores are ordered by their position."""
        return rank_groups(self.scores, count)


def rank_groups(scores: Tensor, count: int = 10) -> Tensor:
    """Groups [n] of (nearly) equal size by rank, 0 the lowest; ties by position.

    Example:
        >>> rank_groups(torch.tensor([0.3, 0.1, 0.3, 0.9]), 2)
        tensor([0, 0, 1, 1])
    """
    if not 0 < count <= len(scores):
        raise InputError(f"{count} groups of {len(scores)} examples")
    if not bool(scores.isfinite().all()):
        raise InputError(f"{int((~scores.isfinite()).sum())} examples have no score; train more networks")
    ranks = torch.empty(len(scores), dtype=torch.long)
    ranks[scores.argsort(stable=True)] = torch.arange(len(scores))
    return ranks * count // len(scores)


def c_scores(
    factory: Factory,
    x: Tensor,
    y: Tensor,
    *,
    sizes: Sequence[float] = (0.2, 0.4, 0.6, 0.8),
    repeats: int = 10,
    seed: int = 0,
    device: torch.device | str | None = None,
    **training: Any,
) -> CScores:
    """Estimate the C-score of every example of x [n, ...], y [n] (classes), by `repeats` networks per size.

    `sizes`: shares of the examples in a subset; `training`: options of `train_ensemble` (epochs, batch_size, ...).

    Example:
        >>> from torch import nn
        >>> x = torch.tensor([[-1.0], [1.0]]).repeat(20, 1); y = (x[:, 0] > 0).long(); y[0] = 1 - y[0]
        >>> found = c_scores(lambda: nn.Linear(1, 2), x, y, sizes=(0.5,), repeats=8, epochs=10, batch_size=8)
        >>> int(found.scores.argmin()), bool(found.scores[1:].min() > 0.9)
        (0, True)
    """
    n = len(x)
    counts = tuple(round(size * n) for size in sizes)
    if not counts or min(counts) < 1 or max(counts) >= n or repeats < 1:
        raise InputError(f"sizes={tuple(sizes)} of {n} examples must leave at least one in and one out; repeats >= 1")
    right = torch.zeros(len(counts), n, dtype=torch.float64)
    votes = torch.zeros(len(counts), n, dtype=torch.float64)
    where = torch.device(device or "cpu")
    for k, count in enumerate(counts):
        subsets = Subsets(x, y, count, repeats, derive(seed, "subsets", k))
        done = train_ensemble(factory, subsets, seed=derive(seed, "networks", k), device=device, **training)
        networks = cast(Networks, done.networks)
        for r in range(repeats):
            out = outputs(networks[r : r + 1].to(where), x.to(where), engine="loop")[0]
            guess = (out[:, 0] > 0).long() if out.shape[1] == 1 else out.argmax(1)
            held = torch.ones(n, dtype=torch.bool)
            held[subsets.chosen(r)] = False
            votes[k] += held
            right[k] += held & (guess.cpu() == y.cpu())
    return _scores(right, votes, counts, seed)


def _scores(right: Tensor, votes: Tensor, sizes: tuple[int, ...], seed: int) -> CScores:
    profile = right / votes  # NaN without a vote
    smooth = (right + 0.5) / (votes + 1)
    variance = smooth * (1 - smooth) / votes
    seen = (votes > 0).sum(0)
    errors = variance.nan_to_num(nan=0.0, posinf=0.0).sum(0).sqrt() / seen
    scores = profile.nanmean(0)
    return CScores(scores, errors.where(seen > 0, torch.nan), profile, votes.long(), sizes, seed)


class Subsets(Sequence[tuple[Tensor, Tensor]]):
    """Random subsets of `size` examples, made when asked for."""

    def __init__(self, x: Tensor, y: Tensor, size: int, repeats: int, seed: int) -> None:
        self.x, self.y, self.size, self.repeats, self.seed = x, y, size, repeats, seed

    def __len__(self) -> int:
        return self.repeats

    def chosen(self, r: int) -> Tensor:
        """Positions [size] of subset r."""
        return torch.randperm(len(self.x), generator=generator(self.seed, r))[: self.size]

    def __getitem__(self, r: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if not 0 <= r < self.repeats:
            raise IndexError(r)
        index = self.chosen(r).to(self.x.device)
        return self.x[index], self.y[index]
