"""Numbers with errors that several figures need: rank correlation, spread over directions, paired differences."""

import numpy as np
from scipy.stats import spearmanr

from biascope.studies.nad.directional import Array
from biascope.studies.result import Estimate, Verdict


def rank_correlation(x: Array, y: Array) -> Estimate:
    """Spearman correlation over points; its standard error by leaving one point out at a time.

    Example:
        >>> rank_correlation(np.arange(5.0), np.arange(5.0) ** 2)
        Estimate(value=1.0, standard_error=0.0, n=5)
    """
    whole, n = _spearman(x, y), len(x)
    if n < 4:
        return Estimate(whole, None, n)
    left = np.array([_spearman(np.delete(x, i), np.delete(y, i)) for i in range(n)])
    return Estimate(whole, float(np.sqrt((n - 1) / n * np.sum((left - left.mean()) ** 2))), n)


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
    error = float(np.sqrt((n - 1) / n * np.nansum((left - np.nanmean(left)) ** 2)))
    return Estimate(round(float(np.corrcoef(x, y)[0, 1]), 12), error, n)


def _spearman(x: Array, y: Array) -> float:
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # constant: no order
        return 0.0
    return round(float(spearmanr(x, y).statistic), 12)


def spread(values: Array, draws: int = 400, seed: int = 0) -> Estimate:
    """Standard deviation over directions, its error from resampling the directions.

    Example:
        >>> spread(np.array([1.0, 1.0, 1.0])).value
        0.0
    """
    n = len(values)
    pick = np.random.default_rng(seed).integers(0, n, (draws, n))
    resampled = values[pick].std(1, ddof=1) if n > 1 else np.zeros(draws)
    return Estimate(float(values.std(ddof=1)) if n > 1 else 0.0, float(resampled.std(ddof=1)), n)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a - b of independent estimates.

    Example:
        >>> print(difference(Estimate(3.0, 0.3), Estimate(1.0, 0.4)))
        2.00 ± 0.50
    """
    error = float(np.hypot(a.standard_error or 0.0, b.standard_error or 0.0))
    return Estimate(a.value - b.value, error, None)


def surely_above(estimate: Estimate, bar: float = 0.0) -> bool:
    """Whether an estimate exceeds a bar even two standard errors down (an unknown error is never sure).

    Example:
        >>> surely_above(Estimate(1.0, 0.4)), surely_above(Estimate(1.0, 0.6)), surely_above(Estimate(1.0))
        (True, False, False)
    """
    return estimate.standard_error is not None and estimate.value - 2 * estimate.standard_error > bar


def judged(holds: bool, *estimates: Estimate) -> Verdict:
    """The verdict of a rule on estimates: one without an error (too few points) tests nothing.

    Example:
        >>> judged(True, Estimate(-1.0, 0.1)), judged(False, Estimate(-1.0, 0.1)), judged(False, Estimate(-1.0))
        ('confirmed', 'not confirmed', 'not tested')
    """
    if any(each.standard_error is None for each in estimates):
        return "not tested"
    return "confirmed" if holds else "not confirmed"
