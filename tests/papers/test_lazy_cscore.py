"""C-scores on data whose easy and hard examples are known."""

import pytest
import torch
from torch import Tensor, nn

from biascope.support.errors import InputError
from biascope_papers.lazy.cscore import Subsets, _scores, c_scores, rank_groups


def clusters() -> tuple[Tensor, Tensor, Tensor]:
    """Two clusters of 40; 4 examples of each have the other label and 4 lie in small clusters of their own."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(80) % 2
    x = 0.3 * torch.randn(80, 2, generator=rng) + torch.stack([4.0 * y - 2, torch.zeros(80)], 1)
    kind = torch.zeros(80, dtype=torch.long)
    kind[:8] = 1  # wrong labels
    kind[8:16] = 2  # a rare kind of the right class, on the wrong side
    y[:8] = 1 - y[:8]
    x[8:16] = torch.stack([-(4.0 * y[8:16] - 2), torch.full((8,), 3.0)], 1) + 0.1 * torch.randn(8, 2, generator=rng)
    return x, y, kind


def test_wrong_labels_score_lowest_rare_kinds_between_and_common_ones_highest() -> None:
    x, y, kind = clusters()
    found = c_scores(
        lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)),
        x,
        y,
        repeats=10,
        seed=1,
        epochs=25,
        batch_size=16,
        lr=0.3,
        momentum=0.9,
    )
    common, wrong, rare = (float(found.scores[kind == k].mean()) for k in range(3))
    assert wrong < 0.1
    assert common > 0.95
    assert wrong < rare < common
    assert float(found.profile[-1, kind == 2].nanmean()) > float(found.profile[0, kind == 2].nanmean())  # data help
    assert found.coverage > 0.9
    groups = found.groups(10)
    assert bool((groups[kind == 1] == 0).all())
    assert torch.bincount(groups).tolist() == [8] * 10


def test_held_out_examples_only_and_the_same_for_the_same_seed() -> None:
    """A lookup table: right on what it has seen, wrong elsewhere. Nobody may vote on what it was trained on."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([1.0, 0.0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.bias.expand(len(x), 2)

    x, y = torch.randn(20, 1), torch.arange(20) % 2
    found = c_scores(Constant, x, y, sizes=(0.25, 0.75), repeats=6, seed=3, epochs=1, lr=1e-9)
    assert found.sizes == (5, 15)
    assert found.votes.sum(1).tolist() == [6 * 15, 6 * 5]
    seen = found.votes.sum(0) > 0
    assert torch.equal(found.scores[seen], (y == 0).double()[seen])
    assert bool(found.scores[~seen].isnan().all())
    again = c_scores(Constant, x, y, sizes=(0.25, 0.75), repeats=6, seed=3, epochs=1, lr=1e-9)
    assert torch.equal(found.votes, again.votes)


def test_standard_errors_cover_the_truth() -> None:
    """Votes drawn with known probabilities: the mean of the squared z-scores is near 1."""
    rng = torch.Generator().manual_seed(0)
    p, m = torch.rand(2, 4000, generator=rng, dtype=torch.float64), 20
    right = torch.distributions.Binomial(m, p).sample().double()
    found = _scores(right, torch.full_like(p, m), (1, 2), 0)
    z = (found.scores - p.mean(0)) / found.standard_errors
    assert float(z.square().mean()) == pytest.approx(1.0, abs=0.15)


def test_an_example_nobody_left_out_has_no_score_and_is_refused_by_name() -> None:
    found = _scores(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]), (1,), 0)
    assert bool(found.scores.isnan()[1])
    assert found.coverage == 0.5
    with pytest.raises(InputError, match="1 examples have no score"):
        found.groups(2)


def test_ranks_break_ties_by_position() -> None:
    assert rank_groups(torch.ones(6), 3).tolist() == [0, 0, 1, 1, 2, 2]


def test_subsets_are_seeded_and_refuse_what_is_not_there() -> None:
    x = torch.arange(10.0)[:, None]
    subsets = Subsets(x, torch.arange(10), 4, 3, seed=0)
    assert torch.equal(subsets[1][1], subsets.chosen(1))
    assert len({tuple(subsets.chosen(r).tolist()) for r in range(3)}) == 3
    with pytest.raises(IndexError):
        subsets[3]
    with pytest.raises(InputError, match="leave at least one in and one out"):
        c_scores(lambda: nn.Linear(1, 2), x, torch.zeros(10).long(), sizes=(1.0,))
