"""Nearest-neighbour estimators against a brute force in plain loops, closed forms, ties, labels and refusals."""

import math

import numpy as np
import pytest
import torch
from scipy.special import digamma
from torch import Tensor

import biascope.information.neighbours as module
from biascope.information import EstimateWarning
from biascope.information.neighbours import ksg, local_information
from biascope.information.problems import gaussian_problem, mixture_problem, sign_mixture_problem
from biascope.support.errors import InputError, UnsupportedError

F64 = torch.float64


def brute_force(x: np.ndarray, y: np.ndarray, k: int, algorithm: int) -> np.ndarray:
    """The definitions, one sample at a time."""
    n = len(x)
    out = []
    for i in range(n):
        dx = np.array([np.max(np.abs(x[i] - x[j])) for j in range(n) if j != i])
        dy = np.array([np.max(np.abs(y[i] - y[j])) for j in range(n) if j != i])
        both = np.maximum(dx, dy)
        nearest = np.argsort(both, kind="stable")[:k]
        if algorithm == 1:
            eps = both[nearest[-1]]
            if eps == 0:  # Gao et al.: count what is equal, oneself included
                same = np.sum(both == 0) + 1
                terms = digamma(same) - digamma(np.sum(dx == 0) + 1) - digamma(np.sum(dy == 0) + 1)
            else:
                terms = digamma(k) - digamma(np.sum(dx < eps) + 1) - digamma(np.sum(dy < eps) + 1)
        else:
            ex, ey = dx[nearest].max(), dy[nearest].max()
            terms = digamma(k) - 1 / k - digamma(np.sum(dx <= ex)) - digamma(np.sum(dy <= ey))
        out.append(terms + digamma(n))
    return np.array(out)


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize(("p", "q", "k"), [(1, 1, 1), (1, 1, 3), (2, 3, 4), (6, 5, 3)])
def test_trees_and_direct_distances_equal_the_brute_force(
    p: int, q: int, k: int, algorithm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(p + q)
    x = torch.randn(120, p, generator=rng, dtype=F64)
    y = x[:, :1] + torch.randn(120, q, generator=rng, dtype=F64)
    expected = torch.from_numpy(brute_force(x.numpy(), y.numpy(), k, algorithm))
    monkeypatch.setattr(module, "CELLS", 1000)  # many chunks
    for columns in (0, 100):  # all distances; trees
        monkeypatch.setattr(module, "TREE_COLUMNS", columns)
        assert torch.allclose(local_information(x, y, k, algorithm), expected, atol=1e-12)


def test_exact_ties_equal_the_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the samples lie on a grid of few points, the others do not."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 150, 1, generator=rng, dtype=F64)
    x[:75], y[:75] = x[:75].round(), y[:75].round()
    expected = torch.from_numpy(brute_force(x.numpy(), y.numpy(), 3, 1))
    for columns in (0, 100):
        monkeypatch.setattr(module, "TREE_COLUMNS", columns)
        assert torch.allclose(local_information(x, y, 3, 1), expected, atol=1e-12)
        with pytest.raises(InputError, match="algorithm=1"):
            local_information(x, y, 3, 2)


def test_all_ties_are_the_table() -> None:
    """Two variables on few points: the estimate tends to the information of the table of counts."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randint(2, (4000, 1), generator=rng).double()
    flip = (torch.rand(4000, 1, generator=rng) < 0.1).double()
    y = (x - flip).abs()
    truth = math.log(2) + 0.1 * math.log(0.1) + 0.9 * math.log(0.9)
    found = ksg(x, y)
    assert abs(found.nats - truth) < 4 * found.standard_error


@pytest.mark.parametrize(
    ("problem", "algorithm"),
    [
        (gaussian_problem(1, 0.5), 1),
        (gaussian_problem(1, 0.9), 1),
        (gaussian_problem(1, 0.9), 2),
        (gaussian_problem(2, -0.6), 1),
        (gaussian_problem(2, -0.6), 2),
        (gaussian_problem(1, 0.8, "tanh"), 1),
        (sign_mixture_problem(0.9), 1),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_closed_forms(problem: object, algorithm: int) -> None:
    x, y = problem.sample(5000, 0)  # type: ignore[attr-defined]
    found = ksg(x, y, algorithm=algorithm)
    assert abs(found.nats - problem.nats) < max(3 * found.standard_error, 0.03)  # type: ignore[attr-defined]
    assert not found.is_lower_bound
    assert found.standard_error < 0.04


def test_independence_gives_zero() -> None:
    x, y = torch.randn(2, 5000, 2, generator=torch.Generator().manual_seed(0))
    for algorithm in (1, 2):
        found = ksg(x, y, algorithm=algorithm)
        assert abs(found.nats) < max(3 * found.standard_error, 0.02)


def test_standard_errors_are_the_spread_over_data_sets() -> None:
    problem = gaussian_problem(1, 0.7)
    found = [ksg(*problem.sample(1000, seed)) for seed in range(60)]
    spread = float(np.std([f.nats for f in found], ddof=1))
    told = float(np.sqrt(np.mean([f.standard_error**2 for f in found])))
    assert 0.65 < told / spread < 1.5  # the spread itself is known to 9 %, two of them


def test_units_and_permutations_do_not_matter() -> None:
    x, y = gaussian_problem(2, 0.7).sample(600, 0)
    base = ksg(x, y)
    scaled = ksg(x * torch.tensor([1e3, -0.01]) + 5.0, 7.0 * y - 2.0)  # standardised columns: the same neighbours
    assert scaled.nats == pytest.approx(base.nats, abs=1e-9)
    assert ksg(y, x).nats == pytest.approx(base.nats, abs=1e-12)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    assert ksg(x[order], y[order]).nats == pytest.approx(base.nats, abs=1e-12)
    assert ksg(x.view(600, 1, 2), y.view(600, 2, 1)).nats == base.nats
    # without standardising, one scale for both variables changes nothing, different ones do
    raw = local_information(x, y).mean()
    assert float(local_information(4 * x, 4 * y).mean()) == float(raw)
    assert float(local_information(100 * x, y).mean()) != pytest.approx(float(raw), abs=1e-6)


def test_labels_give_the_estimator_of_ross(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mixture_problem(3, 2.0)
    x, y = problem.sample(300, 0)
    k, n = 3, 300
    terms = []
    for i in range(n):  # the k-th neighbour within the class; how many of all are closer
        d = (x[:, 0] - x[i, 0]).abs()
        own = d[(y == y[i]) & (torch.arange(n) != i)]
        radius = own.sort().values[k - 1]
        closer = int((d < radius).sum())  # with oneself
        terms.append(digamma(n) + digamma(k) - digamma(int((y == y[i]).sum())) - digamma(closer))
    for columns in (0, 100):
        monkeypatch.setattr(module, "TREE_COLUMNS", columns)
        assert ksg(x, y).nats == pytest.approx(np.mean(terms), abs=1e-12)
        assert ksg(y, x).nats == pytest.approx(np.mean(terms), abs=1e-12)
    assert ksg(x, 10 * y - 7).nats == pytest.approx(np.mean(terms), abs=1e-12)  # names of labels mean nothing
    large = ksg(*problem.sample(6000, 1))
    assert abs(large.nats - problem.nats) < 3 * large.standard_error


def test_labels_that_cannot_be_handled_are_refused() -> None:
    x, labels = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 2
    with pytest.raises(UnsupportedError, match="both x and y are labels"):
        ksg(labels, labels)
    with pytest.raises(UnsupportedError, match="algorithm=1"):
        ksg(x, labels, algorithm=2)
    rare = labels.clone()
    rare[:4] = 9
    with pytest.raises(InputError, match=r"label 9 of y has 4 of 200 samples.*at least 20"):
        ksg(x, rare)
    with pytest.raises(InputError, match="two labels or more"):
        ksg(x, torch.zeros(200, dtype=torch.long))


@pytest.mark.slow
def test_many_columns_are_far_too_low_and_say_so() -> None:
    x, y = gaussian_problem(20, 0.5).sample(5000, 0)
    with pytest.warns(EstimateWarning, match="20 \\+ 20 columns"):
        found = ksg(x, y)
    assert 0.5 < found.nats < 1.2  # the truth is 2.88
    assert any("columns" in note for note in found.notes)


def bad(index: int) -> Tensor:
    values = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    values[7, index] = float("nan")
    return values


def test_refusals_name_the_culprit() -> None:
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(1))
    with pytest.raises(InputError, match="y has NaN or infinite values in 1 rows, first in row 7"):
        ksg(x, bad(1))
    with pytest.raises(InputError, match=r"x is \[100, 2\] on cpu, y is \[90, 2\]"):
        ksg(x, x[:90])
    with pytest.raises(InputError, match="20 pairs are too few"):
        ksg(x[:20], x[:20])
    with pytest.raises(InputError, match="y is constant"):
        ksg(x, torch.full((100, 3), 0.1))
    with pytest.raises(InputError, match="k must be at least 1"):
        ksg(x, x, k=0)
    padded = torch.cat([x, torch.ones(100, 1)], 1)
    with pytest.warns(EstimateWarning, match=r"1 of 3 columns of x are constant \(first: 2\)"):
        found = ksg(padded, x.flip(0))
    assert found.nats == ksg(x, x.flip(0)).nats


def gaussian_pair(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlation 0.8: 0.511 nats."""
    x, noise = torch.randn(2, n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return x, 0.8 * x + 0.6 * noise


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("exponent", [-1020, -700, -30, 30, 700, 1018])
def test_no_unit_changes_the_estimate(exponent: int, algorithm: int) -> None:
    """Squares of 1e200 overflow: all x became 0 and the estimate 0, without a word; those of 1e-200 are 0."""
    x, y = gaussian_pair(400)
    scaled = ksg(x * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2), y, algorithm=algorithm)
    assert scaled.nats == ksg(x, y, algorithm=algorithm).nats
    assert scaled.notes == ()


def test_long_tails_are_told_and_keep_their_digits() -> None:
    """Information does not change with x^7 or e^(20 |x|); the estimate from neighbours does."""
    x, y = gaussian_pair(1000)
    for power in (5, 7, 9):
        with pytest.warns(EstimateWarning, match="long tails"):
            low = ksg(x.sign() * x.abs() ** power, y)
        assert low.nats < 0.45
    steep = x.sign() * (20 * x.abs()).exp()  # up to 1e30: minus their mean, most were one value
    with pytest.warns(EstimateWarning, match="1 of 2 columns of x have long tails .first: 1"):
        both = ksg(torch.stack([x, steep], 1), y)
    assert both.nats == pytest.approx(ksg(torch.stack([x, x * 0 + (x > 0)], 1), y).nats, abs=0.1)
    for fine in (x.exp(), x, torch.where(x > 1, x, 0.0)):  # log-normal; Gaussian; one value for most samples
        assert ksg(fine, y).notes == ()


def test_rounded_numbers_are_told() -> None:
    """The information of pairs rounded to 0.05 is 0.510; ties that count as near make it far more."""
    x, y = gaussian_pair(2000)
    with pytest.warns(EstimateWarning, match="rounded numbers"):
        high = ksg((x / 0.05).round() * 0.05, (y / 0.05).round() * 0.05)
    assert high.nats > 0.7
    noise = 0.05 * (torch.rand(2, 2000, generator=torch.Generator().manual_seed(1), dtype=F64) - 0.5)
    cured = ksg((x / 0.05).round() * 0.05 + noise[0], (y / 0.05).round() * 0.05 + noise[1])
    assert cured.notes == ()
    assert abs(cured.nats - 0.510) < 3 * cured.standard_error
    assert ksg(x.float(), y.float()).notes == ()
    assert ksg(x.round(), y.round()).notes == ()  # a table: many samples in every cell


def test_blocks_hold_enough_neighbours() -> None:
    """Ten blocks of 200 samples have no 300 neighbours, nor k + 1 samples of a label that 20 have: five, then."""
    x, y = gaussian_pair(2000)
    assert ksg(x, y, k=300).standard_error > 0
    label = (torch.arange(4000) < 20).long()
    found = []
    for seed in range(20):
        x = torch.randn(4000, generator=torch.Generator().manual_seed(seed), dtype=F64) + 3 * label
        found.append(ksg(x, label))
    spread = torch.tensor([f.nats for f in found]).std()
    stated = torch.tensor([f.standard_error for f in found]).mean()
    assert 0.5 < stated / spread < 1.5  # 0.28 with ten blocks, in which a label had two samples
