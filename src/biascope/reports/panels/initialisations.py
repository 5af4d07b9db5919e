"""How much a quantity differs between initialisations, so that given weights are not compared with one draw alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

COUNTS = (8, 4, 1)  # initialisations, as many as the time allows; of one there is no spread
ROUNDING = 1e-4  # by which equal values may differ, relative


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (NaN of one) of a quantity over `count` initialisations."""

    mean: float
    deviation: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of one value per initialisation; NaN (a network without a kernel) is left out."""
        known = [value for value in values if math.isfinite(value)]
        n, mean = len(known), math.fsum(known) / max(1, len(known))
        if n < 2:
            return cls(mean if n else math.nan, math.nan, 1)
        return cls(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (n - 1)), n)

    def side(self, value: float, error: float = 0.0, among: int = 1) -> int:
        """1: above what a further initialisation would give, -1: below, 0: within it, or not known (one, or NaN).

        Within is the 95 % interval of one more draw by Student's t (2.5 deviations for 8 initialisations: a mean and
        a deviation of so few are uncertain themselves), and two standard errors of the value. The largest of many
        values is out of it by chance: for one `among` so many the interval is wider (Bonferroni).
        """
        if self.count < 2:
            return 0
        draw = float(stats.t.ppf(1 - 0.025 / among, self.count - 1)) * math.sqrt(1 + 1 / self.count) * self.deviation
        limit = draw + 2 * error + ROUNDING * abs(self.mean)
        return int(value > self.mean + limit) - int(value < self.mean - limit)

    def __str__(self) -> str:
        """As the page says it."""
        if self.count == 1:
            return f"{self.mean:.3g} at one initialisation"
        digits = 2 if self.deviation <= 0 else min(6, max(0, 1 - math.floor(math.log10(self.deviation))))
        return f"{self.mean:.{digits}f} ± {self.deviation:.{digits}f} over {self.count} initialisations"
