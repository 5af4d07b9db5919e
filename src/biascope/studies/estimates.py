"""Numbers with errors: what is sure, means over seeds, rank correlations, and curves of means."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.stats import norm, spearmanr
from scipy.stats import t as student
from torch import Tensor

from biascope.studies.result import Estimate, Series

Array = np.ndarray[Any, Any]
Rows = ArrayLike | Tensor | Sequence[Any]  # [repeats, points]


def sure(n: int | None) -> float:
    """How many standard errors make a statement sure on one side, at the level of two errors of a normal number.

    Student's t for the n repeats that an error comes from; two where nothing is known of them.

    Example:
        >>> [round(sure(n), 2) for n in (2, 3, 5, 30, None)]
        [13.97, 4.53, 2.87, 2.09, 2.0]
    """
    return 2.0 if n is None or n < 2 else float(student.ppf(norm.cdf(2.0), n - 1))


def above(estimate: Estimate, bar: float = 0.0) -> bool:
    """Whether an estimate surely lies above a bar (`sure`); an unknown error is never sure.

    Example:
        >>> above(Estimate(1.0, 0.4)), above(Estimate(1.0, 0.6)), above(Estimate(1.0)), above(Estimate(1.0, 0.4, n=3))
        (True, False, False, False)
    """
    error = estimate.standard_error
    return error is not None and estimate.value - sure(estimate.n) * error > bar


def below(estimate: Estimate, bar: float = 0.0) -> bool:
    """Whether an estimate surely lies below a bar (`sure`); an unknown error is never sure.

    Example:
        >>> below(Estimate(-1.0, 0.4)), below(Estimate(-1.0))
        (True, False)
    """
    error = estimate.standard_error
    return error is not None and estimate.value + sure(estimate.n) * error < bar


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a - b of independent estimates, with the repeats that Welch's formula gives; unknown where one of the errors is.

    Numbers of the same seeds or data are not independent: take `Estimate.of` their differences.

    Example:
        >>> print(difference(Estimate(3.0, 0.3), Estimate(1.0, 0.4)))
        2.00 ± 0.50
        >>> print(difference(Estimate(3.0, 0.3, 3), Estimate(1.0, 0.3, 3)))
        2.00 ± 0.42 (n = 5)
        >>> above(difference(Estimate(3.0), Estimate(1.0)))
        False
    """
    if a.standard_error is None or b.standard_error is None:
        return Estimate(a.value - b.value)
    error = math.hypot(a.standard_error, b.standard_error)
    return Estimate(a.value - b.value, error, _repeats(a, b, error))


def _repeats(a: Estimate, b: Estimate, error: float) -> int | None:
    """One more than the degrees of freedom of a difference, by Welch and Satterthwaite; None: as good as normal."""
    parts = [(e.standard_error or 0.0, e.n) for e in (a, b)]
    weights = [s**4 / (n - 1) for s, n in parts if n is not None and n > 1]
    return 1 + math.floor(error**4 / sum(weights) + 1e-9) if error > 0 and sum(weights) > 0 else None


