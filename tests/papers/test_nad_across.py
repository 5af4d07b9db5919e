"""Studies that compare networks: what their rules see, and which runs they refuse."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.studies import Run, configure, execute
from biascope.studies.estimates import above
from biascope.support.errors import InputError
from biascope_papers.nad.across import (
    as_map,
    compared,
    correlation,
    directions_learnt,
    finished_runs,
    self_correlation,
    transposed,
)

KEPT = Path(__file__).parents[2] / "reproductions"
SIDE = 16


def a_map(seed: int, noise: float, of: int = 0) -> dict[tuple[int, int], float]:
    """Accuracies with the pattern `of`, symmetric, and noise of their own."""
    pattern = np.random.default_rng(of).uniform(0.5, 1.0, (8, 8))
    noisy = (pattern + pattern.T) / 2 + noise * np.random.default_rng(100 + seed).normal(size=(8, 8))
    return {(a, b): float(noisy[a, b]) for a in range(8) for b in range(8)}


def test_transposed_bins_are_found_once_and_through_their_conjugates() -> None:
    one = as_map(torch.tensor([[1, 2], [-2, -1], [3, 3], [0, 4]]), torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert transposed(one, one, SIDE) == [((1, 2), (-2, -1))]
    assert transposed(one, {(1, 2): 0.5}, SIDE) == []


def test_one_pattern_in_two_networks_is_not_called_two() -> None:
    """The correlation with itself is attenuated by the same noise: no difference on average, whatever the noise."""
    gaps = []
    for seed in range(40):
        one, other = a_map(2 * seed, 0.1), a_map(2 * seed + 1, 0.1)
        gaps.append(compared(one, other, transposed(one, other, SIDE))[2])
    values, errors = np.array([gap.value for gap in gaps]), np.array([gap.standard_error for gap in gaps])
    assert abs(values.mean()) < 3 * values.std() / math.sqrt(40) + 0.02
    assert np.mean(errors) == pytest.approx(values.std(), rel=0.5)
    assert sum(map(above, gaps)) <= 5  # 2.3 % on one side, of 40


def test_two_patterns_are_told_apart() -> None:
    one, other = a_map(0, 0.05), a_map(1, 0.05, of=7)
    pairs = transposed(one, other, SIDE)
    between, within, gap = compared(one, other, pairs)
    x = [one[k] for pair in pairs for k in pair]
    y = [other[k] for pair in pairs for k in pair[::-1]]
    assert between.value == pytest.approx(np.corrcoef(x, y)[0, 1])
    own = correlation(one, one, pairs) * correlation(other, other, pairs)
    assert within.value == pytest.approx(math.sqrt(own))
    assert above(gap)
    assert above(self_correlation(one, pairs))
    assert compared(one, other, pairs[:3])[2].standard_error is None


def test_directions_learnt_are_a_sum_over_all_indices() -> None:
    accuracy = np.linspace(1.0, 0.5, 64)
    every = directions_learnt(np.arange(64.0), accuracy, 64)
    assert every.value == pytest.approx(float((2 * accuracy - 1).sum()))
    at = np.unique(np.geomspace(1, 64, 14).round()) - 1
    some = directions_learnt(at, accuracy[at.astype(int)], 64)
    assert some.standard_error is not None
    assert abs(some.value - every.value) < 3 * some.standard_error


def test_runs_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    lenet, other = KEPT / "nad-fig1-paper-h200", KEPT / "nad-fig1-paper-lenet-half-gap-h200"
    with pytest.raises(InputError, match="give one for each network"):
        finished_runs([str(lenet), str(other)], "nad/fig1", "map", ())
    vgg = KEPT / "nad-fig1-paper-vgg11-h200"
    with pytest.raises(InputError, match=r"the runs differ in gap \(half, full\)"):
        finished_runs([str(other), str(vgg)], "nad/fig1", "map", ("gap",))
    with pytest.raises(InputError, match=r"holds a run of nad/fig1; runs of nad/fig6 are compared here"):
        finished_runs([str(lenet)], "nad/fig6", "sweep", ())
    run = Run.create(tmp_path / "r", configure("nad/fig1-patterns", overrides={"runs": (str(lenet),)}))
    with pytest.raises(InputError, match="1 network: two or more are compared"):
        execute(run)