def jackknife_error(left_out: ArrayLike) -> float:
    """Standard error of a number from its values [n] with one sample left out at a time.

    Example:
        >>> jackknife_error([2.5, 2.0, 1.5])  # means of 1, 2, 3 without one of them
        0.5773502691896257
    """
    values = np.asarray(left_out, dtype=float)
    return float(np.sqrt((len(values) - 1) * values.var()))


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Rank correlation of two lists; 0 where one of them is constant.

    Example:
        >>> spearman([1, 2, 3], [1.0, 4.0, 9.0]), spearman([1, 2, 3], [1.0, 1.0, 1.0])
        (1.0, 0.0)
    """
    if len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return 0.0
    found = float(spearmanr(x, y).statistic)
    return 0.0 if math.isnan(found) else round(found, 12)


def rank_correlation(x: ArrayLike, y: ArrayLike) -> Estimate:
    """Rank correlation over points; its standard error by leaving one point out at a time.

    The error is at least what exchanging two neighbours changes: ranks in perfect order are not known without error.

    Example:
        >>> rank_correlation(np.arange(5.0), np.arange(5.0) ** 2)
        Estimate(value=1.0, standard_error=0.1, n=5)
    """
    x, y = np.asarray(x), np.asarray(y)
    whole, n = spearman(x, y), len(x)
    if n < 4:
        return Estimate(whole, None, n)
    error = jackknife_error([spearman(np.delete(x, i), np.delete(y, i)) for i in range(n)])
    return Estimate(whole, max(error, 12 / (n**3 - n)), n)


def correlation(x: Array, y: Array) -> Estimate:
    """Pearson correlation over points; its standard error by leaving one point out at a time.

    Example:
        >>> correlation(np.arange(5.0), 2 * np.arange(5.0)).value
        1.0
    """
    n = len(x)
    if n < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Estimate(0.0, None, n)
    left = np.array([np.corrcoef(np.delete(x, i), np.delete(y, i))[0, 1] for i in range(n)])
    error = float(np.sqrt((n - 1) / n * np.nansum((left - np.nanmean(left)) ** 2)))  # NaN: constant without that point
    return Estimate(round(float(np.corrcoef(x, y)[0, 1]), 12), error, n)


def spread(values: Array, draws: int = 400, seed: int = 0) -> Estimate:
    """Standard deviation over samples, its error from resampling them.

    Example:
        >>> spread(np.array([1.0, 1.0, 1.0])).value
        0.0
    """
    n = len(values)
    pick = np.random.default_rng(seed).integers(0, n, (draws, n))
    resampled = values[pick].std(1, ddof=1) if n > 1 else np.zeros(draws)
    return Estimate(float(values.std(ddof=1)) if n > 1 else 0.0, float(resampled.std(ddof=1)), n)


def mean_of_ranks(correlations: Iterable[Any], points: int) -> Estimate:
    """Mean of rank correlations over that many points, one of each seed.

    The error is at least what exchanging two neighbours of one seed changes: seeds that agree in perfect order have no
    spread, and still their mean is not known without error.

    Example:
        >>> print(mean_of_ranks([1.0, 1.0], points=4))
        1.00 ± 0.10 (n = 2)
    """
    found = Estimate.of(correlations)
    if found.standard_error is None or found.n is None or points < 2:
        return found
    return replace(found, standard_error=max(found.standard_error, 12 / (points**3 - points) / found.n))


def rank_correlations(x: Sequence[float], rows: Sequence[Sequence[float]]) -> Estimate:
    """Rank correlation of x with each row [seeds, points]: error over seeds; of one seed, by leaving out one point.

    Example:
        >>> print(rank_correlations([1, 2, 3, 4, 5], [[1.0, 4.0, 9.0, 8.0, 9.5]]))
        0.90 ± 0.20 (n = 5)
    """
    if len(rows) == 1:
        return rank_correlation(x, rows[0])
    return mean_of_ranks([spearman(x, row) for row in rows], len(x))


def over_seeds(rows: Sequence[Sequence[float]] | Tensor) -> Estimate:
    """Mean of rows [seeds, tasks]. Errors are over seeds, tasks averaged first; those of one seed are over its tasks.

    Example:
        >>> print(over_seeds([[1.0, 3.0], [2.0, 6.0]]))
        3.0 ± 1.0 (n = 2)
        >>> print(over_seeds([[1.0, 3.0]]))
        2.0 ± 1.0 (n = 2)
    """
    table = torch.as_tensor(rows, dtype=torch.float64)
    return Estimate.of(table.mean(1) if len(table) > 1 else table[0])


def errors_over(seeds: int, tasks: int, of: str) -> str:
    """What the errors of `over_seeds` and `rank_correlations` are over, for the text.

    Example:
        >>> errors_over(3, 6, "directions"), errors_over(1, 6, "directions")
        ('errors over 3 seeds', 'one seed: errors over 6 directions of one network, not over trainings')
    """
    if seeds > 1:
        return f"errors over {seeds} seeds"
    if tasks > 1:
        return f"one seed: errors over {tasks} {of} of one network, not over trainings"
    return "one seed, no error bar: nothing is tested"


def mean_error(rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Mean and standard error over the rows (seeds, repeats), column by column; one row has no error.

    Example:
        >>> mean_error([[1.0, 2.0], [3.0, 2.0]])
        (tensor([2., 2.], dtype=torch.float64), tensor([1., 0.], dtype=torch.float64))
    """
    if isinstance(rows, Sequence):  # also of tensors
        rows = torch.stack([torch.as_tensor(row, dtype=torch.float64) for row in rows])
    table = torch.as_tensor(rows, dtype=torch.float64)
    return table.mean(0), table.std(0) / len(table) ** 0.5 if len(table) > 1 else None


def through(
    label: str,
    x: Iterable[float] | Tensor,
    estimates: Iterable[Estimate],
    style: Literal["line", "points", "dashed"] = "line",
) -> Series:
    """Estimates as a curve, with their standard errors where all have one.

    Example:
        >>> through("area", [5, 10], [Estimate(0.2, 0.1), Estimate(0.4, 0.1)]).error
        (0.1, 0.1)
    """
    found = list(estimates)
    errors = [e.standard_error for e in found if e.standard_error is not None]
    return Series.of(label, x, [e.value for e in found], errors if len(errors) == len(found) else None, style)


def curve(
    label: str,
    x: Iterable[float] | Tensor,
    rows: Rows,
    style: Literal["line", "points", "dashed"] = "line",
) -> Series:
    """Rows [repeats, points] as the curve of their mean, with its standard error.

    Example:
        >>> curve("loss", [0, 1], [[1.0, 2.0], [3.0, 2.0]]).y
        (2.0, 2.0)
    """
    return Series.of(label, x, *mean_error(rows), style)
